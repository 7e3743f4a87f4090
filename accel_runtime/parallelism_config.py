"""`ParallelismConfig` under the name of Accelerate's `parallelism_config`."""

from accel_runtime.parallel.plugins import ParallelismConfig

__all__ = ["ParallelismConfig"]
