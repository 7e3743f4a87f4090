"""Placeholders and configuration of DeepSpeed under the name of Accelerate's `utils.deepspeed`."""

from accel_runtime.extensions.deepspeed.plugin import DummyOptim, DummyScheduler, HfDeepSpeedConfig

__all__ = ["DummyOptim", "DummyScheduler", "HfDeepSpeedConfig"]  # of extensions.deepspeed
