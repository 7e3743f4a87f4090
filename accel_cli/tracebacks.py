"""A failure in few lines: the user's own frames, what lies between them folded, and what was raised."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

from accel_cli.failures import Failure, Frame, Link
from accel_runtime import env

__all__ = ["cause", "clean", "stack", "tail"]

_LINES = 12
"""How many lines the traceback has at most, with what was raised before it."""
_MESSAGE = 4
"""How many lines of a message are shown."""
_WIDTH = 300
_ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|\][^\x07]*(\x07|\x1b\\)|.)?")
_INSTALLED = re.compile(r"[\\/](?:site|dist)-packages[\\/](torch)[\\/]")
_FROZEN = re.compile(r"<frozen (\w+)")
_IN_PYTHON = re.compile(r"[\\/]lib[\\/]python[\d.]+[\\/](runpy|importlib|contextlib|threading|concurrent)\b")
_OURS = str(Path(env.__file__).parent)


def stack(failure: Failure) -> list[str]:
    """Where it happened: the traceback without its last line, or where a crash found the Python code."""
    if failure.exit is not None or not failure.chain:
        # The first calls are those that led to the script.
        return _folded([*itertools.dropwhile(_folds, failure.crash)], _LINES)
    raised, *origins = failure.chain
    said = _said(raised)
    lines = [_after(origin) for origin in origins[:2]]
    lines += _folded(raised.frames, _LINES - len(lines) - len(said) + 1)
    place = said[:-1] if _is_syntax(raised) else []
    return [clean(line) for line in [*lines, *place]]


def cause(failure: Failure) -> str:
    """What was raised: the last line of a traceback, or the first few of a long message."""
    if failure.exit is not None or not failure.chain:
        return ""
    said = _said(failure.chain[0])
    return clean(said[-1] if _is_syntax(failure.chain[0]) else "\n".join(said))


def tail(failure: Failure, count: int = 5) -> list[str]:
    """The last lines of its output."""
    try:
        with Path(failure.log).open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - 8192))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return [_cut(clean(line)) for line in lines if line.strip()][-count:]


def clean(text: str) -> str:
    """A text that moves no cursor and rings no bell."""
    text = _ESCAPES.sub("", text)
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def _is_syntax(link: Link) -> bool:
    """Whether what is printed of it begins with a place, as that of a syntax error does."""
    return link.said.startswith('  File "')


def _said(link: Link) -> list[str]:
    """Its name and message, cut where they are long."""
    lines = [_cut(line) for line in link.said.rstrip("\n").split("\n")]
    if len(lines) <= _MESSAGE or _is_syntax(link):
        return lines
    return [*lines[: _MESSAGE - 1], f"... {len(lines) - _MESSAGE + 1} more lines in its log"]


def _cut(line: str) -> str:
    more = len(line) - _WIDTH
    return line if more <= 0 else f"{line[:_WIDTH]}... ({more} more characters in its log)"


def _after(link: Link) -> str:
    """An exception that another came from, in a line."""
    own = [frame for frame in link.frames if not _folds(frame)]
    where = f" ({own[-1].file}, line {own[-1].line})" if own else ""
    return _cut(f"after {link.said.strip().splitlines()[-1]}") + where


def _folds(frame: Frame) -> str:
    """What a frame belongs to, if that is folded away."""
    if frame.file.startswith((f"{_OURS}/", f"{Path(__file__).parent}/")):
        return "accel"
    found = _INSTALLED.search(frame.file) or _FROZEN.match(frame.file) or _IN_PYTHON.search(frame.file)
    return found[1] if found else ""


def _folded(frames: Sequence[Frame], room: int) -> list[str]:
    """The frames as lines, no more than there is room for: the first call and the last ones stay."""
    own = [index for index, frame in enumerate(frames) if not _folds(frame)]
    for last in range(room // 2, 0, -1):
        lines = list(_lines(frames, {*own[:1], *own[-last:]}))
        if len(lines) <= room:
            return lines
    return list(_lines(frames, set(own[-1:])))


def _lines(frames: Sequence[Frame], shown: AbstractSet[int]) -> Iterator[str]:
    for kept, run in itertools.groupby(range(len(frames)), lambda index: index in shown):
        if kept:
            for index in run:
                yield from _line(frames[index])
        else:
            yield _fold([frames[index] for index in run])


def _line(frame: Frame) -> Iterator[str]:
    yield f'  File "{frame.file}", line {frame.line}, in {frame.name}'
    if frame.text.strip():
        yield _cut(f"    {frame.text.strip()}")


def _fold(frames: Sequence[Frame]) -> str:
    rooms = list(dict.fromkeys(map(_folds, frames)))
    where = f" in {', '.join(rooms)}" if all(rooms) else ""
    return f"  ... {len(frames)} frame{'s' if len(frames) > 1 else ''}{where}"
