"""Tests that `make test` does not run are found by their marks."""

from __future__ import annotations

import pytest
from support.sources.node_ids import find_problem

THIS = "tests/support/sources/test_node_ids.py"


@pytest.mark.parametrize(
    ("test", "problem"),
    [
        (THIS, None),
        (f"{THIS}::test_a_test_that_make_test_does_not_run_has_a_problem", None),
        (f"{THIS}::test_some_values_are_slow", None),
        (f"{THIS}::test_gone", "function not found"),
        ("tests/test_gone.py::test_gone", "file not found"),
        (f"{THIS}::test_a_slow_test", "marked slow, full or service"),
        (f"{THIS}::test_each_value_is_slow", "marked slow, full or service"),
        ("tests/test_site.py", "marked slow, full or service"),
    ],
)
def test_a_test_that_make_test_does_not_run_has_a_problem(test, problem):
    assert find_problem(test) == problem


@pytest.mark.slow
def test_a_slow_test():
    pass


@pytest.mark.parametrize("value", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_some_values_are_slow(value):
    pass


@pytest.mark.parametrize(
    "value",
    [pytest.param(1, marks=pytest.mark.slow), *(pytest.param(n, marks=pytest.mark.full) for n in (2, 3))],
)
def test_each_value_is_slow(value):
    pass
