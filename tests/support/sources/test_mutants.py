"""Operators of mutations: each changes one place of a function, which it finds by a name."""

from __future__ import annotations

import pytest
from support.sources.mutants import (
    NotApplicableError,
    drop_argument,
    drop_element,
    find_file,
    force_condition,
    mutate,
    normalize,
    replace_argument,
    replace_call,
    replace_name,
    return_value,
    reverse_update,
    set_value,
    skip_assignment,
    skip_call,
    skip_loop,
)

SOURCE = '''
class Order:
    """An order of rows."""

    kind = "random"

    if kind:

        def iterate(self, rows, *, seed=0):
            def fetch():
                return rows["first"]

            self.seed = seed
            merged = {}
            merged |= self.defaults
            if seed in {0, self.last} and all(row for row in fetch()):
                self.draw(seed, shuffle=True)
            for row in rows:
                self.place(row, [1, 2])
            if merged == {} and all(row for row in fetch()):
                return rows["first"]
            return sorted(merged)
'''
CONDITION = "if seed in {0, self.last} and all((row for row in fetch())):"


def list_changes(operator, target="Order.iterate"):
    """Return the lines that an operator removes, and those that it adds."""
    before = normalize(SOURCE).splitlines()
    after = mutate(SOURCE, f"module:{target}", operator).splitlines()
    removed = [line.strip() for line in before if line not in after]
    return removed, [line.strip() for line in after if line not in before]


@pytest.mark.parametrize(
    ("operator", "removed", "added"),
    [
        (return_value("it[:1]", instead_of="sorted"), "return sorted(merged)", "return sorted(merged)[:1]"),
        (force_condition("last", False), CONDITION, "if False:"),
        (skip_call("draw"), "self.draw(seed, shuffle=True)", "pass"),
        (replace_call("place", "(it, seed)"), "self.place(row, [1, 2])", "(self.place(row, [1, 2]), seed)"),
        (replace_argument("place", 1, "rows"), "self.place(row, [1, 2])", "self.place(row, rows)"),
        (
            replace_argument("draw", "shuffle", "not it"),
            "self.draw(seed, shuffle=True)",
            "self.draw(seed, shuffle=not True)",
        ),
        (drop_argument("draw", "shuffle"), "self.draw(seed, shuffle=True)", "self.draw(seed)"),
        (drop_argument("place", 1), "self.place(row, [1, 2])", "self.place(row)"),
        (replace_name("defaults", "dict()"), "merged |= self.defaults", "merged |= dict()"),
        (set_value("seed", "it + 1"), "self.seed = seed", "self.seed = seed + 1"),
        (skip_assignment("seed"), "self.seed = seed", "pass"),
        (reverse_update("merged"), "merged |= self.defaults", "merged = self.defaults | merged"),
        (skip_loop("rows"), "for row in rows:", "for row in ():"),
        (drop_element("last"), CONDITION, CONDITION.replace(", self.last", "")),
    ],
)
def test_an_operator_changes_one_line(operator, removed, added):
    assert list_changes(operator) == ([removed], [added])


def test_a_value_can_be_returned_from_the_start():
    assert list_changes(return_value("seed")) == ([], ["return seed"])


def test_a_function_inside_another_one_and_a_class_are_targets():
    assert list_changes(return_value("None"), "Order.iterate.fetch") == ([], ["return None"])
    assert list_changes(set_value("kind", "None"), "Order") == (["kind = 'random'"], ["kind = None"])


@pytest.mark.parametrize(
    ("operator", "message"),
    [
        (skip_call("missing"), "no statement that calls 'missing' found"),
        (skip_call("all"), "no statement that calls 'all' found"),
        (replace_call("all", "True"), "call of 'all' found 2 times"),
        (force_condition("row", False), "no condition that mentions 'row' found"),
        (replace_argument("place", 2, "rows"), "no argument 2 of 'place' found"),
        (set_value("merged", "{}"), "assignment to 'merged' found 2 times"),
        (set_value("merged.x", "{}"), "no assignment to 'merged.x' found"),
        (replace_name("defaults", "renamed"), "no variable 'renamed'"),
        (skip_loop("missing"), "no loop over 'missing' found"),
        (replace_name("defaults", "it"), "the operator changes nothing"),
    ],
)
def test_an_operator_that_does_not_match_one_place_is_an_error(operator, message):
    with pytest.raises(NotApplicableError, match=message):
        mutate(SOURCE, "module:Order.iterate", operator)


@pytest.mark.parametrize("definition", ["Order.missing", "missing", "iterate"])
def test_a_missing_definition_is_an_error(definition):
    with pytest.raises(NotApplicableError, match=f"no definition '{definition}' found"):
        mutate(SOURCE, f"module:{definition}", skip_call("draw"))


def test_the_file_of_a_module_or_package_is_found(tmp_path):
    (tmp_path / "package").mkdir()
    files = [tmp_path / "package" / "__init__.py", tmp_path / "package" / "module.py"]
    for file in files:
        file.touch()
    assert [find_file("package:f", tmp_path), find_file("package.module:C.f", tmp_path)] == files
    with pytest.raises(NotApplicableError, match=r"module 'package\.other' not found"):
        find_file("package.other:f", tmp_path)
