"""What a started process runs: the user's script as `python` itself would, with its failure recorded.

Run by path, so that only the standard library is imported from here and the script's own folder can take
the first place of `sys.path` at once. Usage: `worker.py script|module|program TARGET [ARGS]...`
"""

# ruff: noqa: E402 - what Python itself has loaded is to be known first
from __future__ import annotations

import sys

AT_START = frozenset(sys.modules)
"""The modules that Python has loaded before a script begins."""
# isort: split
import builtins
import contextlib
import errno
import faulthandler
import json
import os
import runpy
import signal
import stat
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from importlib.machinery import ModuleSpec, SourceFileLoader, SourcelessFileLoader, all_suffixes
from importlib.util import find_spec
from io import BytesIO, TextIOWrapper
from pathlib import Path
from pkgutil import get_importer, read_code
from types import CodeType, ModuleType, TracebackType
from typing import Any

__all__ = [
    "ASKED",
    "AT_START",
    "STACKS",
    "Hook",
    "answer_for_stacks",
    "code_of",
    "connect",
    "execute",
    "find_shadowed",
    "ignore_full_disk",
    "is_application",
    "main",
    "opened",
    "prepare",
    "quiet",
    "record",
    "run",
    "said",
]

ASKED = getattr(signal, "SIGRTMIN", 0) + 8
"""The signal at which a process writes down its stacks: none that scripts, torch or a scheduler use."""
STACKS = "stacks"
"""The file in the rank's folder to which it does."""
_DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE})
"""The errors of a disk that takes no more of a log."""
_LAUNCHERS_SCREEN = "/proc/{}/fd/2"
_REPLICAS = str(Path(__file__).with_name("xla_replicas.py"))
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
        answer_for_stacks(folder)
    prepare(kind)
    run(lambda: execute(kind, sys.argv[0]), Path(file) if file else None)


def prepare(kind: str, *, here: bool = False) -> None:
    """Have this process look as `python` itself would have left it to the script in `sys.argv`.

    Args:
        kind: `script` or `module`.
        here: Whether the folder of the script is in `sys.path` already.
    """
    # For a script that starts itself again.
    sys.orig_argv = [sys.executable, *(["-m"] if kind == "module" else []), *sys.argv]
    if not here:
        folder = _folder_of(kind, sys.argv[0])
        _first_in_path(folder)
        _forget(find_shadowed(folder, AT_START))
    _buffer(sys.stdout, lines=True)
    _buffer(sys.stderr, lines=True)


def connect(folder: str) -> None:
    """Send what this process writes where its rank's folder says, and the stack of a crash into a file there.

    The launcher leaves `stdout` and `stderr` in the folder: its own pseudo-terminal or pipe where the rank is
    shown, the log where it is not. Where one cannot be opened, the launcher's own screen stays.
    """
    for number, name in ((1, "stdout"), (2, "stderr")):
        try:
            found = opened(folder, name)
        except OSError:
            continue
        os.dup2(found, number)
        os.close(found)
        if stat.S_ISREG(os.fstat(number).st_mode):
            ignore_full_disk(getattr(sys, name), f"{folder}/{name}")
    if not faulthandler.is_enabled():
        with contextlib.suppress(OSError):
            faulthandler.enable(open(f"{folder}/fault.log", "wb"))  # noqa: SIM115, PTH123 - open until the end


def opened(folder: str, name: str) -> int:
    """A file descriptor for what the launcher left under that name.

    Raises:
        OSError: It cannot be opened.
    """
    # A terminal opened here must not become the one that controls this process, and a pipe whose
    # reader has died must not keep it waiting.
    found = os.open(f"{folder}/{name}", os.O_WRONLY | os.O_APPEND | os.O_NOCTTY | os.O_NONBLOCK)
    os.set_blocking(found, True)
    return found


def ignore_full_disk(stream: Any, link: str) -> None:
    """Have a stream that writes to a log drop what its disk does not take: a print must not end a training.

    Args:
        stream: Such as `sys.stdout`.
        link: The name under which the log was opened; it is removed as a sign for the launcher.
    """
    raw = getattr(stream.buffer, "raw", stream.buffer)
    write = raw.write

    def write_or_drop(data: Any) -> int | None:
        try:
            return write(data)  # type: ignore[no-any-return]
        except OSError as error:
            if error.errno not in _DISK_ERRORS:
                raise
            with contextlib.suppress(OSError):
                os.unlink(link)  # noqa: PTH108 - a text, as `connect` takes it
            return memoryview(data).nbytes

    raw.write = write_or_drop


def answer_for_stacks(folder: str) -> None:
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


def run(body: Callable[[], None], file: Path | None, **more: Any) -> None:
    """Run the script; with a `file`, a failure is left there and said by the launcher alone.

    Args:
        body: What runs it.
        file: Where a failure goes.
        more: What is said of this process beside the failure.
    """
    hook = quiet() if file else Hook(quiet=False)
    try:
        body()
    except SystemExit as error:
        if file and error.code not in {None, 0}:
            record(error, file, **more)
            sys.exit(error.code if isinstance(error.code, int) else 1)
        raise
    except KeyboardInterrupt:
        hook.ending = True
        raise
    except BaseException as error:  # noqa: BLE001 - whatever the script raises is its failure
        error.__traceback__ = _own_frames(error)
        if file:
            record(error, file, **more)
        hook.ending = True
        said(error)
        sys.exit(1)


def quiet() -> Hook:
    """A hook in place that leaves what ends the script to the launcher to say."""
    sys.excepthook = hook = Hook(quiet=True)
    return hook


class Hook:
    """Python's own `sys.excepthook`, but silent about the exception that ends the script if that is told elsewhere.

    A hook of the user's takes its place, and may call it.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self.ending = False

    def __call__(  # noqa: D102 - as `sys.excepthook`
        self, kind: type[BaseException], error: BaseException, frames: TracebackType | None
    ) -> None:
        if not (self.ending and self._quiet):
            sys.__excepthook__(kind, error, frames)


def said(error: BaseException) -> None:
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


def execute(kind: str, target: str) -> None:
    """`python path` or `python -m name`, in a fresh `__main__` that stays until the process ends."""
    code, module = code_of(kind, target)
    if kind == "module":
        sys.argv[0] = str(module.__file__)
    sys.modules["__main__"] = module
    exec(code, vars(module))  # noqa: S102 - it is the user's script


def code_of(kind: str, target: str) -> tuple[CodeType, ModuleType]:
    """The code of a script or module, and a fresh `__main__` in which to execute it.

    Raises:
        ImportError: The module is not there, or cannot be executed.
        RuntimeError: The code is of another version of Python.
    """
    module = ModuleType("__main__")
    vars(module).update(__builtins__=builtins)
    if sys.version_info < (3, 14):
        vars(module).update(__annotations__={})
    if kind == "module" or is_application(target):
        spec = _spec(target) if kind == "module" else _main_of(target)
        code = spec.loader.get_code(spec.name)  # type: ignore[union-attr]
        vars(module).update(
            __file__=spec.origin,
            __spec__=spec,
            __package__=spec.parent,
            __cached__=spec.cached,
            __loader__=spec.loader,
        )
        return code, module
    file = str(Path(target).absolute())
    compiled = file.endswith(".pyc")
    loader = SourcelessFileLoader("__main__", file) if compiled else SourceFileLoader("__main__", file)
    vars(module).update(__file__=file, __loader__=loader, __cached__=None)
    data = loader.get_data(file)
    code = read_code(BytesIO(data))
    if compiled and code is None:
        raise RuntimeError(f"Bad magic number in {file}: it is compiled by another version of Python")
    return code or compile(data, file, "exec"), module


def _main_of(target: str) -> ModuleSpec:
    """What `python` runs of a zip file or folder."""
    importer: Any = get_importer(os.path.abspath(target))  # noqa: PTH100 - as above
    spec: ModuleSpec | None = importer.find_spec("__main__")
    if spec is None:
        raise ImportError(f"can't find '__main__' module in {target!r}", name="__main__")
    return spec


def _spec(name: str) -> ModuleSpec:
    """What `python -m name` runs: of a package its `__main__`."""
    spec = find_spec(name)
    if spec and spec.submodule_search_locations is not None:
        spec = find_spec(f"{name}.__main__")
    if spec is None or not hasattr(spec.loader, "get_code"):
        raise ImportError(f"no code for module {name!r}", name=name)
    return spec


def is_application(target: str) -> bool:
    """Return True for a zip file or a folder that Python runs by its `__main__`."""
    return get_importer(os.path.abspath(target)) is not None  # noqa: PTH100 - as Python itself, without links resolved


def _folder_of(kind: str, target: str) -> Path:
    """Return what comes first in `sys.path`."""
    if kind == "module":
        return Path.cwd()
    return Path(target).absolute() if is_application(target) else Path(target).resolve().parent


def _first_in_path(folder: Path) -> None:
    if not _SAFE_PATH:
        sys.path.insert(0, str(folder))


def find_shadowed(folder: Path, at_start: Collection[str]) -> list[str]:
    """Find the modules of a script's folder whose names are loaded already, though not by Python itself.

    Args:
        folder: What comes first in `sys.path`.
        at_start: The modules that Python itself has loaded.
    """
    if _SAFE_PATH or not folder.is_dir():
        return []
    loaded = {name.partition(".")[0] for name in sys.modules.keys() - at_start} - {"__main__", "accel_cli"}
    suffixes = tuple(all_suffixes())
    with os.scandir(folder) as entries:
        own = {
            entry.name.partition(".")[0]
            for entry in entries
            if entry.name.endswith(suffixes) or os.path.exists(f"{entry.path}/__init__.py")  # noqa: PTH110
        }
    return sorted(name for name in own & loaded if name in sys.modules and _has_file(name))


def _has_file(name: str) -> bool:
    spec = getattr(sys.modules[name], "__spec__", None)
    return spec is not None and spec.origin not in {None, "built-in", "frozen"}


def _forget(names: list[str]) -> None:
    """Have the script import its own modules of these names; what has loaded the others keeps them."""
    for name in [name for name in sys.modules if name.partition(".")[0] in names]:
        del sys.modules[name]


def _own_frames(error: BaseException) -> TracebackType | None:
    """The traceback without the frames of accel and of Python itself that lead to the script."""
    frames = error.__traceback__
    ours = {__file__, _REPLICAS, "<frozen runpy>", runpy.__file__}
    while frames and frames.tb_frame.f_code.co_filename in ours:
        frames = frames.tb_next
    return frames


def record(error: BaseException, file: Path, **more: Any) -> None:
    """Leave the failure where torch's elastic agent looks for it, in its own format, with more beside it."""
    now = time.time()
    error.__traceback__ = _own_frames(error)
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    extra = {"py_callstack": "".join(lines), "timestamp": str(int(now))}
    ours: dict[str, Any] = {"time": now, "raised": [_told(link) for link in _chain(error)], **more}
    if isinstance(error, SystemExit):
        ours["exit"] = error.code if isinstance(error.code, int) else f"{error.code}"
    told = {"message": {"message": lines[-1].strip(), "extraInfo": extra}, "accel": ours}
    try:
        # Whole or not at all: torch's agent fails on half a file.
        fresh = file.with_suffix(".new")
        fresh.write_text(json.dumps(told), encoding="utf-8")
        fresh.replace(file)
    except OSError:  # a full disk must not hide what was raised
        _print_on_launcher("".join(lines))


def _print_on_launcher(text: str) -> None:
    """Write to the launcher's own screen, past a log that takes no more; where that cannot be opened, to stderr."""
    try:
        with open(_LAUNCHERS_SCREEN.format(os.getppid()), "a", encoding="utf-8") as screen:  # noqa: PTH123
            screen.write(text)
    except OSError:
        sys.stderr.write(text)


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
