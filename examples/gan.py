"""Train a generator and a discriminator: two models, two optimizers, accumulated gradients, and an exact resume.

accel launch --nproc-per-node 2 examples/gan.py
accel launch --nproc-per-node 2 examples/gan.py --stop-after 75
accel launch --nproc-per-node 2 --resume examples/gan.py
"""

from __future__ import annotations

import argparse
import hashlib
import math

import torch
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, TensorDataset

from accel_runtime import Accelerator, ProjectConfiguration, set_seed

LATENT = 8


def make_circle(count: int) -> TensorDataset:
    """Return points near the unit circle."""
    rng = torch.Generator().manual_seed(0)
    angles = 2 * math.pi * torch.rand(count, 1, generator=rng)
    points = torch.cat([angles.cos(), angles.sin()], dim=1)
    return TensorDataset(points + 0.05 * torch.randn(points.shape, generator=rng))


def make_network(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, outputs)
    )


def hash_weights(*models: nn.Module) -> str:
    digest = hashlib.sha256()
    for model in models:
        for tensor in model.state_dict().values():
            digest.update(tensor.cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a GAN on the points of a circle.")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument(
        "--accumulate", type=int, default=2, help="micro-batches for one step of each optimizer"
    )
    parser.add_argument("--stop-after", type=int, help="save and stop after so many micro-batches")
    parser.add_argument("--project-dir", default="gan")
    args = parser.parse_args()

    project = ProjectConfiguration(args.project_dir, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(
        split_batches=True, gradient_accumulation_steps=args.accumulate, project_config=project
    )
    set_seed(0)
    generator, discriminator = make_network(LATENT, 2), make_network(2, 1)
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.99))
    d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.99))
    loader = DataLoader(make_circle(2048), batch_size=64, shuffle=True, drop_last=True)
    generator, discriminator, g_optimizer, d_optimizer, loader = accelerator.prepare(
        generator, discriminator, g_optimizer, d_optimizer, loader
    )
    set_seed(0, device_specific=True)  # each process draws other latent vectors
    plain_generator, plain_discriminator = map(accelerator.unwrap_model, (generator, discriminator))

    accelerator.resume()  # with --resume, after a restart, or if Slurm runs the job again
    micro_batches = 0
    for epoch in range(loader.epoch, args.epochs):
        for (real,) in loader:
            with accelerator.accumulate(generator, discriminator):  # one context for both models
                fake = generator(torch.randn(len(real), LATENT, device=accelerator.device))

                # One forward pass over both halves, for one backward pass.
                on_real, on_fake = discriminator(torch.cat([real, fake.detach()])).chunk(2)
                d_loss = softplus(-on_real).mean() + softplus(on_fake).mean()
                accelerator.backward(d_loss)
                d_optimizer.step()
                d_optimizer.zero_grad()

                # The generator's loss must leave no gradients in the discriminator.
                plain_discriminator.requires_grad_(False)
                g_loss = softplus(-plain_discriminator(fake)).mean()
                accelerator.backward(g_loss)
                plain_discriminator.requires_grad_(True)
                g_optimizer.step()
                g_optimizer.zero_grad()
            micro_batches += 1
            if micro_batches == args.stop_after:
                accelerator.save_state()
                accelerator.print(f"stopped in epoch {epoch + 1}")
                return
        losses = accelerator.reduce(torch.stack([d_loss.detach(), g_loss.detach()]), "mean")
        d_mean, g_mean = losses.tolist()
        accelerator.print(
            f"epoch {epoch + 1}/{args.epochs}: discriminator {d_mean:.4f}, generator {g_mean:.4f}"
        )
        accelerator.save_state(async_save=True)

    if accelerator.is_main_process:
        rng = torch.Generator().manual_seed(1)
        with torch.no_grad():
            points = plain_generator(torch.randn(1000, LATENT, generator=rng).to(accelerator.device))
        radius = points.norm(dim=1)
        print(f"radius of generated points: {radius.mean():.2f}, deviation {radius.std():.2f}")
    accelerator.print(
        f"{g_optimizer.steps} steps, weights {hash_weights(plain_generator, plain_discriminator)}"
    )


if __name__ == "__main__":
    main()
