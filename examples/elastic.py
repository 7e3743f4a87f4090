"""Train on whatever you get: the losses do not depend on the number of processes, also if it changes at a restart.

python examples/elastic.py
accel launch --nproc-per-node 3 examples/elastic.py --stop-after 20   # some of the steps, then a checkpoint
accel launch --nproc-per-node 2 --resume examples/elastic.py          # the rest
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from digits import digits, network
from torch import nn
from torch.utils.data import DataLoader

from accel_runtime import Accelerator, ProjectConfiguration, set_seed


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on handwritten digits, on any number of processes.")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--global-batch-size", type=int, default=50, help="samples of one optimizer step")
    parser.add_argument("--batch-size", type=int, default=8, help="what fits into the memory of one process")
    parser.add_argument("--stop-after", type=int, default=0, help="optimizer steps until a checkpoint")
    parser.add_argument("--project-dir", default="elastic")
    parser.add_argument("--losses", type=Path, help="file to append the loss of each step to")
    args = parser.parse_args()

    project = ProjectConfiguration(args.project_dir, automatic_checkpoint_naming=True)
    accelerator = Accelerator(global_batch_size=args.global_batch_size, project_config=project)
    set_seed(0)
    train_set, _ = digits()
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    steps = args.epochs * -(-len(train_set) // args.global_batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)  # counts optimizer steps
    loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)

    accelerator.resume()
    losses: list[torch.Tensor] = []  # of the current global batch
    for epoch in range(loader.epoch, args.epochs):
        for images, labels in loader:
            with accelerator.accumulate(model):
                each = nn.functional.cross_entropy(model(images), labels, reduction="none")
                accelerator.backward(each.mean())
                losses.append(accelerator.gather_for_metrics(each.detach()))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            loss, losses = torch.cat(losses).mean().item(), []
            if optimizer.steps % 10 == 0:
                accelerator.print(f"epoch {epoch + 1}, step {optimizer.steps} of {steps}: loss {loss:.4f}")
            if args.losses and accelerator.is_main_process:
                record = {"step": optimizer.steps, "loss": loss, "processes": accelerator.num_processes}
                with args.losses.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")
            if optimizer.steps == args.stop_after or accelerator.preempted():
                accelerator.save_state()
                accelerator.print(f"step {optimizer.steps} of {steps}: saved, and leaving")
                return
    accelerator.print(
        f"{steps} steps of {args.global_batch_size} samples on {accelerator.num_processes} process(es)"
    )


if __name__ == "__main__":
    main()
