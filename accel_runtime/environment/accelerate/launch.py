"""Accelerate's settings of a launch: processes, nodes, devices and precision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from accel_runtime.environment.accelerate import megatron, sharding
from accel_runtime.environment.accelerate.setting import Choices, ConfigSection, IntegerRange, Setting

__all__ = [
    "CLUSTER",
    "COMMON",
    "COMPUTE_ENVIRONMENT",
    "DEBUG",
    "DISTRIBUTED_TYPE",
    "DISTRIBUTED_TYPES",
    "DOWNCAST_BF16",
    "DYNAMO",
    "DYNAMO_SETTINGS",
    "FP8",
    "FP8_OVERRIDE",
    "FP8_OVERRIDES",
    "FP16",
    "GPU_IDS",
    "LOCAL",
    "LOG_LEVEL",
    "MACHINE_RANK",
    "MAIN_PROCESS_IP",
    "MAIN_PROCESS_PORT",
    "MAIN_TRAINING_FUNCTION",
    "MIXED_PRECISION",
    "MULTI_GPU",
    "NUM_CPU_THREADS_PER_PROCESS",
    "NUM_MACHINES",
    "NUM_PROCESSES",
    "OTHER_OPTIONS",
    "OTHER_VARIABLES",
    "RDZV_BACKEND",
    "SAGEMAKER",
    "SAME_NETWORK",
    "SECTIONS",
    "TORCH_DEVICE",
    "TPU_CLUSTER",
    "TPU_ENV",
    "USE_CPU",
    "list_equivalents",
    "list_options",
    "list_settings",
]

LOCAL, SAGEMAKER = "LOCAL_MACHINE", "AMAZON_SAGEMAKER"
"""The values of `compute_environment`."""
DISTRIBUTED_TYPES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "NO": ("single", "auto"),
        "MPS": ("single", "mps"),  # of early releases
        "MULTI_CPU": ("torchrun", "cpu"),
        "MULTI_GPU": ("torchrun", "cuda"),
        "MULTI_XPU": ("torchrun", "xpu"),
        "FSDP": ("torchrun", "auto"),
        "DEEPSPEED": ("torchrun", "auto"),
        "MEGATRON_LM": ("torchrun", "auto"),
        "XLA": ("xla", "xla"),
        "TPU": ("xla", "xla"),  # of early releases
    }
)
"""The launcher and the device that a `distributed_type` becomes."""
_UNKNOWN_DEVICE = "accel runs on cpu, cuda, mps, xla, xpu only"
_USE_ENDPOINT = (
    "Use --rdzv-endpoint HOST:PORT, the address of one node and a free port on it; on one node, leave it out"
)
_ENDPOINT = "launcher.rdzv_endpoint, HOST:PORT"

COMPUTE_ENVIRONMENT = Setting(
    "compute_environment", values=Choices((LOCAL, SAGEMAKER)), equivalent="launcher.kind"
)
DISTRIBUTED_TYPE = Setting(
    "distributed_type",
    values=Choices(
        tuple(DISTRIBUTED_TYPES),
        refused={
            f"multi_{name}": _UNKNOWN_DEVICE for name in ("npu", "mlu", "sdaa", "musa", "hpu", "neuron")
        },
    ),
    equivalent="launcher.kind, and the sections parallel and fully_shard",
)
MIXED_PRECISION = Setting(
    "mixed_precision",
    variable="ACCELERATE_MIXED_PRECISION",
    values=Choices(
        ("no", "bf16", "fp16"),
        refused={"fp8": "fp8 is not in this version of accel; expected no, bf16 or fp16"},
    ),
    profile_key="mixed_precision",
    hint=" Set ACCEL_MIXED_PRECISION to bf16, fp16 or no.",
)
FP16 = Setting("fp16", values="boolean", equivalent="mixed_precision: fp16")
USE_CPU = Setting(
    "use_cpu",
    is_switch=True,
    variable="ACCELERATE_USE_CPU",
    values="boolean",
    profile_key="device",
    advice="Use --cpu",
    equivalent="device: cpu",
)
TORCH_DEVICE = Setting(
    variable="ACCELERATE_TORCH_DEVICE",
    values=Choices(("cpu", "cuda", "mps", "xpu")),
    profile_key="device",
    hint=" Choose one of several devices with CUDA_VISIBLE_DEVICES.",
)
LOG_LEVEL = Setting(
    variable="ACCELERATE_LOG_LEVEL",
    values=Choices(("debug", "info", "warning", "error", "critical")),
    profile_key="log_level",
)
GPU_IDS = Setting("gpu_ids", values="GPU ids", profile_key="launcher.gpu_ids")
NUM_PROCESSES = Setting(
    "num_processes",
    values=IntegerRange(1, auto=-1),
    profile_key="launcher.nproc_per_node",
    advice="Use --nproc-per-node N, the number of processes on each node; num_processes is the number on all nodes",
    equivalent="launcher.nproc_per_node, the number of processes on each node",
)
NUM_MACHINES = Setting(
    "num_machines",
    values=IntegerRange(1),
    profile_key="launcher.nnodes",
    advice="Use --nnodes N",
    equivalent="launcher.nnodes",
)
MACHINE_RANK = Setting(
    "machine_rank",
    values=IntegerRange(0),
    same=(0,),
    reason="not needed: every node runs the same command",
    advice="Leave it out, since nodes are numbered automatically, or use --node-rank N",
    equivalent="the option --node-rank of accel launch, if the order of nodes must be fixed",
)
MAIN_PROCESS_IP = Setting(
    "main_process_ip",
    values="host",
    profile_key="launcher.rdzv_endpoint",
    advice=_USE_ENDPOINT,
    equivalent=_ENDPOINT,
)
MAIN_PROCESS_PORT = Setting(
    "main_process_port",
    values=IntegerRange(0, 65535),
    profile_key="launcher.rdzv_endpoint",
    advice=_USE_ENDPOINT,
    equivalent=_ENDPOINT,
)
RDZV_BACKEND = Setting(
    "rdzv_backend",
    values="text",
    same=("static", "c10d", ""),
    reason="accel always uses c10d",
    advice="Leave it out: the rendezvous always uses c10d",
)
SAME_NETWORK = Setting(
    "same_network",
    is_switch=True,
    values="boolean",
    takes_any_value=True,
    reason="nodes may be on any network",
    advice="Leave it out: nodes connect to --rdzv-endpoint on any network",
)
MAIN_TRAINING_FUNCTION = Setting(
    "main_training_function",
    values="text",
    profile_key="launcher.main_training_function",
    advice="Use --set launcher.main_training_function=NAME, with launcher.kind: xla",
)
DOWNCAST_BF16 = Setting(
    "downcast_bf16",
    is_switch=True,
    variable="ACCELERATE_DOWNCAST_BF16",
    values="boolean",
    reason="mixed_precision: bf16 keeps weights in full precision",
    advice="Use --mixed-precision bf16",
    equivalent="mixed_precision: bf16",
    refusal="it rounds weights and optimizer state too; unset it, and set ACCEL_MIXED_PRECISION=bf16",
)
TPU_ENV = Setting("tpu_env", options=("env",), values="texts", advice="Use --set env.NAME=VALUE")
TPU_CLUSTER = Setting(
    "tpu_use_cluster",
    options=("tpu_cluster",),
    is_switch=True,
    values="boolean",
    reason="accel xla pod NAME runs the command on every worker of a pod",
    advice="Use accel xla pod NAME, which starts accel launch on every worker of a pod",
)
_COMPILERS = Choices(
    (
        "NO", "EAGER", "AOT_EAGER", "INDUCTOR", "AOT_TS_NVFUSER", "NVPRIMS_NVFUSER", "CUDAGRAPHS", "OFI", "FX2TRT", "ONNXRT",
        "TENSORRT", "AOT_TORCHXLA_TRACE_ONCE", "TORCHXLA_TRACE_ONCE", "IPEX", "TVM", "HPU_BACKEND", "NEURON",
    )
)  # fmt: skip
DYNAMO_SETTINGS = (
    Setting(
        "dynamo_backend",
        variable="ACCELERATE_DYNAMO_BACKEND",
        launch_default="NO",
        argument="dynamo_backend",
        values=_COMPILERS,
        profile_key="compile.backend",
        advice="Use --set compile.backend=NAME",
    ),
    Setting(
        "dynamo_mode",
        variable="ACCELERATE_DYNAMO_MODE",
        launch_default="default",
        argument="dynamo_mode",
        values=Choices(("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")),
        off=("default",),
        profile_key="compile.mode",
        advice="Use --set compile.mode=MODE",
    ),
    *(
        Setting(
            f"dynamo_{name}",
            is_switch=True,
            variable=f"ACCELERATE_DYNAMO_{name.upper()}",
            launch_default="False",
            argument=f"dynamo_{name}",
            values="boolean",
            profile_key=f"compile.{key}",
            advice=f"Use --set compile.{key}=true",
        )
        for name, key in (
            ("use_fullgraph", "fullgraph"),
            ("use_dynamic", "dynamic"),
            ("use_regional_compilation", "regional"),
        )
    ),
)
"""The backend, which Accelerate compiles with if it is set, and its options."""
DYNAMO = ConfigSection(
    "dynamo_config",
    DYNAMO_SETTINGS,
    prefix="dynamo_",
    reason="accel has no other option of torch.compile",
    equivalent="the section compile",
)
DEBUG = Setting(
    "debug",
    is_switch=True,
    variable="ACCELERATE_DEBUG_MODE",
    values="boolean",
    reason="accel has no option for checks of collectives",
    advice="Leave it out: every run reports the ranks whose collectives do not match",
)
_ENABLE_CPU_AFFINITY = Setting(
    "enable_cpu_affinity",
    is_switch=True,
    values="boolean",
    reason="accel does not bind processes to processor cores",
    advice="Leave it out: accel does not bind processes to processor cores",
)
_NO_FP8 = "fp8 is not in this version of accel"
FP8_OVERRIDE = Setting("fp8_override_linear_precision", reason=_NO_FP8)
FP8_OVERRIDES = tuple(f"ACCELERATE_FP8_OVERRIDE_{name}" for name in ("FPROP", "DGRAD", "WGRAD"))
"""The variables of `override_linear_precision`, one for each of its values."""
FP8 = ConfigSection(
    "fp8_config",
    (
        Setting("fp8_backend", variable="ACCELERATE_FP8_BACKEND", reason=_NO_FP8),
        *(
            Setting(
                f"fp8_{name}",
                is_switch=default == "False",
                variable=f"ACCELERATE_FP8_{name.upper()}",
                launch_default=default,
                reason=_NO_FP8,
            )
            for name, default in (
                ("use_autocast_during_eval", "False"),
                ("margin", "0"),
                ("interval", "1"),
                ("format", "HYBRID"),
                ("amax_history_len", "1024"),
                ("amax_compute_algo", "most_recent"),
                ("opt_level", "O2"),
                ("enable_fsdp_float8_all_gather", "1"),
                ("pad_inner_dim", "1"),
            )
        ),
        FP8_OVERRIDE,
    ),
    prefix="fp8_",
    reason=_NO_FP8,
)
COMMON = (
    MIXED_PRECISION,
    FP16,
    USE_CPU,
    GPU_IDS,
    DEBUG,
    _ENABLE_CPU_AFFINITY,
    DYNAMO_SETTINGS[0],
)
"""The keys of a file of any `compute_environment`."""
CLUSTER = (
    *COMMON,
    COMPUTE_ENVIRONMENT,
    DISTRIBUTED_TYPE,
    NUM_PROCESSES,
    NUM_MACHINES,
    MACHINE_RANK,
    MAIN_PROCESS_IP,
    MAIN_PROCESS_PORT,
    SAME_NETWORK,
    RDZV_BACKEND,
    MAIN_TRAINING_FUNCTION,
    TPU_ENV,
    Setting("tpu_name", values="text", reason="use accel xla pod NAME"),
    Setting("tpu_zone", values="text", reason="use accel xla pod NAME --zone ZONE"),
    TPU_CLUSTER,
    Setting(
        "tpu_use_sudo",
        is_switch=True,
        values="boolean",
        reason="use sudo in accel xla pod NAME --setup COMMAND",
        advice="Use accel xla pod NAME --setup COMMAND, with sudo in the command",
    ),
    Setting(
        "tpu_vm",
        options=("vm",),
        values="texts",
        reason="accel xla pod NAME starts all workers of the pod",
        advice=TPU_CLUSTER.advice,
    ),
    Setting("commands", values="texts", reason="use accel xla pod NAME --setup COMMAND for each command"),
    Setting(
        "command_file",
        values="text",
        reason="use accel xla pod NAME --setup COMMAND for each line of the file",
    ),
    DOWNCAST_BF16,
)
"""The keys of a file of `compute_environment: LOCAL_MACHINE`, without its sections."""
SECTIONS = (
    DYNAMO,
    sharding.DEEPSPEED,
    FP8,
    sharding.FSDP,
    ConfigSection("ipex_config", reason="accel does not use IPEX"),  # of early releases
    megatron.MEGATRON_LM,
    ConfigSection("mpirun_config", reason="accel starts the processes itself, without mpirun", off=("0",)),
    sharding.PARALLELISM,
    sharding.TP,
)
"""Its sections."""

MULTI_GPU = Setting(
    options=("multi_gpu",), is_switch=True, advice="Use --nproc-per-node auto, one process for each GPU"
)
NUM_CPU_THREADS_PER_PROCESS = Setting(
    options=("num_cpu_threads_per_process",),
    profile_key="launcher.omp_num_threads",
    advice="Use --set launcher.omp_num_threads=N",
    equivalent="launcher.omp_num_threads",
)
_ONLY_OPTIONS = (
    MULTI_GPU,
    Setting(
        options=("config_file", "config"),
        advice="Use --profile NAME after accel config import FILE --profile NAME, or --config-file FILE of accel launch for one "
        "launch",
    ),
    NUM_CPU_THREADS_PER_PROCESS,
    Setting(options=("tpu",), is_switch=True, advice="Use --set launcher.kind=xla"),
    Setting(
        options=("no_tpu_cluster",),
        is_switch=True,
        advice="Leave it out: accel launch runs the script on this machine",
    ),
    Setting(options=("mpirun_hostfile",), advice="Run accel launch with mpirun, whose variables it reads"),
    sharding.USE_FSDP,
    sharding.USE_DEEPSPEED,
    megatron.USE_MEGATRON_LM,
    sharding.USE_PARALLELISM_CONFIG,
)
"""Settings with an option and without a key."""
OTHER_OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        **sharding.SHARDING_OPTIONS,
        "megatron_lm_": megatron.USE_MEGATRON_LM.advice,
        "dynamo_": "Use the section compile of the profile, or Accelerator(dynamo_plugin=...) in the script",
        "fp8_": "Use --mixed-precision bf16 or fp16; 8-bit formats are not supported",
        "aws_": "Leave credentials in the files of the AWS CLI, and choose an AWS profile with launcher.aws_profile",
    }
)
"""The advice for all other options, by prefix."""
OTHER_VARIABLES = tuple(
    Setting(variable=f"ACCELERATE_{name}")
    for name in ("DEBUG_RDV_FILE", "ENABLE_RICH", "IN_TPU_POD", "SAGEMAKER_DISTRIBUTED_TYPE", "USE_SAGEMAKER")
)
"""Settings with a variable alone."""


def list_settings() -> Iterator[Setting]:
    """Yield the settings of `compute_environment: LOCAL_MACHINE`, of its sections, and of the command line and variables."""
    of_sections = (each for section in SECTIONS for each in section.settings)
    # The backend of `torch.compile` is in a section and, in files of early releases, outside.
    yield from dict.fromkeys(
        (*CLUSTER, *of_sections, *_ONLY_OPTIONS, *OTHER_VARIABLES, TORCH_DEVICE, LOG_LEVEL)
    )


def list_options() -> Iterator[tuple[str, Setting]]:
    """Yield the options of `accelerate launch` that `accel launch` does not have, with their settings."""
    for setting in list_settings():
        if setting.advice:
            yield from ((option, setting) for option in setting.options or (setting.key,))


def list_equivalents() -> dict[str, str]:
    """Return what a profile has instead of keys and options of Accelerate, by name."""
    named = [
        (setting.key or setting.options[0], setting.equivalent)
        for setting in list_settings()
        if setting.equivalent
    ]
    return dict([*named, *((section.key, section.equivalent) for section in SECTIONS if section.equivalent)])
