"""Accelerate's settings of sharding and of device meshes: FSDP, DeepSpeed and `ParallelismConfig`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from accel_runtime.environment.accelerate.setting import Choices, ConfigSection, IntegerRange, Setting

__all__ = [
    "ACTIVATION_CHECKPOINTING",
    "AUTO_WRAP_POLICY",
    "CPU_OFFLOAD",
    "CP_BACKEND",
    "CP_COMM_STRATEGY",
    "CP_SIZE",
    "DEEPSPEED",
    "DEEPSPEED_FIELDS",
    "DEEPSPEED_FILE",
    "DEFAULT_MIN_NUM_PARAMS",
    "DEFAULT_ZERO_STAGE",
    "ENGINES",
    "ENGINE_TYPES",
    "FSDP",
    "GRADIENT_ACCUMULATION_STEPS",
    "GRADIENT_CLIPPING",
    "IGNORED_MODULES",
    "MESH_SIZES",
    "MIN_NUM_PARAMS",
    "MODULE_NAMES",
    "MOE_CLASSES",
    "OFFLOAD_OPTIMIZER_DEVICE",
    "OFFLOAD_OPTIMIZER_NVME_PATH",
    "OFFLOAD_PARAM_DEVICE",
    "OFFLOAD_PARAM_NVME_PATH",
    "OF_FSDP2",
    "PARALLELISM",
    "RESHARD_AFTER_FORWARD",
    "SAVE_16BIT_MODEL",
    "SHARDING_OPTIONS",
    "SHARDING_STRATEGY",
    "SP_OPTIONS",
    "SP_PREFIX",
    "SP_SIZE",
    "STRATEGIES",
    "TP",
    "TP_CONFIG_SIZE",
    "TRANSFORMER_CLS",
    "USE_DEEPSPEED",
    "USE_FSDP",
    "USE_PARALLELISM_CONFIG",
    "VERSION",
    "WRAP_POLICIES",
    "ZERO3_INIT",
    "ZERO_STAGE",
    "EngineWords",
    "Fsdp1Strategy",
    "explain_fsdp1_option",
    "find_strategy",
]


# FSDP: the section, its variables, and the arguments of FullyShardedDataParallelPlugin.


class Fsdp1Strategy(NamedTuple):
    """A sharding strategy of FSDP1."""

    name: str
    instead: str = ""
    """The arguments of a script that replace it."""
    shards: bool = True
    reshards: bool = True
    """True if parameters are freed after the forward pass."""
    is_hybrid: bool = False
    """True if each node has a replica, over whose processes it is sharded."""


_HYBRID = "ParallelismConfig(dp_replicate_size=number of machines, dp_shard_size=processes of one)"
STRATEGIES = (
    Fsdp1Strategy("full_shard"),
    Fsdp1Strategy("shard_grad_op", "reshard_after_forward=False", reshards=False),
    Fsdp1Strategy("no_shard", "no fsdp_plugin at all: models are replicated without one", shards=False),
    Fsdp1Strategy("hybrid_shard", _HYBRID, is_hybrid=True),
    Fsdp1Strategy("hybrid_shard_zero2", f"{_HYBRID} and reshard_after_forward=False", reshards=False, is_hybrid=True),
)  # fmt: skip
"""In the order of their numbers, from 1."""


def find_strategy(text: str) -> Fsdp1Strategy | None:
    """Return the strategy of a name in lower case, or of a number; None for another text."""
    names = {str(number): strategy for number, strategy in enumerate(STRATEGIES, 1)}
    return {**names, **{strategy.name: strategy for strategy in STRATEGIES}}.get(text)


_STRATEGY_NAMES = tuple(strategy.name.upper() for strategy in STRATEGIES)
_STRATEGY_NUMBERS = {str(number): name for number, name in enumerate(_STRATEGY_NAMES, 1)}
_SECTIONS = "the sections parallel and fully_shard"
_USE_WRAP = "say wrap: with the names of the classes"
_USE_DTYPES = "say param_dtype, reduce_dtype and output_dtype"
_GATHERS_EARLY = "fully_shard always gathers the next module early"
_NO_STATE_DICT_CONFIG = "checkpoints need no such object; leave it out"
_LOADING = "put from_pretrained() into `with accelerator.loading():`"
_META_DEVICE = "create the model with init_empty_weights(), and call accelerator.load_model() after prepare()"

SHARDING_STRATEGY = Setting(
    "fsdp_sharding_strategy",
    variable="FSDP_SHARDING_STRATEGY",
    launch_default="FULL_SHARD",
    argument="sharding_strategy",
    values=Choices(_STRATEGY_NAMES, _STRATEGY_NUMBERS),
    instead="say reshard_after_forward: true (FULL_SHARD) or false (SHARD_GRAD_OP), with dp_replicate for the hybrid ones; "
    "dp_shard: 1 is NO_SHARD",
)
RESHARD_AFTER_FORWARD = Setting(
    "fsdp_reshard_after_forward",
    variable="FSDP_RESHARD_AFTER_FORWARD",
    launch_default="true",
    argument="reshard_after_forward",
    values=Choices(("true", "false", *_STRATEGY_NAMES), _STRATEGY_NUMBERS),
    profile_key="fully_shard.reshard_after_forward",
)
CPU_OFFLOAD = Setting(
    "fsdp_offload_params",
    variable="FSDP_OFFLOAD_PARAMS",
    launch_default="false",
    argument="cpu_offload",
    values="boolean",
    profile_key="fully_shard.cpu_offload",
    instead="say cpu_offload: true",
)
AUTO_WRAP_POLICY = Setting(
    "fsdp_auto_wrap_policy",
    variable="FSDP_AUTO_WRAP_POLICY",
    argument="auto_wrap_policy",
    values=Choices(("SIZE_BASED_WRAP", "TRANSFORMER_BASED_WRAP", "NO_WRAP")),
    profile_key="fully_shard.wrap",
    instead="say wrap: auto, none, a number of parameters, or names of classes",
)
TRANSFORMER_CLS = Setting(
    "fsdp_transformer_layer_cls_to_wrap",
    variable="FSDP_TRANSFORMER_CLS_TO_WRAP",
    argument="transformer_cls_names_to_wrap",
    values="class names",
    profile_key="fully_shard.wrap",
    instead=_USE_WRAP,
)
MIN_NUM_PARAMS = Setting(
    "fsdp_min_num_params",
    variable="FSDP_MIN_NUM_PARAMS",
    launch_default="100000000",
    argument="min_num_params",
    values=IntegerRange(1),
    profile_key="fully_shard.wrap",
    instead="say wrap: with the number",
)
DEFAULT_MIN_NUM_PARAMS = 100_000_000
"""The number of `size_based_wrap` in Accelerate and in torch."""
WRAP_POLICIES: Mapping[str, Setting | None] = MappingProxyType(
    dict(zip(AUTO_WRAP_POLICY.words, (MIN_NUM_PARAMS, TRANSFORMER_CLS, None), strict=True))
)
"""The setting that each policy uses."""
IGNORED_MODULES = Setting(
    "fsdp_ignored_modules",
    variable="FSDP_IGNORED_MODULES",
    argument="ignored_modules",
    values="module names",
    profile_key="fully_shard.ignore",
    instead="say ignore: with their names",
)
MODULE_NAMES = re.compile(r"[\w.]+(\|[\w.]+)*")
"""The only regular expression that is a list of names, too: names with `|` between."""
ACTIVATION_CHECKPOINTING = Setting(
    "fsdp_activation_checkpointing",
    variable="FSDP_ACTIVATION_CHECKPOINTING",
    launch_default="false",
    argument="activation_checkpointing",
    values="boolean",
    profile_key="fully_shard.activation_checkpointing",
)
VERSION = Setting(
    "fsdp_version",
    variable="FSDP_VERSION",
    launch_default="1",
    argument="fsdp_version",
    values=IntegerRange(1, 2),
    same=(2,),
    instead="there is only version 2, torch's fully_shard; leave it out, and the options of version 1 too",
)
STATE_DICT_TYPE = Setting(
    "fsdp_state_dict_type",
    variable="FSDP_STATE_DICT_TYPE",
    argument="state_dict_type",
    values=Choices(("SHARDED_STATE_DICT", "FULL_STATE_DICT", "LOCAL_STATE_DICT")),
    same=("SHARDED_STATE_DICT",),
    reason="checkpoints are always sharded; use accelerator.save_model() for full weights",
    instead="checkpoints are always sharded, and load on any number of ranks; leave it out. Whole weights come from "
    "get_state_dict() and save_model()",
)
ACTIVATION_CHECKPOINTING_OFFLOAD = Setting(
    "fsdp_activation_checkpointing_offload",
    variable="FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD",
    launch_default="false",
    argument="activation_checkpointing_offload",
    same=(False,),
    reason="accel keeps checkpointed activations on the device",
    instead="inputs of checkpointed modules stay on the device; leave it out",
)
CPU_RAM_EFFICIENT_LOADING = Setting(
    "fsdp_cpu_ram_efficient_loading",
    variable="FSDP_CPU_RAM_EFFICIENT_LOADING",
    launch_default="true",
    argument="cpu_ram_efficient_loading",
    same=(False,),
    reason=_LOADING,
    instead="load the model in `with accelerator.loading():`, where one rank of each node reads it; leave it out",
)
FSDP = ConfigSection(
    "fsdp_config",
    (
        VERSION,
        SHARDING_STRATEGY,
        RESHARD_AFTER_FORWARD,
        CPU_OFFLOAD,
        AUTO_WRAP_POLICY,
        TRANSFORMER_CLS,
        MIN_NUM_PARAMS,
        Setting(argument="mixed_precision_policy", aliases=("mixed_precision",), instead=_USE_DTYPES),
        Setting(
            "fsdp_backward_prefetch",
            variable="FSDP_BACKWARD_PREFETCH",
            argument="backward_prefetch",
            values=Choices(
                ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"), {"1": "BACKWARD_PRE", "2": "BACKWARD_POST"}
            ),
            same=("BACKWARD_PRE",),
            reason=_GATHERS_EARLY,
            instead="fully_shard always gathers the next module early in the backward pass; leave it out",
        ),
        Setting(
            "fsdp_forward_prefetch",
            variable="FSDP_FORWARD_PREFETCH",
            launch_default="false",
            argument="forward_prefetch",
            same=(False,),
            takes_any_value=True,
            reason=_GATHERS_EARLY,
            instead="fully_shard gathers the next module early in the forward pass by itself; leave it out. For more, call "
            "set_modules_to_forward_prefetch() of the prepared modules",
        ),
        STATE_DICT_TYPE,
        Setting(argument="state_dict_config", same=(), instead=_NO_STATE_DICT_CONFIG),
        Setting(argument="optim_state_dict_config", same=(), instead=_NO_STATE_DICT_CONFIG),
        Setting(
            variable="FSDP_LIMIT_ALL_GATHERS",
            argument="limit_all_gathers",
            same=(True,),
            instead="fully_shard always limits what is gathered ahead; leave it out",
        ),
        Setting(
            "fsdp_use_orig_params",
            variable="FSDP_USE_ORIG_PARAMS",
            launch_default="true",
            argument="use_orig_params",
            values="boolean",
            same=(True,),
            reason="parameters always keep their names and shapes",
            instead="fully_shard always keeps the model's own parameters, with their names and shapes; leave it out",
        ),
        Setting(
            "fsdp_sync_module_states",
            variable="FSDP_SYNC_MODULE_STATES",
            launch_default="true",
            argument="sync_module_states",
            same=(True,),
            takes_any_value=True,
            reason="every process ends up with the parameters of the first one",
            instead="ranks always begin with the parameters of the first one; leave it out",
        ),
        Setting(
            argument="param_init_fn",
            same=(),
            instead="a model on the meta device is filled by accelerator.load_model(), or by its modules' reset_parameters(); "
            "leave it out",
        ),
        ACTIVATION_CHECKPOINTING,
        ACTIVATION_CHECKPOINTING_OFFLOAD,
        CPU_RAM_EFFICIENT_LOADING,
        IGNORED_MODULES,
    ),
    prefix="fsdp_",
    distributed_type="FSDP",
    equivalent=_SECTIONS,
)

OF_FSDP2 = (STATE_DICT_TYPE, ACTIVATION_CHECKPOINTING_OFFLOAD, CPU_RAM_EFFICIENT_LOADING)
"""The settings without a key of the profile that Accelerate uses with version 2 too."""
_FSDP1 = {
    name: setting.instead
    for setting in FSDP.settings
    for name in (
        *(name.removeprefix(FSDP.prefix) for name in (setting.key, setting.argument)),
        *setting.aliases,
    )
    # The profile has some arguments of the plugin, with their names.
    if setting.instead and name and not setting.profile_key.endswith(f".{name}")
}


def explain_fsdp1_option(word: str) -> str | None:
    """Return the replacement for an option of FSDP1, with or without the prefix `fsdp_`; None for other words."""
    return _FSDP1.get(word.removeprefix(FSDP.prefix))


# DeepSpeed: the section. The keys of the file that it may name are DeepSpeed's, and stand in the importer.

_NO_DISK = "accel does not offload to disks"
_MULTI_NODE = (
    "accel launch starts nodes itself: the same command on every node, or launcher.kind: ssh or slurm on one"
)
_USE_HOSTS = "Use --hosts HOSTS, which starts the nodes over ssh"
_FILTER = "use launcher.kind: ssh with the hosts in launcher.hosts"
_SHARD = "Use --set parallel.dp_shard=auto; accel config import FILE converts the other keys of a config file"
_USE_DEEPSPEED = "Use --set deepspeed.stage=N for DeepSpeed, or --set parallel.dp_shard=auto for fully_shard"
_DEEPSPEED_KEYS = (
    "Use the keys of deepspeed: in the profile; accel config import FILE converts those of a config file"
)
_DEVICES = Choices(("none", "cpu", "nvme"))

ZERO_STAGE = Setting(
    "zero_stage",
    variable="ACCELERATE_DEEPSPEED_ZERO_STAGE",
    values=IntegerRange(0, 3),
    profile_key="deepspeed.stage",
    advice=_USE_DEEPSPEED,
)
DEFAULT_ZERO_STAGE = 2
ZERO_3 = 3
"""The stage that shards parameters too."""
"""The stage of Accelerate without one."""
OFFLOAD_OPTIMIZER_DEVICE = Setting(
    "offload_optimizer_device",
    variable="ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    values=_DEVICES,
    off=("none",),
    profile_key="deepspeed.offload_optimizer",
)
OFFLOAD_PARAM_DEVICE = Setting(
    "offload_param_device",
    variable="ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    values=_DEVICES,
    off=("none",),
    profile_key="deepspeed.offload_param",
)
OFFLOAD_OPTIMIZER_NVME_PATH = Setting(
    "offload_optimizer_nvme_path",
    variable="ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH",
    off=("none",),
    profile_key="deepspeed.nvme_path",
    reason=_NO_DISK,
)
OFFLOAD_PARAM_NVME_PATH = Setting(
    "offload_param_nvme_path",
    variable="ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH",
    off=("none",),
    profile_key="deepspeed.nvme_path",
    reason=_NO_DISK,
)
GRADIENT_ACCUMULATION_STEPS = Setting(
    "gradient_accumulation_steps",
    variable="ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    argument="gradient_accumulation_steps",
    values=IntegerRange(1),
    off=("1", "auto"),
    profile_key="gradient_accumulation_steps",
    advice="Use --set gradient_accumulation_steps=N",
)
GRADIENT_CLIPPING = Setting(
    "gradient_clipping",
    variable="ACCELERATE_GRADIENT_CLIPPING",
    off=("0", "auto", "none"),
    profile_key="deepspeed.gradient_clipping",
    reason="clip in the script: accelerator.clip_grad_norm_()",
    advice="Call accelerator.clip_grad_norm_ in the script",
)
SAVE_16BIT_MODEL = Setting(
    "zero3_save_16bit_model",
    variable="ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
    reason="use accelerator.save_model()",
)
ZERO3_INIT = Setting(
    "zero3_init_flag",
    variable="ACCELERATE_DEEPSPEED_ZERO3_INIT",
    off=("0",),
    profile_key="deepspeed.zero3_init",
    reason=_META_DEVICE,
)
MOE_CLASSES = Setting(
    "deepspeed_moe_layer_cls_names",
    variable="ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
    reason="list the classes of experts in fully_shard.wrap",
    advice="Call DeepSpeedPlugin.set_moe_leaf_modules in the script",
    refusal="a profile has no classes of experts; unset it, and call DeepSpeedPlugin.set_moe_leaf_modules in the script",
)
DEEPSPEED_FILE = Setting(
    "deepspeed_config_file",
    variable="ACCELERATE_DEEPSPEED_CONFIG_FILE",
    off=("none",),
    profile_key="deepspeed.config_file",
)
DEEPSPEED_FIELDS = Setting(variable="ACCELERATE_CONFIG_DS_FIELDS")
"""The keys of a config file that DeepSpeed's JSON file must not set too."""
MULTINODE_LAUNCHER = Setting(
    "deepspeed_multinode_launcher",
    same=("standard",),
    reason=_MULTI_NODE,
    advice="Use --hosts HOSTS or --hostfile FILE to start the nodes over ssh, or launcher.kind: slurm",
)
DEEPSPEED = ConfigSection(
    "deepspeed_config",
    (
        ZERO_STAGE,
        OFFLOAD_OPTIMIZER_DEVICE,
        OFFLOAD_PARAM_DEVICE,
        OFFLOAD_OPTIMIZER_NVME_PATH,
        OFFLOAD_PARAM_NVME_PATH,
        GRADIENT_ACCUMULATION_STEPS,
        GRADIENT_CLIPPING,
        ZERO3_INIT,
        SAVE_16BIT_MODEL,
        MOE_CLASSES,
        DEEPSPEED_FILE,
        MULTINODE_LAUNCHER,
        Setting(
            "deepspeed_hostfile",
            reason="use launcher.kind: ssh with launcher.hostfile",
            advice="Use --hostfile FILE, which starts the nodes over ssh",
        ),
        Setting("deepspeed_exclusion_filter", reason=_FILTER, advice=_USE_HOSTS),
        Setting("deepspeed_inclusion_filter", reason=_FILTER, advice=_USE_HOSTS),
    ),
    distributed_type="DEEPSPEED",
    equivalent=_SECTIONS,
)


# ParallelismConfig: the section, its variables, and its arguments.

_SEQUENCE_PARALLEL = "accel has it without DeepSpeed: set parallel.sp, and split sequences by accelerator.maybe_context_parallel"
SP_PREFIX = "PARALLELISM_CONFIG_SP_"
"""The prefix of the variables of sequence parallelism."""
CP_SIZE = Setting(
    "parallelism_config_cp_size",
    variable="PARALLELISM_CONFIG_CP_SIZE",
    launch_default="1",
    argument="cp_size",
    values=IntegerRange(1),
    off=("1",),
    profile_key="parallel.cp",
)
MESH_SIZES = (
    Setting(
        "parallelism_config_dp_replicate_size",
        variable="PARALLELISM_CONFIG_DP_REPLICATE_SIZE",
        launch_default="1",
        argument="dp_replicate_size",
        values=IntegerRange(1),
        off=("1",),
        profile_key="parallel.dp_replicate",
    ),
    Setting(
        "parallelism_config_dp_shard_size",
        variable="PARALLELISM_CONFIG_DP_SHARD_SIZE",
        launch_default="1",
        argument="dp_shard_size",
        values=IntegerRange(1),
        off=("1",),
        profile_key="parallel.dp_shard",
    ),
    Setting(
        "parallelism_config_tp_size",
        variable="PARALLELISM_CONFIG_TP_SIZE",
        launch_default="1",
        argument="tp_size",
        values=IntegerRange(1),
        off=("1",),
        profile_key="parallel.tp",
    ),
    CP_SIZE,
)
"""The sizes of the dimensions of a mesh that accel has too."""
CP_BACKEND = Setting(
    "parallelism_config_cp_backend",
    variable="PARALLELISM_CONFIG_CP_BACKEND",
    launch_default="torch",
    argument="cp_backend",
    values=Choices(("torch",)),
    takes_any_value=True,
    reason="accel uses torch's too",
)
CP_COMM_STRATEGY = Setting(
    "parallelism_config_cp_comm_strategy",
    variable="PARALLELISM_CONFIG_CP_COMM_STRATEGY",
    launch_default="allgather",
    argument="cp_comm_strategy",
    values=Choices(("allgather", "alltoall")),
    same=("allgather",),
    reason="torch always uses allgather",
)
SP_SIZE = Setting(
    "parallelism_config_sp_size",
    variable=f"{SP_PREFIX}SIZE",
    launch_default="1",
    argument="sp_size",
    off=("1",),
    reason=_SEQUENCE_PARALLEL,
)
SP_OPTIONS = tuple(
    Setting(
        f"parallelism_config_sp_{name}",
        variable=f"{SP_PREFIX}{name.upper()}",
        launch_default=default,
        off=("1",),
        reason=_SEQUENCE_PARALLEL,
    )
    for name, default in (
        ("seq_length", "None"),
        ("seq_length_is_variable", "True"),
        ("attn_implementation", "sdpa"),
    )
)
"""The options that Accelerate's launcher passes on only with a size above 1."""
PARALLELISM = ConfigSection(
    "parallelism_config",
    (
        *MESH_SIZES,
        CP_BACKEND,
        CP_COMM_STRATEGY,
        SP_SIZE,
        Setting(
            "parallelism_config_sp_backend",
            variable=f"{SP_PREFIX}BACKEND",
            launch_default="deepspeed",
            argument="sp_backend",
            off=("1",),
            reason=_SEQUENCE_PARALLEL,
        ),
        *SP_OPTIONS,
    ),
    equivalent="the section parallel",
)
TP_CONFIG_SIZE = Setting("tp_size", values=IntegerRange(1), off=("1",), profile_key="parallel.tp")
TP = ConfigSection("tp_config", (TP_CONFIG_SIZE,))


# The switches of the command line and of the variables.

USE_FSDP = Setting(
    options=("use_fsdp",), is_switch=True, variable="ACCELERATE_USE_FSDP", profile_key="parallel.dp_shard",
    advice=_SHARD,
)  # fmt: skip
USE_DEEPSPEED = Setting(
    options=("use_deepspeed",),
    is_switch=True,
    variable="ACCELERATE_USE_DEEPSPEED",
    profile_key="deepspeed.stage",
    advice=_USE_DEEPSPEED,
    refusal="this launch has settings of its own, without DeepSpeed; unset it, and set ACCEL_DEEPSPEED_STAGE, or deepspeed.stage in "
    "the profile",
)


class EngineWords(NamedTuple):
    """The words of Accelerate for an engine, which shards models and steps their optimizers itself."""

    name: str
    """The section of a profile."""
    title: str
    switch: Setting
    section: ConfigSection
    file: Setting
    """The path of a file of the engine."""
    fields: Setting
    """The keys of a config file that this file must not set too."""
    multinode_launcher: Setting
    """The program that starts its nodes."""


ENGINES = (
    EngineWords(
        "deepspeed",
        "DeepSpeed",
        USE_DEEPSPEED,
        DEEPSPEED,
        DEEPSPEED_FILE,
        DEEPSPEED_FIELDS,
        MULTINODE_LAUNCHER,
    ),
)
ENGINE_TYPES = frozenset(engine.section.distributed_type for engine in ENGINES)
"""Each `distributed_type` of an engine."""
USE_PARALLELISM_CONFIG = Setting(
    options=("use_parallelism_config",),
    is_switch=True,
    variable="ACCELERATE_USE_PARALLELISM_CONFIG",
    advice="Use --set parallel.dp_replicate=N, parallel.dp_shard, parallel.tp, parallel.cp or parallel.sp",
)
SHARDING_OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "fsdp_": "Use the keys of fully_shard: in the profile; accel config import FILE converts those of a config file",
        "deepspeed_": _DEEPSPEED_KEYS,
        "zero3_": _DEEPSPEED_KEYS,
        "offload_": _DEEPSPEED_KEYS,
        "parallelism_config_": USE_PARALLELISM_CONFIG.advice,
    }
)
"""The advice for all other options, by prefix."""
