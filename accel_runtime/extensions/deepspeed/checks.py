"""Checks of what ZeRO can train: deepspeed would stop in an assertion, or train something else in silence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from accel_runtime.environment.settings import MixedPrecision
from accel_runtime.extensions.deepspeed.library import is_partitioned
from accel_runtime.extensions.deepspeed.settings import ZERO_3, DeepSpeedConfig
from accel_runtime.foundation.precision import name_dtype

__all__ = ["build_missing_error", "check_parameters", "refuse_optimizer", "refuse_undividable"]

_TRAINED = (torch.float32, torch.bfloat16, torch.float16)
"""The number formats of parameters whose master weights in float32 lose no digits."""
_ELEMENTWISE = frozenset({
    "Adadelta", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
    "DeepSpeedCPUAdam", "FusedAdam", "DeepSpeedCPULion", "FusedLion", "Adam8bit", "AdamW8bit", "Lion",
})  # fmt: skip
"""Optimizers whose step treats each element apart, so that flat shards of parameters train as the parameters do."""
_REFUSED = (
    "Adafactor",
    "Adagrad",
    "LBFGS",
    "SparseAdam",
    "Muon",
    "Shampoo",
    "SOAP",
    "LAMB",
    "LARS",
    "FusedLamb",
)


def refuse_undividable(model: nn.Module, stage: int) -> None:
    """Raise ValueError if a model has parameters that stage 3 cannot partition: without dimensions, or without elements."""
    if stage != ZERO_3:
        return
    for name, parameter in model.named_parameters():
        if is_partitioned(parameter) or (parameter.dim() and parameter.numel()):
            continue
        lack = f"no elements, shape {list(parameter.shape)}" if parameter.dim() else "no dimensions"
        raise ValueError(
            f"{type(model).__name__} cannot be sharded by ZeRO stage 3: {name} has {lack}. Create it with one element, as in "
            "torch.ones(1), or use stage 2."
        )


def check_parameters(
    optimizer: torch.optim.Optimizer, models: Sequence[nn.Module], mixed_precision: MixedPrecision
) -> None:
    """Raise ValueError for an optimizer if a part of its parameters is in no model, or ZeRO would change their numbers.

    ZeRO keeps the weights of an optimizer in flat tensors of one number format, and master weights in float32. With mixed precision, it
    converts all of them first.

    Args:
        optimizer: An optimizer, whose models may be prepared later.
        models: The prepared models.
        mixed_precision: The number format of the run.
    """
    own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    missing = own.difference(*(model.parameters() for model in models))
    if missing and len(missing) < len(own):
        raise build_missing_error(optimizer, missing)
    names: dict[torch.dtype, str] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            if parameter in own and parameter.requires_grad:
                names.setdefault(parameter.dtype, name)
    for dtype, name in names.items():
        if dtype not in _TRAINED and (dtype.is_complex or mixed_precision == "no"):
            raise ValueError(
                f"{type(optimizer).__name__} cannot be trained by ZeRO: {name} is {name_dtype(dtype)}, and ZeRO has master weights in "
                "float32. Convert the parameters to float32, or train them with DDP, without ZeRO."
            )
    if mixed_precision == "no" and len(names) > 1:
        formats = " and ".join(f"{name} is {name_dtype(dtype)}" for dtype, name in names.items())
        raise ValueError(
            f"{type(optimizer).__name__} cannot be trained by ZeRO: {formats}, and ZeRO keeps the weights of an optimizer in one number "
            "format. Convert the parameters to one, as in model.float(), or use mixed_precision bf16."
        )


def build_missing_error(optimizer: torch.optim.Optimizer, missing: Iterable[torch.Tensor]) -> ValueError:
    """Return the error of an optimizer with parameters that are in no prepared model."""
    parameters = list(missing)
    return ValueError(
        f"{type(optimizer).__name__} cannot be trained by ZeRO: {len(parameters)} of its parameters, the first of shape "
        f"{list(getattr(parameters[0], 'ds_shape', parameters[0].shape))}, are in no prepared model. Pass the model to prepare() "
        "together with the optimizer."
    )


def refuse_optimizer(optimizer: torch.optim.Optimizer, config: DeepSpeedConfig) -> None:
    """Raise ValueError if an optimizer does not train flat shards as it trains parameters."""
    name = type(optimizer).__name__
    if name in _ELEMENTWISE:
        return
    if name in _REFUSED or not config.get("zero_allow_untested_optimizer", default=False):
        raise ValueError(
            f"{name} cannot be trained by ZeRO: it may treat parameters as matrices, and ZeRO steps flat shards of them. Use another "
            "optimizer such as AdamW, or fully_shard"
            + (
                "."
                if name in _REFUSED
                else "; if it treats each element apart, set zero_allow_untested_optimizer: true in the JSON file."
            )
        )
