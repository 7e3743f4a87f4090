"""An Accelerate config file in typed values: parsers of single values, and the settings that several keys decide."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from accel_cli.console import mask_secrets
from accel_cli.launchers.sagemaker.images import SMDDP_TYPES
from accel_cli.planning.network import Endpoint
from accel_cli.profile.validation_errors import did_you_mean, one_of
from accel_runtime.environment.settings import (
    FSDP1_STRATEGIES,
    Device,
    MixedPrecision,
    Parallel,
    SettingsError,
    find_nearest,
)

__all__ = [
    "DEEPSPEED_FILE",
    "LOCAL",
    "SAGEMAKER",
    "SHARDING_TYPES",
    "AccelerateConfig",
    "InvalidValueError",
    "Parser",
    "choice",
    "format_value",
    "integer",
    "keep",
    "normalize",
    "pairs",
    "parse_bool",
    "parse_class_names",
    "parse_distributed_type",
    "parse_gpu_ids",
    "parse_host",
    "parse_instance_type",
    "parse_mapping",
    "parse_or",
    "parse_precision",
    "parse_strategy",
    "parse_text",
    "parse_texts",
]

LOCAL, SAGEMAKER = "LOCAL_MACHINE", "AMAZON_SAGEMAKER"
DEEPSPEED_FILE = "deepspeed_config_file"
_DEFAULT_PORT = 29500
# Accelerate reads YAML 1.1, where these words are booleans.
_YAML_1_1 = {"yes": "true", "on": "true", "no": "false", "off": "false"}
_HOST = re.compile(r"[A-Za-z0-9_.-]+|[0-9a-fA-F]*:[0-9a-fA-F]*:[0-9a-fA-F:]*")
_GPU_IDS = re.compile(r"[A-Za-z0-9_.:/-]+(\s*,\s*[A-Za-z0-9_.:/-]+)*")


class InvalidValueError(ValueError):
    """A value that a key does not accept."""

    def __init__(self, expected: str, hint: str = "") -> None:
        super().__init__(expected)
        self.expected = expected
        self.hint = hint


Parser = Callable[[Any], Any]
"""Returns the parsed value of a key, or raises InvalidValueError."""


def format_value(name: str, value: object) -> str:
    """Return a value on one line, as YAML writes it, without secrets."""
    if isinstance(value, Mapping):
        items = (f"{key}: {format_value(f'{name}.{key}', inner)}" for key, inner in value.items())
        return "{" + ", ".join(items) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(format_value(name, entry) for entry in value) + "]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    text = str(value)
    # A command or an assignment names its secret itself.
    words = re.split(r"[=\s]+", text)
    masked = [mask_secrets(each, text) for each in (name, *(words if len(words) > 1 else ()))]
    text = "***" if "***" in masked else masked[0]
    return text if text and text.isprintable() else repr(text)


def normalize(value: Any) -> str:
    """Return a value as text in lower case: `true` also for `yes`, and `1` also for 1.0."""
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    text = str(whole).strip().lower()
    return _YAML_1_1.get(text, text)


def keep(value: Any) -> Any:
    """Return the value unchanged."""
    return value


def parse_bool(value: Any) -> bool:
    """Return a boolean, also from a word, 1 or 0."""
    if type(value) is int and value in {0, 1}:
        return bool(value)
    if (text := normalize(value)) not in {"true", "false"}:
        raise InvalidValueError("expected true or false")
    return text == "true"


def integer(least: int, most: int | None = None, *, auto: int | None = None) -> Parser:
    """Return a parser of whole numbers between two; `auto` is one more number, which leaves it open."""
    expected = (
        f"expected a whole number from {least} to {most}"
        if most
        else f"expected a whole number of at least {least}"
    )
    expected += "" if auto is None else f", or {auto}"

    def parse(value: Any) -> int:
        text = normalize(value)
        number = int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else None
        if number is None or ((number < least or (most is not None and number > most)) and number != auto):
            raise InvalidValueError(expected)
        return number

    return parse


def choice(
    *words: str, aliases: Mapping[str, str] | None = None, refused: Mapping[str, str] | None = None
) -> Parser:
    """Return a parser of words in any case.

    Args:
        words: The words, as the parser returns them.
        aliases: Other values of a word, normalized.
        refused: The reasons why accel does not have a value of Accelerate, by normalized value.
    """
    known = {**{normalize(word): word for word in words}, **(aliases or {})}

    def parse(value: Any) -> str:
        name = normalize(value)
        if reason := (refused or {}).get(name):
            raise InvalidValueError(reason)
        if name not in known:
            nearest = find_nearest(name, list(known))
            raise InvalidValueError(one_of(words), did_you_mean(known[nearest] if nearest else None))
        return known[name]

    return parse


def parse_or(parse: Parser, value: Any, default: Any) -> Any:
    """Return a parsed value, or the default for one that is reported as invalid for its own key."""
    try:
        return parse(value)
    except InvalidValueError:
        return default


def parse_text(value: Any) -> str:
    """Return text, also from a number."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise InvalidValueError("expected text")
    return str(value)


def parse_texts(value: Any) -> list[str]:
    """Return a list of non-empty texts, also from a single one."""
    entries = value if isinstance(value, list) else [value]
    if any(isinstance(entry, (Mapping, list, bool)) for entry in entries):
        raise InvalidValueError("expected a list of texts")
    return [str(entry) for entry in entries if entry]


def parse_class_names(value: Any) -> list[str]:
    """Return names of classes from text with commas, or from a list."""
    names = [name.strip() for entry in parse_texts(value) for name in entry.split(",") if name.strip()]
    if not all(name.isidentifier() for name in names):
        raise InvalidValueError("expected names of classes with commas between")
    return names


def parse_mapping(value: Any) -> Mapping[str, Any]:
    """Return keys and values as they are."""
    if not isinstance(value, Mapping):
        raise InvalidValueError("expected keys and values")
    return value


def pairs(name: str, value: str) -> Parser:
    """Return a parser of names and values: a mapping, or a list of entries as in requests of AWS."""

    def parse(given: Any) -> dict[str, str]:
        entries = (
            [{name: key, value: each} for key, each in given.items()] if isinstance(given, Mapping) else given
        )
        if not isinstance(entries, list) or not all(
            isinstance(entry, Mapping) and set(entry) == {name, value} for entry in entries
        ):
            raise InvalidValueError(f"expected a list of entries with {name} and {value}")
        return {parse_text(entry[name]): parse_text(entry[value]) for entry in entries}

    return parse


def parse_host(value: Any) -> str:
    """Return the name or address of a node, without brackets."""
    name = value.strip().strip("[]") if isinstance(value, str) else ""
    if not _HOST.fullmatch(name):
        raise InvalidValueError("expected the name or address of a node")
    return name


def parse_gpu_ids(value: Any) -> str:
    """Return `all`, or ids of GPUs with commas between."""
    ids = str(value).strip() if isinstance(value, (int, str)) and not isinstance(value, bool) else ""
    if not _GPU_IDS.fullmatch(ids):
        raise InvalidValueError("expected all, or ids such as 0,1")
    return "".join(ids.split())


def parse_instance_type(value: Any) -> str:
    """Return an instance type; Accelerate's wizard offers one that does not exist."""
    return parse_text(value).replace("ml.p4dn.24xlarge", "ml.p4d.24xlarge")


parse_precision = choice(
    *get_args(MixedPrecision),
    refused={"fp8": f"fp8 is not in this version of accel; {one_of(get_args(MixedPrecision))}"},
)
_STRATEGIES = tuple(map(str.upper, FSDP1_STRATEGIES))
_parse_strategy_word = choice(
    "true", "false", *_STRATEGIES, aliases={str(number): name for number, name in enumerate(_STRATEGIES, 1)}
)


def parse_strategy(value: Any) -> str:
    """Return a sharding strategy of FSDP1, also from its number, or from FSDP2's `reshard_after_forward`."""
    word: str = _parse_strategy_word(value)
    return {"true": "FULL_SHARD", "false": "SHARD_GRAD_OP"}.get(word, word)


_LAUNCHERS: Mapping[str, tuple[str, str]] = {
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
"""The launcher and the device that a `distributed_type` becomes."""
_UNKNOWN_DEVICE = f"accel runs on {', '.join(name for name in get_args(Device) if name != 'auto')} only"
parse_distributed_type = choice(
    *_LAUNCHERS,
    refused={f"multi_{name}": _UNKNOWN_DEVICE for name in ("npu", "mlu", "sdaa", "musa", "hpu", "neuron")},
)
SHARDING_TYPES = {"fsdp_config": "FSDP", "deepspeed_config": "DEEPSPEED", DEEPSPEED_FILE: "DEEPSPEED"}
"""The `distributed_type` that uses a section."""


@dataclass(frozen=True)
class AccelerateConfig:
    """Keys that decide how other keys are converted, with Accelerate's defaults."""

    compute_environment: str = LOCAL
    distributed_type: str = "NO"
    num_processes: int = -1
    num_machines: int = 1
    main_process_ip: str = ""
    main_process_port: int | None = None
    mixed_precision: str = ""
    fp16: bool = False
    use_cpu: bool = False
    ec2_instance_type: str = ""
    image_uri: str = ""
    additional_args: Mapping[str, Any] = field(default_factory=dict)
    fsdp_config: Mapping[str, Any] = field(default_factory=dict)
    deepspeed_config: Mapping[str, Any] = field(default_factory=dict)
    parallelism_config: Mapping[str, Any] = field(default_factory=dict)
    tp_config: Mapping[str, Any] = field(default_factory=dict)
    deepspeed_file: Mapping[str, Any] | None = None
    """The JSON file that `deepspeed_config` names, parsed; None if there is no such file."""

    @property
    def _launch(self) -> tuple[str, str]:
        is_sagemaker = self.compute_environment == SAGEMAKER
        return ("sagemaker", "auto") if is_sagemaker else _LAUNCHERS[self.distributed_type]

    @property
    def launcher(self) -> str:
        """Return `launcher.kind` of the profile."""
        return self._launch[0]

    @property
    def device(self) -> str:
        """Return the device of the profile."""
        return "cpu" if self.use_cpu else self._launch[1]

    @property
    def is_tpu(self) -> bool:
        """Return True for a TPU, whose hosts know each other and run one replica on each core."""
        return self.launcher == "xla"

    @property
    def is_multi_process(self) -> bool:
        """Return True if the file counts the processes of each node."""
        return self.launcher == "torchrun"

    @property
    def precision(self) -> str:
        """Return the number format: of the file itself, of its early key, or of DeepSpeed's JSON file."""
        if self.mixed_precision or self.fp16:
            return self.mixed_precision or "fp16"
        if self.distributed_type == "DEEPSPEED":
            for name, precision in (("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "fp16")):
                section = (self.deepspeed_file or {}).get(name)
                if isinstance(section, Mapping) and section.get("enabled") is True:
                    return precision
        return "no"

    @property
    def needs_rendezvous(self) -> bool:
        """Return True if several nodes have to find each other."""
        return self.is_multi_process and self.num_machines > 1

    @property
    def endpoint(self) -> Endpoint:
        """Return the address and port of the rendezvous."""
        return Endpoint(self.main_process_ip, self.main_process_port or _DEFAULT_PORT)

    @property
    def fsdp(self) -> dict[str, Any]:
        """Return the values of `fsdp_config`; Accelerate adds the prefix to keys without it."""
        items = self.fsdp_config.items()
        return {f"fsdp_{str(key).removeprefix('fsdp_')}": value for key, value in items if value is not None}

    @property
    def fsdp_strategy(self) -> str:
        """Return FSDP1's name for the strategy of `fsdp_config`."""
        strategy = self.fsdp.get("fsdp_sharding_strategy")
        if strategy is None or normalize(self.fsdp.get("fsdp_version", 1)) != "1":
            strategy = self.fsdp.get("fsdp_reshard_after_forward", True)
        return str(parse_or(parse_strategy, strategy, "FULL_SHARD"))

    @property
    def zero_stage(self) -> int:
        """Return DeepSpeed's ZeRO stage: 3, which needs the least memory, if the JSON file is missing."""
        stage = self.deepspeed_config.get("zero_stage", 2)
        if self.deepspeed_config.get(DEEPSPEED_FILE):
            stage = 3 if self.deepspeed_file is None else self._zero_optimization.get("stage", 0)
        return int(parse_or(integer(0, 3), stage, 3))

    @property
    def hpz_size(self) -> int:
        """Return the size of ZeRO++'s second partition; 1 without one."""
        return int(parse_or(integer(1), self._zero_optimization.get("zero_hpz_partition_size"), 1))

    @property
    def _zero_optimization(self) -> Mapping[str, Any]:
        section = (self.deepspeed_file or {}).get("zero_optimization")
        return section if isinstance(section, Mapping) else {}

    @property
    def parallel(self) -> dict[str, Any]:
        """Return the section `parallel` of the profile, without sizes of 1."""
        if self.explain_single_process():
            return {}
        sizes = {
            name: parse_or(integer(1), self.parallelism_config.get(f"parallelism_config_{name}_size"), 1)
            for name in ("dp_replicate", "dp_shard", "tp", "cp")
        }
        sizes["tp"] = max(sizes["tp"], parse_or(integer(1), self.tp_config.get("tp_size"), 1))
        mesh = {name: size for name, size in sizes.items() if size > 1}
        if mesh:
            return mesh
        if self.distributed_type == "FSDP" and self.fsdp_strategy != "NO_SHARD":
            hybrid = self.fsdp_strategy.startswith("HYBRID") and self.num_machines > 1
            return {**({"dp_replicate": self.num_machines} if hybrid else {}), "dp_shard": "auto"}
        return {"dp_shard": "auto"} if self.distributed_type == "DEEPSPEED" and self.zero_stage else {}

    @property
    def instance_type(self) -> str:
        """Return the instance type of a SageMaker job; `additional_args` take precedence."""
        name = self.additional_args.get("instance_type") or self.ec2_instance_type
        return str(parse_or(parse_instance_type, name, ""))

    @property
    def has_image(self) -> bool:
        """Return True if the file names a container image."""
        return bool(self.additional_args.get("image_uri") or self.image_uri)

    def explain_no_smddp(self) -> str:
        """Return why SageMaker's data-parallel library is not used; empty if it is."""
        if self.has_image and self.instance_type in SMDDP_TYPES:
            return ""
        needed = f"an image that contains it, and {' or '.join(SMDDP_TYPES)}"
        return f"torchrun trains on every GPU over NCCL; SageMaker's library (smddp) needs {needed}"

    def explain_single_process(self) -> str:
        """Return why the file does not start processes to shard a model over; empty if it does."""
        if self.is_tpu:
            return "on a TPU, launcher.spmd: true shards a model as the script defines it"
        if self.is_multi_process:
            return ""
        return f"distributed_type: {self.distributed_type} is one process"

    def explain_unused(self, section: str) -> str:
        """Return why the options of a section do not apply; empty if they do."""
        if section in {"parallelism_config", "tp_config"}:
            return self.explain_single_process()
        if section not in SHARDING_TYPES:
            return ""
        if SHARDING_TYPES[section] != self.distributed_type:
            return f"used only with distributed_type: {SHARDING_TYPES[section]}"
        is_sharded = {"dp_shard", "cp"} & self.parallel.keys()
        return "" if is_sharded else "not used, because the model is not sharded"

    def find_conflicts(self) -> Iterator[tuple[str, str, str]]:
        """Yield the values that exclude each other: key, expectation, value."""
        if self.is_tpu and self.precision == "fp16":
            key = "mixed_precision" if self.mixed_precision else "fp16"
            yield key, "fp16 is for GPUs, and Accelerate refuses it on a TPU too; use bf16", "fp16"
        if self.use_cpu and self._launch[1] not in {"auto", "cpu"}:
            yield "use_cpu", f"this contradicts distributed_type: {self.distributed_type}", "true"
        if self.num_processes != -1:
            try:
                Parallel(**self.parallel).sizes(self.num_processes)
            except SettingsError as error:
                yield "parallelism_config", str(error), ""
        given = [key for key, value in self.fsdp_config.items() if value is not None]
        if self.distributed_type == "FSDP" and len(self.fsdp) < len(given):
            yield "fsdp_config", "a key stands here with and without fsdp_; remove one of them", ""
        if self.needs_rendezvous:
            yield from self._find_rendezvous_conflicts()

    def _find_rendezvous_conflicts(self) -> Iterator[tuple[str, str, str]]:
        nodes = f"{self.num_machines} nodes (num_machines)"
        if not self.main_process_ip:
            yield "main_process_ip", f"{nodes} need the address of one of them", "nothing"
        elif self.endpoint.is_loopback:
            yield "main_process_ip", f"expected an address that all {nodes} can reach", self.main_process_ip
        if self.main_process_port == 0:
            yield "main_process_port", "several nodes need a fixed port", "0"
        if self.num_processes != -1 and self.num_processes % self.num_machines:
            reason = (
                f"expected a multiple of num_machines, {self.num_machines}: every node starts the same number"
            )
            yield "num_processes", reason, str(self.num_processes)
