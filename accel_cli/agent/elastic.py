"""The elastic agent of one machine among others: who is there, what becomes of a loss, and why all start again."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError
from typing_extensions import override

from accel_cli import console, failures, waiting
from accel_cli.agent.alone import Alone
from accel_cli.agent.local import Local, Room
from accel_cli.agent.meeting import Meeting
from accel_cli.agent.rendezvous import SILENT, Handler
from accel_cli.agent.report import in_a_line
from accel_cli.agent.restarts import Budget, Reason
from accel_cli.errors import AccelError, ElsewhereError

__all__ = ["Agent", "lost_meeting_place"]


def lost_meeting_place(meeting: Meeting) -> str:
    """Return the words for a store that does not answer any more."""
    return (
        f"{meeting.card.name} has lost the meeting place {meeting.endpoint}: the launcher there ended, that machine "
        "is down, or the link is cut"
    )


class Agent(Local):
    """The agent of one machine: it meets the others, starts the processes, watches them, starts them again."""

    def __init__(self, spec: WorkerSpec, room: Room) -> None:
        super().__init__(spec, room)
        assert isinstance(spec.rdzv_handler, Alone | Handler)
        self._handler = spec.rdzv_handler
        self._budget = Budget(self._handler.meeting, spec.max_restarts)
        self._reason: Reason | None = None
        self._round: int | None = None
        # What the first machine says is the name of the run on all of them.
        meeting = self._handler.meeting
        self._launch = meeting.store.compare_set(meeting.key("launch"), "", self._launch).decode()

    @property
    def met(self) -> bool:
        """Whether all machines were there once."""
        return self._round is not None

    def ended(self) -> str | None:
        """Why the run is over, if a machine said so."""
        return self._budget.ended()

    @property
    def spare(self) -> bool:
        """Whether the run has never needed this machine."""
        return not self.met and self._handler.spare

    @override
    def report(self, failed: Mapping[int, ProcessFailure]) -> int:
        follows = failures.first(self._failures(failed)).cause is not failures.Cause.OWN
        before = self._beats() if follows else {}
        code = super().report(failed)
        # Processes that only lost another name that one; why it is gone is known to the machines.
        culprit_follows = self._culprit and self._culprit.cause is not failures.Cause.OWN
        if follows and culprit_follows and (why := self._departed(before)):
            console.error(why)
        return code

    def _beats(self) -> dict[str, object]:
        try:
            return self._handler.beats()
        except (RendezvousError, DistError):
            return {}

    def _departed(self, before: dict[str, object]) -> str:
        """The machines that are gone, and why; empty if none is known to be."""
        try:
            return self._handler.departed(before)
        except (RendezvousError, DistError):
            return lost_meeting_place(self._handler.meeting)

    @override
    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int | None = None) -> None:
        # Before the processes end, so that the machines that lose them know why.
        if not self._handler.meeting.alone and self.met and (came := self._room.signals.first):
            self._handler.meeting.depart(f"its launcher got {came.name}, and ended its processes")
        super()._shutdown(death_sig, timeout)

    @override
    def leave(self) -> None:
        if self._reason:
            self._budget.end(self._reason.text)
        super().leave()

    @override
    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        # Between two attempts all machines are there, but for one that is lost.
        with waiting.Waiting(self._awaited, quiet=2 if self._round is None else 8):
            super()._rendezvous(worker_group)
        self._settle()

    def _awaited(self) -> str:
        """What is said while machines are missing."""
        if self._handler.spare:
            return f"waiting: the run has all its machines ({self._handler.full()}); this one is a spare until it ends"
        meeting, arrived = self._handler.meeting, self._handler.arrived()
        refused = meeting.refused()
        why = f"{self._reason.text}; " if self._reason else f"refused: {refused}; " if refused else ""
        return why + waiting.line(arrived, meeting.wanted, meeting.left, self._handler.missing())

    def _settle(self) -> None:
        """Say once who met or why the processes start again; torch's count becomes the one all machines share."""
        meeting, cards = self._handler.meeting, self._handler.cards
        why = None if self._round is None else self._budget.reason(self._round)
        self._say_on_a_new_line()
        if why:
            console.note(f"restart {self._budget.spent} of {self._budget.most}: {why.text}")
        elif not meeting.alone:
            machines = ", ".join(f"{card.name} with {card.nproc}" for card in cards)
            what = "met" if self._round is None else "changed, and all processes start again"
            console.note(f"{len(cards)} machines {what} at {meeting.endpoint}: {machines}")
        self._round, self._reason = self._handler.round, None
        self._remaining_restarts = self._budget.left

    @override
    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if self._reason and self._round is not None:
            self._budget.spend(self._round, self._reason)
        self._handler.meeting.again()
        super()._restart_workers(worker_group)

    @override
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.failures:
            first = failures.first(self._failures(result.failures))
            follows = first.cause is not failures.Cause.OWN
            departed = self._departed({}) if follows else ""
            self._reason = Reason(follows and not departed, first.time, departed or in_a_line(first))
        elif result.state is WorkerState.HEALTHY and not self._handler.meeting.alone:
            return self._with_the_others(result)
        return result

    def _with_the_others(self, result: RunResult) -> RunResult:
        """What becomes of healthy processes when another machine is lost, or ended the run."""
        if self._handler.is_closed() and (why := self._budget.ended()):
            raise ElsewhereError(f"the run ended on another machine: {why}")
        lost = self._handler.lost()
        if not lost:
            return result
        names = " and ".join(card.name for card in lost)
        told = [f"{card.name}: {why}" for card in lost if (why := self._handler.meeting.departure(card))]
        text = "; ".join(told) or f"{names} {SILENT}"
        if not self._remaining_restarts:
            self._budget.end(text)
            raise AccelError(text)
        self._reason = Reason(False, time.time(), text)
        return RunResult(state=WorkerState.UNHEALTHY)
