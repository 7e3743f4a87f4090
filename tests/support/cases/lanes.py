"""The files of a lane: those whose tests the expression of `-m` may select, by the marks that stand in their texts."""

from __future__ import annotations

import itertools
import re

from _pytest.mark.expression import Expression
from support.processes.services import FIXTURES

__all__ = ["is_in_lane", "read_marks"]

MARKS = ("extension", "full", "gpu", "service", "slow", "smoke")
TRACES = {"service": ("service", "s3_", *FIXTURES), "slow": ("slow",), "smoke": ("smoke",)}
"""Texts without which no test of a file has a mark; any test may get `full` from a parameter of a fixture."""
IMPORTS_TESTS = re.compile(r"\btest_\w+ import |load_test_module")
"""A file with tests of another one, whose text has their marks."""


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
