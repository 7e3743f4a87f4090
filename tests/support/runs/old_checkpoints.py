"""Small checkpoints of each layout in `tests/data/checkpoints`, written by one version and loaded by all later ones.

Run as a script, this file writes with the current version the layouts that a folder lacks:
`python tests/support/runs/old_checkpoints.py tests/data/checkpoints/0.1.0`. Existing checkpoints are never rewritten; if a layout
changes, add a folder for the next version.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accel_runtime import (
    Accelerator,
    DataLoaderConfiguration,
    GradScalerKwargs,
    LocalSGD,
    ProjectConfiguration,
)
from accel_runtime.utils import (
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    gather_object,
    load_fsdp_model,
    load_fsdp_optimizer,
    save_fsdp_model,
    save_fsdp_optimizer,
)

KEPT = sorted(
    path for path in (Path(__file__).parents[2] / "data" / "checkpoints").iterdir() if path.is_dir()
)
"""A folder for each version."""


class Stream(IterableDataset):
    """A stream of eight samples without a length."""

    def __iter__(self):
        return iter(torch.arange(24.0).view(8, 3) / 24)


class Note:
    """An object of the script."""

    def __init__(self):
        self.state = {"note": "", "numbers": []}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class Parallel(nn.Sequential):
    """A model with a tensor-parallel plan."""

    tp_plan = {"0": "colwise", "2": "rowwise"}  # noqa: RUF012

    def forward(self, x):
        return super().forward(x) * 1.0  # no view, of which torch warns


class Run:
    """A run that prepares, trains and saves a layout; each layout is a subclass with its differences."""

    size = 2
    """The world size that writes the checkpoint."""
    others = ()
    """Other world sizes that can load the checkpoint."""
    last = 1
    """The batch after which the checkpoint is saved, counted from 0."""
    continues = True
    """Whether the checkpoint has the full state of a run, so that training continues exactly."""
    has_random_states = True
    """Whether it has the random states of all ranks, so that dropout draws the same numbers."""

    def __init__(self, path):
        self.path = path
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.accelerator = Accelerator(cpu=True, **{"gradient_accumulation_steps": 2} | self.options())
        torch.manual_seed(1 + self.accelerator.process_index)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = self.make_model()
        optimizer = self.make_optimizer(model)
        scheduler = self.make_scheduler(optimizer)
        self.note = Note()
        self.accelerator.register_for_checkpointing(self.note)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(model, optimizer, scheduler)
        self.loader = self.prepare_loader(self.make_loader())

    def options(self):
        return {}

    def make_model(self):
        first = nn.Linear(3, 4)
        # BatchNorm cancels this bias: its gradient is rounding error, which Adam scales to steps that differ between CPUs.
        first.bias.register_hook(torch.zeros_like)
        return nn.Sequential(first, nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 1))

    def make_optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=0.1)

    def make_scheduler(self, optimizer):
        return StepLR(optimizer, 1, 0.5)

    def make_loader(self):
        return DataLoader(samples(), batch_size=2, shuffle=True)

    def prepare_loader(self, loader):
        return self.accelerator.prepare(loader)

    def make_note(self, layout):
        return {"note": layout, "numbers": [1, 2.5, torch.arange(3).tolist()]}

    def backward(self, batch):
        self.accelerator.backward(self.model(inputs_of(batch)).square().mean())

    def learn(self, batch):
        """Train on a batch."""
        with self.accelerator.accumulate(self.model):
            self.backward(batch)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()

    def gather(self, batch):
        """Return the samples of all ranks."""
        return self.accelerator.gather_for_metrics(inputs_of(batch)).tolist()

    def save(self):
        """Write the checkpoint."""
        self.accelerator.save_state(self.path)

    def load(self):
        """Continue from the checkpoint, and compare its checksums."""
        found = self.accelerator.resume(self.path)
        self.accelerator.checkpoints.verify(found.path)

    def facts(self):
        """Return the state that a checkpoint restores, as JSON."""
        state = self.accelerator.get_state_dict(self.model)
        return {
            "model": numbers_of(state),
            "steps": self.optimizer.steps,
            "rate": self.scheduler.get_last_lr(),
            "note": self.note.state,
        }

    def draw(self):
        """Return a random number of each generator, on all ranks."""
        return gather_object([[torch.rand(()).item(), random.random(), np.random.rand()]])  # noqa: NPY002


class One(Run):
    size = 1
    others = (2,)


class Two(Run):
    """Buffers that differ between ranks."""


class OfStream(Run):
    others = (1,)

    def make_loader(self):
        return DataLoader(Stream(), batch_size=2)


class OpenCycle(Run):
    """Saved within an accumulation cycle."""

    others = (1,)
    last = 2


class SavedByOneRank(Run):
    """Saved by the first rank only."""

    def save(self):
        if self.accelerator.is_main_process:
            super().save()

    has_random_states = False


class Sharded(Run):
    def options(self):
        return {"parallelism_config": ParallelismConfig(dp_shard_size=2)}

    def make_model(self):
        return normed_by_layer()


class Three(Run):
    """Ranks between which the order of a sum matters."""

    size = 3
    others = (1,)

    def make_optimizer(self, model):
        return momentum(model)


class Float16(Run):
    """A loss scaler that has grown and has skipped a step."""

    size = 1
    others = (2,)
    last = 5

    def options(self):
        scaler = GradScalerKwargs(init_scale=8.0, growth_interval=2)
        return {"mixed_precision": "fp16", "kwargs_handlers": [scaler], "gradient_accumulation_steps": 1}

    def make_model(self):
        return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1))

    def backward(self, batch):
        loss = self.model(inputs_of(batch)).float().square().mean()
        self.accelerator.backward(loss * float("inf") if self.optimizer.steps == 1 else loss)

    def facts(self):
        return super().facts() | {"scaler": self.accelerator.scaler.state_dict()}


class Dispatched(Run):
    """The first rank reads for all."""

    others = (3,)

    def options(self):
        return {"dataloader_config": DataLoaderConfiguration(dispatch_batches=True)}


class DispatchedStream(Dispatched):
    def make_model(self):
        return normed_by_layer()

    def make_loader(self):
        return DataLoader(Stream(), batch_size=1)


class Workers(Run):
    """A stream that processes of the loader read."""

    others = (1,)

    def make_model(self):
        return normed_by_layer()

    def make_loader(self):
        return DataLoader(Stream(), batch_size=1, num_workers=2)


class Presharded(Run):
    """Each rank has other data."""

    def make_loader(self):
        return DataLoader(
            TensorDataset(samples().tensors[0][self.accelerator.process_index :: 2]), 2, shuffle=True
        )

    def prepare_loader(self, loader):
        return self.accelerator.prepare_data_loader(loader, data="sharded")


class Batches(Run):
    """Batches of any size, without padding, in the order of a generator of the script."""

    others = (1, 3)

    def options(self):
        return {"dataloader_config": DataLoaderConfiguration(even_batches=False)}

    def make_model(self):
        return normed_by_layer()

    def make_loader(self):
        generator = torch.Generator().manual_seed(5)
        sampler = torch.utils.data.RandomSampler(range(15), generator=generator)
        return DataLoader(samples(), batch_sampler=torch.utils.data.BatchSampler(sampler, 2, drop_last=False))


class Seeded(Run):
    """The order of an epoch follows from a seed, and the checkpoint is one between two epochs."""

    last = 3
    others = (1,)

    def options(self):
        return {"dataloader_config": DataLoaderConfiguration(use_seedable_sampler=True, data_seed=7)}


class Rich(Run):
    """Values of every kind, several groups of parameters, tied weights, and other number formats."""

    size = 1

    def make_model(self):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1, dtype=torch.bfloat16))
        model[1].weight = model[0].weight
        model[1].bias.requires_grad_(requires_grad=False)
        model.register_buffer("phase", torch.tensor([1 + 2j, -3j]))
        model.register_buffer("mask", torch.tensor([True, False]))
        model.register_buffer("empty", torch.zeros(0, 2, dtype=torch.int16))
        model.register_buffer("small", torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fn))
        return model

    def make_optimizer(self, model):
        groups = [
            {"params": model[0].parameters(), "weight_decay": 0.5},
            {"params": model[2].parameters(), "lr": 0.3},
        ]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    def make_scheduler(self, optimizer):
        later = OneCycleLR(optimizer, [0.2, 0.4], total_steps=40)
        return SequentialLR(optimizer, [LambdaLR(optimizer, lambda step: 1 / (1 + step)), later], [2])

    def make_note(self, layout):
        return {
            "tuple": (1, (2.5, "x")),
            "sets": [{1, 2}, frozenset({"a"})],
            "bytes": [b"\0\xff", bytearray(b"ab")],
            "floats": [float("inf"), -0.0, 1e-300, 2**70, 3 + 4j],
            "torch": [
                torch.float16,
                torch.device("cpu"),
                torch.arange(3),
                torch.tensor(1.5, dtype=torch.bfloat16),
            ],
            "numpy": [np.arange(4).reshape(2, 2), np.float32(0.1), np.int8(-3)],
            "path": Path("a/b"),
            "keys": {1: "one", (2, "b"): None},
            "containers": [Counter("aab"), OrderedDict(b=1, a=2), deque([1, 2], 3), defaultdict(list, x=[1])],
            "#": {"$": "escaped", "a/b.c": torch.ones(2)},
            "layout": layout,
        }

    def backward(self, batch):
        hidden = self.model[1](self.model[0](inputs_of(batch)))
        self.accelerator.backward(self.model[2](hidden.bfloat16()).float().square().mean())

    def facts(self):
        numpy = [[type(value).__name__, value.tolist()] for value in self.note.state.get("numpy", ())]
        return super().facts() | {"note": repr(self.note.state | {"numpy": numpy})}


class Several(Run):
    """Two models, optimizers, schedulers, loaders and objects; saved inside the loop over the first loader."""

    others = (1,)

    def __init__(self, path):
        super().__init__(path)
        self.second_note = Note()
        self.accelerator.register_for_checkpointing(self.second_note)
        second = nn.Linear(3, 2)
        with torch.no_grad():
            second.weight.copy_(torch.arange(6.0).view(2, 3) / 6)
            second.bias.zero_()
        optimizer = torch.optim.Adagrad(second.parameters(), lr=0.2)
        plateau = ReduceLROnPlateau(optimizer, patience=1)
        self.second, self.second_optimizer, self.plateau, self.evaluation = self.accelerator.prepare(
            second, optimizer, plateau, DataLoader(Stream(), 2)
        )

    def make_optimizer(self, model):
        return momentum(model)

    def learn(self, batch):
        with self.accelerator.accumulate(self.model, self.second):
            self.backward(batch)
            self.accelerator.backward(self.second(inputs_of(batch)).square().mean())
            for optimizer in (self.optimizer, self.second_optimizer):
                optimizer.step()
                optimizer.zero_grad()
            self.scheduler.step()
        seen = sum(len(self.gather(samples)) for samples in self.evaluation)
        if self.accelerator.sync_gradients:  # those versions dropped the metrics of other steps
            self.plateau.step(1.0)
        self.second_note.state = {"seen": self.second_note.state.get("seen", 0) + seen}

    def facts(self):
        return super().facts() | {
            "second": numbers_of(self.accelerator.get_state_dict(self.second)),
            "rates": [group["lr"] for group in self.second_optimizer.param_groups],
            "plateau": self.plateau.scheduler.num_bad_epochs,
            "second_steps": self.second_optimizer.steps,
            "second_note": self.second_note.state,
        }


class Sparse(Run):
    """Half-way through an accumulation cycle with sparse gradients."""

    size = 1
    last = 2

    def make_model(self):
        return nn.Sequential(nn.Embedding(16, 3, sparse=True), nn.Linear(3, 1))

    def make_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def make_loader(self):
        return DataLoader(TensorDataset(torch.arange(16)), batch_size=2, shuffle=True)


class Weighted(OpenCycle):
    """Half-way through an accumulation cycle with weights that differ from rank to rank."""

    others = ()

    def make_optimizer(self, model):
        return momentum(model)

    def backward(self, batch):
        weight = 1 + self.accelerator.process_index
        self.accelerator.backward(self.model(inputs_of(batch)).square().sum(), weight=weight)


class Averaged(Run):
    """Weights that each rank trains for itself, and that are not averaged yet."""

    def options(self):
        return {"gradient_accumulation_steps": 1}

    def make_model(self):
        return nn.Linear(3, 1)

    def learn(self, batch):
        if not hasattr(self, "local"):
            self.local = LocalSGD(self.accelerator, self.model, local_sgd_steps=100).__enter__()
        super().learn(batch)
        self.local.step()


class ShardedOpenCycle(Sharded):
    """Half-way through an accumulation cycle: gradients of the whole model on each rank; a frozen and an ignored layer."""

    last = 2

    def options(self):
        plugin = FullyShardedDataParallelPlugin(ignored_modules="1", activation_checkpointing=True)
        return {"fsdp_plugin": plugin, "mixed_precision": "bf16"}

    def make_model(self):
        model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 5), nn.Linear(5, 1))
        model[2].requires_grad_(requires_grad=False)
        return model

    def make_optimizer(self, model):
        return momentum(model)


class TensorParallel(Run):
    others = (1,)

    def options(self):
        return {"parallelism_config": ParallelismConfig(tp_size=2)} if self.world_size > 1 else {}

    def make_model(self):
        return Parallel(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


class Mesh(TensorParallel):
    """Sharded over pairs of ranks that divide every layer."""

    size = 4
    others = (1, 2)

    def options(self):
        sizes = {"dp_shard_size": self.world_size // 2, "tp_size": 2}
        return {"parallelism_config": ParallelismConfig(**sizes)} if self.world_size > 1 else {}


class Background(Run):
    """Saved in the background under a name of accel's, with a file of a hook."""

    others = (1,)

    def options(self):
        project = ProjectConfiguration(
            self.path, automatic_checkpoint_naming=True, total_limit=2, async_save=True
        )
        return {"project_config": project}

    def save(self):
        self.accelerator.register_save_state_pre_hook(write_note)
        self.accelerator.save_state()
        self.accelerator.wait_for_checkpoint()

    def load(self):
        found = self.accelerator.resume(self.accelerator.checkpoints.newest().path)
        assert self.accelerator.checkpoints.verify(found.path).number == 0
        assert (found.path / "notes" / "hook.txt").read_text() == "a hook of the script\n"


class Exported(Sharded):
    """Files that other programs read: a sharded model with tied weights, its optimizer, and objects."""

    others = (1,)
    continues = False

    def options(self):
        return {"parallelism_config": ParallelismConfig(dp_shard_size=2)} if self.world_size > 1 else {}

    def make_model(self):
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 3, bias=False))
        model[2].weight = model[1].weight
        return model

    def make_loader(self):
        return DataLoader(TensorDataset(torch.arange(64.0).view(16, 4) / 64), batch_size=2)

    def save(self):
        accelerator, model, path = self.accelerator, self.model, self.path
        accelerator.save_model(model, f"{path}/safetensors", max_shard_size="40B")
        state = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            Path(path, "bin").mkdir()
        accelerator.save(state, f"{path}/bin/pytorch_model.bin")
        save_fsdp_model(None, accelerator, model, path)
        save_fsdp_optimizer(None, accelerator, self.optimizer, model, path)
        accelerator.save(self.objects(), f"{path}/objects.bin")
        accelerator.save({"numbers": torch.arange(3)}, f"{path}/objects.safetensors", safe_serialization=True)
        accelerator.wait_for_everyone()

    def load(self):
        accelerator, model, path = self.accelerator, self.model, self.path
        wanted = (
            numbers_of(accelerator.load(f"{path}/bin/pytorch_model.bin"))
            if accelerator.is_main_process
            else {}
        )
        for load in (
            lambda: accelerator.load_model(model, f"{path}/safetensors"),
            lambda: load_fsdp_model(None, accelerator, model, path),
        ):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            load()
            assert numbers_of(accelerator.get_state_dict(model)) == wanted
        load_fsdp_optimizer(None, accelerator, self.optimizer, model, path)
        found = accelerator.load(f"{path}/objects.bin")
        assert str(found) == str(self.objects())
        assert accelerator.load(f"{path}/objects.safetensors")["numbers"].tolist() == [0, 1, 2]

    def objects(self):
        return {"list": [1, 2.5, None, "x"], "tensor": torch.arange(4).view(2, 2), "keys": {1: (2, 3)}}

    def facts(self):
        moments = [
            value["exp_avg"].full_tensor() if hasattr(value["exp_avg"], "full_tensor") else value["exp_avg"]
            for value in self.optimizer.state.values()
        ]
        model = numbers_of(self.accelerator.get_state_dict(self.model))
        return {"model": model, "moments": [round(float(moment.sum()), 5) for moment in moments]}


LAYOUTS = {
    "one": One,
    "two": Two,
    "stream": OfStream,
    "open-cycle": OpenCycle,
    "saved-by-one-rank": SavedByOneRank,
    "sharded": Sharded,
    "three": Three,
    "float16": Float16,
    "dispatched": Dispatched,
    "dispatched-stream": DispatchedStream,
    "workers": Workers,
    "presharded": Presharded,
    "batches": Batches,
    "seeded": Seeded,
    "rich": Rich,
    "several": Several,
    "sparse": Sparse,
    "weighted": Weighted,
    "averaged": Averaged,
    "sharded-open-cycle": ShardedOpenCycle,
    "tensor-parallel": TensorParallel,
    "mesh": Mesh,
    "background": Background,
    "exported": Exported,
}
"""The layouts that have checkpoints."""


def samples():
    return TensorDataset(torch.arange(48.0).view(16, 3) / 48)


def normed_by_layer():
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Dropout(0.1), nn.Linear(4, 1))


def momentum(model):
    """Return an optimizer whose steps, unlike those of Adam, show the size of gradients that were saved."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def inputs_of(batch):
    """Return the samples of a batch."""
    return batch if torch.is_tensor(batch) else batch[0]


def numbers_of(state):
    """Return tensors as JSON."""
    return {name: tensor.float().tolist() if tensor.dtype.is_floating_point else str(tensor.tolist())
            if tensor.dtype.is_complex else tensor.tolist() for name, tensor in sorted(state.items())}  # fmt: skip


def write_note(_models, _weights, folder):
    """Write a file into a checkpoint, as hooks of scripts do."""
    Path(folder, "notes").mkdir(exist_ok=True)
    Path(folder, "notes", "hook.txt").write_text("a hook of the script\n")


def write(folder, layout):
    """Train a few steps, save, and write the expected state next to the checkpoint; called on each rank.

    That is the state at that moment, and of training that continues the samples, a random number of each generator on every
    rank, and the state at the end of the epoch.
    """
    run = LAYOUTS[layout](f"{folder}/{layout}")
    run.note.state = run.make_note(layout)
    facts = {}
    for step, batch in enumerate(run.loader):
        if step > run.last:
            facts["rest"] += run.gather(batch)
        run.learn(batch)
        if step == run.last:
            facts = run.facts() | {"rest": []}
            run.save()
            facts["draws"] = run.draw()
    facts["after"] = run.facts()
    if run.accelerator.is_main_process:
        Path(folder, f"{layout}.json").write_text(json.dumps(facts, indent=1) + "\n")
    run.accelerator.wait_for_everyone()


def read(folder, layout):
    """Load a checkpoint of `write` and compare the state with the expected one; called on each rank."""
    run = LAYOUTS[layout](f"{folder}/{layout}")
    wanted = json.loads(Path(folder, f"{layout}.json").read_text())
    rest, draws, trained = wanted.pop("rest"), wanted.pop("draws", None), wanted.pop("after", None)
    before = run.facts()
    run.load()
    after = run.facts()
    as_written = run.world_size == run.size
    if run.accelerator.is_main_process:
        # Buffers differ between ranks, and only the first rank has the full state of a sharded model.
        assert before != wanted
        compare(after, wanted, 0 if as_written else 1e-6)
    if not run.continues:
        return True
    draws_the_same = as_written and run.has_random_states
    if draws and draws_the_same:
        assert run.draw() == draws
    found = []
    for batch in run.loader:
        found.append(run.gather(batch))
        if trained:
            run.learn(batch)
    assert list(chain.from_iterable(found)) == rest
    if trained and draws_the_same:
        after = run.facts()
        if run.accelerator.is_main_process:
            compare(after, trained, 1e-4)
    for batch in run.loader:
        run.learn(batch)
    return True


def compare(actual, expected, tolerance, path=""):
    """Fail if numbers differ by more than a tolerance, or other values at all."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), path
        actual, expected = [[item[key] for key in expected] for item in (actual, expected)]
    if isinstance(expected, list):
        assert len(actual) == len(expected), path
        for index, (actual_item, expected_item) in enumerate(zip(actual, expected, strict=True)):
            compare(actual_item, expected_item, tolerance, f"{path}/{index}")
    elif isinstance(expected, float):
        assert abs(actual - expected) <= tolerance * (1 + abs(expected)), (path, actual, expected)
    else:
        assert actual == expected, path


if __name__ == "__main__":
    import cloudpickle
    from support.ranks import INTERPRETER, Cluster
    from support.ranks import Alone as AloneHere

    cloudpickle.register_pickle_by_value(sys.modules["__main__"])
    target = Path(sys.argv[1]).absolute()
    target.mkdir(parents=True, exist_ok=True)
    for name, kind in LAYOUTS.items():
        if (target / f"{name}.json").exists():
            continue
        ranks = Cluster(kind.size) if kind.size > 1 else AloneHere()
        ranks.run(write, str(target), name)
        ranks.close()
    INTERPRETER.close()
