"""Launches from Python: a typed request, `accel launch` in a process of its own, and the result as an object.

A launch replaces its process, handles signals in the main thread and changes the environment, so that it cannot run in the process
of a notebook, a test or an engine. The request is the command line of `accel launch`, word by word, so that both mean the same.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGINT, SIGTERM
from typing import Any, TypedDict, Unpack

from accel_cli.errors import UsageError
from accel_cli.launchers.node_launch import NodeLaunch
from accel_cli.planning.launch_options import Kind
from accel_cli.profile.options import OPTIONAL_VALUES, OPTIONS
from accel_cli.runs.progress import RunProgress
from accel_cli.runs.run_dir import RunFolder
from accel_runtime.environment.settings import RUN_FILE
from accel_runtime.environment.text import decode_text

__all__ = ["LaunchError", "LaunchOptions", "LaunchResult", "launch"]

_KINDS: Mapping[Kind, tuple[str, ...]] = {"script": (), "module": ("--module",), "program": ("--no-python",)}


class LaunchOptions(TypedDict, total=False):
    """The options of `accel launch`, each as `accel launch --help` describes it; those that are left out are the profile's."""

    quiet: bool
    profile: str
    no_profile: bool
    config_file: str | os.PathLike[str]
    set: Mapping[str, Any]
    """Keys of the profile and their values: `{"launcher.kind": "slurm", "env.HF_HOME": "/data/hf"}`."""
    nproc_per_node: int | str
    gpu_ids: int | str | Sequence[int]
    cpu: bool
    nnodes: int | str
    rdzv_endpoint: str
    rdzv_id: str
    node_rank: int
    mixed_precision: str
    global_batch_size: int
    resume: bool
    ranks: int | str | Sequence[int]
    log_dir: str | os.PathLike[str]
    metrics_port: int | str
    record_numerics: str | bool
    check_replay: int | bool
    progress_line: float | bool
    progress_file: str | os.PathLike[str]
    max_restarts: int
    shutdown_timeout: int
    stall_timeout: int
    stall_action: str
    preflight: bool


@dataclass(frozen=True)
class LaunchResult:
    """The end of a launch."""

    exit_code: int
    """The exit code of `accel launch`: 0, that of the script's failure, or 128 + n after signal n."""
    reason: str
    """The failure, as `accel launch` names it: the rank, and the exception or signal; empty without one, or if it is not known."""
    seconds: float
    """The wall time of the launch."""
    has_timed_out: bool = False
    """True if `timeout` has ended it."""
    folder: Path | None = None
    """The folder of the run on this machine, with its logs; None for a job, whose processes are elsewhere."""
    steps: int = 0
    """The optimizer steps of the last attempt, of the rank that is behind the others; 0 without a folder."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The last number of each metric that `accelerator.log` has logged, by name; empty without a folder."""

    @property
    def run(self) -> str | None:
        """The id of the run, as `accel runs` and `accel report` name it."""
        return self.folder.name if self.folder else None


class LaunchError(RuntimeError):
    """A launch has ended with another exit code than 0; `result` has the rest."""

    def __init__(self, result: LaunchResult) -> None:
        self.result = result
        super().__init__(
            f"accel launch ended with exit code {result.exit_code}: {result.reason or 'see its output'}"
        )


def launch(  # noqa: PLR0913 - keywords beside the options
    script: str | os.PathLike[str],
    args: Sequence[str | os.PathLike[str] | int | float] = (),
    *,
    kind: Kind = "script",
    cwd: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
    output: Callable[[str], object] | None = None,
    timeout: float | None = None,
    check: bool = False,
    **options: Unpack[LaunchOptions],
) -> LaunchResult:
    """Run `accel launch` in a process of its own, and wait until it ends.

    It may be called from any thread, and several times at once. An interrupt of this process (Ctrl-C) is passed on to the launch,
    which saves and ends as in a terminal; then KeyboardInterrupt is raised. The standard input of the launch is empty.

    Args:
        script: The path of the script; with `kind`, the name of a module or a program.
        args: Its arguments.
        kind: `script`, `module` (as with `-m`) or `program` (as with `--no-python`).
        cwd: The working folder; None for that of this process.
        environ: The environment; None for that of this process.
        output: Called with each line of the output of the launch and of the ranks that it shows, without its end, in this thread;
            None passes the output on to that of this process.
        timeout: Seconds after which the launch gets SIGTERM, and has `shutdown_timeout` to save and end; None for no limit.
        check: Raise LaunchError if the exit code is not 0.
        **options: The options of `accel launch`, with `_` for `-`: `nproc_per_node=2`, `set={"mixed_precision": "bf16"}`.

    Returns:
        The exit code, the failure, and the run.

    Raises:
        UsageError: The launch was refused before a process started, as by a misspelled key.
        LaunchError: It has failed, and `check` is true.
        KeyboardInterrupt: This process was interrupted.
        OSError: No process can be started.

    Example:
        >>> import accel_cli
        >>> result = accel_cli.launch("train.py", ["--epochs", 3], nproc_per_node=2, set={"mixed_precision": "bf16"})
        >>> result.exit_code, result.metrics["loss"]
    """
    words = build_words(script, args, kind, options)
    with tempfile.TemporaryDirectory(prefix="accel-launch-") as scratch:
        run_file = Path(scratch, "run")
        node = NodeLaunch(Path(scratch, "reason"))
        begin = time.monotonic()
        process = node.start(
            (sys.executable, "-m", "accel_cli", "launch", *words),
            Path(cwd or Path.cwd()),
            {**(os.environ if environ is None else environ), RUN_FILE: str(run_file)},
            streams=(subprocess.PIPE, subprocess.STDOUT) if output else (None, None),
        )
        with _limit(node, timeout) as has_timed_out:
            _wait(process, node, output)
        seconds, end = time.monotonic() - begin, node.wait()
        folder = Path(os.fsdecode(run_file.read_bytes())) if run_file.exists() else None
    if end.code == UsageError.exit_code and end.reason and folder is None:
        raise UsageError(end.reason)
    steps, metrics = _read_progress(folder)
    result = LaunchResult(
        end.code,
        end.reason,
        seconds,
        has_timed_out=has_timed_out.is_set(),
        folder=folder,
        steps=steps,
        metrics=metrics,
    )
    if check and result.exit_code:
        raise LaunchError(result)
    return result


def build_words(
    script: str | os.PathLike[str],
    args: Sequence[str | os.PathLike[str] | int | float],
    kind: Kind,
    options: LaunchOptions,
) -> tuple[str, ...]:
    """Return the command line of `accel launch` for a request.

    Raises:
        UsageError: An option does not exist, or has a value of another type.
    """
    if kind not in _KINDS:
        raise UsageError(f"Invalid kind {kind!r}: expected {', '.join(_KINDS)}.")
    words = [*_KINDS[kind]]
    for name, value in options.items():
        if name not in LaunchOptions.__annotations__:
            raise UsageError(
                f"launch has no option {name!r}: expected {', '.join(LaunchOptions.__annotations__)}. Other settings are keys of the "
                "profile: set={'launcher.NAME': VALUE}."
            )
        words += _format_option(name, value)
    return (*words, "--", os.fspath(script), *(_format_argument(arg) for arg in args))


def _format_option(name: str, value: Any) -> list[str]:
    """Return the words of an option; none for None and False."""
    flag = OPTIONS[name].flag
    if value is None or value is False:
        return []
    if name == "set":
        if not isinstance(value, Mapping):
            raise UsageError(f"Invalid set: expected keys and values, got {value!r}. Give a dict.")
        # JSON is YAML, and keeps text as text: "no", "1e3". Variables are text in any case.
        texts = (
            f"{key}={each if key.startswith('env.') else json.dumps(each, ensure_ascii=False)}"
            for key, each in value.items()
        )
        return [word for text in texts for word in (flag, text)]
    if not OPTIONS[name].metavar:
        if value is not True:
            raise UsageError(f"Invalid {name} {value!r}: expected True or False.")
        return [flag]
    if value is True:
        if flag not in OPTIONAL_VALUES:
            raise UsageError(f"Invalid {name} True: expected {OPTIONS[name].metavar}.")
        return [flag, OPTIONAL_VALUES[flag]]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [flag, ",".join(map(str, value))]
    return [flag, _format_argument(value)]


def _format_argument(value: Any) -> str:
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)


def _wait(process: subprocess.Popen[bytes], node: NodeLaunch, output: Callable[[str], object] | None) -> None:
    """Pass the output on until the launch ends; an exception of this thread ends the launch first."""
    try:
        if process.stdout and output:
            for line in process.stdout:
                output(decode_text(line.rstrip(b"\r\n")))
        process.wait()
    except BaseException as error:
        # Its processes save and end; a second interrupt ends them at once, as in a terminal.
        node.send_signal(SIGINT if isinstance(error, KeyboardInterrupt) else SIGTERM)
        while process.returncode is None:
            try:
                _drain(process)
            except KeyboardInterrupt:
                node.send_signal(SIGINT)
        raise
    finally:
        if process.stdout:
            process.stdout.close()


@contextmanager
def _limit(node: NodeLaunch, timeout: float | None) -> Iterator[threading.Event]:
    """End a launch that runs for longer than a number of seconds inside of the context; the event is set if it was ended."""
    has_timed_out = threading.Event()

    def end() -> None:
        has_timed_out.set()
        node.send_signal(SIGTERM)

    timer = None if timeout is None else threading.Timer(timeout, end)
    if timer:
        timer.daemon = True
        timer.start()
    try:
        yield has_timed_out
    finally:
        if timer:
            timer.cancel()


def _drain(process: subprocess.Popen[bytes]) -> None:
    """Read what a launch that ends still prints, so that it does not wait for a reader."""
    if process.stdout:
        process.stdout.read()
    process.wait()


def _read_progress(folder: Path | None) -> tuple[int, Mapping[str, float]]:
    """Return the steps and the last metrics of a run; none if its folder is gone."""
    if folder is None or not folder.is_dir():
        return 0, {}
    progress = RunProgress.read(RunFolder(folder))
    return progress.steps, progress.metrics
