"""The mutations apply to the sources of today; `make test-full` runs them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from mutations import MUTATIONS

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_applies_to_its_function(mutation):
    mutation.apply(ROOT)


def test_names_of_mutations_are_unique():
    assert not [name for name, count in Counter(mutation.name for mutation in MUTATIONS).items() if count > 1]
