"""Progress of any script: torch calls a hook after each step of an optimizer, with and without an Accelerator.

Standard library only. A script that never imports torch pays nothing.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

from accel_runtime.environment.import_hooks import call_after_import

__all__ = ["watch_steps"]


def watch_steps() -> None:
    """Count the steps of all optimizers of this process, once it has imported torch."""
    call_after_import("torch", _register)


def _register(torch: ModuleType) -> None:
    pid, is_compiling = os.getpid(), torch.compiler.is_compiling

    def count(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        # A step that torch.compile runs is not counted: this function would break its graph.
        if is_compiling() or os.getpid() != pid:
            return
        from accel_runtime.environment.heartbeat import heartbeat  # noqa: PLC0415 - at the first step: 0.1 s

        progress = heartbeat()
        if progress is not None:
            progress.observe_step(optimizer)

    # torch.optim hides the name of its module.
    sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook(count)
