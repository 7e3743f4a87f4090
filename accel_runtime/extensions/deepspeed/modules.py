"""Modules under ZeRO: sharding while they load (`zero.Init`), clearing gradients, copying, and graphs of gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from accel_runtime.environment.installation import format_install
from accel_runtime.extensions.deepspeed.library import is_available, set_leaf_modules
from accel_runtime.foundation import nested

__all__ = [
    "ShardedLoading",
    "make_copyable",
    "mark_leaf_modules",
    "refuse_graphs",
    "set_sharded_loading",
    "watch_zero_grad",
]


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


class ShardedLoading:
    """Configuration that transformers finds by a weak reference: while it lives, `from_pretrained` shards models.

    Args:
        config: deepspeed's configuration.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = dict(config)
        self.is_active = True

    def is_zero3(self) -> bool:
        """Return whether models are sharded while they load."""
        return self.is_active

    def start(self) -> None:
        """Let transformers use this configuration.

        Raises:
            RuntimeError: transformers is not installed.
        """
        _import_transformers().set_hf_deepspeed_config(self)


@contextmanager
def set_sharded_loading(*, enable: bool) -> Iterator[None]:
    """Return a context in which `from_pretrained` shards models, or not; without an Accelerator that does, nothing changes."""
    reference = getattr(_import_transformers(), "_hf_deepspeed_config_weak_ref", None)
    current = reference() if reference is not None else None
    if not isinstance(current, ShardedLoading):
        yield
        return
    before, current.is_active = current.is_active, enable
    try:
        yield
    finally:
        current.is_active = before


def _import_transformers() -> Any:
    try:
        from transformers.integrations import deepspeed  # noqa: PLC0415 - imported where it is chosen
    except ImportError as error:
        raise RuntimeError(
            "deepspeed.zero3_init needs transformers, whose models it shards while they load: it is not installed. Run "
            f"{format_install('transformers')}, or set deepspeed.zero3_init: false."
        ) from error
    return deepspeed


def mark_leaf_modules(model: nn.Module, names: Sequence[str]) -> None:
    """Let stage 3 gather the parameters of modules of some classes together.

    Raises:
        ValueError: The model has no module of such a class.
    """
    classes = {type(module) for module in model.modules() if type(module).__name__ in names}
    if missing := set(names) - {kind.__name__ for kind in classes}:
        raise ValueError(
            f"Invalid DeepSpeedPlugin.transformer_moe_cls_names: {type(model).__name__} has no module of class "
            f"{', '.join(sorted(missing))}. Correct the names."
        )
    set_leaf_modules(model, sorted(classes, key=lambda kind: kind.__name__))
