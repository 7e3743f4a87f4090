"""Tensor parallelism: plans, layers that cannot be sharded, and equal results."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.training.models import LanguageModel
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from accel_runtime import Accelerator
from accel_runtime.parallel import tensor_parallel
from accel_runtime.parallel.tensor_parallel import apply_tensor_parallel, plan_tensor_parallel

PLAN = (
    ("embed", "embedding_rowwise"),
    ("layers.*.attention.q", "colwise"),
    ("layers.*.attention.k", "colwise"),
    ("layers.*.attention.v", "colwise"),
    ("layers.*.attention.q_norm", "replicated_with_grad_allreduce"),
    ("layers.*.attention.o", "rowwise"),
    ("layers.*.up", "colwise"),
    ("layers.*.down", "rowwise"),
    ("head", "colwise_rep"),
)


# Plans ---------------------------------------------------------------------------------


def test_a_pattern_matches_several_modules():
    plan = plan_tensor_parallel(LanguageModel(), (("layers.*.up", "colwise"), ("head", "colwise_rep")))
    assert {name: style.output_layouts for name, style in plan.items()} == {
        "layers.0.up": (Shard(-1),), "layers.1.up": (Shard(-1),), "head": (Replicate(),)
    }  # fmt: skip


def test_a_star_does_not_match_a_dot():
    with pytest.raises(ValueError, match=r"tp_plan: \*\.up matches no module of LanguageModel; did you mean"):
        plan_tensor_parallel(LanguageModel(), (("*.up", "colwise"),))


@pytest.mark.parametrize("name", ["tp_plan", "_tp_plan"])
def test_the_plan_of_a_model_is_used(name):
    model = LanguageModel()
    setattr(model, name, {"layers.*.up": "colwise", "layers.*.down": "rowwise"})
    assert set(plan_tensor_parallel(model)) == {
        f"layers.{n}.{leaf}" for n in (0, 1) for leaf in ("up", "down")
    }


def test_the_plan_of_the_profile_overrides_that_of_the_model():
    model = LanguageModel()
    model.tp_plan = {"layers.*.up": "colwise"}
    assert set(plan_tensor_parallel(model, (("head", "colwise_rep"),))) == {"head"}


def test_the_plan_of_a_model_configuration_is_used():
    model = LanguageModel()
    model.config = SimpleNamespace(base_model_tp_plan={"layers.*.up": "colwise"})
    assert set(plan_tensor_parallel(model)) == {"layers.0.up", "layers.1.up"}


def test_the_plan_of_a_submodule_is_relative_to_it():
    model = LanguageModel()
    for layer in model.layers:
        layer._tp_plan = {"up": "colwise", "down": "rowwise"}
    assert set(plan_tensor_parallel(model)) == {
        f"layers.{n}.{leaf}" for n in (0, 1) for leaf in ("up", "down")
    }


def test_the_plan_of_a_model_can_name_missing_modules():
    model = LanguageModel()
    model.tp_plan = {"layers.*.up": "colwise", "layers.*.experts": "moe_tp_experts"}
    assert set(plan_tensor_parallel(model)) == {"layers.0.up", "layers.1.up"}


def test_a_plan_can_contain_styles_of_torch():
    model = LanguageModel()
    model.tp_plan = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
    assert plan_tensor_parallel(model)["layers.0.up"] is model.tp_plan["layers.*.up"]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ((("layers.*.up", "colwize"),), r"layers\.0\.up: unknown style 'colwize'; did you mean colwise\?"),
        ((("layers.*.upp", "colwise"),), r"layers\.\*\.upp matches no module of LanguageModel"),
        ((("up", "colwise"),), r"did you mean layers\.\*\.up\?"),
        ((("layers.*.up", "packed_colwise"),), "is a style of transformers for experts"),
        (
            (("norm", "rowwise"),),
            "norm: rowwise needs an nn.Linear or nn.Embedding, but the module is a LayerNorm",
        ),
        (
            (("head", "embedding_rowwise"),),
            "embedding_rowwise needs an nn.Embedding, but the module is a Linear",
        ),
        ((("head", "colwise"), ("hea*", "rowwise")), "head is named twice, by colwise and by rowwise"),
        ((), "LanguageModel has no tp_plan of its own"),
    ],
)
def test_an_invalid_plan_is_rejected(plan, message):
    with pytest.raises(ValueError, match=message):
        plan_tensor_parallel(LanguageModel(), plan)


def test_multihead_attention_of_torch_is_rejected():
    with pytest.raises(ValueError, match="cannot be sharded: nn"):
        plan_tensor_parallel(nn.TransformerEncoderLayer(8, 2), (("self_attn.out_proj", "rowwise"),))


# Divisibility --------------------------------------------------------------------------


def check_and_fail(model, tp, *entries):
    plan = plan_tensor_parallel(model, entries)
    with pytest.raises(ValueError) as caught:
        tensor_parallel.check_divisibility(model, tp, plan)
    return str(caught.value)


def test_a_dimension_that_is_not_divisible_is_reported_with_its_size():
    message = check_and_fail(LanguageModel(words=33), 2, ("embed", "rowwise"), ("head", "colwise_rep"))
    assert "parallel.tp=2 does not divide dimension 0 of embed.weight, which is 33" in message
    assert "pad it to 34" in message
    assert "dimension 1 of layers.0.down.weight, which is 32" in check_and_fail(
        LanguageModel(), 3, ("layers.*.down", "rowwise")
    )


def test_heads_that_are_not_divisible_are_reported_with_valid_sizes():
    message = check_and_fail(LanguageModel(width=24, heads=6), 4, ("layers.*.attention.q", "colwise"))
    assert "parallel.tp=4 does not divide n_heads=6 of layers.0.attention; tp may be 1, 2, 3, 6" in message


def test_key_value_heads_are_read_from_the_model_configuration():
    model = LanguageModel()
    model.config = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2)
    message = check_and_fail(model, 4, ("layers.*.attention.k", "colwise"))
    assert "num_key_value_heads=2 of model.config; tp may be 1, 2" in message


def test_heads_are_not_checked_if_attention_is_replicated():
    model = LanguageModel(width=24, heads=3)
    plan = plan_tensor_parallel(model, (("layers.*.up", "colwise"), ("layers.*.attention.q", "colwise_rep")))
    tensor_parallel.check_divisibility(model, 4, plan)


def test_tied_parameters_with_different_layouts_are_rejected():
    message = check_and_fail(LanguageModel(), 2, ("head", "colwise_rep"))
    assert "embed.weight and head.weight are one parameter, and the plan has the first whole" in message
    assert "and the second divided along dimension 0" in message


# Equal results -------------------------------------------------------------------------


def train(plan, tp, options):
    """Return losses and full parameters after some steps, and the number of local elements of `embed`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    Accelerator()
    torch.manual_seed(1)
    model = LanguageModel(query_norm=True, **options)
    model.layers[0].second.requires_grad_(False)
    if tp > 1:
        torch.manual_seed(torch.distributed.get_rank())
        apply_tensor_parallel(model, init_device_mesh("cpu", (tp,)), plan_tensor_parallel(model, plan))
    torch.manual_seed(2) if tp == 1 else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator, losses = torch.Generator().manual_seed(3), []
    for _ in range(5):
        batch = torch.randint(options.get("words", 32), (3, 7), generator=generator)
        out = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(out.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    tied = model.head.weight is model.embed.weight
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    gathered = {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach()
        for name, p in model.named_parameters()
    }
    embed = model.embed.weight
    return losses, gathered, tied, frozen, (embed.to_local() if isinstance(embed, DTensor) else embed).numel()


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        (PLAN, {}),
        ((*PLAN, ("layers.*.first", "sequence_parallel"), ("layers.*.second", "sequence_parallel")), {}),
        (PLAN, {"padding": 0}),
        (PLAN, {"padding": 19}),
        ((("embed", "embedding_colwise"), ("head", "rowwise_rep")), {"tied": False}),
    ],
    ids=["whole layers", "sequences", "padding", "padding of another", "the other way"],
)
def test_sharded_layers_compute_the_same_as_full_layers(pair, alone, plan, options):
    (losses, parameters, tied, frozen, size) = alone.run(train, plan, 1, options)[0]
    for rank in pair.run(train, plan, 2, options):
        torch.testing.assert_close(rank[0], losses, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(rank[1], parameters, rtol=1e-5, atol=1e-5)
        assert rank[2:] == (tied, frozen, size // 2)


def test_dropout_of_replicated_activations_is_equal_on_all_ranks(pair):
    first, second = pair.run(
        train, (("layers.*.up", "colwise"), ("layers.*.down", "rowwise")), 2, {"dropout": 0.5}
    )
    assert first[0] == second[0]
    assert all(torch.equal(parameter, second[1][name]) for name, parameter in first[1].items())
