"""Train on scikit-learn's handwritten digits, and keep a record of the run with the trackers you choose.

accel launch --nproc-per-node 2 examples/tracking.py
accel launch examples/tracking.py --log-with jsonl --log-with tensorboard
"""

from __future__ import annotations

import argparse
import logging

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_runtime import Accelerator, get_logger, tqdm

logger = get_logger(__name__, log_level="info")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on handwritten digits, with trackers.")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64, help="samples of one step, over all processes")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--log-with", action="append", help="a tracker; may be repeated")
    parser.add_argument("--logging-dir", default="logs")
    args = parser.parse_args()

    logging.basicConfig(format="%(message)s")
    torch.manual_seed(0)
    accelerator = Accelerator(
        split_batches=True, log_with=args.log_with or ["jsonl"], project_dir=args.logging_dir
    )
    accelerator.init_trackers("digits", config=vars(args))

    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    step = 0
    bar = tqdm(total=args.epochs * len(loader), unit="step")
    for epoch in range(args.epochs):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            bar.update()
            mean = accelerator.reduce(
                loss.detach(), "mean"
            )  # on every process; what is logged is the whole batch's
            accelerator.log({"loss": mean, "epoch": epoch}, step=step)
        logger.info("epoch %d: loss %.4f", epoch + 1, mean)
    bar.close()
    accelerator.end_training()
    accelerator.print(f"{step} steps are recorded in {args.logging_dir}")


if __name__ == "__main__":
    main()
