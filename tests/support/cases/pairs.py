"""Select the cases of a product of factors that cover all pairs of values."""

from __future__ import annotations

from itertools import combinations, product

import pytest


def pairwise_params(factors, *, ids=None):
    """Return one `pytest.param` for each combination of the values of the factors, in the order of the product.

    Args:
        factors: The values of each factor by its name, in the order of the test's arguments. A value may be a
            `pytest.param` with an id and marks of its own.
        ids: A function that returns the text of a value in the id of a case; the name or `str` of the value by default.

    Returns:
        Params such that every pair of values of two factors is in a case that is not marked `full`, unless a value is;
        the remaining cases are marked. Pairs of values without marks are covered by cases without marked values.
    """
    values = [
        [value if _is_param(value) else pytest.param(value) for value in factor_values]
        for factor_values in factors.values()
    ]
    cases = list(product(*(range(len(factor_values)) for factor_values in values)))
    plain = [case for case in cases if not any(values[i][k].marks for i, k in enumerate(case))]
    chosen = select_pairs(plain)
    chosen |= select_pairs(cases, chosen)
    return [
        _param([values[i][k] for i, k in enumerate(case)], case not in chosen, ids or _text) for case in cases
    ]


def select_pairs(cases, chosen=()):
    """Return a small set of the cases, tuples of equal length, that has each pair of values which `chosen` lacks."""
    pairs = {case: set(combinations(enumerate(case), min(2, len(case)))) for case in cases}
    uncovered = set().union(*pairs.values()).difference(*(pairs[case] for case in chosen))
    added = set()
    while uncovered:
        best = max(
            cases, key=lambda case: len(uncovered & pairs[case])
        )  # the first of the best, so that the selection is deterministic
        added.add(best)
        uncovered -= pairs[best]
    return added


def build_pairs(factors):
    """Return a small set of dicts with a value of each factor, such that any two values of two factors are in one of them.

    Of a product too large to build: each case begins with a pair that is missing, and adds the values with the most others.
    """
    names = list(factors)
    missing = {
        ((i, a), (j, b))
        for i, j in combinations(range(len(names)), 2)
        for a in range(len(factors[names[i]]))
        for b in range(len(factors[names[j]]))
    }
    cases = []
    while missing:
        chosen = dict(min(missing))
        for i in range(len(names)):
            if i not in chosen:
                counts = [
                    sum(tuple(sorted([(i, value), other])) in missing for other in chosen.items())
                    for value in range(len(factors[names[i]]))
                ]
                # Of equal values another one in each case.
                order = sorted(range(len(counts)), key=lambda value: (value - len(cases)) % len(counts))
                chosen[i] = max(order, key=counts.__getitem__)
        case = sorted(chosen.items())
        missing -= set(combinations(case, 2))
        cases.append({names[i]: factors[names[i]][value] for i, value in case})
    return cases


def _param(values, full, text):
    name = "-".join(value.id or text(value.values[0]) for value in values)
    marks = [mark for value in values for mark in value.marks] + [pytest.mark.full] * full
    return pytest.param(*(value.values[0] for value in values), id=name, marks=marks)


def _is_param(value):
    return isinstance(value, type(pytest.param()))


def _text(value):
    return str(getattr(value, "__name__", value))
