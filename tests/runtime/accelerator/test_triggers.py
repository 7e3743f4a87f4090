"""Triggers: `set_trigger` on one rank is seen by `check_trigger` on all."""

from __future__ import annotations

import pytest

from accel_runtime import Accelerator


@pytest.mark.parametrize("who", ["first", "last", "all"])
def test_check_trigger_returns_true_once_on_all_ranks(ranks, who):
    def checked(who):
        accelerator = Accelerator()
        before = accelerator.check_trigger()
        if who == "all" or (accelerator.is_main_process if who == "first" else accelerator.is_last_process):
            accelerator.set_trigger()
        return before, accelerator.check_trigger(), accelerator.check_trigger()

    assert ranks.run(checked, who) == [(False, True, False)] * ranks.size


def test_each_accelerator_has_its_own_trigger():
    first, second = Accelerator(), Accelerator()
    first.set_trigger()
    assert (second.check_trigger(), first.check_trigger()) == (False, True)
