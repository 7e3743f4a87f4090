"""Context and sequence parallelism: losses and gradients equal those of one process."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from support.cases.log_messages import collect_messages
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from accel_runtime.collectives.handshake import MismatchError
from accel_runtime.parallel.context_parallel import gather_sequence, shard_sequences
from accel_runtime.parallel.sharded_attention import compare_forms

LENGTH = 16


class Block(nn.Module):
    """Attention with positions and a number of heads."""

    def __init__(self, kind="causal", heads=4, shared=4):
        super().__init__()
        self.kind, self.heads, self.shared = kind, heads, shared
        self.embed = nn.Embedding(LENGTH, 8)
        self.query, self.out = nn.Linear(8, 2 * heads), nn.Linear(2 * heads, 8)
        self.key, self.value = nn.Linear(8, 2 * shared), nn.Linear(8, 2 * shared)

    def forward(self, x, positions, mask=None):
        x = x + self.embed(positions)
        q = self.query(x).unflatten(-1, (self.heads, 2)).transpose(1, 2)
        k, v = (f(x).unflatten(-1, (self.shared, 2)).transpose(1, 2) for f in (self.key, self.value))
        options = {"is_causal": self.kind == "causal", "enable_gqa": self.heads != self.shared, "scale": 0.7}
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)
        return self.out(attended.transpose(1, 2).flatten(-2))


class TorchBlock(nn.Module):
    """The encoder layer of torch."""

    def __init__(self, kind="causal"):
        super().__init__()
        self.causal = kind == "causal"
        self.embed = nn.Embedding(LENGTH, 8)
        self.layer = nn.TransformerEncoderLayer(8, 4, 16, dropout=0.0, batch_first=True)

    def forward(self, x, positions, mask=None):
        x = x + self.embed(positions)
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1]) if self.causal else None
        return self.layer(x, src_mask=causal, is_causal=self.causal, src_key_padding_mask=mask)


class Recomputed(Block):
    """A block that recomputes its activations in the backward pass."""

    def forward(self, x, positions, mask=None):
        return checkpoint(super().forward, x, positions, mask, use_reentrant=False)


def build_model_and_batch(model, kind, length=LENGTH):
    """Return a model, and a batch: inputs, labels, positions."""
    torch.manual_seed(0)
    model = model(kind)
    dtype = next(model.parameters()).dtype
    x, y = torch.randn(3, length, 8, dtype=dtype), torch.randn(3, length, 8, dtype=dtype)
    return model, x, y, torch.arange(length).expand(3, length).contiguous()


def build_mask(kind, length=LENGTH):
    """Return the full mask of a kind, and the dimension in which ranks shard it, or None."""
    torch.manual_seed(1)
    full = torch.rand(length, length) > 0.4
    full |= torch.eye(length, dtype=torch.bool)
    keys = (torch.arange(length) < length - 3).view(1, 1, 1, length).repeat(3, 1, 1, 1)
    masks = {
        "plain": (None, None),
        "causal": (None, None),
        "whole rows": (full, None),
        "own rows": (full, 0),
        "own keys": (keys, 3),
        "whole keys": (keys, None),
        "added": (torch.randn(length, length), None),
        "by heads": (torch.randn(4, length, length), None),
        "own by heads": (torch.randn(3, 4, length, length), 2),
    }
    return masks[kind]


def compute_reference(model, kind, length=LENGTH):
    """Return the outputs and gradients of one process."""
    model, x, y, positions = build_model_and_batch(model, kind, length)
    mask = build_mask(kind, length)[0] if isinstance(model, Block) else None
    x.requires_grad_()
    out = model(x, positions, mask)
    loss = (out - y).square().mean()
    loss.backward()
    return out.detach(), loss.item(), [p.grad for p in model.parameters()], x.grad


def compute_on_ranks(model, kind, form, length=LENGTH):
    """Return the same on the ranks of a group: outputs joined, losses and gradients averaged."""
    import accel_runtime

    accel_runtime.Accelerator()
    group = dist.group.WORLD
    model, x, y, positions = build_model_and_batch(model, kind, length)
    mask, cut = build_mask(kind, length) if isinstance(model, Block) else (None, None)
    buffers = [x, y, positions] + ([mask] if cut is not None else [])
    dims = [1, -2, 1] + ([cut] if cut is not None else [])
    with shard_sequences(group, buffers, dims, {y}, form):
        assert x.shape[1] == positions.shape[1] == length // group.size()
        leaf = x.clone().requires_grad_()
        out = model(leaf, positions, mask)
        loss = (out - y).square().mean()
        loss.backward()
    assert x.shape[1] == positions.shape[1] == length
    assert y.shape[1] == length // group.size(), "no_restore_buffers"
    output = gather_sequence(out.detach(), 1, group)
    grads = [p.grad for p in model.parameters()]
    for grad in [*grads, total := loss.detach().clone()]:
        dist.all_reduce(grad)
        grad.div_(group.size())
    return output, total.item(), grads, gather_sequence(leaf.grad, 1, group) / group.size()


def check_equal(four_or_pair, model, kind, form, length=LENGTH, **tolerance):
    """Check that the results of the ranks equal those of one process."""
    expected = compute_reference(model, kind, length)
    for result in four_or_pair.run(compute_on_ranks, model, kind, form, length):
        torch.testing.assert_close(result, expected, **({"rtol": 1e-5, "atol": 1e-6} | tolerance))


@pytest.fixture(params=[2, pytest.param(4, marks=pytest.mark.slow)], ids=["2 ranks", "4 ranks"])
def group(request, clusters):
    """Two and four processes."""
    return clusters[request.param]


@pytest.fixture(params=["cp", "sp"])
def form(request):
    """The keys of the profile that shard sequences."""
    return request.param


@pytest.mark.parametrize(
    "kind",
    [
        "plain",
        "causal",
        "whole rows",
        "own rows",
        "own keys",
        "whole keys",
        "added",
        "by heads",
        "own by heads",
    ],
)
def test_attention_equals_that_of_one_process_forward_and_backward(group, form, kind):
    check_equal(group, Block, kind, form)


def test_a_length_divisible_only_by_the_number_of_ranks_is_sharded(group, form):
    check_equal(group, Block, "causal", form, 12 if group.size == 4 else 14)


@pytest.mark.parametrize("kind", ["plain", "causal"])
def test_torch_layers_attend_to_full_sequences(group, form, kind):
    check_equal(group, TorchBlock, kind, form)


def test_recomputed_activations_attend_to_full_sequences(pair, form):
    check_equal(pair, Recomputed, "causal", form)


class Compiled(Recomputed):
    """A compiled block that recomputes its activations in the backward pass."""

    def __init__(self, kind="causal"):
        super().__init__(kind)
        self.compile(backend="aot_eager")


@pytest.mark.slow
def test_compiled_blocks_that_recompute_activations_attend_to_full_sequences(pair, form):
    check_equal(pair, Compiled, "causal", form)


@pytest.mark.parametrize(("heads", "shared"), [(4, 2), (4, 1), (12, 6), (12, 4), (12, 3)])
def test_heads_can_share_keys(group, form, heads, shared):
    check_equal(group, lambda kind: Block(kind, heads, shared), "causal", form)


def test_results_in_float64_differ_by_rounding_only(group, form):
    check_equal(group, lambda kind: Block(kind, 12, 6).double(), "causal", form, rtol=1e-9, atol=1e-12)


class Autocast(Block):
    """A block that computes in bfloat16."""

    def forward(self, x, positions, mask=None):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x, positions, mask).float()


def test_results_in_bfloat16_differ_by_its_rounding_only(pair, form):
    check_equal(pair, lambda kind: Autocast(kind, shared=2), "causal", form, rtol=2**-6, atol=2**-7)


def test_padding_is_masked_in_torch_layers(pair, form):
    def run_both():
        import accel_runtime

        accel_runtime.Accelerator()
        model, x, _, positions = build_model_and_batch(TorchBlock, "plain")
        padded = torch.arange(LENGTH).expand(3, LENGTH) >= LENGTH - 3
        padded = padded.clone()
        expected = model(x, positions, padded)
        with shard_sequences(dist.group.WORLD, [x, positions, padded], [1, 1, 1], form=form):
            result = model(x, positions, padded)
            return gather_sequence(result, 1, dist.group.WORLD).detach(), expected.detach()

    for result, expected in pair.run(run_both):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)


def measure(form, heads, shared):
    """Return the bytes that this rank sends in a forward and a backward pass, and those of its full keys and values."""
    import accel_runtime
    from accel_runtime.parallel import sharded_attention

    accel_runtime.Accelerator()
    group, bytes_sent, held = dist.group.WORLD, [0], [0]
    others = group.size() - 1
    collectives = {
        (sharded_attention, "_all_gather"): lambda _, shard: shard.nbytes * others,
        (sharded_attention, "_reduce_scatter"): lambda shard, _: shard.nbytes * others,
        (dist, "all_to_all_single"): lambda _, sent, __, sizes: (
            sent.nbytes - sizes[group.rank()] * sent.element_size()
        ),
    }
    attention = sharded_attention.build_attention(sharded_attention.ShardedSequences(group, form=form))
    query, key, value = (
        torch.randn(2, n, LENGTH // 4, 8, requires_grad=True) for n in (heads, shared, shared)
    )
    with pytest.MonkeyPatch.context() as patch:
        for (owner, name), count in collectives.items():
            call = getattr(owner, name)

            def counted(*args, call=call, count=count, **options):
                bytes_sent[0] += count(*args)
                return call(*args, **options)

            patch.setattr(owner, name, counted)
        for owner, name, keys in (
            (sharded_attention.ShardedSequences, "gather", lambda key: [key]),
            (sharded_attention.ExchangedHeads, "_exchange_heads", lambda tensors: tensors[1:]),
        ):
            call = getattr(owner, name)

            def kept(*args, call=call, keys=keys):
                result = call(*args)
                held[0] += sum(tensor.nbytes for tensor in keys(result))
                return result

            patch.setattr(owner, name, kept)
        attention(query, key, value, is_causal=True, enable_gqa=True).sum().backward()
    return bytes_sent[0], held[0]


@pytest.mark.parametrize(("heads", "shared"), [(4, 4), (8, 2), (4, 1), (12, 6), (12, 3)])
def test_bytes_sent_and_held_are_those_by_which_a_form_is_recommended(group, heads, shared):
    (cp_sent, cp_held), (sp_sent, sp_held) = (
        zip(*group.run(measure, form, heads, shared), strict=True) for form in ("cp", "sp")
    )
    ratios = compare_forms(heads, shared, group.size)
    assert sum(sp_sent) / sum(cp_sent) == pytest.approx(ratios.sent)
    assert max(sp_held) / max(cp_held) == pytest.approx(ratios.held)


def test_heads_that_ranks_do_not_divide_cannot_be_compared():
    assert compare_forms(6, 6, 4) is None


# Refused ---------------------------------------------------------------------------------

REFUSALS = {
    "a length": (
        lambda x, form, _: shard_sequences(dist.group.WORLD, [x[:, :7]], [1], form=form).__enter__(),
        "Pad or truncate it to 6 or 8",
    ),
    "no dimension": (
        lambda x, form, _: shard_sequences(dist.group.WORLD, [x], [5], form=form).__enter__(),
        "Invalid sequence dimension",
    ),
    "unlike lists": (
        lambda x, form, _: shard_sequences(dist.group.WORLD, [x], [], form=form).__enter__(),
        "1 buffers and 0 dimensions",
    ),
    "a stranger": (
        lambda x, form, _: shard_sequences(dist.group.WORLD, [], [], {x}, form=form).__enter__(),
        "Give it in both",
    ),
    "a parameter": (
        lambda x, form, _: shard_sequences(dist.group.WORLD, [nn.Parameter(x)], [1], form=form).__enter__(),
        "that requires gradients",
    ),
    "keys that were not cut": (
        lambda x, _, inside: inside(
            lambda: F.scaled_dot_product_attention(x, torch.ones(3, 9, 8), torch.ones(3, 9, 8))
        ),
        "attention has 9 keys on this rank, and its part of the sequence is 8 long",
    ),
    "a mask of one part only": (
        lambda x, _, inside: inside(
            lambda: F.scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(8, 8))
        ),
        "the attention mask has 8 rows and 8 columns",
    ),
    "two masks": (
        lambda x, _, inside: inside(
            lambda: F.scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(8, 16), is_causal=True)
        ),
        "one of them",
    ),
    "a causal rectangle": (
        lambda x, _, inside: inside(lambda: F.scaled_dot_product_attention(x[:, :1], x, x, is_causal=True)),
        "as many queries as keys",
    ),
    "attention weights": (
        lambda x, _, inside: inside(lambda: nn.MultiheadAttention(8, 2, batch_first=True)(x, x, x)),
        "Call it with need_weights=False",
    ),
    "attention by products": (
        lambda x, _, inside: inside(lambda: (x @ x.transpose(-1, -2)).softmax(-1) @ x),
        "scaled_dot_product_attention",
    ),
    "attention by bmm": (
        lambda x, _, inside: inside(lambda: torch.bmm(x, x.transpose(-1, -2))),
        "a product of shape [3, 8, 8]",
    ),
    "attention by baddbmm": (
        lambda x, _, inside: inside(lambda: torch.baddbmm(torch.ones(8, 8), x, x.transpose(-1, -2))),
        "a product of shape [3, 8, 8]",
    ),
    "attention by einsum": (
        lambda x, _, inside: inside(lambda: torch.einsum("bqd,bkd->bqk", x, x)),
        "a product of shape [3, 8, 8]",
    ),
    "keys that are added": (
        lambda x, _, inside: inside(
            lambda: nn.MultiheadAttention(8, 2, add_zero_attn=True, batch_first=True)(
                x, x, x, need_weights=False
            )
        ),
        "add_zero_attn",
    ),
}


HEADS_REFUSED = {
    "heads that ranks do not divide": (
        lambda x, _, inside: inside(lambda: F.scaled_dot_product_attention(x, x, x)),
        "failed: its number of heads, 3 on this rank, is not a multiple of sp: 2. Use cp instead of sp.",
    ),
    "no heads": (
        lambda x, _, inside: inside(lambda: F.scaled_dot_product_attention(x[0], x[0], x[0])),
        "no dimension of heads",
    ),
    "heads that cannot share keys": (
        lambda x, _, inside: inside(
            lambda: F.scaled_dot_product_attention(
                x.expand(4, 3, 8, 8).transpose(0, 1), x[:, None].expand(3, 2, 8, 8), x[:, None]
            )
        ),
        "4 heads of queries cannot share 2 heads",
    ),
    "a mask for other heads": (
        lambda x, _, inside: inside(
            lambda: F.scaled_dot_product_attention(x[:2], x[:2], x[:2], attn_mask=torch.ones(3, 16, 16))
        ),
        "its mask is for 3 heads, and there are 2",
    ),
}


def test_operations_that_would_see_only_a_shard_are_rejected(pair, form):
    def refused(cases):
        import accel_runtime

        accel_runtime.Accelerator()

        for case, (act, message) in cases.items():
            x = torch.randn(3, LENGTH, 8)

            def inside(act, x=x):
                with shard_sequences(dist.group.WORLD, [x], [1], form=form):
                    act()

            with pytest.raises(ValueError, match=re.escape(message)):
                act(x, form, inside)
            assert x.shape[1] == LENGTH, case

    pair.run(refused, REFUSALS | (HEADS_REFUSED if form == "sp" else {}))


def test_products_that_are_no_attention_are_allowed(pair):
    """Rotary embeddings, weights, and attention of a script that gathers its keys."""

    def multiply():
        import accel_runtime

        accel_runtime.Accelerator()
        group, x = dist.group.WORLD, torch.randn(3, LENGTH, LENGTH // 2)
        expected = (x @ x.transpose(-1, -2)).softmax(-1) @ x
        with shard_sequences(group, [x], [1]):
            assert (x @ torch.ones(8, 8)).shape == (x[..., :1] @ torch.ones(3, 1, 8)).shape == (3, 8, 8)
            keys = gather_sequence(x, 1, group)
            result = gather_sequence((x @ keys.transpose(-1, -2)).softmax(-1) @ keys, 1, group)
        torch.testing.assert_close(result, expected)

    pair.run(multiply)


def test_ranks_that_disagree_are_rejected_before_a_collective(pair, form):
    def disagree():
        import accel_runtime

        accelerator = accel_runtime.Accelerator()
        group, is_main = dist.group.WORLD, accelerator.process_index == 0
        x, other = torch.randn(3, 2, LENGTH, 8), torch.randn(3 + is_main, 2, LENGTH, 8)
        with pytest.raises(MismatchError, match="buffers of shape"):
            shard_sequences(group, [other], [2], form=form).__enter__()
        with pytest.raises(MismatchError, match="gather_sequence of float32"):
            gather_sequence(other, 2, group)
        with shard_sequences(group, [x], [2], form=form):
            heads = x if is_main else x[:, :1]
            with pytest.raises(MismatchError, match="rank 1: attention of float32"):
                F.scaled_dot_product_attention(x, heads, heads, enable_gqa=True)
            with pytest.raises(MismatchError, match="is_causal"):
                F.scaled_dot_product_attention(x, x, x, is_causal=is_main)
            with pytest.raises(MismatchError, match="the mask bool"):
                F.scaled_dot_product_attention(
                    x, x, x, attn_mask=torch.ones(1, LENGTH, dtype=bool) if is_main else None
                )
            with pytest.raises(MismatchError, match="as many queries as keys"):
                F.scaled_dot_product_attention(x[..., : 8 - is_main, :], x, x, is_causal=True)

    pair.run(disagree)


@pytest.mark.slow
def test_flex_attention_is_rejected(pair, form):
    """torch compiles it by itself, and reports the error as one of the compiler."""

    def refused():
        import accel_runtime

        accel_runtime.Accelerator()
        x = torch.randn(3, 2, LENGTH, 8)
        with shard_sequences(dist.group.WORLD, [x], [2], form=form), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises((ValueError, RuntimeError), match="flex_attention sees this rank's part"):
                flex_attention(x, x, x)

    pair.run(refused)


def test_sharding_sequences_twice_is_rejected(pair):
    def refused():
        import accel_runtime

        accel_runtime.Accelerator()
        x = torch.randn(3, LENGTH, 8)
        with shard_sequences(dist.group.WORLD, [x], [1]):
            with pytest.raises(RuntimeError, match="Pass all buffers to one"):
                shard_sequences(dist.group.WORLD, [x], [1]).__enter__()
            assert x.shape[1] == LENGTH // 2

    pair.run(refused)


def test_views_of_one_tensor_are_sharded_and_restored(pair):
    """Inputs and labels often share memory: writing into one would change the other."""

    def cut():
        import accel_runtime

        accel_runtime.Accelerator()
        tokens = torch.arange(17)[None].clone()
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        with shard_sequences(dist.group.WORLD, [inputs, labels], [1, 1]):
            inside = inputs.tolist(), labels.tolist()
        return inside, tokens.tolist(), inputs.tolist(), labels.tolist()

    numbers = list(range(17))
    front, back = [[*numbers[:4], *numbers[12:16]]], [numbers[4:12]]
    for half, ((inputs, labels), *after) in zip((front, back), pair.run(cut), strict=True):
        assert inputs == half
        assert labels == [[number + 1 for number in half[0]]]
        assert after == [[numbers], [numbers[:-1]], [numbers[1:]]]


# Through an Accelerator ------------------------------------------------------------------


class Tagger(nn.Module):
    """A causal model that classifies every token."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.block, self.head = nn.Embedding(11, 8), Block("causal"), nn.Linear(8, 5, bias=False)

    def forward(self, tokens, positions):
        return self.head(self.block(self.words(tokens), positions))


def build_sentences():
    """Return six sentences with labels, some of which are ignored."""
    torch.manual_seed(2)
    tokens, labels = torch.randint(11, (6, LENGTH)), torch.randint(5, (6, LENGTH))
    labels[torch.rand(6, LENGTH) < 0.4] = -100
    return TensorDataset(tokens, labels, torch.arange(LENGTH).expand(6, LENGTH).contiguous())


def compute_loss(logits, labels):
    """Return the mean over the counted labels, and their number."""
    mean = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    return mean, (labels != -100).sum()


def train(sizes, batch):
    """Train for an epoch, and return parameters and predictions of this rank."""
    from accel_runtime import Accelerator, ParallelismConfig

    accelerator = Accelerator(parallelism_config=ParallelismConfig(**sizes) if sizes else None)
    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = DataLoader(build_sentences(), batch_size=batch)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, refused = [], 0
    for tokens, labels, positions in loader:
        with accelerator.maybe_context_parallel([tokens, labels, positions], [1, 1, 1], {labels}):
            logits = model(tokens, positions)
            loss, count = compute_loss(logits, labels)
            accelerator.backward(loss, weight=count)
        optimizer.step()
        optimizer.zero_grad()
        if sizes and {"cp_size", "sp_size"} & sizes.keys():
            with pytest.raises(ValueError, match=r"accelerator\.gather_sequence"):
                accelerator.gather_for_metrics(logits.argmax(-1))
            with pytest.raises(ValueError, match=r"accelerator\.gather_sequence"):
                accelerator.gather_for_metrics(logits.argmax(-1).tolist())
            refused += 1
        full_logits = accelerator.gather_sequence(logits.detach())
        losses.append(accelerator.gather_for_metrics(full_logits))
        assert accelerator.gather_for_metrics(tokens).shape[1] == LENGTH
        texts = accelerator.gather_for_metrics([str(row) for row in tokens.tolist()])
        assert len(texts) == len(losses[-1])
    state = {
        name: getattr(p, "full_tensor", lambda p=p: p)().detach() for name, p in model.named_parameters()
    }
    return {name.removeprefix("module."): p for name, p in state.items()}, torch.cat(losses)


LAYOUTS = {
    "dp_shard 2 x cp 2": ({"dp_shard_size": 2, "cp_size": 2}, 4, 1),
    "cp 4": ({"cp_size": 4}, 4, 2),
    "sp 2": ({"sp_size": 2}, 2, 2),
    "dp_shard 2 x sp 2": ({"dp_shard_size": 2, "sp_size": 2}, 4, 1),
    "dp_replicate 2 x sp 2": ({"dp_replicate_size": 2, "sp_size": 2}, 4, 1),
    "sp 4": ({"sp_size": 4}, 4, 2),
}
"""Layouts with weighted losses; `test_axes.py` trains in all pairs of axes."""


def test_a_backward_pass_of_sequences_that_are_not_split_is_reported_once(pair, form):
    def train_outside():
        from accel_runtime import Accelerator, ParallelismConfig

        accelerator = Accelerator(parallelism_config=ParallelismConfig(**{f"{form}_size": 2}))
        model = accelerator.prepare(nn.Linear(2, 2))
        with collect_messages("accel_runtime") as messages:
            for _ in range(2):
                accelerator.backward(model(torch.ones(1, 2)).sum())
        return [message for message in messages if "Sequences are not split" in message]

    (message,), others = pair.run(train_outside)
    assert others == []
    assert f"{form} is 2" in message
    assert message.endswith(
        "Train inside of accelerator.maybe_context_parallel(buffers=..., buffer_seq_dims=...)."
    )


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_with_sharded_sequences_equals_one_process(clusters, layout):
    sizes, world, batch = LAYOUTS[layout]
    expected = train(None, 2)
    for result in clusters[world].run(train, sizes, batch):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
