"""One process: the script replaces the process of `accel launch`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from accel_cli import console
from accel_cli.errors import UsageError
from accel_cli.launchers.launcher import (
    GpuIds,
    KeepDays,
    KeepRuns,
    Launcher,
    LaunchSpec,
    Plan,
    build_environment,
    build_rank_command,
    choose_gpus,
    resolve_device,
)
from accel_cli.planning.plan import KEEP_DAYS, KEEP_RUNS
from accel_cli.runner.preparations import prepare_node
from accel_cli.runs.run_dir import write_run_file
from accel_runtime.environment import settings as env

if TYPE_CHECKING:
    from accel_cli.runs.recorder import RunRecorder

__all__ = ["Single"]


class Single(Launcher):
    """One process on this machine, which replaces `accel launch`."""

    title: ClassVar[str] = "One process on this machine"
    proven_on: ClassVar[str] = "real service: Linux with CPUs, and one GPU"
    replaces_process: ClassVar[bool] = True

    kind: Literal["single"] = Field("single", description="One process on this machine.")
    gpu_ids: GpuIds = None
    keep_runs: KeepRuns = KEEP_RUNS
    keep_days: KeepDays = KEEP_DAYS

    @override
    def plan(self, spec: LaunchSpec) -> Plan:
        if spec.nodes.node_rank:
            raise UsageError(
                f"--node-rank {spec.nodes.node_rank} needs several nodes. Give --nnodes and --rdzv-endpoint."
            )
        spec, visible = choose_gpus(spec, self.gpu_ids)
        device = resolve_device(spec, 1)
        return Plan(
            launcher=self.kind,
            argv=_build_command(spec),
            env={
                **build_environment(spec, _threads(spec)),
                **visible,
                **({} if spec.nodes.inherited else spec.nodes.ranks),
            },
            device=device,
            target=spec.target,
            node_summary=spec.nodes.summary if spec.nodes.ranks else "",
        )

    @override
    def run(self, plan: Plan) -> int:
        """Replace this process by the script's, so that signals and exit code are the script's.

        It returns in process 1 of a container only, where the script is a child instead: the kernel makes process 1 the
        parent of all orphans, and ignores signals for which it has no handler.
        """
        environ = {**os.environ, **plan.env}
        prepare_node(plan.argv, environ)
        recorder = self._record(plan) if plan.details and "RANK" not in environ else None
        run_file = environ.pop(env.RUN_FILE, None)  # a launch of the script is another run
        if recorder:
            write_run_file(run_file, recorder.folder)
            environ[env.RANK_FOLDER] = str(recorder.folder.get_rank(0, 0).path)
        sys.stdout.flush()
        sys.stderr.flush()
        if os.getpid() == 1:
            # Imported before the fork, since a signal before its handler is lost.
            from accel_cli.runner.guard import HANDLED_SIGNALS  # noqa: PLC0415 - rarely needed

            if child := os.fork():
                code = _wait_as_process_1(child, (*HANDLED_SIGNALS, signal.SIGCONT, signal.SIGWINCH))
                if recorder:
                    _close_run(recorder, plan, code)
                return code
            if recorder:
                recorder.record_pid(0, 0)
        try:
            os.execvpe(plan.argv[0], plan.argv, environ)
        except OSError as error:
            raise UsageError(f"Cannot execute {plan.argv[0]}: {error.strerror}.") from error

    def _record(self, plan: Plan) -> RunRecorder | None:
        """Create the folder of the run; ranks that another launcher has started have none."""
        from accel_cli.runs.recorder import record_script  # noqa: PLC0415 - not for a dry run

        return record_script(plan, os.environ, keep_runs=self.keep_runs, keep_days=self.keep_days)

    @override
    def get_world_sizes(self, spec: LaunchSpec, plan: Plan) -> Sequence[int]:
        return (int(spec.nodes.ranks.get("WORLD_SIZE", 1)),)


def _build_command(spec: LaunchSpec) -> tuple[str, ...]:
    """Return the command of the process, which counts its steps unless it is a program, or a rank of another launcher."""
    if spec.kind == "program" or spec.nodes.inherited:
        start = {"script": (spec.python,), "module": (spec.python, "-m"), "program": ()}[spec.kind]
        return (*start, spec.target, *spec.args)
    return build_rank_command(spec)


def _threads(spec: LaunchSpec) -> dict[str, str]:
    """Return OMP_NUM_THREADS for ranks that another launcher started without dividing the cores among them."""
    local_size = int(spec.nodes.ranks.get("LOCAL_WORLD_SIZE", 1))
    bound = spec.machine.cpus < (os.cpu_count() or 1)
    if spec.nodes.inherited or local_size == 1 or bound:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, spec.machine.cpus // local_size))}


def _close_run(recorder: RunRecorder, plan: Plan, code: int) -> None:
    """Record the end of the run of a child, and print the line that closes the launch."""
    with suppress(OSError):
        recorder.end(code)
    if plan.details and not plan.details.is_quiet:
        console.note(recorder.format_end("1 process", code))


def _wait_as_process_1(child: int, signals: Iterable[int]) -> int:
    """Forward signals to a child and reap all processes that exit, until the child exits; return its exit code."""
    # A separate process group, so that Ctrl-C of a terminal does not reach the child twice.
    with suppress(OSError):
        os.setpgid(child, child)
        os.tcsetpgrp(0, child)
    for number in signals:
        signal.signal(number, lambda number, _: os.kill(child, number))
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
