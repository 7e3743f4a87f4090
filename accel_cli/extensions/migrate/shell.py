"""Commands of shell scripts that launch training: `torchrun`, `torch.distributed.launch`, `accelerate launch`, `deepspeed`.

Their options stay, since `accel launch` takes those that have one meaning; others are removed or reported.
"""

from __future__ import annotations

import contextlib
import re
from typing import NamedTuple

from accel_cli.accelerate.foreign_options import translate
from accel_cli.errors import UsageError
from accel_cli.extensions.migrate.findings import Finding
from accel_cli.launchers import list_options
from accel_cli.planning.launch_options import find_foreign_option, normalize_option
from accel_cli.profile.options import OPTIONS

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
_VARIABLE = re.compile(r"""(["']?)\$\{?\w+(?:\[[@*]\])?\}?\1""")
_WORD = re.compile(
    r"""(?:[^\s\\"'`;&|<>()#$]|\$\{[^}]*\}|\$\(\([^()]*\)\)|\$\([^)]*\)|\$|(?<=\S)#|\\[^\n]|"(?:[^"\\]|\\.)*"|'[^']*')+"""
)
_GAP = re.compile(r"(?:[ \t]|\\\r?\n)*")
_COUNT = r"--(?:nproc[_-]per[_-]node|num_gpus|hostfile)\b"
"""Options with the number of processes of torchrun and DeepSpeed."""
_OWN = {
    flag: bool(option.metavar)
    for option in (*OPTIONS.values(), *list_options())
    for flag in (option.flag, option.short)
}
"""The options of `accel launch`; True for each that takes a value."""
_DROPPED = {"use-env", "tee", "t", "redirects", "r"}
"""Options whose absence changes no result, beside those whose advice is to leave them out."""
_RENDEZVOUS = {"master-addr", "master-port"}


class _Option(NamedTuple):
    """An option of a command: as accel spells it, its words, and its position with the space before it."""

    flag: str
    words: tuple[str, ...]
    start: int
    end: int


def migrate_shell(text: str) -> tuple[str, tuple[Finding, ...]]:
    """Return a shell script whose training commands are those of `accel launch`, and the commands that are not converted."""
    changes: dict[tuple[int, int], str] = {}
    findings: list[Finding] = []
    for match in _LAUNCH.finditer(text):
        end = _find_end(text, match.start())
        if end is None:
            continue
        line = text.count("\n", 0, match.start()) + 1
        if end < 0:
            advice = "This command is in a text and is not converted. Write accel launch."
            findings.append(Finding(line, advice))
            continue
        options, position = _read_options(text[:end], match.end())
        command = (match["command"] or match["module"]).partition(" ")[0].lower()
        if command == "deepspeed" and not _is_runner(text[:end], position, options):
            continue
        dropped = [one for one in options if _is_dropped(one.flag, command)]
        has_variables = "$" in text[match.end() : position]
        problems = _list_problems([one for one in options if one not in dropped], has_variables)
        findings += [Finding(line, f"This command is not converted: {one}") for one in problems]
        if not problems:
            count = _format_count(text, match.end(), position, command)
            changes[match.span()] = _format_command(match) + count
            changes |= {(one.start, one.end): "" for one in dropped}
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


def _read_options(text: str, position: int) -> tuple[list[_Option], int]:
    """Return the options of a command, also after variables, and where the script follows."""
    options: list[_Option] = []
    while (word := _read_word(text, position)) is not None:
        following = _read_word(text, word.end())
        if _VARIABLE.fullmatch(word[0]) and following and _continues(following[0]):
            position = word.end()
            continue
        if not word[0].startswith("-") or word[0] == "--":
            break
        flag, equals, _ = word[0].partition("=")
        flag = flag if len(flag) == 2 else f"--{normalize_option(flag[2:])}"  # noqa: PLR2004 - `-m`
        last = following if following is not None and not equals and _takes_value(flag) else word
        words = tuple(dict.fromkeys((word[0], last[0])))
        options.append(_Option(flag, words, position, last.end()))
        position = last.end()
    return options, position


def _read_word(text: str, position: int) -> re.Match[str] | None:
    return _WORD.match(text, _skip_gap(text, position))


def _skip_gap(text: str, position: int) -> int:
    match = _GAP.match(text, position)
    return match.end() if match else position


def _continues(word: str) -> bool:
    """Return whether a word follows options, not the script."""
    return word.startswith("-") or word.endswith(".py") or _VARIABLE.fullmatch(word) is not None


def _takes_value(flag: str) -> bool:
    foreign = find_foreign_option(flag.lstrip("-"))
    return _OWN.get(flag, foreign.takes_value if foreign else flag != "--use-env")


def _is_runner(text: str, position: int, options: list[_Option]) -> bool:
    """Return whether DeepSpeed's launcher is called: its name is also a word, and that of other things."""
    target = _read_word(text, position)
    is_program = any(one.flag in {"--module", "--no-python"} for one in options)
    return target is not None and (is_program or re.search(r"\.py\b|\$", target[0]) is not None)


def _is_dropped(flag: str, command: str) -> bool:
    """Return whether a command does without an option."""
    foreign = find_foreign_option(name := flag.lstrip("-"))
    # DeepSpeed's launcher reaches the first host over ssh, where accel finds a free port.
    is_dropped = name in _DROPPED or (command == "deepspeed" and name in _RENDEZVOUS)
    return is_dropped or (foreign is not None and foreign.advice.startswith("Leave it out:"))


def _list_problems(options: list[_Option], has_variables: bool) -> list[str]:
    """Return why `accel launch` refuses options."""
    problems = []
    for one in options:
        with contextlib.suppress(
            UsageError
        ):  # for a value of a variable, and for an option that needs another
            if one.flag not in _OWN and one.words[0] in translate(one.words, _OWN).args:
                foreign = find_foreign_option(one.flag.lstrip("-"))
                advice = foreign.advice if foreign else "accel launch has no such option"
                problems.append(f"{one.words[0]}. {advice}.")
                if foreign is None:
                    break  # it may have a value or none, so that the words after it may be the script's
    # Files are not read here.
    if not (problems or has_variables or any("file" in one.flag for one in options)):
        try:
            translate([re.sub("[\"']", "", word) for one in options for word in one.words], _OWN)
        except UsageError as error:
            problems.append(str(error))
    return problems


def _format_command(match: re.Match[str]) -> str:
    """Return the command; another interpreter than the one in PATH stays."""
    python = match["python"]
    return "accel launch" if python in {None, "python", "python3"} else f"{python} -m accel_cli launch"


def _format_count(text: str, start: int, end: int, command: str) -> str:
    """Return the option for the number of processes that a command without one starts on each node."""
    options = text[start:end]
    variables = "|".join(re.findall(r"\$\{?(\w+)", options))
    in_variable = rf"\b(?:{variables})\+?=[\"'(]?[^\"')]*{_COUNT}"
    is_given = re.search(_COUNT, options) or (variables and re.search(in_variable, text))
    if is_given or command.startswith("accelerate"):
        return ""
    gap = text[start : _skip_gap(text, start)]
    space = gap if "\n" in gap else " "
    return f"{space}--nproc-per-node {'auto' if command == 'deepspeed' else 1}"
