"""Functions that are called once a script has imported a module. Standard library only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["call_after_import", "call_after_torch_import"]


def call_after_import(names: str | Collection[str], call: Callable[[ModuleType], None]) -> None:
    """Call a function with each of some modules as soon as it has been imported; at once if it is already.

    Libraries look for modules that they do not import (`importlib.util.find_spec`), so that finding it is not enough.
    """
    names = [names] if isinstance(names, str) else names
    for name in names:
        if name in sys.modules:
            call(sys.modules[name])
    if missing := {name for name in names if name not in sys.modules}:
        sys.meta_path.insert(0, _Finder(missing, call))


def call_after_torch_import(call: Callable[[ModuleType], None]) -> None:
    """Call a function with PyTorch as soon as it has been imported; never with another module named `torch`, as of the script."""

    def call_with_pytorch(module: ModuleType) -> None:
        if "torch._C" in sys.modules:
            call(module)

    call_after_import("torch", call_with_pytorch)


class _Finder(MetaPathFinder):
    """Finds some modules as the other finders do, and wraps their loaders, until all have been imported."""

    def __init__(self, names: set[str], call: Callable[[ModuleType], None]) -> None:
        self._names, self._call = names, call

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of one of the modules; None for all others."""
        if fullname not in self._names:
            return None
        # Those before it have not found the module, or are of this class, and ask this one.
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _CallingLoader(spec.loader, self._finish)
                return spec
        return None

    def _finish(self, module: ModuleType) -> None:
        if module.__name__ in self._names:
            self._names.remove(module.__name__)
            if not self._names and self in sys.meta_path:
                sys.meta_path.remove(self)
            self._call(module)


class _CallingLoader(Loader):
    """Loads a module as its own loader does, becomes that again, and calls a function."""

    def __init__(self, loader: Any, finish: Callable[[ModuleType], None]) -> None:
        self._loader, self._finish = loader, finish
        self._own: Any = loader._own if isinstance(loader, _CallingLoader) else loader  # noqa: SLF001
        # Not a method of this class: its frame would be that of the loader's warnings.
        self.create_module = loader.create_module  # type: ignore[method-assign]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # for `inspect` and `linecache`

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, and call the function with it."""
        self._loader.exec_module(module)
        if module.__loader__ is self:
            module.__loader__ = self._own
        if module.__spec__ is not None and module.__spec__.loader is self:
            module.__spec__.loader = self._own
        self._finish(module)
