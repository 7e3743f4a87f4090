"""deepspeed's configuration of an engine: what the user chose, `auto` values by the model, and what accel sets itself."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from accel_runtime.environment.settings import MixedPrecision
from accel_runtime.extensions.deepspeed.settings import AUTO, DeepSpeedConfig, find_value

__all__ = ["build_configuration", "check_batch_sizes", "describe_configuration"]

_PASSED = (
    "zero_optimization", "communication_data_type", "data_types", "aio", "prescale_gradients", "gradient_predivide_factor",
    "dump_state", "disable_python_gc", "log_level", "vocabulary_size",
)  # fmt: skip
"""Keys that deepspeed's engine uses; the others are accel's to honour."""
_OF_CHECKPOINTS = ("elastic_checkpoint", "load_from_fp32_weights")
"""Keys of ZeRO about deepspeed's own checkpoints. Those of accel load on any world size, with master weights."""
_REDUCES_ONCE = 1
"""The stage whose gradients are reduced once, at the end of a cycle: there is no backward pass left to overlap."""


def build_configuration(
    config: DeepSpeedConfig, model: nn.Module, mixed_precision: MixedPrecision
) -> dict[str, Any]:
    """Return the configuration of the engine of a model.

    Accumulation, clipping, schedules and the loss scale are accel's: deepspeed gets micro-batches of one sample, cycles of one
    pass, and no clipping, whose default is a norm of 1.

    Args:
        config: The configuration of the profile and its JSON file.
        model: The model.
        mixed_precision: The number format of the run.

    Raises:
        ValueError: Gradients of stage 1 cannot be accumulated as the configuration says.
    """
    values: dict[str, Any] = json.loads(
        json.dumps({k: config.values[k] for k in _PASSED if k in config.values})
    )
    zero = values.setdefault("zero_optimization", {})
    zero["stage"] = config.stage
    _fill_sizes(zero, model)
    for key in _OF_CHECKPOINTS:
        zero.pop(key, None)
    has_half = mixed_precision != "no"
    if config.stage == _REDUCES_ONCE:
        zero["overlap_comm"] = False
        accumulated = config.get("data_types.grad_accum_dtype", mixed_precision)
        if has_half and accumulated != mixed_precision:
            raise ValueError(
                f"data_types.grad_accum_dtype is {accumulated} in {config.sources['data_types.grad_accum_dtype']}, and ZeRO stage 1 "
                f"accumulates gradients in the number format of the parameters, {mixed_precision}. Use stage 2, or remove it."
            )
    values |= {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "steps_per_print": None,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {
            "enabled": mixed_precision == "bf16",
            "check_grad_overflow": config.get("bf16.check_grad_overflow", default=True),
        },
        "fp16": {"enabled": mixed_precision == "fp16", "loss_scale": 1.0},
    }
    if has_half and config.stage > 1 and find_value(values, "data_types.grad_accum_dtype") is None:
        values.setdefault("data_types", {})["grad_accum_dtype"] = "fp32"
    return _remove_auto(values)


def check_batch_sizes(
    config: DeepSpeedConfig,
    batch_sizes: Sequence[int],
    step_sizes: Sequence[int],
    filled: dict[str, Any],
) -> None:
    """Raise ValueError if no loader has the batch size of a configuration.

    Args:
        config: The configuration of the profile and its JSON file.
        batch_sizes: Samples of one process in a micro-batch, of each loader.
        step_sizes: Samples of all processes in an optimizer step, of each loader.
        filled: Receives the values of what is `auto`, by path.
    """
    for path, unsorted, unit in (
        ("train_micro_batch_size_per_gpu", batch_sizes, "samples a process in a micro-batch"),
        ("train_batch_size", step_sizes, "samples of all processes in an optimizer step"),
    ):
        wanted, sizes = config.get(path), sorted(set(unsorted))
        if wanted is None and sizes:
            filled[path] = " or ".join(map(str, sizes))
        if wanted is None or wanted in sizes or not sizes:
            continue
        raise ValueError(
            f"{path} is {wanted} in {config.sources.get(path, 'the configuration')}, and the loaders have "
            f"{' or '.join(map(str, sizes))} {unit}. Set it to auto, or use a loader with that batch size."
        )


def describe_configuration(
    config: DeepSpeedConfig, configured: Mapping[str, Any], filled: Mapping[str, Any]
) -> dict[str, tuple[Any, str]]:
    """Return each value of a configuration with its source, by path.

    Args:
        config: The configuration of the profile and its JSON file.
        configured: The result of `build_configuration` for the newest model; empty before.
        filled: Values of what is `auto`, by path.
    """
    facts: dict[str, tuple[Any, str]] = {}
    for path, source in config.sources.items():
        value = find_value(config.values, path)
        if value == AUTO:
            known = (
                find_value(configured, path) if path.startswith("zero_optimization.") else filled.get(path)
            )
            reason = "deepspeed's default" if known is None else "filled in"
            value, source = (AUTO if known is None else known), f"auto in {source}: {reason}"  # noqa: PLW2901
        if path == "zero_optimization.overlap_comm" and config.stage == _REDUCES_ONCE and value:
            reason = "stage 1 reduces gradients once, when they are complete"
            value, source = False, f"{value} in {source}: {reason}"  # noqa: PLW2901
        facts[path] = (value, source)
    return facts


def _fill_sizes(zero: dict[str, Any], model: nn.Module) -> None:
    """Fill in bucket sizes that are `auto` by the width of the model, with the factors of Accelerate and transformers."""
    widths = [getattr(getattr(module, "config", None), "hidden_size", None) for module in model.modules()]
    sizes = [width for width in widths if isinstance(width, int)]
    if not sizes:
        return
    width = max(sizes)
    fills = {
        "reduce_bucket_size": width * width,
        "stage3_prefetch_bucket_size": int(0.9 * width * width),
        "stage3_param_persistence_threshold": 10 * width,
    }
    zero |= {key: value for key, value in fills.items() if zero.get(key) == AUTO}


def _remove_auto(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without `auto`: deepspeed uses its defaults."""
    return {
        key: _remove_auto(value) if isinstance(value, Mapping) else value
        for key, value in values.items()
        if value != AUTO
    }
