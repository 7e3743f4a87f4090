"""Run a torchrun plan with torch's elastic agent, inside this process: signals, the run folder, the guard, and the agent."""

# ruff: noqa: E402 - torch must be imported by `import_torch`
from __future__ import annotations

from accel_cli.runner.forkserver import ForkServer, import_torch

import_torch(quiet=True)

# isort: split
import logging
import os

import torch
from torch.distributed.elastic.agent.server import api
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException

from accel_cli import console, control, start_time
from accel_cli.errors import AccelError, RunEndedError, UsageError
from accel_cli.planning import network
from accel_cli.planning.plan import AgentSettings, Plan
from accel_cli.runner.agent import ElasticAgent
from accel_cli.runner.bootstrap import BootstrapStore, ScriptIdentity
from accel_cli.runner.context import RunContext
from accel_cli.runner.output import LogWarning, SilenceHint
from accel_cli.runner.preparations import find_node_check, prepare_node
from accel_cli.runner.processes import check_open_files
from accel_cli.runner.rendezvous import NodeRendezvous, SingleNodeRendezvous
from accel_cli.runner.shutdown import GuardProcess, Orphans, SignalHandlers
from accel_cli.runs.recorder import RunRecorder, build_record, note_temporary_home
from accel_cli.runs.run_dir import RunFolder, get_log_home, write_reason, write_run_file
from accel_cli.runs.sink_threads import ProgressSinks
from accel_runtime.environment import settings as env

__all__ = ["run"]


def run(plan: Plan, server: ForkServer | None = None, begin: float | None = None) -> int:
    """Start the processes of a plan on this node, by fork if there is a server, and wait until they end.

    The command began at `begin`, on the monotonic clock; without it, when this process imported accel.

    Return 0, the exit code of the failure nearest the root cause (`failures.find_root_failure`), or 128 + n if signal n ended that
    process or the launcher.
    """
    check_open_files(plan.nproc_per_node)
    settings = plan.agent
    assert settings
    # A launch of the script must not use the connection of this one.
    if requests := os.environ.pop(env.CONTROL, ""):
        os.environ.pop(env.FAILURE_FILE, None)
    # Failures and signals are printed once, by accel. Some loggers of torch have a level of their own.
    for name in ("torch.distributed.elastic", api.__name__):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.update(plan.env)
    with SignalHandlers(shutdown_timeout=settings.shutdown_timeout) as signals:
        connection, code = None, 1
        try:
            if requests:  # only now: they may be signals
                connection = control.Control(requests, settings.shutdown_timeout)
            prepare_node(plan.argv, os.environ)
            begin = start_time.STARTED if begin is None else begin
            code = _run_and_record(plan, settings, signals, server, begin)
        except SignalException as error:
            # The rendezvous stays open, so that other nodes can continue without this one.
            code = 128 + int(error.sigval)
        except AccelError as error:
            code = error.exit_code
            if not isinstance(error, RunEndedError):
                write_reason(settings.failure_file, str(error))
            raise
        finally:
            if connection:
                signals.stop_raising()
                connection.report_end(code)
    return code


def _run_and_record(
    plan: Plan, settings: AgentSettings, signals: SignalHandlers, server: ForkServer | None, begin: float
) -> int:
    """Run torch's agent, and record the exit code in a new run folder."""
    base = get_log_home(os.environ, settings.log_dir)
    record = build_record(plan, torch.__version__, begin)
    try:
        folder = RunFolder.create(
            base, plan.target, record, keep_runs=settings.keep_runs, keep_days=settings.keep_days
        )
    except OSError as error:
        raise UsageError(
            f"Cannot write logs to {base}: {error.strerror}. Choose another folder with --log-dir."
        ) from None
    # A launch of the script is another run.
    write_run_file(os.environ.pop(env.RUN_FILE, None), folder)
    note_temporary_home(base)
    warning, recorder = LogWarning(folder), RunRecorder(folder, begin)
    is_quiet = plan.details is None or plan.details.is_quiet
    hint = None if is_quiet else SilenceHint(detects_stalls=settings.stall_timeout is not None)
    progress_sinks = ProgressSinks(folder, settings, os.environ)
    agent: ElasticAgent | None = None
    code = 1
    try:
        progress_sinks.open()
        with GuardProcess(folder.path, signals) as guard:
            orphans = signals.orphans = Orphans()
            context = RunContext(
                settings,
                folder,
                recorder,
                progress_sinks,
                warning,
                signals,
                guard,
                orphans,
                server,
                hint,
                is_quiet,
            )
            agent = _create_agent(plan, context)
            code = agent.run_to_end()
    except SignalException as error:
        code = 128 + int(error.sigval)
    except AccelError as error:
        code = error.exit_code
        raise
    finally:
        signals.stop_raising()
        with warning.catch_errors():
            recorder.end(code)
        is_stopped = signals.received is not None and code == 128 + signals.received
        for text in progress_sinks.close(code, is_stopped=is_stopped):
            (agent.note if agent else console.note)(text)
        if agent and not is_quiet:
            agent.print_end(code)
    return code


def _create_agent(plan: Plan, context: RunContext) -> ElasticAgent:
    """Join the run at its store, and create torch's agent."""
    settings = context.settings
    script = ScriptIdentity("") if settings.is_single_node else ScriptIdentity.from_plan(plan)
    bootstrap = BootstrapStore(settings, plan.nproc_per_node, script, derived=bool(plan.node_summary))
    if settings.node_check:
        find_node_check(settings.node_check).refuse_bad_node(bootstrap)
    handler: SingleNodeRendezvous | NodeRendezvous
    if bootstrap.is_single_node:
        handler = SingleNodeRendezvous(bootstrap, settings.run_id)
    else:
        name = network.find_interface(bootstrap.address) if network.is_hostname_loopback() else None
        if name:  # gloo would publish an address that only this node reaches
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        handler = NodeRendezvous.create(bootstrap, settings)
    program, *args = plan.argv
    spec = WorkerSpec(
        role="default_role",
        local_world_size=plan.nproc_per_node,
        entrypoint=program,
        args=tuple(args),
        rdzv_handler=handler,
        max_restarts=settings.max_restarts,
        monitor_interval=settings.monitor_interval,
        local_addr=bootstrap.address,
    )
    return ElasticAgent(spec, handler, context)
