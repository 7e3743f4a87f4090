"""Stand-ins of Accelerate for optimizers and schedules of DeepSpeed and Megatron-LM: scripts import them, and cannot make one."""

from __future__ import annotations

from typing import Any

__all__ = ["DummyOptim", "DummyScheduler", "MegatronLMDummyScheduler"]

_OPTIMIZER = "Make the optimizer in the script, such as torch.optim.AdamW(model.parameters(), lr=...), and pass it to prepare()"
_SCHEDULER = "Make the schedule in the script, such as torch.optim.lr_scheduler.LambdaLR(optimizer, ...), and pass it to prepare()"


class _Dummy:
    """Base of the stand-ins."""

    instead: str

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError(
            f"{type(self).__name__}(...) stands for what a configuration of DeepSpeed or Megatron-LM describes, and accel uses "
            f"neither. {self.instead}."
        )


class DummyOptim(_Dummy):
    """Not supported: an optimizer that the configuration of DeepSpeed describes."""

    instead = _OPTIMIZER


class DummyScheduler(_Dummy):
    """Not supported: a schedule that the configuration of DeepSpeed describes."""

    instead = _SCHEDULER


class MegatronLMDummyScheduler(_Dummy):
    """Not supported: a schedule that Megatron-LM makes."""

    instead = _SCHEDULER
