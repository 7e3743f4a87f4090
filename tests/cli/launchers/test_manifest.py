"""Patches of jobs: what is merged, what is removed, and what a launcher keeps for itself."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_cli.errors import UsageError
from accel_cli.launchers.manifest import PatchRules, merge_patch

RULES = PatchRules(
    "launcher.pod", {"containers": "name"}, frozenset({"added"}), {"containers[main].command": "Do not."}
)
GENERATED = {"containers": [{"name": "main", "command": ["run"], "env": {"A": "1"}}, {"name": "other"}], "added": [1], "kept": {"a": 1}}  # fmt: skip
TREES = st.recursive(
    st.integers() | st.booleans() | st.text(max_size=2),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("patch", "changed"),
    [
        ({}, {}),
        ({"kept": {"b": 2}}, {"kept": {"a": 1, "b": 2}}),
        ({"kept": None, "missing": None}, {"kept": ...}),
        ({"kept": [3]}, {"kept": [3]}),
        ({"added": [1, 2]}, {"added": [1, 2]}),
        ({"list": [{"x": None}]}, {"list": [{"x": None}]}),
        (
            {"containers": [{"name": "new", "x": {"gone": None}}, {"name": "main", "env": {"B": "2", "A": None}}]},
            {
                "containers": [
                    {"name": "main", "command": ["run"], "env": {"B": "2"}},
                    {"name": "other"},
                    {"name": "new", "x": {}},
                ]
            },
        ),
        ({"containers": [{"name": "other", "$patch": "delete"}]}, {"containers": GENERATED["containers"][:1]}),
    ],
)  # fmt: skip
def test_a_patch_is_merged_by_member_and_items_by_their_name(patch, changed):
    before = copy.deepcopy(GENERATED)
    expected = {name: value for name, value in {**GENERATED, **changed}.items() if value is not ...}
    assert merge_patch(GENERATED, patch, RULES) == expected
    assert before == GENERATED


@pytest.mark.parametrize(
    "patch",
    [
        {"containers": [{"name": "main", "command": ["other"]}]},
        {"containers": [{"name": "main", "command": None}]},
        {"containers": [{"name": "main", "$patch": "delete"}]},
        {"containers": None},
        {"containers": "none"},
    ],
)
def test_what_a_launcher_sets_is_neither_changed_nor_removed_nor_replaced(patch):
    with pytest.raises(UsageError, match=r"Cannot set launcher\.pod\.containers.* itself\. Do not\."):
        merge_patch(GENERATED, patch, RULES)


def test_an_item_without_the_name_that_selects_it_is_an_error():
    with pytest.raises(UsageError, match=r"launcher\.pod\.containers\[0\]: expected an item with name"):
        merge_patch(GENERATED, {"containers": [{"command": []}]}, RULES)


@given(TREES, TREES)
def test_a_patch_without_none_is_in_the_result_and_merging_it_again_changes_nothing(generated, patch):
    merged = merge_patch(generated, patch, PatchRules("launcher.pod"))
    assert merge_patch(merged, patch, PatchRules("launcher.pod")) == merged
    if not (isinstance(generated, dict) and isinstance(patch, dict)):
        assert merged == patch
