"""The number formats of a sharded model, as torch's policy."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from accel_runtime.env import FullyShard, Number

__all__ = ["policy_of"]

_DTYPES: dict[Number, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def policy_of(asked: FullyShard, computes_in: torch.dtype | None) -> MixedPrecisionPolicy:
    """What parameters are gathered in, gradients averaged in, and outputs given back in.

    Args:
        asked: What the settings say.
        computes_in: The format of `mixed_precision`; None is that of the model.
    """
    param = _DTYPES.get(asked.param_dtype, computes_in)
    # Sums over many ranks lose most of what bfloat16 has.
    reduce = _DTYPES.get(asked.reduce_dtype, torch.float32 if param is not None else None)
    return MixedPrecisionPolicy(
        param_dtype=param,
        reduce_dtype=reduce,
        output_dtype=_DTYPES.get(asked.output_dtype),
        cast_forward_inputs=asked.cast_forward_inputs,
    )
