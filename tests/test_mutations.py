"""The mutations apply to the sources of today; `make test-full` runs them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from mutations import MUTATIONS, Mutation
from promises import PROMISES
from support.sources.mutants import NotApplicableError, skip_call
from support.sources.node_ids import find_problem

ROOT = Path(__file__).parent.parent
OF_PROMISES = {promise.mutation for promise in PROMISES}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_applies_and_its_tests_run_for_every_change(mutation):
    mutation.apply(ROOT)
    assert not {
        test: problem
        for test in mutation.tests
        if (problem := find_problem(test, with_extensions=mutation.name not in OF_PROMISES))
    }


def test_a_mutation_that_does_not_apply_is_named():
    mutation = Mutation("lost call", "accel_runtime.storage.manifest:Manifest.parse", skip_call("gone"), ())
    with pytest.raises(NotApplicableError, match=r"^Mutation 'lost call' does not apply to accel_runtime"):
        mutation.apply(ROOT)


def test_names_of_mutations_are_unique():
    assert not [name for name, count in Counter(mutation.name for mutation in MUTATIONS).items() if count > 1]
