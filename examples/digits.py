"""Train a small network on scikit-learn's bundled handwritten digits: a raw loop plus five changed lines.

python examples/digits.py --epochs 3
torchrun --nproc-per-node 2 examples/digits.py --epochs 3
accel launch --nproc-per-node 2 examples/digits.py --epochs 3
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_runtime import Accelerator


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1797 images of 8 x 8 grey values: three quarters to train on, every fourth to test."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    y = torch.tensor(labels, dtype=torch.int64)
    test = torch.arange(len(y)) % 4 == 0
    return TensorDataset(x[~test], y[~test]), TensorDataset(x[test], y[test])


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * 16, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32, help="samples of one step, over all processes")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--output", default="digits.safetensors")
    args = parser.parse_args()

    torch.manual_seed(0)
    accelerator = Accelerator(split_batches=True)  # 1: finds the device and the other processes
    train_set, test_set = digits()
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    train = DataLoader(train_set, batch_size=args.batch_size, shuffle=True, drop_last=True)
    test = DataLoader(test_set, batch_size=256)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)  # 2

    for epoch in range(args.epochs):
        model.train()
        for images, labels in train:
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)  # 3: in place of loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(f"epoch {epoch + 1}/{args.epochs}: loss {accelerator.reduce(loss, 'mean'):.4f}")

    model.eval()
    correct = seen = 0
    with torch.no_grad():
        for images, labels in test:
            guesses = model(images).argmax(dim=-1)
            all_guesses, all_labels = accelerator.gather_for_metrics((guesses, labels))  # 4: each sample once
            correct += int((all_guesses == all_labels).sum())
            seen += len(all_labels)
    accelerator.print(f"test accuracy {correct / seen:.4f} ({correct} of {seen})")

    weights = accelerator.get_state_dict(model)  # 5: whole, with the names your own model has
    accelerator.save(weights, args.output, safe_serialization=True)
    accelerator.print(f"weights in {args.output}")


if __name__ == "__main__":
    main()
