"""The file in which a platform looks for the reason of a failure: a few words, the cause first."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["FILE", "HOST", "SIZE", "fitting", "leave"]

SIZE = 1024
"""Bytes that are read of it, on SageMaker."""
FILE = "failure_file"
"""The key of a plan's `agent` that names it."""
HOST = "host"
"""The key of a plan's `agent` that names this machine, where its own name means nothing."""


def leave(agent: Mapping[str, Any], text: str) -> None:
    """Write the reason, where the plan names a file for it; one that is there already was first.

    Args:
        agent: What the plan tells the agent.
        text: The reason.
    """
    # The run has failed already: a disk that is full is no reason to hide why.
    with contextlib.suppress(OSError):
        if agent.get(FILE) and not Path(agent[FILE]).exists():
            Path(agent[FILE]).write_bytes(_cut(text))


def fitting(head: str, lines: list[str]) -> str:
    """A text with as many of the last lines below its head as there is room for."""
    whole = "\n".join([head, *lines])
    return whole if len(_bytes(whole)) <= SIZE or not lines else fitting(head, lines[1:])


def _bytes(text: str) -> bytes:
    return text.encode(errors="backslashreplace")


def _cut(text: str) -> bytes:
    # No letter is left in half.
    return _bytes(text)[:SIZE].decode(errors="ignore").encode()
