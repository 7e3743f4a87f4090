"""Checkpoints of ZeRO continue bitwise on the same ranks, and load in any stage, in any number of ranks, and without ZeRO."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from support.runs.zero_runs import (
    BATCH,
    Program,
    connect_program,
    load,
    read_state,
    run_and_save,
    run_from,
    run_step,
    to_full,
)

from accel_runtime.storage.errors import CheckpointError

pytest.importorskip("deepspeed", reason="deepspeed is in an environment of its own: make test-deepspeed")

STAGES = ("stage 1", "stage 2", "stage 3")
PROGRAM = Program(rows=8 * BATCH, accumulate=2, schedule=True, skips="odd steps", groups=True, losses="sum")
WHOLE = 4
"""Number of micro-batches after which no cycle is unfinished."""


def assert_equal(actual, expected, bar=0.0):
    """Compare states of all ranks with one state."""
    for each in actual:
        torch.testing.assert_close(each, expected, atol=bar, rtol=bar)


def full(*values):
    return pytest.param(*values, marks=pytest.mark.full)


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ("stage 1", {}),
        ("stage 2", {"mixed_precision": "bf16"}),
        ("stage 3", {"mixed_precision": "bf16"}),
        ("stage 3, offload", {}),
        full("stage 1", {"mixed_precision": "bf16"}),
        full("stage 2", {}),
        full("stage 3", {}),
        full("stage 3, persistent", {"optimizer": "sgd"}),
        full("stage 3, small buckets", {"weighted": True}),
        full("stage 2, offload", {"mixed_precision": "bf16"}),
        full("stage 1, offload", {"tied": True}),
        full("stage 3, offload", {"mixed_precision": "bf16", "frozen": True}),
    ],
)
@pytest.mark.parametrize("at", [WHOLE, WHOLE + 1])
def test_a_run_continues_bitwise_on_the_same_ranks(clusters, tmp_path, layout, changes, at):
    program = replace(PROGRAM, **changes)
    expected = clusters[2].run(run_and_save, program, layout, tmp_path / "saved", at)
    assert_equal(clusters[2].run(run_from, program, layout, tmp_path / "saved", at), expected[0])


COMMON = Program(rows=6 * BATCH, accumulate=2, schedule=True, groups=True, losses="sum", clip=0.5)
PAIRS = [
    (("stage 2", 2), ("stage 3", 3)),
    (("stage 3", 3), ("replicated", 2)),
    (("replicated", 2), ("stage 1", 3)),
    (("fully_shard", 2), ("stage 3, offload", 2)),
    (("stage 1", 2), ("fully_shard", 3)),
    (("stage 3, offload", 2), ("replicated", 1)),
    (("replicated", 1), ("stage 2", 2)),
]
OTHERS = [
    (before, after)
    for before in (*STAGES, "stage 3, small buckets", "stage 2, offload", "replicated", "fully_shard")
    for after in (*STAGES, "stage 3, persistent", "stage 1, offload", "replicated", "fully_shard")
    if before != after and (before in STAGES or after in STAGES)
]


@pytest.mark.parametrize("at", [WHOLE, pytest.param(WHOLE - 1, id="in a cycle")])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        *PAIRS[:4],
        *(full(*pair) for pair in PAIRS[4:]),
        *(full((one, 2), (other, size)) for one, other in OTHERS for size in (2, 3)),
    ],
    ids=lambda each: " on ".join(map(str, each)),
)
def test_a_run_continues_in_another_layout(clusters, tmp_path, before, after, at):
    (old, old_size), (new, new_size) = before, after
    expected = clusters[old_size].run(run_and_save, COMMON, old, tmp_path / "saved", at)
    actual = clusters[new_size].run(run_from, COMMON, new, tmp_path / "saved", at)
    assert_equal(actual, expected[0], 1e-5)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("stage 2", "stage 3"),
        full("stage 3", "replicated"),
        full("replicated", "stage 1"),
        full("stage 1", "stage 2"),
    ],
)
def test_a_run_in_bf16_continues_in_another_layout_with_all_digits_of_its_weights(
    clusters, tmp_path, before, after
):
    program = replace(COMMON, mixed_precision="bf16")
    clusters[2].run(run_and_save, program, before, tmp_path / "saved", 4)
    expected = clusters[2].run(load, program, before, tmp_path / "saved")
    assert any((each != each.bfloat16().float()).any() for each in expected[0][0].values())
    assert_equal(clusters[3].run(load, program, after, tmp_path / "saved"), expected[0])


def test_a_checkpoint_in_the_background_has_the_state_of_its_call(clusters, tmp_path):
    def save_and_train_on(layout, folder):
        accelerator, model, optimizer, scheduler, loader = connect_program(COMMON, layout)
        for number, batch in enumerate(loader):
            if number == WHOLE:
                saved = read_state(accelerator, model, optimizer)
                accelerator.save_state(folder, async_save=True)
            run_step(accelerator, COMMON, (model, optimizer, scheduler), batch, number)
        accelerator.wait_for_checkpoint()
        return saved

    for layout in ("stage 1", "stage 3, offload"):
        expected = clusters[2].run(save_and_train_on, layout, tmp_path / layout)
        assert_equal(clusters[2].run(load, COMMON, layout, tmp_path / layout), expected[0])


def test_a_save_that_fails_on_one_rank_leaves_nothing(clusters, tmp_path):
    def fail(folder):
        from unittest import mock

        from accel_runtime.checkpoint.save import SaveOperation

        accelerator, *_ = connect_program(COMMON, "stage 3")
        error = mock.patch.object(SaveOperation, "_put_file", side_effect=OSError("disk full"))
        try:
            with error if accelerator.process_index else nullcontext():
                accelerator.save_state(folder / "saved")
        except CheckpointError as caught:
            return "disk full" in str(caught)
        return False

    assert clusters[2].run(fail, tmp_path) == [True, True]
    assert not list(tmp_path.iterdir())


def test_states_are_loaded_by_the_methods_of_the_objects(clusters):
    """`load_state_dict` of the optimizer and the scheduler continues as the checkpoint does, in any stage."""

    def carry(before, after):
        accelerator, model, optimizer, scheduler, loader = connect_program(COMMON, before)
        batches = list(loader)
        for number, batch in enumerate(batches[:WHOLE]):
            run_step(accelerator, COMMON, (model, optimizer, scheduler), batch, number)
        weights = accelerator.get_state_dict(model, everywhere=True)
        state, schedule = optimizer.state_dict(), scheduler.state_dict()
        state = torch.utils._pytree.tree_map(to_full, state)
        other, new, *rest, _ = connect_program(COMMON, after)
        with other.gathered(new) as module:
            module.load_state_dict(weights)
        rest[0].load_state_dict(state)
        rest[1].load_state_dict(schedule)
        for each in ((accelerator, model, optimizer, scheduler), (other, new, *rest)):
            for number, batch in enumerate(batches[WHOLE:], start=WHOLE):
                run_step(each[0], COMMON, each[1:], batch, number)
        return read_state(accelerator, model, optimizer), read_state(other, new, rest[0])

    for before, after in (("stage 1", "stage 3"), ("stage 3, offload", "stage 2")):
        for expected, actual in clusters[2].run(carry, before, after):
            torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)


# Exports -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout", [*STAGES, full("stage 3, offload"), full("stage 3, persistent"), full("stage 2, offload")]
)
@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_weights_are_exported_loaded_and_gathered_with_all_digits(
    clusters, tmp_path, layout, mixed_precision
):
    def export(layout, mixed_precision, folder):
        program = replace(COMMON, mixed_precision=mixed_precision, tied=True)
        accelerator, model, optimizer, scheduler, loader = connect_program(program, layout)
        before = accelerator.get_state_dict(model, everywhere=True)
        for number, batch in enumerate(loader):
            run_step(accelerator, program, (model, optimizer, scheduler), batch, number)
        trained = accelerator.get_state_dict(model, everywhere=True)
        accelerator.save_model(model, folder)
        on_first = accelerator.get_state_dict(model)
        with accelerator.gathered(model) as module:
            seen = {name: value.float().clone() for name, value in module.state_dict().items()}
        untouched = accelerator.get_state_dict(model, everywhere=True)
        with accelerator.gathered(model) as module, torch.no_grad():
            module.head.weight.fill_(0.25)
        changed = accelerator.get_state_dict(model, everywhere=True)
        accelerator.load_model(model, folder)
        rows = torch.ones(2, 3)
        loaded = accelerator.get_state_dict(model, everywhere=True)
        return before, trained, on_first, seen, untouched, changed, loaded, model(rows)[0].detach().float()

    results = clusters[2].run(export, layout, mixed_precision, tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    bar = 0 if mixed_precision == "no" else 2**-7
    for rank, (before, trained, on_first, seen, untouched, changed, loaded, output) in enumerate(results):
        assert not torch.equal(before["head.weight"], trained["head.weight"])
        assert all(torch.equal(trained[name], value) for name, value in written.items())
        assert set(on_first) == (set() if rank else set(trained))
        torch.testing.assert_close(seen, trained, atol=bar, rtol=bar)
        torch.testing.assert_close(untouched, trained, atol=0, rtol=0)
        expected = trained | {"head.weight": torch.full_like(trained["head.weight"], 0.25)}
        torch.testing.assert_close(changed, expected, atol=0, rtol=0)
        torch.testing.assert_close(loaded, trained, atol=0, rtol=0)
        torch.testing.assert_close(output, results[0][-1], atol=0, rtol=0)
