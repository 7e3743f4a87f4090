"""Training on ranks has the gradients and parameters of the same program on one process in float64, also after a resume."""

from __future__ import annotations

from dataclasses import replace

import cloudpickle
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.cases.pairs import build_pairs
from support.runs import training_oracle
from support.runs.training_oracle import (
    BARS,
    ITEMS,
    SOURCES,
    STRATEGIES,
    WEIGHTS,
    Training,
    train_on_one_process,
    train_on_ranks,
)

cloudpickle.register_pickle_by_value(training_oracle)

LAYOUTS = [
    # Processes, model and strategy.
    (1, "layers", "replicated"),
    (3, "layers", "replicated"),
    (3, "partly used", "replicated"),
    (3, "sparse", "replicated"),
    (2, "layers", "sharded as one"),
    (3, "layers", "sharded by layers"),
    (2, "layers", "tensor parallel"),
]
FACTORS = {
    "layout": LAYOUTS,
    "items": list(ITEMS),
    # After a number of micro-batches, on as many processes or on another number.
    "resume": [None, ("first", "same"), ("middle", "other"), ("late", "other")],
    "weight": list(WEIGHTS),
    "source": SOURCES,
    "samples": [36, 31, 26, 5],  # no tail; a tail; ranks without samples; less than a batch
    "steps": [1, 2, 3, 4],
    "loop": ["accumulate", "no_sync", "backward"],
    "even": [False, True],
    "split": [False, True],
    "each": [False, True],
    "clip": [None, 0.1],
    "to_none": [True, False],
}
OTHER = {1: 3, 2: 3, 3: 2}
"""The number of processes of a resumed run."""


def check(clusters, folder, training, size, *, resume=None):
    """Compare a training with one process; `resume` is where it is interrupted, and the number of processes after it."""
    several = size > 1 and training.strategy != "tensor parallel"
    expected = train_on_one_process(training, padded=training.even and several)
    stop, after = resume or (None, size)
    name = f"{folder}/saved"
    results = clusters[size].run(save_on_ranks, training, name, stop)
    for rank in results:
        rank.compare(expected, BARS[training.precision])
        assert rank.samples == expected.samples
    if resume:
        for rank in clusters[after].run(resume_on_ranks, training, name, stop):
            rank.compare(expected, BARS[training.precision], stop)
            if after == size:
                rank.compare(results[0], 0, stop)


def save_on_ranks(training, folder, stop):
    return train_on_ranks(training, folder, save_after=stop)


def resume_on_ranks(training, folder, stop):
    return train_on_ranks(training, folder, resume_from=stop)


def build_case(layout, resume, **fields):
    """Return the arguments of `check`."""
    size, model, strategy = layout
    training = Training(model=model, strategy=strategy, **fields)
    total = training.num_batches * training.epochs
    if resume is None or total == 1:
        return training, size, None
    place, world = resume
    stop = {"first": 1, "middle": total // 2, "late": total - 1}[place]
    if world == "same" or strategy == "tensor parallel":
        return training, size, (stop, size)
    # The order of the next epoch depends on the world size.
    if training.source in {"shuffled", "dispatched"} and place != "late":
        training = replace(training, source="list")
    if size == 1:  # one process has no padding
        training = replace(training, even=False)
    return training, size, (stop, OTHER[size])


def name_case(case):
    return ", ".join(f"{name} {case[name]}" for name in ("layout", "items", "resume", "source", "loop"))


@pytest.mark.parametrize("case", build_pairs(FACTORS), ids=name_case)
def test_training_equals_that_of_one_process_also_after_a_resume_within_a_cycle(clusters, tmp_path, case):
    """After a resume on as many processes, steps are equal bit for bit.

    SGD with weight decay has other results for a gradient of zeros than for None.
    """
    training, size, resume = build_case(**case)
    check(clusters, tmp_path, training, size, resume=resume)


ON_FOUR = {
    "strategy": [
        "replicated",
        "hybrid",
        *(name for name in STRATEGIES if name.startswith("tensor parallel")),
    ],
    "items": list(ITEMS),
    "samples": [31, 26],
    "steps": [2, 1],
    "each": [False, True],
    "clip": [None, 0.1],
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, marks=pytest.mark.slow if case["items"] in {"none", "few batches"} else pytest.mark.full
        )
        for case in build_pairs(ON_FOUR)
        if case["strategy"] != "tensor parallel"
    ],
    ids=lambda case: f"{case['strategy']}, items {case['items']}, {case['samples']} samples",
)
def test_training_on_four_ranks_equals_that_of_one_process(clusters, tmp_path, case):
    check(clusters, tmp_path, Training(**case), 4)


DDP = [
    {"gradient_as_bucket_view": True},
    {"bucket_cap_mb": 1},
    {"find_unused_parameters": True},
    {"static_graph": True},
]


@pytest.mark.parametrize("ddp", DDP, ids=str)
def test_options_of_ddp_do_not_change_the_gradient(clusters, tmp_path, ddp):
    """Buckets that gradients are views of hold those of a cycle that is interrupted, too."""
    training = Training(ddp=ddp, steps=3, items="none on the last ranks")
    check(clusters, tmp_path, training, 2, resume=None if "static_graph" in ddp else (2, 2))


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.full), 3])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_gradients_are_within_rounding_and_no_step_is_skipped(
    clusters, tmp_path, precision, size
):
    """Weights far from 1 do not overflow."""
    clipped = Training(precision=precision, clip=0.1, steps=2)
    check(clusters, tmp_path, clipped, size, resume=(1, size))
    check(clusters, tmp_path, Training(precision=precision, items="unequal", weight="large"), size)


@pytest.mark.parametrize("strategy", ["replicated", "sharded as one", "checkpointed"])
def test_micro_batches_without_items_add_zeros_in_half_precision(clusters, tmp_path, strategy):
    training = Training(precision="fp16", items="none on the last ranks", steps=2, strategy=strategy)
    check(clusters, tmp_path, training, 2)


@st.composite
def build_trainings(draw):
    case = {name: draw(st.sampled_from(values)) for name, values in FACTORS.items()}
    batch = draw(st.sampled_from([6, 12]))
    return build_case(
        **case | {"samples": draw(st.integers(1, 40))}, batch=batch, epochs=draw(st.integers(1, 2))
    )


@settings(max_examples=4)
@given(build_trainings())
@example((Training(items="few batches", model="sparse", weight="unknown", steps=2), 1, None))
@example((Training(samples=3, batch=4), 2, None))
@example((Training(model="sparse", to_none=False), 3, (2, 3)))
# A layer without a gradient in the micro-batch after a resume had one of zeros before.
@example((Training(model="partly used", to_none=False), 1, (2, 1)))
def test_a_generated_training_equals_that_of_one_process(clusters, tmp_path_factory, case):
    training, size, resume = case
    check(clusters, tmp_path_factory.mktemp("training"), training, size, resume=resume)
