"""Samples and tokens in batches, which the throughput of a training is measured by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

__all__ = ["TOKENS_KEY", "TokenCounter", "build_token_counter", "count_elements", "count_samples"]

TOKENS_KEY = "input_ids"
"""Name of the token ids in the batches of language models, by which tokens are counted."""
_MAX_DEPTH = 4
"""Levels of a batch that are searched for a tensor."""

TokenCounter = Callable[[Any], int]
"""Function that returns the number of tokens in a batch of this rank."""


def build_token_counter(throughput: str | Callable[[Any], int] | Literal[True] | None) -> TokenCounter:
    """Return the function that counts the tokens of batches for `Accelerator(throughput=...)`.

    Raises:
        TypeError: The argument is neither a key, a function, True nor None.
    """
    if throughput is None or throughput is True:
        return count_elements
    if isinstance(throughput, str):
        return partial(count_elements, key=throughput)
    if not callable(throughput):
        raise TypeError(
            f"Invalid throughput {throughput!r}: expected True, the key of a tensor in a batch, or a function that returns the "
            "number of tokens of a batch."
        )
    return throughput


def count_elements(batch: Any, key: str = TOKENS_KEY) -> int:
    """Return the number of elements of a tensor in a batch, by its key; 0 without it."""
    kind = type(batch)
    # The check of an abstract class takes longer than all else here.
    if kind is list or kind is tuple or not (kind is dict or isinstance(batch, Mapping)):
        return 0
    count = getattr(batch.get(key), "numel", None)
    return int(count()) if callable(count) else 0


def count_samples(batch: Any) -> int:
    """Return the length of the first tensor in a batch; 0 without one."""
    return _find_length(batch, _MAX_DEPTH) or 0


def _find_length(batch: Any, depth: int) -> int | None:
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else None
    values = list(batch.values()) if isinstance(batch, Mapping) else batch
    if depth == 0 or not isinstance(values, (list, tuple)):
        return None
    for value in values:
        length = _find_length(value, depth - 1)
        if length is not None:
            return length
    return None
