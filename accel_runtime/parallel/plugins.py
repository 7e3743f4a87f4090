"""Sharding and parallelism options of a script, named as in Accelerate."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import override

from accel_runtime.environment.accelerate import sharding
from accel_runtime.environment.settings import FullyShard, Number, Parallel, Settings
from accel_runtime.foundation.options import Configuration

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "DTYPE_NAMES",
    "FullyShardedDataParallelPlugin",
    "ParallelismConfig",
    "TorchContextParallelConfig",
    "TorchTensorParallelConfig",
    "build_parallelism_config",
    "build_plugin",
    "merge_settings",
]

DTYPE_NAMES: dict[torch.dtype, Number] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}
_SWITCHES = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_MODULE_NAME = re.compile(r"[\w*-]+(\.[\w*-]+)*")


@dataclass
class TorchContextParallelConfig(Configuration):
    """Options for the exchange of keys and values between context parallel ranks.

    Raises:
        ValueError: The strategy is not `allgather`.
    """

    cp_comm_strategy: str | None = None

    @override
    def _check(self) -> None:
        if self.cp_comm_strategy not in {None, "allgather"}:
            raise ValueError(
                f"Invalid TorchContextParallelConfig.cp_comm_strategy {self.cp_comm_strategy!r}: expected 'allgather'."
            )


@dataclass
class TorchTensorParallelConfig(Configuration):
    """Tensor parallelism of torch.

    Raises:
        ValueError: `enable_async_tp` is set, which is not supported.
    """

    enable_async_tp: bool = False

    @override
    def _check(self) -> None:
        if self.enable_async_tp:
            raise ValueError("TorchTensorParallelConfig: enable_async_tp is not supported. Remove it.")


_COMBINED = {
    "dp": ("dp_replicate", "dp_shard"),
    "dp_shard_cp": ("dp_shard", "cp", "sp"),
    "dp_cp": ("dp_replicate", "dp_shard", "cp", "sp"),
}
"""Dimensions of a mesh that are combinations of others."""


@dataclass
class ParallelismConfig(Configuration):
    """The sizes of the dimensions of parallelism, for `Accelerator(parallelism_config=...)`.

    A size of None is taken from the profile. `cp_size` shards sequences and gathers keys for attention; `sp_size` shards them and
    exchanges heads.

    Raises:
        ValueError: A size is below 1, both shard sequences, a backend is not torch's, or a setting belongs to DeepSpeed.
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | Literal["auto"] | None = None
    """`auto` uses all processes that the other sizes leave."""
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: str | None = None
    sp_size: int | None = None
    sp_backend: str | None = None
    tp_handler: TorchTensorParallelConfig | None = None
    cp_handler: TorchContextParallelConfig | None = None
    sp_handler: Any = None
    tp_plan: Mapping[str, str] | Sequence[tuple[str, str]] | None = None
    """Names of modules, in which `*` matches any text without a dot, and the style of each; None uses the plan of the profile,
        else of the model.
    """

    @override
    def _check(self) -> None:
        for name in ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size"):
            size, may_be_auto = getattr(self, name), name == "dp_shard_size"
            is_size = size is None or (type(size) is int and size > 0) or (may_be_auto and size == "auto")
            if not is_size:
                or_auto = ", or auto" if may_be_auto else ""
                raise ValueError(
                    f"Invalid ParallelismConfig.{name} {size!r}: expected a whole number above 0{or_auto}."
                )
        _check_value("cp_backend", self.cp_backend, "torch")
        if self.sp_backend != "deepspeed":
            _check_value("sp_backend", self.sp_backend, "torch")
        if self.sp_handler is not None or (self.sp_backend == "deepspeed" and self.sp_enabled):
            raise ValueError(
                "ParallelismConfig: sp_handler and sp_backend='deepspeed' are not supported: they are for the sequence parallelism "
                "of DeepSpeed, whose loader splits sequences. Remove them, keep sp_size, and train inside of "
                "accelerator.maybe_context_parallel."
            )
        _check_type("tp_handler", self.tp_handler, TorchTensorParallelConfig)
        _check_type("cp_handler", self.cp_handler, TorchContextParallelConfig)

    def parallel(self, otherwise: Parallel | None = None) -> Parallel:
        """Return the options as settings; None uses those of `otherwise`."""
        plan = self.tp_plan.items() if isinstance(self.tp_plan, Mapping) else self.tp_plan
        sizes = {
            size.profile_key.removeprefix("parallel."): getattr(self, size.argument)
            for size in sharding.MESH_SIZES
        } | {"sp": self.sp_size}
        styles = None if plan is None else tuple((name, style) for name, style in plan)
        return replace(otherwise or Parallel(), **_drop_none({**sizes, "tp_plan": styles}))

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """Return a device mesh with a dimension for each size above 1; collective.

        Its dimensions are among `dp_replicate`, `dp_shard`, `cp`, `sp` and `tp`, and their combinations `dp`, `dp_shard_cp` and
        `dp_cp`. An `Accelerator` does not need it: `accelerator.torch_device_mesh` is its own mesh.

        Args:
            device_type: `cuda`, `cpu`, ...

        Returns:
            The mesh; None if all sizes are 1.

        Raises:
            ValueError: `dp_shard_size` is `auto`, and processes are not connected, or the sizes do not divide their number.
        """
        from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415 - its import is slow

        sizes = {
            "dp_replicate": self.dp_replicate_size or 1,
            "dp_shard": self.dp_shard_size or 1,
            "cp": self.cp_size or 1,
            "sp": self.sp_size or 1,
            "tp": self.tp_size or 1,
        }
        if sizes["dp_shard"] == "auto":
            if not dist.is_initialized():
                raise ValueError(
                    "ParallelismConfig.build_device_mesh() failed: dp_shard_size='auto' is known once processes are connected. Read "
                    "accelerator.torch_device_mesh."
                )
            world_size = dist.get_world_size()
            others = math.prod(size for size in sizes.values() if isinstance(size, int))
            if world_size % others:
                raise ValueError(
                    f"ParallelismConfig.build_device_mesh() failed: {world_size} processes are not a multiple of {others}, the product "
                    "of the other sizes. Change the sizes."
                )
            sizes["dp_shard"] = world_size // others
        dims = {name: size for name, size in sizes.items() if isinstance(size, int) and size > 1}
        if not dims:
            return None
        mesh = init_device_mesh(device_type, tuple(dims.values()), mesh_dim_names=tuple(dims))
        for name, parts in _COMBINED.items():
            if present := tuple(part for part in parts if part in dims):
                mesh[present]._flatten(name)  # noqa: SLF001 - torch has no public function for it
        return mesh

    @property
    def dp_replicate_enabled(self) -> bool:
        """Return True if there are several replicas of a model."""
        return self.dp_replicate_size not in {None, 1}

    @property
    def dp_shard_enabled(self) -> bool:
        """Return True if parameters are sharded over several processes."""
        return self.dp_shard_size not in {None, 1}

    @property
    def tp_enabled(self) -> bool:
        """Return True if layers are sharded."""
        return self.tp_size not in {None, 1}

    @property
    def cp_enabled(self) -> bool:
        """Return True if sequences are sharded, and attention gathers keys."""
        return self.cp_size not in {None, 1}

    @property
    def sp_enabled(self) -> bool:
        """Return True if sequences are sharded, and attention exchanges heads."""
        return self.sp_size not in {None, 1}

    @property
    def data_parallel_size(self) -> int:
        """Return the product of the sizes of data parallelism; see `total_size`."""
        if self.dp_shard_size == "auto":
            raise ValueError(
                "ParallelismConfig: dp_shard_size='auto' is known once processes are connected. Read the sizes of "
                "accelerator.parallelism_config."
            )
        return (self.dp_replicate_size or 1) * (self.dp_shard_size or 1)

    @property
    def non_data_parallel_size(self) -> int:
        """Return the number of processes that compute the same batch."""
        return (self.tp_size or 1) * (self.cp_size or 1) * (self.sp_size or 1)

    @property
    def total_size(self) -> int:
        """Return the number of processes; a size of None counts as 1 and is set in `Accelerator.parallelism_config`."""
        return self.data_parallel_size * self.non_data_parallel_size


@dataclass
class FullyShardedDataParallelPlugin(Configuration):
    """Options for sharding models, for `Accelerator(fsdp_plugin=...)`.

    An option of None is taken from the profile. Options of FSDP1 are accepted if their value is the behavior of
    `fully_shard`.

    Raises:
        ValueError: An option would have no effect, or two contradict each other.
    """

    fsdp_version: int | None = None
    sharding_strategy: Any = None
    reshard_after_forward: bool | int | str | None = None
    """Reshard parameters after the forward pass; a number shards over so many processes until the backward pass."""
    backward_prefetch: Any = None
    mixed_precision_policy: Any = None
    """A `MixedPrecisionPolicy` of torch, a dict with its fields, or bf16, fp16 or fp32 for all of them. A `param_dtype` or
        an `output_dtype` of None uses `mixed_precision`.
    """
    auto_wrap_policy: Callable[..., Any] | str | None = None
    """`transformer_based_wrap`, `size_based_wrap` or `no_wrap`, or torch's policies with these names."""
    cpu_offload: Any = None
    """A switch, or an `OffloadPolicy` of torch."""
    ignored_modules: Iterable[nn.Module] | Iterable[str] | str | None = None
    """Names of modules or parameters that are not sharded, in which `*` matches any text without a dot."""
    state_dict_type: Any = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = None
    param_init_fn: Callable[[nn.Module], None] | None = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool | None = None
    """Recompute the activations of wrapped modules in the backward pass."""
    activation_checkpointing_offload: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: Sequence[str] | str | None = None
    """Classes of modules whose parameters are gathered together."""
    min_num_params: int | None = None
    """The smallest number of parameters of a wrapped module."""

    @override
    def _check_switches(self) -> None:
        """Leave switches to `fully_shard`, which reads texts too: config files of Accelerate have them."""

    @override
    def _check(self) -> None:
        for setting in sharding.FSDP.settings:
            name = setting.argument
            value = None if setting.same is None else getattr(self, name)
            if value is not None and _enum_text(value) not in setting.same_texts:
                raise _build_error(f"{name}={value!r}: {setting.instead}")
        if self.sharding_strategy is not None:
            _check_strategy("sharding_strategy", self.sharding_strategy)
            if self.reshard_after_forward not in {None, True}:
                raise _build_error(
                    "sharding_strategy FULL_SHARD conflicts with "
                    f"reshard_after_forward={self.reshard_after_forward!r}. Remove sharding_strategy."
                )
        object.__setattr__(self, "fsdp_version", 2)  # an assignment would be checked again
        if isinstance(self.ignored_modules, Iterator):
            object.__setattr__(self, "ignored_modules", list(self.ignored_modules))
        self.fully_shard()

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Set `state_dict_type`, if given.

        Raises:
            ValueError: The type is not that of accel's checkpoints.
        """
        if state_dict_type is not None:
            self.state_dict_type = state_dict_type

    def fully_shard(self, otherwise: FullyShard | None = None) -> FullyShard:
        """Return the options as settings; None uses those of `otherwise`."""
        options = {
            "wrap": _parse_wrap_policy(
                self.auto_wrap_policy, self.transformer_cls_names_to_wrap, self.min_num_params
            ),
            "reshard_after_forward": _parse_reshard(self.reshard_after_forward),
            "cpu_offload": _parse_offload(self.cpu_offload),
            "activation_checkpointing": _parse_switch(
                "activation_checkpointing", self.activation_checkpointing
            ),
            "ignore": _parse_ignored(self.ignored_modules),
            **_parse_mixed_precision(self.mixed_precision_policy),
        }
        return replace(otherwise or FullyShard(), **_drop_none(options))


def merge_settings(
    settings: Settings,
    parallelism_config: ParallelismConfig | None,
    fsdp_plugin: FullyShardedDataParallelPlugin | None,
) -> Settings:
    """Return the settings of a run, updated by the options of the script.

    A plugin without a number of shards uses all processes that other dimensions leave.
    """
    _check_type("parallelism_config", parallelism_config, ParallelismConfig, "Accelerator")
    _check_type("fsdp_plugin", fsdp_plugin, FullyShardedDataParallelPlugin, "Accelerator")
    parallel, sharding = settings.parallel, settings.fully_shard
    if parallelism_config is not None:
        parallel = parallelism_config.parallel(parallel)
    if fsdp_plugin is not None:
        sharding = fsdp_plugin.fully_shard(sharding)
        if not parallel.shards:
            if parallelism_config is not None and parallelism_config.dp_shard_size == 1:
                raise ValueError(
                    "fsdp_plugin conflicts with parallelism_config(dp_shard_size=1). Remove dp_shard_size to shard over all remaining "
                    "processes."
                )
            parallel = replace(parallel, dp_shard="auto")
    return replace(settings, parallel=parallel, fully_shard=sharding)


def build_parallelism_config(parallel: Parallel, world_size: int) -> ParallelismConfig:
    """Return the settings of a run as a configuration in which every size is a number."""
    grid = parallel.build_grid(world_size)
    cp, tp = parallel.cp, grid.size("tensor")
    return ParallelismConfig(
        dp_replicate_size=grid.size("data"),
        dp_shard_size=grid.size("shard"),
        tp_size=tp,
        cp_size=cp,
        cp_backend="torch",
        sp_size=parallel.sp,
        sp_backend="torch" if parallel.sp > 1 else "deepspeed",
        tp_handler=TorchTensorParallelConfig() if tp > 1 else None,
        cp_handler=TorchContextParallelConfig("allgather") if cp > 1 else None,
        tp_plan=parallel.tp_plan or None,
    )


def build_plugin(options: FullyShard) -> FullyShardedDataParallelPlugin:
    """Return the settings of `fully_shard` as a plugin."""
    if options.wrap in {"auto", "none"}:
        policy, names, size = {"auto": "transformer_based_wrap", "none": "no_wrap"}[options.wrap], None, None
    elif options.wrap.isdigit():
        policy, names, size = "size_based_wrap", None, int(options.wrap)
    else:
        policy, names, size = "transformer_based_wrap", options.wrap.split(","), None
    dtypes = {
        "param_dtype": options.param_dtype,
        "reduce_dtype": "fp32" if options.reduce_dtype == "auto" else options.reduce_dtype,
        "output_dtype": options.output_dtype,
    }
    policy_fields = {name: number for name, number in dtypes.items() if number != "auto"}
    return FullyShardedDataParallelPlugin(
        reshard_after_forward=options.reshard_after_forward,
        mixed_precision_policy=policy_fields | {"cast_forward_inputs": options.cast_forward_inputs},
        auto_wrap_policy=policy,
        cpu_offload=options.cpu_offload,
        ignored_modules=list(options.ignore),
        activation_checkpointing=options.activation_checkpointing,
        transformer_cls_names_to_wrap=names,
        min_num_params=size,
    )


def _drop_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _check_value(name: str, value: str | None, expected: str) -> None:
    if value not in {None, expected}:
        raise ValueError(f"Invalid ParallelismConfig.{name} {value!r}: expected {expected!r}.")


def _check_type(name: str, value: object, expected: type[Any], owner: str = "ParallelismConfig") -> None:
    if value is not None and not isinstance(value, expected):
        raise TypeError(f"Invalid {owner}.{name} {value!r}: expected a {expected.__name__}.")


def _parse_wrap_policy(policy: object, names: Sequence[str] | str | None, size: int | None) -> str | None:
    """Return the setting `wrap`, or None if no option is given."""
    classes = _split_names(names)
    if callable(policy):
        policy, classes, size = _from_torch_policy(policy, classes, size)
    kind = None if policy is None else _enum_text(policy)
    if kind is not None and kind not in sharding.WRAP_POLICIES:
        raise _build_value_error("auto_wrap_policy", policy, f"one of {', '.join(sharding.WRAP_POLICIES)}")
    if size is not None and (type(size) is not int or size < 0):
        raise _build_value_error("min_num_params", size, "a whole number")
    if classes and size:
        raise _build_error("transformer_cls_names_to_wrap and min_num_params exclude each other. Remove one.")
    if classes or size:
        setting = sharding.TRANSFORMER_CLS if classes else sharding.MIN_NUM_PARAMS
        if kind is not None and sharding.WRAP_POLICIES[kind] is not setting:
            raise _build_error(
                f"auto_wrap_policy {kind} does not use {setting.argument}. Remove one of them."
            )
        return ",".join(classes) or str(size)
    if kind == "size_based_wrap":
        raise _build_error("auto_wrap_policy size_based_wrap needs min_num_params above 0. Set it.")
    return {None: None, "transformer_based_wrap": "auto", "no_wrap": "none"}[kind]


def _from_torch_policy(
    policy: Any, classes: list[str], size: int | None
) -> tuple[str, list[str], int | None]:
    """Return the options for a policy of torch."""
    from torch.distributed.fsdp import wrap as torch_wrap  # noqa: PLC0415 - slow to import

    keywords = policy.keywords if isinstance(policy, functools.partial) else {}
    function = policy.func if isinstance(policy, functools.partial) else policy
    is_module_policy = isinstance(policy, torch_wrap.ModuleWrapPolicy)
    if is_module_policy or function is torch_wrap.transformer_auto_wrap_policy:
        # The classes of a ModuleWrapPolicy have no public name.
        layers = policy._module_classes if is_module_policy else keywords.get("transformer_layer_cls", ())  # noqa: SLF001
        return "transformer_based_wrap", sorted(layer.__name__ for layer in layers) or classes, size
    if function is torch_wrap.size_based_auto_wrap_policy and set(keywords) <= {"min_num_params"}:
        return (
            "size_based_wrap",
            classes,
            keywords.get("min_num_params", size or sharding.DEFAULT_MIN_NUM_PARAMS),
        )
    raise _build_error(
        f"auto_wrap_policy {policy!r} is a custom function. Name the classes instead: "
        "auto_wrap_policy='transformer_based_wrap', transformer_cls_names_to_wrap=['Block']."
    )


def _parse_reshard(value: object) -> bool | int | None:
    """Return the setting `reshard_after_forward`."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if value > 1:
            return value
        raise _build_value_error("reshard_after_forward", value, "True, False or a number above 1")
    if (switch := _SWITCHES.get(_enum_text(value))) is not None:
        return switch
    _check_strategy("reshard_after_forward", value)
    return True


def _parse_switch(name: str, value: object) -> bool | None:
    """Return a boolean, also from text."""
    if value is None or isinstance(value, bool):
        return value
    if (switch := _SWITCHES.get(str(value).lower())) is None:
        raise _build_value_error(name, value, "True or False")
    return switch


def _parse_offload(value: Any) -> bool | None:
    """Return the setting `cpu_offload`."""
    if value is None or isinstance(value, bool | str):
        return _parse_switch("cpu_offload", value)
    from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, OffloadPolicy  # noqa: PLC0415 - slow to import

    if isinstance(value, CPUOffload) and value.offload_params:
        raise _build_error(f"cpu_offload={value!r} is an option of FSDP1. Pass cpu_offload=True.")
    if isinstance(value, CPUOffloadPolicy) and not value.pin_memory:
        raise _build_error(
            "pin_memory=False is not supported: memory is pinned if the device can use it. Pass cpu_offload=True."
        )
    if isinstance(value, OffloadPolicy | CPUOffload):
        return isinstance(value, CPUOffloadPolicy)
    raise _build_value_error("cpu_offload", value, "True, False or an OffloadPolicy of torch")


def _parse_ignored(value: Any) -> tuple[str, ...] | None:
    """Return names of modules that are not sharded."""
    if value is None:
        return None
    if not isinstance(value, str) and not all(isinstance(name, str) for name in value):
        raise _build_error(
            "ignored_modules contains modules, but the model is unknown here. Pass names as in named_modules(), in which * matches "
            "any text without a dot."
        )
    patterns = tuple(_split_names(value))
    if invalid := [name for name in patterns if not _MODULE_NAME.fullmatch(name)]:
        raise _build_value_error(
            "ignored_modules",
            invalid[0],
            "a name, in which * matches any text without a dot, as in layers.*.norm",
        )
    return patterns


def _parse_mixed_precision(value: Any) -> dict[str, Any]:
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
        raise _build_value_error("mixed_precision_policy", value, "a MixedPrecisionPolicy, a dict or text")
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
        options["cast_forward_inputs"] = _parse_switch("cast_forward_inputs", value["cast_forward_inputs"])
    return options


def _parse_dtype(key: str, value: object) -> Number:
    dtype: Any = value
    if isinstance(value, str):
        name = value.removeprefix("torch.").lower()
        names = {number: each for each, number in DTYPE_NAMES.items()}
        dtype = names.get(name, getattr(torch, name, None))  # type: ignore[call-overload]
    if isinstance(dtype, torch.dtype) and dtype in DTYPE_NAMES:
        return DTYPE_NAMES[dtype]
    raise _build_value_error(key, value, f"one of {', '.join(DTYPE_NAMES.values())}, or their torch.dtype")


def _check_strategy(field: str, value: object) -> None:
    """Raise ValueError for a sharding strategy other than FULL_SHARD; the message names the replacement."""
    strategy = sharding.find_strategy(_enum_text(value))
    if strategy is None:
        names = ", ".join(known.name for known in sharding.STRATEGIES)
        raise _build_value_error(field, value, f"one of {names}")
    if strategy.instead:
        raise _build_error(f"{field}={strategy.name.upper()} is an option of FSDP1. Use {strategy.instead}.")


def _build_value_error(name: str, value: object, expected: str) -> ValueError:
    return ValueError(f"Invalid FullyShardedDataParallelPlugin.{name} {value!r}: expected {expected}.")


def _build_error(text: str) -> ValueError:
    return ValueError(f"FullyShardedDataParallelPlugin: {text}")


def _enum_text(value: object) -> str:
    """Return the name of an enum member, or a text, in lower case."""
    return str(getattr(value, "name", value)).lower()


def _split_names(names: Iterable[str] | str | None) -> list[str]:
    items = names.split(",") if isinstance(names, str) else names or ()
    return [name.strip() for name in items if name.strip()]
