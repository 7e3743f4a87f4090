"""Execution of functions on selected ranks, and the order of ranks."""

from __future__ import annotations

import contextlib
import io
import time
from datetime import timedelta
from unittest.mock import patch

import pytest

from accel_runtime import Accelerator, PartialState, debug_launcher
from accel_runtime.backends import base


@pytest.mark.parametrize("kind", [Accelerator, PartialState])
def test_a_decorated_function_runs_on_its_rank_and_returns_none_elsewhere(ranks, kind):
    def answers(kind):
        state = kind()
        last = state.num_processes - 1

        def who(word):
            return f"{word} {state.process_index}"

        decorated = [
            state.on_main_process(who),
            state.on_local_main_process(who),
            state.on_last_process(who),
            state.on_process(who, process_index=last),
            state.on_process(process_index=last)(who),
            state.on_local_process(who, local_process_index=last),
            state.on_local_process(local_process_index=0)(who),
        ]
        assert all(function.__name__ == "who" for function in decorated)
        return [function("I am") for function in decorated]

    last = ranks.size - 1
    expected = [0, 0, last, last, last, last, 0]
    assert ranks.run(answers, kind) == [
        [f"I am {rank}" if rank == chosen else None for chosen in expected] for rank in range(ranks.size)
    ]


def test_an_invalid_process_index_is_rejected(alone):
    state = PartialState()
    for decorate in (state.on_process, state.on_local_process):
        with pytest.raises(ValueError, match="is missing: pass the index"):
            decorate()
        with pytest.raises(ValueError, match="1: expected an index from 0 to 0"):
            decorate(print, 1)


@pytest.mark.parametrize("scope", ["main_process_first", "local_main_process_first"])
def test_main_process_first_completes_before_the_other_ranks_start(ranks, tmp_path, scope):
    def order(path, scope):
        accelerator = Accelerator()
        for iteration in range(3):
            with getattr(accelerator, scope)():
                if accelerator.is_main_process:
                    time.sleep(0.05)
                    (path / str(iteration)).touch()
                assert (path / str(iteration)).exists()
        return True

    assert all(ranks.run(order, tmp_path, scope))


def test_main_process_first_blocks_can_be_nested(ranks):
    def nested():
        first, second = Accelerator(), PartialState()
        with first.main_process_first(), second.local_main_process_first(), second.main_process_first():
            pass
        return True

    assert all(ranks.run(nested))


def test_a_failure_in_main_process_first_is_raised_on_the_other_ranks(several):
    def failed():
        accelerator = Accelerator()
        try:
            with accelerator.main_process_first():
                accelerator.on_main_process(open)("/no such file")
        except (OSError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"

    first, *others = several.run(failed)
    assert first.startswith("FileNotFoundError: ")
    message = f"RuntimeError: main_process_first() failed on rank 0: {first}"
    assert others == [message] * (several.size - 1)


def test_ranks_of_a_node_that_are_not_consecutive_raise_an_error(several):
    def run_on_scattered_node():
        accelerator = Accelerator()
        backend = accelerator._backend
        # As if every rank above 0 took rank 1 for the first of its machine, and rank 1 took rank 0.
        leader = min(backend.topology.rank, 1) if backend.topology.rank != 1 else 0
        try:
            with backend.run_first(leader, "strange"):
                pass
        except RuntimeError as error:
            return str(error)

    assert all(
        reports is None or "Number the ranks" in reports for reports in several.run(run_on_scattered_node)
    )
    if several.size == 3:
        assert "rank 2 waits for rank 1, which is not the first" in several.run(run_on_scattered_node)[2]


def test_one_waiting_rank_reports_the_rank_it_waits_for(several):
    def wait_alone():
        accelerator = Accelerator()
        accelerator.wait_for_everyone()
        with (
            contextlib.redirect_stderr(io.StringIO()) as reports,
            patch.object(base, "REPORT_S", 0.1),
            accelerator.main_process_first(),
        ):
            accelerator.on_main_process(time.sleep)(3)
        return reports.getvalue()

    reports = several.run(wait_alone)
    assert reports[1].startswith("rank 1: waiting for rank 0 (")
    assert reports[1].endswith(" s) in main_process_first()\n")
    assert reports[1].count("\n") == 1
    assert not any(reports[:1] + reports[2:])


def longer_than_the_timeout():
    state = PartialState(timeout=timedelta(seconds=8))
    with state.main_process_first():
        if state.is_main_process:
            time.sleep(12)
    with state.local_main_process_first():
        pass
    state.wait_for_everyone()


@pytest.mark.slow
def test_main_process_first_can_exceed_the_process_group_timeout():
    debug_launcher(longer_than_the_timeout)


def test_split_between_processes_returns_the_shard_of_each_rank(ranks):
    def part(inputs):
        with Accelerator().split_between_processes(inputs) as rank_items:
            accelerated = rank_items
        with PartialState().split_between_processes(inputs, apply_padding=True) as padded:
            return accelerated, padded

    items = list("abcdefg")
    actual = ranks.run(part, items)
    assert [item for rank_items, _ in actual for item in rank_items] == items
    assert {len(padded) for _, padded in actual} == {-(-len(items) // ranks.size)}
