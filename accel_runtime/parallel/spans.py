"""Which places of a sequence a rank has, where several divide it."""

from __future__ import annotations

import torch

__all__ = ["own_part", "sequence_dim", "spans", "whole_of"]


def spans(length: int, parts: int, part: int) -> list[tuple[int, int]]:
    """The places a part has, as pairs of begin and end, in order.

    A part has a piece of the front and its mirror image at the end, so that causal attention is as much work for all. A
    length that only the number of parts divides, and not twice that, is cut in a row.

    Raises:
        ValueError: The parts would differ in length.
    """
    if length % parts:
        near = f"{length - length % parts} or {length + parts - length % parts}"
        raise ValueError(
            f"a sequence of {length} cannot be divided equally among {parts} ranks (cp: {parts}): pad or cut it to {near}"
        )
    if parts == 1:
        return [(0, length)]
    if length % (2 * parts):
        size = length // parts
        return [(part * size, (part + 1) * size)]
    size = length // (2 * parts)
    mirror = 2 * parts - 1 - part
    return [(part * size, (part + 1) * size), (mirror * size, (mirror + 1) * size)]


def sequence_dim(tensor: torch.Tensor, dim: int) -> int:
    """The dimension counted from the front.

    Raises:
        ValueError: There is none.
    """
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(
            f"dimension {dim} was said to be the sequence, and a tensor of shape {list(tensor.shape)} has no such dimension"
        )
    return dim % tensor.dim()


def own_part(tensor: torch.Tensor, dim: int, parts: int, part: int) -> torch.Tensor:
    """A part of a whole sequence, as new memory."""
    own = spans(tensor.shape[dim], parts, part)
    return torch.cat([tensor.narrow(dim, begin, end - begin) for begin, end in own], dim)


def whole_of(everyone: list[torch.Tensor], dim: int) -> torch.Tensor:
    """The whole sequence out of all parts."""
    parts, length = len(everyone), everyone[0].shape[dim] * len(everyone)
    pieces: list[tuple[int, torch.Tensor]] = []
    for part, tensor in enumerate(everyone):
        own = spans(length, parts, part)
        cut = torch.split(tensor, [end - begin for begin, end in own], dim)
        pieces += [(begin, piece) for (begin, _), piece in zip(own, cut, strict=True)]
    return torch.cat([piece for _, piece in sorted(pieces, key=lambda pair: pair[0])], dim)
