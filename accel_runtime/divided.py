"""Whether tensors are divided over processes; asking costs nothing where none can be."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch

__all__ = ["any_divided"]


def any_divided(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether one of them is a DTensor."""
    # Loading torch.distributed.tensor takes seconds, and there is none before it is loaded.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(tensor, module.DTensor) for tensor in tensors)
