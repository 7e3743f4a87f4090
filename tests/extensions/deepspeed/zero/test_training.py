"""Training with each stage of ZeRO is that of one process on the global batches, for any program."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.runs.zero_runs import BATCH, LAYOUTS, Program, connect, run_program
from support.training.models import TwoLayerNet
from torch.utils.data import DataLoader

pytest.importorskip("deepspeed", reason="deepspeed is in an environment of its own: make test-deepspeed")

SHARDED = [layout for layout in LAYOUTS if layout.startswith("stage") and layout != "stage 0"]
LOSSES = (
    "one",
    "sum",
    "no_sync",
    "forward, backward, forward, backward",
    "forward, forward, backward, backward",
    "forward, backward, backward",
)
BAR = {"no": 1e-5, "bf16": 2**-7}
"""Bounds of tests/runtime/parallel/test_equality.py, absolute and relative."""

PROGRAMS = st.builds(
    Program,
    accumulate=st.sampled_from([1, 2, 4]),
    # The last batch is full, is smaller, has one row for all ranks, or ends a cycle early.
    rows=st.sampled_from([4 * BATCH, 3 * BATCH + 5, 2 * BATCH + 1, 7 * BATCH]),
    weighted=st.booleans(),
    clip=st.sampled_from([None, 0.05, 100.0]),
    clips_always=st.booleans(),
    schedule=st.booleans(),
    losses=st.sampled_from(LOSSES),
    clear=st.sampled_from(["after", "before"]),
    skips=st.sampled_from(["nothing", "odd steps", "first"]),
    optimizer=st.sampled_from(["adamw", "sgd"]),
    groups=st.booleans(),
    tied=st.booleans(),
    frozen=st.booleans(),
    checkpointing=st.sampled_from(["no", "reentrant", "other"]),
    mixed_precision=st.just("no"),
)


@pytest.fixture(scope="module")
def check(clusters):
    """Compare a program on all ranks with the program on one process."""

    def compare(program, layout, size=2):
        (expected,) = clusters[1].run(run_program, program, "replicated")
        bar = BAR[program.mixed_precision]
        for norms, rates, parameters in clusters[size].run(run_program, program, layout):
            torch.testing.assert_close(norms, expected[0], atol=bar, rtol=bar)
            assert rates == expected[1]
            torch.testing.assert_close(parameters, expected[2], atol=bar, rtol=bar)

    return compare


FAST = ("stage 1", "stage 2, small buckets", "stage 3, small buckets", "stage 3, offload")


@pytest.mark.parametrize(
    "layout", [pytest.param(each, marks=() if each in FAST else pytest.mark.full) for each in SHARDED]
)
@settings(max_examples=6, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(program=PROGRAMS)
def test_a_program_trains_as_on_one_process(check, layout, program):
    check(program, layout)


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 3])
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(program=PROGRAMS, layout=st.sampled_from(SHARDED))
def test_any_program_trains_as_on_one_process(check, size, layout, program):
    check(program, layout, size)


BF16 = {
    "accumulated, clipped, weighted": Program(
        mixed_precision="bf16", optimizer="sgd", accumulate=4, rows=9 * BATCH + 1, clip=0.1, weighted=True
    ),
    "two losses, computed again": Program(
        mixed_precision="bf16",
        optimizer="sgd",
        losses="forward, backward, backward",
        checkpointing="reentrant",
    ),
}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(each, marks=() if each in ("stage 1", "stage 3, offload") else pytest.mark.full)
        for each in SHARDED
    ],
)
@pytest.mark.parametrize("program", BF16)
def test_a_program_in_bf16_trains_as_on_one_process(check, layout, program):
    check(BF16[program], layout)


def test_three_ranks_of_which_some_have_no_rows_train_as_one_process(check):
    for layout in ("stage 1", "stage 2", "stage 3"):
        check(Program(rows=BATCH + 1, accumulate=2, clip=0.05), layout, 3)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("layout", ["stage 1", "stage 2", "stage 2, offload", "stage 3"])
def test_a_script_may_clip_in_every_micro_batch(check, layout, weighted):
    check(Program(accumulate=4, rows=6 * BATCH, clip=0.05, clips_always=True, weighted=weighted), layout)


def test_stage_0_trains_as_ddp(check):
    check(Program(losses="sum", accumulate=2, clip=0.1), "stage 0")


def test_one_process_without_a_launcher_trains_with_zero():
    for layout in ("stage 1", "stage 3"):
        expected, actual = (run_program(Program(losses="sum"), each) for each in ("replicated", layout))
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)


def train_with_global_batches(layout, size):
    """Return the parameters after an epoch of 23 rows in steps of 6, with micro-batches of `size` rows."""
    accelerator = connect(layout, global_batch_size=6)
    torch.manual_seed(3)
    model = TwoLayerNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    loader = DataLoader(torch.randn(23, 4), batch_size=size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward((model(batch) - batch.sum(1, keepdim=True)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    assert optimizer.steps == 4
    weights = accelerator.get_state_dict(model) or {}
    return torch.cat([weights[name].flatten() for name in sorted(weights)]) if weights else None


@pytest.mark.parametrize("layout", ["stage 0", "stage 1", "stage 2", "stage 3"])
def test_global_batches_of_a_fixed_number_of_samples_train_as_one_process(clusters, layout):
    (expected,) = clusters[1].run(train_with_global_batches, "replicated", 6)
    for size, micro_batch in ((2, 2), (3, 1)):
        results = clusters[size].run(train_with_global_batches, layout, micro_batch)
        torch.testing.assert_close(results[0], expected, atol=BAR["no"], rtol=BAR["no"])


# Steps that cannot be taken ------------------------------------------------------------------


def prepare(layout, **options):
    """Return an Accelerator with a prepared model and optimizer."""
    accelerator = connect(layout, **options)
    model = TwoLayerNet()
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))


def train(accelerator, model, optimizer, factor=1.0, max_norm=None):
    accelerator.backward(model(torch.ones(2, 4)).sum() * factor)
    if max_norm is not None:
        accelerator.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("layout", ["stage 1", "stage 2 in bf16", "stage 3", "stage 3, offload"])
def test_a_step_is_skipped_on_all_ranks_if_gradients_of_one_are_not_finite(clusters, layout, max_norm):
    def skip(layout, max_norm):
        layout, _, half = layout.partition(" in ")
        accelerator, model, optimizer = prepare(layout, mixed_precision=half or "no")
        train(accelerator, model, optimizer)
        before = accelerator.get_state_dict(model, everywhere=True)
        train(accelerator, model, optimizer, float("inf") if accelerator.process_index else 1.0, max_norm)
        skipped = optimizer.step_was_skipped
        after = accelerator.get_state_dict(model, everywhere=True)
        train(accelerator, model, optimizer)
        return (
            skipped,
            optimizer.step_was_skipped,
            before,
            after,
            accelerator.get_state_dict(model, everywhere=True),
        )

    for skipped, skipped_again, before, after, later in clusters[2].run(skip, layout, max_norm):
        assert (skipped, skipped_again) == (True, False)
        torch.testing.assert_close(after, before, atol=0, rtol=0)
        assert all(
            value.isfinite().all() and not torch.equal(value, after[name]) for name, value in later.items()
        )


def never_clears(layout):
    accelerator, model, optimizer = prepare(layout)
    for _ in range(2):
        accelerator.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()


def runs_the_pass_of_torch(layout):
    _, model, _ = prepare(layout)
    model(torch.ones(2, 4)).sum().backward()


def unfreezes(layout):
    accelerator = connect(layout)
    model = TwoLayerNet()
    model.first.requires_grad_(requires_grad=False)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    train(accelerator, model, optimizer)
    model.first.requires_grad_(requires_grad=True)
    train(accelerator, model, optimizer)


def passes_after_clipping(layout):
    accelerator, model, optimizer = prepare(layout)
    accelerator.backward(model(torch.ones(2, 4)).sum())
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()


def clips_a_part(layout):
    accelerator, model, _ = prepare(layout)
    accelerator.backward(model(torch.ones(2, 4)).sum())
    accelerator.clip_grad_norm_(model.first.parameters(), 1.0)


def clips_another_norm(layout):
    accelerator, model, _ = prepare(layout)
    accelerator.backward(model(torch.ones(2, 4)).sum())
    accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=1)


def clips_values(layout):
    accelerator, model, _ = prepare(layout)
    accelerator.backward(model(torch.ones(2, 4)).sum())
    accelerator.clip_grad_value_(model.parameters(), 1.0)


def steps_with_a_closure(layout):
    _, model, optimizer = prepare(layout)
    optimizer.step(lambda: model(torch.ones(2, 4)).sum())


def steps_while_gathered(layout):
    accelerator, model, optimizer = prepare(layout)
    accelerator.backward(model(torch.ones(2, 4)).sum())
    with accelerator.gathered(model):
        optimizer.step()


def clears_a_part(layout):
    accelerator = connect(layout)
    models = [TwoLayerNet(), TwoLayerNet()]
    optimizer = torch.optim.AdamW([p for model in models for p in model.parameters()])
    *models, optimizer = accelerator.prepare(*models, optimizer)
    accelerator.backward(models[0](torch.ones(2, 4)).sum() + models[1](torch.ones(2, 4)).sum())
    models[0].zero_grad()


def weighs_models_of_one_optimizer_differently(layout):
    accelerator = connect(layout)
    models = [TwoLayerNet(), TwoLayerNet()]
    optimizer = torch.optim.AdamW([p for model in models for p in model.parameters()])
    *models, optimizer = accelerator.prepare(*models, optimizer)
    for weight, model in enumerate(models, start=2):
        accelerator.backward(model(torch.ones(2, 4)).mean(), weight=weight)
    optimizer.step()


def has_parameters_of_no_model(layout):
    accelerator = connect(layout)
    model = TwoLayerNet()
    optimizer = torch.optim.AdamW([*model.parameters(), torch.nn.Parameter(torch.ones(3))])
    accelerator.prepare(model, optimizer)


def adds_parameters(layout):
    _, _, optimizer = prepare(layout)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})


def has_an_optimizer_of_matrices(layout):
    accelerator = connect(layout)
    model = TwoLayerNet()
    accelerator.prepare(model, torch.optim.Adafactor(model.parameters()))


REFUSED = {
    never_clears: "optimizer.zero_grad()",
    runs_the_pass_of_torch: "accelerator.backward(loss)",
    unfreezes: "frozen in prepare()",
    passes_after_clipping: "Run all backward passes of a step first",
    clips_a_part: "Pass model.parameters()",
    clips_another_norm: "norm_type",
    clips_values: "clip_grad_norm_()",
    steps_with_a_closure: "closure",
    steps_while_gathered: "Exit the context first",
    clears_a_part: "optimizer.zero_grad()",
    weighs_models_of_one_optimizer_differently: "different weights",
    has_parameters_of_no_model: "in no prepared model",
    adds_parameters: "add_param_group",
    has_an_optimizer_of_matrices: "fully_shard",
}


def refuse(function, layout):
    """Return the message of the error that a function raises."""
    try:
        function(layout)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("function", REFUSED, ids=lambda function: function.__name__)
def test_a_step_that_zero_cannot_take_is_refused_on_all_ranks(clusters, function):
    for layout in ("stage 1", "stage 2", "stage 3"):
        for message in clusters[2].run(refuse, function, layout):
            assert REFUSED[function] in message, (layout, message)


def two_optimizers_of_one_model():
    accelerator = connect("stage 3")
    model = TwoLayerNet()
    first, second = (torch.optim.AdamW(layer.parameters()) for layer in (model.first, model.second))
    accelerator.prepare(model, first, second)


def a_copy_of_shards():
    _, model, _ = prepare("stage 3")
    copy.deepcopy(model)


def a_scalar_parameter():
    accelerator = connect("stage 3")
    model = TwoLayerNet()
    model.gain = torch.nn.Parameter(torch.tensor(1.0))
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))


def an_empty_parameter():
    accelerator = connect("stage 3")
    model = TwoLayerNet()
    model.table = torch.nn.Parameter(torch.empty(0, 3))
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))


def a_graph_of_gradients():
    _, model, _ = prepare("stage 3")
    rows = torch.ones(2, 4, requires_grad=True)
    torch.autograd.grad(model(rows).sum(), rows, create_graph=True)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (a_graph_of_gradients, "create_graph=True"),
        (two_optimizers_of_one_model, "stage 2"),
        (a_copy_of_shards, "accelerator.gathered(model)"),
        (a_scalar_parameter, "gain has no dimensions. Create it with one element, as in torch.ones(1)"),
        (an_empty_parameter, "table has no elements, shape [0, 3]."),
    ],
)
def test_stage_3_refuses_what_it_cannot_shard(clusters, function, text):
    def message(function):
        try:
            function()
        except (RuntimeError, ValueError) as error:
            return str(error)
        return "no error"

    assert all(text in each for each in clusters[2].run(message, function))


FORMATS = {
    (torch.float64, torch.float64): "first.weight is float64",
    (torch.float32, torch.float64): "second.weight is float64",
    (torch.float32, torch.complex64): "second.weight is complex64",
    (torch.float32, torch.bfloat16): "first.weight is float32 and second.weight is bfloat16",
}


@pytest.mark.parametrize("layout", ["stage 1", "stage 2", "stage 3"])
def test_number_formats_that_zero_would_change_are_refused_and_the_converted_model_is_prepared(
    clusters, layout
):
    def prepare_formats(layout, formats):
        model = TwoLayerNet()
        for layer, dtype in zip((model.first, model.second), formats, strict=True):
            layer.weight, layer.bias = (
                torch.nn.Parameter(p.detach().to(dtype)) for p in (layer.weight, layer.bias)
            )
        accelerator = connect(layout)
        try:
            accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        except ValueError as error:
            other = TwoLayerNet()
            accelerator.prepare(other, torch.optim.AdamW(other.parameters()))
            return str(error), [str(parameter.dtype) for parameter in model.parameters()]
        return "no error", []

    for formats, text in FORMATS.items():
        for message, dtypes in clusters[2].run(prepare_formats, layout, formats):
            assert text in message
            assert dtypes == [str(dtype) for dtype in formats for _ in range(2)]


@pytest.mark.parametrize("layout", ["stage 1", "stage 2", "stage 3"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8, torch.complex64], ids=str)
def test_a_frozen_parameter_keeps_its_number_format(clusters, layout, dtype):
    def train_beside(layout, dtype):
        model = TwoLayerNet()
        model.table = torch.nn.Parameter(torch.arange(6).to(dtype), requires_grad=False)
        accelerator = connect(layout)
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        accelerator.backward(model(torch.ones(2, 4)).square().mean())
        optimizer.step()
        return accelerator.get_state_dict(model, everywhere=True)["table"]

    for table in clusters[2].run(train_beside, layout, dtype):
        torch.testing.assert_close(table, torch.arange(6).to(dtype), rtol=0, atol=0)


def test_two_optimizers_train_one_model_in_stages_1_and_2(clusters):
    def train_parts(layout):
        accelerator = connect(layout)
        model = TwoLayerNet()
        first, second = (
            torch.optim.AdamW(layer.parameters(), lr=0.1) for layer in (model.first, model.second)
        )
        model, first, second = accelerator.prepare(model, first, second)
        for _ in range(2):
            accelerator.backward(model(torch.ones(2, 4)).square().mean())
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
        return accelerator.get_state_dict(model, everywhere=True)

    (expected,) = clusters[1].run(train_parts, "replicated")
    for layout in ("stage 1", "stage 2"):
        for actual in clusters[2].run(train_parts, layout):
            torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_an_optimizer_that_is_stepped_for_each_group_is_not_reported_as_stepped_by_the_script(clusters):
    def train_groups(layout):
        import logging

        records = []
        handler = logging.Handler()
        handler.emit = lambda record: records.append(record.getMessage())
        logging.getLogger("accel_runtime").addHandler(handler)
        run_program(Program(groups=True, accumulate=2, losses="sum"), layout)
        logging.getLogger("accel_runtime").removeHandler(handler)
        return records

    for layout in ("stage 1", "stage 3"):
        assert clusters[2].run(train_groups, layout) == [[], []]
