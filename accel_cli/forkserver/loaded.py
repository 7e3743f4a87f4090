"""torch, loaded but not imported: until the script asks for it, it is not in `sys.modules`."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from typing_extensions import override

from accel_cli.forkserver.unfit import read_by_torch

__all__ = ["hide"]


def hide(package: str, environ: Mapping[str, str]) -> None:
    """Take a package out of `sys.modules`; importing it brings it back as it is.

    Args:
        package: Its name.
        environ: The environment it was loaded under.
    """
    names = [name for name in sys.modules if f"{name}.".startswith(f"{package}.")]
    modules = {name: sys.modules.pop(name) for name in names}
    if not modules:
        return
    sys.meta_path.insert(0, _Loaded(modules, read_by_torch(environ)))


class _Loaded(MetaPathFinder, Loader):
    """Finds modules that are loaded."""

    def __init__(self, modules: Mapping[str, ModuleType], environ: Mapping[str, str]) -> None:
        self._modules = modules
        self._specs = {name: module.__spec__ for name, module in modules.items()}
        self._environ = environ

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in self._modules else None

    @override
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        sys.meta_path.remove(self)
        sys.modules.update(self._modules)
        self._compare()
        return self._modules[spec.name]

    @override
    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._specs[module.__name__]

    def _compare(self) -> None:
        """Say what the script has set too late for a torch that is loaded already."""
        now = read_by_torch(os.environ)
        late = sorted(name for name in {*now, *self._environ} if now.get(name) != self._environ.get(name))
        if late:
            warnings.warn(
                f"{', '.join(late)} changed after torch was loaded for this process, and may have no effect; "
                "set it in the profile's env, or use launcher.start_method=exec",
                RuntimeWarning,
                stacklevel=2,
            )
