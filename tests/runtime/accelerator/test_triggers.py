"""One process pulls the trigger, all of them know."""

from __future__ import annotations

import pytest

from accel_runtime import Accelerator


@pytest.mark.parametrize("who", ["first", "last", "all"])
def test_a_trigger_of_any_process_is_found_by_all_and_then_unset(ranks, who):
    def checked(who):
        accelerator = Accelerator()
        before = accelerator.check_trigger()
        if who == "all" or (accelerator.is_main_process if who == "first" else accelerator.is_last_process):
            accelerator.set_trigger()
        return before, accelerator.check_trigger(), accelerator.check_trigger()

    assert ranks.run(checked, who) == [(False, True, False)] * ranks.size


def test_the_trigger_of_one_accelerator_is_not_that_of_another():
    first, second = Accelerator(), Accelerator()
    first.set_trigger()
    assert (second.check_trigger(), first.check_trigger()) == (False, True)
