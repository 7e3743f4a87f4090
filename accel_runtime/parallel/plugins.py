"""Sharding and parallelism options of a script, named as in Accelerate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn
from typing_extensions import override

from accel_runtime.env import FullyShard, Parallel, Settings
from accel_runtime.options import Configuration
from accel_runtime.parallel.fsdp1_options import (
    FSDP1_OPTIONS,
    check_strategy,
    enum_text,
    parse_ignored,
    parse_mixed_precision,
    parse_offload,
    parse_reshard,
    parse_switch,
    parse_wrap_policy,
)

__all__ = [
    "FullyShardedDataParallelPlugin",
    "ParallelismConfig",
    "TorchContextParallelConfig",
    "TorchTensorParallelConfig",
    "build_parallelism_config",
    "build_plugin",
    "merge_settings",
]


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
                f"TorchContextParallelConfig: invalid cp_comm_strategy {self.cp_comm_strategy!r}: only 'allgather' is supported."
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


@dataclass
class ParallelismConfig(Configuration):
    """The sizes of the dimensions of parallelism, for `Accelerator(parallelism_config=...)`.

    A size of None is taken from the profile. `cp_size` shards sequences; `sp_size` belongs to DeepSpeed.

    Raises:
        ValueError: A size is below 1, a backend is not torch's, or a setting belongs to DeepSpeed.
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
            _check_size(name, getattr(self, name), words=("auto",) if name == "dp_shard_size" else ())
        _check_value("cp_backend", self.cp_backend, "torch")
        _check_value("sp_backend", self.sp_backend, "deepspeed")
        if (self.sp_size or 1) > 1 or self.sp_handler is not None:
            raise ValueError(
                "ParallelismConfig: sp_size and sp_handler need DeepSpeed, which accel does not support. Use cp_size to shard "
                "sequences."
            )
        _check_type("tp_handler", self.tp_handler, TorchTensorParallelConfig)
        _check_type("cp_handler", self.cp_handler, TorchContextParallelConfig)

    def parallel(self, otherwise: Parallel | None = None) -> Parallel:
        """Return the options as settings; None uses those of `otherwise`."""
        plan = self.tp_plan.items() if isinstance(self.tp_plan, Mapping) else self.tp_plan
        options = {
            "dp_replicate": self.dp_replicate_size,
            "dp_shard": self.dp_shard_size,
            "tp": self.tp_size,
            "cp": self.cp_size,
            "tp_plan": None if plan is None else tuple((name, style) for name, style in plan),
        }
        return replace(otherwise or Parallel(), **_drop_none(options))

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
        """Return True if sequences are sharded."""
        return self.cp_size not in {None, 1}

    @property
    def sp_enabled(self) -> bool:
        """Return False: `cp_size` shards sequences."""
        return False

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
        return (self.tp_size or 1) * (self.cp_size or 1)

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
        for name, option in FSDP1_OPTIONS.items():
            value = getattr(self, name)
            if not (value is None or value in option.anyway or enum_text(value) in option.anyway):
                raise ValueError(f"FullyShardedDataParallelPlugin: {name}={value!r}: {option.instead}")
        if self.sharding_strategy is not None:
            check_strategy("sharding_strategy", self.sharding_strategy)
            if self.reshard_after_forward not in {None, True}:
                raise ValueError(
                    "FullyShardedDataParallelPlugin: sharding_strategy FULL_SHARD conflicts with "
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
            "wrap": parse_wrap_policy(
                self.auto_wrap_policy, self.transformer_cls_names_to_wrap, self.min_num_params
            ),
            "reshard_after_forward": parse_reshard(self.reshard_after_forward),
            "cpu_offload": parse_offload(self.cpu_offload),
            "activation_checkpointing": parse_switch(
                "activation_checkpointing", self.activation_checkpointing
            ),
            "ignore": parse_ignored(self.ignored_modules),
            **parse_mixed_precision(self.mixed_precision_policy),
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
    dp_replicate, dp_shard, cp, tp = parallel.sizes(world_size)
    return ParallelismConfig(
        dp_replicate_size=dp_replicate,
        dp_shard_size=dp_shard,
        tp_size=tp,
        cp_size=cp,
        cp_backend="torch",
        sp_size=1,
        sp_backend="deepspeed",
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


def _check_size(name: str, value: object, words: tuple[str, ...]) -> None:
    if value is None or value in words or (type(value) is int and value > 0):
        return
    raise ValueError(
        f"ParallelismConfig: {name} must be a whole number above 0{''.join(f', or {w}' for w in words)}; it is {value!r}"
    )


def _check_value(name: str, value: str | None, expected: str) -> None:
    if value not in {None, expected}:
        raise ValueError(f"ParallelismConfig: {name} must be {expected!r}; it is {value!r}")


def _check_type(name: str, value: object, expected: type[Any], owner: str = "ParallelismConfig") -> None:
    if value is not None and not isinstance(value, expected):
        raise TypeError(f"{owner}: {name} must be a {expected.__name__}; it is {value!r}")
