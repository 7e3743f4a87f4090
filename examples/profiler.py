"""Profile a few steps of training on scikit-learn's handwritten digits, on every process.

accel launch --nproc-per-node 2 examples/profiler.py --output traces

Open a trace at https://ui.perfetto.dev or chrome://tracing.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_runtime import Accelerator, ProfileKwargs


def main() -> None:
    parser = argparse.ArgumentParser(description="Profile training on handwritten digits.")
    parser.add_argument("--steps", type=int, default=6, help="how many are run; four of them are profiled")
    parser.add_argument("--output", default="traces")
    args = parser.parse_args()

    schedule = {"wait": 1, "warmup": 1, "active": 4, "repeat": 1}
    handler = ProfileKwargs(schedule_option=schedule, record_shapes=True, output_trace_dir=args.output)
    accelerator = Accelerator(split_batches=True, kwargs_handlers=[handler])
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=64))

    with accelerator.profile() as profiler:
        for _, (x, y) in zip(range(args.steps), loader, strict=False):
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()

    accelerator.print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=8))
    accelerator.print(f"traces of {accelerator.num_processes} process(es) in {args.output}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
