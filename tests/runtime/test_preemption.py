"""`accelerator.preempted()`: all ranks notice a signal to one rank at the same step."""

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


def test_all_ranks_notice_a_signal_to_one_rank_at_the_same_step(several):
    def run_until_preempted():
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

    assert several.run(run_until_preempted) == [(7, True)] * several.size


def test_preempted_stays_true_after_the_inner_loop_ends(pair):
    def run_until_preempted():
        accelerator = Accelerator()
        before = signal.getsignal(signal.SIGUSR1)
        records = []
        try:
            for epoch in range(3):
                for batch in range(5):
                    if (epoch, batch) == (1, 2) and accelerator.process_index == 0:
                        os.kill(os.getpid(), signal.SIGUSR1)
                    if accelerator.preempted():
                        records.append((epoch, batch))
                        break
                if accelerator.preempted():
                    return [*records, epoch]
        finally:
            signal.signal(signal.SIGUSR1, before)

    assert pair.run(run_until_preempted) == [[(1, 2), 1]] * 2


def test_ranks_with_different_signals_are_reported(pair):
    def run_until_preempted():
        accelerator = Accelerator()
        signal_number = [signal.SIGUSR1, signal.SIGUSR2][accelerator.process_index]
        before = signal.getsignal(signal_number)
        try:
            accelerator.preempted([signal_number])
        except MismatchError as error:
            return str(error)
        finally:
            signal.signal(signal_number, before)

    for message in pair.run(run_until_preempted):
        assert "rank 0: preempted for SIGUSR1 at test_preemption.py" in message
        assert "rank 1: preempted for SIGUSR2 at test_preemption.py" in message


def test_signal_handlers_are_unchanged_if_preempted_is_never_called():
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    Accelerator()
    assert {number: signal.getsignal(number) for number in signal.valid_signals()} == before


def test_handlers_of_the_script_are_called_also_if_installed_later():
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


def test_only_the_given_signals_count():
    accelerator = Accelerator()
    signals = [signal.SIGUSR1, signal.SIGUSR2]
    assert not accelerator.preempted(signals)
    os.kill(os.getpid(), signal.SIGUSR2)
    assert not accelerator.preempted([signal.SIGUSR1])
    assert accelerator.preempted(signals)


def test_a_single_process_runs_no_collective(monkeypatch):
    accelerator = Accelerator()
    monkeypatch.setattr(accelerator._steps._preemption._handshake, "exchange", None)
    assert not accelerator.preempted()
    os.kill(os.getpid(), signal.SIGTERM)
    assert accelerator.preempted()


def test_a_signal_that_cannot_be_handled_is_rejected_by_name():
    with pytest.raises(ValueError, match="cannot handle SIGKILL"):
        Accelerator().preempted([signal.SIGKILL])
