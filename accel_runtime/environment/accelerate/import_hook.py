"""Report what of a profile has no effect in Accelerate, once a script makes Accelerate's own state.

Libraries import `accelerate` in scripts that use accel_runtime too; only a script that makes an `AcceleratorState` (with
an `Accelerator` or a Trainer) computes by its rules.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["install_hook"]

_MODULE, _CLASS = "accelerate.state", "AcceleratorState"
_USAGE_ERROR = 2


def install_hook(text: str) -> None:
    """Report the limits in a text as `accel launch` writes it, when `accelerate.state` has been imported and is used."""
    sys.meta_path.insert(0, _StateFinder(json.loads(text)))


class _StateFinder(MetaPathFinder):
    """Finds one module as the other finders do, and wraps its loader."""

    def __init__(self, report: Mapping[str, Any]) -> None:
        self._report = report

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        """Return the spec of `accelerate.state`; None for all other modules."""
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _StateLoader(spec.loader, self._report)
        return spec


class _StateLoader(Loader):
    """Loads the module as its own loader does, and reports when its class is used for the first time."""

    def __init__(self, loader: Any, report: Mapping[str, Any]) -> None:
        self._loader, self._report = loader, report

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # for `inspect` and `linecache`

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create the module as its own loader does."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, and wrap the constructor of its class."""
        self._loader.exec_module(module)
        kind = getattr(module, _CLASS, None)
        if kind is None:
            return
        construct = kind.__init__

        @functools.wraps(construct)
        def init(state: Any, *args: Any, **kwargs: Any) -> None:
            kind.__init__ = construct
            self._print_report()
            construct(state, *args, **kwargs)

        kind.__init__ = init

    def _print_report(self) -> None:
        sentences = list(self._report["limits"])
        if "transformers.trainer" in sys.modules:
            sentences += self._report["trainer_limits"]
        if refusal := self._report["refusal"]:
            sentences.append(refusal)
        if os.environ.get("RANK", "0") == "0":
            for sentence in sentences:
                print(f"accel: {sentence}", file=sys.stderr, flush=True)  # noqa: T201 - whatever the logging
        if refusal:
            sys.exit(_USAGE_ERROR)
