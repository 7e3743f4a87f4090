"""Commands of shell scripts that launch training: `torchrun`, `torch.distributed.launch` and `accelerate launch`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from accel_cli.migrate.raw import Finding
from accel_cli.planning.options import FOREIGN_FLAGS, FOREIGN_OPTIONS, OPTIONS, normalize_option

__all__ = ["migrate_shell"]

_LAUNCH = re.compile(
    r"(?P<start>^[ \t]*|(?<=[;&|(])[ \t]*|\b(?:exec|srun|time|nohup|then|do|else|env)(?:[ \t]+--?[\w-]+(?:=\S+)?)*[ \t]+)"
    r"(?P<environ>(?:\w+=\S*[ \t]+)*)"
    r"(?P<command>torchrun|accelerate[ \t]+launch|(?:python3?)[ \t]+-m[ \t]+"
    r"(?:torch\.distributed\.(?:launch|run)|accelerate\.commands\.launch))(?=[ \t\\])",
    re.MULTILINE,
)
_WORD = re.compile(
    r"""(?:[^\s\\"'`;&|<>()#$]|\$\{[^}]*\}|\$\([^)]*\)|\$|(?<=\S)#|\\[^\n]|"(?:[^"\\]|\\.)*"|'[^']*')+"""
)
_GAP = re.compile(r"(?:[ \t]|\\\r?\n)*")
_SHORT = {"-m": "module", "-q": "quiet", "-t": "tee", "-r": "redirects"}
_DROPPED = {"use-env", "rdzv-backend", "tee", "redirects", "multi-gpu", "num-machines", "quiet"}
_SET = {
    "monitor-interval": "launcher.monitor_interval",
    "start-method": "launcher.start_method",
    "num-cpu-threads-per-process": "launcher.omp_num_threads",
}


@dataclass
class _Options:
    """The options of one command: those that stay, and those that are read together."""

    kept: list[str] = field(default_factory=list)
    values: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def migrate_shell(text: str) -> tuple[str, tuple[Finding, ...]]:
    """Return a shell script whose training commands are those of `accel launch`, and the commands that are not converted."""
    parts: list[str] = []
    findings: list[Finding] = []
    last = 0
    for match in _LAUNCH.finditer(text):
        if match.start() < last or _is_comment(text, match.start("command")):
            continue
        end, words = _read_options(text, match.end())
        options = _translate(words, is_accelerate="accelerate" in match["command"])
        if options.problems:
            line = text.count("\n", 0, match.start("command")) + 1
            findings += [
                Finding(line, f"This command is not converted: {problem}") for problem in options.problems
            ]
            continue
        parts.append(text[last : match.start("command")])
        gap = _find_gap(text, match.end())
        parts.append(gap.join(["accel launch", *options.kept]))
        last = end
    return "".join([*parts, text[last:]]), tuple(findings)


def _is_comment(text: str, position: int) -> bool:
    start = text.rfind("\n", 0, position) + 1
    return bool(re.search(r"(?:^|\s)#", text[start:position]))


def _find_gap(text: str, position: int) -> str:
    """Return the space between options: a continued line if the command has one."""
    match = _GAP.match(text, position)
    gap = match[0] if match else " "
    return gap if "\n" in gap else " "


def _read_options(text: str, position: int) -> tuple[int, list[tuple[str, str | None]]]:
    """Return where the options end, and the options with their values."""
    options: list[tuple[str, str | None]] = []
    while True:
        start = _skip_gap(text, position)
        word = _WORD.match(text, start)
        if word is None or not word[0].startswith("-") or word[0] == "--":
            return position, options
        position = word.end()
        flag, equals, value = word[0].partition("=")
        name = _SHORT.get(flag) or normalize_option(flag.lstrip("-"))
        if equals:
            options.append((name, value))
        elif _takes_value(name):
            following = _WORD.match(text, _skip_gap(text, position))
            if following is None:
                return position, [*options, (name, None)]
            options.append((name, following[0]))
            position = following.end()
        else:
            options.append((name, None))


def _skip_gap(text: str, position: int) -> int:
    match = _GAP.match(text, position)
    return match.end() if match else position


def _takes_value(name: str) -> bool:
    if name in OPTIONS_BY_NAME:
        return bool(OPTIONS_BY_NAME[name])
    return name not in FOREIGN_FLAGS and name != "use-env"


OPTIONS_BY_NAME = {option.flag.removeprefix("--"): option.metavar for option in OPTIONS.values()}
"""The placeholder of each option's value of `accel launch`; empty for an option without a value."""


def _translate(words: list[tuple[str, str | None]], *, is_accelerate: bool) -> _Options:
    options = _Options()
    for name, value in words:
        if name in OPTIONS_BY_NAME and name not in {"quiet", "mixed-precision", "nproc-per-node"}:
            options.kept.append(_format(name, value))
        elif name in _SET:
            options.kept += [f"--set {_SET[name]}={value}"]
        else:
            options.values[name] = value or ""
    _translate_processes(options)
    _translate_rendezvous(options)
    precision = options.values.pop("mixed-precision", "")
    if precision:
        options.kept.append(_format("mixed-precision", precision))
        if precision.strip("\"'") not in {"no", "bf16", "fp16"} and "$" not in precision:
            options.problems.append("--mixed-precision is no, bf16 or fp16. Use one of them.")
    if is_accelerate and options.values.get("dynamo-backend", "").lower() == "no":
        del options.values["dynamo-backend"]
    for name in list(options.values):
        advice = _find_advice(name)
        if name in _DROPPED or advice.startswith("Leave it out"):
            continue
        options.problems.append(f"--{name}. {advice or 'accel launch has no such option'}.")
    return options


def _format(name: str, value: str | None) -> str:
    flag = "-m" if name == "module" else f"--{name}"
    return flag if value is None else f"{flag} {value}"


def _translate_processes(options: _Options) -> None:
    """Convert the number of processes, which is that of all nodes in Accelerate and of one node in torchrun."""
    per_node = options.values.pop("nproc-per-node", "")
    total, nodes = options.values.pop("num-processes", ""), options.values.pop("num-machines", "")
    rank = options.values.pop("machine-rank", "")
    if per_node:
        if per_node.strip("\"'") in {"gpu", "cpu", "xpu"}:
            per_node = "auto"
        options.kept.insert(0, f"--nproc-per-node {per_node}")
    if total:
        if nodes in {"", "1"}:
            options.kept.insert(0, f"--nproc-per-node {total}")
        elif total.isdigit() and nodes.isdigit() and int(nodes) and not int(total) % int(nodes):
            options.kept.insert(0, f"--nproc-per-node {int(total) // int(nodes)}")
        else:
            options.problems.append(
                "--num_processes is the number on all nodes. Use --nproc-per-node N, the number on each node."
            )
    if nodes not in {"", "1"}:
        options.kept.append(f"--nnodes {nodes}")
        options.values["nodes"] = nodes
        if rank:
            options.kept.append(f"--node-rank {rank}")


def _translate_rendezvous(options: _Options) -> None:
    """Convert the address of the first node; on one node, it is left out."""
    address = options.values.pop("master-addr", "") or options.values.pop("main-process-ip", "")
    port = options.values.pop("master-port", "") or options.values.pop("main-process-port", "")
    several = options.values.pop("nodes", "") or next(
        (one for one in options.kept if one.startswith("--nnodes ") and one != "--nnodes 1"), ""
    )
    if several and address:
        options.kept.append(f"--rdzv-endpoint {address}:{port or '29500'}")


def _find_advice(name: str) -> str:
    prefixes = (key for key in FOREIGN_OPTIONS if key.endswith("-") and name.startswith(key))
    return FOREIGN_OPTIONS.get(name) or FOREIGN_OPTIONS.get(next(prefixes, ""), "")
