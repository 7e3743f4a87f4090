"""Sequences divided among ranks: losses and gradients are those of one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import nn
from torch.utils.checkpoint import checkpoint

from accel_runtime.parallel.context import divided, gathered

LENGTH = 16


class Block(nn.Module):
    """Attention with positions, of as many heads as asked for."""

    def __init__(self, kind="causal", heads=4, shared=4):
        super().__init__()
        self.kind, self.heads, self.shared = kind, heads, shared
        self.embed = nn.Embedding(LENGTH, 8)
        self.query, self.out = nn.Linear(8, 8), nn.Linear(8, 8)
        self.key, self.value = nn.Linear(8, 2 * shared), nn.Linear(8, 2 * shared)

    def forward(self, x, positions, mask=None):
        x = x + self.embed(positions)
        q = self.query(x).unflatten(-1, (self.heads, 2)).transpose(1, 2)
        k, v = (f(x).unflatten(-1, (self.shared, 2)).transpose(1, 2) for f in (self.key, self.value))
        options = {"is_causal": self.kind == "causal", "enable_gqa": self.heads != self.shared, "scale": 0.7}
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)
        return self.out(found.transpose(1, 2).flatten(-2))


class Torchs(nn.Module):
    """torch's own layer."""

    def __init__(self, kind="causal"):
        super().__init__()
        self.causal = kind == "causal"
        self.embed = nn.Embedding(LENGTH, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x, positions, mask=None):
        x = x + self.embed(positions)
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1]) if self.causal else None
        return self.layer(x, src_mask=causal, is_causal=self.causal, src_key_padding_mask=mask)


class Recomputed(Block):
    """Computes its activations again in the backward pass."""

    def forward(self, x, positions, mask=None):
        return checkpoint(super().forward, x, positions, mask, use_reentrant=False)


def made(model, kind, length=LENGTH):
    """A model, and a batch: inputs, labels, positions."""
    torch.manual_seed(0)
    model = model(kind)
    x, y = torch.randn(3, length, 8), torch.randn(3, length, 8)
    return model, x, y, torch.arange(length).expand(3, length).contiguous()


def masks(kind, length=LENGTH):
    """The masks of a kind: the whole one, and what a rank gives, with the dimension it is cut along, if any."""
    torch.manual_seed(1)
    full = torch.rand(length, length) > 0.4
    full |= torch.eye(length, dtype=torch.bool)
    keys = (torch.arange(length) < length - 3).view(1, 1, 1, length).repeat(3, 1, 1, 1)
    found = {
        "plain": (None, None),
        "causal": (None, None),
        "whole rows": (full, None),
        "own rows": (full, 0),
        "own keys": (keys, 3),
        "whole keys": (keys, None),
        "added": (torch.randn(length, length), None),
    }
    return found[kind]


def alone(model, kind, length=LENGTH):
    """The outputs and gradients of one process."""
    model, x, y, positions = made(model, kind, length)
    mask = masks(kind, length)[0] if isinstance(model, Block) else None
    x.requires_grad_()
    out = model(x, positions, mask)
    loss = (out - y).square().mean()
    loss.backward()
    return out.detach(), loss.item(), [p.grad for p in model.parameters()], x.grad


def together(model, kind, length=LENGTH):
    """The same of the ranks of a group: outputs joined, losses and gradients averaged."""
    import accel_runtime

    accel_runtime.Accelerator()
    group = dist.group.WORLD
    model, x, y, positions = made(model, kind, length)
    mask, cut = masks(kind, length) if isinstance(model, Block) else (None, None)
    buffers = [x, y, positions] + ([mask] if cut is not None else [])
    dims = [1, -2, 1] + ([cut] if cut is not None else [])
    with divided(group, buffers, dims, {y}):
        assert x.shape[1] == positions.shape[1] == length // group.size()
        own = x.clone().requires_grad_()
        out = model(own, positions, mask)
        loss = (out - y).square().mean()
        loss.backward()
    assert x.shape[1] == positions.shape[1] == length
    assert y.shape[1] == length // group.size(), "asked to stay"
    whole = gathered(out.detach(), 1, group)
    grads = [p.grad for p in model.parameters()]
    for grad in [*grads, total := loss.detach().clone()]:
        dist.all_reduce(grad)
        grad.div_(group.size())
    return whole, total.item(), grads, gathered(own.grad, 1, group) / group.size()


def equal(four_or_pair, model, kind, length=LENGTH):
    """See that the ranks found what one process finds."""
    wanted = alone(model, kind, length)
    for found in four_or_pair.run(together, model, kind, length):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.fixture(params=[2, pytest.param(4, marks=pytest.mark.slow)], ids=["2 ranks", "4 ranks"])
def group(request, clusters):
    """Two and four processes."""
    return clusters[request.param]


@pytest.mark.parametrize(
    "kind", ["plain", "causal", "whole rows", "own rows", "own keys", "whole keys", "added"]
)
def test_attention_is_that_of_one_process_forward_and_backward(group, kind):
    equal(group, Block, kind)


def test_a_length_that_only_the_number_of_ranks_divides_is_divided_too(group):
    equal(group, Block, "causal", 12 if group.size == 4 else 14)


@pytest.mark.parametrize("kind", ["plain", "causal"])
def test_layers_of_torch_attend_to_whole_sequences(group, kind):
    equal(group, Torchs, kind)


def test_activations_computed_again_are_those_of_the_whole_sequence(pair):
    equal(pair, Recomputed, "causal")


def test_heads_may_share_keys(pair):
    equal(pair, lambda kind: Block(kind, shared=2), "causal")


def test_padding_is_masked_for_torchs_layers(pair):
    def both():
        import accel_runtime

        accel_runtime.Accelerator()
        model, x, _, positions = made(Torchs, "plain")
        padded = torch.arange(LENGTH).expand(3, LENGTH) >= LENGTH - 3
        padded = padded.clone()
        wanted = model(x, positions, padded)
        with divided(dist.group.WORLD, [x, positions, padded], [1, 1, 1]):
            found = model(x, positions, padded)
            return gathered(found, 1, dist.group.WORLD).detach(), wanted.detach()

    for found, wanted in pair.run(both):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
