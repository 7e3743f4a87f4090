"""Replicas that a process of this machine has started itself: they show themselves in the run's folder, one by one."""

from __future__ import annotations

from pathlib import Path

from accel_cli import ranks
from accel_cli.agent.output import Output
from accel_cli.replica.folder import COUNT
from accel_cli.runs import RankFolder

__all__ = ["Arrivals"]


class Arrivals:
    """The replicas of one attempt, as they come.

    Args:
        attempt: The folder of the attempt.
        output: What passes on what they write.
        shown: Whose output is on the screen.
    """

    def __init__(self, attempt: Path, output: Output, shown: int | str) -> None:
        self._attempt, self._output, self._shown = attempt, output, shown
        self.known: dict[int, RankFolder] = {}
        """Those that are there, by rank."""
        self.count = 0
        """How many there are on all machines; 0 before the first has come."""

    def look(self) -> bool:
        """Say to those that are new where they print; whether there are any."""
        fresh = self._fresh()
        for rank, folder in fresh.items():
            self.count = int((folder.path / COUNT).read_text())
            shown = ranks.shown(self._shown, self.count)
            self._output.prefixed = len(shown) > 1
            self._output.route(folder, rank, shown=rank in shown)
        self.known = dict(sorted((self.known | fresh).items()))
        return bool(fresh)

    def _fresh(self) -> dict[int, RankFolder]:
        found = {
            int(file.parent.name.partition("_")[2]): file.parent
            for file in self._attempt.glob(f"rank_*/{COUNT}")
        }
        return {rank: RankFolder(path) for rank, path in sorted(found.items()) if rank not in self.known}
