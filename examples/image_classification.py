"""Classify images with a small ResNet, a moving average of its weights, and torchmetrics.

accel launch --nproc-per-node 2 examples/image_classification.py
ACCEL_PARALLEL_DP_SHARD=auto accel launch --nproc-per-node 2 examples/image_classification.py
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from digits import digits
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from accel_runtime import Accelerator, DataLoaderConfiguration, ProjectConfiguration, set_seed


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        # GroupNorm computes with one sample at a time; BatchNorm would depend on the local batch of each process.
        self.norm1, self.norm2 = nn.GroupNorm(4, outputs), nn.GroupNorm(4, outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[batch, outputs, height / stride, width / stride]`."""
        y = self.norm1(self.conv1(x)).relu()
        return torch.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A ResNet of three blocks, with the method names of timm's models."""

    def __init__(self, num_classes: int, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.blocks = nn.ModuleList(Block(width << max(n - 1, 0), width << n, 1 + (n > 0)) for n in range(3))
        self.fc = nn.Linear(4 * width, num_classes)

    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the last block."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of the classes."""
        logits: torch.Tensor = self.fc(self.forward_features(x).mean(dim=(2, 3)))
        return logits


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: Any) -> tuple[float, int, int]:
    """Return the mean accuracy of the classes, and how many images of how many are classified correctly."""
    # gather_for_metrics returns all images on every process: torchmetrics must not add up the processes again.
    accuracy = MulticlassAccuracy(10, sync_on_compute=False)
    counts = MulticlassConfusionMatrix(10, sync_on_compute=False)
    metrics = MetricCollection({"accuracy": accuracy, "counts": counts}).to(accelerator.device)
    model.eval()
    for images, labels in loader:
        metrics.update(*accelerator.gather_for_metrics((model(images).argmax(dim=-1), labels)))
    result = metrics.compute()
    return result["accuracy"].item(), int(result["counts"].trace()), int(result["counts"].sum())


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small ResNet on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument(
        "--pad", action="store_true", help="even_batches=True: pad the last batch of an epoch"
    )
    parser.add_argument("--project-dir", default="image-classification")
    args = parser.parse_args()

    accelerator = Accelerator(
        dataloader_config=DataLoaderConfiguration(split_batches=True, even_batches=args.pad),
        project_config=ProjectConfiguration(
            args.project_dir, automatic_checkpoint_naming=True, total_limit=2
        ),
    )
    set_seed(0)
    train_set, test_set = digits()
    model = ResNet(num_classes=10)  # for timm: timm.create_model("resnet18", num_classes=10, in_chans=1)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))  # type: ignore[no-untyped-call]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train = DataLoader(train_set, batch_size=64, shuffle=True)  # 1347 images: the last batch has three
    test = DataLoader(test_set, batch_size=64)  # 450 images: the last batch has two
    model, ema, optimizer, train, test = accelerator.prepare(model, ema, optimizer, train, test)

    average: Any = accelerator.unwrap_model(ema)
    accelerator.resume()
    for epoch in range(train.epoch, args.epochs):
        model.train()
        for images, labels in train:
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(accelerator.unwrap_model(model))
        accelerator.print(f"epoch {epoch + 1}: {train.repeats} images were trained on twice")
        for name, tested in {"model": model, "average": ema}.items():
            accuracy, correct, count = evaluate(accelerator, tested, test)
            accelerator.print(f"  {name}: accuracy {accuracy:.4f}, {correct} of {count} are correct")
        accelerator.save_state()  # after the evaluation, which is not repeated by a resumed run


if __name__ == "__main__":
    main()
