"""Limits of the system that a run meets before it starts."""

import errno
import os
import resource

import pytest

from accel_cli.errors import AccelError, UsageError
from accel_cli.planning.plan import Plan
from accel_cli.runner import agent, forkserver


@pytest.fixture
def few_files():
    """A limit of 24 open files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (24, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


PLAN = Plan(launcher="torchrun", argv=("python",), env={}, device="cpu", nproc_per_node=2)


def test_too_few_open_files_are_refused_before_anything_starts(few_files):
    with pytest.raises(
        UsageError, match=r"the limit on open files is 24, .* needs 48. Raise it: ulimit -n 1024"
    ):
        agent.run(PLAN)


def test_a_plan_that_cannot_be_passed_on_is_one_message(monkeypatch):
    def refuse(*_):
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr(os, "memfd_create", refuse)
    said = r"the plan cannot be passed on: File too large. Raise the limit on file sizes \(ulimit -f\)."
    with pytest.raises(AccelError, match=said):
        forkserver.exec_fork_server(PLAN)
