"""Average weights now and then, instead of gradients at every step: for slow connections.

accel launch --nproc-per-node 2 examples/local_sgd.py --every 4
"""

from __future__ import annotations

import argparse

import torch
from digits import digits, network
from torch import nn
from torch.utils.data import DataLoader

from accel_runtime import Accelerator, LocalSGD, set_seed


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on handwritten digits with local SGD.")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--every", type=int, default=4, help="optimizer steps between two averages")
    args = parser.parse_args()

    set_seed(0)
    accelerator = Accelerator(split_batches=True)
    train_set, test_set = digits()
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    train = DataLoader(train_set, batch_size=32, shuffle=True)
    test = DataLoader(test_set, batch_size=256)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)

    for _ in range(args.epochs):
        with LocalSGD(accelerator, model, local_sgd_steps=args.every) as local:
            for images, labels in train:
                accelerator.backward(nn.functional.cross_entropy(model(images), labels))
                optimizer.step()
                optimizer.zero_grad()
                local.step()  # counts, and averages where it is due

    model.eval()
    right: list[bool] = []
    with torch.no_grad():
        for images, labels in test:
            hits = model(images).argmax(dim=-1) == labels
            right += accelerator.gather_for_metrics(hits).tolist()
    accelerator.print(f"test accuracy {sum(right) / len(right):.4f} ({sum(right)} of {len(right)})")


if __name__ == "__main__":
    main()
