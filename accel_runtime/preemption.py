"""Whether the run is asked to end: a signal that came to any rank, said to all of them at the same step."""

from __future__ import annotations

import signal
import struct
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from accel_runtime.exchange.agreement import Agreement, here

__all__ = ["PREEMPTION", "Preemption"]

PREEMPTION = (signal.SIGTERM, signal.SIGUSR1)
"""What schedulers send before they take a machine away."""
_MASK = struct.Struct("=Q")


class Preemption:
    """The signals that came to any rank, as far as the ranks have told each other.

    Nothing happens before the first question: until then, and in a script that never asks, every signal does
    what it does in any program. From then on a handler notes the signals asked for, and calls the handler the
    script had, or puts in place later.

    Args:
        agreement: Carries the question from rank to rank.
    """

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._came = 0
        self._agreed = 0
        self._handlers: dict[int, Callable[[int, FrameType | None], None]] = {}

    def asked(self, signals: Iterable[int]) -> bool:
        """Whether one of these signals has come to any rank; True stays True.

        Raises:
            ValueError: Not a signal that can be handled, or the first question comes from another thread.
            MismatchError: The ranks ask at different lines, or for different signals.
        """
        wanted = sorted({signal.Signals(number) for number in signals})
        for number in wanted:
            self._listen(number)
        mask = sum(_bit(number) for number in wanted)
        if not self._agreed & mask:
            self._agreed |= self._shared(", ".join(number.name for number in wanted))
        return bool(self._agreed & mask)

    def _shared(self, names: str) -> int:
        """The signals that came to any rank."""
        if self._agreement.size == 1:
            return self._came
        met = self._agreement.exchange(
            here(f"preempted({names})"), _MASK.size, lambda room: _MASK.pack_into(room, 0, self._came)
        )
        came = 0
        for rank in range(self._agreement.size):
            came |= _MASK.unpack(met.view(rank))[0]
        return came

    def _listen(self, number: signal.Signals) -> None:
        """See to it that the signal is noted, also where the script has put a handler of its own in place since."""
        before = signal.getsignal(number)
        if number in self._handlers and before is self._handlers[number]:
            return
        then = _own_handler(before)

        def note(came: int, frame: FrameType | None) -> None:
            self._came |= _bit(came)
            if then:
                then(came, frame)

        try:
            signal.signal(number, note)
        except ValueError:
            # Replicas of torch_xla run beside the main thread too; their launcher lets them set handlers all the same.
            raise ValueError("preempted() handles signals, so the main thread has to ask it first") from None
        except OSError:
            raise ValueError(f"{number.name} cannot be handled by any program") from None
        self._handlers[number] = note


def _bit(number: int) -> int:
    # They are numbered from 1 to 64.
    return 1 << (number - 1)


def _own_handler(handler: Any) -> Callable[[int, FrameType | None], Any] | None:
    """The script's handler; what Python itself does at a signal would end what is to be saved."""
    return handler if callable(handler) and handler is not signal.default_int_handler else None
