"""The self-check of `accel test` in every process."""

from __future__ import annotations

import contextlib
import io
import os
from unittest.mock import patch

import pytest


def run_selfcheck(environ, *, broken=None, on_rank=0):
    """Run the self-check, with a check that raises `broken` on one rank; return exit status and output."""
    from accel_runtime import selfcheck

    def check(accelerator):
        if accelerator.process_index == on_rank:
            raise ValueError(broken)
        return "fine here"

    checks = (*selfcheck.EXACT_CHECKS, check) if broken else selfcheck.EXACT_CHECKS
    printed, complained = io.StringIO(), io.StringIO()
    with (
        patch.dict(os.environ, environ),
        patch.object(selfcheck, "EXACT_CHECKS", checks),
        # Tested in `tests/extensions/node_check/test_node_check.py`.
        patch.object(selfcheck, "EARLY_CHECKS", {}),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(complained),
    ):
        status = selfcheck.main()
    return status, printed.getvalue().splitlines(), complained.getvalue()


@pytest.mark.parametrize("mixed_precision", ["no", "bf16", "fp16"])
def test_all_checks_pass_and_only_the_first_rank_of_a_node_prints_them(ranks, mixed_precision):
    first, *others = ranks.run(run_selfcheck, {"ACCEL_MIXED_PRECISION": mixed_precision})
    status, printed, complained = first
    assert status == 0
    assert [line.split()[:2] for line in printed[:-1]] == [
        ["ok", name] for name in ("processes:", "collectives:", "gradients:", "evaluation:", "precision:")
    ]
    assert printed[-1] == "everything works here"
    assert complained == ""
    quiet = [(0, [] if ranks.local_rank(rank) else printed, "") for rank in range(1, ranks.size)]
    assert [(status, [line.split(" (")[0] for line in lines], text) for status, lines, text in others] == [
        (status, [line.split(" (")[0] for line in lines], text) for status, lines, text in quiet
    ]


def test_a_check_that_fails_on_one_rank_fails_on_all_ranks(ranks):
    def run_failing_selfcheck():
        last = int(os.environ.get("WORLD_SIZE", "1")) - 1
        return run_selfcheck({}, broken="no light", on_rank=last)

    results = ranks.run(run_failing_selfcheck)
    assert [status for status, *_ in results] == [1] * ranks.size
    printed = results[0][1]
    assert printed[-3].startswith("FAILED check: ")
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
        ("parallel.ddp.DDPStrategy", "wrap_model", lambda _self, model, _options: model),
    ],
)
def test_a_broken_backend_fails_the_self_check(pair, part, name, broken):
    def run_with_broken_function(part, name, broken):
        with patch(f"accel_runtime.{part}.{name}", broken):
            return run_selfcheck({})[0]

    assert pair.run(run_with_broken_function, part, name, broken) == [1, 1]
