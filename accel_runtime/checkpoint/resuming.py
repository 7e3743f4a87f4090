"""From which checkpoint a run goes on: the newest where it is asked to, its own where its processes were started again."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from accel_runtime.checkpoint.checkpoints import Checkpoints
from accel_runtime.checkpoint.folder import Found
from accel_runtime.checkpoint.manifest import Manifest
from accel_runtime.env import LAUNCH

__all__ = ["Origin", "Resuming"]


@dataclass(frozen=True)
class Origin:
    """The run that these processes belong to, in the words of those who started them."""

    launch: str = ""
    """A name that `accel launch` gives a run; processes that are started again have the same."""
    slurm_job: str = ""
    """The Slurm job; one that is run again has the same."""
    again: bool = False
    """Whether somebody says that these processes take the place of others, who gives runs no name."""
    requeued: bool = False
    """Whether Slurm runs the job again."""

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Origin:
        """As the variables of launchers and schedulers say."""
        return cls(
            launch=environ.get(LAUNCH, ""),
            slurm_job=environ.get("SLURM_JOB_ID", ""),
            again=_counts(environ, "TORCHELASTIC_RESTART_COUNT"),
            requeued=_counts(environ, "SLURM_RESTART_COUNT"),
        )

    @property
    def marks(self) -> dict[str, str]:
        """What stands in the checkpoints of this run."""
        named = {"launch": self.launch, "slurm_job": self.slurm_job}
        return {name: value for name, value in named.items() if value}

    @property
    def may_go_on(self) -> bool:
        """Whether there may be a checkpoint of this run."""
        # Machines that come and go start processes again too, and no count says so.
        return bool(self.launch) or self.again or self.requeued

    def wrote(self, manifest: Manifest) -> bool:
        """Whether a checkpoint is one of this run."""
        if self.launch and manifest.run.get("launch") == self.launch:
            return True
        if self.requeued and self.slurm_job and manifest.run.get("slurm_job") == self.slurm_job:
            return True
        # Plain torchrun has no name for a run: what is newest is all there is to go by.
        return self.again and not self.launch


@dataclass(frozen=True)
class Resuming:
    """How a run begins.

    Args:
        asked: Whether it is to go on from whatever is newest: `accel launch --resume`.
        origin: Who these processes are.
    """

    asked: bool
    origin: Origin

    @property
    def possible(self) -> bool:
        """Whether it is worth a look; all ranks say the same."""
        return self.asked or self.origin.may_go_on

    def choose(self, checkpoints: Checkpoints) -> Found | None:
        """The checkpoint from which the run goes on, and a line for the person who waits; None begins anew.

        Raises:
            CheckpointError: There are checkpoints, and none is whole.
        """
        if self.asked:
            found = checkpoints.newest() if checkpoints.any() else None
        else:
            own = [found for found in checkpoints.list() if self.origin.wrote(found.manifest)]
            found = own[-1] if own else None
        self._tell(found, checkpoints)
        return found

    def _tell(self, found: Found | None, checkpoints: Checkpoints) -> None:
        again = self.origin.again or self.origin.requeued
        if found is not None:
            _say(f"the run goes on from {found.path}, of step {found.manifest.step}")
        elif self.asked:
            _say(f"{checkpoints.directory} has no checkpoint yet: the run begins anew")
        elif again:
            others = f"; those in {checkpoints.directory} are of other runs" if checkpoints.any() else ""
            _say(f"this run has no checkpoint yet, and begins anew{others}")


def _counts(environ: Mapping[str, str], name: str) -> bool:
    count = environ.get(name, "")
    return count.isdecimal() and int(count) > 0


def _say(text: str) -> None:
    print(f"accel: {text}", file=sys.stderr, flush=True)  # noqa: T201 - the person should know from where it goes on
