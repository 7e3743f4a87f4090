"""Gathering what ranks computed for samples, and objects of any kind."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch

from accel_runtime import tree
from accel_runtime.backends.base import Backend
from accel_runtime.data.source import Share
from accel_runtime.exchange.agreement import here
from accel_runtime.exchange.copies import each_once
from accel_runtime.exchange.objects import deal_objects, share_objects
from accel_runtime.exchange.structure import Survey, survey
from accel_runtime.exchange.tensors import gather_tensors, known_rank, replaced
from accel_runtime.exchange.validity import Steps, merged, trimmed
from accel_runtime.topology import DataPlace

__all__ = ["broadcast_object_list", "gather_object", "gather_valid", "scatter_object"]


def gather_valid(data: Any, steps: Sequence[Share], backend: Backend, *, as_objects: bool = False) -> Any:
    """What all ranks computed for the samples of some steps: every sample once, in the dataset's order.

    Of ranks that have the same part of every batch, the first one's counts. Those that divide sequences have to give the
    same.

    Args:
        data: As for `gather`: a rank's tensors hold its batches of these steps one after the other, with
            a whole number of rows a sample; scalars are kept from every rank. Where data hold more than
            tensors, a list has one entry a sample, whatever the entries are; columns go into a dict or a tuple,
            or into a list together with tensors. A list of another length is kept whole, from every rank.
        steps: Usually one; several where a script collects over a loop and gathers after it; none is a gather
            of all there is.
        backend: Carries it.
        as_objects: Send tensors as objects too: a list then has one entry a sample, though these are tensors.

    Returns:
        The same structure; `data` itself on one process whose batches have no repeats.

    Raises:
        ValueError: A tensor's first dimension has nothing to do with the batches, so it is not known which
            rows are repeats; or ranks that divide sequences gave different values. Raised on every rank.
        MismatchError: The ranks' data or calls differ. Raised on every rank.
        StallError: A rank does not come.
    """
    if not backend.repeats and backend.data.sequences == 1:
        return data
    known = Steps.of(steps)
    found = survey(data)
    if backend.data.world_size == backend.data.sequences == 1:
        return _of_one(data, known, found, as_objects=as_objects)
    if as_objects or found.stranger is not None or not found.tensors:
        return _gather_objects(data, known, backend, as_objects=as_objects)
    call = here(f"gather_for_metrics{_told(known)}", found.structure, free="first")
    gathered = gather_tensors(call, found, backend)
    kept = []
    for index, joined in enumerate(gathered.tensors):
        rows = [own[index] for own in gathered.rows]
        once, counts = _once(joined, rows, backend.data)
        kept.append(known.kept(once, counts) if found.specs[index].shape else once)
    return replaced(data, kept)


def gather_object(obj: Any, backend: Backend) -> list[Any]:
    """Every rank's items in one list, in rank order.

    Args:
        obj: A list, or anything else that holds items; a tensor's are its rows.
        backend: Carries it.

    Returns:
        The items of all ranks; on one process `obj` itself.

    Raises:
        TypeError: `obj` is a dict or text, of which Accelerate would keep keys and letters, or no container.
        MismatchError: The ranks call different collectives, or an item cannot be pickled. Raised on every rank.
        StallError: A rank does not come.
    """
    if isinstance(obj, (dict, str, bytes)) or not hasattr(obj, "__iter__"):
        raise TypeError(
            f"gather_object joins the lists of all ranks; this is a {type(obj).__name__}. Put it into a list."
        )
    if backend.topology.world_size == 1:
        return obj  # type: ignore[no-any-return]
    return [
        item
        for own in share_objects("gather_object", obj, backend.agreement, compare_lines=True)
        for item in own
    ]


def broadcast_object_list(objects: list[Any], backend: Backend, from_process: int = 0) -> list[Any]:
    """The objects of one rank, written into the lists of all others.

    Args:
        objects: As many on all ranks.
        backend: Carries them.
        from_process: The rank whose objects they are.

    Returns:
        `objects` itself.

    Raises:
        ValueError: There is no such rank.
        MismatchError: The ranks' lists differ in length, or their calls do. Raised on every rank.
        StallError: A rank does not come.
    """
    known_rank(from_process, backend)
    if backend.topology.world_size == 1:
        return objects
    mine = list(objects) if backend.topology.rank == from_process else None
    operation = f"broadcast_object_list of {len(objects)} from rank {from_process}"
    objects[:] = share_objects(operation, mine, backend.agreement, compare_lines=True)[from_process]
    return objects


def scatter_object(items: Sequence[Any] | None, backend: Backend, subject: str) -> Any:
    """Of the first rank's objects, one for every rank, this rank's own; from any line of the script.

    Args:
        items: On the first rank, one for every rank; elsewhere unused.
        backend: Carries them.
        subject: A name for the exchange, equal on all ranks; it takes the place of the line.

    Returns:
        The object; tensors keep their kind of device.

    Raises:
        MismatchError: There is not one object a rank, one cannot be pickled, or the ranks' calls differ.
            Raised on every rank.
        StallError: A rank does not come.
    """
    return deal_objects(f"scatter_object of {subject}", items, backend.agreement)


def _gather_objects(data: Any, steps: Steps, backend: Backend, *, as_objects: bool) -> Any:
    """Data that hold more than tensors: they travel pickled, and are merged place by place."""
    listed = as_objects and isinstance(data, (list, tuple))
    operation = f"gather_for_metrics of {'a list of ' if listed else ''}objects{_told(steps)}"
    detached = tree.map_tensors(torch.Tensor.detach, data)
    everyone = share_objects(operation, detached, backend.agreement, compare_lines=True)
    everyone = each_once(everyone, backend.data)
    joined = steps.entries(everyone) if listed else merged(everyone, steps)
    return tree.send(joined, backend.device)


def _once(joined: torch.Tensor, rows: list[int], place: DataPlace) -> tuple[torch.Tensor, list[int]]:
    """The rows of every part, without those of ranks that have one that was counted, and how many each part has."""
    if place.copies == 1:
        return joined, rows
    pieces = each_once(torch.split(joined, rows), place)
    return torch.cat(pieces), [len(piece) for piece in pieces]


def _of_one(data: Any, steps: Steps, found: Survey, *, as_objects: bool) -> Any:
    """What one process computed, without its repeats; what is no column or list of samples is left as it is."""
    if not steps.sizes:
        return data
    if as_objects and isinstance(data, (list, tuple)):
        return steps.entries([data])
    if found.stranger is not None or not found.tensors:
        return trimmed(data, steps)
    return tree.map_tensors(lambda tensor: trimmed(tensor, steps), data)


def _told(steps: Steps) -> str:
    """The samples as part of what ranks agree on."""
    if not steps.sizes:
        return ""
    if len(steps.sizes) == 1:
        return f" with {steps.valid[0]} valid samples of {steps.sizes[0]}"
    return f" over {len(steps.sizes)} steps, {zlib.crc32(repr(steps).encode()):x}"
