"""`launcher.preflight`: a short check of the nodes after the rendezvous, before the processes of the script start.

The agent of each node starts the script of `accel_runtime/extensions/node_check` for each rank, which publishes its record in the store of
the rendezvous. The first agent that has read all records decides for all. A bad node leaves the run if enough others remain, which then meet again;
otherwise the launch fails on all nodes.
"""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerGroup

from accel_cli import console
from accel_cli.errors import AccelError, UsageError
from accel_cli.planning.network import find_loopback_address
from accel_cli.runner import failures
from accel_cli.runner.bootstrap import BootstrapStore
from accel_cli.runner.context import RunContext
from accel_cli.runner.preparations import BuildEnvironment
from accel_cli.runner.processes import WorkerProcesses
from accel_cli.runner.rendezvous import NodeRendezvous
from accel_cli.runs.run_dir import RankFolder
from accel_cli.runs.run_files import read_text
from accel_runtime.environment import settings as env
from accel_runtime.extensions.node_check import records as node_records
from accel_runtime.extensions.node_check.records import Board, Limits, Record, Records
from accel_runtime.extensions.node_check.verdict import NodeFinding, judge

__all__ = ["Preflight", "Verdict", "decide"]

_SCRIPT = Path(node_records.__file__).with_name("measure.py")
_KILL_S = 5
_POLL_S = 0.5
_EMPTY_S = 60.0
"""Seconds without any node in the run, after which a node that was left out serves the store no more."""


@dataclass(frozen=True)
class Verdict:
    """The decision about a round, the same on all nodes."""

    reasons: Mapping[int, str]
    """Why nodes are bad, by their rank."""
    continues: bool
    """True if the other nodes meet again without the bad ones."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Verdict:
        """Parse the value in the store."""
        return cls({int(node): text for node, text in values["reasons"].items()}, values["continues"])


def decide(findings: Sequence[NodeFinding], num_nodes: int, num_spares: int, min_nodes: int) -> Verdict:
    """Return the decision for findings about nodes, of which at least one must remain."""
    reasons: dict[int, str] = {}
    for finding in findings:
        if finding.is_bad:
            before = f"{reasons[finding.node]}; " if finding.node in reasons else ""
            reasons[finding.node] = before + finding.text
    num_good = num_nodes - len(reasons)
    return Verdict(reasons, bool(reasons) and num_good >= 1 and num_good + num_spares >= min_nodes)


class Preflight:
    """The checks of one run on this node."""

    def __init__(self, context: RunContext, bootstrap: BootstrapStore, nodes: NodeRendezvous | None) -> None:
        self._context = context
        self._bootstrap = bootstrap
        self._nodes = nodes
        self._has_passed = False
        """True if the only node of a run has passed."""

    @staticmethod
    def refuse_bad_node(bootstrap: BootstrapStore) -> None:
        """Raise UsageError if a preflight of this run has left out this machine."""
        if reason := bootstrap.get_value(f"preflight/bad/{bootstrap.node.name}"):
            raise UsageError(
                f"{bootstrap.node.name} cannot join: the preflight of this run has left it out ({reason}). Repair it, and start it "
                "again for the next run."
            )

    def is_needed(self) -> bool:
        """Return True if a node of this round has not passed a check of this run."""
        if self._nodes is None:
            return not self._has_passed
        return not all(self._bootstrap.get_value(_get_passed_key(node.id)) for node in self._nodes.nodes)

    def check(self, group: WorkerGroup, number: int, build_environment: BuildEnvironment) -> bool:
        """Check the nodes of a round; return False if a bad one was left out, and the others must meet again.

        Raises:
            AccelError: This node is bad and was left out, or the launch fails.
        """
        begin = time.monotonic()
        # The store of the rendezvous: its port is known to be open between the nodes.
        store: Any = self._bootstrap.store if self._nodes else group.store
        board = Board(store, self._bootstrap.get_key(f"preflight/{number}"))
        records = self._collect(board, group, number, build_environment)
        names, findings = records.names, judge(records)
        spares = self._nodes.count_spares() if self._nodes else 0
        own = decide(findings, len(names), spares, self._bootstrap.min_nodes)
        verdict = Verdict.from_json(board.decide("verdict", asdict(own)))
        self._write(records, findings, number)
        board.count("read", 1)
        if not verdict.reasons:
            self._record_passed(())
            noun = "1 node" if len(names) == 1 else f"{len(names)} nodes"
            console.note(f"preflight: {noun} passed in {time.monotonic() - begin:.0f} s")
            # Without a failure, there is nothing to read in the output of the processes.
            shutil.rmtree(self._context.folder.path / "preflight", ignore_errors=True)
            return True
        if verdict.continues:
            self._leave_out(verdict, names, int(group.group_rank or 0))
            return False
        self._fail(verdict, names, board)
        return False

    # The processes

    def _collect(
        self, board: Board, group: WorkerGroup, number: int, build_environment: BuildEnvironment
    ) -> Records:
        """Run the processes of this node, and return the records of all."""
        node, workers = int(group.group_rank or 0), group.workers
        num_nodes, world_size = int(group.group_world_size or 1), workers[0].world_size
        limits = Limits.of(quick=True)
        for worker in workers:
            board.publish(Record(worker.global_rank, node, self._bootstrap.node.name, len(workers)))
        base = self._context.folder.path / "preflight" / str(number)
        folders = {worker.local_rank: RankFolder(base / f"rank_{worker.global_rank}") for worker in workers}
        try:
            for folder in folders.values():
                _create_folder(folder)
        except OSError as error:
            text = f"the log folder {base} cannot be written: {error.strerror}"
            board.publish_failure(workers[0].global_rank, text)
            board.count("started", len(workers))
            return board.collect(num_nodes, world_size, limits, self._context.guard.check, leads=node == 0)
        envs = {}
        for worker in workers:
            environment = build_environment(worker, folders[worker.local_rank])
            del environment[env.RANK_FOLDER]  # no heartbeat
            envs[worker.local_rank] = environment
        address = (*self._get_endpoint(group), self._bootstrap.get_key(f"preflight/{number}"), str(base))
        with self._run(group, envs, address) as processes:
            reported: set[int] = set()

            def watch() -> None:
                self._context.guard.check()
                for local_rank, process in enumerate(processes.leaders):
                    if process.poll() and local_rank not in reported:
                        reported.add(local_rank)
                        rank, folder = workers[local_rank].global_rank, folders[local_rank]
                        end = _describe_end(folder, process.poll() or 0)
                        board.publish_failure(rank, f"rank {rank} {end}")

            return board.collect(num_nodes, world_size, limits, watch, leads=node == 0)

    def _get_endpoint(self, group: WorkerGroup) -> tuple[str, str]:
        """Return the host and port of the store for the processes."""
        if self._nodes is None:
            return str(group.master_addr), str(group.master_port)
        endpoint = self._bootstrap.endpoint
        # This node may not have the address of the endpoint, if that is translated.
        host = find_loopback_address() if self._bootstrap.is_host else endpoint.host
        return host, str(endpoint.port)

    @contextmanager
    def _run(
        self, group: WorkerGroup, envs: dict[int, dict[str, str]], address: tuple[str, ...]
    ) -> Iterator[WorkerProcesses]:
        """Run the processes of the check inside a `with` block; they have nothing to save, and are killed at its end."""
        context, spec = self._context, group.spec
        worker_file = spec.args[0]
        processes = WorkerProcesses(
            replace(spec, args=(worker_file, "script", str(_SCRIPT), "quick", *address)),
            envs,
            server=context.server,
            orphans=context.orphans,
            settings=context.settings,
            on_failure=lambda _codes: None,
        )
        try:
            with context.signals.defer():
                processes.start()
                context.guard.watch(processes.pids().values())
            yield processes
        finally:
            if processes.subprocess_handlers:
                processes.close(signal.SIGKILL, _KILL_S)

    def _write(self, records: Records, findings: Sequence[NodeFinding], number: int) -> None:
        """Write the records to the folder of the run."""
        data = {"round": number, **records.to_dict(), "findings": [asdict(finding) for finding in findings]}
        with self._context.log_warning.catch_errors():
            file = self._context.folder.path / "preflight.json"
            file.write_text(json.dumps(data, indent=1), encoding="utf-8")

    # The result

    def _record_passed(self, bad: Collection[int]) -> None:
        """Record that the other nodes have passed, so that they are not checked again without a new one."""
        if self._nodes is None:
            self._has_passed = True
            return
        for rank, node in enumerate(self._nodes.nodes):
            if rank not in bad:
                self._bootstrap.set_value(_get_passed_key(node.id), "1")

    def _leave_out(self, verdict: Verdict, names: Sequence[str], own: int) -> None:
        """Leave the run if this node is bad, or note which nodes leave it."""
        assert self._nodes is not None
        self._record_passed(verdict.reasons)
        for node, reason in verdict.reasons.items():
            self._bootstrap.set_value(f"preflight/bad/{names[node]}", reason)
        if own not in verdict.reasons:
            for node, reason in verdict.reasons.items():
                console.note(f"preflight: {names[node]} is left out: {reason}")
            return
        reason = verdict.reasons[own]
        self._bootstrap.publish_departure(f"the preflight has left it out: {reason}")
        text = (
            f"The preflight has left {names[own]} out of the run: {reason}. Repair or replace this machine."
        )
        self._nodes.leave_round()
        if self._bootstrap.is_host:
            console.note(f"{text} Until the run ends, it serves the rendezvous.")
            self._serve_store(self._nodes)
        raise AccelError(text)

    def _serve_store(self, nodes: NodeRendezvous) -> None:
        """Wait until the run has ended, since the other nodes need the store of this one."""
        last = time.monotonic()
        while not nodes.is_closed() and time.monotonic() - last < _EMPTY_S:
            if not nodes.has_ended():
                last = time.monotonic()
            self._context.guard.check()
            time.sleep(_POLL_S)

    def _fail(self, verdict: Verdict, names: Sequence[str], board: Board) -> None:
        """Raise AccelError with the bad nodes, once the others have read the decision."""
        text = "; ".join(f"{names[node]}: {reason}" for node, reason in sorted(verdict.reasons.items()))
        self._bootstrap.set_value("ended", f"the preflight failed: {text}")
        if self._bootstrap.is_host:
            board.await_readers(len(names))
        file = console.abbreviate_home(str(self._context.folder.path / "preflight.json"))
        raise AccelError(
            f"The preflight failed: {text}. Repair or replace it; all facts are in {file}. launcher.preflight: false starts "
            "without the check."
        )


def _get_passed_key(node_id: str) -> str:
    return f"preflight/passed/{node_id}"


def _create_folder(folder: RankFolder) -> None:
    """Create the folder of a process with the files for its output."""
    folder.path.mkdir(parents=True)
    for name in ("stdout", "stderr"):
        (folder.path / name).touch()


def _describe_end(folder: RankFolder, code: int) -> str:
    """Return how a process has ended, with the exception that it recorded, or the last line of its output."""
    text = str(failures.read_record(folder.error).get("text", "")) or read_text(folder.path / "stderr")
    text = text.strip().rpartition("\n")[2]
    end = f"was terminated by signal {-code}" if code < 0 else f"exited with code {code}"
    return f"{end}{': ' if text else ''}{text}"
