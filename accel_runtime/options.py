"""Keyword objects a script may hand to `Accelerator(kwargs_handlers=[...])`, under their known names."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from numbers import Integral
from typing import Any

from typing_extensions import override

from accel_runtime.configuration import Configuration

__all__ = [
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "changed_fields",
    "find_handlers",
]


class KwargsHandler:
    """Base of the keyword objects, also of a script's own, which is a plain dataclass."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, copied."""
        return copy.deepcopy(vars(self))

    def to_kwargs(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults."""
        return changed_fields(self)


def changed_fields(handler: object) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from their defaults, and all attributes of another object."""
    usual = {
        name: one.default_factory() if callable(one.default_factory) else one.default
        for name, one in getattr(handler, "__dataclass_fields__", {}).items()
    }
    return {name: value for name, value in vars(handler).items() if name not in usual or value != usual[name]}


@dataclass
class AutocastKwargs(Configuration, KwargsHandler):
    """Arguments of `torch.autocast`, and what a prepared model gives back under it."""

    enabled: bool = True
    cache_enabled: bool | None = None
    fp32_outputs: bool = True
    """Whether half-precision outputs of a model become float32. False saves the copy, which large logits feel."""


class DDPCommunicationHookType(Enum):
    """How DDP sends gradients: as they are, rounded to a half-precision format, or compressed by PowerSGD."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


_HOOK_FIELDS = ("comm_hook", "comm_wrapper", "comm_state_option")


@dataclass
class DistributedDataParallelKwargs(Configuration, KwargsHandler):
    """Arguments of `torch.nn.parallel.DistributedDataParallel`; `bucket_cap_mb` is in MiB.

    Raises:
        ValueError: `check_reduction`, which torch has given up; an unknown hook, or `batched_power_sgd`, which
            fails in torch; a wrapper or options with no hook to go with.
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int | None = None
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType | str = DDPCommunicationHookType.NO
    """How gradients are sent; a value of `DDPCommunicationHookType`, or its text."""
    comm_wrapper: DDPCommunicationHookType | str = DDPCommunicationHookType.NO
    """`fp16` or `bf16`: what the hook gets is rounded to it first."""
    comm_state_option: dict[str, Any] = field(default_factory=dict)
    """Arguments of torch's `PowerSGDState`, such as `matrix_approximation_rank`."""

    @override
    def _check(self) -> None:
        if self.check_reduction:
            raise ValueError("check_reduction does nothing since torch 1.0: DDP always checks; leave it out")
        hook, wrapper = (_hook(self, name) for name in ("comm_hook", "comm_wrapper"))
        kinds = DDPCommunicationHookType
        if hook is kinds.BATCHED_POWER_SGD:
            raise ValueError(
                "torch's batched_powerSGD_hook fails with an AssertionError once it begins to compress, in every "
                "torch from 1.13 to 2.13; use comm_hook='power_sgd'"
            )
        if wrapper not in {kinds.NO, kinds.FP16, kinds.BF16}:
            raise ValueError(f"comm_wrapper must be no, fp16 or bf16; it is {wrapper.value}")
        if wrapper is not kinds.NO and hook is kinds.NO:
            raise ValueError(
                f"comm_wrapper {wrapper.value} has no hook to wrap: set comm_hook={wrapper.value!r}"
            )
        if self.comm_state_option and hook is not kinds.POWER_SGD:
            raise ValueError(f"comm_state_option is for comm_hook power_sgd; comm_hook is {hook.value}")

    @override
    def to_dict(self, ignore_keys: Iterable[str] = _HOOK_FIELDS) -> dict[str, Any]:
        """Return the fields by name, copied, without those of the hook: they are no arguments of DDP."""
        return {name: value for name, value in super().to_dict().items() if name not in ignore_keys}

    @override
    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments of DDP that differ from their defaults."""
        return {name: value for name, value in changed_fields(self).items() if name not in _HOOK_FIELDS}


@dataclass
class GradScalerKwargs(Configuration, KwargsHandler):
    """Arguments of `torch.amp.GradScaler`, which fp16 uses."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass
class InitProcessGroupKwargs(Configuration, KwargsHandler):
    """Arguments of `torch.distributed.init_process_group`; they win over the profile's."""

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None


@dataclass
class DataLoaderConfiguration(Configuration):
    """How `prepare` shares out loaders, for `Accelerator(dataloader_config=...)`."""

    split_batches: bool = False
    """Whether a loader's batch size is the global one, to be split among the processes."""
    dispatch_batches: bool | None = None
    """Whether the first process reads for all; else every process reads, streams too."""
    even_batches: bool = True
    """Whether the end of an epoch is completed from its start, so that shapes are equal; else it is divided
    evenly, and gradients count its samples."""
    use_seedable_sampler: bool = False
    """Whether the order of an epoch depends on `data_seed` and the epoch's number alone."""
    data_seed: int | None = None
    """The seed of that order; None takes what torch was seeded with on the first process."""
    non_blocking: bool = False
    """Whether the script goes on while a batch is copied to the device; copies wait for nothing only with `pin_memory`."""
    use_stateful_dataloader: bool = False
    """Whether `load_state` has loaders continue after the last batch; else at the start of its epoch, for scripts that skip
    batches themselves. Every prepared loader has a `state_dict`."""


@dataclass
class GradientAccumulationPlugin(Configuration, KwargsHandler):
    """How gradients accumulate, for `Accelerator(gradient_accumulation_plugin=...)`.

    Raises:
        ValueError: `num_steps` is below 1, or no whole number.
    """

    num_steps: int = 1
    """Micro-batches whose gradients make one optimizer step; None, Accelerate's default, becomes 1."""
    adjust_scheduler: bool = True
    """Whether calls of a prepared scheduler inside a window count in its `_step_count`, for schedules written
    in micro-batches. The learning rate moves once a window either way."""
    sync_with_dataloader: bool = True
    """Whether the last micro-batch of an epoch completes its window; False lets windows run across epochs."""
    sync_each_batch: bool = False
    """Whether gradients are averaged over the processes after every micro-batch: more traffic, and no copy of
    gradients that wait."""

    @override
    def _check(self) -> None:
        steps: Any = self.num_steps
        if steps is None:
            steps = 1
            object.__setattr__(self, "num_steps", steps)
        if isinstance(steps, bool) or not isinstance(steps, Integral):
            raise ValueError(  # noqa: TRY004 - the kind of all refused values
                f"gradient_accumulation_steps must be a whole number of at least 1; it is {steps!r}"
            )
        if self.num_steps < 1:
            raise ValueError(f"gradient_accumulation_steps must be at least 1; it is {self.num_steps}")


def _hook(kwargs: DistributedDataParallelKwargs, name: str) -> DDPCommunicationHookType:
    """The field as a member of the enumeration, which it becomes."""
    given = getattr(kwargs, name)
    known = [kind.value for kind in DDPCommunicationHookType]
    if not isinstance(given, DDPCommunicationHookType):
        if given not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}; it is {given!r}")
        given = DDPCommunicationHookType(given)
        object.__setattr__(kwargs, name, given)
    return given


def find_handlers(
    handlers: Iterable[object] | None, kinds: Sequence[type[KwargsHandler]]
) -> dict[type[KwargsHandler], Any]:
    """Return the handlers of a list by their kind.

    Args:
        handlers: At most one of each kind.
        kinds: The known ones.

    Raises:
        TypeError: Something in the list is of no known kind, so that nothing would use it.
        ValueError: Two handlers of the same kind.
    """
    given = list(handlers or [])
    for handler in given:
        if not isinstance(handler, tuple(kinds)):
            known = ", ".join(sorted(kind.__name__ for kind in kinds))
            raise TypeError(f"kwargs_handlers takes {known}; it holds {handler!r}")
    found: dict[type[KwargsHandler], Any] = {}
    for kind in kinds:
        same = [handler for handler in given if isinstance(handler, kind)]
        if len(same) > 1:
            raise ValueError(
                f"kwargs_handlers holds {len(same)} {kind.__name__}; one is the most there can be"
            )
        if same:
            found[kind] = same[0]
    return found
