"""Search hyper-parameters: launch one run for each trial, some at a time, and compare their results.

python examples/search.py --trials 8 --parallel 2
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from digits import digits
from torch import nn
from torch.utils.data import DataLoader

from accel_runtime import Accelerator, set_seed


def train(args: argparse.Namespace) -> None:
    """Train with the hyper-parameters of one trial, and write the result."""
    accelerator = Accelerator(split_batches=True)
    set_seed(0)
    train_set, test_set = digits()
    model = nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, args.width),
        nn.ReLU(),
        nn.Dropout(args.dropout),
        nn.Linear(args.width, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    train = DataLoader(train_set, batch_size=64, shuffle=True, drop_last=True)
    test = DataLoader(test_set, batch_size=256)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
    for epoch in range(args.epochs):
        model.train()
        for images, labels in train:
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        mean = float(accelerator.reduce(loss.detach(), "mean"))
        if not mean < 0.95 * math.log(10):  # also true for nan
            raise RuntimeError(f"no better than a guess: the loss of epoch {epoch + 1} is {mean:.4f}")

    model.eval()
    correct: list[bool] = []
    with torch.no_grad():
        for images, labels in test:
            hits = model(images).argmax(dim=-1) == labels
            correct += accelerator.gather_for_metrics(hits).tolist()
    if accelerator.is_main_process:
        Path(args.result).write_text(json.dumps({"accuracy": sum(correct) / len(correct)}), encoding="utf-8")


def draw_trials(count: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [
        {
            "lr": round(10 ** rng.uniform(-1.5, 1), 4),
            "width": rng.choice([16, 32, 64]),
            "dropout": round(rng.uniform(0, 0.5), 2),
        }
        for _ in range(count)
    ]


def run_trial(number: int, values: dict[str, Any], args: argparse.Namespace) -> float | None:
    """Launch a trial, unless an earlier search has its result; return its accuracy, or None if it failed."""
    folder = Path(args.output) / f"trial-{number:03}"
    result, log = folder / "result.json", folder / "log.txt"
    if not result.exists():
        folder.mkdir(parents=True, exist_ok=True)
        options = [f"--{name}={value}" for name, value in values.items()]
        command = [
            sys.executable,
            "-m",
            "accel_cli",
            "launch",
            "-q",
            "--nproc-per-node",
            str(args.nproc_per_node),
        ]
        command += [__file__, "--result", str(result), "--epochs", str(args.epochs), *options]
        with log.open("w", encoding="utf-8") as output:
            code = subprocess.run(command, stdout=output, stderr=output, check=False).returncode
        if code:
            reason = log.read_text(encoding="utf-8").splitlines()[-1]
            print(f"trial {number}: {values}: exit code {code}: {reason}", flush=True)
            return None
    accuracy: float = json.loads(result.read_text(encoding="utf-8"))["accuracy"]
    print(f"trial {number}: {values}: accuracy {accuracy:.4f}", flush=True)
    return accuracy


def search(args: argparse.Namespace) -> None:
    trials = draw_trials(args.trials, args.seed)
    with ThreadPoolExecutor(args.parallel) as pool:
        results = list(pool.map(run_trial, range(len(trials)), trials, repeat(args)))
    finished = [
        (accuracy, values) for accuracy, values in zip(results, trials, strict=True) if accuracy is not None
    ]
    print(f"{len(finished)} of {len(trials)} trials finished")
    if not finished:
        sys.exit("No trial finished: read the logs.")
    accuracy, values = max(finished, key=lambda item: item[0])
    print(f"best: {values}, accuracy {accuracy:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Search hyper-parameters for handwritten digits.")
    parser.add_argument("--epochs", type=int, default=5)
    search_options = parser.add_argument_group("search")
    search_options.add_argument("--trials", type=int, default=8)
    search_options.add_argument("--parallel", type=int, default=1, help="trials that run at the same time")
    search_options.add_argument("--nproc-per-node", type=int, default=2, help="processes of each trial")
    search_options.add_argument("--seed", type=int, default=3)
    search_options.add_argument("--output", default="search")
    trial_options = parser.add_argument_group("one trial, as the search launches it")
    trial_options.add_argument("--result", help="run one trial, and write its result to this file")
    trial_options.add_argument("--lr", type=float, default=0.1)
    trial_options.add_argument("--width", type=int, default=32)
    trial_options.add_argument("--dropout", type=float, default=0.0)
    args = parser.parse_args()
    if args.result:
        train(args)
    else:
        search(args)


if __name__ == "__main__":
    main()
