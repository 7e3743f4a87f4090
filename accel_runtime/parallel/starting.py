"""One model on all ranks before it is divided: the first rank's values, where others have different ones."""

from __future__ import annotations

import torch
from torch import nn

from accel_runtime.backends.base import Backend
from accel_runtime.checkpoint.digest import digest

__all__ = ["take_over"]


def take_over(model: nn.Module, backend: Backend) -> None:
    """Give every rank the values that the first rank's model has, as DDP does.

    Ranks would else each put a part of their own model into the common one. Only what differs is sent.

    Args:
        model: Whole, on every rank; tensors on the meta device have no values.
        backend: Carries them.

    Raises:
        RuntimeError: The ranks' models differ in names, shapes or dtypes; or one has values where another has none.
    """
    if backend.topology.world_size == 1:
        return
    tensors = _tensors(model)
    everyone = backend.all_gather_objects(
        {
            name: (_form(tensor), None if tensor.is_meta else digest(tensor))
            for name, tensor in tensors.items()
        },
        f"the tensors of {type(model).__name__}",
    )
    first = everyone[0]
    for rank, own in enumerate(everyone):
        if wrong := _unlike(first, own):
            raise RuntimeError(f"{type(model).__name__} on rank {rank} is not the one on rank 0: {wrong}")
    for name, tensor in tensors.items():
        if any(own[name] != first[name] for own in everyone):
            with torch.no_grad():
                tensor.copy_(backend.broadcast(tensor.detach().contiguous()))


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Each once: tied ones under their first name."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def _form(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _unlike(first: dict[str, tuple[str, int | None]], own: dict[str, tuple[str, int | None]]) -> str:
    for name in [*first, *own]:
        if name not in first or name not in own:
            return f"{name} is on one of them only"
        if first[name][0] != own[name][0]:
            return f"{name} is {own[name][0]}, and on rank 0 {first[name][0]}"
        if (first[name][1] is None) != (own[name][1] is None):
            return (
                f"{name} is on the meta device on one of them only. Make the model on the meta device on all ranks, and call "
                "accelerator.load_model(model, path) after prepare(): each rank reads its own part"
            )
    return ""
