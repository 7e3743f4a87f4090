"""The random numbers of a device whose whole state is a seed."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["Seed"]


class Seed:
    """A device's random numbers, as torch's modules of devices have them: the state is a seed, which draws change.

    Args:
        get: Gives the seed.
        put: Changes it.
    """

    def __init__(self, get: Callable[[], int], put: Callable[[int], None]) -> None:
        self._get = get
        self.manual_seed = put
        """Begin with this number."""

    def get_rng_state(self, _device: torch.device) -> torch.Tensor:
        """Eight bytes."""
        return torch.frombuffer(bytearray(self._get().to_bytes(8, "little")), dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, _device: torch.device) -> None:
        """Go on from eight bytes."""
        self.manual_seed(int.from_bytes(bytes(state.tolist()), "little"))
