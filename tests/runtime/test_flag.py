"""A boolean that can be read as a property and called as a method."""

from __future__ import annotations

import pytest

from accel_runtime.accelerator.state import Flag


@pytest.mark.parametrize("truth", [True, False])
def test_a_flag_has_its_value_as_a_property_and_as_a_call(truth):
    flag = Flag(truth)
    assert bool(flag) is truth
    assert flag() is truth
    assert flag == truth
    assert (not flag) is not truth
    assert str(flag) == repr(flag) == f"{flag}" == str(truth)


def test_a_flag_converts_any_value_to_a_boolean():
    assert Flag("text")() is True
    assert Flag([])() is False
