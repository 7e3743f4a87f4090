"""A script that trains in several loops, and writes the functions of accel that one late step of each calls."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel_cli
import accel_runtime

ROOT = Path(accel_runtime.__file__).parents[1]
FOLDERS = tuple(f"{Path(package.__file__).parent}{os.sep}" for package in (accel_runtime, accel_cli))
LATE = 120
"""A step after the checks of the first hundred have ended."""
COUNTED = range(LATE, LATE + 120, 14)
"""The steps that are counted; of two micro-batches of an optimizer step, the first."""
MEASURED = "accel_runtime/observe/heartbeat:_end_step"
"""The function that a step calls if it is measured, or one of the few before it."""
BATCH_SIZE = 2


class StepCalls:
    """Counts the calls of functions of accel in each of some steps of a loop, those that torch makes included."""

    def __init__(self):
        self.counts = Counter()
        self.steps = Counter()
        """Number of steps by their calls."""

    def begin_step(self, number):
        """Count from the beginning of one step to that of the next."""
        self.end_step()
        if number in COUNTED:
            sys.setprofile(self._count)

    def end_step(self):
        """Count no more until another step begins."""
        sys.setprofile(None)
        if self.counts and MEASURED not in self.counts:
            self.steps[tuple(sorted(self.counts.items()))] += 1
        self.counts.clear()

    def _count(self, frame, event, _argument):
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(FOLDERS):
            module = Path(file).relative_to(ROOT).with_suffix("")
            self.counts[f"{module}:{frame.f_code.co_name}"] += 1


def build(ranks):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    dataset = TensorDataset(torch.randn((COUNTED.stop + 2) * BATCH_SIZE * ranks, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.01), DataLoader(dataset, batch_size=BATCH_SIZE)


def train_raw(calls, ranks):
    model, optimizer, loader = build(ranks)
    for number, (batch,) in enumerate(loader):
        calls.begin_step(number)
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def train_prepared(calls, ranks, *, accumulates=1, clips=False):
    model, optimizer, loader = build(ranks)
    accelerator = accel_runtime.Accelerator(cpu=True, gradient_accumulation_steps=accumulates)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for number, (batch,) in enumerate(loader):
        calls.begin_step(number)
        if accumulates > 1:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            continue
        accelerator.backward(model(batch).square().mean())
        if clips:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if clips:
            scheduler.step()
        optimizer.zero_grad()


LOOPS = {
    "raw": train_raw,
    "prepared": train_prepared,
    "prepared, with accumulation": lambda calls, ranks: train_prepared(calls, ranks, accumulates=2),
    "prepared, with clipping and a scheduler": lambda calls, ranks: train_prepared(calls, ranks, clips=True),
}


def main(file):
    """Run all loops, and write the calls of the first rank."""
    ranks, lines = int(os.environ.get("WORLD_SIZE", "1")), []
    for title, train in LOOPS.items():
        calls = StepCalls()
        train(calls, ranks)
        counts = calls.steps.most_common(1)[0][0] if calls.steps else ()
        lines.append(f"{title}: {sum(count for _, count in counts)}")
        lines += [f"  {count} {name}" for name, count in counts]
    if os.environ.get("RANK", "0") == "0":
        Path(file).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
