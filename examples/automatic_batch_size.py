"""Find the largest batch size that fits: the training begins again with a smaller one where memory runs out.

python examples/automatic_batch_size.py
accel launch --nproc-per-node 2 examples/automatic_batch_size.py
"""

from __future__ import annotations

import argparse

import torch
from digits import digits, network
from torch import nn
from torch.utils.data import DataLoader

from accel_runtime import Accelerator, find_executable_batch_size, set_seed


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with the largest batch size that fits.")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--fits", type=int, default=100, help="pretend that memory runs out above this size")
    args = parser.parse_args()
    accelerator = Accelerator()

    @find_executable_batch_size(starting_batch_size=128)
    def train(batch_size: int) -> float:
        accelerator.free_memory()  # what the attempt before has left
        set_seed(0)
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        loader = DataLoader(digits()[0], batch_size=batch_size, shuffle=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for _ in range(args.epochs):
            for images, labels in loader:
                if len(images) > args.fits:
                    raise torch.OutOfMemoryError(f"out of memory with {len(images)} images (pretended)")
                loss = nn.functional.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.print(f"batch size {batch_size} fits")
        return float(accelerator.reduce(loss.detach(), "mean"))

    loss = train()
    accelerator.print(f"loss {loss:.4f}")


if __name__ == "__main__":
    main()
