"""What a started process runs: the user's script as `python` itself would, with its failure recorded.

Run by path, so that only the standard library is imported from here and the script's own folder can take
the first place of `sys.path` at once. Usage: `worker.py script|module|program TARGET [ARGS]...`
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from io import TextIOWrapper
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

__all__ = ["ASKED", "STACKS", "connect", "main"]

ASKED = getattr(signal, "SIGRTMIN", 0) + 8
"""The signal at which a process writes down its stacks: none that scripts, torch or a scheduler use."""
STACKS = "stacks"
"""The file in the rank's folder to which it does."""
_SAFE_PATH = getattr(sys.flags, "safe_path", False)
"""Whether Python was told (`PYTHONSAFEPATH`, from 3.11) to put no script's folder in `sys.path`."""


def main(arguments: list[str]) -> None:
    """Run a script, a module or a program; all that a started process does, however it was started.

    Args:
        arguments: `script`, `module` or `program`, its path or name, and its own arguments.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    folder = os.path.dirname(file) if file else None  # noqa: PTH120 - a text, as `connect` takes it
    if folder:
        connect(folder)
    kind, *sys.argv = arguments
    if kind == "program":
        _become(sys.argv)
    if folder:
        _answer_for_stacks(folder)
    # What `python` itself would have seen, for a script that starts itself again.
    sys.orig_argv = [sys.executable, *(["-m"] if kind == "module" else []), *sys.argv]
    _run(kind, sys.argv[0], Path(file) if file else None)


def connect(folder: str) -> None:
    """Send what this process writes where its rank's folder says, and the stack of a crash into a file there.

    The launcher leaves `stdout` and `stderr` in the folder: its own pseudo-terminal or pipe where the rank is
    shown, the log where it is not. Where one cannot be opened, the launcher's own screen stays.
    """
    for number, name in ((1, "stdout"), (2, "stderr")):
        try:
            # A terminal opened here must not become the one that controls this process, and a pipe whose
            # reader has died must not keep it waiting.
            found = os.open(f"{folder}/{name}", os.O_WRONLY | os.O_APPEND | os.O_NOCTTY | os.O_NONBLOCK)
        except OSError:
            continue
        os.set_blocking(found, True)
        os.dup2(found, number)
        os.close(found)
    if not faulthandler.is_enabled():
        with contextlib.suppress(OSError):
            faulthandler.enable(open(f"{folder}/fault.log", "wb"))  # noqa: SIM115, PTH123 - open until the end


def _answer_for_stacks(folder: str) -> None:
    """Let `accel stacks` see where this process is, also while it is blocked outside of Python."""
    if hasattr(signal, "SIGRTMIN"):
        with contextlib.suppress(OSError):
            # faulthandler keeps the file for as long as the process lives.
            file = open(f"{folder}/{STACKS}", "ab", buffering=0)  # noqa: SIM115, PTH123
            faulthandler.register(ASKED, file=file, all_threads=True)


def _become(argv: list[str]) -> None:
    """Run a program in the place of this process."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        # Python ignores them, and what is ignored stays so in the program.
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.exit(f"{argv[0]} cannot be executed: {error.strerror}")


def _run(kind: str, target: str, file: Path | None) -> None:
    """Run Python code as `__main__`; with a `file`, a failure is left there and said by the launcher alone."""
    _buffer(sys.stdout, lines=True)
    _buffer(sys.stderr, lines=True)
    hook = _Hook(quiet=file is not None)
    if file:
        sys.excepthook = hook
    try:
        _module(target) if kind == "module" else _script(target)
    except SystemExit as error:
        if file and error.code not in {None, 0}:
            _record(error, file)
            sys.exit(error.code if isinstance(error.code, int) else 1)
        raise
    except KeyboardInterrupt:
        hook.ending = True
        raise
    except BaseException as error:  # noqa: BLE001 - whatever the script raises is its failure
        error.__traceback__ = _own_frames(error)
        if file:
            _record(error, file)
        hook.ending = True
        _said(error)
        sys.exit(1)


class _Hook:
    """Python's own `sys.excepthook`, but silent about the exception that ends the script if that is told elsewhere.

    A hook of the user's takes its place, and may call it.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self.ending = False

    def __call__(self, kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        if not (self.ending and self._quiet):
            sys.__excepthook__(kind, error, frames)


def _said(error: BaseException) -> None:
    """Have the hook say it, in one write."""
    _buffer(sys.stderr, lines=False)
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except Exception:  # noqa: BLE001 - a hook of the user's that fails does not hide what it was called for
        traceback.print_exc()
    if sys.stderr:
        sys.stderr.flush()
    _buffer(sys.stderr, lines=True)


def _buffer(stream: object, *, lines: bool) -> None:
    """Write whole lines, or only when flushed: what ranks print together, a traceback too, is not torn."""
    if isinstance(stream, TextIOWrapper):
        stream.reconfigure(line_buffering=lines, write_through=False)


def _script(path: str) -> None:
    """`python path`, in a fresh `__main__` that stays until the process ends."""
    _first_in_path(Path(path).resolve().parent)
    file = str(Path(path).absolute())
    loader = SourceFileLoader("__main__", file)
    module = ModuleType("__main__")
    vars(module).update(__file__=file, __loader__=loader, __builtins__=__builtins__, __cached__=None)
    sys.modules["__main__"] = module
    exec(compile(loader.get_data(file), file, "exec"), vars(module))  # noqa: S102 - it is the user's script


def _module(name: str) -> None:
    """`python -m name`."""
    _first_in_path(Path.cwd())
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _first_in_path(folder: Path) -> None:
    if not _SAFE_PATH:
        sys.path.insert(0, str(folder))


def _own_frames(error: BaseException) -> TracebackType | None:
    """The traceback without the frames of this file and of runpy that lead to the script."""
    frames = error.__traceback__
    while frames and frames.tb_frame.f_code.co_filename in {__file__, "<frozen runpy>", runpy.__file__}:
        frames = frames.tb_next
    return frames


def _record(error: BaseException, file: Path) -> None:
    """Leave the failure where torch's elastic agent looks for it, in its own format, with more beside it."""
    now = time.time()
    error.__traceback__ = _own_frames(error)
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    extra = {"py_callstack": "".join(lines), "timestamp": str(int(now))}
    ours: dict[str, Any] = {"time": now, "raised": [_told(link) for link in _chain(error)]}
    if isinstance(error, SystemExit):
        ours["exit"] = error.code if isinstance(error.code, int) else f"{error.code}"
    told = {"message": {"message": lines[-1].strip(), "extraInfo": extra}, "accel": ours}
    try:
        file.write_text(json.dumps(told), encoding="utf-8")
    except OSError:  # a full disk must not hide what was raised
        sys.stderr.write("".join(lines))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception, and what it came from, as far as a traceback would show it."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _told(error: BaseException) -> dict[str, Any]:
    frames = traceback.extract_tb(error.__traceback__)
    return {
        "kind": f"{type(error).__module__}.{type(error).__qualname__}",
        "said": "".join(traceback.format_exception_only(type(error), error)),
        "frames": [(frame.filename, frame.lineno, frame.name, frame.line) for frame in frames],
    }


if __name__ == "__main__":
    if not _SAFE_PATH:
        # This file's own folder.
        del sys.path[0]
    main(sys.argv[1:])
