"""A trigger: one process sets it, and all of them learn of it where they check."""

from __future__ import annotations

import torch

from accel_runtime.facade.processes import Processes

__all__ = ["Triggers"]


class Triggers(Processes):
    """The trigger of an `Accelerator`."""

    _triggered = False

    def set_trigger(self) -> None:
        """Set the trigger on this process, for all of them to find: a reason to stop, for example."""
        self._triggered = True

    def check_trigger(self) -> bool:
        """Whether any process has set the trigger; then it is unset again, on all of them.

        Every process has to call it, as often as the others.
        """
        mine = torch.tensor([self._triggered], dtype=torch.uint8, device=self.device)
        self._triggered = False
        return bool(self._backend.all_reduce(mine, "max"))
