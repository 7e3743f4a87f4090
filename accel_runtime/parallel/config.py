"""Sharding and parallelism said in code, under the names scripts know from Accelerate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn
from typing_extensions import override

from accel_runtime.configuration import Configuration
from accel_runtime.env import FullyShard, Parallel, Settings
from accel_runtime.parallel import first_version, reading

__all__ = [
    "FullyShardedDataParallelPlugin",
    "ParallelismConfig",
    "TorchContextParallelConfig",
    "TorchTensorParallelConfig",
    "build_parallelism_config",
    "build_plugin",
    "settled",
]


@dataclass
class TorchContextParallelConfig(Configuration):
    """How ranks that divide a sequence exchange keys and values.

    Raises:
        ValueError: Another way than `allgather`.
    """

    cp_comm_strategy: str | None = None

    @override
    def _check(self) -> None:
        if self.cp_comm_strategy not in {None, "allgather"}:
            raise ValueError(
                "TorchContextParallelConfig: keys and values are exchanged by cp_comm_strategy='allgather'; it is "
                f"{self.cp_comm_strategy!r}"
            )


@dataclass
class TorchTensorParallelConfig(Configuration):
    """Tensor parallelism of torch.

    Raises:
        ValueError: `enable_async_tp`, which nothing here would do.
    """

    enable_async_tp: bool = False

    @override
    def _check(self) -> None:
        if self.enable_async_tp:
            raise ValueError("TorchTensorParallelConfig: enable_async_tp is not supported; leave it out")


@dataclass
class ParallelismConfig(Configuration):
    """Into how many parts what is divided, for `Accelerator(parallelism_config=...)`.

    A size that is None is what the profile says. Sequences are divided by `cp_size`; `sp_size` is DeepSpeed's.

    Raises:
        ValueError: A size below 1, another backend than torch's, or a setting of DeepSpeed.
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | Literal["auto"] | None = None
    """`auto` is as many as the other sizes leave."""
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: str | None = None
    sp_size: int | None = None
    sp_backend: str | None = None
    tp_handler: TorchTensorParallelConfig | None = None
    cp_handler: TorchContextParallelConfig | None = None
    sp_handler: Any = None
    tp_plan: Mapping[str, str] | Sequence[tuple[str, str]] | None = None
    """Names of modules, in which `*` stands for any text without a dot, and what each does under tensor parallelism;
    None takes the profile's, else the model's own."""

    @override
    def _check(self) -> None:
        for name in ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size"):
            _check_size(name, getattr(self, name), words=("auto",) if name == "dp_shard_size" else ())
        _one_of("cp_backend", self.cp_backend, "torch")
        _one_of("sp_backend", self.sp_backend, "deepspeed")
        if (self.sp_size or 1) > 1 or self.sp_handler is not None:
            raise ValueError(
                "ParallelismConfig: sp_size and sp_handler are for DeepSpeed, which accel does not use; sequences are "
                "divided by cp_size"
            )
        _instance("tp_handler", self.tp_handler, TorchTensorParallelConfig)
        _instance("cp_handler", self.cp_handler, TorchContextParallelConfig)

    def parallel(self, otherwise: Parallel | None = None) -> Parallel:
        """The same as settings.

        Args:
            otherwise: What holds where this says nothing; None is torch's plain replication.
        """
        plan = self.tp_plan.items() if isinstance(self.tp_plan, Mapping) else self.tp_plan
        said = {
            "dp_replicate": self.dp_replicate_size,
            "dp_shard": self.dp_shard_size,
            "tp": self.tp_size,
            "cp": self.cp_size,
            "tp_plan": None if plan is None else tuple((name, style) for name, style in plan),
        }
        return replace(otherwise or Parallel(), **_only_said(said))

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
        """Return True if layers are divided."""
        return self.tp_size not in {None, 1}

    @property
    def cp_enabled(self) -> bool:
        """Return True if sequences are divided."""
        return self.cp_size not in {None, 1}

    @property
    def sp_enabled(self) -> bool:
        """Return False: sequences are divided by `cp_size`."""
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
        """Return the number of processes; sizes that are None count as 1, and are known in `Accelerator.parallelism_config`."""
        return self.data_parallel_size * self.non_data_parallel_size


@dataclass
class FullyShardedDataParallelPlugin(Configuration):
    """How models are sharded, for `Accelerator(fsdp_plugin=...)`.

    What is None is what the profile says. Options that only FSDP's first version has are accepted where they ask for
    what `fully_shard` does anyway.

    Raises:
        ValueError: An option that would do nothing, with what to say instead; or two that contradict each other.
    """

    fsdp_version: int | None = None
    sharding_strategy: Any = None
    reshard_after_forward: bool | int | str | None = None
    """Whether gathered parameters go after the forward pass; a number shards over so many processes until then."""
    backward_prefetch: Any = None
    mixed_precision_policy: Any = None
    """A `MixedPrecisionPolicy` of torch, a dict with its fields, or bf16, fp16 or fp32 for all of them. A `param_dtype` or
    an `output_dtype` of None is what `mixed_precision` says."""
    auto_wrap_policy: Callable[..., Any] | str | None = None
    """`transformer_based_wrap`, `size_based_wrap` or `no_wrap`, or torch's policies with these names."""
    cpu_offload: Any = None
    """A switch, or an `OffloadPolicy` of torch."""
    ignored_modules: Iterable[nn.Module] | Iterable[str] | str | None = None
    """Names of modules or parameters that stay whole, in which `*` stands for any text without a dot."""
    state_dict_type: Any = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = None
    param_init_fn: Callable[[nn.Module], None] | None = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool | None = None
    """Whether activations of wrapped modules are computed again in the backward pass."""
    activation_checkpointing_offload: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: Sequence[str] | str | None = None
    """Classes of modules whose parameters are gathered together."""
    min_num_params: int | None = None
    """The number of parameters from which a module is gathered by itself."""

    @override
    def _check_switches(self) -> None:
        """Leave switches to `fully_shard`, which reads texts too: config files of Accelerate have them."""

    @override
    def _check(self) -> None:
        for name, word in first_version.WORDS.items():
            value = getattr(self, name)
            if not (value is None or value in word.anyway or first_version.text(value) in word.anyway):
                raise ValueError(f"FullyShardedDataParallelPlugin: {name}={value!r}: {word.instead}")
        if self.sharding_strategy is not None:
            first_version.strategy("sharding_strategy", self.sharding_strategy)
            if self.reshard_after_forward not in {None, True}:
                raise ValueError(
                    "FullyShardedDataParallelPlugin: sharding_strategy FULL_SHARD gathers again in the backward pass, and "
                    f"reshard_after_forward={self.reshard_after_forward!r} does not; leave sharding_strategy out"
                )
        object.__setattr__(self, "fsdp_version", 2)  # an assignment would be checked again
        if isinstance(self.ignored_modules, Iterator):
            object.__setattr__(self, "ignored_modules", list(self.ignored_modules))
        self.fully_shard()

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Set `state_dict_type`, if given.

        Raises:
            ValueError: Another type than that of the checkpoints that are written anyway.
        """
        if state_dict_type is not None:
            self.state_dict_type = state_dict_type

    def fully_shard(self, otherwise: FullyShard | None = None) -> FullyShard:
        """The same as settings.

        Args:
            otherwise: What holds where this says nothing; None is the defaults.
        """
        said = {
            "wrap": reading.wrap(
                self.auto_wrap_policy, self.transformer_cls_names_to_wrap, self.min_num_params
            ),
            "reshard_after_forward": reading.reshard(self.reshard_after_forward),
            "cpu_offload": reading.offload(self.cpu_offload),
            "activation_checkpointing": reading.switch(
                "activation_checkpointing", self.activation_checkpointing
            ),
            "ignore": reading.ignored(self.ignored_modules),
            **reading.policy(self.mixed_precision_policy),
        }
        return replace(otherwise or FullyShard(), **_only_said(said))


def settled(
    settings: Settings,
    parallelism_config: ParallelismConfig | None,
    fsdp_plugin: FullyShardedDataParallelPlugin | None,
) -> Settings:
    """The settings of a run with what the script says of them.

    A plugin where nothing says over how many processes to shard shards over as many as are left.

    Raises:
        TypeError: An object of another kind.
        ValueError: A plugin beside a `dp_shard_size` of 1.
    """
    _instance("parallelism_config", parallelism_config, ParallelismConfig, "Accelerator")
    _instance("fsdp_plugin", fsdp_plugin, FullyShardedDataParallelPlugin, "Accelerator")
    parallel, sharding = settings.parallel, settings.fully_shard
    if parallelism_config is not None:
        parallel = parallelism_config.parallel(parallel)
    if fsdp_plugin is not None:
        sharding = fsdp_plugin.fully_shard(sharding)
        if not parallel.shards:
            if parallelism_config is not None and parallelism_config.dp_shard_size == 1:
                raise ValueError(
                    "fsdp_plugin shards models, and parallelism_config says dp_shard_size=1; leave dp_shard_size out, and "
                    "as many processes as are left share a model"
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
    formats = {
        "param_dtype": options.param_dtype,
        "reduce_dtype": "fp32" if options.reduce_dtype == "auto" else options.reduce_dtype,
        "output_dtype": options.output_dtype,
    }
    numbers = {name: number for name, number in formats.items() if number != "auto"}
    return FullyShardedDataParallelPlugin(
        reshard_after_forward=options.reshard_after_forward,
        mixed_precision_policy=numbers | {"cast_forward_inputs": options.cast_forward_inputs},
        auto_wrap_policy=policy,
        cpu_offload=options.cpu_offload,
        ignored_modules=list(options.ignore),
        activation_checkpointing=options.activation_checkpointing,
        transformer_cls_names_to_wrap=names,
        min_num_params=size,
    )


def _only_said(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _check_size(name: str, value: object, words: tuple[str, ...]) -> None:
    if value is None or value in words or (type(value) is int and value > 0):
        return
    raise ValueError(
        f"ParallelismConfig: {name} must be a whole number above 0{''.join(f', or {w}' for w in words)}; it is {value!r}"
    )


def _one_of(name: str, value: str | None, known: str) -> None:
    if value not in {None, known}:
        raise ValueError(f"ParallelismConfig: {name} must be {known!r}; it is {value!r}")


def _instance(name: str, value: object, kind: type[Any], where: str = "ParallelismConfig") -> None:
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{where}: {name} must be a {kind.__name__}; it is {value!r}")
