"""Signals to the launcher, and its end while a rank runs that does not react to them."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.processes.waits import limit, wait_until
from torch.distributed.elastic.multiprocessing import SignalException

from accel_cli.runner import guard
from accel_cli.runner.guard import HANDLED_SIGNALS
from accel_cli.runner.shutdown import GuardProcess, SignalHandlers

DEAF = """
import ctypes, signal
signal.signal(signal.SIGTERM, lambda *_: None)
print(flush=True)
while True:
    ctypes.PyDLL(None).sleep(600)
"""


@pytest.fixture
def rank():
    """A rank that is blocked in C, where its handler of SIGTERM is not called."""
    command = [sys.executable, "-c", DEAF]
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield process
        process.kill()


def test_a_signal_while_the_processes_are_ended_kills_those_blocked_in_c_and_is_raised_then(rank):
    """An exception in the midst would leave them running, and the guard would be dismissed."""
    with SignalHandlers(shutdown_timeout=600) as signals:
        signals.workers = [rank]

        def end():
            with signals.end_processes():
                os.kill(os.getpid(), signal.SIGTERM)
                rank.wait(limit(60))

        with pytest.raises(SignalException):
            end()
    assert rank.returncode == -signal.SIGKILL


def test_the_guard_ends_a_rank_blocked_in_c_that_outlives_its_launcher(rank, tmp_path):
    signals = SignalHandlers(shutdown_timeout=600)
    signals.workers = [rank]
    with GuardProcess(tmp_path, signals) as process:
        process.watch([rank.pid])
    status = Path(f"/proc/{rank.pid}/status")
    wait_until(
        lambda: not guard.get_start_time(rank.pid), 60, lambda: f"{process._process} {status.read_text()}"
    )


def test_handlers_are_restored_at_the_end_of_a_run():
    before = [signal.getsignal(number) for number in HANDLED_SIGNALS]
    with SignalHandlers(shutdown_timeout=1):
        assert signal.getsignal(signal.SIGUSR2) not in before
    assert [signal.getsignal(number) for number in HANDLED_SIGNALS] == before


def test_a_handler_that_was_not_installed_by_python_is_replaced_by_the_default(monkeypatch):
    before = signal.getsignal(signal.SIGUSR2)
    with monkeypatch.context() as patch:
        patch.setattr(signal, "getsignal", lambda number: None if number == signal.SIGUSR2 else before)
        handlers = SignalHandlers(shutdown_timeout=1)
    handlers._before = {signal.SIGUSR2: handlers._before[signal.SIGUSR2]}
    with handlers:
        assert signal.getsignal(signal.SIGUSR2) == handlers._forward
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL
    signal.signal(signal.SIGUSR2, before)


def test_a_guard_that_was_suspended_kills_all_the_same(rank, monkeypatch):
    """Its time is over when it continues, and it has sent SIGTERM only."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)

    def suspend(_):
        clock.now += 600
        if clock.now > 600:
            rank.wait(limit(60))

    clock.sleep = suspend
    monkeypatch.setattr(guard, "time", clock)
    guard._end_sessions({rank.pid: guard.get_start_time(rank.pid)}, b"=no such folder/")
    assert rank.wait(limit(60)) == -signal.SIGKILL
