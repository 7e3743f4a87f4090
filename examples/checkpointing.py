"""Save every few steps and when the machine is taken away, and go on from there as if nothing had happened.

accel launch --nproc-per-node 2 examples/checkpointing.py
accel launch --nproc-per-node 2 --resume examples/checkpointing.py
"""

from __future__ import annotations

import argparse
import hashlib

import torch
from digits import digits, network
from torch import nn
from torch.utils.data import DataLoader

from accel_runtime import Accelerator, ProjectConfiguration, set_seed


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on handwritten digits, with checkpoints.")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--every", type=int, default=10, help="steps from one checkpoint to the next")
    parser.add_argument("--project-dir", default="checkpointing")
    args = parser.parse_args()

    project = ProjectConfiguration(args.project_dir, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(split_batches=True, project_config=project)
    set_seed(0)
    train_set, _ = digits()
    model = nn.Sequential(network(), nn.Dropout(0.1))  # what it drops is part of what is saved
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)
    loader = DataLoader(train_set, batch_size=32, shuffle=True, drop_last=True)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)

    accelerator.resume()  # with --resume, after a restart, or where Slurm runs the job again
    for epoch in range(loader.epoch, args.epochs):
        for images, labels in loader:  # the rest of the epoch it was in
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if accelerator.preempted():
                accelerator.save_state()
                accelerator.print(f"epoch {epoch}, step {optimizer.steps}: saved, and leaving")
                return
            if optimizer.steps % args.every == 0:
                accelerator.save_state(async_save=True)
                accelerator.print(f"epoch {epoch}, step {optimizer.steps}: loss {loss.item():.4f}")

    weights = hashlib.sha256()
    for tensor in accelerator.unwrap_model(model).state_dict().values():
        weights.update(tensor.cpu().numpy().tobytes())
    accelerator.print(f"{optimizer.steps} steps, weights {weights.hexdigest()[:16]}")


if __name__ == "__main__":
    main()
