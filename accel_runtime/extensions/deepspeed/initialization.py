"""Models of transformers that are sharded while they load (`zero.Init`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from accel_runtime.environment.installation import format_install
from accel_runtime.extensions.deepspeed.library import set_leaf_modules

__all__ = ["ShardedLoading", "mark_leaf_modules", "set_sharded_loading"]


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
