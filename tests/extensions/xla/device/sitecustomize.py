"""Let replicas run collectives in a script started with this folder in PYTHONPATH: see `cpu_collectives`."""

import importlib.abc
import importlib.machinery
import os
import sys

import cpu_collectives

_REPLICAS = int(os.environ.get("CPU_NUM_DEVICES", "1")) if os.environ.get("PJRT_DEVICE") == "CPU" else 1


class _Watch(importlib.abc.MetaPathFinder):
    """A finder that calls a function with a module after it was loaded."""

    def __init__(self, name, function):
        self._name, self._function = name, function

    def find_spec(self, name, path, target=None):  # noqa: ARG002
        if name != self._name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            self._function(module)

        spec.loader.exec_module = exec_module
        sys.meta_path.remove(self)
        return spec


def _let_replicas_be_planned(module):
    """Remove the launcher's check, which rejects several replicas of this device."""
    module._check_cpu_replicas = lambda _: None


if _REPLICAS > 1 and os.environ.get("ACCEL_SPMD", "0") != "1":
    cpu_collectives.prepare(os.environ, _REPLICAS)
    sys.meta_path.insert(0, _Watch("torch_xla.core.xla_model", lambda _: cpu_collectives.install(_REPLICAS)))
    sys.meta_path.insert(0, _Watch("accel_cli.extensions.xla.launcher", _let_replicas_be_planned))
