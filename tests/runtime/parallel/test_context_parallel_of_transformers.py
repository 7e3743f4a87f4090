"""Context and sequence parallelism with models of transformers: every attention path equals one process, or is rejected on all ranks."""

from __future__ import annotations

import re
import warnings
from itertools import product

import pytest
import torch
import torch.distributed as dist
from support.cases.pairs import pairwise_params
from support.processes.ranks import preload

from accel_runtime.collectives.handshake import MismatchError
from accel_runtime.parallel.context_parallel import gather_sequence, shard_sequences

LENGTH, VOCABULARY = 16, 32
FAMILIES = ("llama", "mistral", "qwen3", "gpt2", "gpt_neox", "bert")
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
OPTIONS = {
    "llama": {"num_key_value_heads": 2, "intermediate_size": 48},
    "mistral": {"num_key_value_heads": 2, "intermediate_size": 48, "sliding_window": 5},
    "qwen3": {"num_key_value_heads": 1, "intermediate_size": 48, "head_dim": 8},
    "gpt_neox": {"intermediate_size": 48},
    "bert": {"intermediate_size": 48},
}
MASKS = {
    "no mask": (None, False),
    "a mask of ones": ("ones", False),
    "a mask of ones among the buffers": ("ones", True),
    "padding": ("padding", False),
    "padding among the buffers": ("padding", True),
    "padding on the left": ("left padding", True),
    "packed documents": ("packed", False),
    "a full mask": ("full", False),
}


@pytest.fixture(autouse=True, scope="module")
def _import_once(clusters):
    """Import the models before ranks are forked: it takes each process seconds."""
    preload(
        [clusters[2], clusters[4]],
        "transformers.models.auto.modeling_auto",
        *(f"transformers.models.{family}.modeling_{family}" for family in FAMILIES),
    )


def build_model(family, implementation, **options):
    """Return a tiny model with equal values on all ranks."""
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **SIZES, **OPTIONS.get(family, {}), **options)
    kind = transformers.AutoModelForMaskedLM if family == "bert" else transformers.AutoModelForCausalLM
    return kind.from_config(config, attn_implementation=implementation).eval()


def build_batch(kind, length=LENGTH):
    """Return inputs, positions, a mask or None, and random weights of the logits."""
    torch.manual_seed(1)
    inputs, weights = torch.randint(3, VOCABULARY, (2, length)), torch.randn(2, length, VOCABULARY)
    positions = torch.arange(length).repeat(2, 1)
    if kind == "packed":
        rows = [(6, length - 6), (5, length - 5)]
        positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    masks = {
        "ones": torch.ones(2, length, dtype=torch.long),
        "padding": (torch.arange(length) < torch.tensor([[length], [length - 5]])).long(),
        "left padding": (torch.arange(length) >= torch.tensor([[0], [3]])).long(),
        "full": torch.ones(length, length, dtype=torch.bool).tril().expand(2, 1, length, length),
    }
    mask = masks.get(kind)
    if mask is not None and mask.dim() == 2:
        weights *= mask.unsqueeze(-1)
    return inputs, positions, mask, weights


def compute(model, inputs, positions, mask, weights):
    """Return logits and the gradients of their weighted sum."""
    model.zero_grad()
    options = {} if model.config.model_type == "bert" else {"use_cache": False}
    logits = model(input_ids=inputs, position_ids=positions, attention_mask=mask, **options).logits
    (logits * weights).sum().backward()
    return logits.detach(), [p.grad for p in model.parameters() if p.grad is not None]


def find_differences(family, implementation, form, length=LENGTH, options=None):
    """Return the largest relative difference between one process and the ranks for each kind of mask."""
    import accel_runtime

    accel_runtime.Accelerator()
    group, model = dist.group.WORLD, build_model(family, implementation, **(options or {}))
    differences = {}
    for case, (kind, is_buffer) in MASKS.items():
        if kind == "full" and implementation == "eager":
            continue  # transformers adds a mask of this type to the scores as it is
        inputs, positions, mask, weights = build_batch(kind, length)
        logits, gradients = compute(model, inputs, positions, mask, weights)
        buffers = [inputs, positions, weights] + ([mask] if is_buffer else [])
        with shard_sequences(group, buffers, [1] * len(buffers), form=form):
            shard, sums = compute(model, inputs, positions, mask, weights)
        counted = weights.any(-1)
        pairs = [(gather_sequence(shard, 1, group)[counted], logits[counted])]
        for total, gradient in zip(sums, gradients, strict=True):
            dist.all_reduce(total)
            pairs.append((total, gradient))
        differences[case] = max(float((a - b).abs().max() / b.abs().max().clamp(1e-3)) for a, b in pairs)
    return differences


def check_family(ranks, family, implementation, form, **options):
    for differences in ranks.run(find_differences, family, implementation, form, *options.values()):
        assert {case: value for case, value in differences.items() if not value < 1e-4} == {}


@pytest.mark.parametrize("form", ["cp", "sp"])
def test_packed_and_padded_documents_are_masked_as_in_one_process(pair, form):
    check_family(pair, "llama", "sdpa", form)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "implementation", "form", "world_size"),
    pairwise_params(
        {"family": FAMILIES, "implementation": ["sdpa", "eager"], "form": ["cp", "sp"], "world_size": [2, 4]}
    ),
)
def test_models_of_each_family_compute_what_one_process_computes(
    clusters, family, implementation, form, world_size
):
    check_family(clusters[world_size], family, implementation, form)


@pytest.mark.slow
@pytest.mark.parametrize(("implementation", "form"), [("sdpa", "cp"), ("eager", "cp"), ("sdpa", "sp")])
def test_consecutive_blocks_compute_what_one_process_computes(clusters, implementation, form):
    check_family(clusters[4], "mistral", implementation, form, length=20)


# Rejected --------------------------------------------------------------------------------


def call_inside(form, model, give_positions=True, length=LENGTH, **options):
    """Call a model with sharded inputs and positions."""
    inputs, positions, _, _ = build_batch(None, length)
    with shard_sequences(dist.group.WORLD, [inputs, positions], [1, 1], form=form):
        if give_positions:
            options["position_ids"] = positions
        return model(input_ids=inputs, **options)


def build_with(family, implementation="sdpa", kind="CausalLM", **options):
    import transformers

    transformers.set_seed(0)
    config = transformers.AutoConfig.for_model(family, **(SIZES | OPTIONS.get(family, {}) | options))
    known = implementation in {"sdpa", "eager"}
    build = getattr(transformers, f"AutoModelFor{kind}").from_config
    model = build(config, attn_implementation=implementation if known else "sdpa").eval()
    for part in model.modules():
        if hasattr(part, "config"):
            part.config._attn_implementation = implementation
    return model


def generate(form, model):
    inputs, _, _, _ = build_batch(None)
    with shard_sequences(dist.group.WORLD, [inputs], [1], form=form):
        model.generate(input_ids=inputs, max_new_tokens=2)


def mask_by_a_tensor(form):
    """Make a mask with a function that reads this rank's part of the sequence, as models with images do."""
    inputs, positions, _, weights = build_batch(None)
    with shard_sequences(dist.group.WORLD, [inputs, positions, weights], [1, 1, 1], form=form):
        build_mask(weights, positions, lambda batch, _head, _query, key: inputs[batch, key % 8] > 0)


def build_mask(embeddings, positions, function):
    from transformers.masking_utils import create_causal_mask

    create_causal_mask(
        config=build_with("llama").config,
        inputs_embeds=embeddings,
        attention_mask=None,
        past_key_values=None,
        position_ids=positions,
        and_mask_function=function,
    )


def ones(*shape):
    return torch.ones(shape, dtype=torch.long)


REJECTED = {
    "flex attention": (
        lambda form: call_inside(form, build_with("llama", "flex_attention")),
        "'flex_attention' sees",
    ),
    "flash attention": (
        lambda form: call_inside(form, build_with("llama", "flash_attention_2")),
        "'flash_attention_2' sees",
    ),
    "no positions": (lambda form: call_inside(form, build_with("llama"), False), "position_ids is missing"),
    "positions from 0": (
        lambda form: call_inside(
            form, build_with("gpt2"), False, position_ids=torch.arange(LENGTH // 2)[None]
        ),
        "its positions start from 0 on every rank",
    ),
    "positions of the full sequence": (
        lambda form: call_inside(form, build_with("gpt2"), False, position_ids=torch.arange(LENGTH)[None]),
        "position_ids has 16 positions on this rank",
    ),
    "a mask of another length": (
        lambda form: call_inside(form, build_with("llama"), attention_mask=ones(2, 12)),
        "attention_mask has 12 columns",
    ),
    "a mask of one rank": (
        lambda form: call_inside(form, build_with("llama"), attention_mask=torch.ones(2, 1, 8, 8)),
        "mask has 8 rows and 8 columns",
    ),
    "a mask of one rank for eager attention": (
        lambda form: call_inside(form, build_with("llama", "eager"), attention_mask=torch.ones(2, 1, 8, 8)),
        "mask has 8 rows and 8 columns",
    ),
    "labels that the model shifts": (
        lambda form: call_inside(form, build_with("llama"), labels=ones(2, LENGTH // 2)),
        "Shift labels before maybe_context_parallel",
    ),
    "a classification of sequences": (
        lambda form: call_inside(form, build_with("gpt2", kind="SequenceClassification", pad_token_id=0)),
        "reads one position of a sequence",
    ),
    "attention of the model's own": (
        lambda form: call_inside(form, build_with("gpt2", "eager", reorder_and_upcast_attn=True)),
        "has the queries and keys of this rank only",
    ),
    "a causal mask of the model's own": (
        lambda form: call_inside(
            form, build_with("gpt_neo", "eager", attention_types=[[["global"], 2]], num_layers=2, num_heads=4)
        ),
        "has the queries and keys of this rank only",
    ),
    "biases of relative positions": (
        lambda form: call_inside(form, build_with("mpt", "eager", d_model=32, n_heads=4, n_layers=2), False),
        "no position_ids",
    ),
    "biases of distances": (
        lambda form: call_inside(form, build_with("falcon", alibi=True)),
        "its biases (ALiBi) are those of this rank",
    ),
    "an encoder and a decoder": (
        lambda form: call_inside(
            form, build_with("bart", kind="Seq2SeqLM", d_model=32, pad_token_id=1), False
        ),
        "parallelism failed: it has no position_ids",
    ),
    "text that is generated": (
        lambda form: generate(form, build_with("llama")),
        "its positions start from 0 on every rank",
    ),
    "a recurrent model": (
        lambda form: call_inside(form, build_with("mamba", "eager", num_hidden_layers=1), False),
        "layers linear_attention pass a state",
    ),
    "recurrent layers": (
        lambda form: call_inside(form, build_with("lfm2", layer_types=["conv", "full_attention"])),
        "layers conv pass a state along the sequence",
    ),
    "a mask function with a tensor": (mask_by_a_tensor, "its mask function reads a tensor of shape [2, 8]"),
}
REJECTED_BY_CP = {
    "one position per rank": (
        lambda form: call_inside(form, build_with("llama"), length=2),
        "one position per rank is not masked by transformers",
    ),
}
REJECTED_BY_SP = {
    "heads that ranks do not divide": (
        lambda form: call_inside(form, build_with("llama", num_attention_heads=1, num_key_value_heads=1)),
        "LlamaAttention with sequence parallelism failed: its number of heads, 1 on this rank",
    ),
    "attention weights": (
        lambda form: call_inside(form, build_with("llama", "eager"), output_attentions=True),
        "LlamaForCausalLM with sequence parallelism failed: output_attentions needs the weights of all heads",
    ),
    "sinks of heads": (
        lambda form: call_inside(
            form, build_with("gpt_oss", "eager", intermediate_size=32, num_local_experts=2)
        ),
        "GptOssAttention with sequence parallelism failed: it has values for all heads (s_aux, sinks)",
    ),
}


def check_rejected(cases, form):
    import accel_runtime

    accel_runtime.Accelerator()
    for case, (act, message) in cases.items():
        with pytest.raises(ValueError, match=re.escape(message)) as caught:
            act(form)
        assert re.fullmatch(r"[^\n]+?: [^\n]+\. [A-Z][^\n]+\.", str(caught.value)), (case, caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "cases"), [("cp", REJECTED_BY_CP), ("sp", REJECTED_BY_SP)])
def test_calls_that_would_see_only_a_shard_are_rejected(pair, form, cases):
    pair.run(check_rejected, REJECTED | cases, form)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["cp", "sp"])
def test_ranks_that_give_models_different_inputs_are_rejected(pair, form):
    def disagree():
        import accel_runtime

        is_main = accel_runtime.Accelerator().is_main_process
        for options in (
            {"attention_mask": ones(2, LENGTH) if is_main else None},
            {"attention_mask": ones(2, LENGTH if is_main else LENGTH // 2)},
            {"give_positions": is_main},
            {"labels": ones(2, LENGTH // 2) if is_main else None},
        ):
            with pytest.raises(MismatchError):  # noqa: PT012 - on the rank without labels, by the second
                call_inside(form, build_with("llama"), **options)
                gather_sequence(ones(1, 1), 0, dist.group.WORLD)

    pair.run(disagree)


def test_transformers_is_unchanged_outside_of_the_context(pair):
    def compare():
        from transformers import masking_utils, modeling_utils
        from transformers.loss.loss_utils import LOSS_MAPPING

        import accel_runtime

        accel_runtime.Accelerator()

        def snapshot():
            classes = (modeling_utils.PreTrainedModel, modeling_utils.AttentionInterface)
            return [dict(vars(owner)) for owner in (masking_utils, *classes)], dict(LOSS_MAPPING)

        before = snapshot()
        for form in ("cp", "sp"):
            call_inside(form, build_with("llama"))
            with pytest.raises(ValueError):
                call_inside(form, build_with("llama"), False)
        assert snapshot() == before

    pair.run(compare)


# Through an Accelerator ------------------------------------------------------------------


def train(sizes, batch_size, implementation, compiled):
    """Train on packed documents for an epoch; return the parameters and the losses of all samples."""
    from torch.utils.data import DataLoader, TensorDataset

    from accel_runtime import Accelerator, ParallelismConfig

    accelerator = Accelerator(parallelism_config=ParallelismConfig(**sizes) if sizes else None)
    model = build_with("llama", implementation).train()
    model.activation_checkpointing_enable()
    warnings.simplefilter("ignore")  # torch warns of its own tracing and sharding
    if compiled:
        model.compile(backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batches = [build_batch(kind)[:2] for kind in ("packed", None, "packed")]
    inputs, positions = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
    labels = torch.nn.functional.pad(inputs[:, 1:], (0, 1), value=0)
    loader = DataLoader(TensorDataset(inputs, positions, labels), batch_size=batch_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for inputs, positions, labels in loader:
        with accelerator.maybe_context_parallel([inputs, positions, labels], [1, 1, 1]):
            options = {"labels": labels, "shift_labels": labels, "use_cache": False}
            loss = model(input_ids=inputs, position_ids=positions, **options).loss
            accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean"))
    return accelerator.get_state_dict(model), torch.stack(losses)


LAYOUTS = {
    "cp 2": (2, {"cp_size": 2}),
    "cp 4": (4, {"cp_size": 4}),
    "dp_replicate 2 x cp 2": (4, {"dp_replicate_size": 2, "cp_size": 2}),
    "dp_shard 2 x cp 2": (4, {"dp_shard_size": 2, "cp_size": 2}),
    "sp 2": (2, {"sp_size": 2}),
    "sp 4": (4, {"sp_size": 4}),
    "dp_replicate 2 x sp 2": (4, {"dp_replicate_size": 2, "sp_size": 2}),
    "dp_shard 2 x sp 2": (4, {"dp_shard_size": 2, "sp_size": 2}),
    "sp 2 x tp 2": (4, {"sp_size": 2, "tp_size": 2}),
}


TRAINED = {
    ("cp 2", "eager", True),
    ("cp 2", "sdpa", True),
    ("cp 4", "sdpa", False),
    ("dp_replicate 2 x cp 2", "eager", False),
    ("dp_shard 2 x cp 2", "sdpa", False),
    ("sp 2", "sdpa", True),
    ("sp 4", "eager", False),
    ("dp_replicate 2 x sp 2", "sdpa", False),
    ("dp_shard 2 x sp 2", "eager", False),
    ("sp 2 x tp 2", "sdpa", False),
}
"""Each layout once, and compiled models of both kinds, on two ranks: four compile for 20 seconds."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "implementation", "compiled"),
    [
        pytest.param(*case, marks=[pytest.mark.full] * (case not in TRAINED))
        for case in product(LAYOUTS, ("sdpa", "eager"), (False, True))
    ],
)
def test_training_a_model_of_transformers_equals_one_process(clusters, layout, implementation, compiled):
    world_size, sizes = LAYOUTS[layout]
    expected = train(None, 2, implementation, False)
    batch_size = 2 // (sizes.get("dp_replicate_size", 1) * sizes.get("dp_shard_size", 1))
    results = clusters[world_size].run(train, sizes, batch_size, implementation, compiled)
    for state, losses in results:
        torch.testing.assert_close(losses, expected[1], rtol=1e-5, atol=1e-5)
        for name, parameter in state.items():
            torch.testing.assert_close(parameter, expected[0][name], rtol=1e-4, atol=1e-5)
