"""The parts of torch_xla that are used, or an error that says how to install it."""

from __future__ import annotations

import torch

from accel_runtime.environment.installation import format_new_environment

try:
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.debug.metrics as met
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr
    from torch_xla.distributed.parallel_loader import ParallelLoader
    from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel
except ImportError as error:
    raise RuntimeError(
        f"torch_xla cannot be loaded with torch {torch.__version__}: {error}. The two are released in pairs. Run in a new "
        f"environment: {format_new_environment('xla')}"
    ) from error

__all__ = ["ParallelLoader", "SpmdFullyShardedDataParallel", "met", "torch_xla", "xm", "xr", "xs"]
