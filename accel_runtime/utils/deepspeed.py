"""Placeholders of Accelerate for DeepSpeed and Megatron-LM: scripts can import them, but not create them."""

from __future__ import annotations

from typing import Any

__all__ = ["DummyOptim", "DummyScheduler", "MegatronLMDummyScheduler"]

_OPTIMIZER = "Create the optimizer in the script, such as torch.optim.AdamW(model.parameters(), lr=...), and pass it to prepare()"
_SCHEDULER = "Create the scheduler in the script, such as torch.optim.lr_scheduler.LambdaLR(optimizer, ...), and pass it to prepare()"


class _Dummy:
    """Base of the placeholders."""

    instead: str

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError(
            f"{type(self).__name__}(...) is not supported: accel does not use DeepSpeed or Megatron-LM. {self.instead}."
        )


class DummyOptim(_Dummy):
    """Not supported: an optimizer of the DeepSpeed configuration."""

    instead = _OPTIMIZER


class DummyScheduler(_Dummy):
    """Not supported: a scheduler of the DeepSpeed configuration."""

    instead = _SCHEDULER


class MegatronLMDummyScheduler(_Dummy):
    """Not supported: a scheduler of Megatron-LM."""

    instead = _SCHEDULER
