"""The comparison of records that differ in one thing or in two: the first in causal order is named, with no more certainty than there is."""

from dataclasses import replace
from itertools import combinations

import pytest
import torch

from accel_cli.extensions.numerics.comparison import (
    Difference,
    Run,
    SettingDifference,
    _compare_samples,
    _count_samples,
    compare,
)
from accel_runtime.observe.step_records.digests import digest_tensor, list_batches, summarize
from accel_runtime.observe.step_records.record import (
    VERSION,
    Batch,
    ForwardPass,
    ModelHead,
    OptimizerHead,
    RankRecord,
    RunHead,
    StepRecord,
)

SETTINGS = {"device": "cpu", "threads": "1", "float32_matmul_precision": "highest"}
WEIGHTS = torch.linspace(-1, 1, 1000)
SUMMARIES = {}


def entry(name, tensor):
    digest = digest_tensor(tensor)
    SUMMARIES[digest] = summarize(tensor)
    return name, digest


def tensors(factor=1.0):
    return (entry("weight", WEIGHTS * factor),)


def build_step(number=1):
    """Return a step of a model with one parameter."""
    one = ForwardPass(
        batches=(Batch("train.py:1", "index", ("0", "1")),),
        random={"torch": f"state {number}"},
        drawn=("torch",),
        inputs=(Batch("model", ".0", ("a", "b")),),
        modules=tensors(2),
        losses=(("a digest", 0.5),),
        buffers=tensors(3),
        gradients=tensors(4),
        after_backward=tensors(5),
    )
    return StepRecord(
        step=number,
        optimizer=0,
        before=tensors(6),
        passes=(one,),
        before_clipping=tensors(7),
        clipped_after=1,
        clipping="norm 1",
        read=tensors(8),
        norm=1.0,
        options={"group 0, eps": 1e-8, "group 0, foreach": None},
        rates=(0.1,),
        state=tensors(9),
        parameters=tensors(10),
        random={"torch": f"state {number + 1}"},
        values=SUMMARIES,
    )


def build_run(name, *steps, **settings):
    head = RunHead(VERSION, 0, 1, "host", {"every": 1}, {**SETTINGS, **settings})
    model, optimizer = (
        ModelHead(0, "Linear", "Linear()", is_local=True),
        OptimizerHead(0, "SGD", (("weight",),)),
    )
    return Run(name, {0: RankRecord(head, (model,), (optimizer,), {one.step: one for one in steps}, "")})


def change_pass(step, **values):
    return replace(step, passes=(replace(step.passes[0], **values),))


CHANGES = {
    "before": lambda step: replace(step, before=tensors(6.5)),
    "batch": lambda step: change_pass(step, batches=(Batch("train.py:1", "index", ("0", "7")),)),
    "inputs": lambda step: change_pass(step, inputs=(Batch("model", ".0", ("a", "z")),)),
    "mode": lambda step: change_pass(step, mode="in evaluation mode: drop"),
    "modules": lambda step: change_pass(step, modules=tensors(2.5)),
    "loss": lambda step: change_pass(step, losses=(("other", 0.7),)),
    "buffers": lambda step: change_pass(step, buffers=tensors(3.5)),
    "left": lambda step: change_pass(step, left=tensors(1)),
    "gradients": lambda step: change_pass(step, gradients=tensors(4.5)),
    "after_backward": lambda step: change_pass(step, after_backward=tensors(5.5)),
    "before_clipping": lambda step: replace(step, before_clipping=tensors(7.5)),
    "clipping": lambda step: replace(step, clipping="norm 2"),
    "read": lambda step: replace(step, read=tensors(8.5)),
    "options": lambda step: replace(step, options={**step.options, "group 0, eps": 1e-6}),
    "rates": lambda step: replace(step, rates=(0.2,)),
    "state": lambda step: replace(step, state=tensors(9.5)),
    "parameters": lambda step: replace(step, parameters=tensors(10.5)),
}
"""The stages of a step in causal order, with what changes each."""


@pytest.mark.smoke
@pytest.mark.parametrize("stage", CHANGES)
def test_the_first_difference_is_named_whatever_differs_after_it(stage):
    stages = list(CHANGES)
    first = build_run("a", build_step(1), build_step(2))
    for other in [stage, *stages[stages.index(stage) + 1 :]]:
        changed = CHANGES[stage](CHANGES[other](build_step(2)))
        found = compare(first, build_run("b", build_step(1), changed))
        assert (found.verdict, found.cause.step, found.cause.stage) == ("different", 2, stage), other
        assert found.cause is found.effect


def test_an_earlier_step_is_named_before_an_earlier_stage():
    second = build_run("b", CHANGES["parameters"](build_step(1)), CHANGES["batch"](build_step(2)))
    found = compare(build_run("a", build_step(1), build_step(2)), second)
    assert (found.cause.step, found.cause.stage) == (1, "parameters")


def test_records_without_a_difference_are_equal_bit_by_bit():
    found = compare(build_run("a", build_step(1)), build_run("b", build_step(1)))
    assert (found.verdict, found.cause, found.is_partial) == ("equal", None, False)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("first", "second"), [*combinations(["batch", "inputs", "mode", "rates", "clipping"], 2)]
)
def test_a_setting_explains_no_number_that_does_not_depend_on_it(first, second):
    """Threads and the precision of products change how numbers are computed, and neither samples nor rates."""
    step = CHANGES[first](CHANGES[second](build_step()))
    for settings in ({"threads": "2"}, {"float32_matmul_precision": "medium"}):
        found = compare(build_run("a", build_step()), build_run("b", step, **settings))
        assert isinstance(found.cause, Difference)
        assert found.cause is found.effect


def test_a_setting_that_may_explain_a_number_is_named_without_certainty():
    step = CHANGES["modules"](build_step())
    found = compare(build_run("a", build_step()), build_run("b", step, float32_matmul_precision="medium"))
    assert isinstance(found.cause, SettingDifference)
    assert found.cause is not found.effect
    # Other threads add in another order, which explains no difference of this size.
    found = compare(build_run("a", build_step()), build_run("b", step, threads="2"))
    assert found.cause is found.effect


def test_a_generator_that_the_pass_draws_from_is_named_without_certainty():
    step = change_pass(CHANGES["modules"](build_step()), random={"torch": "another state"})
    found = compare(build_run("a", build_step()), build_run("b", step))
    assert (found.cause.stage, found.effect.stage) == ("random", "modules")
    step = change_pass(CHANGES["batch"](build_step()), random={"torch": "another state"})
    found = compare(build_run("a", build_step()), build_run("b", step))
    assert found.cause is found.effect


def test_parameters_without_the_same_names_are_matched_by_their_order_in_the_optimizer():
    def build(name, first, second, factor=1.0):
        """Return a run of two parameters, whose gradients the second run computes in the other order."""
        tensors = {first: torch.ones(4), second: torch.linspace(0, 1, 3) * factor}
        entries = tuple(entry(*one) for one in tensors.items())
        gradients = entries if name == "a" else entries[::-1]
        step = change_pass(
            replace(build_step(), before=entries, read=entries, parameters=entries, state=()),
            gradients=gradients,
        )
        run = build_run(name, replace(step, passes=(replace(step.passes[0], after_backward=entries),)))
        optimizers = (OptimizerHead(0, "SGD", ((first, second),)),)
        return Run(name, {0: replace(run.first, optimizers=optimizers)})

    first = build("a", "weight", "bias")
    assert compare(first, build("b", "parameter 0", "parameter 1")).verdict == "equal"
    found = compare(first, build("b", "parameter 0", "parameter 1", 2.0))
    assert (found.cause.stage, found.cause.name) == ("before", "bias")


@pytest.mark.smoke
def test_rounding_is_up_to_the_bound_and_what_is_larger_is_different():
    noise = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    noise *= WEIGHTS.norm() / noise.norm()
    first = build_run("a", build_step())
    bound = compare(first, build_run("b", CHANGES["modules"](build_step()))).cause.bound
    # One parameter of 1000 values in float32.
    assert bound == pytest.approx(4 * 2**-24 * 1000**0.5)
    for factor, verdict in ((0.1, "rounding"), (10, "different")):
        step = change_pass(build_step(), modules=(entry("weight", 2 * WEIGHTS + 2 * factor * bound * noise),))
        found = compare(first, build_run("b", step))
        assert (found.verdict, found.first.stage) == (verdict, "modules")
        assert (found.first.size < bound) == (verdict == "rounding")


def test_the_way_in_which_an_optimizer_computes_the_same_numbers_is_a_setting():
    step = replace(build_step(), options={"group 0, eps": 1e-8, "group 0, foreach": False})
    found = compare(build_run("a", build_step()), build_run("b", step))
    assert (found.verdict, [one.name for one in found.settings]) == ("equal", ["optimizer: group 0, foreach"])


def test_a_step_that_is_left_out_is_named_by_the_gradient_that_was_clipped_before_it():
    one, later = build_step().passes[0], build_step(2).passes[0]
    step = replace(build_step(), passes=(one, later), before_clipping=(entry("weight", WEIGHTS / 0),))
    found = compare(build_run("a", build_step()), build_run("b", step))
    assert (found.cause.stage, found.cause.name) == ("before_clipping", "weight")
    assert "not finite" in found.cause.detail


def test_a_list_of_samples_that_ranks_divide_is_the_same():
    samples = [torch.randn(3, 4) for _ in range(4)]

    def count(*parts):
        ranks = {
            rank: build_run("a", change_pass(build_step(), batches=list_batches("", part))).first
            for rank, part in enumerate(parts)
        }
        return _count_samples(Run("a", ranks), 1)

    whole = count({"images": samples})
    assert not _compare_samples(whole, count({"images": samples[:2]}, {"images": samples[2:]}))
    assert _compare_samples(whole, count({"images": samples[:2]}, {"images": samples[:2]}))
    x, y = torch.randn(4, 2), torch.randn(4, 1)
    assert not _compare_samples(count([x, y]), count([x[:2], y[:2]], [x[2:], y[2:]]))
    assert _compare_samples(count([x, y]), count([x[:2], y[:2]], [x[2:], y[2:] + 1]))
