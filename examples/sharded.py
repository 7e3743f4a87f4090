"""Train a small transformer that is divided among the processes, and export it as one whole model.

python examples/sharded.py
ACCEL_PARALLEL_DP_SHARD=auto accel launch --nproc-per-node 2 examples/sharded.py
ACCEL_PARALLEL_TP=2 accel launch --nproc-per-node 2 examples/sharded.py
ACCEL_PARALLEL_DP_SHARD=2 ACCEL_PARALLEL_TP=2 accel launch --nproc-per-node 4 examples/sharded.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from digits import digits
from safetensors.torch import load_model
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from accel_runtime import Accelerator, set_seed


class Layer(nn.Module):
    """Attention over the lines of an image, and a feed-forward part."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what one layer adds."""
        inside = self.first(x)
        # -1, not the number of heads: under tensor parallel each process has some of them.
        q, k, v = (
            part(inside).unflatten(-1, (-1, self.size)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        changed: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.second(x))))
        return changed


class Reader(nn.Module):
    """Reads an image line by line, as a sentence of eight words."""

    tp_plan = {  # noqa: RUF012 - what each module does where layers are divided
        "layers.*.q": "colwise",
        "layers.*.k": "colwise",
        "layers.*.v": "colwise",
        "layers.*.out": "rowwise",
        "layers.*.up": "colwise",
        "layers.*.down": "rowwise",
    }

    def __init__(self, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.lines = nn.Linear(8, width)
        self.places = nn.Parameter(torch.zeros(8, width))
        self.layers = nn.ModuleList(Layer(width, heads=4) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits of the ten digits."""
        x = self.lines(images.squeeze(1)) + self.places
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(self.norm(x).mean(dim=1))
        return logits


def numbers_here(parameter: torch.Tensor) -> int:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a divided transformer on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--output", type=Path, default=Path("reader"))
    args = parser.parse_args()

    set_seed(0)
    accelerator = Accelerator(split_batches=True)
    train_set, test_set = digits()
    model = Reader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    train = DataLoader(train_set, batch_size=32, shuffle=True, drop_last=True)
    test = DataLoader(test_set, batch_size=150)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
    here, all_of_it = (
        sum(map(numbers_here, model.parameters())),
        sum(p.numel() for p in Reader().parameters()),
    )
    accelerator.print(f"{here} of {all_of_it} numbers are on this process")

    for _ in range(args.epochs):
        model.train()
        for images, labels in train:
            accelerator.backward(nn.functional.cross_entropy(model(images), labels))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    model.eval()
    right: list[bool] = []
    with torch.no_grad():
        for images, labels in test:
            hits = model(images).argmax(dim=-1) == labels
            right += accelerator.gather_for_metrics(hits).tolist()
        mine = model(test_set[:50][0].to(accelerator.device))
    accelerator.print(f"test accuracy {sum(right) / len(right):.4f} ({sum(right)} of {len(right)})")

    accelerator.save_model(model, args.output)
    if accelerator.is_main_process:
        plain = Reader().eval()
        load_model(plain, args.output / "model.safetensors")
        torch.testing.assert_close(plain(test_set[:50][0]), mine.cpu(), rtol=1e-4, atol=1e-4)
        print(f"the plain model in {args.output} computes the same")


if __name__ == "__main__":
    main()
