"""Report what of a profile or script has no effect in Accelerate, once a script makes Accelerate's own state.

Libraries import `accelerate` in scripts that use accel_runtime too; only a script that makes an `AcceleratorState` (with
an `Accelerator` or a Trainer) computes by its rules.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from accel_runtime.environment.accelerate import sharding
from accel_runtime.environment.text import print_note

__all__ = ["report_at_first_use"]

_CLASS = "AcceleratorState"
_CALLBACK = "accel_runtime.transformers"
_USAGE_ERROR = 2


def report_at_first_use(module: ModuleType, text: str) -> None:
    """Report the limits in a text as `accel launch` writes it, when the class of `accelerate.state` is used.

    Args:
        module: `accelerate.state`.
        text: The text; empty without limits.
    """
    kind = getattr(module, _CLASS, None)
    if kind is None:
        return
    report = json.loads(text or "{}")
    construct = kind.__init__

    @functools.wraps(construct)
    def init(state: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__ = construct
        _print_report(report)
        construct(state, *args, **kwargs)
        _report_replicas(state)

    kind.__init__ = init


def _print_report(report: Mapping[str, Any]) -> None:
    sentences = list(report.get("limits", ()))
    if "transformers.trainer" in sys.modules:
        sentences += report.get("trainer_limits", ())
    refusal = report.get("refusal", "")
    for sentence in (*sentences, refusal):
        _print_once(sentence)
    if refusal:
        sys.exit(_USAGE_ERROR)
    if limit := report.get("resume_limit", ""):
        _report_at_first_step(limit)


def _print_once(sentence: str) -> None:
    """Print a sentence in the first process."""
    if sentence and os.environ.get("RANK", "0") == "0":
        print_note(sentence)


def _report_at_first_step(sentence: str) -> None:
    """Report that nothing is resumed, unless the script has imported the callback until its first step."""
    is_compiling = sys.modules["torch"].compiler.is_compiling
    is_due = True

    def report(*_: Any) -> None:
        nonlocal is_due
        # It stays: a hook that removes itself changes what torch iterates over.
        if is_due and not is_compiling():
            is_due = False
            if _CALLBACK not in sys.modules:
                _print_once(sentence)

    # torch.optim hides the name of its module.
    sys.modules["torch.optim.optimizer"].register_optimizer_step_pre_hook(report)


def _report_replicas(state: Any) -> None:
    """Report that a script shards models on the CPU, where Accelerate replicates them without a word."""
    if state.device.type != "cpu":
        return
    for name, switch, section in (
        *((engine.title, engine.switch, engine.section) for engine in sharding.ENGINES),
        ("FSDP", sharding.USE_FSDP, sharding.FSDP),
    ):
        is_asked = os.environ.get(switch.variable, "").lower() == "true"
        if is_asked and state.distributed_type.value != section.distributed_type:
            _print_once(
                f"{name} of the script has no effect: Accelerate does not shard on the CPU, and each process has a whole model, with "
                f"gradients and optimizer state. Run on GPUs, or leave out {name}."
            )
