"""Tied weights: one tensor under several names, which a file holds once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

__all__ = ["aliases", "completed"]


def aliases(state: Mapping[str, torch.Tensor], left_out: Iterable[str] = ()) -> dict[str, str]:
    """The names to leave out, and for each the name under which the same tensor is kept.

    Only what is the very same tensor counts, shape, strides and all: a part or a transposed view has a value of its
    own in a file.

    Args:
        state: Tensors by name.
        left_out: Names that are left out rather than others. Without, the first in alphabetical order is kept, as in
            safetensors.
    """
    unwanted = set(left_out)
    kept: dict[tuple[object, ...], str] = {}
    found: dict[str, str] = {}
    # A header says of every name that is left out where it is, and `format` has another meaning there.
    for name in sorted(state, key=lambda name: (name != "format", name in unwanted, name)):
        tensor = state[name]
        if tensor.numel() and not tensor.is_meta and (first := kept.setdefault(_place(tensor), name)) != name:
            found[name] = first
    return found


def completed(
    tensors: Mapping[str, torch.Tensor],
    live: Mapping[str, torch.Tensor],
    told: Mapping[str, str] | None = None,
) -> dict[str, torch.Tensor]:
    """What a file holds, also under the names of tied weights that it leaves out.

    Args:
        tensors: What the file holds.
        live: The state that the file is for: its ties say what a missing name is.
        told: Ties that the file itself tells, for a model that has none.
    """
    place = {_place(tensor): name for name, tensor in live.items() if name in tensors and tensor.numel()}
    whole = dict(tensors)
    for name in live.keys() - tensors.keys():
        source = place.get(_place(live[name])) or (told or {}).get(name)
        if source is not None and source in tensors:
            whole[name] = tensors[source]
    return whole


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    if hasattr(tensor, "device_mesh"):
        # A rank may have an empty part, which is nowhere; and all must find the same.
        return (id(tensor),)
    memory = tensor.untyped_storage().data_ptr(), tensor.data_ptr()
    return tensor.device, memory, tensor.dtype, tuple(tensor.shape), tensor.stride()
