"""The number formats of a sharded model, as torch's policies; what cannot be gathered together is refused."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.modules.batchnorm import _BatchNorm

from accel_runtime.env import FullyShard, Number
from accel_runtime.parallel.wrapping import Units

__all__ = ["apart", "own_parameters", "policy_of", "refuse_mixtures", "within"]

_DTYPES: dict[Number, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_HALVES = (torch.bfloat16, torch.float16)
_NAMED = 3


def policy_of(
    asked: FullyShard, computes_in: torch.dtype | None, parameters: Iterable[nn.Parameter] = ()
) -> MixedPrecisionPolicy:
    """What parameters are gathered in, gradients averaged in, and outputs given back in.

    Args:
        asked: What the settings say.
        computes_in: The format of `mixed_precision`; None is that of the model.
        parameters: The model's.
    """
    param = _DTYPES.get(asked.param_dtype, computes_in)
    half = param in _HALVES or any(p.requires_grad and p.dtype in _HALVES for p in parameters)
    # Sums over many ranks lose most of what bfloat16 has; what the model has otherwise is exact enough.
    reduce = _DTYPES.get(asked.reduce_dtype, torch.float32 if half or param is not None else None)
    return MixedPrecisionPolicy(
        param_dtype=param,
        reduce_dtype=reduce,
        output_dtype=_DTYPES.get(asked.output_dtype),
        cast_forward_inputs=asked.cast_forward_inputs,
    )


def within(policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """The policy of modules inside of the model: what they give each other stays as they computed it."""
    return replace(policy, output_dtype=None)


def apart(
    model: nn.Module, policy: MixedPrecisionPolicy, units: Units, ignored: Collection[nn.Parameter] = ()
) -> tuple[Units, MixedPrecisionPolicy]:
    """Batch normalisations, whose parameters stay in the format of their statistics, and their policy.

    torch computes them from a half input, but not with half parameters beside float32 statistics.

    Args:
        model: The script's model.
        policy: Of all the others.
        units: What is gathered by itself anyway.
        ignored: The parameters that stay whole.
    """
    known = {id(module) for _, module in units} | {id(model)}
    found: Units = []
    if policy.param_dtype in _HALVES:
        found = [
            (name, module)
            for name, module in model.named_modules()
            if isinstance(module, _BatchNorm)
            and id(module) not in known
            and any(p not in ignored and p.dtype not in _HALVES for p in module.parameters())
        ]
    own = MixedPrecisionPolicy(reduce_dtype=policy.reduce_dtype, cast_forward_inputs=False)
    return found, own


def refuse_mixtures(model: nn.Module, units: Units, ignored: Collection[nn.Parameter] = ()) -> None:
    """Refuse parameters of different dtypes that would be gathered together.

    Args:
        model: The script's model.
        units: The modules that are gathered by themselves; the rest of the model is one more.
        ignored: The parameters that stay whole.

    Raises:
        ValueError: Parameters that learn have different dtypes within one; the message names some of each.
    """
    for unit, module in [*units, ("", model)]:
        found: dict[torch.dtype, list[str]] = {}
        for name, parameter in own_parameters(module, units):
            if parameter.requires_grad and parameter not in ignored:
                found.setdefault(parameter.dtype, []).append(f"{unit}.{name}" if unit else name)
        if len(found) > 1:
            raise ValueError(_mixture(type(model).__name__, unit, found))


def own_parameters(module: nn.Module, units: Units) -> list[tuple[str, nn.Parameter]]:
    """The parameters that are gathered with a module: without those of modules in it that are gathered by themselves."""
    others = {
        id(parameter)
        for _, inner in units
        if inner is not module and any(inner is some for some in module.modules())
        for parameter in inner.parameters()
    }
    return [(name, p) for name, p in module.named_parameters() if id(p) not in others]


def _mixture(model: str, unit: str, found: dict[torch.dtype, list[str]]) -> str:
    told = "; ".join(
        f"{str(dtype).removeprefix('torch.')}: {', '.join(names[:_NAMED])}"
        + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
        for dtype, names in found.items()
    )
    where = f"{unit} of {model}" if unit else f"{model} outside of what fully_shard.wrap chooses"
    return (
        f"fully_shard: the parameters of {where} are gathered together, and have different dtypes ({told}). Bring them to "
        "one dtype, as model.float() does; or have fully_shard.wrap name the class of the module that differs"
    )
