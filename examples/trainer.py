"""Train on scikit-learn's digits with the Trainer of Transformers: a script that uses Accelerate, and nothing of accel.

python examples/trainer.py --epochs 3
accel launch --nproc-per-node 2 --mixed-precision bf16 examples/trainer.py --epochs 3
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from digits import digits, network
from torch import nn
from torch.utils.data import Dataset
from transformers import EvalPrediction, Trainer, TrainingArguments


class Classifier(nn.Module):
    """A network in the form that Trainer calls: named inputs, and the loss with the predictions."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss of a batch, and the predictions."""
        logits = self.network(images)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Named(Dataset[dict[str, Any]]):
    """A data set whose samples have names."""

    def __init__(self, samples: Dataset[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, label = self.samples[index]
        return {"images": image, "labels": label}


def count_correct(predictions: EvalPrediction) -> dict[str, float]:
    return {"correct": int((predictions.predictions.argmax(-1) == predictions.label_ids).sum())}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on handwritten digits with a Trainer.")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=16, help="samples of one step on each process")
    args = parser.parse_args()

    torch.manual_seed(0)
    train_set, test_set = digits()
    options = TrainingArguments(
        "digits-trainer",
        num_train_epochs=args.epochs,
        per_device_train_batch_size=args.batch_size,
        learning_rate=1e-3,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_strategy="epoch",
        dataloader_pin_memory=torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
    )
    trainer = Trainer(
        Classifier(),
        options,
        train_dataset=Named(train_set),
        eval_dataset=Named(test_set),
        compute_metrics=count_correct,
    )
    trainer.train()
    correct = trainer.evaluate()["eval_correct"]
    if options.process_index == 0:
        precision = trainer.accelerator.mixed_precision
        print(f"{correct} of {len(test_set)} are correct; {options.world_size} process(es), {precision}")


if __name__ == "__main__":
    main()
