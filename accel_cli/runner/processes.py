"""The processes of this node: started by exec or forked, ended, and checked for out-of-memory kills."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from typing_extensions import override

from accel_cli import console
from accel_cli.errors import UsageError
from accel_cli.planning.plan import AgentSettings, select_ranks
from accel_cli.runner import failures
from accel_cli.runner.forkserver import ForkServer, ForkServerError
from accel_cli.runner.output import RankOutputs
from accel_cli.runner.shutdown import Orphans, end_processes
from accel_cli.runner.stalls import read_exit_record
from accel_cli.runs.run_dir import RankFolder
from accel_cli.runs.run_files import read_text
from accel_cli.worker import REPLICA_COUNT_FILE
from accel_runtime.observe.kernel_log import read_kernel_log

__all__ = ["OomKillCounter", "ReplicaWatch", "WorkerProcesses", "check_open_files"]

_LAUNCHER_FILES, _FILES_PER_PROCESS = 32, 8
"""The most files that the launcher opens: for itself, and for each process."""


def check_open_files(processes: int) -> None:
    """Raise UsageError if the limit would make the launcher fail, or block, during the run."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _LAUNCHER_FILES + _FILES_PER_PROCESS * processes
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise UsageError(
            f"the limit on open files is {limit}, but launching {processes} process(es) needs {needed}. Raise it: "
            f"ulimit -n {max(1024, needed)}"
        )


class WorkerProcesses(SubprocessContext):
    """One process for each local rank: forked by the server if there is one, else started by exec."""

    def __init__(  # noqa: PLR0913 - made in one place
        self,
        spec: WorkerSpec,
        envs: dict[int, dict[str, str]],
        *,
        server: ForkServer | None,
        orphans: Orphans,
        settings: AgentSettings,
        on_failure: Callable[[Mapping[int, int]], None],
    ) -> None:
        error_files = {rank: env["TORCHELASTIC_ERROR_FILE"] for rank, env in envs.items()}
        super().__init__(
            name=spec.role,
            entrypoint=str(spec.entrypoint),
            args=dict.fromkeys(envs, tuple(spec.args)),
            envs=envs,
            logs_specs=DefaultLogsSpecs(os.devnull),
        )
        # DefaultLogsSpecs has replaced them by paths of its own.
        self.error_files = error_files
        for rank, path in error_files.items():
            envs[rank]["TORCHELASTIC_ERROR_FILE"] = path
        self._server = server
        self._orphans = orphans
        self._settings = settings
        self._on_failure: Callable[[Mapping[int, int]], None] | None = on_failure
        """Called once with the exit codes of failed processes, by local rank, before the others are ended."""
        self.stopped: set[int] = set()
        """The local ranks that still ran when they were closed: their exit codes are no failures."""
        self._exited: set[int] | None = None
        self._found_lingering: set[int] = set()

    @override
    def start(self) -> None:
        # Without torch's signal handlers, which would replace those of the launcher.
        self._start()

    @override
    def _start(self) -> None:
        if self._server:
            environs = [{**os.environ, **self.envs[rank]} for rank in range(self.nprocs)]
            try:
                pids = self._server.fork((str(self.entrypoint), *self.args[0]), environs)
            except ForkServerError as error:
                console.note(f"processes are started by exec: {error}")
            else:
                # torch's context uses `proc` only.
                handlers = [SimpleNamespace(proc=_ForkedProcess(pid)) for pid in pids]
                self.subprocess_handlers = dict(enumerate(cast("list[SubprocessHandler]", handlers)))
                return
        super()._start()  # type: ignore[no-untyped-call]

    @property
    def leaders(self) -> Sequence[subprocess.Popen[bytes]]:
        """The processes, by local rank."""
        return [handler.proc for _, handler in sorted(self.subprocess_handlers.items())]

    def find_lingering(self, seconds: float) -> list[int]:
        """Return the local ranks that recorded a failure at least `seconds` ago and still run; each one once."""
        found = []
        for rank in self.error_files.keys() - self._found_lingering:
            record = self._read_record(rank)
            is_old = record and time.monotonic() - record["monotonic"] >= seconds
            if is_old and self.subprocess_handlers[rank].proc.poll() is None:
                found.append(rank)
        self._found_lingering.update(found)
        return sorted(found)

    def list_exited(self) -> set[int]:
        """Return the local ranks that have exited with 0; once the processes were closed, those that had done so before."""
        if self._exited is not None:
            return self._exited
        return {rank for rank, handler in self.subprocess_handlers.items() if handler.proc.poll() == 0}

    def _read_record(self, rank: int) -> Mapping[str, Any]:
        """Read the record of a failure; empty without one."""
        pid = None if self._settings.starts_replicas else self.pids()[rank]
        return failures.read_record(Path(self.error_files[rank]), pid)

    def _has_script_ended(self, rank: int) -> bool:
        folder = RankFolder(Path(self.error_files[rank]).parent)
        return bool(read_exit_record(folder, self.pids()[rank]))

    @override
    def close(self, death_sig: signal.Signals | None = None, timeout: int | None = None) -> None:
        handlers = self.subprocess_handlers.items()
        codes = {rank: handler.proc.poll() for rank, handler in handlers}
        if self._exited is None:
            # One whose script has ended may still be exiting, with its connections closed.
            exiting = {rank for rank, code in codes.items() if code is None and self._has_script_ended(rank)}
            self._exited = self.list_exited() | exiting
        running = {rank for rank, code in codes.items() if code is None}
        failed = {rank: code for rank, code in codes.items() if code}
        if failed and running and self._on_failure:
            on_failure, self._on_failure = self._on_failure, None
            on_failure(failed)
        # A process that has recorded its failure is exiting, and may have caused other failures.
        self.stopped |= {rank for rank in running if not self._read_record(rank)}
        super().close(death_sig, self._settings.shutdown_timeout if timeout is None else timeout)

    @override
    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        # torch would signal process groups: data-loader workers end, and fail the rank while it saves.
        late = end_processes(self.leaders, death_sig, timeout, self._orphans)
        killed = [worker.pid for worker in self.leaders if worker.pid in self._orphans.killed_workers]
        self._orphans.killed_workers.clear()  # torch may close the processes again
        pids = ", ".join(map(str, killed or late))
        if killed:
            console.note(f"process {pids} was killed at once: a signal arrived while the run was ending")
        elif late:
            console.note(f"process {pids} did not exit within {timeout} s and was killed")


class _ForkedProcess:
    """A forked child, polled as `subprocess.Popen` polls."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._exitcode: int | None = None

    def poll(self) -> int | None:
        if self._exitcode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._exitcode = os.waitstatus_to_exitcode(status) if pid else None
        return self._exitcode


class ReplicaWatch:
    """Finds the replicas of an attempt as they start, and routes the output of the selected ranks to the screen."""

    def __init__(self, attempt: Path, outputs: RankOutputs, shown: int | str) -> None:
        self._attempt, self._outputs, self._shown = attempt, outputs, shown
        self.folders: dict[int, RankFolder] = {}
        self.world_size = 0
        """The number of replicas on all nodes; 0 before the first has started."""

    def check(self) -> bool:
        """Route the output of new replicas; return True if there are any."""
        paths = {
            int(file.parent.name.partition("_")[2]): file.parent
            for file in self._attempt.glob(f"rank_*/{REPLICA_COUNT_FILE}")
        }
        new = {rank: RankFolder(path) for rank, path in sorted(paths.items()) if rank not in self.folders}
        for rank, folder in new.items():
            self.world_size = int((folder.path / REPLICA_COUNT_FILE).read_text())
            shown = select_ranks(self._shown, self.world_size)
            self._outputs.prefixed = len(shown) > 1
            self._outputs.route(folder, rank, shown=rank in shown)
        self.folders = dict(sorted((self.folders | new).items()))
        return bool(new)


_OOM_KILL_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
_CGROUP_FILES = (
    ("memory", "memory/{}/memory.oom_control"),
    ("", "{}/memory.events"),
    ("", "unified/{}/memory.events"),
)
"""Controllers and files with the count, for version 1, 2 and both."""


class OomKillCounter:
    """Detects processes that the kernel kills because memory runs out, from now on."""

    def __init__(
        self, *, membership: Path = Path("/proc/self/cgroup"), cgroups: Path = Path("/sys/fs/cgroup")
    ) -> None:
        self._membership, self._cgroups = membership, cgroups
        self._before = self._read_count()

    def has_killed(self, pids: Iterable[int]) -> bool:
        """Return True if the kernel is known to have killed one of these processes, or another one of the control group."""
        return self._read_count() > self._before or any(map(_is_in_kernel_log, pids))

    def _read_count(self) -> int:
        """Return the number of kills in the control group of this process, as far as it can be read."""
        counts = [0]
        for line in read_text(self._membership).splitlines():
            _, controllers, group = line.split(":", 2)
            names = {group.strip("/"), "."}
            files = [file for controller, file in _CGROUP_FILES if controller in controllers.split(",")]
            for path in [self._cgroups / file.format(name) for file in files for name in names]:
                counts += map(int, _OOM_KILL_COUNT.findall(read_text(path)))
        return max(counts)


def _is_in_kernel_log(pid: int) -> bool:
    pattern = re.compile(rf"[Oo]ut of memory: Killed process {pid} ".encode("ascii"))
    try:
        return any(map(pattern.search, read_kernel_log()))
    except OSError:
        return False
