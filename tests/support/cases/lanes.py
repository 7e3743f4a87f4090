"""The files of a lane: those whose tests the expression of `-m` may select, by the marks that stand in their texts.

And the tests of a lane that share what takes long to start, so that one process of pytest-xdist runs them.
"""

from __future__ import annotations

import itertools
import re
from functools import cache

from _pytest.mark.expression import Expression
from support.processes.services import FIXTURES

__all__ = ["build_scheduler", "find_group", "is_in_lane", "read_marks"]

MARKS = ("extension", "full", "gpu", "service", "slow", "smoke")
TRACES = {"service": ("service", "s3_", *FIXTURES), "slow": ("slow",), "smoke": ("smoke",)}
"""Texts without which no test of a file has a mark; any test may get `full` from a parameter of a fixture."""
IMPORTS_TESTS = re.compile(r"\btest_\w+ import |load_test_module")
"""A file with tests of another one, whose text has their marks."""
STARTED_ONCE = {
    "Slurm": ("slurm_cluster",),
    "Chromium": ("open_browser",),
    "Transformers": ("preload(", '"transformers.'),
}
"""What each process of pytest-xdist would start, or import for ten seconds, for itself; and texts of the files with its tests."""
STARTED_FOR_NAMES = {
    "Ceph": ("Ceph",),
    "1 and 4 replicas": ("1 replica", "4 replicas", "xla 1", "one_replica", "one_and_four"),
    "2 replicas": ("2 replicas", "xla 2", "two_replicas"),
    "SPMD": ("spmd", "SPMD"),
}
"""The same, for tests whose names or parameters have a text."""


def read_marks(path, *, is_extension):
    """Return the marks that all tests of a file have, with True, and those that none has, with False."""
    text = path.read_text("utf-8")
    module_mark = re.search(r"^pytestmark = pytest\.mark\.(\w+)", text, re.MULTILINE)
    traces_elsewhere = IMPORTS_TESTS.search(text) is not None
    absent = [
        mark
        for mark, traces in TRACES.items()
        if not traces_elsewhere and not any(trace in text for trace in traces)
    ]
    marks = dict.fromkeys(absent, False) | {"extension": is_extension}
    if module_mark and module_mark[1] in MARKS:
        marks[module_mark[1]] = True
    return marks


def is_in_lane(expression, marks):
    """Return whether an expression of `-m` may select a test of a file with these marks."""
    lane = Expression.compile(expression)
    unknown = [mark for mark in MARKS if mark not in marks]
    for values in itertools.product((False, True), repeat=len(unknown)):
        state = marks | dict(zip(unknown, values, strict=True))
        if lane.evaluate(lambda mark, state=state, **_: state.get(mark, True)):
            return True
    return any(
        mark not in MARKS for mark in re.findall(r"\w+", expression) if mark not in {"and", "or", "not"}
    )


def build_scheduler(config, log):
    """Return a scheduler of pytest-xdist that gives the tests of a group to one process, and the others one by one."""
    from xdist.scheduler import LoadScopeScheduling

    class GroupScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return find_group(config.rootpath, nodeid) or nodeid

    return GroupScheduling(config, log)


def find_group(root, nodeid):
    """Return the name of what a test shares with others, or None."""
    file, _, test = nodeid.partition("::")
    named = (name for name, parts in STARTED_FOR_NAMES.items() if any(part in test for part in parts))
    return next(named, None) or _find_group_of_file(root / file)


@cache
def _find_group_of_file(path):
    text = path.read_text("utf-8")
    return next((name for name, parts in STARTED_ONCE.items() if all(part in text for part in parts)), None)
