"""The half of the facade that asks whether the run is to end."""

from __future__ import annotations

import signal
from collections.abc import Iterable

from accel_runtime.facade.processes import Processes
from accel_runtime.preemption import PREEMPTION, Preemption

__all__ = ["Preempting"]


class Preempting(Processes):
    """What an `Accelerator` knows of signals."""

    _preemption: Preemption

    def preempted(self, signals: Iterable[signal.Signals | int] = PREEMPTION) -> bool:
        """Whether a signal that asks to end has come to any process; all of them are told at the same call.

        Every process has to call it, as often as the others: `if accelerator.preempted(): ...; break`. It is one
        small exchange; on one process it is none. Once it is True it stays True, so that the loops around see
        it too. The first call handles the signals; until then they do what they do without accel.

        Args:
            signals: Which signals: those that schedulers send before they take a machine away.

        Raises:
            ValueError: A signal that cannot be handled; or the first call is not made by the main thread.
            MismatchError: The processes call it at different lines, or with different signals.
        """
        return self._preemption.asked(signals)
