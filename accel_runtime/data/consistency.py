"""Fingerprints of samples, and checks that ranks which must read the same samples do."""

from __future__ import annotations

import zlib
from typing import Any

import torch

from accel_runtime import nested
from accel_runtime.backends.base import Backend
from accel_runtime.checkpoint.rng_state import capture_rng_state, restore_rng_state
from accel_runtime.rng import fingerprint_states
from accel_runtime.topology import DataRank

__all__ = [
    "ModelParallelRanksDifferError",
    "ReadFingerprints",
    "check_model_parallel_ranks",
    "combine_fingerprints",
    "fingerprint_samples",
    "reduce_to_data_ranks",
]

_MAX_CHARS = 48
_NUM_ELEMENTS = 5


def fingerprint_samples(samples: list[Any], fingerprint: int) -> int:
    """Return the fingerprint of a stream after one more batch.

    Only a few elements of the first and the last sample are read, so that the cost does not grow with the batch. Another
    order, or a sample more or less, still changes it: all samples that follow are shifted.
    """
    text = f"{len(samples)} {_describe_sample(samples[0], 2)} {_describe_sample(samples[-1], 2)}"
    return zlib.crc32(text.encode(errors="replace"), fingerprint)


def combine_fingerprints(first: int, second: int) -> int:
    """Return one fingerprint of two, in this order."""
    return zlib.crc32(second.to_bytes(4, "little"), first)


def _describe_sample(sample: Any, depth: int) -> str:
    return "|".join(_describe_leaf(leaf, depth) for leaf in nested.leaves(sample))


def _describe_leaf(leaf: Any, depth: int) -> str:
    if isinstance(leaf, (str, bytes)):
        return f"{len(leaf)}{leaf[:_MAX_CHARS]!r}"
    if leaf is None or isinstance(leaf, (int, float, complex)):
        return repr(leaf)
    if isinstance(leaf, torch.Tensor) or hasattr(leaf, "__array__"):
        return _describe_array(leaf)
    attributes = getattr(leaf, "__dict__", None) or {}
    if depth and isinstance(attributes, dict):
        return type(leaf).__name__ + _describe_sample(list(attributes.values()), depth - 1)
    return type(leaf).__name__


def _describe_array(array: Any) -> str:
    """Return the shape and some elements of a tensor or array; only the shape if elements cannot be indexed."""
    try:
        flat = array.reshape(-1)
        elements = flat[:: max(1, len(flat) // _NUM_ELEMENTS)].tolist()
    except (AttributeError, TypeError, RuntimeError, NotImplementedError):
        elements = []
    return f"{getattr(array, 'shape', '')}{elements[: _NUM_ELEMENTS + 1]}"


class ModelParallelRanksDifferError(RuntimeError):
    """Different samples on model-parallel ranks, which must read the same. Raised on every rank."""


def reduce_to_data_ranks(gathered: list[Any], data_rank: DataRank) -> list[Any]:
    """Return one value per data rank; raise ModelParallelRanksDifferError if its model-parallel ranks differ."""
    if not _are_consistent(gathered, data_rank.model_parallel_size):
        raise ModelParallelRanksDifferError(
            f"Model-parallel ranks ({data_rank.model_parallel_size} for each part of the batch) have read different samples (by rank: "
            f'{gathered}). With data="sharded", split the data into {data_rank.world_size} parts, by '
            "accelerator.data_parallel_rank of accelerator.data_parallel_size, not by process. If each process shuffles on "
            "its own, seed it by that rank."
        )
    return gathered[:: data_rank.model_parallel_size]


def check_model_parallel_ranks(backend: Backend) -> None:
    """Set the random states of model-parallel ranks to those of the first of them, if they differ. Collective."""
    data_rank = backend.data
    if data_rank.model_parallel_size == 1:
        return
    module = None if backend.device.type == "cpu" else backend.device_rng
    states = capture_rng_state(backend.device, module)
    fingerprint = torch.tensor(fingerprint_states(states), device=backend.device)
    if _are_consistent(backend.all_gather(fingerprint).tolist(), data_rank.model_parallel_size):
        return
    first = data_rank.rank * data_rank.model_parallel_size
    is_first = backend.topology.rank == first
    gathered = backend.all_gather_objects(states if is_first else None, "random states")
    if not is_first:
        restore_rng_state(gathered[first], backend.device, module)


class ReadFingerprints:
    """Fingerprints of the batches that model-parallel ranks read, compared after batches 1, 2, 4, 8, ... and the last."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._fingerprint = self._num_batches = 0

    def add(self, batch: Any, *, is_last: bool) -> None:
        """Add a batch (collective); raise ModelParallelRanksDifferError if model-parallel ranks have read others."""
        if self._backend.data.model_parallel_size == 1:
            return
        self._fingerprint = 0 if batch is None else fingerprint_samples([batch], self._fingerprint)
        self._num_batches += 1
        if is_last or self._num_batches & (self._num_batches - 1) == 0:
            fingerprint = torch.tensor(self._fingerprint, device=self._backend.device)
            reduce_to_data_ranks(self._backend.all_gather(fingerprint).tolist(), self._backend.data)


def _are_consistent(gathered: list[Any], model_parallel_size: int) -> bool:
    return all(value == gathered[rank - rank % model_parallel_size] for rank, value in enumerate(gathered))
