"""Optimizers and schedulers that DeepSpeed's JSON file describes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from accel_runtime.extensions.deepspeed.library import SCHEDULERS, hide_warnings
from accel_runtime.extensions.deepspeed.plugin import DummyOptim, DummyScheduler
from accel_runtime.extensions.deepspeed.settings import AUTO, DeepSpeedConfig
from accel_runtime.parallel.strategy import Placeholder

__all__ = ["ConfiguredScheduler", "build_configured", "refuse_unconfigured"]

_TORCH = {name.lower(): name for name in ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD")}
_FUSED_ON_HOST = {"Adam", "AdamW", "SGD"}
_BUILT: WeakSet[Any] = WeakSet()
"""Optimizers and schedulers that were built from a configuration."""


def build_configured(
    placeholders: Sequence[Placeholder], config: DeepSpeedConfig, num_batches: int, filled: dict[str, Any]
) -> list[Any]:
    """Return the optimizers and schedulers that `DummyOptim` and `DummyScheduler` stand for, in their order.

    Args:
        placeholders: Objects of the script.
        config: The configuration.
        num_batches: Batches in which a script counts the steps of a schedule, of one training step.
        filled: Receives the values of what is `auto`, by path.

    Raises:
        ValueError: The configuration does not describe one of them.
    """
    optimizers = {
        id(each): build_optimizer(each, config, filled)
        for each in placeholders
        if isinstance(each, DummyOptim)
    }

    def build(placeholder: Placeholder) -> Any:
        if isinstance(placeholder, DummyOptim):
            return optimizers[id(placeholder)]
        if not isinstance(placeholder, DummyScheduler):
            raise placeholder.refuse()
        optimizer = getattr(placeholder.optimizer, "optimizer", placeholder.optimizer)
        if isinstance(optimizer, DummyOptim):
            if id(optimizer) not in optimizers:
                raise ValueError(
                    "DummyScheduler cannot be prepared without its DummyOptim. Pass both to the same call of prepare()."
                )
            optimizer = optimizers[id(optimizer)]
        return build_scheduler(placeholder, optimizer, config, num_batches, filled)

    built = [build(placeholder) for placeholder in placeholders]
    _BUILT.update(built)
    return built


def refuse_unconfigured(
    optimizers: Sequence[torch.optim.Optimizer], schedulers: Sequence[LRScheduler], config: DeepSpeedConfig
) -> None:
    """Raise ValueError if a script creates what a configuration describes: one of both would be ignored."""
    for subject, objects, dummy in (
        ("optimizer", optimizers, "DummyOptim"),
        ("scheduler", schedulers, "DummyScheduler"),
    ):
        created = [each for each in objects if each not in _BUILT]
        if created and (described := config.get(f"{subject}.type")):
            raise ValueError(
                f"The {subject} is {described} in {_source(config, f'{subject}.type')}, and the script creates "
                f"{type(created[0]).__name__}. Remove the section {subject} from the configuration, or prepare {dummy}."
            )


def build_optimizer(
    placeholder: DummyOptim, config: DeepSpeedConfig, filled: dict[str, Any]
) -> torch.optim.Optimizer:
    """Return the optimizer of the section `optimizer`, with the values of the placeholder for those that are `auto`.

    It is torch's. `Adam` is `AdamW` unless `adam_w_mode` is false, as in deepspeed.

    Raises:
        ValueError: The file has no such section, or its optimizer or an argument is not supported.
    """
    name = str(config.get("optimizer.type", ""))
    if not name:
        raise ValueError(
            "DummyOptim cannot be prepared: the configuration of DeepSpeed has no section optimizer. Add it to the JSON file, or "
            "create an optimizer of torch."
        )
    found = _TORCH.get(name.lower())
    if found is None:
        raise ValueError(
            f"optimizer.type {name} in {_source(config, 'optimizer.type')} is not supported: expected one of "
            f"{', '.join(_TORCH.values())}. Use one of them, or create the optimizer in the script."
        )
    given = _section(config, "optimizer")
    params = {"lr": placeholder.lr, "weight_decay": placeholder.weight_decay, **placeholder.kwargs}
    filled |= {
        f"optimizer.params.{key}": params.get(key, "that of torch") for key in given if given[key] == AUTO
    }
    params |= {key: value for key, value in given.items() if value != AUTO}
    is_decoupled = params.pop("adam_w_mode", True)
    params.pop("torch_adam", None)
    if found == "Adam" and is_decoupled:
        found = "AdamW"
    if "betas" in params:
        params["betas"] = tuple(params["betas"])
    on_host = config.get("zero_optimization.offload_optimizer.device", "none") != "none"
    if on_host and found in _FUSED_ON_HOST:
        params.setdefault("fused", True)
    try:
        optimizer: torch.optim.Optimizer = getattr(torch.optim, found)(placeholder.params, **params)
    except TypeError as error:
        raise ValueError(
            f"optimizer.params in {_source(config, 'optimizer.type')} cannot be used: {error}. Remove the argument."
        ) from error
    return optimizer


def build_scheduler(
    placeholder: DummyScheduler,
    optimizer: torch.optim.Optimizer,
    config: DeepSpeedConfig,
    num_batches: int,
    filled: dict[str, Any],
) -> LRScheduler:
    """Return the scheduler of the section `scheduler`, with the values of the placeholder for those that are `auto`.

    Args:
        placeholder: The object of the script.
        optimizer: The optimizer of the schedule.
        config: The configuration.
        num_batches: Batches in which a script counts the steps of a schedule, of one training step.
        filled: Receives the values of what is `auto`, by path.

    Raises:
        ValueError: The file has no such section, or its scheduler or an argument is not supported.
    """
    name = str(config.get("scheduler.type", ""))
    if placeholder.lr_scheduler_callable is not None:
        if name:
            raise ValueError(
                f"The scheduler is {name} in {_source(config, 'scheduler.type')}, and DummyScheduler has lr_scheduler_callable. Remove "
                "one of them."
            )
        scheduler: LRScheduler = placeholder.lr_scheduler_callable(optimizer)
        scheduler.counts_optimizer_steps = True  # type: ignore[attr-defined]  # as deepspeed's own
        return scheduler
    if not name:
        raise ValueError(
            "DummyScheduler cannot be prepared: the configuration of DeepSpeed has no section scheduler. Add it to the JSON file, "
            "pass lr_scheduler_callable, or create a scheduler of torch."
        )
    source = _source(config, "scheduler.type")
    if name not in SCHEDULERS:
        raise ValueError(
            f"scheduler.type {name} in {source} is not supported: expected one of {', '.join(SCHEDULERS)}. Use one of them, or "
            "create the scheduler in the script."
        )
    fills = {
        "warmup_min_lr": 0,
        "warmup_max_lr": optimizer.param_groups[0]["lr"],
        "warmup_num_steps": max(1, placeholder.warmup_num_steps),
        "total_num_steps": None
        if placeholder.total_num_steps is None
        else math.ceil(placeholder.total_num_steps / num_batches),
    }
    params = dict(placeholder.kwargs)
    for key, value in _section(config, "scheduler").items():
        if value == AUTO and fills.get(key) is None:
            raise ValueError(
                f"scheduler.params.{key} is auto in {source}, and DummyScheduler has no value for it. Pass {key}, or write a number."
            )
        params[key] = fills[key] if value == AUTO else value
        if value == AUTO:
            filled[f"scheduler.params.{key}"] = params[key]
    try:
        with hide_warnings():
            return ConfiguredScheduler(SCHEDULERS[name](optimizer, **params), optimizer)
    except TypeError as error:
        raise ValueError(
            f"scheduler.params in {source} cannot be used: {error}. Correct the argument."
        ) from error


class ConfiguredScheduler(LRScheduler):
    """A scheduler of deepspeed with the interface of torch.

    Args:
        scheduler: The scheduler; it counts optimizer steps.
        optimizer: Its optimizer.
    """

    counts_optimizer_steps = True

    def __init__(self, scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
        # LRScheduler.__init__ is not called on purpose: it would take a first step.
        self.scheduler, self.optimizer = scheduler, optimizer
        self.base_lrs = [group["lr"] for group in optimizer.param_groups]
        self._step_count = 0

    @property
    def last_epoch(self) -> int:  # type: ignore[override]
        """Return the number of the newest step, from 0; -1 before the first."""
        for name in ("last_batch_iteration", "last_batch_iterations"):
            if hasattr(self.scheduler, name):
                return int(getattr(self.scheduler, name))
        return self._step_count - 1

    @override
    def step(self, epoch: int | None = None) -> None:
        self._step_count += 1
        self.scheduler.step(epoch)

    @override
    def get_last_lr(self) -> list[Any]:
        return [group["lr"] for group in self.optimizer.param_groups]

    @override
    def get_lr(self) -> Any:
        return self.scheduler.get_lr()

    @override
    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state_dict)


def _section(config: DeepSpeedConfig, name: str) -> Mapping[str, Any]:
    section: Mapping[str, Any] = config.get(f"{name}.params", {})
    return section


def _source(config: DeepSpeedConfig, path: str) -> str:
    return config.sources.get(path, "the configuration of DeepSpeed")
