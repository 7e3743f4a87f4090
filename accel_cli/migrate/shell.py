"""Commands of shell scripts that launch training: `torchrun`, `torch.distributed.launch`, `accelerate launch`, `deepspeed`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from accel_cli.migrate.findings import Finding
from accel_cli.planning.options import OPTIONS, find_foreign_option, normalize_option
from accel_runtime.environment.accelerate import launch, sharding

__all__ = ["migrate_shell"]

_LAUNCH = re.compile(
    r"(?<![\w./$~-])(?:(?P<command>torchrun|accelerate[ \t]+launch|accelerate-launch|deepspeed)|"
    r"(?P<python>[\w./~-]*\bpython[\d.]*|\$\{?\w*(?:python|py)\w*\}?|\"\$\{?\w*(?:python|py)\w*\}?\")(?P<flags>(?:[ \t]+-u)?)[ \t]+-m[ \t]+"
    r"(?P<module>torch\.distributed\.(?:launch|run)|accelerate\.commands\.launch))(?=[ \t\\])",
    re.IGNORECASE,
)
_TEXT = re.compile(
    r"""\\.|(?P<comment>(?<![^\s;&|(])\#[^\n]*)|'(?P<single>[^']*)'|"(?P<double>(?:[^"\\]|\\.)*)"|"""
    r"""<<-?[ \t]*(?P<mark>['"]?)(?P<end>\w+)(?P=mark)[^\n]*\n.*?^[ \t]*(?P=end)[ \t]*\r?$""",
    re.DOTALL | re.MULTILINE,
)
"""Comments, quoted text and here-documents."""
_NO_COMMAND = re.compile(r"\s*(?:echo|printf|which|type|command|pip3?|conda|man|git|p?grep|p?kill|killall)\b")
_RUNS_TEXT = re.compile(r"(?:=|\s-\w*c[ \t]+|\beval[ \t]+|\bssh\b[^\n]*[ \t])\Z")
_VARIABLE = re.compile(r"""(?P<quote>"?)\$\{?(?P<name>\w+)(?:\[[@*]\])?\}?(?P=quote)(?=\s|\\|$)""")
_CALCULABLE = re.compile(r"\d+|\$\w+|\$\{\w+\}|\$\(\([^()]*\)\)")
_WORD = re.compile(
    r"""(?:[^\s\\"'`;&|<>()#$]|\$\{[^}]*\}|\$\(\([^()]*\)\)|\$\([^)]*\)|\$|(?<=\S)#|\\[^\n]|"(?:[^"\\]|\\.)*"|'[^']*')+"""
)
_GAP = re.compile(r"(?:[ \t]|\\\r?\n)*")
_VALUE_GAP = re.compile(r"(?:\s|\\\r?\n)*")
"""The space between options in a command, and in the value of a variable."""
_SHORT = {
    "-m": "module",
    "-q": "quiet",
    "-t": "tee",
    "-r": "redirects",
    "-H": "hostfile",
    "-i": "include",
    "-e": "exclude",
    f"--{launch.USE_CPU.key}": "cpu",
    f"--{launch.USE_CPU.option}": "cpu",
}
_NUM_MACHINES, _MACHINE_RANK = launch.NUM_MACHINES.option, launch.MACHINE_RANK.option
_MAIN_PORT = launch.MAIN_PROCESS_PORT.option
_DROPPED = {
    "use-env", "no-local-rank", "bind-cores-to-rank", "tee", "redirects", "quiet", launch.RDZV_BACKEND.option, launch.MULTI_GPU.option, _NUM_MACHINES,
}  # fmt: skip
_SET = {
    "monitor-interval": "launcher.monitor_interval",
    "start-method": "launcher.start_method",
    launch.NUM_CPU_THREADS_PER_PROCESS.option: launch.NUM_CPU_THREADS_PER_PROCESS.profile_key,
}


_FLAGS = {"use-env", "no-local-rank", "bind-cores-to-rank", "force-multi", "no-ssh"}
"""Options without a value."""
_USE_DEEPSPEED, _ZERO_STAGE = sharding.USE_DEEPSPEED.option, sharding.ZERO_STAGE.option
_DEEPSPEED_FILE, _ZERO3_INIT = sharding.DEEPSPEED_FILE.option, sharding.ZERO3_INIT.option
_DEEPSPEED_SET = {
    setting.option: setting.profile_key
    for setting in sharding.DEEPSPEED.settings
    if setting.profile_key and setting is not sharding.ZERO_STAGE
}


@dataclass
class _Options:
    """The options of one command: those that stay, and those that are read together."""

    kept: list[str] = field(default_factory=list)
    values: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Part:
    """A place with options: in a command, or in the value of a variable."""

    start: int
    end: int
    words: list[tuple[str, str | None]]
    gap: str


def migrate_shell(text: str) -> tuple[str, tuple[Finding, ...]]:
    """Return a shell script whose training commands are those of `accel launch`, and the commands that are not converted."""
    changes: dict[tuple[int, int], str] = {}
    findings: list[Finding] = []
    for match in _LAUNCH.finditer(text):
        end = _find_end(text, match.start())
        line = text.count("\n", 0, match.start()) + 1
        if end is None:
            continue
        if end < 0:
            findings.append(
                Finding(line, "This command is in a text and is not converted. Write accel launch.")
            )
            continue
        parts, problem = _read_command(text[:end], match.end())
        command = (match["command"] or match["module"]).partition(" ")[0].lower()
        is_accelerate = "accelerate" in match[0]
        words = dict(word for part in parts for word in part.words)
        if command == "deepspeed" and not _is_runner(text[:end], parts[0].end, words):
            continue
        new, problems = {}, [problem] if problem else []
        for number, part in enumerate(parts):
            options = _translate(part.words, words, command)
            if command == "deepspeed":
                if not (number or {"num-gpus", "hostfile", "include"} & words.keys()):
                    options.kept.insert(0, "--nproc-per-node auto")
            elif not number and not is_accelerate and "nproc-per-node" not in words:
                options.kept.insert(0, "--nproc-per-node 1")
            start = [] if number else [_format_command(match)]
            new[part.start if number else match.start(), part.end] = part.gap.join([*start, *options.kept])
            problems += options.problems
        findings += [Finding(line, f"This command is not converted: {one}") for one in problems]
        changes |= {} if problems else new
    for (first, last), code in sorted(changes.items(), reverse=True):
        text = text[:first] + code + text[last:]
    return text, tuple(findings)


def _find_end(text: str, position: int) -> int | None:
    """Return where the text of a command ends; None if it is not run, -1 if that is not known."""
    end, before = len(text), position
    for match in _TEXT.finditer(text):
        if match.start() <= position < match.end():
            kind = match.lastgroup or ""
            if kind == "comment":
                return None
            if kind in {"single", "double"}:
                before, end = match.start(), match.end() - 1
            break
    outer = text[:before]
    command = re.split(r"(?<!\\)\n|[;&|({`]", outer)[-1]
    if _NO_COMMAND.match(command):
        return None
    if before == position or _RUNS_TEXT.search(outer):
        return end
    return -1 if re.search(r"\.py\b|\s--?\w", text[position:end]) else None


def _format_command(match: re.Match[str]) -> str:
    """Return the command; another interpreter than the one in PATH stays."""
    python = match["python"]
    return "accel launch" if python in {None, "python", "python3"} else f"{python} -m accel_cli launch"


def _read_command(text: str, position: int) -> tuple[list[_Part], str]:
    """Return the places with options of a command, and why they are not understood."""
    end, words = _read_options(text, position)
    parts = [_Part(position, end, words, _find_gap(text, position))]
    while match := _VARIABLE.match(text, _skip_gap(text, end)):
        pattern = rf"""^[^\n#]*\b{match["name"]}=(?:"(?P<d>[^"]*)"|'(?P<s>[^']*)'|\((?P<a>[^)]*)\))"""
        values = [
            one for one in re.finditer(pattern, text, re.MULTILINE) if _is_options(one[one.lastindex or 0])
        ]
        following = _WORD.match(text, _skip_gap(text, match.end()))
        if not values:
            is_unknown = following is not None and (following[0].endswith(".py") or following[0] == "-m")
            return parts, f"the options are in {match[0]}. Write them in the command." if is_unknown else ""
        for one in values:
            group = one.lastindex or 0
            start = one.start(group) + len(one[group]) - len(one[group].lstrip(" \t\r\n\\"))
            last, found = _read_options(text[: one.end(group)], start, _VALUE_GAP)
            if text[last : one.end(group)].strip(" \t\r\n\\"):
                return parts, f"the options in {match[0]} are not understood. Write them in the command."
            gap = re.search(r"[ \t]*\\?\r?\n[ \t]*", text[start:last])
            parts.append(_Part(start, last, found, gap[0] if gap else " "))
        end, words = _read_options(text, match.end())
        parts[0] = _Part(position, end, [*parts[0].words, ("", match[0]), *words], parts[0].gap)
    return parts, ""


def _is_options(value: str) -> bool:
    return value.lstrip(" \t\r\n\\").startswith("-")


def _find_gap(text: str, position: int) -> str:
    """Return the space between options: a continued line if the command has one."""
    match = _GAP.match(text, position)
    gap = match[0] if match else " "
    return gap if "\n" in gap else " "


def _read_options(
    text: str, position: int, gap: re.Pattern[str] = _GAP
) -> tuple[int, list[tuple[str, str | None]]]:
    """Return where the options end, and the options with their values."""
    options: list[tuple[str, str | None]] = []
    while True:
        start = _skip_gap(text, position, gap)
        word = _WORD.match(text, start)
        if word is None or not word[0].startswith("-") or word[0] == "--":
            return position, options
        position = word.end()
        flag, equals, value = word[0].partition("=")
        name = _SHORT.get(flag) or normalize_option(flag.lstrip("-"))
        if equals:
            options.append((name, value))
        elif _takes_value(name):
            following = _WORD.match(text, _skip_gap(text, position, gap))
            if following is None:
                return position, [*options, (name, None)]
            options.append((name, following[0]))
            position = following.end()
        else:
            options.append((name, None))


def _skip_gap(text: str, position: int, gap: re.Pattern[str] = _GAP) -> int:
    match = gap.match(text, position)
    return match.end() if match else position


def _takes_value(name: str) -> bool:
    if name in OPTIONS_BY_NAME:
        return bool(OPTIONS_BY_NAME[name])
    foreign = find_foreign_option(name)
    return foreign.takes_value if foreign else name not in _FLAGS


OPTIONS_BY_NAME = {option.flag.removeprefix("--"): option.metavar for option in OPTIONS.values()}
"""The placeholder of each option's value of `accel launch`; empty for an option without a value."""


def _is_runner(text: str, position: int, words: dict[str, str | None]) -> bool:
    """Return whether DeepSpeed's launcher is called: its name is also a word, and that of other things."""
    target = _WORD.match(text, _skip_gap(text, position))
    return target is not None and (
        bool({"module", "no-python"} & words.keys()) or bool(re.search(r"\.py\b|\$", target[0]))
    )


def _translate(words: list[tuple[str, str | None]], others: dict[str, str | None], command: str) -> _Options:
    """Convert options; `others` are all of the command, of which some may be in variables."""
    options = _Options()
    for name, value in words:
        if not name:
            options.kept.append(value or "")
        elif name in OPTIONS_BY_NAME and name not in {"quiet", "mixed-precision", "nproc-per-node"}:
            options.kept.append(_format(name, value))
        elif name in _SET:
            options.kept += [f"--set {_SET[name]}={value}"]
        else:
            options.values[name] = value or ""
    if command == "deepspeed":
        _translate_runner(options)
    _translate_processes(options, others)
    _translate_rendezvous(options, others)
    if _USE_DEEPSPEED in others:
        _translate_deepspeed(options, others)
    _translate_formats(options, command)
    for name in list(options.values):
        foreign = find_foreign_option(name)
        advice = foreign.advice if foreign else ""
        if name in _DROPPED or advice.startswith("Leave it out"):
            continue
        options.problems.append(f"--{name}. {advice or 'accel launch has no such option'}.")
    options.kept.sort(key="-m".__eq__)
    return options


def _format(name: str, value: str | None) -> str:
    flag = "-m" if name == "module" else f"--{name}"
    return flag if value is None else f"{flag} {value}"


def _translate_formats(options: _Options, command: str) -> None:
    """Convert the number format, and a compiler that is off."""
    precision = options.values.pop(launch.MIXED_PRECISION.option, "")
    if precision:
        options.kept.append(_format(launch.MIXED_PRECISION.option, precision))
        if precision.strip("\"'") not in {"no", *launch.MIXED_PRECISION.words} and "$" not in precision:
            options.problems.append("--mixed-precision is no, bf16 or fp16. Use one of them.")
    dynamo = launch.DYNAMO_SETTINGS[0].option
    if "accelerate" in command and options.values.get(dynamo, "").strip("\"'").lower() == "no":
        del options.values[dynamo]


def _translate_runner(options: _Options) -> None:
    """Convert the options of DeepSpeed's launcher, whose processes are those of one node."""
    if number := options.values.pop("num-gpus", ""):
        options.values["nproc-per-node"] = number
    if file := options.values.pop("hostfile", ""):
        options.kept.append(f"--hostfile {file}")
    host, _, ids = options.values.get("include", "").strip("\"'").partition(":")
    if host == "localhost" and ids:
        options.kept.append(f"--gpu-ids {ids}")
        del options.values["include"]
    # The rendezvous uses a free port, over ssh of the first host.
    for name in ("master-port", "master-addr"):
        options.values.pop(name, "")
    nodes = options.values.pop("num-nodes", "")
    if nodes.strip("\"'") not in {"", "1"}:
        options.kept.append(f"--nnodes {nodes}")


def _translate_deepspeed(options: _Options, others: dict[str, str | None]) -> None:
    """Convert the options of Accelerate for DeepSpeed to keys of the section `deepspeed`."""
    stage, is_first = options.values.pop(_ZERO_STAGE, ""), _USE_DEEPSPEED in options.values
    default = "auto" if _DEEPSPEED_FILE in others else str(sharding.DEFAULT_ZERO_STAGE)
    options.values.pop(_USE_DEEPSPEED, "")
    if stage or (is_first and _ZERO_STAGE not in others):
        options.kept.append(f"--set {sharding.ZERO_STAGE.profile_key}={stage or default}")
    if is_first and (others.get(_ZERO_STAGE) or "").strip("\"'") == "3" and _ZERO3_INIT not in others:
        options.kept.append(f"--set {sharding.ZERO3_INIT.profile_key}=true")  # the default of Accelerate
    for name, key in _DEEPSPEED_SET.items():
        value = options.values.pop(name, "")
        if value.strip("\"'").lower() not in {"", "none", "auto"}:
            options.kept.append(f"--set {key}={value}")
    options.values.pop(sharding.SAVE_16BIT_MODEL.option, "")  # weights are gathered to save them anyway
    if options.values.get("deepspeed-multinode-launcher", "").strip("\"'") == "standard":
        del options.values["deepspeed-multinode-launcher"]


def _translate_processes(options: _Options, others: dict[str, str | None]) -> None:
    """Convert the number of processes, which is that of all nodes in Accelerate and of one node in torchrun."""
    per_node = options.values.pop("nproc-per-node", "")
    total, rank = options.values.pop(launch.NUM_PROCESSES.option, ""), options.values.pop(_MACHINE_RANK, "")
    nodes = (others.get(_NUM_MACHINES) or "").strip("\"'")
    if per_node:
        if per_node.strip("\"'") in {"gpu", "cpu", "xpu"}:
            per_node = "auto"
        options.kept.insert(0, f"--nproc-per-node {per_node}")
    if total:
        if nodes in {"", "1"}:
            options.kept.insert(0, f"--nproc-per-node {total}")
        elif total.isdigit() and nodes.isdigit() and int(nodes) and not int(total) % int(nodes):
            options.kept.insert(0, f"--nproc-per-node {int(total) // int(nodes)}")
        elif "$" in total + nodes and _CALCULABLE.fullmatch(total) and _CALCULABLE.fullmatch(nodes):
            options.kept.insert(
                0, f"--nproc-per-node $(({total[2:-1] if '((' in total else total} / {nodes}))"
            )
        else:
            options.problems.append(
                "--num_processes is the number on all nodes. Use --nproc-per-node N, the number on each node."
            )
    if options.values.pop(_NUM_MACHINES, "") and nodes != "1":
        options.kept.append(f"--nnodes {nodes}")
    if rank and nodes not in {"", "1"}:
        options.kept.append(f"--node-rank {rank}")


def _translate_rendezvous(options: _Options, others: dict[str, str | None]) -> None:
    """Convert the address of the first node; on one node, it is left out."""
    address = options.values.pop("master-addr", "") or options.values.pop(launch.MAIN_PROCESS_IP.option, "")
    port = options.values.pop("master-port", "") or options.values.pop(_MAIN_PORT, "")
    nodes = others.get(_NUM_MACHINES) or others.get("nnodes") or "1"
    other_port = others.get("master-port") or others.get(_MAIN_PORT)
    if nodes.strip("\"'") == "1" or not (address or port):
        return
    if not address or (other_port and not port):
        options.problems.append(
            "the address and its port are in different places. Use --rdzv-endpoint HOST:PORT."
        )
    else:
        options.kept.append(f"--rdzv-endpoint {address}:{port or '29500'}")
