"""Translation of options of `accelerate launch` and `torchrun` with one meaning here to those of `accel launch`.

Options of sharding are the keys of a config file, and are converted as one. An option that has no meaning here stays in
the command line, which refuses it with what to use instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from accel_cli.accelerate.config_conversion import convert
from accel_cli.accelerate.config_file import build_config, get_kind, read_data
from accel_cli.accelerate.config_values import get_default
from accel_cli.accelerate.variables import FP8, is_fp8, read_section
from accel_cli.errors import UsageError
from accel_cli.planning.launch_options import ConfigFile, find_foreign_option, normalize_option
from accel_cli.planning.network import Endpoint
from accel_cli.profile import yaml_io
from accel_runtime.environment.accelerate import launch, megatron, sharding
from accel_runtime.environment.accelerate.setting import ConfigSection, Setting

__all__ = ["OptionTranslation", "translate"]

_DEFAULT_PORT = 29500
"""The port of the first node in Accelerate and in torchrun."""
_OWN_ENGINES = tuple(engine.section for engine in sharding.ENGINES)
"""The sections of engines that a profile may have too."""
_SECTIONS = (sharding.FSDP, *_OWN_ENGINES, megatron.MEGATRON_LM, sharding.PARALLELISM, launch.FP8)
_SWITCHES: Mapping[str, ConfigSection] = {
    sharding.USE_FSDP.option: sharding.FSDP,
    **{engine.switch.option: engine.section for engine in sharding.ENGINES},
    megatron.USE_MEGATRON_LM.option: megatron.MEGATRON_LM,
    sharding.USE_PARALLELISM_CONFIG.option: sharding.PARALLELISM,
}
"""The options that use the keys of a section."""
_ENGINES = (*_OWN_ENGINES, megatron.MEGATRON_LM)
_ENGINE_FILES = frozenset(engine.file.profile_key for engine in sharding.ENGINES)
_FP8_VARIABLES = (*(setting.variable for setting in launch.FP8.settings), *launch.FP8_OVERRIDES)
_SILENT = frozenset(
    {
        *(engine.fields.variable for engine in sharding.ENGINES),
        launch.MIXED_PRECISION.variable,
        *(setting.variable for setting in launch.DYNAMO_SETTINGS),
    }
)
"""Variables that follow from a file only, or that other options set."""
_OF_FSDP2 = frozenset(setting.variable for setting in sharding.OF_FSDP2)
"""Variables without a key of the profile that Accelerate reads with version 2 of FSDP too."""
_RDZV_CONF = {
    "timeout": "launcher.rdzv_timeout",
    "join_timeout": "launcher.rdzv_timeout",
    "last_call_timeout": "launcher.last_call_timeout",
}
_SET = {
    "monitor-interval": "launcher.monitor_interval",
    # The key of torchrun's section does not exist for one process.
    launch.NUM_CPU_THREADS_PER_PROCESS.option: "env.OMP_NUM_THREADS",
}
"""Options whose value is that of a key."""
_TPU = frozenset({"XLA", "TPU"})
"""Each `distributed_type` of a TPU."""
_WHOLE_SCRIPT = frozenset({"", "main"})
"""The functions that Accelerate does not call, except on a TPU."""
_DEVICE_COUNTS = ("gpu", "xpu", "cpu")
"""Values of torchrun's `nproc_per_node` that are not values here."""


class _Option(NamedTuple):
    """An option as typed."""

    flag: str
    value: str

    @property
    def text(self) -> str:
        return f"{self.flag} {self.value}".strip()


@dataclass(frozen=True)
class OptionTranslation:
    """A command line of `accel launch`."""

    args: tuple[str, ...]
    is_changed: bool = False
    """True if an option was translated."""
    total: _Option | None = None
    """The option with the number of processes on all nodes."""
    one_node: _Option | None = None
    """An option that is left out since a run on one node does not need it."""
    engine: _Option | None = None
    """The option that selects an engine other than `parallel:` and `fully_shard:`."""
    variables: Mapping[str, _Option] = field(default_factory=dict)
    """The options that became environment variables, by the names of these."""
    data: Mapping[str, Any] | None = None
    """The content of the config file, which may be a pipe that is read only once; None if it has not been read."""

    def check(self, environ: Mapping[str, str], num_nodes: int, num_processes: int, layout: str) -> None:
        """Raise if the environment or a profile gives the command another meaning.

        Args:
            environ: The environment, whose variables are never overwritten.
            num_nodes: The number of nodes of the plan.
            num_processes: The number of processes of each node.
            layout: The layout of models; empty if they are replicated.

        Raises:
            UsageError: The number of processes is another one, models would be sharded twice, or a variable that an option
                sets has another value.
        """
        for name, option in self.variables.items():
            if name in environ:
                raise UsageError(
                    f"Cannot use {option.text}: {name}={environ[name]} in the environment takes precedence. Unset it, or leave "
                    "out the option."
                )
        launched = num_nodes * num_processes
        # A process that another launcher has started is one rank.
        if self.total and launched not in {1, int(self.total.value)}:
            raise UsageError(
                f"Cannot use {self.total.text}: it is the number on all nodes, and the profile or the scheduler starts "
                f"{launched} on {num_nodes} nodes. Use --nproc-per-node N, the number on each node."
            )
        if self.one_node and num_nodes > 1:
            raise UsageError(
                f"Cannot use {self.one_node.text} alone: the profile or the scheduler starts {num_nodes} nodes. Use "
                "--rdzv-endpoint HOST:PORT."
            )
        if self.engine and layout:
            raise UsageError(
                f"Cannot use {self.engine.flag}: the profile shards models too ({layout}). Use --no-profile, or remove "
                "parallel: from the profile."
            )


@dataclass
class _Command:
    """A command line that is being translated."""

    own: dict[str, _Option] = field(default_factory=dict)
    """The options of accel, by name."""
    kept: list[str] = field(default_factory=list)
    """The words of the options of accel."""
    foreign: dict[str, _Option] = field(default_factory=dict)
    """The options that are not translated yet, by name; the last one of a name counts."""
    values: dict[str, str] = field(default_factory=dict)
    """The values that options are translated to, by option or by key of `--set`."""
    sources: dict[str, _Option] = field(default_factory=dict)
    """The options as typed, by the same names."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """The content of the config file; empty without one."""
    total: _Option | None = None
    one_node: _Option | None = None
    engine: _Option | None = None

    def pop(self, *names: str) -> _Option | None:
        """Return the option with one of some names, which all have the same meaning; None if it is not given.

        Raises:
            UsageError: Two of them have different values.
        """
        found = [option for name in names if (option := self.foreign.pop(name, None))]
        for option in found[1:]:
            if option.value != found[0].value:
                raise UsageError(f"Cannot use {found[0].text} with {option.text}. Leave out one of them.")
        return found[0] if found else None

    def add(self, name: str, value: Any, source: _Option) -> None:
        """Add an option of accel, or the assignment of a key with a dot.

        Raises:
            UsageError: Another option gives it another value.
        """
        text = str(value)
        key = name.removeprefix("--")
        other = self.own.get(key) or self.sources.get(name)
        given = self.values.get(name, other.value.removeprefix(f"{key}=") if other else text)
        if given != text:
            what = name if name.startswith("--") else f"--set {name}"
            raise UsageError(
                f"Cannot use {source.text} with {other.text if other else ''}: both set {what}. Leave out one of them."
            )
        if other is None:
            self.values[name], self.sources[name] = text, source

    def format_words(self) -> list[str]:
        """Return the translated options."""
        words: list[str] = []
        for name, value in self.values.items():
            words += (
                [name, *([value] if value else [])] if name.startswith("--") else ["--set", f"{name}={value}"]
            )
        return words


def translate(args: Sequence[str], own: Mapping[str, bool]) -> OptionTranslation:
    """Return a command line in which options of `accelerate launch` and `torchrun` are those of accel.

    Args:
        args: The command line.
        own: The options of accel with `-` or `--`; True for each that takes a value.

    Raises:
        UsageError: Options contradict each other, or the value of one has no meaning here.
    """
    command, rest = _read(args, own)
    typed = dict(command.foreign)
    if not typed:
        return OptionTranslation(tuple(args))
    if file := command.own.get("config-file"):
        command.data = read_data(Path(file.value))
    _translate_processes(command)
    _translate_nodes(command)
    _translate_devices(command)
    _translate_sharding(command)
    for name, key in _SET.items():
        if option := command.pop(name):
            command.add(key, option.value, option)
    left = [word for option in command.foreign.values() for word in (option.flag, option.value) if word]
    if command.foreign.keys() == typed.keys():
        return OptionTranslation(tuple(args), data=command.data or None)
    return OptionTranslation(
        (*command.kept, *command.format_words(), *left, *rest),
        is_changed=True,
        total=command.total,
        one_node=command.one_node,
        engine=command.engine,
        variables={
            name.removeprefix("env."): source
            for name, source in command.sources.items()
            if name.startswith("env.")
        },
        data=command.data or None,
    )


def _read(args: Sequence[str], own: Mapping[str, bool]) -> tuple[_Command, list[str]]:
    """Return the options before the script, and the rest, which begins with the first unknown option."""
    command, rest = _Command(), list(args)
    while rest and rest[0].startswith("-") and rest[0] not in {"-", "--"}:
        flag, equals, value = rest[0].partition("=")
        name = normalize_option(flag.lstrip("-"))
        spelled = flag if len(flag) == 2 else f"--{name}"  # noqa: PLR2004 - `-m`
        is_own = spelled in own
        foreign = None if is_own else find_foreign_option(name)
        if not is_own and not foreign:
            break
        setting = _find_setting(name)
        takes_value = own[spelled] if is_own else bool(foreign and foreign.takes_value)
        if setting and setting[1].is_switch:
            takes_value = False
        del rest[0]
        if takes_value and not equals and rest:
            value = rest.pop(0)
        option = _Option(flag, value)
        if is_own and not _is_foreign_value(name, value):
            command.own[name] = option
            command.kept += [f"{spelled}={value}"] if equals else [spelled, *([value] if takes_value else [])]
            if name == "set":
                command.own[value.partition("=")[0]] = option
        else:
            command.foreign[name] = option
    return command, rest


def _is_foreign_value(name: str, value: str) -> bool:
    """Return True if an option of accel has a value that only another launcher has."""
    return (name == "nproc-per-node" and value in _DEVICE_COUNTS) or (
        name == launch.MIXED_PRECISION.option and value == FP8
    )


def _find_setting(name: str) -> tuple[ConfigSection, Setting] | None:
    """Return the setting of an option of sharding or of 8-bit formats, with its section."""
    for section in _SECTIONS:
        for setting in section.settings:
            if setting.key and setting.option == name:
                return section, setting
        if section.variable_prefix and name.startswith(normalize_option(section.variable_prefix.lower())):
            return section, Setting(name.replace("-", "_"))
    return None


def _parse_count(option: _Option, minimum: int = 1) -> int:
    if not (option.value.isascii() and option.value.isdigit() and int(option.value) >= minimum):
        raise UsageError(
            f"Invalid {option.flag} {option.value!r}: expected a whole number of at least {minimum}."
        )
    return int(option.value)


# Processes and nodes


def _find_nodes(command: _Command) -> int | None:
    """Return the number of nodes of the command line or of the file; None if neither has one."""
    names = (launch.NUM_MACHINES.option, "num-nodes")
    option = command.own.get("nnodes") or next(
        (command.foreign[name] for name in names if name in command.foreign), None
    )
    if option is None:
        number = command.data.get(launch.NUM_MACHINES.key)
        return int(number) if number is not None and str(number).isdigit() else None
    if option.flag.startswith("--nn") and ":" in option.value:
        return None
    return _parse_count(option)


def _translate_processes(command: _Command) -> None:
    if total := command.pop(launch.NUM_PROCESSES.option):
        _translate_total(command, total)
    if gpus := command.pop("num-gpus", "gpus"):
        _translate_gpus(command, gpus)
    if count := command.pop("nproc-per-node"):
        if count.value == "cpu":
            command.add("--nproc-per-node", os.cpu_count() or 1, count)
            command.add("--cpu", "", count)
        else:
            command.add("--nproc-per-node", "auto", count)
            command.add("device", "cuda" if count.value == "gpu" else "xpu", count)
    if multi_gpu := command.pop(launch.MULTI_GPU.option):
        for name in ("cpu", launch.USE_CPU.option):
            if other := command.own.get(name) or command.foreign.get(name):
                raise UsageError(
                    f"Cannot use {multi_gpu.text} with {other.text}: they select different devices. Leave out one of them."
                )
        chosen = {"nproc-per-node", "gpu-ids"} & command.own.keys() or "--nproc-per-node" in command.values
        in_file = command.data.get(launch.NUM_PROCESSES.key)
        if not chosen and (in_file is None or get_kind(command.data) == "NO"):
            # A file of one process may still have the number of several.
            command.add("--nproc-per-node", "auto" if in_file is None else in_file, multi_gpu)


def _translate_total(command: _Command, total: _Option) -> None:
    """Translate the number of processes on all nodes to that of each node."""
    count, nodes = _parse_count(total), _find_nodes(command) or 1
    nnodes = command.own.get("nnodes")
    if "tpu" in command.foreign or get_kind(command.data) in _TPU:
        # Accelerate starts one on every core too, whatever the number.
        command.add("launcher.replicas", 1 if count == 1 else "all", total)
    elif nnodes and ":" in nnodes.value:
        raise UsageError(
            f"Cannot use {total.text} with {nnodes.text}: the number of nodes is not fixed. Use --nproc-per-node N, the "
            "number on each node."
        )
    elif count % nodes:
        raise UsageError(
            f"Invalid {total.text}: it is the number on all nodes, and must be a multiple of their number, {nodes}. Use "
            "--nproc-per-node N, the number on each node."
        )
    else:
        command.total = total
        command.add("--nproc-per-node", count // nodes, total)


def _translate_gpus(command: _Command, gpus: _Option) -> None:
    """Translate a number of GPUs, `all` of them, or their ids."""
    if gpus.value in {"all", "auto", "-1"}:
        command.add("--nproc-per-node", "auto", gpus)
    elif "," in gpus.value:
        command.add("--gpu-ids", gpus.value.strip(","), gpus)
    else:
        command.add("--nproc-per-node", _parse_count(gpus), gpus)


def _translate_nodes(command: _Command) -> None:
    nodes = _find_nodes(command)
    if machines := command.pop(launch.NUM_MACHINES.option, "num-nodes"):
        command.add("--nnodes", _parse_count(machines), machines)
    if rank := command.pop(launch.MACHINE_RANK.option):
        number = _parse_count(rank, 0)
        if nodes is not None and number >= nodes:
            raise UsageError(
                f"Invalid {rank.text}: expected 0 to {nodes - 1}, for {nodes} node(s). Correct it, or set --nnodes."
            )
        if nodes != 1:
            command.add("--node-rank", number, rank)
    _translate_endpoint(command, nodes or 1)
    if standalone := command.pop("standalone"):
        other = command.own.get("rdzv-endpoint") or command.own.get("nnodes")
        if (nodes or 1) > 1 or "rdzv-endpoint" in command.own:
            raise UsageError(
                f"Cannot use {standalone.text} with {other.text if other else f'{nodes} nodes'}: it is for one node. Leave out "
                "one of them."
            )
        if nodes is None:
            command.add("--nnodes", 1, standalone)
    backend = command.foreign.get(launch.RDZV_BACKEND.option)
    if backend and backend.value in (launch.RDZV_BACKEND.same or ()):
        command.pop(launch.RDZV_BACKEND.option)
    command.pop(launch.SAME_NETWORK.option)
    _translate_rdzv_conf(command)


def _translate_endpoint(command: _Command, nodes: int) -> None:
    """Translate the address and port of the first node; on one node, the rendezvous uses a free port."""
    address = command.pop(launch.MAIN_PROCESS_IP.option, "master-addr")
    port = command.pop(launch.MAIN_PROCESS_PORT.option, "master-port")
    option = address or port
    if option is None:
        return
    number = _parse_count(port, 0) if port else command.data.get(launch.MAIN_PROCESS_PORT.key)
    if nodes == 1:
        command.one_node = option
        return
    host = address.value if address else command.data.get(launch.MAIN_PROCESS_IP.key)
    if not host:
        raise UsageError(
            f"Cannot use {option.text} without --main_process_ip: {nodes} nodes need the address of one of them. Use "
            "--rdzv-endpoint HOST:PORT."
        )
    command.add("--rdzv-endpoint", Endpoint(str(host).strip("[]"), int(number or _DEFAULT_PORT)), option)


def _translate_rdzv_conf(command: _Command) -> None:
    """Translate the timeouts of torchrun's `rdzv_conf`, if it has nothing else."""
    option = command.foreign.get("rdzv-conf")
    pairs = [pair.partition("=") for pair in option.value.split(",") if pair] if option else []
    if option and all(key.strip() in _RDZV_CONF for key, _, _ in pairs):
        command.pop("rdzv-conf")
        for key, _, value in pairs:
            command.add(_RDZV_CONF[key.strip()], value.strip(), option)


# Devices and formats


def _translate_devices(command: _Command) -> None:
    if use_cpu := command.pop(launch.USE_CPU.option):
        command.add("--cpu", "", use_cpu)
    function = command.foreign.get(launch.MAIN_TRAINING_FUNCTION.option)
    is_tpu = "tpu" in command.foreign or get_kind(command.data) in _TPU
    if function and (is_tpu or function.value in _WHOLE_SCRIPT):
        command.pop(launch.MAIN_TRAINING_FUNCTION.option)
        if is_tpu:
            command.add(launch.MAIN_TRAINING_FUNCTION.profile_key, function.value, function)
    if tpu := command.pop("tpu"):
        command.add("launcher.kind", "xla", tpu)
    if debug := command.pop(launch.DEBUG.option):
        command.add(f"env.{launch.DEBUG.variable}", "true", debug)
    for setting in launch.DYNAMO_SETTINGS:
        if option := command.pop(setting.option):
            command.add(setting.profile_key, "true" if setting.is_switch else option.value.lower(), option)


# Sharding: options that are keys of a config file


def _translate_sharding(command: _Command) -> None:
    switches = [name for name in _SWITCHES if name in command.foreign]
    kind = _choose_kind(command, [name for name in switches if _SWITCHES[name].distributed_type])
    options = {name: found for name in command.foreign if (found := _find_setting(name))}
    steps = sharding.GRADIENT_ACCUMULATION_STEPS
    if kind not in sharding.ENGINE_TYPES:  # a key of their sections
        options.pop(steps.option, None)
        if option := command.pop(steps.option):
            command.add(steps.profile_key, _parse_count(option), option)
    formats = [name for name in (launch.MIXED_PRECISION.option,) if name in command.foreign]
    if not (options or switches or formats):
        return
    merged = _merge(command, kind, options, is_8bit=bool(formats))
    _check_switches(
        command, options, kind, merged, has_mesh=sharding.USE_PARALLELISM_CONFIG.option in switches
    )
    typed = {name: command.foreign.pop(name) for name in (*switches, *formats, *options)}
    source = next(iter(typed.values()))
    folder = Path(command.own["config-file"].value).parent if command.data else Path()
    before = build_config(command.data, "the file", folder) if command.data else ConfigFile("", {})
    after = build_config(merged, "the options", folder)
    is_fsdp, is_fsdp1 = kind == sharding.FSDP.distributed_type, after.fixed_reason and "fsdp-version" in typed
    if is_fsdp and before.fixed_reason and options:
        raise UsageError(
            f"Cannot use {source.text} with {command.own['config-file'].text}: the file has {before.fixed_reason}. Change "
            "the file."
        )
    is_passed = not is_fsdp or is_fsdp1
    kept = {setting.variable for _, setting in options.values()} & _OF_FSDP2
    kept |= {*_FP8_VARIABLES} if formats else set()
    _check_effect(after.unused if is_passed else convert(merged, "the options").left, options, typed)
    sources = {setting.variable: typed[name] for name, (_, setting) in options.items()}
    own = {words.name for words in sharding.ENGINES if words.switch.profile_key in after.values}
    is_engine = kind in {section.distributed_type for section in _ENGINES} and not own
    of_profile = own or (set() if is_engine else {"parallel", "fully_shard"})
    if own:
        sources |= {setting.profile_key: typed[name] for name, (_, setting) in options.items()}
        of_profile = {*of_profile, steps.profile_key}
    for key, value in _list_changes(before.values, after.values):
        section, _, variable = key.partition(".")
        if {section, key} & of_profile:
            # A path stays as typed: relative to the current folder.
            text = sources[key].value if key in _ENGINE_FILES else yaml_io.inline(value)
            command.add(key, text, sources.get(key, source))
        elif section == "env" and (
            variable in kept or value == FP8 or (is_passed and variable not in _SILENT)
        ):
            command.add(key, value, sources.get(variable, source))
    if is_engine:
        command.engine = source


def _list_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the keys that options change, with their values; an option may return a key of the file to its default."""
    for key in dict.fromkeys([*after, *before]):
        default = None if key.startswith(("env.", "launcher.")) else get_default(key)
        value = after.get(key, default)
        if value is not None and before.get(key, default) != value:
            yield key, value


def _choose_kind(command: _Command, kinds: Sequence[str]) -> str:
    """Return the `distributed_type` of the options, or else that of the file."""
    options = [command.foreign[name] for name in kinds]
    if len(options) > 1:
        raise UsageError(
            f"Cannot use {options[0].flag} with {options[1].flag}: they shard models in different ways. Leave out one of "
            "them."
        )
    file_kind = get_kind(command.data)
    if not kinds:
        return file_kind
    kind = _SWITCHES[kinds[0]].distributed_type
    if file_kind in {section.distributed_type for section in _SWITCHES.values()} - {kind, ""}:
        raise UsageError(
            f"Cannot use {options[0].flag} with {command.own['config-file'].text}: the file has "
            f"{launch.DISTRIBUTED_TYPE.key}: {file_kind}. Leave out one of them."
        )
    return kind


def _merge(
    command: _Command, kind: str, options: Mapping[str, tuple[ConfigSection, Setting]], *, is_8bit: bool
) -> dict[str, Any]:
    """Return the config file with the options as its keys."""
    nodes = _find_nodes(command) or int(command.values.get("--nnodes", 1))
    merged = {
        **command.data,
        launch.DISTRIBUTED_TYPE.key: kind or "MULTI_GPU",
        launch.NUM_MACHINES.key: nodes,
        # Required for several nodes, and not used.
        launch.MAIN_PROCESS_IP.key: "node",
    }
    count = command.values.get("--nproc-per-node") or command.own.get("nproc-per-node", _Option("", "")).value
    if count:
        merged[launch.NUM_PROCESSES.key] = int(count) * nodes if count.isdigit() else -1
    if is_8bit:
        merged[launch.MIXED_PRECISION.key] = FP8
    for name, (section, setting) in options.items():
        value = "true" if setting.is_switch else command.foreign[name].value
        merged[section.key] = {**read_section(merged, section), setting.key: value}
    return merged


def _check_switches(
    command: _Command,
    options: Mapping[str, tuple[ConfigSection, Setting]],
    kind: str,
    merged: Mapping[str, Any],
    *,
    has_mesh: bool,
) -> None:
    """Raise if the options of a section are given without the option that uses it."""
    for name, (section, _) in options.items():
        if section is launch.FP8:
            is_used, switch = is_fp8(merged), f"{launch.MIXED_PRECISION.option} {FP8}"
        elif section is sharding.PARALLELISM:
            is_used, switch = has_mesh or section.key in command.data, sharding.USE_PARALLELISM_CONFIG.option
        else:
            is_used = section.distributed_type == kind
            switch = next(option for option, used in _SWITCHES.items() if used is section)
        if not is_used:
            raise UsageError(
                f"Cannot use {command.foreign[name].text} without --{switch}: it has no effect. Add --{switch}, or leave it out."
            )


def _check_effect(
    unused: Iterable[tuple[str, str]],
    options: Mapping[str, tuple[ConfigSection, Setting]],
    typed: Mapping[str, _Option],
) -> None:
    """Raise if an option has no effect."""
    names = {(section.key, setting.key): name for name, (section, setting) in options.items()}
    for line, reason in unused:
        section, _, key = line.partition(":")[0].rpartition(".")
        name = names.get((section, key))
        if name and options[name][1].variable not in _OF_FSDP2:
            raise UsageError(
                f"Cannot use {typed[name].text}: {reason}. Leave it out, or write it in a config file."
            )
