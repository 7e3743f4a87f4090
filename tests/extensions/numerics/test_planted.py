"""Planted causes: `accel diff` names the first thing that differs, and no other one."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.runs.numerics_runs import INTERPRETER, record_runs

from accel_cli.extensions.numerics.comparison import SettingDifference, compare

SCRIPT, TOKENS = (Path(__file__).with_name(name) for name in ("planted.py", "planted_tokens.py"))
MANUAL = {"EXCHANGE": "manual"}
SIZES = {"EXCHANGE": "manual", "NORM": "layer"}

CAUSES = {
    "seed": (1, "before", ""),
    "initialization": (1, "before", "out.bias"),
    "bf16 buffer": (1, "before", "scale"),
    "sampler seed": (1, "batch", "index"),
    "dropped sample": (1, "batch", "index"),
    "uneven tail": (1, "batch", "index"),
    "forgotten set_epoch": (9, "batch", "index"),
    "normalization of data": (1, "batch", ".0"),
    "augmentation": (1, "batch", ".0"),
    "one label": (3, "batch", ".1"),
    "cast of inputs": (1, "inputs", ".0"),
    "extra random number": (3, "random", "torch"),
    "evaluation mode": (1, "mode", ""),
    "autocast": (1, "mode", ""),
    "dropout": (None, "settings", "the model"),
    "BatchNorm": (None, "settings", "the model"),
    "activation": (1, "modules", "hidden"),
    "residual": (1, "modules", "drop"),
    "rounding of matmul": (1, "modules", ""),
    "order of sums": (1, "loss", ""),
    "loss reduction": (1, "loss", ""),
    "forgotten zero_grad": (5, "left", ""),
    "detach": (1, "gradients", "hidden.bias"),
    "gradient of one rank": (5, "gradients", "hidden.weight"),
    "missing all_reduce": (1, "before_clipping", "norm.weight"),
    "wrong average": (1, "before_clipping", ""),
    "clip before exchange": (1, "before_clipping", ""),
    "stale gradients": (6, "before_clipping", "out.weight"),
    "clipping": (1, "clipping", ""),
    "forgotten parameters": (None, "settings", "the parameters of the optimizer"),
    "optimizer": (1, "options", "group 0, decoupled_weight_decay"),
    "weight decay on norms": (1, "options", "group 1, weight_decay"),
    "epsilon of Adam": (1, "options", "group 0, eps"),
    "lr": (1, "rates", ""),
    "warmup": (1, "rates", ""),
    "forgotten scheduler": (3, "rates", ""),
    "EMA": (5, "before", ""),
    "weights changed": (4, "before", "out.weight"),
    "one step more": (13, "steps", ""),
}
"""The step, stage and name of the first difference; an empty name is any."""
ROUNDING = {"rounding of matmul", "order of sums"}
OF_MANUAL_EXCHANGE = {"missing all_reduce", "wrong average", "clip before exchange", "detach"}


RUNS = {}
"""Records by world size and variables: a run without a cause is compared with those of many causes."""


@pytest.fixture(scope="module", autouse=True)
def _interpreter():
    yield
    RUNS.clear()
    INTERPRETER.close()


def compare_cause(folder, cause, world_sizes=(2, 2), variables=None):
    settings = (variables or {}, {**(variables or {}), "CAUSE": cause})
    keys = [(size, *each.items()) for size, each in zip(world_sizes, settings, strict=True)]
    missing = {key: dict(key[1:]) for key in keys if key not in RUNS}
    recorded = record_runs(folder, *((SCRIPT, key[0], each) for key, each in missing.items()))
    RUNS.update(zip(missing, recorded, strict=True))
    return compare(*(replace(RUNS[key], name=name) for key, name in zip(keys, "ab", strict=True)))


def describe(cause):
    """Return the step, stage and name of a cause."""
    if isinstance(cause, SettingDifference):
        return None, "settings", cause.name
    return cause and (cause.step, cause.stage, cause.name)


def check(found, expected):
    step, stage, name = describe(found.cause)
    assert (step, stage) == expected[:2]
    assert not expected[2] or name == expected[2]


@pytest.mark.parametrize("variables", [{}, MANUAL], ids=["ddp", "manual"])
def test_equal_runs_are_equal_bit_by_bit(tmp_path, variables):
    found = compare_cause(tmp_path, "", variables=variables)
    assert (found.verdict, found.cause, found.settings) == ("equal", None, [])
    assert found.steps == list(range(1, 13))


@pytest.mark.parametrize(
    "cause", [pytest.param(cause, marks=[pytest.mark.smoke] * (cause == "lr")) for cause in CAUSES]
)
def test_a_planted_cause_is_named_first(tmp_path, cause):
    found = compare_cause(tmp_path, cause, variables=MANUAL if cause in OF_MANUAL_EXCHANGE else {})
    assert found.verdict == ("rounding" if cause in ROUNDING else "different")
    check(found, CAUSES[cause])


OF_TOKENS = {
    "padding_idx": (1, "before", "embed.weight"),
    "untied weights": (1, "before", "head.weight"),
    "masked tokens": (2, "batch", ".0"),
    "seed of workers": (1, "batch", ".2"),
    "fewer micro-batches": (3, "batch", ""),
    "skipped step": (5, "batch", ""),
    "evaluation mode left on": (4, "mode", ""),
    "epsilon of a norm": (None, "settings", "the model"),
    "dropout while it trains": (3, "modules", "drop"),
    "label smoothing": (1, "modules", "CrossEntropyLoss"),
    "ignored index": (1, "modules", "CrossEntropyLoss"),
    "shifted targets": (2, "modules", "CrossEntropyLoss"),
    "divisor of micro-batches": (1, "loss", ""),
    "frozen parameter": (1, "gradients", "norm.bias"),
    "lost gradient": (5, "before_clipping", "norm.weight"),
    "NaN": (4, "before_clipping", "norm.bias"),
    "gradient after clipping": (6, "read", "embed.weight"),
    "betas": (1, "options", "group 0, betas"),
    "scheduler twice": (3, "rates", ""),
    "state of the optimizer": (4, "state", "norm.weight.exp_avg"),
    "weights in bf16": (5, "before", "mix.weight_hh_l0"),
}
"""The same for the model of `planted_tokens.py`."""
WITHOUT_EFFECT = ("recomputed activations", "zeroed gradients", "loops for tensors")
WORKERS = {"WORKERS": "2"}


@pytest.fixture(scope="module")
def compare_tokens(tmp_path_factory):
    """Return a function that compares a run with a cause with the one without it, which is recorded once."""
    (plain,) = record_runs(tmp_path_factory.mktemp("plain"), (TOKENS, 1, {}))

    def compare_tokens(folder, cause):
        variables = WORKERS if "workers" in cause else {}
        runs = record_runs(
            folder,
            (TOKENS, 1, {**variables, "CAUSE": cause}),
            *([(TOKENS, 1, variables)] if variables else []),
        )
        return compare(*runs[::-1]) if variables else compare(plain, runs[0])

    return compare_tokens


@pytest.mark.parametrize(
    "cause", ["NaN", "divisor of micro-batches", "fewer micro-batches", "recomputed activations"]
)
def test_a_cause_between_micro_batches_is_named_first(tmp_path, compare_tokens, cause):
    found = compare_tokens(tmp_path, cause)
    if cause in WITHOUT_EFFECT:
        assert (found.verdict, found.cause) == ("equal", None)
    else:
        check(found, OF_TOKENS[cause])


@pytest.mark.slow
@pytest.mark.parametrize("cause", [*OF_TOKENS, *WITHOUT_EFFECT])
def test_each_cause_in_a_language_model_is_named_first(tmp_path, compare_tokens, cause):
    found = compare_tokens(tmp_path, cause)
    if cause in WITHOUT_EFFECT:
        assert (found.verdict, found.cause) == ("equal", None)
    else:
        check(found, OF_TOKENS[cause])
        assert isinstance(found.cause, SettingDifference) or found.cause is found.effect


def test_one_flipped_bit_names_the_rank_that_has_it(tmp_path):
    found = compare_cause(tmp_path, "gradient of one rank")
    assert found.cause.rank == 1
    assert found.first is found.beyond is found.cause


def test_runs_of_two_world_sizes_are_equal_up_to_the_order_of_sums(tmp_path):
    found = compare_cause(tmp_path, "", (1, 2), SIZES)
    assert found.verdict == "rounding"
    assert found.first.size < found.first.bound
    assert "world size" in {one.name for one in found.settings}


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        ("one label", (3, "batch", "")),
        ("loss reduction", (1, "loss", "")),
        ("wrong average", (1, "before_clipping", "")),
        ("activation", (1, "loss", "")),
        ("residual", (1, "loss", "")),
        ("initialization", (1, "before", "out.bias")),
        ("sampler seed", (1, "batch", "")),
        ("missing all_reduce", (1, "before_clipping", "norm.weight")),
        ("clipping", (1, "clipping", "")),
        ("lr", (1, "rates", "")),
    ],
)
def test_a_cause_is_named_between_two_world_sizes(tmp_path, cause, expected):
    found = compare_cause(tmp_path, cause, (1, 2), SIZES)
    assert found.verdict == "different"
    check(found, expected)


def test_a_record_without_modules_claims_no_module(tmp_path):
    found = compare(
        *record_runs(tmp_path, (SCRIPT, 1, {}), (SCRIPT, 1, {"CAUSE": "activation"}), selection="steps:1-2")
    )
    check(found, (1, "loss", ""))
    assert any("no outputs of modules" in note for note in found.notes)


def test_a_gap_of_the_record_is_named(tmp_path):
    found = compare(
        *record_runs(
            tmp_path, (SCRIPT, 1, {}), (SCRIPT, 1, {"CAUSE": "forgotten scheduler"}), selection="every:4"
        )
    )
    assert found.steps == [1, 5, 9]
    check(found, (5, "before", ""))
    assert any("steps:1-5" in note for note in found.notes)


def test_a_generator_that_no_number_draws_from_explains_none(tmp_path):
    script = tmp_path / "unseeded.py"
    script.write_text(UNSEEDED)
    same = compare(*record_runs(tmp_path / "same", (script, 1, {}), (script, 1, {})))
    assert (same.verdict, {one.name for one in same.random}) == ("equal", {"python"})
    other = compare(*record_runs(tmp_path / "other", (script, 1, {}), (script, 1, {"CAUSE": "inputs"})))
    check(other, (2, "inputs", ".0"))
    fewer = compare(*record_runs(tmp_path / "fewer", (script, 1, {}), (script, 1, {"CAUSE": "passes"})))
    check(fewer, (2, "batch", ""))
    assert "2 forward passes in the step of the first run, 1 in that of the second" in fewer.cause.detail


UNSEEDED = """
import os, random, torch
torch.manual_seed(0)
cause = os.environ.get("CAUSE")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
x = torch.randn(8, 4)
random.seed()
for step in range(3):
    for micro_batch in range(1 if cause == "passes" and step == 1 else 2):
        model(x + 1 if cause == "inputs" and step == 1 else x).square().mean().backward()
        random.random()
    optimizer.step()
    optimizer.zero_grad()
"""
