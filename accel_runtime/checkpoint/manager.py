"""Checkpoints of a project: list, choose, verify, resume and retain them."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from accel_runtime.checkpoint.atomic_directory import remove_checkpoint, remove_leftovers
from accel_runtime.checkpoint.directory import (
    Checkpoint,
    find_checkpoint,
    list_numbered,
    next_number,
    numbered_directory,
    parse_number,
)
from accel_runtime.checkpoint.errors import CheckpointError
from accel_runtime.checkpoint.filesystem import FileSystem
from accel_runtime.checkpoint.manifest import Manifest
from accel_runtime.checkpoint.verify import verify_all_files
from accel_runtime.env import LAUNCH
from accel_runtime.options import ProjectConfiguration

__all__ = ["Checkpoints", "ResumePolicy", "RetentionPolicy", "RunOrigin"]

_LOG = logging.getLogger("accel_runtime.checkpoint")


class Checkpoints:
    """Checkpoints of a project, as `accelerator.checkpoints`.

    Args:
        directory: Parent directory of `checkpoint_0`, `checkpoint_1`, ...; None if the project has no directory.
    """

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory
        """Parent directory of the checkpoints."""

    def list(self) -> list[Checkpoint]:
        """Return the complete checkpoints, the oldest first; each has a `path` and a `manifest`.

        File contents are not read: see `verify`.
        """
        return list_numbered(self._require_directory())[0]

    def any(self) -> bool:
        """Return whether a numbered checkpoint exists, complete or damaged; an unfinished first save does not count."""
        if self.directory is None or not self.directory.is_dir():
            return False
        numbered = any(parse_number(path.name) is not None for path in self.directory.iterdir())
        return numbered or bool(self.list())

    def newest(self) -> Checkpoint:
        """Return the newest complete checkpoint, and warn about a newer one that is damaged.

        Raises:
            CheckpointError: There is none; the message lists the damaged ones.
        """
        complete, errors = list_numbered(self._require_directory())
        if complete:
            last = next_number(self._require_directory()) - 1
            if (
                last != complete[-1].number
                and (self._require_directory() / numbered_directory(last)).exists()
            ):
                _LOG.warning("%s; the newest complete checkpoint is %s", errors[-1], complete[-1].path)
            return complete[-1]
        listed = "".join(f"\n  {error}" for error in errors)
        raise CheckpointError(
            f"No complete checkpoint in {self._require_directory()}{':' if listed else ''}{listed}"
        )

    def verify(self, checkpoint: str | os.PathLike[str] | None = None) -> Checkpoint:
        """Read every byte of a checkpoint and compare checksums.

        Args:
            checkpoint: Directory of the checkpoint; None is the newest.

        Raises:
            CheckpointError: The checkpoint is damaged; the message names files and tensors.
        """
        target = self.newest() if checkpoint is None else find_checkpoint(Path(checkpoint))
        if problems := verify_all_files(target):
            raise CheckpointError("\n".join(problems))
        return target

    def _require_directory(self) -> Path:
        if self.directory is None:
            raise CheckpointError(
                "The project has no directory for checkpoints. Set Accelerator(project_dir=...)."
            )
        return self.directory


@dataclass(frozen=True)
class RunOrigin:
    """Identity of the run, as set by launcher and scheduler."""

    launch: str = ""
    """Name that `accel launch` gives a run; restarted processes have the same."""
    slurm_job: str = ""
    """Slurm job id; a requeued job has the same."""
    restarted: bool = False
    """Whether these processes replace failed ones of a launcher that does not name runs."""
    requeued: bool = False
    """Whether Slurm has requeued the job."""

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> RunOrigin:
        """Return the identity from environment variables of launchers and schedulers."""
        return cls(
            launch=environ.get(LAUNCH, ""),
            slurm_job=environ.get("SLURM_JOB_ID", ""),
            restarted=_is_positive(environ, "TORCHELASTIC_RESTART_COUNT"),
            requeued=_is_positive(environ, "SLURM_RESTART_COUNT"),
        )

    @property
    def marks(self) -> dict[str, str]:
        """Identity that is stored in the checkpoints of this run."""
        names = {"launch": self.launch, "slurm_job": self.slurm_job}
        return {name: value for name, value in names.items() if value}

    @property
    def may_resume(self) -> bool:
        """Return whether a checkpoint of this run may exist."""
        # Elastic node changes restart processes too, without a restart count.
        return bool(self.launch) or self.restarted or self.requeued

    def wrote(self, manifest: Manifest) -> bool:
        """Return whether this run wrote a checkpoint."""
        if self.launch and manifest.run.get("launch") == self.launch:
            return True
        if self.requeued and self.slurm_job and manifest.run.get("slurm_job") == self.slurm_job:
            return True
        # Plain torchrun does not name runs: take the newest.
        return self.restarted and not self.launch


@dataclass(frozen=True)
class ResumePolicy:
    """Choice of the checkpoint to resume from; `asked` is `accel launch --resume`, which takes the newest."""

    asked: bool
    origin: RunOrigin

    @property
    def possible(self) -> bool:
        """Return whether a checkpoint to resume from may exist; equal on all ranks."""
        return self.asked or self.origin.may_resume

    def choose(self, checkpoints: Checkpoints) -> Checkpoint | None:
        """Return the checkpoint to resume from and print the choice; None starts from the beginning."""
        if self.asked:
            chosen = checkpoints.newest() if checkpoints.any() else None
        else:
            own = [chosen for chosen in checkpoints.list() if self.origin.wrote(chosen.manifest)]
            chosen = own[-1] if own else None
        self._report(chosen, checkpoints)
        return chosen

    def _report(self, chosen: Checkpoint | None, checkpoints: Checkpoints) -> None:
        restarted = self.origin.restarted or self.origin.requeued
        if chosen is not None:
            _print(f"resuming from {chosen.path} (step {chosen.manifest.step})")
        elif self.asked:
            _print(f"no checkpoint in {checkpoints.directory} yet: starting from the beginning")
        elif restarted:
            others = f" (those in {checkpoints.directory} are of other runs)" if checkpoints.any() else ""
            _print(f"no checkpoint of this run yet: starting from the beginning{others}")


def _is_positive(environ: Mapping[str, str], name: str) -> bool:
    count = environ.get(name, "")
    return count.isdecimal() and int(count) > 0


def _print(text: str) -> None:
    print(f"accel: {text}", file=sys.stderr, flush=True)  # noqa: T201 - users should see where a run resumes


class RetentionPolicy:
    """Naming and retention of checkpoints at one save; raises `ValueError` for impossible combinations of options."""

    def __init__(self, project: ProjectConfiguration, output_dir: str | os.PathLike[str] | None) -> None:
        self._project, self._output_dir = project, output_dir
        if project.save_on_each_node:
            raise ValueError(
                "save_on_each_node=True is not supported by save_state(), which writes one checkpoint for all processes into a "
                "directory that all nodes share. Leave it out; save() supports it."
            )
        if output_dir is None and not project.automatic_checkpoint_naming:
            raise ValueError(
                "save_state() needs a directory. Pass one, or set project_dir and "
                "ProjectConfiguration(automatic_checkpoint_naming=True)."
            )
        if output_dir is None and project.checkpoints is None:
            raise ValueError(
                "automatic_checkpoint_naming needs a project directory. Set Accelerator(project_dir=...)."
            )

    @property
    def automatic(self) -> Path | None:
        """Directory of checkpoints with automatic names; None if the script names them."""
        # As in Accelerate, automatic names take precedence over a directory argument.
        return self._project.checkpoints if self._project.automatic_checkpoint_naming else None

    def target(self) -> Path:
        """Return the path of the next checkpoint; called on the first rank."""
        if self.automatic is None:
            assert self._output_dir is not None
            return Path(self._output_dir)
        number = max(self._project.iteration, next_number(self.automatic))
        return self.automatic / numbered_directory(number)

    def saved(self, target: Path) -> None:
        """Count a saved checkpoint; called on every rank."""
        number = parse_number(target.name)
        if self.automatic is not None and number is not None:
            self._project.iteration = number + 1

    def prune(self, disk: FileSystem) -> None:
        """Remove checkpoints beyond the limit and leftovers of crashes.

        The newest complete checkpoint is kept, as is one that another process is reading.
        """
        if self.automatic is None:
            return
        try:
            remove_leftovers(self.automatic, self._project.iteration, disk)
            complete, _ = list_numbered(self.automatic)
            limit = self._project.total_limit
            for old in complete[:-limit] if limit is not None else ():
                remove_checkpoint(old.path, disk)
        except OSError as error:
            _LOG.warning("old checkpoints in %s could not be removed: %s", self.automatic, error)
