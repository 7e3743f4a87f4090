"""Check at the end of a script if its losses were finite."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from dataclasses import dataclass

import torch

from accel_runtime.observe.heartbeat import heartbeat
from accel_runtime.training.accumulation import Accumulation

__all__ = ["LossCheck"]

_LOG = logging.getLogger("accel_runtime.checks.losses")
_INTERVAL = 128
"""Backward passes between two samples, after the first ones."""
_DEVICES = frozenset({"cpu", "cuda", "xpu"})
"""Types of devices on which a sample costs one small operation; torch_xla would compile another program."""
_WAIT_S = 2.0
"""The longest time to wait at exit for the operations of the device."""


@dataclass(frozen=True)
class _Sample:
    number: int
    """Number of the backward pass, from 1."""
    is_finite: torch.Tensor
    """`[]` or `[1]`, on the device."""
    weight: float | torch.Tensor | None


class LossCheck:
    """Sample the losses of one process, and warn at exit if the last ones were NaN or infinite.

    A sample is compared on the device and read at exit, so that no step waits. Passes 1, 2, 4, ... are sampled, and later
    every 128th: a loss that is NaN stays so, since it makes the parameters NaN.

    It goes on to the end: most losses that become NaN do so after many steps.

    Args:
        accumulation: Counts backward passes.
        is_active: Sample the losses of this process: one is enough, since the gradients are averaged.
    """

    def __init__(self, accumulation: Accumulation, *, is_active: bool = True) -> None:
        self._accumulation = accumulation
        self.next_pass = 1 if is_active else sys.maxsize
        """The number of the next backward pass to sample."""
        self._samples: list[_Sample] = []
        self._pid = os.getpid()

    def sample(self, loss: torch.Tensor | None, weight: float | torch.Tensor | None) -> None:
        """Sample the loss of the newest backward pass."""
        number = self._accumulation.num_backward
        self.next_pass = number + min(number, _INTERVAL)
        if (
            type(loss) is not torch.Tensor
            or loss.device.type not in _DEVICES
            or torch.compiler.is_compiling()
        ):
            return
        if not self._samples:
            atexit.register(self._warn_at_exit)
        elif number > _INTERVAL:
            # The first ones show since when; of the others, the newest is enough.
            self._samples = [each for each in self._samples if each.number <= _INTERVAL]
        self._samples.append(_Sample(number, torch.isfinite(loss.detach()).all(), weight))

    def describe(self) -> str | None:
        """Return a sentence about losses that were not finite at the end; None if they were, or none is known."""
        # Tokens of padding have no weight, and their mean is NaN.
        samples = [each for each in self._samples if each.weight is None or float(each.weight) > 0]
        finite = [each.number for each in samples if bool(each.is_finite)]
        if not samples or (finite and finite[-1] == samples[-1].number):
            return None
        if not finite:
            since = f"in all sampled backward passes, 1 to {samples[-1].number}"
            cure = "Check the inputs and the loss function: torch.autograd.set_detect_anomaly(True) names the operation"
        else:
            first = next(each.number for each in samples if each.number > finite[-1])
            since = f"at the end; the first such loss was in backward pass {finite[-1] + 1} to {first} of {self._accumulation.num_backward}"
            cure = "Lower the learning rate, clip gradients with accelerator.clip_grad_norm_(), or use bf16 in place of fp16"
        return f"The loss was NaN or infinite {since}. {cure}."

    def _warn_at_exit(self) -> None:
        progress = heartbeat()
        has_failed = hasattr(sys, "last_value") if progress is None else progress.has_failed
        if has_failed or os.getpid() != self._pid:
            return
        if _is_device_idle(self._samples[-1].is_finite.device) and (text := self.describe()):
            _LOG.warning("%s", text)


def _is_device_idle(device: torch.device) -> bool:
    """Wait for the operations of a device; return False if they do not end, as a collective that lost a rank."""
    if device.type == "cpu":
        return True
    stream = torch.accelerator.current_stream(device)
    deadline = time.monotonic() + _WAIT_S
    while not stream.query():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
