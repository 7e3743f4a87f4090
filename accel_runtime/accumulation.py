"""When gradients synchronise: the count of micro-batches in a window."""

from __future__ import annotations

__all__ = ["Accumulation"]


class Accumulation:
    """Counts the micro-batches of a window.

    Args:
        steps: Micro-batches a window; at least 1.

    Raises:
        ValueError: `steps` is below 1.
    """

    def __init__(self, steps: int) -> None:
        if steps < 1:
            raise ValueError(f"gradient_accumulation_steps must be at least 1; it is {steps}")
        self.steps = steps
        self.synced = True
        """Whether the backward pass in hand completes a window, so that the optimizer steps after it."""
        self._count = 0

    def advance(self, *, last: bool) -> bool:
        """Enter the next micro-batch; the last of an epoch always completes its window.

        Returns:
            Whether it completes a window.
        """
        self._count += 1
        self.synced = last or self._count >= self.steps
        if self.synced:
            self._count = 0
        return self.synced

    def reset(self) -> None:
        """Begin a new window."""
        self._count = 0
