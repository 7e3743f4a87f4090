"""How safetensors files begin, and what the parts of one thing are called. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

__all__ = ["Entry", "file_name", "header"]


class Entry(NamedTuple):
    """A tensor in a file."""

    name: str
    dtype: str
    """As the format calls it."""
    shape: Sequence[int]
    bytes: int


def header(entries: Iterable[Entry], about: Mapping[str, str]) -> bytes:
    """What stands before the tensors, as https://github.com/huggingface/safetensors#format has it.

    Args:
        entries: The tensors, in the order in which they follow.
        about: Texts for whoever reads the file.
    """
    told: dict[str, object] = {"__metadata__": dict(about)}
    start = 0
    for entry in entries:
        end = start + entry.bytes
        told[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(told, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def file_name(stem: str, number: int, count: int, suffix: str = ".safetensors") -> str:
    """The n-th file of so many, from 1: `model.safetensors`, or `model-00001-of-00003.safetensors`."""
    return f"{stem}{suffix}" if count == 1 else f"{stem}-{number:05}-of-{count:05}{suffix}"
