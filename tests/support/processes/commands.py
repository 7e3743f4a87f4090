"""The `accel` command: in a process forked from an interpreter that has imported torch, or in the test process.

This file is both sides. Tests use `Accel`, `run_accel`, `run_together`, `run_ranks` and `call_accel`; a forked process calls
`run_command`. Its plan, fork server, agent and ranks are real. Only the start of an interpreter that imports torch is left out:
tests of the start of a launch, and tests with variables that Python or torch reads at its start, use `accel` of `conftest.py`.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from unittest import mock

from support.processes.children import ForkedProcess
from support.processes.interpreter import Interpreter
from support.processes.waits import limit

from accel_cli import start_time
from accel_cli.main import main

INTERPRETER = Interpreter(
    "accel_cli.runner.forkserver_main",  # the first: it must not see the modules below as loaded
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.utils.data",
    "torch._dynamo",
    "safetensors.torch",
    "accel_cli.main",
    "accel_cli.runner.run",
    "accel_cli.profile.planner",
    "accel_cli.runner.stalls",
    "rich.traceback",
    "support.processes.commands",
)
"""The interpreter that has imported what `accel` imports, and not `accel_runtime`, which scripts import."""
preload = INTERPRETER.preload
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x20000, 0x4000000, 0x40000000
MS_BIND, MS_REC, MS_SLAVE = 0x1000, 0x4000, 0x80000
"""Constants of Linux, from sched.h and sys/mount.h."""


class Accel(ForkedProcess):
    """A running command `accel`: a child of this process, with the interface of `subprocess.Popen`.

    Args:
        args: The arguments of `accel`.
        host: The names of a network namespace and of its host; None for the namespace of this process.
        options: Options of `subprocess.Popen` for streams, text, folder and environment.
    """

    def __init__(self, *args, host=None, **options):
        super().__init__(
            INTERPRETER, "support.processes.commands:run_command", (host, *map(str, args)), **options
        )
        self.args = ["accel", *map(str, args)]


def run_accel(*args, timeout=240, **options):
    """Run `accel` and wait for its exit, like the fixture `accel` of `conftest.py`.

    Args:
        args: The arguments of `accel`.
        timeout: Seconds until the process is killed, before they are scaled.
        options: Options of `Accel`; by default the output is captured as text.
    """
    options = {"stdin": subprocess.DEVNULL, "text": True} | options
    if options.pop("capture_output", True):
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Accel(*args, **options) as process:
        out, err = process.communicate(timeout=limit(timeout))
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run_together(commands, **options):
    """Run several commands at the same time, as those that mostly wait.

    Args:
        commands: The arguments of each command, by its working folder.
        options: Options of `run_accel` for all of them.

    Returns:
        The result of each command, by its working folder.
    """
    with ThreadPoolExecutor(len(commands)) as pool:
        results = pool.map(lambda folder: run_accel(*commands[folder], cwd=folder, **options), commands)
        return dict(zip(commands, results, strict=True))


def run_ranks(size, port, script, *args, cwd, **variables):
    """Run a script as a group of ranks without a launcher: forked, with the variables that torchrun sets.

    Args:
        size: The number of ranks.
        port: A free port, where rank 0 starts the store of the group.
        script: The path of the script.
        args: Its arguments.
        cwd: Its working folder.
        variables: Further environment variables.

    Returns:
        The output of each rank.
    """
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    environ = {**os.environ, **place, "LOCAL_WORLD_SIZE": str(size), **variables}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                ForkedProcess(
                    INTERPRETER,
                    str(script),
                    map(str, args),
                    cwd=cwd,
                    env=environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    **pipes,
                )
            )
            for rank in range(size)
        ]
        with ThreadPoolExecutor(size) as pool:
            results = list(pool.map(lambda process: process.communicate(timeout=limit(240)), processes))
    for process, (_, errors) in zip(processes, results, strict=True):
        assert process.returncode == 0, errors
    return [output for output, _ in results]


def call_accel(capfd, *args, env=None):
    """Call the command in this process as if it ran without a terminal: for its output and files, not its processes.

    Args:
        capfd: The fixture of pytest that captures the output of this process and its children.
        args: The arguments of `accel`.
        env: The environment; None for that of this process.

    Returns:
        The exit code and output, as `subprocess.run` returns them.
    """
    environ = {"COLUMNS": "80", **(os.environ if env is None else env)}
    command = ["accel", *map(str, args)]
    capfd.readouterr()
    with (
        mock.patch.dict(os.environ, environ, clear=True),
        mock.patch.object(sys, "argv", command),
        mock.patch.object(
            sys.modules["__main__"], "__package__", None
        ),  # otherwise the program name is `python -m pytest`
    ):
        try:
            main()
            code = 0
        except SystemExit as error:
            code = error.code or 0
    out, err = capfd.readouterr()
    return subprocess.CompletedProcess(command, code, out, err)


class PlanReadyError(BaseException):
    """Unwinds the stack of the command line with the plan that the fork server would execute."""


def run_command(host, *args):
    """Run `accel` in a forked process; return only in a rank whose script has ended."""
    from accel_cli.runner import forkserver, forkserver_main

    os.setsid()
    start_time.STARTED = time.monotonic()
    if host:
        enter_namespace(*host)
    sys.argv = ["accel", *args]
    sys.stdout.reconfigure(line_buffering=os.isatty(1))

    def raise_plan(plan):
        raise PlanReadyError(plan)

    forkserver.exec_fork_server = raise_plan
    try:
        main()
    except SystemExit as error:
        exit_process(error.code)
    except PlanReadyError as error:
        (plan,) = error.args
    os.environ.update(plan.env)
    # Continue like `exec_fork_server` in a new interpreter, but in this one.
    sys.argv = [forkserver_main.__file__, str(forkserver._write_plan(plan)), *sys.argv[1:]]
    forkserver_main.main()


def enter_namespace(namespace, name):
    """Enter a network namespace like `ip netns exec`, and set the host name."""
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result):
        assert result == 0, os.strerror(ctypes.get_errno())

    with Path("/run/netns", namespace).open() as file:
        check(libc.setns(file.fileno(), CLONE_NEWNET))
    check(libc.unshare(CLONE_NEWNS | CLONE_NEWUTS))
    check(libc.mount(b"none", b"/", None, MS_REC | MS_SLAVE, None))
    for file in Path("/etc/netns", namespace).iterdir():
        check(libc.mount(bytes(file), b"/etc/" + file.name.encode(), None, MS_BIND, None))
    socket.sethostname(name)


def exit_process(code):
    """Exit immediately, without the slow teardown of torch."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code or 0)
