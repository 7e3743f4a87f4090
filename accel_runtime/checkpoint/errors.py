"""What goes wrong with a checkpoint, in words."""

from __future__ import annotations

__all__ = ["CheckpointError", "RequestError"]


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message names the file or the item, and what to do."""


class RequestError(CheckpointError):
    """What was asked for is not there, or would do harm; nothing is damaged, and nothing was changed."""
