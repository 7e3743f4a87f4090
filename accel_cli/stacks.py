"""Where a running process is: its Python stacks, which it writes down itself when a signal asks for them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from accel_cli import forkserver, worker
from accel_cli.runs import RankFolder

__all__ = ["Stacks", "ask"]

_PATIENCE_S = 3.0
_QUIET_S = 0.2
_START = Path(forkserver.__file__).with_name("start.py")
_REPLICAS = f'File "{Path(worker.__file__).with_name("replicas.py")}"'
_OURS = (f'File "{worker.__file__}"', f'File "{_START}"', 'File "<frozen runpy>"', _REPLICAS)
_STATES = {
    "T": "it is stopped",
    "t": "a debugger holds it",
    "D": "it waits for a device",
    "Z": "it has ended",
}


@dataclass(frozen=True)
class Stacks:
    """What a process answered; each stack begins with the innermost call."""

    main: tuple[str, ...] = ()
    """The frames of the main thread."""
    others: tuple[tuple[str, ...], ...] = ()
    """Those of the other threads of Python."""
    problem: str = ""
    """Why there is no answer."""


def ask(folders: Mapping[int, RankFolder]) -> dict[int, Stacks]:
    """Ask processes where they are, all at the same time; it takes the slowest of them some tenths of a second.

    Only a process that has said it would answer is asked: any other the signal would end.
    """
    asked: dict[int, tuple[RankFolder, int]] = {}
    answers: dict[int, Stacks] = {}
    for rank, folder in folders.items():
        begin = _size(folder.stacks)
        if problem := _asked(folder):
            answers[rank] = Stacks(problem=problem)
        else:
            asked[rank] = (folder, begin)
    _settle([folder.stacks for folder, _ in asked.values()])
    for rank, (folder, begin) in asked.items():
        answers[rank] = _read(folder, begin) or Stacks(problem=f"it does not answer; {_state(folder)}")
    return dict(sorted(answers.items()))


def _asked(folder: RankFolder) -> str:
    """Send the signal, or say why not."""
    try:
        pid = int(folder.pid.read_text())
        status = Path(f"/proc/{pid}/status").read_text()
    except (OSError, ValueError):
        return (
            "it is not running"
            if Path("/proc/self/status").exists()
            else "it cannot be asked: there is no /proc"
        )
    # A handler is lost where the process becomes another program: the kernel knows, a file would not.
    caught = int(next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")), 16)
    if not caught >> (worker.ASKED - 1) & 1:
        return "it cannot be asked: it is starting or ending, or it is no Python of accel's"
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, worker.ASKED)
    return ""


def _settle(files: list[Path]) -> None:
    """Wait until all files have grown and stay as they are, or for as long as one waits."""
    begin = sizes = [_size(file) for file in files]
    now = quiet = time.monotonic()
    deadline = now + _PATIENCE_S
    while files and now < deadline:
        time.sleep(0.05)
        now, before, sizes = time.monotonic(), sizes, [_size(file) for file in files]
        if sizes != before:
            quiet = now
        grown = all(size > old for size, old in zip(sizes, begin, strict=True))
        if now - quiet > (_QUIET_S if grown else 1.0):
            return


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _read(folder: RankFolder, begin: int) -> Stacks | None:
    """What faulthandler added to a file: a block for each thread, the main one last."""
    with folder.stacks.open("rb") as opened:
        opened.seek(begin)
        text = opened.read().decode(errors="replace")
    blocks = [block for block in text.split("\n\n") if block.strip()]
    if not blocks:
        return None
    main = _main(blocks, folder)
    return Stacks(_frames(main), tuple(_frames(block) for block in blocks if block is not main))


def _main(blocks: list[str], folder: RankFolder) -> str:
    """The thread that runs the script: not the main one, where a replica is a thread."""
    if not folder.thread.exists():
        return blocks[-1]
    name = folder.thread.read_text()
    return next(
        (block for block in reversed(blocks) if name in block.lstrip().partition("\n")[0]), blocks[-1]
    )


def _frames(block: str) -> tuple[str, ...]:
    """The frames of a thread, without those that lead to the script: of accel, and of what started a replica."""
    frames = [line.strip() for line in block.splitlines() if line.startswith("  File ")]
    started = [index for index, frame in enumerate(frames) if frame.startswith(_REPLICAS)]
    frames = frames[: started[-1]] if started else frames
    while frames and frames[-1].startswith(_OURS):
        frames.pop()
    return tuple(frames)


def _state(folder: RankFolder) -> str:
    try:
        stat = Path(f"/proc/{folder.pid.read_text()}/stat").read_text()
    except OSError:
        return "it has ended"
    return _STATES.get(stat[stat.rindex(")") + 2], "it is ending, or busy outside of Python")
