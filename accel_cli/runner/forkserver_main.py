"""The fresh interpreter of a launch: it imports torch, starts the fork server, and becomes the elastic agent.

Run by path with the number of a file descriptor from which the start of the command and the plan are read. Forked processes
return here too, and run the script at the same stack depth as a process started by exec.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    # Remove this folder; the worker adds the script's own.
    del sys.path[0]

# First: it notes the modules that Python itself has imported.
from accel_cli import worker

# isort: split
from accel_cli import early_signals

if __name__ == "__main__":
    early_signals.exit_on_signals()

# isort: split
import gc
from contextlib import suppress
from typing import NoReturn

from accel_cli.errors import (
    AccelError,
    explain_address_space,
    explain_os_error,
    explain_process_limit,
    explain_torch_error,
)
from accel_cli.planning.plan import Plan
from accel_cli.runner.forkserver import (
    ForkRequest,
    ForkServer,
    explain_fallback,
    explain_unsafe_fork,
    import_torch,
    preload_modules,
    start_fork_server,
)
from accel_runtime.environment.text import encode_text

__all__ = ["main"]


def main() -> None:
    """Run the agent; in a forked process, run the script."""
    try:
        with os.fdopen(int(sys.argv[1]), encoding="utf-8") as file:
            begin = float(file.readline())
            plan = Plan.from_json(file.read())
        started = _start_server(plan)
        if not isinstance(started, ForkRequest):
            from accel_cli.runner.run import run  # noqa: PLC0415 - not in the forked processes

            _exit(run(plan, started, begin))
    except AccelError as error:
        _fail(str(error), error.exit_code)
    except (OSError, MemoryError) as error:
        _fail(explain_os_error(error), 1)
    except (ImportError, RuntimeError, SystemError) as error:
        # torch and Python raise these as well if no memory is left.
        if limit := explain_process_limit(error):
            _fail(limit, 1)
        if not (limit := explain_address_space()):
            raise
        _fail(f"the processes cannot be started: {error}. {limit}", 1)
    started.enter()
    worker.main(list(started.argv[2:]))


def _start_server(plan: Plan) -> ForkServer | ForkRequest | None:
    """Import torch and start the server; return None if the processes must be started by exec."""
    # Modules loaded now stay loaded: no collection saves time here, and memory pages in every process.
    gc.disable()
    assert plan.agent
    try:
        import_torch(quiet=plan.nnodes > 1)
    except (ImportError, MemoryError, OSError) as error:
        from accel_cli.runs import run_dir  # noqa: PLC0415 - not in the forked processes

        message = explain_torch_error(error)
        run_dir.write_reason(plan.agent.failure_file, message)
        raise AccelError(message) from error
    # A single process would share its memory with nobody, and wait for modules that it may not need.
    preloaded = preload_modules() if plan.nproc_per_node > 1 else []
    reason = explain_fallback(plan, python_modules=worker.PYTHON_MODULES)
    gc.freeze()
    started = None if reason else start_fork_server(preloaded)
    gc.enable()
    if isinstance(started, ForkServer) and (reason := explain_unsafe_fork()):
        started.close()
        started = None
    if reason:
        from accel_cli import console  # noqa: PLC0415 - as above

        console.note(f"processes are started by exec: {reason}")
    return started


def _fail(message: str, code: int) -> NoReturn:
    """Print an error and exit."""
    try:
        from accel_cli import console  # noqa: PLC0415 - rich must not be in the processes

        console.error(message)
    except MemoryError:
        os.write(2, encode_text(f"accel: error: {message}\n"))
    from accel_cli import control  # noqa: PLC0415 - not in the forked processes

    control.report_failure(code, message)
    _exit(code)


def _exit(code: int) -> NoReturn:
    """Exit at once: a thread that waits in torch's store would abort the process at interpreter shutdown."""
    for stream in (sys.stdout, sys.stderr):
        # Its reader may have exited; that was reported before.
        with suppress(OSError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
