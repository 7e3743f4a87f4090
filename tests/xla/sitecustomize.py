"""Lets replicas meet in a script that is started with this folder in PYTHONPATH: see `meeting`."""

import importlib.abc
import importlib.machinery
import os
import sys

import meeting

_REPLICAS = int(os.environ.get("CPU_NUM_DEVICES", "1")) if os.environ.get("PJRT_DEVICE") == "CPU" else 1


class _Watch(importlib.abc.MetaPathFinder):
    """Installs it when torch_xla has been loaded."""

    def find_spec(self, name, path, target=None):  # noqa: ARG002
        if name != "torch_xla.core.xla_model":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            meeting.install(_REPLICAS)

        spec.loader.exec_module = exec_module
        sys.meta_path.remove(self)
        return spec


if _REPLICAS > 1 and os.environ.get("ACCEL_SPMD", "0") != "1":
    meeting.prepare(os.environ, _REPLICAS)
    sys.meta_path.insert(0, _Watch())
