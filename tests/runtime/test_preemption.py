"""`accelerator.preempted()`: a signal to one rank is known to all of them at the same step."""

import os
import signal

import pytest

from accel_runtime import Accelerator
from accel_runtime.collectives.handshake import MismatchError


@pytest.fixture(autouse=True)
def _handlers():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_to_one_rank_is_known_to_all_at_the_same_step(several):
    def work():
        accelerator = Accelerator()
        before = signal.getsignal(signal.SIGTERM)
        try:
            for step in range(20):
                if step == 7 and accelerator.is_last_process:
                    os.kill(os.getpid(), signal.SIGTERM)
                if accelerator.preempted():
                    return step, accelerator.preempted()
        finally:
            signal.signal(signal.SIGTERM, before)

    assert several.run(work) == [(7, True)] * several.size


def test_evaluation_ends_too_and_the_loop_around_it_sees_why(pair):
    def work():
        accelerator = Accelerator()
        before = signal.getsignal(signal.SIGUSR1)
        seen = []
        try:
            for epoch in range(3):
                for batch in range(5):
                    if (epoch, batch) == (1, 2) and accelerator.process_index == 0:
                        os.kill(os.getpid(), signal.SIGUSR1)
                    if accelerator.preempted():
                        seen.append((epoch, batch))
                        break
                if accelerator.preempted():
                    return [*seen, epoch]
        finally:
            signal.signal(signal.SIGUSR1, before)

    assert pair.run(work) == [[(1, 2), 1]] * 2


def test_ranks_that_ask_for_different_signals_are_told(pair):
    def work():
        accelerator = Accelerator()
        mine = [signal.SIGUSR1, signal.SIGUSR2][accelerator.process_index]
        before = signal.getsignal(mine)
        try:
            accelerator.preempted([mine])
        except MismatchError as error:
            return str(error)
        finally:
            signal.signal(mine, before)

    for said in pair.run(work):
        assert "rank 0: preempted(SIGUSR1) at test_preemption.py" in said
        assert "rank 1: preempted(SIGUSR2) at test_preemption.py" in said


def test_a_script_that_never_asks_keeps_what_signals_do():
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    Accelerator()
    assert {number: signal.getsignal(number) for number in signal.valid_signals()} == before


def test_the_handlers_of_the_script_are_called_also_those_it_puts_in_place_later():
    heard = []
    signal.signal(signal.SIGUSR1, lambda *_: heard.append("before"))
    accelerator = Accelerator()
    assert not accelerator.preempted()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert heard == ["before"]

    accelerator = Accelerator()
    assert not accelerator.preempted([signal.SIGUSR2])
    signal.signal(signal.SIGUSR2, lambda *_: heard.append("after"))
    assert not accelerator.preempted([signal.SIGUSR2])
    os.kill(os.getpid(), signal.SIGUSR2)
    assert heard == ["before", "after"]
    assert accelerator.preempted([signal.SIGUSR2])


def test_only_the_signals_asked_for_count():
    accelerator = Accelerator()
    both = [signal.SIGUSR1, signal.SIGUSR2]
    assert not accelerator.preempted(both)
    os.kill(os.getpid(), signal.SIGUSR2)
    assert not accelerator.preempted([signal.SIGUSR1])
    assert accelerator.preempted(both)


def test_one_process_asks_nobody(monkeypatch):
    accelerator = Accelerator()
    monkeypatch.setattr(accelerator._preemption._handshake, "exchange", None)
    assert not accelerator.preempted()
    os.kill(os.getpid(), signal.SIGTERM)
    assert accelerator.preempted()


def test_a_signal_that_nothing_can_handle_is_refused_by_name():
    with pytest.raises(ValueError, match="cannot handle SIGKILL"):
        Accelerator().preempted([signal.SIGKILL])
