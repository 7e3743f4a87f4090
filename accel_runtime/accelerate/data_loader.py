"""Prepared loaders under the names that scripts import from Accelerate."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader

from accel_runtime.backends import current_backend, find_accelerator
from accel_runtime.backends.base import Backend
from accel_runtime.data.loader import PreparedLoader, skip_first_batches
from accel_runtime.data.prepare import loader_options, prepare_loader
from accel_runtime.foundation.options import DataLoaderConfiguration, parse_rng_types

__all__ = ["DataLoaderDispatcher", "DataLoaderShard", "prepare_data_loader", "skip_first_batches"]

_T = TypeVar("_T")

DataLoaderShard = PreparedLoader
"""Name in Accelerate, which scripts import for `isinstance`."""
DataLoaderDispatcher = PreparedLoader
"""Name in Accelerate; dispatching is an option of a prepared loader here."""


def prepare_data_loader(  # noqa: PLR0913, PLR0917 - the signature scripts know
    dataloader: DataLoader[_T],
    device: torch.device | str | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Iterable[str] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
) -> PreparedLoader[_T]:
    """Make a loader yield this process's slice of every global batch, as `Accelerator.prepare_data_loader` does.

    Args:
        dataloader: The script's loader.
        device: The device of this process, or None.
        num_processes: The number of processes, or None.
        process_index: The rank of this process, or None.
        split_batches: As in `DataLoaderConfiguration`, like all options that are not described here.
        put_on_device: If true, move batches to the device.
        rng_types: As in `Accelerator`.
        dispatch_batches: If true, the first process reads for all.
        even_batches: If true, pad the last global batch.
        slice_fn_for_dispatch: None only: dispatched batches are made for each rank and never sliced.
        use_seedable_sampler: If true, draw the order from a seed.
        data_seed: The seed.
        non_blocking: If true, copy to the device asynchronously.
        use_stateful_dataloader: No effect: every prepared loader has a state.
        torch_device_mesh: The mesh of the Accelerator, or None.

    Raises:
        RuntimeError: There is no Accelerator, so metrics would contain padding.
        ValueError: A device, a number of processes or an index that are not those of this process; an unknown
            generator; or the loader cannot be sharded exactly.
    """
    backend, accelerator = current_backend(), find_accelerator()
    if accelerator is None or accelerator._run.backend is not backend:  # noqa: SLF001 - of an earlier connection
        raise RuntimeError(
            "prepare_data_loader() needs an Accelerator, which knows the samples of each batch. Make the Accelerator first."
        )
    if isinstance(dataloader, PreparedLoader):
        return dataloader
    _check_process(backend, device, num_processes, process_index)
    if slice_fn_for_dispatch is not None:
        raise ValueError(
            "prepare_data_loader() cannot use slice_fn_for_dispatch: dispatched batches are made for each rank, and never "
            "cut. Leave it out."
        )
    if torch_device_mesh is not None and accelerator.torch_device_mesh is None:
        raise ValueError(
            "prepare_data_loader() cannot use torch_device_mesh: no model is sharded here. Leave it out, or give the "
            "Accelerator a ParallelismConfig."
        )
    config = DataLoaderConfiguration(
        split_batches=split_batches,
        dispatch_batches=dispatch_batches,
        even_batches=even_batches,
        use_seedable_sampler=use_seedable_sampler,
        data_seed=data_seed,
        non_blocking=non_blocking,
        use_stateful_dataloader=use_stateful_dataloader,
    )
    return prepare_loader(
        dataloader,
        backend,
        accelerator._run.loops,  # noqa: SLF001 - the other half of one object
        loader_options(config, put_on_device, parse_rng_types(rng_types)),
    )


def _check_process(
    backend: Backend, device: torch.device | str | None, count: int | None, index: int | None
) -> None:
    """Raise ValueError if a script asks for the batches of another process or device."""
    data_rank, ranks = backend.data_rank, backend.topology
    target = backend.device if device is None else torch.device(device)
    wrong = {
        f"device={str(device)!r} is not {str(backend.device)!r}": (
            target.type != backend.device.type or target.index not in {None, backend.device.index}
        ),
        f"num_processes={count} is not {ranks.world_size}": count
        not in {None, ranks.world_size, data_rank.world_size},
        f"process_index={index} is not {ranks.rank}": index not in {None, ranks.rank, data_rank.rank},
    }
    for problem, applies in wrong.items():
        if applies:
            raise ValueError(
                f"prepare_data_loader() prepares loaders for this process only: {problem}. Leave the argument out."
            )
