"""Models of the tests, from two layers to a small transformer."""

from __future__ import annotations

import torch
from torch import nn

# Two or three layers ------------------------------------------------------------------------


class TwoLayerNet(nn.Module):
    """A small nonlinear network with the same parameters in all processes: for losses and gradients."""

    def __init__(self, inputs=4, hidden=8, outputs=1):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(inputs, hidden), nn.Linear(hidden, outputs)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class TiedNet(nn.Module):
    """Two layers with one weight: for names, copies and checkpoints of a parameter that has two names."""

    def __init__(self, width=3, *, bias=True):
        super().__init__()
        self.first, self.second = (nn.Linear(width, width, bias=bias) for _ in range(2))
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class TokenNet(nn.Module):
    """A tiny language model of an embedding, a layer and a head: for losses of tokens, and for tied embeddings."""

    def __init__(self, words, width, *, tied=False):
        super().__init__()
        self.embed, self.inner = nn.Embedding(words, width), nn.Linear(width, width)
        self.head = nn.Linear(width, words, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        """Return logits of shape [..., words]."""
        return self.head(torch.tanh(self.inner(self.embed(tokens))))


class UnevenNet(nn.Module):
    """Layers whose sizes no world size divides, and a parameter smaller than the world size."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 7, bias=False)
        self.gain = nn.Parameter(torch.ones(1))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))) * self.gain


class MixedNet(nn.Module):
    """Weights of two dtypes, a frozen one, and a buffer that differs on each process."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
        self.scale = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.full((1,), 0.1), requires_grad=False)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        self.seen += x.sum()
        return self.inner(x) * self.scale * self.frozen


class PartlyUsedNet(nn.Module):
    """A classifier of tokens with a layer that only some forward passes use, and one that is never used."""

    def __init__(self, *, sparse=False):
        super().__init__()
        self.embed = nn.Embedding(7, 5, sparse=sparse)
        self.sometimes, self.never = nn.Linear(5, 5), nn.Linear(5, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, tokens, extra):
        hidden = self.embed(tokens)
        return self.head(self.sometimes(hidden) if extra else hidden)


class TwoPartNet(nn.Module):
    """Two layers of which each forward pass uses one: for parameters without a gradient, as of GANs."""

    def __init__(self, inputs=4):
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList([nn.Linear(inputs, 1), nn.Linear(inputs, 1)])

    def forward(self, x, part):
        return self.parts[part](x)


# Blocks -------------------------------------------------------------------------------------


class ResidualBlock(nn.Module):
    """Two layers that tensor parallelism can divide, behind a norm if its class is given."""

    def __init__(self, width=4, hidden=None, *, norm=nn.Identity, bias=True):
        super().__init__()
        hidden = hidden or 2 * width
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width, bias=bias)
        self.norm = norm(width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class ResidualNet(nn.Module):
    """Residual blocks and a head: for wrapping, sharding, compilation and descriptions by block.

    Args:
        width: The size of the inputs and outputs of the blocks.
        hidden: The size inside a block, by default twice the width.
        outputs: The size of the outputs.
        inputs: The size of the inputs of a layer before the blocks; None without such a layer.
        depth: The number of blocks.
        norm: The class of the norm of a block.
        bias: The head has a bias.
    """

    tp_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}  # noqa: RUF012

    def __init__(  # noqa: PLR0913
        self, width=4, hidden=None, outputs=1, *, inputs=None, depth=2, norm=nn.Identity, bias=True
    ):
        super().__init__()
        self.first = nn.Linear(inputs, width) if inputs else nn.Identity()
        self.blocks = nn.ModuleList(ResidualBlock(width, hidden, norm=norm) for _ in range(depth))
        self.head = nn.Linear(width, outputs, bias=bias)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class UnevenTiedNet(nn.Module):
    """A model that is difficult to shard: tied, frozen and one-element parameters, saved and computed buffers.

    2 and 4 do not divide its sizes, except those that tensor parallelism divides.
    """

    rows, width, hidden = 11, 6, 10

    def __init__(self):
        super().__init__()
        rows, width = self.rows, self.width
        self.embedding = nn.Embedding(rows, width)
        self.blocks = nn.ModuleList(
            ResidualBlock(width, self.hidden, norm=nn.LayerNorm, bias=False) for _ in range(2)
        )
        self.gain = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.full((5, width), 0.5), requires_grad=False)
        self.head = nn.Linear(width, rows, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.tensor(3))
        self.register_buffer("scale", torch.arange(width) / width, persistent=False)

    def reset_buffers(self):
        self.scale = torch.arange(self.width) / self.width

    def forward(self, numbers):
        x = self.embedding(numbers) * self.scale + self.frozen.sum(0)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.gain)


# Transformers -------------------------------------------------------------------------------


class CausalAttention(nn.Module):
    """Causal attention; `query_norm` adds a norm whose weight is replicated between sharded layers."""

    def __init__(self, width, heads, *, query_norm=False):
        super().__init__()
        self.n_heads, self.size = heads, width // heads
        self.q, self.v, self.o = (nn.Linear(width, width) for _ in range(3))
        # Softmax does not see a bias of the keys: its gradient is rounding errors, which Adam makes whole steps of.
        self.k = nn.Linear(width, width, bias=False)
        self.q_norm = nn.LayerNorm(self.size) if query_norm else nn.Identity()

    def forward(self, x):
        q, k, v = (part(x).unflatten(-1, (-1, self.size)) for part in (self.q, self.k, self.v))
        q, k, v = (part.transpose(1, 2) for part in (self.q_norm(q), k, v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(-2))


class TransformerLayer(nn.Module):
    """A transformer layer with causal attention."""

    def __init__(self, width, heads, *, dropout=0.0, query_norm=False):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads, query_norm=query_norm)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.dropout(self.attention(self.first(x)))
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.second(x)))))


class LanguageModel(nn.Module):
    """A small language model: for tensor parallelism, and for the memory of activations.

    Args:
        words: The size of the vocabulary.
        width: The size of the hidden states.
        heads: The number of attention heads of a layer.
        depth: The number of layers.
        dropout: The probability of dropout in the layers.
        padding: The token of padding.
        tied: The weight of the head is that of the embedding.
        query_norm: Queries have a norm.
    """

    def __init__(  # noqa: PLR0913
        self, words=32, width=16, heads=4, *, depth=2, dropout=0.0, padding=None, tied=True, query_norm=False
    ):
        super().__init__()
        self.embed = nn.Embedding(words, width, padding_idx=padding)
        self.layers = nn.ModuleList(
            TransformerLayer(width, heads, dropout=dropout, query_norm=query_norm) for _ in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, words, labels=None):
        """Return logits, or the mean loss of labels."""
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return (
            logits if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        )
