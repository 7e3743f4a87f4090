"""Entry point of a rank: run the user's script as `python` itself would, and record its failure.

Run by path, so that it imports the standard library only and the script's own folder can be the first entry of
`sys.path` at once. Usage: `worker.py script|module|program TARGET [ARGS]...`
"""

# ruff: noqa: E402 - the modules that Python itself has imported must be known first
from __future__ import annotations

import sys

PYTHON_MODULES = frozenset(sys.modules)
"""The modules that Python itself has imported before a script begins."""
# isort: split
import atexit
import builtins
import contextlib
import errno
import faulthandler
import fcntl
import json
import os
import resource
import runpy
import signal
import stat
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from importlib.machinery import SourceFileLoader, SourcelessFileLoader, all_suffixes
from io import RawIOBase, TextIOWrapper
from pathlib import Path
from pkgutil import get_importer
from types import CodeType, ModuleType, TracebackType
from typing import Any, NoReturn

__all__ = [
    "CHILD_STACK_SIGNAL",
    "EXIT_FILE",
    "HOOKS",
    "NOTE_FILE",
    "PYTHON_MODULES",
    "REPLICA_COUNT_FILE",
    "STACKS_FILE",
    "STACK_REQUEST_FILE",
    "STACK_SIGNAL",
    "THREAD_FAILURES_FILE",
    "THREAD_FILE",
    "ExceptHook",
    "connect_output",
    "disconnect_input",
    "execute",
    "find_shadowed",
    "get_import_folder",
    "ignore_full_disk",
    "is_application",
    "main",
    "open_output",
    "prepare_script",
    "print_exception",
    "record_failure",
    "record_thread_failures",
    "run_script",
    "serve_stacks",
    "set_main",
    "set_stream",
    "strip_frames",
    "write_record",
]

NOTE_FILE = "note"
"""The file of an attempt with a note of a rank that is not shown, for the screen."""
STACK_SIGNAL, CHILD_STACK_SIGNAL = (getattr(signal, "SIGRTMIN", 0) + number for number in (8, 9))
"""The signals at which a process writes its stacks, and at which a forked child does; scripts, torch and schedulers do not use them."""
STACK_REQUEST_FILE = "stack_request"
"""The pipe in the rank's folder in which the stacks are requested."""
STACKS_FILE = "stacks"
"""The file in the rank's folder to which the stacks are written."""
THREAD_FILE = "thread"
"""The file with the id of the thread that runs a replica, as faulthandler prints it."""
REPLICA_COUNT_FILE = "replicas"
"""The file with which a replica reports that it has started; it contains the number of replicas."""
EXIT_FILE = "exit.json"
"""The file in the rank's folder in which a script that ends with code 0 records where it ended."""
THREAD_FAILURES_FILE = "thread_failures.jsonl"
"""The file in the rank's folder with the exceptions that have ended threads of the script, the first ones only."""
_MAX_THREAD_FAILURES, _MAX_THREAD_TEXT = 4, 2000
_ACCELERATE_LIMITS = "ACCEL_ACCELERATE_LIMITS"
_RANK_FOLDER = "ACCEL_RANK_FOLDER"
_RECORD = "ACCEL_RECORD_"
"""`ACCELERATE_LIMITS`, `RANK_FOLDER` and `RECORD` of the settings, whose import takes a tenth of a second."""
_DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE})
_MAX_DESCRIPTORS, _NUM_HIGH = 4096, 16
"""The highest descriptor that is used, since the kernel's table grows with it, and the number of those that are kept for accel."""
_LAUNCHER_STDERR = "/proc/{}/fd/2"
_PYTHON_EXCEPTHOOK = sys.__excepthook__
_PACKAGE = f"{Path(__file__).parent}{os.sep}"
"""The folder of the files that lead to the script."""
HOOKS = str(Path(__file__).parents[1] / "accel_runtime" / "observe" / "torch_hooks.py")
"""The functions between the script and torch's own."""
_SAFE_PATH = getattr(sys.flags, "safe_path", False)
"""Set by `PYTHONSAFEPATH` (Python 3.11): the script's folder is not added to `sys.path`."""


def main(arguments: list[str]) -> None:
    """Run `script`, `module` or `program` TARGET with its arguments, after exec or after a fork."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    folder = os.path.dirname(error_file) if error_file else None  # noqa: PTH120 - `connect_output` takes text
    if folder:
        connect_output(folder)
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        disconnect_input()
    kind, *sys.argv = arguments
    if kind == "program":
        _exec_program(sys.argv)
    if folder:
        serve_stacks(folder)
        _record_immediate_exits(Path(os.environ["TORCHELASTIC_ERROR_FILE"]))
    if _ACCELERATE_LIMITS in os.environ or _RANK_FOLDER in os.environ:
        from accel_runtime.observe.import_hooks import call_after_import  # noqa: PLC0415 - for scripts of ranks

        call_after_import("accelerate.state", _report_limits)
    if _RANK_FOLDER in os.environ:
        # Ranks without a folder need not import them.
        from accel_runtime.observe.collective_trace import serve_trace_requests  # noqa: PLC0415
        from accel_runtime.observe.threads import wait_at_group_end  # noqa: PLC0415
        from accel_runtime.observe.torch_hooks import watch_progress  # noqa: PLC0415

        watch_progress(_create_heartbeat)
        wait_at_group_end()
        record_thread_failures(Path(os.environ[_RANK_FOLDER]))
        if os.environ.get("WORLD_SIZE", "1") != "1":
            serve_trace_requests(Path(os.environ[_RANK_FOLDER]))
        if any(name.startswith(_RECORD) and value for name, value in os.environ.items()):
            from accel_runtime.observe.recorders import start_recorders  # noqa: PLC0415 - rarely needed

            start_recorders(os.environ)
    if folder and rank != "0":
        from accel_runtime.observe.debuggers import skip_debuggers  # noqa: PLC0415 - rank 0 need not import it

        skip_debuggers(lambda place: _report_debugger(folder, rank, place))
    # Registered before the script's own functions, so that it runs after them.
    atexit.register(wait_for_collectives)
    prepare_script(kind)
    run_script(lambda: execute(kind, sys.argv[0]), Path(error_file) if error_file else None)


def _create_heartbeat() -> None:
    from accel_runtime.observe.heartbeat import heartbeat  # noqa: PLC0415 - scripts that do not train need not import it

    heartbeat()


def _report_limits(module: ModuleType) -> None:
    """Report what has no effect in Accelerate, once a script uses its state."""
    from accel_runtime.environment.accelerate.import_hook import report_at_first_use  # noqa: PLC0415 - rarely needed

    report_at_first_use(module, os.environ.get(_ACCELERATE_LIMITS, ""))


def wait_for_collectives() -> None:
    """Wait at exit for the threads of torch's collectives, which could abort the process after its work is done."""
    if "torch.distributed" in sys.modules:
        with contextlib.suppress(ImportError):
            from accel_runtime.observe import threads  # noqa: PLC0415 - ranks without torch need not import it

            threads.wait_for_collectives()


def set_stream(name: str, stream: TextIOWrapper) -> None:
    """Set `sys.stdin`, `sys.stdout` or `sys.stderr`."""
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", stream)


def connect_output(folder: str, set_stream: Callable[[str, TextIOWrapper], None] = set_stream) -> None:
    """Redirect stdout and stderr to the files in the rank's folder, and write the stack of a crash to another one.

    The launcher creates `stdout` and `stderr` there: its pseudo-terminal or pipe if the rank is shown, else the log. If
    one cannot be opened, the launcher's own stream stays.
    """
    for number, name in ((1, "stdout"), (2, "stderr")):
        try:
            fd = open_output(folder, name)
        except OSError:
            continue
        os.dup2(fd, number)
        os.close(fd)
        if stream := _reopen_stream(name, number):
            set_stream(name, stream)
        if stat.S_ISREG(os.fstat(number).st_mode):
            ignore_full_disk(getattr(sys, name), f"{folder}/{name}")
    if not faulthandler.is_enabled():
        with contextlib.suppress(OSError):
            faulthandler.enable(_open_at_high_descriptor(f"{folder}/fault.log"))


def disconnect_input() -> None:
    """Give this process an empty standard input: that of the launcher belongs to rank 0."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    if before := sys.stdin:  # None: the launcher was started with the stream closed
        set_stream("stdin", open(0, encoding=before.encoding, errors=before.errors, closefd=False))  # noqa: SIM115 - until the end


def _report_debugger(folder: str, rank: str, place: str) -> None:
    """Print that a debugger did not stop; if this rank is not shown, its launcher prints the note of the first one."""
    text = (
        f"rank {rank} did not stop in the debugger{place}: standard input belongs to rank 0. Stop there (`if "
        "accelerator.is_main_process: breakpoint()`), or attach a debugger to each process through a port (debugpy)."
    )
    sys.stderr.write(f"accel: {text}\n")
    if stat.S_ISREG(os.fstat(2).st_mode):
        with contextlib.suppress(OSError), Path(folder).with_name(NOTE_FILE).open("x") as file:
            file.write(text)


def _reopen_stream(name: str, number: int) -> TextIOWrapper | None:
    """Reopen `sys.stdout` or `sys.stderr` as Python opens it at its start, once its descriptor is another file.

    A stream keeps what it found out about the first file: whether it can seek, its position, and whether it is a terminal.
    """
    before = getattr(sys, name)
    if before is None:  # the launcher was started with the stream closed
        return None
    before.flush()
    is_unbuffered = isinstance(before.buffer, RawIOBase)
    binary: Any = open(number, "wb", 0 if is_unbuffered else -1, closefd=False)  # noqa: SIM115 - until the end
    getattr(binary, "raw", binary).name = f"<{name}>"
    stream: Any = TextIOWrapper(binary, before.encoding, before.errors, "\n", line_buffering=True)
    stream.mode = "w"
    return stream  # type: ignore[no-any-return]


def open_output(folder: str, name: str) -> int:
    """Open a file that the launcher created for output, and return its descriptor."""
    # O_NOCTTY: the terminal must not become the controlling one. O_NONBLOCK: a pipe without a reader must not block.
    fd = os.open(f"{folder}/{name}", os.O_WRONLY | os.O_APPEND | os.O_NOCTTY | os.O_NONBLOCK)
    os.set_blocking(fd, True)
    return fd


def ignore_full_disk(stream: Any, link: str) -> None:
    """Drop output to a log on a full disk, since a print must not end a training, and unlink the log for the launcher."""
    raw = getattr(stream.buffer, "raw", stream.buffer)
    write = raw.write

    def write_or_drop(data: Any) -> int | None:
        try:
            return write(data)  # type: ignore[no-any-return]
        except OSError as error:
            if error.errno not in _DISK_ERRORS:
                raise
            with contextlib.suppress(OSError):
                os.unlink(link)  # noqa: PTH108 - a text, as `connect_output` takes it
            return memoryview(data).nbytes

    raw.write = write_or_drop


def serve_stacks(folder: str) -> None:
    """Write the stacks of all threads at each request.

    A thread writes them, which holds Python's lock: faulthandler crashes on frames that the interpreter is just changing. A forked
    child, such as a data-loader worker, has no such thread, and writes them at `CHILD_STACK_SIGNAL` between two instructions.
    At `STACK_SIGNAL` they are written at once, also while C code holds the lock.
    """
    from accel_runtime.observe.request_pipes import serve_requests  # noqa: PLC0415 - for scripts of ranks

    with contextlib.suppress(OSError):
        stacks = _open_at_high_descriptor(f"{folder}/{STACKS_FILE}")
        serve_requests(Path(folder, STACK_REQUEST_FILE), lambda: faulthandler.dump_traceback(stacks))
        if hasattr(signal, "SIGRTMIN"):
            faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
            os.register_at_fork(after_in_child=lambda: _handle_child_signal(stacks))


def _handle_child_signal(stacks: int) -> None:
    signal.signal(CHILD_STACK_SIGNAL, lambda *_: faulthandler.dump_traceback(stacks))
    signal.siginterrupt(CHILD_STACK_SIGNAL, False)


def _open_at_high_descriptor(path: str) -> int:
    """Open a file for faulthandler, for the life of the process, under a descriptor with a high number.

    faulthandler writes to the number, whatever it belongs to. A script may close all descriptors; the next files that it
    opens get the lowest numbers, not this one.
    """
    opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    limit = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], _MAX_DESCRIPTORS)
    try:
        return fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, limit - _NUM_HIGH)
    finally:
        os.close(opened)


def _exec_program(argv: list[str]) -> None:
    """Replace this process by a program."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        # Python ignores them, and the program would inherit that.
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.exit(f"{argv[0]} cannot be executed: {error.strerror}")


def prepare_script(kind: str, *, in_path: bool = False) -> None:
    """Set up `sys.path`, `sys.modules` and the streams as `python` does for the script in `sys.argv`."""
    # For a script that restarts itself.
    sys.orig_argv = [sys.executable, *(["-m"] if kind == "module" else []), *sys.argv]
    if not in_path:
        folder = get_import_folder(kind, sys.argv[0])
        if not _SAFE_PATH:
            sys.path.insert(0, str(folder))
        # The script imports its own modules of these names; modules that imported the others keep them.
        shadowed = find_shadowed(folder, PYTHON_MODULES)
        for name in [name for name in sys.modules if name.partition(".")[0] in shadowed]:
            del sys.modules[name]
    for stream in (sys.stdout, sys.stderr):
        _set_line_buffering(stream, enabled=True)


def get_import_folder(kind: str, target: str) -> Path:
    """Return the first entry of `sys.path`, as `python` sets it: the folder of the script, or a zip file itself."""
    if kind == "module":
        return Path.cwd()
    return Path(target).absolute() if is_application(target) else Path(target).resolve().parent


def find_shadowed(folder: Path, python_modules: Collection[str]) -> list[str]:
    """Find modules of a script's folder whose names are imported already, but not by Python itself."""
    if _SAFE_PATH or not folder.is_dir():
        return []
    loaded = {name.partition(".")[0] for name in sys.modules.keys() - python_modules}
    suffixes = tuple(all_suffixes())
    with os.scandir(folder) as entries:
        # Only of these few: a folder of data has many files, and a file system in the network answers slowly.
        candidates = [(name, entry) for entry in entries if (name := entry.name.partition(".")[0]) in loaded]
    names = {
        name
        for name, entry in candidates
        if entry.name.endswith(suffixes) or os.path.exists(f"{entry.path}/__init__.py")  # noqa: PTH110
    }
    specs = {
        name: getattr(sys.modules.get(name), "__spec__", None) for name in names - {"__main__", "accel_cli"}
    }
    builtin = {None, "built-in", "frozen"}
    return sorted(name for name, spec in specs.items() if spec and spec.origin not in builtin)


def run_script(body: Callable[[], None], error_file: Path | None, **details: Any) -> None:
    """Run the script; with an error file, its failure and `details` are recorded there and printed by the launcher only.

    Processes that the script forks end here too: their failures are printed, as under Python, and not recorded.
    """
    hook, pid = ExceptHook(), os.getpid()
    if error_file:
        # Libraries compare the two.
        sys.excepthook = sys.__excepthook__ = hook
    try:
        if error_file:
            _record_exit(body, error_file.parent)
        else:
            body()
    except SystemExit as error:
        if error_file and error.code not in {None, 0} and os.getpid() == pid:
            record_failure(error, error_file, **details)
            sys.exit(error.code if isinstance(error.code, int) else 1)
        raise
    except KeyboardInterrupt:
        hook.is_ending = os.getpid() == pid
        raise
    except BaseException as error:  # noqa: BLE001 - any exception is a failure of the script
        error.__traceback__ = strip_frames(error)
        if os.getpid() == pid:
            if error_file:
                record_failure(error, error_file, **details)
            hook.is_ending = True
        print_exception(error)
        if not error_file and os.getpid() == pid:
            _print_hint(error)
        sys.exit(1)


def _print_hint(error: BaseException) -> None:
    """Print the hint for an exception, which the launcher of several processes prints itself."""
    with contextlib.suppress(Exception):  # the exception is more important
        from accel_cli.failure_hints import find_hint  # noqa: PLC0415 - after failures only

        links = list(_get_chain(error))
        chain = "\n".join("".join(traceback.format_exception_only(link)) for link in links)
        frames = [frame for link in links for frame in traceback.extract_tb(link.__traceback__)[-1:]]
        if hint := find_hint(chain, "\n".join(frame.line or "" for frame in frames)):
            sys.stderr.write(f"accel: hint: {hint}\n")


class ExceptHook:
    """`sys.excepthook` that does not print the exception that ends the script, since the launcher prints it."""

    is_ending = False

    def __call__(  # noqa: D102 - as `sys.excepthook`
        self, kind: type[BaseException], error: BaseException, frames: TracebackType | None
    ) -> None:
        if not self.is_ending:
            _PYTHON_EXCEPTHOOK(kind, error, frames)


def print_exception(error: BaseException) -> None:
    """Print an exception through `sys.excepthook`, in one write, so that the output of several ranks is not mixed.

    As Python does, it leaves the exception in `sys.last_value`, where functions of `atexit` look for it.
    """
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    stream = sys.stderr
    _set_line_buffering(stream, enabled=False)
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except Exception:  # noqa: BLE001 - a hook of the script that fails must not hide the exception
        traceback.print_exc()
    if stream:
        stream.flush()
    _set_line_buffering(stream, enabled=True)


def _set_line_buffering(stream: object, *, enabled: bool) -> None:
    """Write at the end of each line, or only at a flush, also with `python -u`.

    With a write for each part of a line, the lines of stdout and stderr would be mixed: they reach the launcher in two ways.
    """
    if isinstance(stream, TextIOWrapper):
        stream.reconfigure(line_buffering=enabled, write_through=False)


def set_main(module: ModuleType) -> None:
    """Set the `__main__` module of this process."""
    sys.modules["__main__"] = module


def execute(kind: str, target: str, set_main: Callable[[ModuleType], None] = set_main) -> None:
    """Run `python path` or `python -m name` in a new `__main__` that stays until the process ends."""
    code, module = _load_main(kind, target)
    if kind == "module":
        sys.argv[0] = str(module.__file__)
    set_main(module)
    exec(code, vars(module))  # noqa: S102 - the user's script


def _load_main(kind: str, target: str) -> tuple[CodeType, ModuleType]:
    """Load the code of a script or module, and create the `__main__` in which to execute it."""
    module = ModuleType("__main__")
    vars(module).update(__builtins__=builtins)
    if sys.version_info < (3, 14):
        vars(module).update(__annotations__={})
    if kind == "module":
        _, spec, code = runpy._get_module_details(target)  # type: ignore[attr-defined]  # noqa: SLF001 - as `python -m`
    elif is_application(target):
        importer: Any = get_importer(os.path.abspath(target))  # noqa: PTH100 - as in `is_application`
        spec = importer.find_spec("__main__")
        code = spec.loader.get_code("__main__")
    else:
        file = str(Path(target).absolute())
        loader: Any = (SourcelessFileLoader if file.endswith(".pyc") else SourceFileLoader)("__main__", file)
        vars(module).update(__file__=file, __loader__=loader, __cached__=None)
        if file.endswith(".pyc"):
            return loader.get_code("__main__"), module
        source = loader.get_data(file)
        if b"\0" in source:  # `compile` names neither the file nor the line
            line = source.partition(b"\0")[0].count(b"\n") + 1
            raise SyntaxError("source code cannot contain null bytes", (file, line, None, "\n"))
        # Without the future imports of this module.
        return compile(source, file, "exec", dont_inherit=True), module
    vars(module).update(
        __file__=spec.origin,
        __spec__=spec,
        __package__=spec.parent,
        __cached__=spec.cached,
        __loader__=spec.loader,
    )
    return code, module


def is_application(target: str) -> bool:
    """Return True for a zip file that Python runs by its `__main__`."""
    return get_importer(os.path.abspath(target)) is not None  # noqa: PTH100 - as Python itself, links not resolved


def record_failure(error: BaseException, error_file: Path, **details: Any) -> None:
    """Write a failure in the format of torch's elastic agent, with more fields under `accel`."""
    error.__traceback__ = strip_frames(error)
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    details["chain"] = [_describe_exception(link) for link in _get_chain(error)]
    if isinstance(error, SystemExit):
        details["exit"] = error.code if isinstance(error.code, int) else str(error.code)
    with contextlib.suppress(Exception):  # the record of the failure is more important
        _write_collectives(error_file.parent)
    try:
        write_record(error_file, "".join(lines), details)
    except OSError:
        # A full disk must not hide the exception, and the log may be on it.
        try:
            path = Path(_LAUNCHER_STDERR.format(os.getppid()))
            with path.open("a", encoding="utf-8", errors="backslashreplace") as screen:
                screen.writelines(lines)
        except OSError:
            sys.stderr.writelines(lines)


def record_thread_failures(folder: Path) -> None:
    """Record the exceptions that end threads of this process, for which the main thread may wait for ever; they are printed as before."""
    import threading  # noqa: PLC0415 - only in ranks, which import it anyway

    before, pid, numbers = threading.excepthook, os.getpid(), iter(range(_MAX_THREAD_FAILURES))

    def record(arguments: threading.ExceptHookArgs, /) -> None:
        error = arguments.exc_value
        is_exit = error is None or isinstance(error, SystemExit)
        if not is_exit and os.getpid() == pid and next(numbers, None) is not None:
            with contextlib.suppress(
                Exception
            ):  # as of a full disk, or of a message that cannot be formatted
                described = _describe_exception(error)  # type: ignore[arg-type]  # not None
                line = json.dumps({**described, "text": described["text"][:_MAX_THREAD_TEXT]})
                with (folder / THREAD_FAILURES_FILE).open("a", encoding="utf-8") as file:
                    file.write(f"{line}\n")
        before(arguments)

    threading.excepthook = record


def _record_exit(body: Callable[[], None], folder: Path) -> None:
    """Run the script; if it ends with code 0, record that, and the line of its `sys.exit`: other ranks may wait for it."""
    pid = os.getpid()

    def write(frames: TracebackType | None) -> None:
        stack = [(frame.filename, frame.lineno, frame.name) for frame in traceback.extract_tb(frames)]
        record = {"monotonic": time.monotonic(), "pid": pid, "frames": stack}
        if os.getpid() == pid:
            with contextlib.suppress(OSError):
                (folder / EXIT_FILE).write_text(json.dumps(record), encoding="utf-8")

    try:
        body()
    except SystemExit as error:
        if error.code in {None, 0}:
            write(strip_frames(error))
        raise
    write(None)


def _record_immediate_exits(error_file: Path) -> None:
    """Record the line of an `os._exit` of the script in this process; one of Python's own modules, and of a child process, is not."""
    leave, pid, library = os._exit, os.getpid(), f"{Path(os.__file__).parent}{os.sep}"

    def _exit(status: int) -> NoReturn:
        if os.getpid() == pid:
            with contextlib.suppress(Exception):  # as of a full disk
                # Without the text of the lines: nothing is read from a disk that may be the reason for this exit.
                stack = [
                    (frame.f_code.co_filename, number, frame.f_code.co_name, None)
                    for frame, number in traceback.walk_stack(sys._getframe(1))  # noqa: SLF001 - its public name
                ]
                if not _is_of_python(stack[0][0], library):
                    _write_immediate_exit(error_file, status, stack[::-1])
        leave(status)

    _exit.__module__, _exit.__qualname__ = "os", "_exit"  # so that it can be pickled
    os._exit = _exit


def _is_of_python(file: str, library: str) -> bool:
    return file.startswith(("<frozen ", library)) and "site-packages" not in file


def _write_immediate_exit(error_file: Path, status: int, frames: list[tuple[str, int, str, None]]) -> None:
    """Write the record of an exit, unless the script has ended before."""
    exit_file = error_file.parent / EXIT_FILE
    if error_file.exists() or exit_file.exists():
        return
    while frames and frames[0][0].startswith((_PACKAGE, "<frozen runpy>", runpy.__file__)):
        del frames[0]
    if status:
        link = {"kind": "builtins.SystemExit", "text": f"SystemExit: {status}\n", "frames": frames}
        write_record(error_file, f"SystemExit: {status}\n", {"chain": [link], "exit": status})
    else:
        record = {
            "monotonic": time.monotonic(),
            "pid": os.getpid(),
            "frames": [frame[:3] for frame in frames],
        }
        exit_file.write_text(json.dumps(record), encoding="utf-8")


def _write_collectives(folder: Path) -> None:
    """Write torch's record of collectives, in which a time-out of another rank may be found."""
    if "torch._C._distributed_c10d" in sys.modules and os.environ.get("WORLD_SIZE", "1") != "1":
        from accel_runtime.observe.collective_trace import write_trace  # noqa: PLC0415 - after failures only

        write_trace(folder)


def write_record(error_file: Path, text: str, fields: dict[str, Any]) -> None:
    """Write a record atomically, since torch's agent fails on a partial file."""
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    message = {"message": text.strip().rpartition("\n")[2], "extraInfo": extra}
    new = error_file.with_suffix(".new")
    # The order of failures must not depend on a clock that can be set.
    record = {"monotonic": time.monotonic(), "pid": os.getpid(), **fields}
    new.write_text(json.dumps({"message": message, "accel": record}), encoding="utf-8")
    new.replace(error_file)


def strip_frames(error: BaseException) -> TracebackType | None:
    """Return the traceback without the frames of accel and Python that lead to the script, and those of hooks between others."""
    frames = error.__traceback__
    leading = (_PACKAGE, "<frozen runpy>", runpy.__file__)
    while frames and frames.tb_frame.f_code.co_filename.startswith(leading):
        frames = frames.tb_next
    last = frames
    while last:
        while last.tb_next and last.tb_next.tb_frame.f_code.co_filename == HOOKS:
            last.tb_next = last.tb_next.tb_next
        last = last.tb_next
    return frames


def _get_chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and its causes, as far as a traceback would show them."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _describe_exception(error: BaseException) -> dict[str, Any]:
    frames = traceback.extract_tb(error.__traceback__)
    return {
        "kind": f"{type(error).__module__}.{type(error).__qualname__}",
        "text": "".join(traceback.format_exception_only(type(error), error)),
        "frames": [(frame.filename, frame.lineno, frame.name, frame.line) for frame in frames],
    }


if __name__ == "__main__":
    if not _SAFE_PATH:
        # Remove this file's own folder.
        del sys.path[0]
    main(sys.argv[1:])
