"""The fresh interpreter of a launch: it loads torch, forks the server off, and becomes the elastic agent.

Run by path with the number of a file descriptor that holds the plan. A forked process returns to here as
well, and runs the script from the same depth as a process that `exec` started.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    # This folder; a script's own takes the place in the process that runs it.
    del sys.path[0]

# The first: it notes what Python itself has loaded.
from accel_cli.runner import worker

# isort: split
import gc
import importlib
from contextlib import suppress
from typing import NoReturn

from accel_cli.errors import AccelError, explain_address_space, explain_os_error, explain_torch_error
from accel_cli.planning.plan import Plan
from accel_cli.runner import exec_fallback
from accel_cli.runner.forkserver_process import ForkRequest, ForkServer, start_fork_server

__all__ = ["main"]


def main() -> None:
    """Be the agent; or, in a process that was forked, run the script."""
    try:
        plan = _plan()
        started = _started(plan)
        if isinstance(started, ForkServer | None):
            _end(_agent(plan, started))
    except AccelError as error:
        _fail(str(error), error.exit_code)
    except (OSError, MemoryError) as error:
        _fail(explain_os_error(error), 1)
    except (ImportError, RuntimeError, SystemError) as error:
        # Where memory ends, torch and Python raise these too.
        if not (limit := explain_address_space()):
            raise
        _fail(f"the processes cannot be started: {error}. {limit}", 1)
    started.enter()
    worker.main(started.arguments)


def _fail(message: str, code: int) -> NoReturn:
    """Print an error, and end."""
    try:
        from accel_cli import console  # noqa: PLC0415 - rich must not be in the processes

        console.error(message)
    except MemoryError:
        os.write(2, f"accel: error: {message}\n".encode())
    _end(code)


def _end(code: int) -> NoReturn:
    """End at once: a thread that waits in torch's store would abort the process while the interpreter shuts down."""
    for stream in (sys.stdout, sys.stderr):
        # Whoever read it may be gone, and has been told of by now.
        with suppress(OSError):
            stream.flush()
    os._exit(code)


def _plan() -> Plan:
    with os.fdopen(int(sys.argv[1]), encoding="utf-8") as told:
        return Plan.from_json(told.read())


def _started(plan: Plan) -> ForkServer | ForkRequest | None:
    """The server, a process's request, or None where processes are better started by exec."""
    if plan.nnodes > 1:
        # torch reads it once: the processes are then as quiet as the agent.
        importlib.import_module("accel_cli.runner.torch_log_level")
    # What is loaded now stays: not looking for garbage in it saves time here and memory pages in each process.
    gc.disable()
    try:
        importlib.import_module("torch")
    except (ImportError, MemoryError, OSError) as error:
        from accel_cli.runner import run_dir as file  # noqa: PLC0415 - not in the processes

        said = explain_torch_error(error)
        file.write_reason(plan.agent, said)
        raise AccelError(said) from error
    reason = exec_fallback.explain_fallback(plan, bare=worker.AT_START)
    gc.freeze()
    started = None if reason else start_fork_server()
    gc.enable()
    if isinstance(started, ForkServer) and exec_fallback.threads():
        started.close()
        started, reason = None, "a library started threads while torch was loaded"
    if reason:
        from accel_cli import console  # noqa: PLC0415 - as above

        console.note(f"processes are started by exec: {reason}")
    return started


def _agent(plan: Plan, server: ForkServer | None) -> int:
    from accel_cli.runner import agent  # noqa: PLC0415 - not in the processes

    return agent.run(plan, server)


if __name__ == "__main__":
    main()
