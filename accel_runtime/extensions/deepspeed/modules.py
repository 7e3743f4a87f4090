"""Methods and hooks of prepared modules under ZeRO: clearing gradients, copying, and graphs of gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from accel_runtime.extensions.deepspeed.library import is_available
from accel_runtime.foundation import nested

__all__ = ["make_copyable", "refuse_graphs", "watch_zero_grad"]


class _ZeroGrad:
    """`zero_grad` of a prepared model, whose gradients are not in `parameter.grad`; copies of the model have torch's.

    Args:
        zero_grad: The method of the module.
        clear: Clears the gradients of a model; None in a copy.
    """

    def __init__(self, zero_grad: Callable[..., None], clear: Callable[[nn.Module], None] | None) -> None:
        self._zero_grad, self._clear = zero_grad, clear

    def __call__(self, set_to_none: bool = True) -> None:
        self._zero_grad(set_to_none)
        if self._clear is not None:
            self._clear(self._zero_grad.__self__)  # type: ignore[attr-defined]

    def __getstate__(self) -> dict[str, Any]:
        return {"_zero_grad": self._zero_grad, "_clear": None}


def watch_zero_grad(model: nn.Module, clear: Callable[[nn.Module], None]) -> None:
    """Let `model.zero_grad()` also call `clear`."""
    if not isinstance(vars(model).get("zero_grad"), _ZeroGrad):
        model.zero_grad = _ZeroGrad(model.zero_grad, clear)  # type: ignore[method-assign]


def make_copyable(model: nn.Module) -> None:
    """Let copies of a model that stage 3 has partitioned be ordinary modules."""
    for module in model.modules():
        vars(module)["__deepcopy__"] = partial(_copy_module, module)


def _copy_module(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    if not all(map(is_available, module.parameters(recurse=False))):
        raise RuntimeError(
            f"Cannot copy {type(module).__name__}: this rank has only shards of its parameters. Copy it inside "
            "`with accelerator.gathered(model):`, on all ranks."
        )
    state = {name: value for name, value in vars(module).items() if not _is_added(name)}
    state["_parameters"] = dict(module._parameters.items())  # noqa: SLF001
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        hooks = state[name]
        state[name] = type(hooks)(
            (key, hook) for key, hook in hooks.items() if not _name_module(hook).startswith("deepspeed.")
        )
    duplicate = object.__new__(type(module))
    memo[id(module)] = duplicate
    vars(duplicate).update(copy.deepcopy(state, memo))
    return duplicate


def refuse_graphs(model: nn.Module) -> None:
    """Raise RuntimeError if a backward pass builds a graph of the gradients of a model that stage 3 has partitioned."""
    model.register_forward_hook(_watch_outputs)


def _watch_outputs(_model: nn.Module, _args: Any, outputs: Any) -> None:
    if torch.is_grad_enabled():
        for leaf in nested.leaves(outputs):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(_refuse_graph)  # type: ignore[no-untyped-call]


def _refuse_graph(_: torch.Tensor) -> None:
    # Gradients are enabled in a backward pass with create_graph=True.
    if torch.is_grad_enabled():
        raise RuntimeError(
            "Cannot build a graph of the gradients of a model with ZeRO stage 3 (create_graph=True): parameters are gathered for one "
            "backward pass and freed afterwards. Use stage 2."
        )


def _is_added(name: str) -> bool:
    return name.startswith("ds_") or name in _ADDED


def _name_module(hook: Any) -> str:
    return getattr(hook, "__module__", None) or ""


_ADDED = frozenset({
    "__deepcopy__", "zero_grad", "pre_bwd_fn", "post_bwd_fn", "applied_pre_backward_ref_cnt", "_external_params",
    "_original_parameters", "_ds_child_entered",
})  # fmt: skip
"""Attributes of modules that deepspeed 0.19.8 adds in stage 3, and those of this file."""
