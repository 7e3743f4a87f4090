"""What `accel test` runs in every process."""

from __future__ import annotations

import contextlib
import io
import os
from unittest.mock import patch

import pytest


def checked(environ, *, broken=None, on_rank=0):
    """Exit status and output of the self-check, where `broken` may raise on one rank."""
    from accel_runtime import selfcheck

    def check(accelerator):
        if accelerator.process_index == on_rank:
            raise ValueError(broken)
        return "fine here"

    checks = (*selfcheck.CHECKS, check) if broken else selfcheck.CHECKS
    printed, complained = io.StringIO(), io.StringIO()
    with (
        patch.dict(os.environ, environ),
        patch.object(selfcheck, "CHECKS", checks),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(complained),
    ):
        status = selfcheck.main()
    return status, printed.getvalue().splitlines(), complained.getvalue()


@pytest.mark.parametrize("mixed_precision", ["no", "bf16", "fp16"])
def test_all_checks_hold_here_and_the_first_rank_of_a_machine_says_so(ranks, mixed_precision):
    first, *others = ranks.run(checked, {"ACCEL_MIXED_PRECISION": mixed_precision})
    status, printed, complained = first
    assert status == 0
    assert [line.split()[:2] for line in printed[:-1]] == [
        ["ok", name] for name in ("processes:", "collectives:", "gradients:", "evaluation:", "precision:")
    ]
    assert printed[-1] == "everything works here"
    assert complained == ""
    quiet = [(0, [] if ranks.local_rank(rank) else printed, "") for rank in range(1, ranks.size)]
    assert [(status, [line.split(" (")[0] for line in said], text) for status, said, text in others] == [
        (status, [line.split(" (")[0] for line in said], text) for status, said, text in quiet
    ]


def test_a_check_that_fails_on_one_rank_fails_on_all_and_is_told_by_that_rank(ranks):
    def failing():
        last = int(os.environ.get("WORLD_SIZE", "1")) - 1
        return checked({}, broken="no light", on_rank=last)

    results = ranks.run(failing)
    assert [status for status, *_ in results] == [1] * ranks.size
    printed = results[0][1]
    assert printed[-2].startswith("FAILED check: ")
    assert printed[-1] == "something does not work here: see above"
    assert [complained for *_, complained in results] == [""] * (ranks.size - 1) + [
        f"rank {ranks.size - 1}: check: ValueError: no light\n"
    ]


@pytest.mark.parametrize(
    ("part", "name", "broken"),
    [
        (
            "collectives.transport.SocketTransport",
            "all_gather_slots",
            lambda self, slot: bytearray(slot) * self._size,
        ),
        ("backends.distributed.DDPBackend", "wrap_model", lambda _self, model, _options: model),
    ],
)
def test_a_backend_that_does_not_do_its_work_is_found_out(pair, part, name, broken):
    def found_out(part, name, broken):
        with patch(f"accel_runtime.{part}.{name}", broken):
            return checked({})[0]

    assert pair.run(found_out, part, name, broken) == [1, 1]
