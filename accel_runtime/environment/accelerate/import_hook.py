"""Report what of a profile has no effect in Accelerate, once a script makes Accelerate's own state.

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

from accel_runtime.environment.import_hooks import call_after_import
from accel_runtime.environment.text import print_note

__all__ = ["install_hook"]

_MODULE, _CLASS = "accelerate.state", "AcceleratorState"
_USAGE_ERROR = 2


def install_hook(text: str) -> None:
    """Report the limits in a text as `accel launch` writes it, when `accelerate.state` has been imported and is used."""
    report = json.loads(text)
    call_after_import(_MODULE, lambda module: _report_at_first_use(module, report))


def _report_at_first_use(module: ModuleType, report: Mapping[str, Any]) -> None:
    """Wrap the constructor of the class, until it is called."""
    kind = getattr(module, _CLASS, None)
    if kind is None:
        return
    construct = kind.__init__

    @functools.wraps(construct)
    def init(state: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__ = construct
        _print_report(report)
        construct(state, *args, **kwargs)

    kind.__init__ = init


def _print_report(report: Mapping[str, Any]) -> None:
    sentences = list(report["limits"])
    if "transformers.trainer" in sys.modules:
        sentences += report["trainer_limits"]
    if report["resume_limit"] and "accel_runtime.transformers" not in sys.modules:
        sentences.append(report["resume_limit"])
    if refusal := report["refusal"]:
        sentences.append(refusal)
    if os.environ.get("RANK", "0") == "0":
        for sentence in sentences:
            print_note(sentence)
    if refusal:
        sys.exit(_USAGE_ERROR)
