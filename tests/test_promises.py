"""Every promise has tests that run in `make test`, and a mutation that they notice."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from mutations import MUTATIONS
from promises import GUARANTEES, PROMISES
from support.sources.node_ids import find_problem

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.name)
def test_the_tests_of_a_promise_run_in_make_test_and_notice_its_mutation(promise):
    assert not {test: problem for test in promise.tests if (problem := find_problem(test))}
    tests = {mutation.name: set(mutation.tests) for mutation in MUTATIONS}
    assert tests[promise.mutation] <= set(promise.tests)


def test_names_of_promises_are_unique():
    assert not [name for name, count in Counter(promise.name for promise in PROMISES).items() if count > 1]


def test_every_guarantee_of_the_documentation_is_a_promise():
    page = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
    section = page.partition("## Guarantees\n")[2].partition("\n## ")[0]
    titles = re.findall(r"^- \*\*(.+?)\.\*\*", section, re.MULTILINE)
    assert titles == [promise.name for promise in GUARANTEES]
    assert len(titles) == section.count("\n- ")
