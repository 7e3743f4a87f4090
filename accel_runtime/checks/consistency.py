"""Compare the objects and settings that the ranks prepare."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from enum import Enum
from numbers import Number
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, IterableDataset

from accel_runtime.backends.base import Backend
from accel_runtime.collectives.handshake import MismatchError, all_gather_objects
from accel_runtime.data.loader import LoaderOptions
from accel_runtime.data.source import batch_size_of, len_or_none, sampler_of_loader
from accel_runtime.environment.text import encode_text

__all__ = ["check_consistent", "collect_option_facts"]


_MAX_DIFFERENCES = 10
"""The maximum number of differences in a message."""
_MAX_TEXT = 60
"""The maximum number of characters of a value in it."""

Facts = dict[str, Any]
"""Values that must be equal on all ranks, by the name in the message."""


def check_consistent(
    objects: Sequence[Any], backend: Backend, options: LoaderOptions, settings: Mapping[str, Any]
) -> None:
    """Raise MismatchError on every rank if models, optimizers, schedulers, loaders or settings differ over the ranks."""
    facts = [{"class": "Accelerator", **settings}, *(_collect_facts(item, options) for item in objects)]
    # Eight bytes per object; all facts are exchanged only if the digests differ.
    digests = [hashlib.blake2b(encode_text(repr(item)), digest_size=8).digest() for item in facts]
    gathered = all_gather_objects("prepare", digests, backend.handshake)
    if all(digest == gathered[0] for digest in gathered):
        return
    differences = _list_differences(all_gather_objects("prepare", facts, backend.handshake))
    more = (
        [f"... and {len(differences) - _MAX_DIFFERENCES} more"] if len(differences) > _MAX_DIFFERENCES else []
    )
    lines = "\n".join(f"  {line}" for line in [*differences[:_MAX_DIFFERENCES], *more])
    raise MismatchError(
        f"prepare() failed: the ranks prepare different objects.\n{lines}\n"
        "Create them in the same way on every rank. If each rank has its own shard of the data, prepare the loader "
        'with prepare_data_loader(loader, data="sharded").'
    )


def collect_option_facts(configurations: Iterable[Any]) -> Facts:
    """Return the comparable fields of configuration objects by class and name."""
    facts: Facts = {}
    for configuration in configurations:
        for field in fields(configuration):
            value = getattr(configuration, field.name)
            if isinstance(value, Mapping):
                value = tuple(item for item in sorted(value.items()) if _is_plain(item))
            if _is_plain(value) or isinstance(value, Enum):
                facts[f"{type(configuration).__name__}.{field.name}"] = value
    return facts


def _collect_facts(item: Any, options: LoaderOptions) -> Facts:
    facts: Facts = {"class": type(item).__name__}
    if isinstance(item, DataLoader):
        return facts | _loader_facts(item, options)
    if isinstance(item, nn.Module):
        for name, parameter in item.named_parameters(remove_duplicate=False):
            facts[f"parameter {name}"] = _describe(parameter) + (
                "" if parameter.requires_grad else ", frozen"
            )
        for name, buffer in item.named_buffers(remove_duplicate=False):
            facts[f"buffer {name}"] = _describe(buffer)
    elif isinstance(item, torch.optim.Optimizer):
        facts["parameter groups"] = len(item.param_groups)
        for index, group in enumerate(item.param_groups):
            facts[f"parameters of group {index}"] = [_describe(parameter) for parameter in group["params"]]
            facts |= {
                f"{key} of group {index}": value
                for key, value in group.items()
                if key != "params" and _is_plain(value)
            }
    return facts


def _loader_facts(loader: DataLoader[Any], options: LoaderOptions) -> Facts:
    facts: Facts = {
        "data": "sharded" if options.presharded else "global",
        "split_batches": options.split_batches,
        "even_batches": options.even_batches,
        "dispatch_batches": options.dispatch,
        "use_seedable_sampler": options.seeded,
        "data_seed": options.seed,
        **({} if options.budget is None else options.budget._asdict()),
    }
    if options.presharded:
        return facts
    source = sampler_of_loader(loader)
    sampler = getattr(source, "sampler", loader.sampler)
    facts |= {
        "dataset": type(loader.dataset).__name__,
        "dataset length": _get_length(loader.dataset),
        "batch_size": batch_size_of(loader),
        "drop_last": bool(getattr(source, "drop_last", loader.drop_last)),
    }
    if not isinstance(loader.dataset, IterableDataset):
        facts |= {
            "batch sampler": type(source).__name__,
            "sampler": type(sampler).__name__,
            "sampler length": _get_length(sampler),
            "number of batches": _get_length(source),
            "replacement": getattr(sampler, "replacement", None),
        }
    return facts


def _get_length(sized: Any) -> int | None:
    with suppress(AttributeError):  # not every batch sampler or dataset wrapper is complete
        return len_or_none(sized)
    return None


def _is_plain(value: Any) -> bool:
    """Return whether a value can be compared by its text; reading a tensor would wait for the device."""
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (str, Number))


def _describe(tensor: torch.Tensor) -> str:
    if is_lazy(tensor):
        return "not initialized"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _list_differences(facts_by_rank: Sequence[Sequence[Facts]]) -> list[str]:
    """Return a line for each different fact, or one line if the classes of the objects differ."""
    kinds = [tuple(str(facts["class"]) for facts in objects) for objects in facts_by_rank]
    if len(set(kinds)) > 1:
        return [f"objects: {_group_by_value([', '.join(classes[1:]) for classes in kinds])}"]
    lines = []
    for index, versions in enumerate(zip(*facts_by_rank, strict=True)):
        names = dict.fromkeys(name for facts in versions for name in facts)
        for name in names:
            values = [facts.get(name, "missing") for facts in versions]
            if len(set(map(repr, values))) > 1:
                shortened = [
                    text if len(text := str(value)) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."
                    for value in values
                ]
                lines.append(f"{kinds[0][index]}, {name}: {_group_by_value(shortened)}")
    return lines


def _group_by_value(values: Sequence[str]) -> str:
    """Return `2 on rank 0; 3 on ranks 1, 2`."""
    ranks_by_value: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks_by_value.setdefault(value, []).append(rank)
    return "; ".join(
        f"{value} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        for value, ranks in ranks_by_value.items()
    )
