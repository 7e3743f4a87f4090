"""What a started process runs: the user's script as `python` itself would, with its failure recorded.

Run by path, so that only the standard library is imported from here and the script's own folder can take
the first place of `sys.path` at once. Usage: `worker.py script|module TARGET [ARGS]...`
"""

from __future__ import annotations

import faulthandler
import json
import os
import runpy
import signal
import sys
import time
import traceback
from importlib.machinery import SourceFileLoader
from io import TextIOWrapper
from pathlib import Path
from types import ModuleType, TracebackType

__all__ = ["ASKED", "STACKS", "main"]

ASKED = getattr(signal, "SIGRTMIN", 0) + 8
"""The signal at which a process writes down its stacks: none that scripts, torch or a scheduler use."""
STACKS = "stacks"
"""The file in the rank's folder to which it does."""


def main() -> None:
    """Run the script or module that the command line names, as `__main__`."""
    kind, target = sys.argv[1:3]
    sys.argv = sys.argv[2:]
    _buffer(sys.stdout, lines=True)
    _buffer(sys.stderr, lines=True)
    _answer_for_stacks()
    try:
        _module(target) if kind == "module" else _script(target)
    except KeyboardInterrupt:
        # Whoever typed Ctrl-C knows; the interpreter still ends as it does after an interrupt.
        if sys.excepthook is sys.__excepthook__:
            sys.excepthook = _nothing
        raise
    except Exception as error:  # noqa: BLE001 - whatever the script raises is its failure
        error.__traceback__ = _own_frames(error)
        _record(error)
        _buffer(sys.stderr, lines=False)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.stderr.flush()
        _buffer(sys.stderr, lines=True)
        sys.exit(1)


def _answer_for_stacks() -> None:
    """Let `accel stacks` see where this process is, also while it is blocked outside of Python."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and hasattr(signal, "SIGRTMIN"):
        # faulthandler keeps the file for as long as the process lives.
        file = Path(path).with_name(STACKS).open("ab", buffering=0)
        faulthandler.register(ASKED, file=file, all_threads=True)


def _nothing(*_: object) -> None:
    """Print no traceback."""


def _buffer(stream: object, *, lines: bool) -> None:
    """Write whole lines, or only when flushed: what ranks print together, a traceback too, is not torn."""
    if isinstance(stream, TextIOWrapper):
        stream.reconfigure(line_buffering=lines, write_through=False)


def _script(path: str) -> None:
    """`python path`, in a fresh `__main__` that stays until the process ends."""
    sys.path[0] = str(Path(path).resolve().parent)
    file = str(Path(path).absolute())
    loader = SourceFileLoader("__main__", file)
    module = ModuleType("__main__")
    vars(module).update(__file__=file, __loader__=loader, __builtins__=__builtins__, __cached__=None)
    sys.modules["__main__"] = module
    exec(compile(loader.get_data(file), file, "exec"), vars(module))  # noqa: S102 - it is the user's script


def _module(name: str) -> None:
    """`python -m name`."""
    sys.path[0] = str(Path.cwd())
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _own_frames(error: BaseException) -> TracebackType | None:
    """The traceback without the frames of this file and of runpy that lead to the script."""
    frames = error.__traceback__
    while frames and frames.tb_frame.f_code.co_filename in {__file__, "<frozen runpy>", runpy.__file__}:
        frames = frames.tb_next
    return frames


def _record(error: BaseException) -> None:
    """Leave the failure where torch's elastic agent looks for it, in its own format."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    lines = traceback.format_exception(error)
    extra = {"py_callstack": "".join(lines), "timestamp": str(int(time.time()))}
    message = {"message": lines[-1].strip(), "extraInfo": extra}
    Path(path).write_text(json.dumps({"message": message}), encoding="utf-8")


if __name__ == "__main__":
    main()
