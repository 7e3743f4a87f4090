"""A denoising loop in the style of the scripts for diffusion models: the main process alone saves, and the loop skips.

Only the imports of `Accelerator`, `ProjectConfiguration` and `set_seed` are accel's. The averaged weights are saved by
hooks. `--die_at_step` ends the process without a word, as a machine that is taken away does.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import math
import os
import shutil
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from accel_runtime import Accelerator
from accel_runtime.utils import ProjectConfiguration, set_seed


class Images(Dataset):
    """Small images, flipped at random when they are read."""

    def __init__(self, count):
        self.images = torch.rand(count, 1, 4, 4, generator=torch.Generator().manual_seed(3))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        return {"pixel_values": image.flip(-1) if torch.rand(()) < 0.5 else image, "index": index}


class Averages:
    """Moving averages of a model's parameters."""

    def __init__(self, model, decay=0.9):
        self.model, self.decay = copy.deepcopy(model), decay

    @torch.no_grad()
    def step(self, parameters):
        for average, parameter in zip(self.model.parameters(), parameters, strict=True):
            average.lerp_(parameter.detach(), 1 - self.decay)


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--train_batch_size", type=int, default=3)
    parser.add_argument("--num_train_epochs", type=int, default=3)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--checkpointing_steps", type=int, default=500)
    parser.add_argument("--checkpoints_total_limit", type=int)
    parser.add_argument("--resume_from_checkpoint")
    parser.add_argument("--die_at_step", type=int)
    return parser.parse_args()


def list_checkpoints(directory):
    checkpoints = [path for path in directory.iterdir() if path.name.startswith("checkpoint-")]
    return sorted(checkpoints, key=lambda path: int(path.name.split("-")[1]))


def main():
    args = parse_args()
    project = ProjectConfiguration(project_dir=args.output_dir, logging_dir=args.output_dir / "logs")
    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps, project_config=project
    )
    set_seed(17)
    if accelerator.is_main_process:
        args.output_dir.mkdir(parents=True, exist_ok=True)
    unet = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.SiLU(), nn.Conv2d(4, 1, 3, padding=1))
    averages = Averages(unet)

    def save_model_hook(models, weights, output_dir):
        if accelerator.is_main_process:
            torch.save(averages.model.state_dict(), Path(output_dir) / "averages.pt")
            for index, _ in enumerate(models):
                torch.save(weights[index], Path(output_dir) / "unet.pt")
            weights.clear()

    def load_model_hook(models, input_dir):
        averages.model.load_state_dict(torch.load(Path(input_dir) / "averages.pt", weights_only=True))
        while models:
            models.pop().load_state_dict(torch.load(Path(input_dir) / "unet.pt", weights_only=True))

    accelerator.register_save_state_pre_hook(save_model_hook)
    accelerator.register_load_state_pre_hook(load_model_hook)

    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-2)
    train_dataloader = DataLoader(Images(28), shuffle=True, batch_size=args.train_batch_size)
    lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    unet, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        unet, optimizer, train_dataloader, lr_scheduler
    )
    updates_per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    max_train_steps = args.num_train_epochs * updates_per_epoch

    global_step = first_epoch = resume_step = 0
    if args.resume_from_checkpoint:
        path = args.resume_from_checkpoint
        if path == "latest":
            checkpoints = list_checkpoints(args.output_dir)
            path = checkpoints[-1].name if checkpoints else None
        if path is None:
            accelerator.print("No checkpoint found: starting a new run")
        else:
            accelerator.print(f"Resuming from checkpoint {path}")
            accelerator.load_state(args.output_dir / path)
            global_step = int(path.split("-")[1])
            first_epoch = global_step // updates_per_epoch
            resume_step = (global_step % updates_per_epoch) * args.gradient_accumulation_steps

    for epoch in range(first_epoch, args.num_train_epochs):
        unet.train()
        for step, batch in enumerate(train_dataloader):
            if epoch == first_epoch and step < resume_step:
                continue
            with accelerator.accumulate(unet):
                clean = batch["pixel_values"]
                noise = torch.randn_like(clean)
                timesteps = torch.rand(len(clean), 1, 1, 1, device=clean.device)
                predicted = unet(clean.lerp(noise, timesteps))
                loss = nn.functional.mse_loss(predicted.float(), noise.float())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(unet.parameters(), args.max_grad_norm)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                averages.step(unet.parameters())
                global_step += 1
                if accelerator.is_main_process:
                    print(f"step {global_step} images {batch['index'].tolist()}", flush=True)
                    if global_step % args.checkpointing_steps == 0:
                        checkpoints = list_checkpoints(args.output_dir)
                        limit = args.checkpoints_total_limit
                        for old in checkpoints[: len(checkpoints) - limit + 1] if limit else []:
                            shutil.rmtree(old)
                        accelerator.save_state(args.output_dir / f"checkpoint-{global_step}")
                if global_step == args.die_at_step:
                    os._exit(9)
            if global_step >= max_train_steps:
                break

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        digest = hashlib.sha256()
        model = accelerator.unwrap_model(unet)
        for tensor in (*model.state_dict().values(), *averages.model.state_dict().values()):
            digest.update(tensor.cpu().numpy().tobytes())
        print(f"{global_step} steps, weights {digest.hexdigest()[:16]}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
