"""Stop all processes when one has seen enough: a trigger any of them can set.

python examples/early_stopping.py
accel launch --nproc-per-node 2 examples/early_stopping.py
"""

from __future__ import annotations

import argparse

import torch
from digits import digits, network
from torch import nn
from torch.utils.data import DataLoader

from accel_runtime import Accelerator, set_seed


def main() -> None:
    parser = argparse.ArgumentParser(description="Stop where the loss is low enough.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument(
        "--enough", type=float, default=0.3, help="the loss of a batch at which a process stops"
    )
    args = parser.parse_args()

    set_seed(0)
    accelerator = Accelerator(split_batches=True)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    train = DataLoader(digits()[0], batch_size=64, shuffle=True)
    model, optimizer, train = accelerator.prepare(model, optimizer, train)

    steps = 0
    for epoch in range(args.epochs):
        for images, labels in train:
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if loss.item() < args.enough:
                accelerator.set_trigger()  # on this process; the others have losses of their own
            if accelerator.check_trigger():  # on all of them, in the same step
                accelerator.print(f"stopped in epoch {epoch + 1}")
                everywhere = accelerator.gather(torch.tensor([steps], device=accelerator.device))
                accelerator.print(f"steps on each process: {set(everywhere.tolist())}")
                return
    accelerator.print(f"not stopped in {steps} steps")


if __name__ == "__main__":
    main()
