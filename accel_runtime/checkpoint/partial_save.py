"""Saves by some of the ranks while the others do not make the call."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable

from accel_runtime.backends.base import Backend
from accel_runtime.collectives.stalls import MissingRanks
from accel_runtime.parallel.strategy import Strategy
from accel_runtime.storage.errors import CheckpointError

__all__ = ["save_without_missing_ranks", "write_without_missing_ranks"]

_LOG = logging.getLogger("accel_runtime.checkpoint")


def save_without_missing_ranks(
    absence: MissingRanks, strategy: Strategy, save: Callable[[], str], *, own_data: bool
) -> str:
    """Save the state of the ranks that call `save_state` if others do not; warn about what is missing."""
    backend = strategy.backend
    text = write_without_missing_ranks("save_state", absence, backend, save, sharded=strategy.shards_models)
    if absence.is_leader and absence.missing:
        offsets = (
            " Offsets of loaders with rank-specific data are missing too: these loaders start from the beginning."
            if own_data
            else ""
        )
        _LOG.warning(
            "save_state() at %s was called by rank %s and not by all %s processes (%s). The checkpoint holds what rank %s has. "
            "Missing are the random states of other processes, which are derived again when it is loaded, and their gradients "
            "if an accumulation cycle is open.%s Call save_state() on every process, outside of "
            "`if accelerator.is_main_process`, to save all.",
            absence.site,
            absence.rank,
            backend.topology.world_size,
            _list_missing(absence),
            absence.rank,
            offsets,
        )
    return text


def write_without_missing_ranks(
    operation: str, absence: MissingRanks, backend: Backend, write: Callable[[], str], *, sharded: bool
) -> str:
    """Let the first of the ranks that make a call write; return or raise its outcome on each of them."""
    if sharded:
        raise CheckpointError(
            f"{operation}() at {absence.site} cannot save sharded models: it was not called by all "
            f"{backend.topology.world_size} processes, and each has a shard of every model "
            f"({_list_missing(absence) or 'some are missing'}). Call {operation}() on every process, outside of "
            "`if accelerator.is_main_process`."
        )
    if not absence.is_leader:
        saved, text = json.loads(absence.monitor.read_outcome(absence))
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
        absence.monitor.publish_outcome(absence, json.dumps([saved, text]))
    return text


def _list_missing(absence: MissingRanks) -> str:
    return "; ".join(f"rank {rank} {text}" for rank, text in absence.missing.items())
