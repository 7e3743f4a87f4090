"""Errors of the system before a run starts."""

import resource

import pytest

from accel_cli.errors import UsageError
from accel_cli.planning.plan import Plan
from accel_cli.runner import agent


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
