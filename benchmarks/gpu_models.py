"""The models of the benchmarks on a GPU, written out so that they need no package beside torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

__all__ = ["Block", "ResNet", "Transformer"]


class _Bottleneck(nn.Module):
    """Three convolutions and a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.layers = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.layers(x) + self.shortcut(x))


class ResNet(nn.Module):
    """Blocks in stages; (3, 4, 6, 3) of width 64 is ResNet-50.

    Args:
        stages: How many blocks each has.
        width: Of the first.
    """

    def __init__(self, stages: Sequence[int], width: int) -> None:
        super().__init__()
        parts: list[nn.Module] = [
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        ]
        inputs = width
        for stage, count in enumerate(stages):
            for place in range(count):
                own = width * 2**stage
                parts.append(_Bottleneck(inputs, own, 2 if stage and not place else 1))
                inputs = 4 * own
        self.layers = nn.Sequential(*parts)
        self.head = nn.Linear(inputs, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores of 1000 classes for images `[batch, 3, height, width]`."""
        out: torch.Tensor = self.head(self.layers(x).mean((2, 3)))
        return out


class Block(nn.Module):
    """Causal attention and a feed-forward part."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[batch, length, width]`, as it was given."""
        samples, length, width = x.shape
        split = self.mixed(self.before(x)).view(samples, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind()
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(samples, length, width))
        added: torch.Tensor = self.down(functional.gelu(self.up(self.between(x))))
        return x + added


class Transformer(nn.Module):
    """A decoder; 16 layers of 2048 and 32,000 words are 936 million parameters.

    Args:
        width: Of every layer.
        layers: How many.
        words: Tokens it knows.
    """

    def __init__(self, width: int, layers: int, words: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, max(1, width // 128)) for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return scores of the words for tokens `[batch, length]`."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out
