"""The random states a stream is read under, where they are not to mix with those of the script."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from accel_runtime import rng

__all__ = ["Apart"]

_Live = tuple[tuple[Any, ...], torch.Tensor, Any]
"""What the generators of Python, torch and NumPy give out themselves: quick, but it cannot be saved."""


class Apart:
    """Random states that are in force inside `with`, and go on from where the last `with` left them.

    Args:
        states: What `rng.capture` gave; by default those in force.
    """

    def __init__(self, states: dict[str, Any] | None = None) -> None:
        own = _live()
        if states is not None:
            rng.restore(states)
        self._states = _live()
        _set(own)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Put these states in force, and the others back at the end."""
        own = _live()
        _set(self._states)
        try:
            yield
        finally:
            self._states = _live()
            _set(own)

    def take_over(self) -> None:
        """Put these states in force, for good."""
        _set(self._states)


def _live() -> _Live:
    numpy = sys.modules.get("numpy")
    return random.getstate(), torch.get_rng_state(), None if numpy is None else numpy.random.get_state()


def _set(live: _Live) -> None:
    python, torch_, numpy = live
    random.setstate(python)
    torch.set_rng_state(torch_)
    if numpy is not None:
        sys.modules["numpy"].random.set_state(numpy)
