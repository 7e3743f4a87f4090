"""One step that every rank takes, and that has failed on all of them when it has failed on one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from accel_runtime.checkpoint.errors import CheckpointError

__all__ = ["Share", "own", "same", "together"]

_T = TypeVar("_T")

Share = Callable[[Any], list[Any]]
"""Gives every rank's object, in rank order; all ranks call it."""


def together(share: Share, act: Callable[[], _T]) -> list[_T]:
    """Do something on every rank.

    Args:
        share: Exchanges the outcomes.
        act: What this rank does.

    Returns:
        What every rank's `act` returned, in rank order.

    Raises:
        CheckpointError: It failed on some rank; raised on all of them, and says which and why.
    """
    own: Exception | None = None
    result: Any = None
    try:
        result = act()
    except Exception as error:  # noqa: BLE001 - whatever it is, the others wait to be told
        own = error
    outcomes = share((None if own is None else _said(own), result))
    failed = {number: text for number, (text, _) in enumerate(outcomes) if text is not None}
    if not failed:
        return [value for _, value in outcomes]
    if isinstance(own, CheckpointError) and len(failed) == len(outcomes) and len(set(failed.values())) == 1:
        raise own
    raise CheckpointError(_told(failed, len(outcomes))) from own


def own(share: Share, act: Callable[[], _T]) -> _T:
    """This rank's result of what all do, which does not travel.

    Raises:
        CheckpointError: As for `together`.
    """
    results: list[_T] = []
    together(share, lambda: results.append(act()))
    return results[0]


def same(operation: str, given: Sequence[str | None]) -> None:
    """Refuse directories that differ from rank to rank.

    Args:
        operation: What they were given to.
        given: What each rank was given.

    Raises:
        CheckpointError: They differ.
    """
    if len(set(given)) > 1:
        told = ", ".join(f"rank {rank}: {path or 'none'}" for rank, path in enumerate(given))
        raise CheckpointError(
            f"{operation}() was given different directories ({told}); a checkpoint is one for all ranks"
        )


def _said(error: Exception) -> str:
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}"
    return text if isinstance(error, CheckpointError) else f"{type(error).__name__}: {text}"


def _told(failed: dict[int, str], world_size: int) -> str:
    if world_size == 1 or (len(set(failed.values())) == 1 and len(failed) == world_size):
        return next(iter(failed.values()))
    return "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
