"""Strategies of one process, and of the settings of a test, for tests below the `Accelerator`."""

from __future__ import annotations

import os
from dataclasses import replace

import torch
from support.training.engine_strategy import EngineStrategy

from accel_runtime.backends import connect
from accel_runtime.backends.device_runtime import DeviceRuntime
from accel_runtime.backends.single import Single
from accel_runtime.environment.settings import Parallel, Settings
from accel_runtime.environment.topology import Topology
from accel_runtime.extensions.deepspeed.settings import DeepSpeed
from accel_runtime.parallel import choose_strategy
from accel_runtime.parallel.ddp import DDPStrategy


def build_local_strategy(device="cpu"):
    """Return the strategy of one process that is connected to nothing."""
    return DDPStrategy(Single(Topology(), DeviceRuntime(torch.device(device))))


def connect_strategy(sizes=None):
    """Return the strategy of this rank for sizes of the parallel dimensions, or options of DeepSpeed; of `engine`, one with gradients of its own."""
    settings = Settings.from_env(os.environ)
    if sizes == "engine":
        return EngineStrategy(connect(settings, Topology.from_env(os.environ)))
    if "stage" in (sizes or {}):
        settings = settings.with_engine(DeepSpeed(**sizes))
        return choose_strategy(connect(settings, Topology.from_env(os.environ)), settings)
    settings = replace(settings, parallel=Parallel(**(sizes or {})))
    return choose_strategy(connect(settings, Topology.from_env(os.environ)), settings)
