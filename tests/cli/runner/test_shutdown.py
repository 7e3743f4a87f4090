"""Signal handlers of the launcher."""

import signal

from accel_cli.runner.guard import HANDLED_SIGNALS
from accel_cli.runner.shutdown import SignalHandlers


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
