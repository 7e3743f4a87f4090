"""Objects that `prepare` returns as they are although they look like one of those that it prepares."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

__all__ = ["explain_unprepared"]


def explain_unprepared(item: Any) -> str | None:
    """Return why an object of another type is not prepared, and what to do, if it looks as if it should be."""
    if isinstance(item, torch.amp.GradScaler):
        return "accel scales losses itself. Remove it, and pass Accelerator(mixed_precision='fp16')."
    if callable(getattr(item, "step", None)):
        if hasattr(item, "param_groups"):
            return (
                "it is not a torch.optim.Optimizer, so it steps in every micro-batch and without the loss scaler. Derive its "
                "class from torch.optim.Optimizer."
            )
        if any(hasattr(item, name) for name in ("get_last_lr", "get_lr", "_get_lr", "step_update")):
            return (
                "it is not a torch.optim.lr_scheduler.LRScheduler, so it advances whenever the script steps it. Step it only if "
                "accelerator.sync_gradients is True, or derive its class from LRScheduler."
            )
    if not _is_data(item):
        return None
    cure = "Put it into a torch.utils.data.IterableDataset, and pass DataLoader(dataset, batch_size=None)."
    if isinstance(item, IterableDataset):
        cure = (
            "Pass DataLoader(dataset, batch_size=...), with batch_size=None if it yields batches. If each process reads its own "
            'part, as with webdataset.split_by_node, pass that to prepare_data_loader(loader, data="sharded").'
        )
    elif callable(getattr(item, "__getitem__", None)) and callable(getattr(item, "__len__", None)):
        cure = "Pass DataLoader(dataset, batch_size=...)."
    return f"it is not a torch.utils.data.DataLoader, so each process reads it by itself and nothing is moved to the device. {cure}"


def _is_data(item: Any) -> bool:
    """Return whether an object that is not a container or tensor is a dataset or is used like a loader."""
    if isinstance(item, (Dataset, Iterator)):
        return True
    is_iterable = callable(getattr(item, "__iter__", None)) and not isinstance(item, (torch.Tensor, type))
    names = ("batch_size", "dataset", "batch_sampler")
    return is_iterable and (
        any(hasattr(item, name) for name in names)
        or type(item).__module__.partition(".")[0] in {"datasets", "torchdata"}
    )
