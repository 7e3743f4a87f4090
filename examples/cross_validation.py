"""Cross-validate: every image is tested once, by the model that has not seen it.

python examples/cross_validation.py
accel launch --nproc-per-node 2 examples/cross_validation.py
"""

from __future__ import annotations

import argparse

import torch
from digits import digits, network
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Subset

from accel_runtime import Accelerator, set_seed


def main() -> None:
    parser = argparse.ArgumentParser(description="Cross-validate on handwritten digits.")
    parser.add_argument("--folds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()

    accelerator = Accelerator(split_batches=True)
    images_and_labels: ConcatDataset[tuple[torch.Tensor, ...]] = ConcatDataset(digits())
    everything = torch.arange(len(images_and_labels))
    tested: list[bool] = []
    for fold in range(args.folds):
        set_seed(0)
        held_out = everything % args.folds == fold
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        rest = Subset(images_and_labels, everything[~held_out].tolist())
        test_set = Subset(images_and_labels, everything[held_out].tolist())
        train = DataLoader(rest, batch_size=64, shuffle=True)
        test = DataLoader(test_set, batch_size=256)
        model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
        for _ in range(args.epochs):
            for images, labels in train:
                accelerator.backward(nn.functional.cross_entropy(model(images), labels))
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        right: list[bool] = []
        with torch.no_grad():
            for images, labels in test:
                hits = model(images).argmax(dim=-1) == labels
                right += accelerator.gather_for_metrics(hits).tolist()  # each image once
        accelerator.print(f"fold {fold + 1} of {args.folds}: {sum(right)} of {len(right)}")
        tested += right
        # Nothing of this fold is left for the next one.
        model, optimizer, train, test = accelerator.free_memory(model, optimizer, train, test)
    accelerator.print(f"accuracy {sum(tested) / len(tested):.4f} ({sum(tested)} of {len(tested)})")


if __name__ == "__main__":
    main()
