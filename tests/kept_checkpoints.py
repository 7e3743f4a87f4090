"""Small checkpoints of each layout, written by one version and read by all later ones: `tests/data/checkpoints`.

Run as a script, this file writes those of the current version: `python tests/kept_checkpoints.py tests/data/checkpoints/0.1.0`.
What a release has written is never written anew; where a layout changes, a folder of the next version comes beside it.
"""

from __future__ import annotations

import json
import sys
from itertools import chain
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accel_runtime import Accelerator
from accel_runtime.utils import ParallelismConfig

KEPT = sorted(path for path in (Path(__file__).parent / "data" / "checkpoints").iterdir() if path.is_dir())
"""A folder for each version."""
LAYOUTS = {"one": 1, "two": 2, "stream": 2, "window": 2, "alone": 2, "sharded": 2}
"""What there is a checkpoint of, and on how many processes it was written."""


class Stream(IterableDataset):
    """Eight samples, without a length."""

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


class Run:
    """What a script prepares for a layout."""

    def __init__(self, layout):
        options = {"parallelism_config": ParallelismConfig(dp_shard_size=2)} if layout == "sharded" else {}
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **options)
        torch.manual_seed(1 + self.accelerator.process_index)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            norm = nn.LayerNorm(4) if layout == "sharded" else nn.BatchNorm1d(4)
            model = nn.Sequential(nn.Linear(3, 4), norm, nn.Dropout(0.1), nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        data = Stream() if layout == "stream" else TensorDataset(torch.arange(48.0).view(16, 3) / 48)
        loader = DataLoader(data, batch_size=2, shuffle=None if layout == "stream" else True)
        self.note = Note()
        self.accelerator.register_for_checkpointing(self.note)
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            model, optimizer, scheduler, loader
        )

    def learn(self, batch):
        """Train on a batch."""
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(self.model(inputs_of(batch)).square().mean())
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()

    def gather(self, batch):
        """Return the samples of all ranks."""
        return self.accelerator.gather_for_metrics(inputs_of(batch)).tolist()

    def facts(self):
        """What a checkpoint brings back, as JSON."""
        state = self.accelerator.get_state_dict(self.model)
        return {
            "model": {name: tensor.tolist() for name, tensor in sorted(state.items())},
            "steps": self.optimizer.steps,
            "rate": self.scheduler.get_last_lr(),
            "note": self.note.state,
        }


def inputs_of(batch):
    """Return the samples of a batch."""
    return batch if torch.is_tensor(batch) else batch[0]


def write(folder, layout):
    """Train a few steps, save, and leave beside the checkpoint what it brings back; each rank calls it."""
    run = Run(layout)
    run.note.state = {"note": layout, "numbers": [1, 2.5, torch.arange(3).tolist()]}
    last = 2 if layout == "window" else 1
    facts = {}
    for step, batch in enumerate(run.loader):
        if step > last:
            facts["rest"] += run.gather(batch)
            continue
        run.learn(batch)
        if step == last:
            facts = run.facts() | {"rest": []}
            if layout != "alone" or run.accelerator.is_main_process:
                run.accelerator.save_state(f"{folder}/{layout}")
    if run.accelerator.is_main_process:
        Path(folder, f"{layout}.json").write_text(json.dumps(facts, indent=1) + "\n")
    run.accelerator.wait_for_everyone()


def read(folder, layout):
    """Load a checkpoint that `write` has written, and compare; each rank calls it."""
    run = Run(layout)
    wanted = json.loads(Path(folder, f"{layout}.json").read_text())
    rest = wanted.pop("rest")
    before = run.facts()
    found = run.accelerator.resume(f"{folder}/{layout}")
    after = run.facts()
    if run.accelerator.is_main_process:
        # Buffers are each rank's own, and only the first has all of a sharded model.
        assert before != wanted
        assert after == wanted
    run.accelerator.checkpoints.verify(found.path)
    assert list(chain.from_iterable(run.gather(batch) for batch in run.loader)) == rest
    for batch in run.loader:
        run.learn(batch)
    return True


if __name__ == "__main__":
    import cloudpickle
    from cluster import INTERPRETER, Alone, Cluster

    cloudpickle.register_pickle_by_value(sys.modules["__main__"])
    target = Path(sys.argv[1]).absolute()
    target.mkdir(parents=True)
    for name, size in LAYOUTS.items():
        ranks = Cluster(size) if size > 1 else Alone()
        ranks.run(write, str(target), name)
        ranks.close()
    INTERPRETER.close()
