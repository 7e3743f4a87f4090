"""The selection of cases that cover all pairs."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from support.cases.pairs import pairwise_params

FACTORS = {
    "ranks": [1, 2, 3],
    "workers": [0, 2],
    "kind": ["map", "stream", "batches", "shards"],
    "drop": [False, True],
}


def unmarked(params):
    return [param for param in params if not param.marks]


@pytest.mark.parametrize("count", [2, 3, 4])
def test_every_pair_of_values_is_in_an_unmarked_case(count):
    factors = dict(list(FACTORS.items())[:count])
    chosen = [param.values for param in unmarked(pairwise_params(factors))]
    for (i, some), (k, others) in combinations(enumerate(factors.values()), 2):
        assert {(values[i], values[k]) for values in chosen} == set(product(some, others))


def test_all_combinations_are_cases_in_the_order_of_the_product_and_the_others_are_marked_full():
    params = pairwise_params(FACTORS)
    assert [param.values for param in params] == list(product(*FACTORS.values()))
    assert {mark.name for param in params for mark in param.marks} == {"full"}
    assert (
        len(unmarked(params)) <= 14
    )  # 48 combinations, of which 3 x 4 are the fewest that can have all pairs


def test_the_selection_is_the_same_each_time():
    assert pairwise_params(FACTORS) == pairwise_params(FACTORS)


def test_all_values_of_a_single_factor_are_unmarked():
    assert len(unmarked(pairwise_params({"workers": [0, 1, 2]}))) == 3


def test_the_id_of_a_case_is_made_of_those_of_its_values():
    factors = {"size": [pytest.param(3, id="3 processes")], "kind": [dict, "map"]}
    assert [param.id for param in pairwise_params(factors)] == ["3 processes-dict", "3 processes-map"]
    upper = pairwise_params(factors, ids=lambda value: str(value).upper())
    assert [param.id for param in upper] == ["3 processes-<CLASS 'DICT'>", "3 processes-MAP"]


def test_a_case_has_the_marks_of_its_values():
    params = pairwise_params({"size": [1, pytest.param(4, marks=pytest.mark.slow)], "kind": ["map"]})
    assert [[mark.name for mark in param.marks] for param in params] == [[], ["slow"]]


def test_pairs_of_values_without_marks_do_not_rest_on_cases_with_marks():
    workers = [0, 2, pytest.param(3, marks=pytest.mark.full)]
    params = pairwise_params(FACTORS | {"workers": workers})
    chosen = [param.values for param in unmarked(params)]
    factors = list((FACTORS | {"workers": [0, 2]}).values())
    for (i, some), (k, others) in combinations(enumerate(factors), 2):
        assert {(values[i], values[k]) for values in chosen} == set(product(some, others))
