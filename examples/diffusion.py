"""Train a small diffusion model on handwritten digits, with averaged weights, and sample from it on the main process.

accel launch --nproc-per-node 2 examples/diffusion.py
"""

from __future__ import annotations

import argparse
import math

import torch
from digits import digits
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from accel_runtime import Accelerator, set_seed

NOISE_STEPS = 100
SHADES = " .:-=+*#%@"


class Block(nn.Module):
    """Two convolutions; the embedding of the noise step shifts the channels in between."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.shift = nn.Linear(64, outputs)
        self.norm = nn.GroupNorm(4, outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """Return the features of images `x`, with the embedding `time` of their noise steps."""
        hidden = self.first(x) + self.shift(time)[:, :, None, None]
        result: torch.Tensor = nn.functional.silu(self.second(nn.functional.silu(self.norm(hidden))))
        return result


class UNet(nn.Module):
    """A U-Net for images of 8 x 8 pixels, which predicts the noise in an image."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 64))
        self.down, self.middle, self.up = Block(1, 32), Block(32, 64), Block(96, 32)
        self.output = nn.Conv2d(32, 1, 3, padding=1)

    def forward(self, noisy: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        """Return the predicted noise of images, which depends on their noise steps."""
        frequencies = torch.exp(-math.log(1000) * torch.arange(16, device=step.device) / 16)
        angles = step[:, None] * frequencies
        time = self.time(torch.cat([angles.sin(), angles.cos()], dim=1))
        high = self.down(noisy, time)
        low = self.middle(nn.functional.avg_pool2d(high, 2), time)
        joined = torch.cat([high, nn.functional.interpolate(low, scale_factor=2.0)], dim=1)
        noise: torch.Tensor = self.output(self.up(joined, time))
        return noise


def signal_levels(device: torch.device) -> torch.Tensor:
    """Return the share of the image in the variance after each noise step, from 1 to almost 0: a cosine schedule."""
    steps = torch.arange(NOISE_STEPS + 1, device=device) / (NOISE_STEPS + 1)
    return torch.cos(steps * math.pi / 2) ** 2


@torch.no_grad()
def sample(model: nn.Module, count: int, device: torch.device) -> torch.Tensor:
    """Return images from noise, by the model's predictions for one noise step after the other (DDIM)."""
    levels = signal_levels(device)
    rng = torch.Generator().manual_seed(0)
    x: torch.Tensor = torch.randn(count, 1, 8, 8, generator=rng).to(device)
    for step in range(NOISE_STEPS, 0, -1):
        noise = model(x, torch.full((count,), step, device=device))
        image = ((x - (1 - levels[step]).sqrt() * noise) / levels[step].sqrt()).clamp(-1, 1)
        x = levels[step - 1].sqrt() * image + (1 - levels[step - 1]).sqrt() * noise
    return x


def draw(images: torch.Tensor) -> str:
    """Return the images side by side, a character for each pixel."""
    shades = ((images[:, 0].cpu() + 1) / 2 * (len(SHADES) - 1)).round().int()
    lines = [["".join(SHADES[shade] for shade in row) for row in image] for image in shades.tolist()]
    return "\n".join("  ".join(row) for row in zip(*lines, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a diffusion model on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=64, help="images of one step, over all processes")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.set_num_threads(1)  # on a CPU, several threads wait for each other longer than they compute
    accelerator = Accelerator(split_batches=True)
    set_seed(args.seed)  # the same weights on all processes
    train_set, _ = digits()
    model = UNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    average = AveragedModel(accelerator.unwrap_model(model), multi_avg_fn=get_ema_multi_avg_fn(0.99))  # type: ignore[no-untyped-call]
    set_seed(args.seed, device_specific=True)  # from here on each process draws its own noise

    levels = signal_levels(accelerator.device)
    for epoch in range(args.epochs):
        total = torch.zeros((), device=accelerator.device)
        for images, _ in loader:
            clean = 2 * images - 1
            step = torch.randint(1, NOISE_STEPS + 1, (len(clean),), device=clean.device)
            noise = torch.randn_like(clean)
            level = levels[step][:, None, None, None]
            predicted = model(level.sqrt() * clean + (1 - level).sqrt() * noise, step)
            loss = nn.functional.mse_loss(predicted, noise)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(accelerator.unwrap_model(model))
            total += loss.detach()
        mean = accelerator.reduce(total / len(loader), "mean")
        accelerator.print(f"epoch {epoch + 1}/{args.epochs}: loss {mean:.4f}")

    if accelerator.is_main_process:  # the averaged model is not in DDP, so one process can use it
        print(draw(sample(average, 6, accelerator.device)))
        torch.save(average.module.state_dict(), "diffusion.pt")


if __name__ == "__main__":
    main()
