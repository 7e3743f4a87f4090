"""The driver of a Ray job, which runs on the head node: it reserves nodes, starts `accel launch` on each, and reports.

The nodes of an attempt are the bundles of one placement group, each with one actor. If a node is lost, the others are ended, and
Ray places the next attempt on nodes that it still has.
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from accel_cli import console
from accel_cli.errors import AccelError
from accel_cli.extensions.ray.node import NodeLauncher
from accel_cli.extensions.ray.plan import RUN_FILE, STOP_MARGIN_S, RayRun
from accel_cli.launchers.node_launch import NodeEnd, get_failure_order
from accel_cli.runner.output import LinePrefixer

__all__ = ["main"]

_NOTE_AFTER_S = 5
"""Seconds after which a note says that the cluster does not have the resources yet."""
_POLL_S = 0.5
_SILENT_S = 60
"""Seconds without an answer after which a node counts as lost: a read takes a second."""
_UNANSWERED_S = 5
"""The same for a node that was to end; a peer may notice a lost node before Ray does."""
_DUMP, _DUMP_TITLE = "[state-dump]", " Last 20 lines of the Raylet logs:"
_LOST_CURE = "Check the nodes with ray status, or raise launcher.max_retries to start again on other nodes."


@dataclass
class _Node:
    """A node of an attempt, as the driver knows it."""

    rank: int
    actor: Any
    name: str = ""
    pending: Any = None
    """The result of the read that is under way."""
    asked_at: float = 0.0
    """The time at which that read began."""
    prefixer: LinePrefixer | None = None
    end: NodeEnd | None = None
    """The end of `accel launch`; None until it has ended."""
    lost: str = ""
    """The reason why the node is lost."""
    ended_at: float = 0.0

    @property
    def is_running(self) -> bool:
        """True until `accel launch` has ended or the node is lost."""
        return self.end is None and not self.lost

    @property
    def failed(self) -> bool:
        """True if `accel launch` failed, or the node is lost."""
        return bool(self.lost or (self.end and self.end.code))

    def ask(self) -> None:
        """Request the next output."""
        self.pending, self.asked_at = self.actor.read.remote(), time.monotonic()

    def receive(self) -> None:
        """Print the output of the last request, and request more until `accel launch` has ended."""
        try:
            data, end = ray.get(self.pending)
        except ray.exceptions.RayError as error:
            self.finish(lost=_shorten(error))
            return
        assert self.prefixer
        _write(self.prefixer.feed(data) + self.prefixer.flush_partial())
        if end is None:
            self.ask()
        else:
            self.finish(end)

    def finish(self, end: NodeEnd | None = None, *, lost: str = "") -> None:
        """Record the end of the node, and print the rest of its output."""
        self.end, self.lost, self.ended_at = end, lost, time.monotonic()
        assert self.prefixer
        _write(self.prefixer.flush_partial(end=True))


class _LostNodeError(AccelError):
    """Nodes could not be started, or one was lost."""


class _StoppedError(Exception):
    """A signal ended the run."""


class _Driver:
    """Runs the attempts of one run."""

    def __init__(self, run: RayRun, received: list[int]) -> None:
        self._run, self._received = run, received
        """The signals that ended the run."""

    def run(self) -> tuple[int, str]:
        """Run until an attempt ends without a lost node, and return the exit code and the reason of a failure."""
        for attempt in count():
            try:
                return self._run_attempt(attempt)
            except _StoppedError:
                break
            except _LostNodeError as error:
                if attempt == self._run.max_retries:
                    return error.exit_code, f"{error} {_LOST_CURE}"
                console.note(
                    f"{error} Retry {attempt + 1} of {self._run.max_retries}: all nodes start again with --resume."
                )
        return 128 + self._received[0], ""

    def _raise_if_stopped(self) -> None:
        if self._received:
            raise _StoppedError

    def _run_attempt(self, attempt: int) -> tuple[int, str]:
        run = self._run
        nodes: list[_Node] = []
        group = placement_group([dict(run.bundle)] * run.nnodes, strategy="STRICT_SPREAD", name=run.job_id)
        try:
            self._wait_for_resources(group)
            nodes += self._create_nodes(group)
            try:
                self._start(nodes, attempt)
            except ray.exceptions.RayError as error:
                self._raise_if_stopped()
                if isinstance(error, ray.exceptions.RayTaskError) or "creation task" in str(error):
                    raise AccelError(
                        f"Cannot start the nodes: {_shorten(error)}. Check that all nodes have the same accel, and space."
                    ) from error
                raise _LostNodeError(f"Cannot start the nodes: {_shorten(error)}.") from error
            self._follow(nodes)
        finally:
            for node in nodes:
                with suppress(ray.exceptions.RayError):
                    ray.kill(node.actor)
            remove_placement_group(group)
        self._raise_if_stopped()
        lost = [node for node in nodes if node.lost]
        if lost:
            names = " and ".join(node.name for node in lost)
            raise _LostNodeError(f"Lost node {names}: {lost[0].lost}.")
        failed = [node for node in nodes if node.failed]
        if not failed:
            return 0, ""
        first = min(failed, key=lambda node: get_failure_order(node.end, node.ended_at))
        assert first.end
        return first.end.code, f"node {first.name}: {first.end.describe()}"

    def _wait_for_resources(self, group: Any) -> None:
        """Wait until a placement group has its resources."""
        run, start, is_noted = self._run, time.monotonic(), False
        needed = f"{run.nnodes} node(s) with {_format_resources(run.bundle)} each"
        while not group.wait(1):
            self._raise_if_stopped()
            seconds = time.monotonic() - start
            if seconds > run.start_timeout:
                raise AccelError(
                    f"Cannot start the run: the cluster did not have {needed} free within {run.start_timeout} s. Free "
                    "resources, add nodes, or raise launcher.start_timeout."
                )
            if seconds > _NOTE_AFTER_S and not is_noted:
                is_noted = True
                console.note(f"waiting for {needed}: {_describe_shortage(run.bundle)}")

    def _create_nodes(self, group: Any) -> list[_Node]:
        bundle = dict(self._run.bundle)
        options: dict[str, Any] = {"num_cpus": bundle.pop("CPU", 0), "num_gpus": bundle.pop("GPU", 0)}
        if memory := bundle.pop("memory", 0):
            options["memory"] = memory
        launcher, text = ray.remote(NodeLauncher), self._run.to_json()
        nodes = []
        for rank in range(self._run.nnodes):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
            actor = launcher.options(**options, resources=bundle, scheduling_strategy=place).remote(text)
            nodes.append(_Node(rank, actor))
        return nodes

    def _describe(self, nodes: list[_Node]) -> list[dict[str, Any]]:
        """Return the facts of all nodes once they have started."""
        pending, start = [node.actor.describe.remote() for node in nodes], time.monotonic()
        while True:
            ready, _ = ray.wait(pending, num_returns=len(pending), timeout=_POLL_S)
            facts = list(ray.get(ready))  # raises for a node that cannot start, before the others have
            self._raise_if_stopped()
            if len(ready) == len(pending):
                return facts
            if time.monotonic() - start > self._run.start_timeout:
                raise AccelError(
                    f"Cannot start the nodes: {len(ready)} of {len(nodes)} answered within {self._run.start_timeout} s. Check the "
                    "log of the cluster, or raise launcher.start_timeout."
                )

    def _start(self, nodes: list[_Node], attempt: int) -> None:
        """Check all nodes, then start `accel launch` on each."""
        run, facts = self._run, self._describe(nodes)
        counts = Counter(fact["host"] for fact in facts)
        for node, fact in zip(nodes, facts, strict=True):
            host = fact["host"]
            node.name = host if counts[host] == 1 else f"{host}-{node.rank}"
            node.prefixer = LinePrefixer(
                node.rank,
                coloured=False,
                progress_bars=node.rank == 0,
                prefixed=run.nnodes > 1,
                label=node.name,
            )
        if problems := [
            f"node {node.name}: {fact['problem'].rstrip('.')}."
            for node, fact in zip(nodes, facts, strict=True)
            if fact["problem"]
        ]:
            raise AccelError(f"Cannot start the run, and nothing was started: {' '.join(problems)}")
        console.note(f"starting on {', '.join(node.name for node in nodes)}")
        endpoint = (facts[0]["address"], facts[0]["port"])
        run_id = f"{run.job_id}-{attempt}"
        starts = [
            node.actor.start.remote(node.rank, endpoint, run_id, node.name, resume=attempt > 0)
            for node in nodes
        ]
        ray.get(starts)
        for node in nodes:
            node.ask()

    def _follow(self, nodes: list[_Node]) -> None:
        """Print the output until all nodes have ended; end the others after a failure, a loss or a signal."""
        deadline, is_signalled = float("inf"), False
        wait_s = self._run.shutdown_timeout + STOP_MARGIN_S
        while running := [node for node in nodes if node.is_running]:
            _read(running)
            now = time.monotonic()
            if not is_signalled and (self._received or any(node.lost for node in nodes) or now > deadline):
                is_signalled, deadline = True, now + wait_s
                if self._received:
                    console.note(
                        f"received {signal.Signals(self._received[0]).name}: the processes on all nodes have "
                        f"{self._run.shutdown_timeout} s to exit"
                    )
                for node in running:
                    node.actor.send_signal.remote(self._received[0] if self._received else signal.SIGTERM)
            elif now > deadline:
                for node in running:
                    if node.is_running and now - node.asked_at > _UNANSWERED_S:
                        node.finish(lost="no answer")
                    elif node.is_running:
                        node.finish(NodeEnd(1))
            elif deadline == float("inf") and any(node.failed for node in nodes):
                # The other nodes notice a failed rank themselves, and report before they end.
                deadline = now + wait_s


def _read(running: Iterable[_Node]) -> None:
    """Print the output that has arrived, and record the nodes that have ended."""
    pending = {node.pending: node for node in running}
    ray.wait(list(pending), num_returns=1, timeout=_POLL_S)
    ready, _ = ray.wait(list(pending), num_returns=len(pending), timeout=0)
    for reference, node in pending.items():
        if reference in ready:
            node.receive()
        elif time.monotonic() - node.asked_at > _SILENT_S:
            node.finish(lost=f"no answer for {_SILENT_S} s")


class _DumpFilter:
    """A stream without the lines in which Ray dumps the state of a node that it has lost; the line before names the causes."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text without these lines."""
        kept = [line for line in text.splitlines(keepends=True) if _DUMP not in line]
        self._stream.write("".join(kept).replace(_DUMP_TITLE, " The logs of the cluster have the rest."))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _write(data: bytes) -> None:
    if data:
        # Ray cannot read a log that is not UTF-8.
        sys.stdout.buffer.write(data.decode(errors="replace").encode("utf-8"))
        sys.stdout.buffer.flush()


def _shorten(error: Exception) -> str:
    """Return the sentence of an error of Ray that has the cause."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    # What fails in an actor has a traceback, which ends with the exception.
    if isinstance(error, ray.exceptions.RayTaskError) or "creation task" in lines[0]:
        return lines[-1].strip().rstrip(".")
    # Of a dead actor, the cause comes after its class, id and process, which are indented.
    sentences = [line for line in lines if not line.startswith("\t")]
    return sentences[1 if len(sentences) > 1 else 0].partition(". ")[0].strip().rstrip(".")


def _format_resources(resources: Any) -> str:
    return ", ".join(f"{name}: {amount:g}" for name, amount in resources.items()) or "nothing"


def _describe_shortage(bundle: Mapping[str, float]) -> str:
    """Return how many nodes of the cluster could run a node of the job."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    large = sum(all(node.get(name, 0) >= amount for name, amount in bundle.items()) for node in nodes)
    return f"{large} of {len(nodes)} node(s) of the cluster are large enough, if no other job uses them"


def main() -> None:
    """Run the job in whose working directory this process was started."""
    received: list[int] = []
    try:
        run = RayRun.from_json(Path(RUN_FILE).read_text(encoding="utf-8"))
        # Output of the nodes comes through the actors; Ray would add dumps of its own state.
        ray.init(logging_level=logging.WARNING, log_to_driver=False)
        # A thread of Ray prints its errors there.
        sys.stdout = _DumpFilter(sys.stdout)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda each, _: received.append(each))
        code, reason = _Driver(run, received).run()
    except AccelError as error:
        code, reason = error.exit_code, str(error)
    ray.shutdown()
    # The last line, which Ray keeps in the state of the job.
    if reason:
        console.error(reason)
    sys.exit(code)
