"""What some processes wrote is read on any number of them, replicated or sharded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from recorded_runs import Samples, Script, begun, learn, numbers
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.data import DataLoader

from accel_runtime import Accelerator, DataLoaderConfiguration, GradientAccumulationPlugin
from accel_runtime.checkpoint.filesystem import FileSystem
from accel_runtime.checkpoint.load import LoadOperation
from accel_runtime.checkpoint.save import SaveOperation
from accel_runtime.checkpoint.state_items import ModelItem, OptimizerItem
from accel_runtime.optimizer import PreparedOptimizer
from accel_runtime.training.gradients import name_parameters

STEPS, EPOCHS = 4, 2


def split():
    plugin = GradientAccumulationPlugin(num_steps=3)
    config = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True)
    return {"dataloader_config": config, "gradient_accumulation_plugin": plugin}


def training():
    """24 samples in global batches of 12 over 1, 2, 3, 4 processes: equal gradients on all."""
    return Script(
        options=split,
        model=lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)),
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.01),
        loader=lambda data: DataLoader(data, batch_size=12, shuffle=True),
        dataset=lambda: Samples(48),
    )


def rest(run, walk=None):
    """What follows, as all ranks together see it; `walk` is the rest of the epoch under way."""
    seen = []
    first = run.loader.epoch
    for epoch in range(first, EPOCHS):
        for batch in walk if walk is not None and epoch == first else run.loader:
            loss = learn(run, batch)
            whole = run.accelerator.gather_for_metrics(batch[0]).tolist()
            mean = run.accelerator.reduce(torch.tensor(loss), "mean").item()
            flags = run.accelerator.gather(torch.tensor([int(run.accelerator.sync_gradients)])).tolist()
            seen.append((whole, mean, flags, run.scheduler.get_last_lr()[0], run.optimizer.steps))
    model = run.accelerator.unwrap_model(run.model)
    return seen, [p.detach().tolist() for p in model.parameters()], torch.rand(2).tolist()


def written(folder, steps):
    run = begun(training(), 5)
    walk = iter(run.loader)
    for _ in range(steps):
        learn(run, next(walk))
    run.accelerator.save_state(folder)
    # What an uninterrupted run sees goes on in the open walk.
    return rest(run, walk)


def read(folder):
    run = begun(training(), 77)
    run.accelerator.resume(folder)
    return rest(run)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (3, 2), (2, 3), (3, 1), (1, 3)])
@pytest.mark.parametrize("steps", [2, 3])
def test_another_number_of_processes_goes_on_with_the_same_global_batches(
    clusters, before, after, steps, tmp_path
):
    """Half-way through a window (2 of 3), and at its end."""
    (seen, weights, _), *_ = clusters[before].run(written, str(tmp_path / "saved"), steps)
    draws = []
    for again, loaded, drawn in clusters[after].run(read, str(tmp_path / "saved")):
        assert [step[0] for step in again] == [step[0] for step in seen]
        assert [step[1] for step in again] == pytest.approx([step[1] for step in seen], abs=1e-5)
        assert [(set(step[2]), *step[3:]) for step in again] == [(set(step[2]), *step[3:]) for step in seen]
        for one, other in zip(loaded, weights, strict=True):
            assert torch.allclose(torch.tensor(one), torch.tensor(other), atol=1e-5)
        draws.append(tuple(drawn))
    assert len(set(draws)) == after, "every rank has a stream of its own"


@pytest.mark.slow
def test_what_four_wrote_is_read_on_fewer_and_more(clusters, four, tmp_path):
    (seen, *_), *_ = four.run(written, str(tmp_path / "saved"), 2)
    for after in (1, 2, 3):
        for again, *_ in clusters[after].run(read, str(tmp_path / "saved")):
            assert [step[0] for step in again] == [step[0] for step in seen]


def with_own_batches(folder, load):
    script = Script(loader=lambda data: DataLoader(data, batch_size=2), dataset=lambda: Samples(48))
    run = begun(script, 5)
    if load:
        run.accelerator.resume(folder)
        return run.accelerator.gather_for_metrics(next(iter(run.loader))[0]).tolist()[0]
    walk = iter(run.loader)
    for _ in range(3):
        learn(run, next(walk))
    run.accelerator.save_state(folder)
    return None


def test_the_position_counts_samples(clusters, tmp_path):
    clusters[2].run(with_own_batches, str(tmp_path / "saved"), False)
    for after in (1, 2, 3):
        assert set(clusters[after].run(with_own_batches, str(tmp_path / "saved"), True)) == {12}


def with_buffers(folder, load):
    """BatchNorm buffers that differ from rank to rank."""
    accelerator = Accelerator()
    model = accelerator.prepare(nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1)))
    norm = accelerator.unwrap_model(model)[0]
    if load:
        accelerator.load_state(folder)
    else:
        norm.running_mean.fill_(accelerator.process_index + 1)
        accelerator.save_state(folder)
    return norm.running_mean.item()


def test_buffers_that_differ_are_each_ranks_own_or_those_of_the_first(clusters, tmp_path):
    folder = str(tmp_path / "saved")
    assert clusters[3].run(with_buffers, folder, False) == [1, 2, 3]
    assert clusters[3].run(with_buffers, folder, True) == [1, 2, 3]
    assert clusters[2].run(with_buffers, folder, True) == [1, 1]
    assert clusters[1].run(with_buffers, folder, True) == [1]


# Sharded -----------------------------------------------------------------------------------


class Net(nn.Module):
    """Rows that no number of processes divides, and a parameter smaller than the world."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.second = nn.Linear(5, 7, bias=False)
        self.gain = nn.Parameter(torch.ones(1))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, inputs):
        return self.second(torch.tanh(self.first(inputs))).sum() * self.gain.sum()


def net(kind, seed):
    """The model and optimizer, trained a step; the gradients are the same whatever the world."""
    Accelerator()  # the processes know each other
    torch.manual_seed(seed)
    model = Net()
    optimizer = None
    if kind == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    elif kind == "tensor":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module, place in ((model.first, Shard(0)), (model.second, Shard(1))):
            for name, parameter in list(module.named_parameters()):
                setattr(module, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [place])))
    elif kind == "both":
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("copies", "parts"))
        for module in (model.first, model.second):
            for name, parameter in list(module.named_parameters()):
                whole = distribute_tensor(parameter.detach(), mesh, [Replicate(), Shard(0)])
                setattr(module, name, nn.Parameter(whole))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.manual_seed(seed + 1)
    for parameter in model.parameters():
        full = torch.randn(parameter.shape)
        if isinstance(parameter, DTensor):
            full = distribute_tensor(full, parameter.device_mesh, parameter.placements)
        parameter.grad = full
    optimizer.step()
    return model, optimizer


def items(model, optimizer):
    prepared = object.__new__(PreparedOptimizer)
    prepared.optimizer = optimizer
    names = name_parameters([model], [optimizer], lambda one: one)
    return [ModelItem("model", model), OptimizerItem("optimizer", prepared, names)]


def whole(model, optimizer):
    """Everything, gathered."""

    def full(value):
        return value.full_tensor() if isinstance(value, DTensor) else value

    state = {name: full(value) for name, value in model.state_dict().items()}
    moments = {
        name: {key: full(value) for key, value in optimizer.state[p].items()}
        for name, p in model.named_parameters()
    }
    return numbers({"model": state, "optimizer": moments})


def share():
    accelerator = Accelerator()
    return accelerator._build_all_gather("test"), accelerator.process_index, accelerator.num_processes


def put(folder, kind, disk=FileSystem, shared=True):
    model, optimizer = net(kind, 1)
    saving = SaveOperation(*share(), disk(), shared=shared)
    saving.begin(lambda: Path(folder))
    saving.collect(items(model, optimizer), 1)
    mine = sum(item.tensor_storage_size() for item in saving._local_plan.items)
    saving.finish(share()[0])
    return whole(model, optimizer), mine


class Elsewhere(FileSystem):
    """Of a machine that does not see what the first one has made."""

    looks = 0
    made = False
    """Whether it has one of the same name, once it was made here too."""

    def sees(self, _):
        self.looks += 1
        return dist.get_rank() == 0 or (self.made and self.looks > 1)


def hooked_apart(folder):
    """A hook that writes on every machine."""
    accelerator = Accelerator()
    accelerator.prepare(nn.Linear(1, 1))
    accelerator.settings = replace(accelerator.settings, shared_files=False)
    accelerator._file_system = Elsewhere()
    accelerator._file_system.made = True
    accelerator.save_state(folder)


def window_apart(folder, load):
    """Gradients of half a window, of which each rank has its own, larger than what is sent otherwise."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = accelerator.prepare(nn.Linear(300, 100))
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.settings = replace(accelerator.settings, shared_files=False)
    accelerator._file_system = Elsewhere()

    def learned(number):
        torch.manual_seed(10 * number + accelerator.process_index)
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.randn(4, 300)).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    if load:
        accelerator.load_state(folder)
    else:
        learned(1)
        accelerator.save_state(folder)
    learned(2)
    return [p.detach().sum().item() for p in model.parameters()]


def got(folder, kind):
    model, optimizer = net(kind, 2)
    loading = LoadOperation(*share(), strict=True)
    loading.load(loading.open(lambda: Path(folder), folder), items(model, optimizer))
    assert any(isinstance(p, DTensor) for p in model.parameters()) == (kind != "replicated")
    return whole(model, optimizer)


def once(folder):
    """Every element of every tensor lies in one chunk, and the files hold nothing else."""
    manifest = json.loads((Path(folder) / "checkpoint.json").read_text())["checkpoint"]
    for name, stored in manifest["tensors"].items():
        seen = torch.zeros(stored["shape"], dtype=torch.int32)
        for chunk in stored["chunks"]:
            box = tuple(slice(o, o + s) for o, s in zip(chunk["offsets"], chunk["sizes"], strict=True))
            seen[box] += 1
        assert bool((seen == 1).all()), name
    return manifest


def warm():
    """What torch imports at the first use of shards."""
    import torch._dynamo  # noqa: F401


@pytest.fixture(scope="module")
def sharding(clusters):
    """Processes that have imported what takes seconds."""
    for size in (2, 3):
        clusters[size].run(warm)
    return clusters


@pytest.mark.parametrize("kind", ["fsdp", "tensor"])
def test_shards_are_read_as_shards_and_whole(sharding, kind, tmp_path):
    folder = str(tmp_path / "saved")
    outcomes = sharding[3].run(put, folder, kind)
    want = outcomes[0][0]
    once(folder)
    assert max(mine for _, mine in outcomes) < sum(mine for _, mine in outcomes) * 0.6
    assert sharding[2].run(got, folder, kind) == [want] * 2
    assert sharding[3].run(got, folder, kind) == [want] * 3
    assert sharding[2].run(got, folder, "replicated") == [want] * 2
    assert read_alone(folder) == want


def read_alone(folder):
    """On one process, without a group."""
    torch.manual_seed(2)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loading = LoadOperation(lambda item: [item], 0, 1, strict=True)
    loading.load(loading.open(lambda: Path(folder), folder), items(model, optimizer))
    return whole(model, optimizer)


def test_what_was_replicated_is_read_as_shards(sharding, tmp_path):
    folder = str(tmp_path / "saved")
    want = sharding[2].run(put, folder, "replicated")[0][0]
    once(folder)
    assert sharding[3].run(got, folder, "fsdp") == [want] * 3
    assert sharding[3].run(got, folder, "tensor") == [want] * 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp", "both"])
def test_shards_of_four_are_read_on_fewer(sharding, four, kind, tmp_path):
    folder = str(tmp_path / "saved")
    four.run(warm)
    want = four.run(put, folder, kind)[0][0]
    once(folder)
    for size in (2, 3):
        assert sharding[size].run(got, folder, "fsdp") == [want] * size
    assert four.run(got, folder, "both") == [want] * 4
    assert read_alone(folder) == want


# Other tools -------------------------------------------------------------------------------


def safetensors_of(folder, item):
    from safetensors.torch import load_file

    found = {}
    for path in sorted(Path(folder).glob(f"{item}.safetensors")) + sorted(
        Path(folder).glob(f"{item}-*-of-*.safetensors")
    ):
        found |= load_file(path)
    return found


def test_safetensors_reads_a_replicated_model(clusters, tmp_path):
    folder = str(tmp_path / "saved")
    want = clusters[2].run(put, folder, "replicated")[0][0]
    assert numbers(safetensors_of(folder, "model")) == want["model"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_sharded_models(sharding, tmp_path):
    folder = tmp_path / "saved"
    want = sharding[3].run(put, str(folder), "fsdp")[0][0]
    only = tmp_path / "only"
    only.mkdir()
    for path in folder.glob("model*.safetensors"):
        (only / path.name).symlink_to(path)
    state = Net().state_dict()
    torch.distributed.checkpoint.load(state, storage_reader=HuggingFaceStorageReader(str(only)), no_dist=True)
    assert numbers(dict(state)) == want["model"]


def test_where_machines_share_no_files_the_first_one_writes_all_and_the_others_nothing(clusters, tmp_path):
    told = clusters[2].run(put, str(tmp_path / "saved"), "replicated", Elsewhere, False)
    assert [mine == 0 for _, mine in told] == [False, True]
    once(tmp_path / "saved")
    assert clusters[2].run(got, str(tmp_path / "saved"), "replicated") == [told[0][0]] * 2


def test_what_each_rank_has_for_itself_is_sent_to_the_machine_that_writes(clusters, tmp_path):
    told = clusters[2].run(window_apart, str(tmp_path / "saved"), False)
    assert clusters[2].run(window_apart, str(tmp_path / "saved"), True) == told


def test_what_a_hook_writes_where_nobody_would_find_it_is_an_error_and_nothing_is_left(clusters, tmp_path):
    with pytest.raises(Exception, match=r"A save hook wrote .* on a node that does not see the checkpoint"):
        clusters[2].run(hooked_apart, str(tmp_path / "saved"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "shared", "said"),
    [
        ("replicated", True, r"shared_files: false in the profile or ACCEL_SHARED_FILES=0"),
        ("fsdp", False, r"is sharded, and this node does not see the checkpoint's directory"),
    ],
)
def test_machines_that_share_no_files_are_told_what_can_be_done(clusters, tmp_path, kind, shared, said):
    with pytest.raises(Exception, match=said):
        clusters[2].run(put, str(tmp_path / "saved"), kind, Elsewhere, shared)
    assert list(tmp_path.iterdir()) == []
