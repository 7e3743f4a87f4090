"""NVIDIA's management library, if its package and a driver are installed."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

__all__ = ["load_nvml"]


@lru_cache(maxsize=1)
def load_nvml() -> Any:
    """Return the module `pynvml` after its initialisation; None without it, or without a driver."""
    try:
        import pynvml  # noqa: PLC0415 - not installed everywhere, and not needed without GPUs
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml
