"""Read which ranks, lines and causes the output of `accel launch` names."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from proof.fault_table import Place

__all__ = ["Attribution", "read_attribution"]

Places = Mapping[int, Collection[Place]]
"""The lines that are named with each rank."""

_PREFIX = re.compile(r"^(?:\[\w+\] )+", re.MULTILINE)
_FRAME = re.compile(r'^\s+File "(?P<file>[^"]+)", line (?P<line>\d+)(?:,? in |$)')
_AT = re.compile(r"\bat (?P<file>[\w./-]+\.py):(?P<line>\d+)")
_RANK_ERROR = re.compile(r"^accel: error: rank (?P<rank>\d+) of \d+ on \S+ \(pid \d+\): (?P<text>.*)")
_EXITED = re.compile(r"\brank (?P<rank>\d+) on \S+ had exited before with code 0(?P<rest>[^:]*(?::\d+)?)")
_LISTED = re.compile(r"^  rank (?P<rank>\d+): (?P<text>.*)")
_HANG = ("accel: no process on this machine has made progress", " has timed out:", "s for other ranks:")


@dataclass(frozen=True)
class Attribution:
    """What a report names.

    Attributes:
        accused: The ranks that it holds responsible, with their lines.
        mentioned: All ranks that it lists with a line, with these lines.
        text: The report.
    """

    accused: Places = field(default_factory=dict)
    mentioned: Places = field(default_factory=dict)
    text: str = ""


def read_attribution(output: str, folder: str) -> Attribution:
    """Read the report of a launch whose script is in a folder; its last error counts, and a hang that was explained before.

    Args:
        output: What the launch has printed.
        folder: The folder of its script: frames of other files are those of libraries.
    """
    lines = _PREFIX.sub("", output).splitlines()
    blocks = _split_blocks(lines)
    errors = [block for block in blocks if _RANK_ERROR.match(block[0])]
    hangs = [block for block in blocks if any(mark in block[0] for mark in _HANG)]
    report = "\n".join(line for block in blocks for line in block)
    if errors:
        error = errors[-1]
        accused, mentioned = _read_error(error, *_read_traceback(lines, error, folder), folder)
        calls = [line for line in lines if line.startswith("accel: the ranks were in different calls: ")]
        for names, file, number in re.findall(r"(ranks? [\d, andto]+) at ([\w.]+):(\d+)", "".join(calls)):
            mentioned = {**mentioned, **{key: [(file, int(number))] for key in _parse_ranks(names)}}
        own = int(_RANK_ERROR.match(error[0])["rank"])  # type: ignore[index]  # it has matched
        if not hangs or set(accused) != {own}:
            return Attribution(accused, mentioned, report)
    if hangs:
        return Attribution(*_read_hang(hangs[-1], folder), report)
    if errors:
        return Attribution(accused, mentioned, report)
    if any(line.startswith("accel: error:") for line in lines):
        return Attribution(text=report)
    if frames := _read_frames(lines, folder):
        # One process without a launcher: the output is Python's.
        place = frames[:1] if "(most recent call first)" in output else frames[-1:]
        return Attribution({0: place}, {0: place}, output)
    return Attribution(text=report)


def _split_blocks(lines: Iterable[str]) -> list[list[str]]:
    """Return the messages of accel: each begins with `accel: `, and continues until the next or a traceback."""
    blocks: list[list[str]] = []
    is_open = False
    for line in lines:
        if line.startswith("accel: "):
            blocks.append([line])
            is_open = True
        elif line.startswith("Traceback"):
            is_open = False
        elif is_open:
            blocks[-1].append(line)
    return blocks


def _read_frames(lines: Iterable[str], folder: str) -> list[Place]:
    """Return the frames in files of the case, in the order of the lines."""
    matches = [match for match in map(_FRAME.match, lines) if match]
    return [
        (match["file"].removeprefix(f"{folder}/"), int(match["line"]))
        for match in matches
        if match["file"].startswith(f"{folder}/")
    ]


def _read_traceback(lines: list[str], error: list[str], folder: str) -> tuple[list[Place], list[Place]]:
    """Return the frames that stand above an error, and those of processes whose failure caused it.

    Where the output of several machines is one, they stand above the error of the machine that has the rank.
    """
    frames: list[Place] = []
    causes: list[Place] = []
    for end in (number for number, line in enumerate(lines) if line == error[0]):
        start = end
        while start and not lines[start - 1].startswith("accel: "):
            start -= 1
        frames += _read_frames(lines[start:end], folder)
        pattern = rf"^after .* in another process \({re.escape(folder)}/(.*), line (\d+)\)$"
        found = re.findall(pattern, "\n".join(lines[start:end]), re.MULTILINE)
        causes += [(file, int(number)) for file, number in found]
    return frames, causes


def _read_error(  # noqa: C901 - one form of error after the other
    error: list[str], frames: list[Place], causes: list[Place], folder: str
) -> tuple[Places, Places]:
    """Return the ranks that an error holds responsible, and those that it lists."""
    match = _RANK_ERROR.match(error[0])
    assert match
    own, text = int(match["rank"]), match["text"]
    listed: dict[int, list[Place]] = {}
    for line in filter(None, map(_LISTED.match, error[1:])):
        listed[int(line["rank"])] = _read_places(line["text"])
    mentioned = {rank: places for rank, places in listed.items() if places} or {own: frames[-1:]}
    if exits := [*_EXITED.finditer(text)]:
        accused: Places = {int(each["rank"]): _read_places(each["rest"]) for each in exits}
        return accused, {**mentioned, **accused}
    if "MismatchError" in text:
        for line in error[1:]:
            for names in re.findall(r"\bon (ranks? [\d, ]+\d|rank \d+)", line):
                for rank in _parse_ranks(names):
                    # All ranks have made the call whose line is that of this traceback.
                    listed.setdefault(rank, frames[-1:])
        return listed, listed
    if match := re.search(r"in this process with sizes .* in process (\d+)", text):
        return {own: frames[-1:]}, {own: frames[-1:], int(match[1]): frames[-1:]}
    if "StallError" in text or "RankLostError" in text:
        head = text.partition("Error: ")[2].partition(". Call it on all ranks")[0]
        head = head.partition("cannot complete: ")[2] or head
        accused = {}
        for part in re.finditer(r"\brank ([\d, ]+)\b(.*?)(?=; rank|$)", head):
            for rank in re.findall(r"\d+", part[1]):
                # The place in `did not come to gather at train.py:9` is that of the call.
                is_call = "did not come to" in part[2] or "lost its connection" in part[2]
                accused[int(rank)] = listed.get(int(rank), []) if is_call else _read_places(part[2])
        if accused:
            return accused, {**mentioned, **accused}
    # The text of the exception, or a line before it, has the last frame of another process.
    places = [*frames[-1:], *_read_frames(error, folder)[-1:], *causes]
    return {own: places}, {own: places}


def _read_places(text: str) -> list[Place]:
    return [(match["file"].rpartition("/")[2], int(match["line"])) for match in _AT.finditer(text)]


def _parse_ranks(text: str) -> list[int]:
    """Parse `rank 3`, `ranks 0 and 2`, `ranks 0 to 2`, `ranks 0, 2 to 4`."""
    ranks: list[int] = []
    for first, last in re.findall(r"(\d+)(?: to (\d+))?", text):
        ranks += range(int(first), int(last or first) + 1)
    return ranks


def _read_hang(block: list[str], folder: str) -> tuple[Places, Places]:  # noqa: C901, PLR0912 - one form of line after the other
    """Return the ranks that a report about a hang holds responsible, and all with their lines."""
    locations: dict[int, str] = {}
    stacks: defaultdict[int, list[Place]] = defaultdict(list)
    workers: defaultdict[int, list[Place]] = defaultdict(list)
    absent: dict[int, list[Place]] = {}
    named: dict[int, list[Place]] = {}
    differing: list[int] = []
    silent: list[int] = []
    threads: dict[int, list[Place]] = {}
    for number, line in enumerate(block):
        if match := re.match(r"^  (\d+)  +(?:\d+|-)  +(?:\d+|-)  +(?:\d+ s ago|-)  +(.*)$", line):
            locations[int(match[1])] = match[2]
        elif match := re.match(r"^  (ranks? [\d, andto]+?), innermost call first:", line):
            frames = _read_frames(_read_indented(block, number), folder)
            for rank in _parse_ranks(match[1]):
                stacks[rank] += frames[:1]
        elif match := re.match(
            r"^  a data-loader workers? of (.*), innermost call first:|^  data-loader workers of (.*), innermost",
            line,
        ):
            frames = _read_frames(_read_indented(block, number), folder)
            for rank in re.findall(r"rank (\d+) \(pid", line):
                workers[int(rank)] += frames[:1]
        elif match := re.match(r"^  rank (\d+) has not entered it: .*", line):
            place = line.partition("it is ")[2]
            absent[int(match[1])] = _read_places(place)
            if place.startswith("in "):  # it waits for another one
                locations[int(match[1])] = place
        elif (match := re.match(r"^  (ranks? [\d, andto]+?) (?:is|are) (in \w+\(\) at .*)", line)) or (
            match := re.match(r"^  (ranks? [\d, andto]+?) (?:is|are) (at .*)", line)
        ):
            locations.update(dict.fromkeys(_parse_ranks(match[1]), match[2]))
            for rank in _parse_ranks(match[1]):
                named[rank] = _read_places(match[2])
        elif re.search(r"^  collective \d+ of .* differs: ", line):
            for part in re.findall(r"(ranks? [\d, andto]+): ", line.partition("differs: ")[2]):
                differing += _parse_ranks(part)
        elif match := re.match(
            r"^  (ranks? [\d, andto]+): (no answer.*|stacks are not.*|not running.*)", line
        ):
            silent += _parse_ranks(match[1])
        elif match := re.match(r"^  (ranks? [\d, andto]+): a thread has failed before: ", line):
            threads.update(dict.fromkeys(_parse_ranks(match[1]), _read_places(line)))
        elif match := _LISTED.match(line):
            stacks[int(match["rank"])] += _read_places(line)
            locations[int(match["rank"])] = match["text"]
    mentioned = {
        rank: [*stacks.get(rank, []), *workers.get(rank, [])] for rank in {*stacks, *workers, *locations}
    }
    for rank, places in named.items():
        mentioned[rank] = [*mentioned.get(rank, []), *places]
    if differing:
        return {rank: mentioned.get(rank, []) for rank in differing}, mentioned
    ranks: Collection[int]
    if absent:
        ranks = [rank for rank in absent if not locations.get(rank, "").startswith("in ")] or absent
    elif silent:
        ranks = silent
    elif workers:
        ranks = workers
    else:
        waiting = {rank for rank, text in locations.items() if re.match(r"waiting|in |waits in|is in ", text)}
        ranks = (locations.keys() - waiting) or {*stacks} or {*locations}
    return {
        rank: [
            *(absent.get(rank) or stacks.get(rank, [])),
            *workers.get(rank, []),
            *threads.get(rank, []),
        ]
        for rank in ranks
    }, mentioned


def _read_indented(block: list[str], number: int) -> list[str]:
    """Return the lines below a heading that are indented further."""
    lines = []
    for line in block[number + 1 :]:
        if not line.startswith("    "):
            break
        lines.append(line)
    return lines
