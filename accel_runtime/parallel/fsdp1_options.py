"""Convert options of Accelerate's FSDP plugin to settings of `fully_shard`."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

import torch

from accel_runtime.env import Number

__all__ = [
    "DTYPE_NAMES",
    "FSDP1_OPTIONS",
    "check_strategy",
    "parse_ignored",
    "parse_mixed_precision",
    "parse_offload",
    "parse_reshard",
    "parse_switch",
    "parse_wrap_policy",
]

DTYPE_NAMES: dict[torch.dtype, Number] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}
_TRUE, _FALSE = ("true", "yes", "1"), ("false", "no", "0")
_NAME = re.compile(r"[\w*-]+(\.[\w*-]+)*")


def parse_wrap_policy(policy: object, names: Sequence[str] | str | None, size: int | None) -> str | None:
    """Return the setting `wrap`, or None if no option is given."""
    items: Iterable[str] = names.split(",") if isinstance(names, str) else names or []
    classes = [name.strip() for name in items if name.strip()]
    if callable(policy):
        policy, classes, size = _from_torch_policy(policy, classes, size)
    policy_name = None if policy is None else enum_text(policy)
    if policy_name not in {None, "transformer_based_wrap", "size_based_wrap", "no_wrap"}:
        raise _build_error(
            f"auto_wrap_policy must be transformer_based_wrap, size_based_wrap or no_wrap; it is {policy!r}"
        )
    if size is not None and (type(size) is not int or size < 0):
        raise _build_error(f"min_num_params must be a whole number; it is {size!r}")
    by_name, by_size = bool(classes), bool(size)
    if by_name and by_size:
        raise _build_error("transformer_cls_names_to_wrap and min_num_params exclude each other. Remove one.")
    if (by_name and policy_name in {"size_based_wrap", "no_wrap"}) or (
        by_size and policy_name in {"transformer_based_wrap", "no_wrap"}
    ):
        other = "transformer_cls_names_to_wrap" if by_name else "min_num_params"
        raise _build_error(f"auto_wrap_policy {policy_name} does not use {other}. Remove one of them.")
    if policy_name == "size_based_wrap" and not by_size:
        raise _build_error("auto_wrap_policy size_based_wrap needs min_num_params above 0")
    if by_name or by_size:
        return ",".join(classes) or str(size)
    return {None: None, "transformer_based_wrap": "auto"}.get(policy_name, "none")


def parse_reshard(value: object) -> bool | int | None:
    """Return the setting `reshard_after_forward`."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if value > 1:
            return value
        raise _build_error(f"reshard_after_forward must be True, False or a number above 1; it is {value}")
    name = enum_text(value)
    if name in {"true", "yes"} | {"false", "no"}:
        return name in {"true", "yes"}
    check_strategy("reshard_after_forward", value)
    return True


def parse_switch(name: str, value: object) -> bool | None:
    """Return a boolean, also from text."""
    if value is None or isinstance(value, bool):
        return value
    if str(value).lower() in _TRUE + _FALSE:
        return str(value).lower() in _TRUE
    raise _build_error(f"{name} must be True or False; it is {value!r}")


def parse_offload(value: Any) -> bool | None:
    """Return the setting `cpu_offload`."""
    if value is None or isinstance(value, bool | str):
        return parse_switch("cpu_offload", value)
    from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, OffloadPolicy  # noqa: PLC0415 - slow to import

    if isinstance(value, CPUOffload) and value.offload_params:
        raise _build_error(f"cpu_offload={value!r} is an option of FSDP1. Pass cpu_offload=True.")
    if isinstance(value, CPUOffloadPolicy) and not value.pin_memory:
        raise _build_error(
            "pin_memory=False is not supported: memory is pinned if the device can use it. Pass cpu_offload=True."
        )
    if isinstance(value, OffloadPolicy | CPUOffload):
        return isinstance(value, CPUOffloadPolicy)
    raise _build_error(f"cpu_offload must be True, False or an OffloadPolicy of torch; it is {value!r}")


def parse_ignored(value: object) -> tuple[str, ...] | None:
    """Return names of modules that are not sharded."""
    if value is None:
        return None
    names = value.split(",") if isinstance(value, str) else list(value)  # type: ignore[call-overload]
    if not all(isinstance(name, str) for name in names):
        raise _build_error(
            "ignored_modules contains modules, but the model is unknown here. Pass names as in named_modules(), in which * matches "
            "any text without a dot."
        )
    patterns = tuple(name.strip() for name in names if name.strip())
    if invalid := [name for name in patterns if not _NAME.fullmatch(name)]:
        raise _build_error(
            f"Invalid name {invalid[0]!r} in ignored_modules: * matches any text without a dot, as in layers.*.norm."
        )
    return patterns


def parse_mixed_precision(value: Any) -> dict[str, Any]:
    """Return the dtypes that are given."""
    if value is None:
        return {}
    if isinstance(value, str | torch.dtype):
        number = _parse_dtype("mixed_precision_policy", value)
        return {"param_dtype": number, "reduce_dtype": number, "output_dtype": number}
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy  # noqa: PLC0415 - slow to import

    if isinstance(value, MixedPrecision):
        raise _build_error(
            "mixed_precision_policy is a MixedPrecision of FSDP1. Pass "
            "MixedPrecisionPolicy(param_dtype=..., reduce_dtype=...). Buffers keep their dtype."
        )
    if isinstance(value, MixedPrecisionPolicy):
        value = {f.name: getattr(value, f.name) for f in fields(value)}
    if not isinstance(value, Mapping):
        raise _build_error(
            f"mixed_precision_policy must be a MixedPrecisionPolicy, a dict or text; it is {value!r}"
        )
    return _from_mapping(value)


def _from_mapping(value: Mapping[str, Any]) -> dict[str, Any]:
    known = ["param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs"]
    if unknown := [key for key in value if key not in known]:
        raise _build_error(
            f"mixed_precision_policy has {unknown[0]!r}; fully_shard knows {', '.join(known)}"
            + ("; buffers keep their own dtype" if unknown[0] == "buffer_dtype" else "")
        )
    options: dict[str, Any] = {
        key: _parse_dtype(key, value[key]) for key in known[:3] if value.get(key) is not None
    }
    if "reduce_dtype" not in options and "param_dtype" in options:
        # As torch does; without a policy the default is fp32.
        options["reduce_dtype"] = options["param_dtype"]
    if value.get("cast_forward_inputs") is not None:
        options["cast_forward_inputs"] = parse_switch("cast_forward_inputs", value["cast_forward_inputs"])
    return options


def _parse_dtype(key: str, value: object) -> Number:
    if isinstance(value, str):
        name = value.removeprefix("torch.").lower()
        names = {number: dtype for dtype, number in DTYPE_NAMES.items()}
        value = names.get(name, getattr(torch, name, value))  # type: ignore[call-overload]
    if isinstance(value, torch.dtype) and value in DTYPE_NAMES:
        return DTYPE_NAMES[value]
    raise _build_error(
        f"{key} must be one of {', '.join(DTYPE_NAMES.values())} or their torch.dtype; it is {value!r}"
    )


def _from_torch_policy(
    policy: Any, classes: list[str], size: int | None
) -> tuple[str, list[str], int | None]:
    """Return the options for a policy of torch."""
    from torch.distributed.fsdp import wrap as torch_wrap  # noqa: PLC0415 - slow to import

    keywords = policy.keywords if isinstance(policy, functools.partial) else {}
    function = policy.func if isinstance(policy, functools.partial) else policy
    if isinstance(policy, torch_wrap.ModuleWrapPolicy):
        layer_classes = policy._module_classes  # noqa: SLF001 - it has no public name
        return "transformer_based_wrap", sorted(layer_class.__name__ for layer_class in layer_classes), size
    if function is torch_wrap.transformer_auto_wrap_policy:
        layer_classes = keywords.get("transformer_layer_cls", ())
        return (
            "transformer_based_wrap",
            sorted(layer_class.__name__ for layer_class in layer_classes) or classes,
            size,
        )
    if function is torch_wrap.size_based_auto_wrap_policy and set(keywords) <= {"min_num_params"}:
        return "size_based_wrap", classes, keywords.get("min_num_params", size or int(1e8))
    raise _build_error(
        f"auto_wrap_policy {policy!r} is a custom function. Name the classes instead: "
        "auto_wrap_policy='transformer_based_wrap', transformer_cls_names_to_wrap=['Block']"
    )


def _build_error(text: str) -> ValueError:
    return ValueError(f"FullyShardedDataParallelPlugin: {text}")


@dataclass(frozen=True)
class FSDP1Option:
    """An option that `fully_shard` does not have."""

    anyway: tuple[Any, ...]
    """Values that match the behavior of `fully_shard`."""
    instead: str
    """The error message for other values."""


FSDP1_OPTIONS: Mapping[str, FSDP1Option] = MappingProxyType(
    {
        "fsdp_version": FSDP1Option(
            (2, "2"),
            "models are sharded with torch's fully_shard, which is version 2; leave it out, and the options of version 1 too",
        ),
        "backward_prefetch": FSDP1Option(
            ("backward_pre",),
            "fully_shard always gathers the next module during the backward pass; leave it out",
        ),
        "state_dict_type": FSDP1Option(
            ("sharded_state_dict",),
            "checkpoints hold what each rank has, and load on any number of ranks; leave it out. Whole weights come from "
            "get_state_dict() and save_model()",
        ),
        "state_dict_config": FSDP1Option((), "checkpoints need no such object; leave it out"),
        "optim_state_dict_config": FSDP1Option((), "checkpoints need no such object; leave it out"),
        "limit_all_gathers": FSDP1Option(
            (True,), "fully_shard always limits what is gathered ahead; leave it out"
        ),
        "use_orig_params": FSDP1Option(
            (True,), "fully_shard always keeps the model's own parameters; leave it out"
        ),
        "param_init_fn": FSDP1Option(
            (),
            "a model on the meta device is filled by accelerator.load_model(), or by its modules' reset_parameters(); leave "
            "it out",
        ),
        "sync_module_states": FSDP1Option(
            (True,), "ranks always begin with the parameters of the first one; leave it out"
        ),
        "forward_prefetch": FSDP1Option(
            (False,),
            "fully_shard gathers the next module by itself; for more, call set_modules_to_forward_prefetch() of the prepared "
            "modules",
        ),
        "activation_checkpointing_offload": FSDP1Option(
            (False,), "inputs of checkpointed modules stay on the device; leave it out"
        ),
        "cpu_ram_efficient_loading": FSDP1Option(
            (False,),
            "create the model on the meta device (init_empty_weights) and let accelerator.load_model() read the file after "
            "prepare(): each rank then reads its own part only",
        ),
    }
)
"""By field name."""

_STRATEGIES: Mapping[str, str] = MappingProxyType(
    {
        "shard_grad_op": "reshard_after_forward=False",
        "hybrid_shard": "ParallelismConfig(dp_replicate_size=number of machines, dp_shard_size=processes of one)",
        "hybrid_shard_zero2": "ParallelismConfig(dp_replicate_size=number of machines, dp_shard_size=processes of one) and "
        "reshard_after_forward=False",
        "no_shard": "no fsdp_plugin at all: models are replicated without one",
    }
)
_STRATEGY_NAMES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
"""In Accelerate's order, counted from 1."""


def check_strategy(field: str, value: object) -> None:
    """Raise ValueError for a sharding strategy other than FULL_SHARD; the message names the replacement."""
    name = enum_text(value)
    if name.isdigit() and 0 < int(name) <= len(_STRATEGY_NAMES):
        name = _STRATEGY_NAMES[int(name) - 1]
    if name == "full_shard":
        return
    if name not in _STRATEGIES:
        known = ", ".join(["full_shard", *_STRATEGIES])
        raise ValueError(
            f"FullyShardedDataParallelPlugin: invalid {field} {value!r}: expected one of {known}."
        )
    raise ValueError(
        f"FullyShardedDataParallelPlugin: {field}={name.upper()} is an option of FSDP1. Use "
        f"{_STRATEGIES[name]}"
    )


def enum_text(value: object) -> str:
    """Return the name of an enum member, or a text, in lower case."""
    return str(getattr(value, "name", value)).lower()
