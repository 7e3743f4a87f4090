"""The resources that all attempts of a run share."""

from __future__ import annotations

from dataclasses import dataclass

from accel_cli.planning.plan import AgentSettings
from accel_cli.runner.forkserver import ForkServer
from accel_cli.runner.output import LogWarning, SilenceHint
from accel_cli.runner.shutdown import GuardProcess, Orphans, SignalHandlers
from accel_cli.runs.recorder import RunRecorder
from accel_cli.runs.run_dir import RunFolder
from accel_cli.runs.sink_threads import ProgressSinks

__all__ = ["RunContext"]


@dataclass(frozen=True)
class RunContext:
    """Resources that all attempts of a run share."""

    settings: AgentSettings
    folder: RunFolder
    recorder: RunRecorder
    progress_sinks: ProgressSinks
    log_warning: LogWarning
    signals: SignalHandlers
    guard: GuardProcess
    orphans: Orphans
    """Processes that ranks have started in sessions of their own."""
    server: ForkServer | None
    """The server that forks the processes; None starts them by exec."""
    silence_hint: SilenceHint | None
    """The note about a run without output; None if notes are left out."""
    is_quiet: bool = False
    """True if a launcher shows the output of all nodes, so that what is the same on all is printed by the first."""
