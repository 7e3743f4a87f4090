"""Errors of the system before a run starts."""

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


def test_too_low_a_limit_on_open_files_is_an_error_before_the_start(few_files):
    with pytest.raises(
        UsageError, match=r"the limit on open files is 24, .* needs 48. Raise it: ulimit -n 1024"
    ):
        agent.run(PLAN)


def test_a_plan_that_cannot_be_passed_to_the_fork_server_is_an_error(monkeypatch):
    def refuse(*_):
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr(os, "memfd_create", refuse)
    message = r"the plan cannot be passed on: File too large. Raise the limit on file sizes \(ulimit -f\)."
    with pytest.raises(AccelError, match=message):
        forkserver.exec_fork_server(PLAN)
