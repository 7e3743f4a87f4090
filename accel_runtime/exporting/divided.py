"""An export of a sharded model: put together tensor by tensor, written file by file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
from torch import nn

from accel_runtime.backends.base import Backend
from accel_runtime.checkpoint.together import own
from accel_runtime.exchange.objects import share_objects
from accel_runtime.exporting.export import Export, Writing
from accel_runtime.exporting.writers import writes, written
from accel_runtime.parallel.gathering import whole

__all__ = ["export_divided"]

_CALL = "save_model"


def export_divided(  # noqa: PLR0913 - the facts of one call
    model: nn.Module,
    folder: Path,
    limit: int,
    backend: Backend,
    *,
    tied: Iterable[str] = (),
    each_machine: bool,
) -> None:
    """Write a sharded model's weights; every rank calls it.

    Whoever writes has the tensors of one file in memory, the others one tensor.

    Args:
        model: The script's own module.
        folder: Where.
        limit: Bytes of tensors in a file, at most; a tensor that is larger has a file of its own.
        backend: Carries what is put together.
        tied: Names of tied weights that are left out rather than others.
        each_machine: Whether the first rank of each machine writes, and not only the first of all.

    Raises:
        CheckpointError: On every rank: it could not be written, or holds what the format cannot.
    """
    share = partial(share_objects, _CALL, agreement=backend.agreement)
    plan = own(share, lambda: Export.planned(model.state_dict(keep_vars=True), limit, tied))
    writing = Writing(plan, folder, writer=backend.topology.rank)
    mine = writes(backend.topology, each_machine=each_machine)

    def step(act: Callable[[], None]) -> None:
        written(_CALL, act, backend, each_machine=each_machine)

    try:
        step(writing.begin)
        for name, tensors in plan.shards.items():
            held: dict[str, torch.Tensor] = {}
            for key, tensor in tensors.items():
                found = whole(tensor)
                if mine:
                    held[key] = found.cpu()
                del found
            step(partial(writing.file, name, held))
            # Before the next file's are there.
            held.clear()
        step(writing.commit)
    finally:
        if mine:
            writing.forget()
