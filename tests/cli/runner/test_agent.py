"""Errors of the system before a run starts, and the ranks whose output is hidden."""

import resource

import pytest

from accel_cli.errors import UsageError
from accel_cli.planning.plan import Plan
from accel_cli.runner import agent
from accel_cli.runner.run import run


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
        run(PLAN)


@pytest.mark.parametrize(
    ("shown", "starts_replicas", "hidden"),
    [({0}, False, True), ({2}, False, False), (set(), False, True), (set(), True, True), ({0}, True, False)],
)
def test_ranks_are_hidden_if_none_or_only_those_of_other_nodes_are_shown(shown, starts_replicas, hidden):
    """No hint about missing output is given for them."""
    assert agent._is_hidden({2, 3}, frozenset(shown), starts_replicas=starts_replicas) == hidden
