"""Keyword objects a script may hand to `Accelerator(kwargs_handlers=[...])`, under their known names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

__all__ = [
    "AutocastKwargs",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "GradScalerKwargs",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "chosen",
]


@dataclass(frozen=True)
class KwargsHandler:
    """Base of the keyword objects."""

    def to_kwargs(self) -> dict[str, Any]:
        """The arguments that differ from torch's own defaults."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}


@dataclass(frozen=True)
class AutocastKwargs(KwargsHandler):
    """Arguments of `torch.autocast`."""

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass(frozen=True)
class DistributedDataParallelKwargs(KwargsHandler):
    """Arguments of `torch.nn.parallel.DistributedDataParallel`; `bucket_cap_mb` is in MiB."""

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int | None = None
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False


@dataclass(frozen=True)
class GradScalerKwargs(KwargsHandler):
    """Arguments of `torch.amp.GradScaler`, which fp16 uses."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass(frozen=True)
class InitProcessGroupKwargs(KwargsHandler):
    """Arguments of `torch.distributed.init_process_group`; they win over the profile's."""

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None


@dataclass(frozen=True)
class DataLoaderConfiguration:
    """How `prepare` shares out loaders, for `Accelerator(dataloader_config=...)`."""

    split_batches: bool = False
    """Whether a loader's batch size is the global one, to be split among the processes."""
    dispatch_batches: bool | None = None
    """Whether the first process reads for all; None is so for streams only."""
    even_batches: bool = True
    """Whether the last global batch is completed from the start of the epoch, so that shapes are equal."""
    use_seedable_sampler: bool = False
    """Whether the order of an epoch depends on `data_seed` and the epoch's number alone."""
    data_seed: int | None = None
    """The seed of that order; None takes torch's."""
    non_blocking: bool = False
    """Whether copies to the device overlap with the computation; useful with `pin_memory`."""
    use_stateful_dataloader: bool = False
    """Whether loaders have a `state_dict` that says where they are."""


def chosen(handlers: Sequence[object] | None, kind: type[KwargsHandler]) -> dict[str, Any]:
    """The arguments of the one handler of this kind, or none.

    Raises:
        TypeError: Something in the list is not a handler.
        ValueError: Two handlers of the same kind.
    """
    for handler in handlers or []:
        if not isinstance(handler, KwargsHandler):
            known = ", ".join(sorted(k.__name__ for k in KwargsHandler.__subclasses__()))
            raise TypeError(f"kwargs_handlers takes {known}; it holds {handler!r}")
    found = [handler for handler in handlers or [] if isinstance(handler, kind)]
    if len(found) > 1:
        raise ValueError(f"kwargs_handlers holds {len(found)} {kind.__name__}; one is the most there can be")
    return found[0].to_kwargs() if found else {}
