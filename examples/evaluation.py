"""Evaluate exactly: metrics of all predictions at once, each once, in the dataset's order, together with texts.

python examples/evaluation.py
accel launch --nproc-per-node 2 examples/evaluation.py   # the same numbers and the same file

The area under the ROC curve ranks all predictions, so it is no mean of what the processes would compute for their
parts; and line n of the file is image n of the test set.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import torch
from digits import digits, network
from sklearn.metrics import accuracy_score, roc_auc_score
from torch import nn
from torch.utils.data import DataLoader, Dataset

from accel_runtime import Accelerator, DataLoaderConfiguration, set_seed


class Named(Dataset[tuple[torch.Tensor, torch.Tensor, str]]):
    """The images of a dataset, each with its label and a text."""

    def __init__(self, images: Dataset[tuple[torch.Tensor, ...]], count: int) -> None:
        self.images, self.count = images, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, str]:
        image, label = self.images[index]
        return image, label, f"test image {index}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Evaluate on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--output", default="predictions.csv")
    args = parser.parse_args()

    set_seed(0)
    # No sample twice, in training either.
    exact = DataLoaderConfiguration(split_batches=True, even_batches=False)
    accelerator = Accelerator(dataloader_config=exact)
    train_set, test_set = digits()
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    train = DataLoader(train_set, batch_size=64, shuffle=True)
    test = DataLoader(Named(test_set, len(test_set)), batch_size=64)  # 450 images: the last batch has two
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)

    for _ in range(args.epochs):
        for images, labels in train:
            accelerator.backward(nn.functional.cross_entropy(model(images), labels))
            optimizer.step()
            optimizer.zero_grad()

    model.eval()
    found: dict[str, list[torch.Tensor]] = {"scores": [], "labels": []}
    names: list[str] = []
    with torch.no_grad():
        for images, labels, texts in test:
            scores = model(images).softmax(dim=-1)
            # Tensors and texts together: one row, or one entry, a sample; what fills up the last batch is left out.
            step = accelerator.gather_for_metrics({"scores": scores, "labels": labels, "names": list(texts)})
            found["scores"].append(step["scores"])
            found["labels"].append(step["labels"])
            names += step["names"]

    scores, labels = (torch.cat(found[key]).cpu() for key in ("scores", "labels"))
    guesses = scores.argmax(dim=-1)
    area = roc_auc_score(labels, scores, multi_class="ovr")
    accelerator.print(f"accuracy {accuracy_score(labels, guesses):.4f}, area under the ROC curve {area:.4f}")
    if accelerator.is_main_process:
        with Path(args.output).open("w", newline="") as file:
            csv.writer(file).writerows(zip(names, labels.tolist(), guesses.tolist(), strict=True))
    accelerator.print(f"{len(names)} predictions in {args.output}; the last is of {names[-1]}")


if __name__ == "__main__":
    main()
