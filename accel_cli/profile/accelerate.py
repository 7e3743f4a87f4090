"""Reading an Accelerate config file: what of it a profile says, and for every key that it does not, why."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, get_args

from accel_cli.errors import Problem, ProfileError
from accel_cli.launchers import PLANNED
from accel_cli.masking import masked
from accel_cli.profile.problems import did_you_mean
from accel_cli.profile.schema import Profile
from accel_runtime.env import Device, MixedPrecision, nearest

__all__ = ["Imported", "convert", "is_accelerate"]


@dataclass(frozen=True)
class Imported:
    """A profile made of an Accelerate config file; every key of the file is in `mapped` or in `left`."""

    data: dict[str, Any]
    """The whole profile, its version first."""
    mapped: tuple[tuple[str, str], ...]
    """The keys that took effect, or ask for what accel does anyway: `num_processes: 8`, and what it became."""
    left: tuple[tuple[str, str], ...]
    """The other keys: `fsdp_config.fsdp_version: 2`, and the reason."""


def is_accelerate(data: Mapping[str, Any]) -> bool:
    """Whether this is an Accelerate config file rather than a profile."""
    return "compute_environment" in data or "distributed_type" in data


def convert(data: Mapping[str, Any], where: str) -> Imported:
    """The profile that says what an Accelerate config file says, as far as this version of accel can.

    Args:
        data: The file, parsed.
        where: What to call it in errors.

    Raises:
        ProfileError: Everything in it that cannot be understood; or, if it is for a launcher that is not
            here yet, that and what will become of each key.
    """
    values, problems = _read(data, where)
    asked = _Asked(**{f.name: values[f.name] for f in fields(_Asked) if f.name in values})
    if asked.planned:
        raise ProfileError(_refusal(asked, data, problems, where))
    for key, expected, came in _conflicts(asked, data):
        problems.setdefault(key, Problem(where, key, expected, came))
    if problems:
        raise ProfileError(list(problems.values()))
    fates = [(_line(path, value), _fate(asked, path, value)) for path, value in _leaves(data)]
    return Imported(
        data=Profile.model_validate(asked.profile()).data(),
        mapped=tuple((line, fate.text) for line, fate in fates if fate.taken),
        left=tuple((line, fate.text) for line, fate in fates if not fate.taken),
    )


# The file as it is written.

Path = tuple[str, ...]


def _leaves(data: Mapping[str, Any], above: Path = ()) -> Iterator[tuple[Path, Any]]:
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key), value


def _line(path: Path, value: object) -> str:
    key = ".".join(path)
    return f"{key}: {_shown(key, value)}"


def _shown(name: str, value: object) -> str:
    """A value on one line, as YAML has it, without secrets."""
    if isinstance(value, Mapping):
        return (
            "{" + ", ".join(f"{key}: {_shown(f'{name}.{key}', inner)}" for key, inner in value.items()) + "}"
        )
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_shown(name, item) for item in value) + "]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    text = _without_secrets(name, str(value))
    return text if text and text.isprintable() else repr(text)


def _without_secrets(name: str, text: str) -> str:
    # A command or an assignment names its secret itself.
    words = re.split(r"[=\s]+", text)
    shown = [masked(each, text) for each in (name, *(words if len(words) > 1 else ()))]
    return "***" if "***" in shown else shown[0]


# Reading values. Accelerate reads YAML 1.1, so a truth value may be a word here.

_TRUE = ("true", "yes", "on")
_FALSE = ("false", "no", "off")
_HOST = re.compile(r"[A-Za-z0-9_.-]+|[0-9a-fA-F]*:[0-9a-fA-F]*:[0-9a-fA-F:]*")
_IDS = re.compile(r"[A-Za-z0-9_.:/-]+(\s*,\s*[A-Za-z0-9_.:/-]+)*")
_LAST_PORT = 65535


@dataclass(frozen=True)
class _Refused:
    """A value that cannot be understood."""

    expected: str
    hint: str = ""


Read = Callable[[Any], Any]
"""Makes a value what it means, or `_Refused`."""


def _plain(value: Any) -> Any:
    """Text in lower case; the words for true and false as what they mean."""
    if not isinstance(value, str):
        return value
    word = value.strip().lower()
    return word in _TRUE if word in (*_TRUE, *_FALSE) else word


def _truth(value: Any) -> bool | _Refused:
    plain = bool(value) if type(value) is int and value in {0, 1} else _plain(value)
    return plain if isinstance(plain, bool) else _Refused("expected true or false")


def _whole(words: str, least: int, most: int | None = None) -> Read:
    def read(value: Any) -> int | _Refused:
        if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,18}", value):
            value = int(value)
        good = type(value) is int and value >= least and (most is None or value <= most)
        return value if good else _Refused(words)

    return read


def _processes(value: Any) -> int | _Refused:
    words = "expected a whole number of at least 1, or -1"
    number: int | _Refused = _whole(words, -1)(value)
    return number or _Refused(words)


def _text(value: Any) -> str | _Refused:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return str(value) if number or isinstance(value, str) else _Refused("expected text")


def _texts(value: Any) -> list[str] | _Refused:
    entries = value if isinstance(value, list) else [value]
    wrong = any(isinstance(entry, (Mapping, list, bool)) for entry in entries)
    return _Refused("expected a list of texts") if wrong else [str(entry) for entry in entries if entry]


def _section(value: Any) -> Mapping[str, Any] | _Refused:
    return value if isinstance(value, Mapping) else _Refused("expected keys and values")


def _host(value: Any) -> str | _Refused:
    host = value.strip().strip("[]") if isinstance(value, str) else ""
    return host if _HOST.fullmatch(host) else _Refused("expected a name or address of a machine")


def _ids(value: Any) -> str | _Refused:
    ids = str(value).strip() if isinstance(value, (int, str)) and not isinstance(value, bool) else ""
    return "".join(ids.split()) if _IDS.fullmatch(ids) else _Refused("expected all, or ids such as 0,1")


def _precision(value: Any) -> str | _Refused:
    word = "no" if _plain(value) is False else _plain(value)
    choices = f"expected one of {', '.join(get_args(MixedPrecision))}"
    if word == "fp8":
        return _Refused(f"fp8 is not in this version of accel; {choices}")
    return word if word in get_args(MixedPrecision) else _Refused(choices)


def _one_of(*words: str) -> Read:
    def read(value: Any) -> str | _Refused:
        if value in words:
            return str(value)
        meant = nearest(value, list(words)) if isinstance(value, str) else None
        return _Refused(f"expected one of {', '.join(words)}", did_you_mean(meant))

    return read


def _type(value: Any) -> str | _Refused:
    if value in _NO_DEVICE:
        known = ", ".join(name for name in get_args(Device) if name != "auto")
        return _Refused(f"accel does not know this device; it computes on {known}")
    # An unquoted NO is false in YAML 1.1.
    return "NO" if _plain(value) is False else _one_of(*_WAYS)(value)


def _job_type(value: Any) -> str | _Refused:
    return "NO" if _plain(value) is False else _one_of("NO", "DATA_PARALLEL", "MODEL_PARALLEL")(value)


# What the file asks for.


@dataclass(frozen=True)
class _Way:
    """How a `distributed_type` runs in accel."""

    kind: str
    device: str = "auto"
    engine: str = ""
    """What else it asks for, that accel has not yet."""

    @property
    def several(self) -> bool:
        return self.kind != "single"


_WAYS: Mapping[str, _Way] = {
    "NO": _Way("single"),
    "MPS": _Way("single", "mps"),  # of early releases
    "MULTI_CPU": _Way("torchrun", "cpu"),
    "MULTI_GPU": _Way("torchrun", "cuda"),
    "MULTI_XPU": _Way("torchrun", "xpu"),
    "FSDP": _Way("torchrun", engine="sharding (FSDP)"),
    "DEEPSPEED": _Way("torchrun", engine="DeepSpeed"),
    "MEGATRON_LM": _Way("torchrun", engine="Megatron-LM"),
    "XLA": _Way("xla"),
    "TPU": _Way("xla"),  # of early releases
}
_NO_DEVICE = ("MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_HPU", "MULTI_NEURON")
_LOCAL, _SAGEMAKER = "LOCAL_MACHINE", "AMAZON_SAGEMAKER"
_PORT = 29500
"""Where Accelerate lets machines meet unless told otherwise."""


@dataclass(frozen=True)
class _Asked:
    """The keys that shape the profile, with Accelerate's defaults."""

    compute_environment: str = _LOCAL
    distributed_type: str = "NO"
    num_processes: int = -1
    num_machines: int = 1
    main_process_ip: str | None = None
    main_process_port: int | None = None
    mixed_precision: str | None = None
    fp16: bool = False
    use_cpu: bool = False
    gpu_ids: str = "all"

    @property
    def way(self) -> _Way:
        return _Way("sagemaker") if self.compute_environment == _SAGEMAKER else _WAYS[self.distributed_type]

    @property
    def planned(self) -> str:
        """The launcher this needs, in words, if it is not here yet."""
        return PLANNED.get(self.way.kind, "")

    @property
    def spread(self) -> bool:
        """Whether machines have to meet."""
        return self.way.several and self.num_machines > 1

    @property
    def per_node(self) -> int | str:
        return "auto" if self.num_processes == -1 else self.num_processes // self.num_machines

    @property
    def endpoint(self) -> str:
        host = self.main_process_ip or ""
        return f"{f'[{host}]' if ':' in host else host}:{self.main_process_port or _PORT}"

    @property
    def device(self) -> str:
        return "cpu" if self.use_cpu else self.way.device

    @property
    def precision(self) -> str:
        return self.mixed_precision or ("fp16" if self.fp16 else "no")

    @property
    def visible(self) -> dict[str, str]:
        """The variable that shows the processes some of the devices only."""
        if self.gpu_ids.lower() == "all" or self.device in {"cpu", "mps"}:
            return {}
        return {"ZE_AFFINITY_MASK" if self.device == "xpu" else "CUDA_VISIBLE_DEVICES": self.gpu_ids}

    def profile(self) -> dict[str, Any]:
        several = {"nnodes": self.num_machines, "nproc_per_node": self.per_node}
        meeting = {"rdzv_endpoint": self.endpoint}
        return {
            "launcher": {
                "kind": self.way.kind,
                **(several if self.way.several else {}),
                **(meeting if self.spread else {}),
            },
            "device": self.device,
            "mixed_precision": self.precision,
            "env": self.visible,
        }


def _read(data: Mapping[str, Any], where: str) -> tuple[dict[str, Any], dict[str, Problem]]:
    """The values that can be understood, and what is wrong with the others."""
    form, other = _forms(data)
    values: dict[str, Any] = {}
    problems: dict[str, Problem] = {}
    for key, raw in data.items():
        if key not in form:
            problems[key] = Problem(
                where, key, "Accelerate does not know this key", hint=_meant(key, form, other)
            )
        elif raw is not None:
            values[key] = form[key].read(raw)
            if isinstance(values[key], _Refused):
                refused = values.pop(key)
                problems[key] = Problem(where, key, refused.expected, _came(key, raw), refused.hint)
    return values, problems


def _forms(data: Mapping[str, Any]) -> tuple[Mapping[str, _Key], Mapping[str, _Key]]:
    """The keys that this file may have, and those of the other kind of file."""
    return (_JOB, _CLUSTER) if data.get("compute_environment") == _SAGEMAKER else (_CLUSTER, _JOB)


def _meant(key: str, form: Mapping[str, _Key], other: Mapping[str, _Key]) -> str:
    if key in other:
        return f"it belongs to compute_environment: {_SAGEMAKER if other is _JOB else _LOCAL}"
    return did_you_mean(nearest(key, list(form)))


def _came(key: str, value: object) -> str:
    return repr(_without_secrets(key, value)) if isinstance(value, str) else _shown(key, value)


def _conflicts(asked: _Asked, data: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Keys whose values do not go together: key, what was expected, what came."""
    if data.get("distributed_type") is None:
        yield "distributed_type", "every Accelerate config file says one", "nothing"
    if asked.use_cpu and asked.way.device not in {"auto", "cpu"}:
        yield "use_cpu", f"this contradicts distributed_type: {asked.distributed_type}", "true"
    if not asked.spread:
        return
    if asked.main_process_ip is None:
        reason = f"{asked.num_machines} machines (num_machines) need the address of one of them"
        yield "main_process_ip", reason, "nothing"
    if asked.main_process_port == 0:
        yield "main_process_port", "several machines need one port that all of them know", "0"
    if asked.num_processes != -1 and asked.num_processes % asked.num_machines:
        reason = f"expected a multiple of num_machines, {asked.num_machines}: accel starts as many on each"
        yield "num_processes", reason, str(asked.num_processes)


def _refusal(
    asked: _Asked, data: Mapping[str, Any], problems: Mapping[str, Problem], where: str
) -> list[Problem]:
    """That the launcher is not here yet, and for every other key what will become of it."""
    cause = "distributed_type" if asked.compute_environment == _LOCAL else "compute_environment"
    reason = (
        f"{data[cause]} needs a launcher for {asked.planned}, which this version of accel has not; a profile that "
        "ran on this machine instead would be wrong, so none was made. What will become of the other keys:"
    )
    found = [Problem(where, cause, reason)]
    for path, value in _leaves(data):
        if path[0] in problems:
            found.append(problems[path[0]])
        elif path[0] != cause:
            text = f"{_shown('.'.join(path), value)} -> {_later(asked, path, value)}"
            found.append(Problem(where, ".".join(path), text))
    return list(dict.fromkeys(found))


# What becomes of each key.

_OFF = "off in accel too"


@dataclass(frozen=True)
class _Fate:
    """What becomes of a key."""

    text: str
    taken: bool = True
    """Whether it took effect, or asks for what accel does anyway."""


Fate = Callable[[_Asked, Any], _Fate]
"""What becomes of a key that has this value."""


@dataclass(frozen=True)
class _Key:
    """A key at the top of the file."""

    read: Read
    fate: Fate


def _fate(asked: _Asked, path: Path, value: Any) -> _Fate:
    if len(path) > 1 and path[0] in _SECTIONS:
        return _SECTIONS[path[0]].fate(path[1], value)
    form = _JOB if asked.compute_environment == _SAGEMAKER else _CLUSTER
    if value is None:
        return _Fate("not set")
    return form[path[0]].fate(asked, form[path[0]].read(value))


def _later(asked: _Asked, path: Path, value: Any) -> str:
    """What becomes of a key once the launcher is here."""
    if value is not None and path[0] in _LATER:
        return _LATER[path[0]]
    return _fate(asked, path, value).text


def _left(text: str) -> _Fate:
    return _Fate(text, taken=False)


def _unused(read: Read, reason: str, default: Any = None) -> _Key:
    """A key that no profile has: nothing is lost where it is off, or at its default."""
    return _Key(read, lambda _, value: _Fate(_OFF) if not value or value == default else _left(reason))


def _tpu(read: Read, words: str) -> _Key:
    """A key for TPUs."""

    def fate(asked: _Asked, value: Any) -> _Fate:
        if not value:
            return _Fate(_OFF)
        return _Fate(words) if asked.planned else _left("it is for TPUs, and this does not run on one")

    return _Key(read, fate)


def _job(read: Read, words: str) -> _Key:
    """A key for SageMaker."""
    return _Key(read, lambda *_: _Fate(words))


def _environment_fate(*_: Any) -> _Fate:
    return _Fate("accel runs on this machine")


def _type_fate(asked: _Asked, _: str) -> _Fate:
    way = asked.way
    if way.engine:
        return _left(
            f"{way.engine} is not in this version of accel: launcher.kind is {way.kind}, and every process keeps "
            "the whole model (DDP)"
        )
    device = "" if way.device == "auto" else f", device: {way.device}"
    return _Fate(f"launcher.kind: {way.kind}{device}")


def _processes_fate(asked: _Asked, number: int) -> _Fate:
    return _Fate(f"launcher.nproc_per_node: {asked.per_node}") if asked.way.several else _alone(asked, number)


def _machines_fate(asked: _Asked, number: int) -> _Fate:
    return _Fate(f"launcher.nnodes: {number}") if asked.way.several else _alone(asked, number)


def _alone(asked: _Asked, number: int) -> _Fate:
    text = f"distributed_type: {asked.distributed_type} is one process"
    return _left(f"{text}, in Accelerate too") if number > 1 else _Fate(text)


def _rank_fate(asked: _Asked, rank: int) -> _Fate:
    if asked.spread:
        return _left("not needed: the same command runs on every machine")
    return _left("not needed on one machine") if rank else _Fate("there is one machine")


def _ip_fate(asked: _Asked, _: str) -> _Fate:
    return _meeting(asked) if asked.spread else _left("not needed on one machine")


def _port_fate(asked: _Asked, port: int) -> _Fate:
    if asked.spread:
        return _meeting(asked)
    return _left("not needed on one machine") if port else _Fate("accel takes a free port too")


def _meeting(asked: _Asked) -> _Fate:
    return _Fate(f"launcher.rdzv_endpoint: {asked.endpoint}")


def _network_fate(asked: _Asked, _: bool) -> _Fate:
    same = "the machines meet at launcher.rdzv_endpoint, on one network or not"
    return _Fate(same if asked.spread else "there is one machine")


def _rdzv_fate(asked: _Asked, backend: str) -> _Fate:
    always = "accel always uses c10d" if asked.way.several else "one process has nothing to meet"
    return _Fate(always) if backend in {"static", "c10d", ""} or not asked.way.several else _left(always)


def _precision_fate(asked: _Asked, _: str) -> _Fate:
    return _Fate(f"mixed_precision: {asked.precision}")


def _fp16_fate(asked: _Asked, fp16: bool) -> _Fate:
    if not fp16:
        return _Fate(_OFF)
    if asked.precision == "fp16":
        return _Fate("mixed_precision: fp16")
    return _left("mixed_precision is in the file too, and Accelerate takes that")


def _cpu_fate(asked: _Asked, use_cpu: bool) -> _Fate:
    if use_cpu:
        return _Fate("device: cpu")
    return _Fate(f"device: {asked.device}" if asked.device != "cpu" else "device: cpu, by distributed_type")


def _ids_fate(asked: _Asked, ids: str) -> _Fate:
    if asked.visible:
        return _Fate("".join(f"env.{name}: {value}" for name, value in asked.visible.items()))
    if ids.lower() == "all":
        return _Fate("accel uses all there are")
    return _left(f"there is nothing to choose on device: {asked.device}")


def _section_fate(*_: Any) -> _Fate:
    return _Fate(_OFF)


@dataclass(frozen=True)
class _Section:
    """Keys under a key, none of which a profile has."""

    reason: str
    known: Mapping[str, tuple[Any, ...]]
    """Every key without its prefix, with the values that ask for nothing."""
    prefix: str = ""
    bare: bool = False
    """Whether Accelerate adds the prefix where it is missing."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Of keys that have a reason of their own."""

    def fate(self, key: str, value: Any) -> _Fate:
        if value is None:
            return _Fate("not set")
        short = key.removeprefix(self.prefix)
        if short not in self.known or not (self.bare or key.startswith(self.prefix)):
            return _left(f"Accelerate does not use this key either {self._meant(key)}".strip())
        off = ("", *self.known[short])
        return _Fate(_OFF) if _plain(value) in off else _left(self.reasons.get(short, self.reason))

    def _meant(self, key: str) -> str:
        names = [*(self.prefix + name for name in self.known), *(self.known if self.bare else ())]
        meant = did_you_mean(nearest(key, names))
        return f"({meant})" if meant else ""


def _keys(names: str, *off: Any) -> dict[str, tuple[Any, ...]]:
    return dict.fromkeys(names.split(), off)


_CLIPS = {"gradient_clipping": "the script does it: accelerator.clip_grad_norm_()"}
_MEETS = "the same command runs on every machine, so none is told of the others"
_SECTIONS: Mapping[str, _Section] = {
    "dynamo_config": _Section(
        "accel does not compile for the script: call torch.compile in it",
        _keys("backend use_fullgraph use_dynamic use_regional_compilation", False) | _keys("mode", "default"),
        prefix="dynamo_",
        bare=True,
    ),
    "fsdp_config": _Section(
        "sharding (FSDP) is not in this version of accel",
        _keys("reshard_after_forward", False, "no_shard")
        | _keys("sharding_strategy", "no_shard")
        | _keys("offload_params forward_prefetch cpu_ram_efficient_loading", False)
        | _keys("activation_checkpointing activation_checkpointing_offload", False)
        | _keys("auto_wrap_policy", "no_wrap")
        | _keys("backward_prefetch", "no_prefetch")
        | _keys("version min_num_params transformer_layer_cls_to_wrap state_dict_type")
        | _keys("use_orig_params sync_module_states ignored_modules"),
        prefix="fsdp_",
        bare=True,
    ),
    "deepspeed_config": _Section(
        "DeepSpeed is not in this version of accel",
        _keys("zero_stage", 0)
        | _keys("gradient_accumulation_steps", 1)
        | _keys("offload_optimizer_device offload_param_device", "none")
        | _keys("offload_optimizer_nvme_path offload_param_nvme_path", "none")
        | _keys("zero3_init_flag zero3_save_16bit_model", False)
        | _keys("gradient_clipping deepspeed_config_file deepspeed_moe_layer_cls_names")
        | _keys("deepspeed_multinode_launcher deepspeed_hostfile")
        | _keys("deepspeed_exclusion_filter deepspeed_inclusion_filter"),
        reasons={
            "deepspeed_config_file": "DeepSpeed is not in this version of accel, and what that file says was not read",
            "gradient_accumulation_steps": "the script says it: Accelerator(gradient_accumulation_steps=...)",
            "deepspeed_multinode_launcher": _MEETS,
            "deepspeed_hostfile": _MEETS,
            "deepspeed_exclusion_filter": _MEETS,
            "deepspeed_inclusion_filter": _MEETS,
            **_CLIPS,
        },
    ),
    "parallelism_config": _Section(
        "parallelism other than copies of the whole model (DDP) is not in this version of accel",
        _keys("dp_replicate_size dp_shard_size tp_size cp_size sp_size", 1)
        | _keys("cp_backend cp_comm_strategy sp_backend sp_seq_length sp_seq_length_is_variable")
        | _keys("sp_attn_implementation"),
        prefix="parallelism_config_",
        reasons={"dp_replicate_size": "accel keeps a copy of the model on every process"},
    ),
    "megatron_lm_config": _Section(
        "Megatron-LM is not in this version of accel",
        _keys("tp_degree pp_degree num_micro_batches expert_model_parallel_size", 1)
        | _keys("context_parallel_size expert_tensor_parallel_size", 1)
        | _keys("sequence_parallelism recompute_activations use_distributed_optimizer", False)
        | _keys("use_custom_fsdp overlap_cpu_optimizer_d2h_h2d optimizer_cpu_offload", False)
        | _keys("use_precision_aware_optimizer calculate_per_token_loss eod_mask_loss", False)
        | _keys("no_load_optim no_save_optim", False)
        | _keys("gradient_clipping decoder_last_pipeline_num_layers attention_backend")
        | _keys("recompute_granularity recompute_method recompute_num_layers attention_dropout")
        | _keys("hidden_dropout attention_softmax_in_fp32 use_rotary_position_embeddings"),
        prefix="megatron_lm_",
        reasons=_CLIPS,
    ),
    "mpirun_config": _Section(
        "accel starts the processes itself, without mpirun",
        _keys("hostfile") | _keys("ccl", False, 0, "0"),
        prefix="mpirun_",
    ),
    "fp8_config": _Section(
        "fp8 is not in this version of accel",
        _keys("backend use_autocast_during_eval margin interval format amax_history_len amax_compute_algo")
        | _keys("override_linear_precision opt_level enable_fsdp_float8_all_gather pad_inner_dim")
        # These the wizard of Accelerate writes, and its launcher does not read.
        | _keys("amax_history_length amax_compute_algorithm optimization_level"),
        prefix="fp8_",
        bare=True,
    ),
    # Earlier releases wrote these two.
    "ipex_config": _Section("accel does not use IPEX", _keys("ipex use_xpu", False)),
    "tp_config": _Section("tensor parallelism is not in this version of accel", _keys("tp_size", 1)),
}
_LATER: Mapping[str, str] = {
    "num_processes": "the number of processes",
    "num_machines": "the number of machines",
    "main_process_ip": "where the machines meet",
    "main_process_port": "where the machines meet",
}
"""What keys will be for launchers that are planned, where it is not what they are for the others."""

_COUNT = "expected a whole number of at least 1"
_BASE: Mapping[str, _Key] = {
    "compute_environment": _Key(_one_of(_LOCAL, _SAGEMAKER), _environment_fate),
    "mixed_precision": _Key(_precision, _precision_fate),
    "fp16": _Key(_truth, _fp16_fate),
    "use_cpu": _Key(_truth, _cpu_fate),
    "gpu_ids": _Key(_ids, _ids_fate),
    "num_machines": _Key(_whole(_COUNT, 1), _machines_fate),
    "debug": _unused(_truth, "this version of accel has no such check of collectives to switch on"),
    "enable_cpu_affinity": _unused(_truth, "accel does not bind processes to processor cores"),
    "dynamo_backend": _Key(_text, lambda _, value: _SECTIONS["dynamo_config"].fate("dynamo_backend", value)),
    "dynamo_config": _Key(_section, _section_fate),
}
_CLUSTER: Mapping[str, _Key] = {
    **_BASE,
    "distributed_type": _Key(_type, _type_fate),
    "num_processes": _Key(_processes, _processes_fate),
    "machine_rank": _Key(_whole("expected a whole number of at least 0", 0), _rank_fate),
    "main_process_ip": _Key(_host, _ip_fate),
    "main_process_port": _Key(_whole(f"expected a port, 0 to {_LAST_PORT}", 0, _LAST_PORT), _port_fate),
    "rdzv_backend": _Key(_text, _rdzv_fate),
    "same_network": _Key(_truth, _network_fate),
    "main_training_function": _unused(_text, "accel runs the script itself, no function of it", "main"),
    "downcast_bf16": _tpu(_truth, "the number format on the TPU"),
    "tpu_name": _tpu(_text, "the name of the TPU"),
    "tpu_zone": _tpu(_text, "the zone of the TPU"),
    "tpu_use_cluster": _tpu(_truth, "whether the TPU is a pod"),
    "tpu_use_sudo": _tpu(_truth, "whether the pod's commands use sudo"),
    "tpu_vm": _tpu(_texts, "the pod's machines"),
    "tpu_env": _tpu(_texts, "variables for the processes"),
    "commands": _tpu(_texts, "what the pod's machines run first"),
    "command_file": _tpu(_text, "what the pod's machines run first"),
    **dict.fromkeys(_SECTIONS, _Key(_section, _section_fate)),
}
_JOB: Mapping[str, _Key] = {
    **_BASE,
    "distributed_type": _job(_job_type, "how the processes of the job train together"),
    "ec2_instance_type": _job(_text, "the instance type of the job"),
    "iam_role_name": _job(_text, "the role the job runs as"),
    "image_uri": _job(_text, "the container image of the job"),
    "profile": _job(_text, "the AWS profile that submits the job"),
    "region": _job(_text, "the AWS region of the job"),
    "base_job_name": _job(_text, "what the job's name starts with"),
    "pytorch_version": _job(_text, "the torch of the container image"),
    "transformers_version": _job(_text, "nothing: accel's jobs do not use that image"),
    "py_version": _job(_text, "the Python of the container image"),
    "sagemaker_inputs_file": _job(_text, "the inputs of the job"),
    "sagemaker_metrics_file": _job(_text, "the metrics of the job"),
    "additional_args": _job(_section, "an argument of the job"),
}
