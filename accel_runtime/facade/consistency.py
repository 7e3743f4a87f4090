"""Compare over the ranks the objects given to `prepare`: ranks that differ in them would train on wrong samples or weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from enum import Enum
from numbers import Number
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from accel_runtime.backends.base import Backend
from accel_runtime.data.loader import LoaderOptions
from accel_runtime.data.script import batch_size_of, sampler_of
from accel_runtime.exchange.agreement import MismatchError
from accel_runtime.exchange.objects import share_objects

__all__ = ["check_consistent", "collect_option_facts"]

_SHOWN = 10
"""The number of differences in a message."""

Facts = dict[str, Any]
"""What must be equal on all ranks, by a name that the message shows."""


def check_consistent(
    objects: Sequence[Any], backend: Backend, options: LoaderOptions, settings: Mapping[str, Any]
) -> None:
    """Compare models, optimizers, schedulers and loaders over the ranks; every rank calls it.

    Args:
        objects: The objects in the order given to `prepare`.
        backend: Exchanges eight bytes an object, and all facts if some differ.
        options: Defines, with a loader's own options, the samples of each rank.
        settings: The settings of the `Accelerator` that change what a step computes, by name.

    Raises:
        MismatchError: Some differ; the message names objects, ranks and values. Raised on every rank.
    """
    facts = [{"class": "Accelerator", **settings}, *(_collect_facts(item, options) for item in objects)]
    digests = [hashlib.blake2b(repr(own).encode(), digest_size=8).digest() for own in facts]
    everyone = share_objects("prepare", digests, backend.agreement)
    if all(other == everyone[0] for other in everyone):
        return
    differences = _list_differences(share_objects("prepare", facts, backend.agreement))
    more = [f"... and {len(differences) - _SHOWN} more"] if len(differences) > _SHOWN else []
    lines = "\n".join(f"  {line}" for line in [*differences[:_SHOWN], *more])
    raise MismatchError(
        f"prepare() failed: the ranks do not prepare the same objects.\n{lines}\n"
        "Create them in the same way on every rank. If each rank has a part of the data of its own, prepare the loader "
        'with prepare_data_loader(loader, data="sharded").'
    )


def collect_option_facts(configurations: Iterable[Any]) -> Facts:
    """Return the fields of configuration objects by class and name; those that cannot be compared are left out."""
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
    if isinstance(item, DataLoader):
        return _loader_facts(item, options)
    if isinstance(item, nn.Module):
        return _model_facts(item)
    if isinstance(item, torch.optim.Optimizer):
        return _optimizer_facts(item)
    return {"class": type(item).__name__}


def _loader_facts(loader: DataLoader[Any], options: LoaderOptions) -> Facts:
    facts: Facts = {
        "class": type(loader).__name__,
        "data": options.data,
        "split_batches": options.split_batches,
        "even_batches": options.even_batches,
        "dispatch_batches": options.dispatch,
        "use_seedable_sampler": options.seeded,
        "data_seed": options.seed,
    }
    if options.data == "sharded":
        return facts
    source = sampler_of(loader)
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


def _model_facts(model: nn.Module) -> Facts:
    facts: Facts = {"class": type(model).__name__}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        facts[f"parameter {name}"] = _describe(parameter) + ("" if parameter.requires_grad else ", frozen")
    for name, buffer in model.named_buffers(remove_duplicate=False):
        facts[f"buffer {name}"] = _describe(buffer)
    return facts


def _optimizer_facts(optimizer: torch.optim.Optimizer) -> Facts:
    facts: Facts = {"class": type(optimizer).__name__, "parameter groups": len(optimizer.param_groups)}
    for index, group in enumerate(optimizer.param_groups):
        facts[f"parameters of group {index}"] = [_describe(parameter) for parameter in group["params"]]
        facts |= {
            f"{key} of group {index}": value
            for key, value in group.items()
            if key != "params" and _is_plain(value)
        }
    return facts


def _is_plain(value: Any) -> bool:
    """Return whether a value can be compared by its text: reading a tensor would wait for the device."""
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (str, Number))


def _describe(tensor: torch.Tensor) -> str:
    if nn.parameter.is_lazy(tensor):
        return "not initialized"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _get_length(sized: Any) -> int | None:
    try:
        return len(sized)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def _list_differences(everyone: Sequence[Sequence[Facts]]) -> list[str]:
    """Return a line for each fact that differs, or one if the ranks do not prepare the same kinds of objects."""
    kinds = [tuple(str(facts["class"]) for facts in objects) for objects in everyone]
    if len(set(kinds)) > 1:
        return [f"objects: {_group_by_value([', '.join(own[1:]) for own in kinds])}"]
    lines = []
    for index, versions in enumerate(zip(*everyone, strict=True)):
        names = dict.fromkeys(name for facts in versions for name in facts)
        for name in names:
            values = [_shorten(facts.get(name, "missing")) for facts in versions]
            if len({repr(facts.get(name, "missing")) for facts in versions}) > 1:
                lines.append(f"{kinds[0][index]}, {name}: {_group_by_value(values)}")
    return lines


def _shorten(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."  # noqa: PLR2004 - three dots are three characters


def _group_by_value(values: Sequence[str]) -> str:
    """Return `2 on rank 0; 3 on ranks 1, 2`."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return "; ".join(
        f"{value} on rank{'s' if len(own) > 1 else ''} {', '.join(map(str, own))}"
        for value, own in ranks.items()
    )
