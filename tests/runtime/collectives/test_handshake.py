"""Handshakes: ranks with different collective calls all raise an error that lists the calls."""

from __future__ import annotations

import os
import re
import time
from unittest.mock import patch

import pytest
import torch
from support.cases.log_messages import collect_messages
from support.processes.ranks import run_script

from accel_runtime.backends import connect
from accel_runtime.backends.tensors import broadcast, gather, reduce
from accel_runtime.collectives.handshake import (
    SUMMARY_WORLD_SIZE,
    CollectiveCall,
    MismatchError,
    call_at_site,
)
from accel_runtime.collectives.transport import SLOT
from accel_runtime.data.metrics import gather_object, gather_samples
from accel_runtime.environment.settings import Settings
from accel_runtime.environment.topology import Topology
from accel_runtime.foundation.epoch_progress import StepInfo
from accel_runtime.observe.call_sites import call_site


def backend():
    return connect(Settings.from_env(os.environ), Topology.from_env(os.environ))


def set_summary_world_size(size):
    from accel_runtime.collectives import handshake

    handshake.SUMMARY_WORLD_SIZE = size


@pytest.fixture(params=[False, True], ids=["slots", "summary first"])
def either_handshake(several, request):
    """Return ranks that send slots at once, then ranks that first compare a summary, as in a large world."""
    several.run(set_summary_world_size, 1 if request.param else SUMMARY_WORLD_SIZE)
    yield several
    several.run(set_summary_world_size, SUMMARY_WORLD_SIZE)


def call_differently(kind, is_odd_rank, b):
    """Make a collective call that differs on one rank."""
    world = b.topology.world_size
    step = StepInfo((2,) * world, (2,) * world, is_last=False)
    tensor = torch.ones(2, 2)
    calls = {
        "operation": (lambda: gather(tensor, b), lambda: reduce(tensor, "sum", b)),
        "reduction": (lambda: reduce(tensor, "sum", b), lambda: reduce(tensor, "max", b)),
        "structure": (lambda: gather({"a": tensor}, b), lambda: gather({"b": tensor}, b)),
        "fewer tensors": (lambda: gather([tensor] * 2, b), lambda: gather([tensor], b)),
        "dtype": (lambda: gather([tensor], b), lambda: gather([tensor.long()], b)),
        "trailing shape": (lambda: gather({"x": tensor}, b), lambda: gather({"x": torch.ones(2, 3)}, b)),
        "shape to reduce": (lambda: reduce(tensor, "sum", b), lambda: reduce(torch.ones(3, 2), "sum", b)),
        "objects": (lambda: gather_samples(tensor, [step], b), lambda: gather_samples(["a"], [step], b)),
        "step": (lambda: gather_samples(tensor, [step], b), lambda: gather_samples(tensor, [], b)),
        "no tensor": (lambda: gather([tensor], b), lambda: gather([2.0], b)),
        "barrier": (lambda: gather_object([1], b), b.barrier),
        "source": (lambda: broadcast(tensor, b), lambda: broadcast(tensor, b, 1)),
    }
    return calls[kind][is_odd_rank]()


EXPECTED = {
    "operation": "reduce(reduction='sum') at LINE of float32[2, 2] on cpu",
    "reduction": "reduce(reduction='max') at LINE of float32[2, 2] on cpu",
    "structure": "gather at LINE of ['b']: float32[2, 2] on cpu",
    "fewer tensors": "gather at LINE of [0]: float32[2, 2] on cpu",
    "dtype": "gather at LINE of [0]: int64[2, 2] on cpu",
    "trailing shape": "gather at LINE of ['x']: float32[2, 3] on cpu",
    "shape to reduce": "reduce(reduction='sum') at LINE of float32[3, 2] on cpu",
    "objects": "gather_for_metrics of objects",
    "step": "gather_for_metrics at LINE of float32[2, 2] on cpu",
    "no tensor": "gather at LINE of [0]: float",
    "barrier": "wait_for_everyone at LINE",
    "source": "broadcast(from_process=1) at LINE of float32[2, 2] on cpu",
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_a_mismatch_raises_on_all_ranks_with_their_calls_and_later_calls_work(either_handshake, kind):
    def mismatched(kind):
        b = backend()
        started = time.monotonic()
        with pytest.raises(MismatchError) as caught:
            call_differently(kind, b.topology.rank == b.topology.world_size - 1, b)
        next_result = gather(torch.tensor([b.topology.rank]), b).tolist()
        return str(caught.value), time.monotonic() - started, next_result

    for message, seconds, next_result in either_handshake.run(mismatched, kind):
        *others, last = message.splitlines()[1:]
        line = re.sub(r"at test_handshake\.py:\d+ \(\S+\)", "at LINE", last)
        assert line.startswith(f"  rank {either_handshake.size - 1}: {EXPECTED[kind]}")
        assert [text.split(":")[0] for text in others] == [
            f"  rank {rank}" for rank in range(either_handshake.size - 1)
        ]
        assert seconds < 60
        assert next_result == list(range(either_handshake.size))


def test_equal_calls_from_different_lines_complete_with_one_warning_per_pair_of_lines(either_handshake):
    def gather_in_branches():
        b = backend()
        warnings_found = []
        with collect_messages("accel_runtime.collectives") as messages:
            for _ in range(3):
                if b.topology.rank:
                    warnings_found.append(gather(torch.tensor([b.topology.rank]), b).tolist())
                else:
                    warnings_found.append(gather(torch.tensor([9]), b).tolist())
        return messages, warnings_found

    (first, warnings_found), *others = either_handshake.run(gather_in_branches)
    assert warnings_found == [[9, *range(1, either_handshake.size)]] * 3
    assert all(other == ([], warnings_found) for other in others)
    (message,) = first
    lines = [int(line) for line in re.findall(r"rank \d: gather at test_handshake\.py:(\d+)", message)]
    assert lines == [lines[0], *[lines[0] - 2] * (either_handshake.size - 1)]


def test_matching_calls_in_a_large_world_send_no_slots(several):
    """What a rank sends for a barrier, a large reduction and equal row counts does not grow with the world size."""

    def call_without_slots():
        set_summary_world_size(1)
        b = backend()
        transport = b.handshake._transport
        sent = []
        with patch.object(transport, "all_gather_slots", lambda slot: sent.append(len(slot))):
            b.barrier()
            total = reduce(torch.ones(9000), "sum", b)
            rows = gather(torch.full((2, 4000), float(b.topology.rank)), b)
        try:
            ragged = gather(torch.full((b.topology.rank + 1,), b.topology.rank), b).tolist()
            objects = gather_object([b.topology.rank], b)
        finally:
            set_summary_world_size(SUMMARY_WORLD_SIZE)
        return sent, total[0].item(), rows[:, 0].tolist(), ragged, objects

    ranks = range(several.size)
    expected = (
        [],
        several.size,
        [float(rank) for rank in ranks for _ in range(2)],
        [rank for rank in ranks for _ in range(rank + 1)],
        list(ranks),
    )
    assert several.run(call_without_slots) == [expected] * several.size


def test_different_data_from_different_lines_are_a_mismatch(pair):
    def mismatched():
        b = backend()
        first_call = lambda: gather(torch.ones(2), b)  # noqa: E731
        other = lambda: gather(torch.ones(2, 3), b)  # noqa: E731
        with pytest.raises(MismatchError):
            (first_call if b.topology.rank else other)()
        return True

    assert pair.run(mismatched) == [True, True]


def test_barriers_on_different_lines_match(either_handshake):
    def wait_twice():
        b = backend()
        if b.topology.rank:
            b.barrier()
        else:
            b.barrier()
        return True

    assert all(either_handshake.run(wait_twice))


def test_a_mismatch_longer_than_a_slot_is_reported_in_full(either_handshake):
    def mismatched():
        b = backend()
        is_second_rank = b.topology.rank == 1
        with pytest.raises(MismatchError) as caught:
            gather({f"metric {i}": torch.ones(2, 3 if is_second_rank else 2) for i in range(SLOT // 20)}, b)
        return str(caught.value)

    for message in either_handshake.run(mismatched):
        assert len(message) > SLOT
        assert f"['metric {SLOT // 20 - 1}']: float32[2, 3] on cpu" in message.splitlines()[2]


def test_a_call_is_identified_by_its_line_outside_of_the_package():
    call = call_at_site("gather")
    assert call.site == call_site()._replace(line=call.site.line)
    assert str(call) == (
        f"gather at test_handshake.py:{call.site.line} "
        "(test_a_call_is_identified_by_its_line_outside_of_the_package)"
    )
    assert isinstance(call, CollectiveCall)


# Missing ranks ---------------------------------------------------------------------------

SCRIPT = """
import datetime, os, sys, time, torch, torch._dynamo, torch.distributed as dist
from accel_runtime import Accelerator, InitProcessGroupKwargs
from accel_runtime.collectives.handshake import RankLostError, StallError

accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=PATIENCE))])
model = accelerator.prepare(torch.nn.Linear(1, 1))
accelerator.wait_for_everyone()
accelerator.gather(torch.ones(1))
if accelerator.is_last_process:
    ODD
started = time.monotonic()
try:
    accelerator.gather(torch.ones(1))
except StallError as error:
    print(f"{type(error).__name__} {time.monotonic() - started:.0f}", error, flush=True)
"""


BEHAVIOURS = {
    "ended": ("sys.exit()", "RankLostError", 60),
    "died": ("os._exit(3)", "RankLostError", 60),
    "sleeps": ("time.sleep(25); sys.exit()", "StallError", 8),
    "in DDP": ("model(torch.ones(1, 1)).sum().backward()", "StallError", 8),
}


@pytest.mark.parametrize(
    ("behaviour", "error", "patience", "one_per_node"),
    [
        pytest.param(
            *values,
            one_per_node,
            marks=pytest.mark.slow if name == "died" and one_per_node else pytest.mark.full,
            id=f"{name}, {'three machines' if one_per_node else 'one machine'}",
        )
        for name, values in BEHAVIOURS.items()
        for one_per_node in (False, True)
    ],
)
def test_waiting_ranks_raise_an_error_that_names_the_missing_rank(  # noqa: PLR0913, PLR0917
    behaviour, error, patience, one_per_node, tmp_path, port
):
    """The last of three ranks makes no collective call; with `one_per_node`, each rank has its own node."""
    missing = 2
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("ODD", behaviour).replace("PATIENCE", str(patience)))
    group = {"WORLD_SIZE": 3, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    locals_ = [(0, 1) if one_per_node else (rank, 3) for rank in range(3)]
    environs = [
        group | {"RANK": rank, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": size}
        for rank, (local, size) in enumerate(locals_)
    ]
    *waiting, gone = run_script(script, environs)
    for out, errors, code in waiting:
        assert out, errors
        kind, seconds, *_ = out.split()
        assert kind == error, errors
        assert int(seconds) < 40
        lines = out.splitlines()
        assert f"rank {missing} " in lines[0]
        assert f"  rank {missing}: is missing; it was last in gather at train.py:9 (<module>)" in lines
        assert "  rank 0: waits in gather at train.py:14 (<module>)" in lines
        assert code == 0
    assert gone[2] >= 0  # no signal, whatever else
