"""The item `window`: an accumulation window that is open, and the gradients it holds, which differ from rank to rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from accel_runtime.accumulation import Accumulation
from accel_runtime.checkpoint.errors import CheckpointError
from accel_runtime.checkpoint.live import is_sharded
from accel_runtime.gradients import Gradients
from accel_runtime.parallel.boxes import part_of
from accel_runtime.parallel.unreduced import hold, unreduced
from accel_runtime.weights import Group

__all__ = ["captured", "copies_of", "merged", "restored"]

Tree = dict[str, Any]


def captured(accumulation: Accumulation, gradients: Gradients, copies: int = 1) -> Tree:
    """What of a window the next backward passes need.

    Gradients are kept as long as no optimizer has used them. Of used ones it is only kept which there are: an optimizer
    leaves out a parameter without a gradient, and does not leave out one whose gradient is zeros. What sharded models hold
    back until the window ends is kept by itself.

    Args:
        accumulation: Counts the window.
        gradients: Knows the parameters.
        copies: How many ranks have the same part of every batch.

    Returns:
        Numbers, text and tensors. The tensors are the live ones.

    Raises:
        CheckpointError: A gradient cannot be kept exactly.
    """
    names = gradients.names()
    present = {name: p.grad for p, name in names.items() if p.grad is not None}
    fresh = accumulation.fresh
    held = {} if fresh else {names[p]: gradient for p, gradient in unreduced(gradients.models).items()}
    divided = {
        "copies": copies if copies > 1 else None,
        "averaged": [] if fresh else [name for name, gradient in present.items() if is_sharded(gradient)],
        "unreduced": held,
    }
    return {key: value for key, value in divided.items() if value} | {
        "accumulation": accumulation.state_dict(),
        "unit": gradients.weights.unit,
        "used": list(present) if fresh else [],
        "gradients": {} if fresh else {name: _plain(gradient) for name, gradient in present.items()},
        "weights": {} if fresh else dict(_books(gradients)),
    }


def restored(tree: Tree, accumulation: Accumulation, gradients: Gradients) -> None:
    """Put back what `captured` gave, or `merged`; gradients that are held now are gone.

    Raises:
        CheckpointError: It has gradients of parameters that are not here, or of another shape; nothing is changed.
    """
    names = gradients.names()
    _check(tree, names)
    used = set(tree["used"])
    later = {}
    for parameter, name in names.items():
        now, held = _parted(tree, name, divided=is_sharded(parameter))
        if held is not None:
            later[parameter] = held
        if now is None:
            parameter.grad = torch.zeros_like(parameter) if name in used else None
        else:
            parameter.grad = _placed(now, parameter)
    hold(gradients.models, later)
    unit = tree["unit"]
    gradients.weights.unit = _scalar(unit, gradients.device)
    for name, group in _groups(gradients):
        book = tree["weights"].get(name, {})
        group.put(*(_scalar(book.get(key), gradients.device) for key in ("pending", "total")))
    accumulation.load_state_dict(tree["accumulation"])


def _parted(tree: Tree, name: str, *, divided: bool) -> tuple[Any, Any]:
    """A parameter's gradient that the ranks have in common, and the one that each holds back until the window ends.

    A parameter that is not divided has both in one place, as has a rank that averages whole gradients.
    """
    now, held = tree["gradients"].get(name), tree.get("unreduced", {}).get(name)
    if divided and now is not None and name not in tree.get("averaged", ()):
        return None, now if held is None else now + held
    if not divided and held is not None:
        return held if now is None else now + held, None
    return now, held


def copies_of(text: Any) -> int:
    """How many ranks had the same part of every batch where a window was saved; its JSON, or the tree."""
    return int(text.get("copies", 1)) if isinstance(text, dict) else 1


def merged(trees: Sequence[Tree], world_size: int, copies: int = 1) -> Tree:
    """The window of every rank of another world size, so that the step that ends it is the one it would have been.

    The gradients of a step are the mean over the ranks. With the old ranks' mean held on each of the new ones, what
    is held counts for the same sum. With weights, a rank's gradient has its weights times the world size in it, so
    the mean over the old ranks has every weight once, as before; the weights that are not divided by yet are shared
    out, so that all ranks together still have as many.

    Args:
        trees: What `captured` gave on the old ranks, in their order.
        world_size: The new one.
        copies: How many of the new ranks have the same part of every batch.

    Raises:
        CheckpointError: Gradients have weights in them, which ranks with the same batch have counted each for itself, and
            there are as many of such no more.
    """
    held = [tree["gradients"] for tree in trees]
    back = [tree.get("unreduced", {}) for tree in trees]
    books = [tree["weights"] for tree in trees]
    if any(books) and copies_of(trees[0]) != copies:
        raise CheckpointError(
            f"window: it was saved half-way through an accumulation window of backward(weight=...), by ranks of which "
            f"{copies_of(trees[0])} had the same batch, and here {copies} have: load it on such a mesh, or save at the end of a "
            "window"
        )
    return trees[0] | {
        "unreduced": {name: _mean([gradients.get(name) for gradients in back]) for name in _names(back)},
        "used": _names([tree["used"] for tree in trees]),
        "gradients": {name: _mean([gradients.get(name) for gradients in held]) for name in _names(held)},
        "weights": {
            name: _shared([book.get(name, {}) for book in books], world_size) for name in _names(books)
        },
    }


def _names(parts: Sequence[Any]) -> list[str]:
    return list(dict.fromkeys(name for part in parts for name in part))


def _groups(gradients: Gradients) -> Iterator[tuple[str, Group]]:
    """The groups of weighted gradients, by the name of their first parameter."""
    names = gradients.names()
    for group in gradients.find():
        yield names[group.parameters[0]], group


def _books(gradients: Gradients) -> Iterator[tuple[str, dict[str, torch.Tensor | None]]]:
    for name, group in _groups(gradients):
        if group.counted:
            yield name, {"pending": group.pending, "total": group.total}


def _check(tree: Tree, names: dict[nn.Parameter, str]) -> None:
    shapes = {name: list(parameter.shape) for parameter, name in names.items()}
    for name, gradient in (*tree["gradients"].items(), *tree.get("unreduced", {}).items()):
        shape = list(gradient["shape"] if isinstance(gradient, dict) else gradient.shape)
        if name not in shapes:
            raise CheckpointError(
                f"window: the checkpoint was saved half-way through an accumulation window and holds a gradient of "
                f"{name}, which is not among the prepared models and optimizers; prepare what was prepared then"
            )
        if shape != shapes[name]:
            raise CheckpointError(
                f"window: the gradient of {name} has shape {shape}, the parameter {shapes[name]}"
            )


def _plain(gradient: torch.Tensor) -> Any:
    """A gradient as files take it: of a sparse one its parts, not added up, since sums depend on their order."""
    if gradient.layout is not torch.sparse_coo:
        return gradient
    return {
        "indices": gradient._indices(),  # noqa: SLF001 - the public one is for what is added up
        "values": gradient._values(),  # noqa: SLF001
        "shape": list(gradient.shape),
        "coalesced": gradient.is_coalesced(),
    }


def _placed(gradient: Any, parameter: nn.Parameter) -> torch.Tensor:
    if isinstance(gradient, dict):
        return _sparse(gradient).to(parameter.device)
    if is_sharded(parameter) and not is_sharded(gradient):
        return part_of(gradient, parameter, "the gradient")
    # In the parameter's own strides, as autograd makes it.
    return torch.empty_like(parameter, dtype=gradient.dtype, requires_grad=False).copy_(gradient)


def _sparse(parts: dict[str, Any]) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        parts["indices"].clone(),
        parts["values"].clone(),
        tuple(parts["shape"]),
        check_invariants=True,
        is_coalesced=parts["coalesced"],
    )


def _mean(gradients: list[Any]) -> Any:
    """The mean over the ranks; one without a gradient has zeros."""
    if all(one is gradients[0] for one in gradients):
        # The ranks had it in common.
        return gradients[0]
    there = [_sparse(one) if isinstance(one, dict) else one for one in gradients if one is not None]
    dtype = torch.promote_types(there[0].dtype, torch.float32)
    # Divided first, as DDP does: the sum may be larger than the numbers go.
    total = sum(
        (one.to(dtype) / len(gradients) for one in there[1:]), start=there[0].to(dtype) / len(gradients)
    )
    return _plain(total.to(there[0].dtype))


def _shared(books: list[dict[str, torch.Tensor | None]], world_size: int) -> dict[str, torch.Tensor | None]:
    pending = _known(books, "pending")
    share = torch.stack(pending).sum() / world_size if pending else None
    return {"pending": share, "total": next(iter(_known(books, "total")), None)}


def _known(books: list[dict[str, torch.Tensor | None]], key: str) -> list[torch.Tensor]:
    values = (book.get(key) for book in books)
    return [value for value in values if value is not None]


def _scalar(value: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    return None if value is None else value.detach().clone().to(device)
