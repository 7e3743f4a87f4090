"""A save that not all processes call: the first of those that do writes what it has."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable

from accel_runtime.backends.attendance import Absence
from accel_runtime.backends.base import Backend
from accel_runtime.checkpoint.errors import CheckpointError

__all__ = ["save_without", "write_without"]

_LOG = logging.getLogger("accel_runtime.checkpoint")


def save_without(absence: Absence, backend: Backend, save: Callable[[], str], *, own_data: bool) -> str:
    """Save without the processes that do not call `save_state`, and name once what is missing.

    Args:
        absence: The call, on this process.
        backend: Carries the outcome to the others that call it.
        save: Saves what this process has; returns the checkpoint's directory.
        own_data: Whether there are loaders with data of their own on each process.

    Returns:
        The checkpoint's directory, on each process that calls it.

    Raises:
        CheckpointError: Models are sharded; or it could not be written.
    """
    text = write_without("save_state", absence, backend, save, sharded=backend.divides)
    if absence.leads and absence.missing:
        _LOG.warning(_describe_missing(absence, backend.topology.world_size, own_data=own_data))
    return text


def write_without(
    operation: str, absence: Absence, backend: Backend, write: Callable[[], str], *, sharded: bool
) -> str:
    """Let the first of the processes that make a call write; return what it returns on each of them.

    Args:
        operation: The call.
        absence: It, on this process.
        backend: Carries the outcome to the others that make it.
        write: Writes, and returns text.
        sharded: Whether each process has a part of what is to be written.

    Raises:
        CheckpointError: It is sharded; or it could not be written.
    """
    if sharded:
        raise CheckpointError(_describe_refusal(operation, absence, backend.topology.world_size))
    if not absence.leads:
        saved, text = json.loads(backend.outcome_without(absence))
        if not saved:
            raise CheckpointError(text)
        return str(text)
    saved, text = False, f"{operation}() was interrupted"
    try:
        text = write()
        saved = True
    except Exception as error:
        text = str(error)
        raise
    finally:
        backend.finish_without(absence, json.dumps([saved, text]))
    return text


def _describe_missing(absence: Absence, world_size: int, *, own_data: bool) -> str:
    positions = (
        " The positions of loaders with data of their own are missing too: these start anew."
        if own_data
        else ""
    )
    return (
        f"save_state() at {absence.site} was called by rank {absence.rank} and not by all {world_size} processes "
        f"({_list_missing(absence)}). The checkpoint holds what rank {absence.rank} has. Missing are the random states of "
        f"other processes, which are derived anew when it is loaded, and their gradients where an accumulation cycle is "
        f"open.{positions} Call save_state() on every process, outside of `if accelerator.is_main_process`, to save all."
    )


def _describe_refusal(operation: str, absence: Absence, world_size: int) -> str:
    return (
        f"{operation}() at {absence.site} cannot save sharded models: it was not called by all {world_size} processes, and "
        f"each has a part of every model ({_list_missing(absence) or 'some are missing'}). Call {operation}() on every "
        "process, outside of `if accelerator.is_main_process`."
    )


def _list_missing(absence: Absence) -> str:
    return "; ".join(f"rank {rank} {text}" for rank, text in absence.missing.items())
