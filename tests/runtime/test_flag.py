"""A truth that reads as a property and as a call."""

from __future__ import annotations

import pytest

from accel_runtime.state import Flag


@pytest.mark.parametrize("truth", [True, False])
def test_a_flag_is_its_truth_however_it_is_read(truth):
    flag = Flag(truth)
    assert bool(flag) is truth
    assert flag() is truth
    assert flag == truth
    assert (not flag) is not truth
    assert str(flag) == repr(flag) == f"{flag}" == str(truth)


def test_a_flag_is_made_from_anything_true():
    assert Flag("text")() is True
    assert Flag([])() is False
