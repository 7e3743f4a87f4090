"""What Accelerate's plugin says, in the words of the settings."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch

from accel_runtime.env import Number
from accel_runtime.parallel import first_version

__all__ = ["ignored", "offload", "policy", "reshard", "switch", "wrap"]

_NUMBERS: dict[torch.dtype, Number] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}
_TRUE, _FALSE = ("true", "yes", "1"), ("false", "no", "0")
_NAME = re.compile(r"[\w*-]+(\.[\w*-]+)*")


def wrap(policy: object, names: Sequence[str] | str | None, size: int | None) -> str | None:
    """Which modules are gathered by themselves; None where nothing is said.

    Raises:
        ValueError: A policy that cannot be put into words, or options that contradict each other.
    """
    classes = _classes(names)
    if callable(policy):
        policy, classes, size = _of_torch(policy, classes, size)
    kind = None if policy is None else first_version.text(policy)
    if kind not in {None, "transformer_based_wrap", "size_based_wrap", "no_wrap"}:
        raise _refused(
            f"auto_wrap_policy must be transformer_based_wrap, size_based_wrap or no_wrap; it is {policy!r}"
        )
    if size is not None and (type(size) is not int or size < 0):
        raise _refused(f"min_num_params must be a whole number; it is {size!r}")
    by_name, by_size = bool(classes), bool(size)
    if by_name and by_size:
        raise _refused(
            "transformer_cls_names_to_wrap and min_num_params are two ways to say one thing; keep one"
        )
    if (by_name and kind in {"size_based_wrap", "no_wrap"}) or (
        by_size and kind in {"transformer_based_wrap", "no_wrap"}
    ):
        other = "transformer_cls_names_to_wrap" if by_name else "min_num_params"
        raise _refused(f"auto_wrap_policy {kind} has no use for {other}; leave one of them out")
    if kind == "size_based_wrap" and not by_size:
        raise _refused("auto_wrap_policy size_based_wrap needs min_num_params above 0")
    if by_name or by_size:
        return ",".join(classes) or str(size)
    return {None: None, "transformer_based_wrap": "auto"}.get(kind, "none")


def reshard(value: object) -> bool | int | None:
    """Whether gathered parameters go after the forward pass.

    Raises:
        ValueError: Neither a switch, nor a number, nor a strategy that says the same as True.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if value > 1:
            return value
        raise _refused(f"reshard_after_forward must be True, False or a number above 1; it is {value}")
    name = first_version.text(value)
    if name in {"true", "yes"} | {"false", "no"}:
        return name in {"true", "yes"}
    first_version.strategy("reshard_after_forward", value)
    return True


def switch(name: str, value: object) -> bool | None:
    """A switch, be it text.

    Raises:
        ValueError: Something else.
    """
    if value is None or isinstance(value, bool):
        return value
    if str(value).lower() in _TRUE + _FALSE:
        return str(value).lower() in _TRUE
    raise _refused(f"{name} must be True or False; it is {value!r}")


def offload(value: Any) -> bool | None:
    """Whether shards stay in host memory.

    Raises:
        ValueError: An object of FSDP's first version, or memory that is not pinned.
    """
    if value is None or isinstance(value, bool | str):
        return switch("cpu_offload", value)
    from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, OffloadPolicy  # noqa: PLC0415 - slow to import

    if isinstance(value, CPUOffload) and value.offload_params:
        raise _refused(f"cpu_offload={value!r} is of FSDP's first version; say cpu_offload=True")
    if isinstance(value, CPUOffloadPolicy) and not value.pin_memory:
        raise _refused("host memory is pinned where the device can use it; say cpu_offload=True")
    if isinstance(value, OffloadPolicy | CPUOffload):
        return isinstance(value, CPUOffloadPolicy)
    raise _refused(f"cpu_offload must be True, False or an OffloadPolicy of torch; it is {value!r}")


def ignored(value: object) -> tuple[str, ...] | None:
    """Names of what stays whole.

    Raises:
        ValueError: Modules themselves, or a regular expression that says more than a name with `*`.
    """
    if value is None:
        return None
    names = value.split(",") if isinstance(value, str) else list(value)  # type: ignore[call-overload]
    if not all(isinstance(name, str) for name in names):
        raise _refused(
            "ignored_modules takes names as in named_modules(), in which * stands for any text without a dot: the model is "
            "not known here. It holds modules"
        )
    found = tuple(name.strip() for name in names if name.strip())
    if odd := [name for name in found if not _NAME.fullmatch(name)]:
        raise _refused(
            f"ignored_modules takes names in which * stands for any text without a dot, like layers.*.norm; it holds {odd[0]!r}"
        )
    return found


def policy(value: Any) -> dict[str, Any]:
    """The number formats; what is not said is not in it.

    Raises:
        ValueError: A format that parameters cannot have, an unknown key, or an object of FSDP's first version.
    """
    if value is None:
        return {}
    if isinstance(value, str | torch.dtype):
        number = _number("mixed_precision_policy", value)
        return {"param_dtype": number, "reduce_dtype": number, "output_dtype": number}
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy  # noqa: PLC0415 - slow to import

    if isinstance(value, MixedPrecision):
        raise _refused(
            "mixed_precision_policy is a MixedPrecision, which is of FSDP's first version; say "
            "MixedPrecisionPolicy(param_dtype=..., reduce_dtype=...). Buffers keep their own dtype"
        )
    if isinstance(value, MixedPrecisionPolicy):
        value = {f.name: getattr(value, f.name) for f in fields(value)}
    if not isinstance(value, Mapping):
        raise _refused(
            f"mixed_precision_policy must be a MixedPrecisionPolicy, a dict or text; it is {value!r}"
        )
    return _from_mapping(value)


def _from_mapping(value: Mapping[str, Any]) -> dict[str, Any]:
    known = ["param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs"]
    if unknown := [key for key in value if key not in known]:
        raise _refused(
            f"mixed_precision_policy has {unknown[0]!r}; fully_shard knows {', '.join(known)}"
            + ("; buffers keep their own dtype" if unknown[0] == "buffer_dtype" else "")
        )
    found: dict[str, Any] = {key: _number(key, value[key]) for key in known[:3] if value.get(key) is not None}
    if "reduce_dtype" not in found and "param_dtype" in found:
        # What torch makes of it; ours without a policy is fp32.
        found["reduce_dtype"] = found["param_dtype"]
    if value.get("cast_forward_inputs") is not None:
        found["cast_forward_inputs"] = switch("cast_forward_inputs", value["cast_forward_inputs"])
    return found


def _number(key: str, value: object) -> Number:
    if isinstance(value, str):
        name = value.removeprefix("torch.").lower()
        names = {number: dtype for dtype, number in _NUMBERS.items()}
        value = names.get(name, getattr(torch, name, value))  # type: ignore[call-overload]
    if isinstance(value, torch.dtype) and value in _NUMBERS:
        return _NUMBERS[value]
    raise _refused(
        f"{key} must be one of {', '.join(_NUMBERS.values())} or their torch.dtype; it is {value!r}"
    )


def _classes(names: Sequence[str] | str | None) -> list[str]:
    given: Iterable[str] = names.split(",") if isinstance(names, str) else names or []
    return [name.strip() for name in given if name.strip()]


def _of_torch(policy: Any, classes: list[str], size: int | None) -> tuple[str, list[str], int | None]:
    """The words for a policy of torch."""
    from torch.distributed.fsdp import wrap as known  # noqa: PLC0415 - slow to import

    given = policy.keywords if isinstance(policy, functools.partial) else {}
    bare = policy.func if isinstance(policy, functools.partial) else policy
    if isinstance(policy, known.ModuleWrapPolicy):
        kinds = policy._module_classes  # noqa: SLF001 - it has no public name
        return "transformer_based_wrap", sorted(kind.__name__ for kind in kinds), size
    if bare is known.transformer_auto_wrap_policy:
        kinds = given.get("transformer_layer_cls", ())
        return "transformer_based_wrap", sorted(kind.__name__ for kind in kinds) or classes, size
    if bare is known.size_based_auto_wrap_policy and set(given) <= {"min_num_params"}:
        return "size_based_wrap", classes, given.get("min_num_params", size or int(1e8))
    raise _refused(
        f"auto_wrap_policy {policy!r} is a function; name the classes instead: "
        "auto_wrap_policy='transformer_based_wrap', transformer_cls_names_to_wrap=['Block']"
    )


def _refused(text: str) -> ValueError:
    return ValueError(f"FullyShardedDataParallelPlugin: {text}")
