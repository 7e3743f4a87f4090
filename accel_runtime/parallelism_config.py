"""The name of this module is what scripts import `ParallelismConfig` from."""

from accel_runtime.parallel.config import ParallelismConfig

__all__ = ["ParallelismConfig"]
