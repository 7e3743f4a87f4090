"""Checkpoints of a project: list, verify, resume from, number and retain them."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from accel_runtime.environment.locations import StoreURL, normalize_location
from accel_runtime.environment.settings import LAUNCH
from accel_runtime.environment.text import print_note
from accel_runtime.foundation.options import ProjectConfiguration
from accel_runtime.storage.errors import AbsentError, CheckpointError, convert_store_errors, describe_error
from accel_runtime.storage.manifest import Checkpoint, parse_number
from accel_runtime.storage.store import (
    Store,
    list_numbered,
    next_number,
    numbered_key,
    split_key,
)
from accel_runtime.storage.verification import verify_files

__all__ = [
    "Checkpoints",
    "ResumePolicy",
    "RetentionPolicy",
    "RunOrigin",
]

_LOG = logging.getLogger("accel_runtime.checkpoint")


class Checkpoints:
    """Checkpoints of a project, as `accelerator.checkpoints`.

    Every method raises `CheckpointError` with the cure if the file system or the object store fails.

    Args:
        directory: Parent directory of `checkpoint_0`, `checkpoint_1`, ..., or its URL; None if the project has no directory.
        store: The store that has them.
    """

    def __init__(self, directory: Path | StoreURL | None, store: Store) -> None:
        self._store = store
        self.directory = directory
        """Parent directory of the checkpoints, or its URL."""

    @convert_store_errors()
    def list(self) -> list[Checkpoint]:
        """Return the complete checkpoints, the oldest first; each has a `path` and a `manifest`.

        File contents are not read: see `verify`.
        """
        return list_numbered(self._store, self._require_parent())[0]

    @convert_store_errors()
    def any(self) -> bool:
        """Return whether a numbered checkpoint exists, complete or damaged; an unfinished first save does not count."""
        if self.directory is None:
            return False
        complete, errors = list_numbered(self._store, self._require_parent())
        return bool(complete) or any(not isinstance(error, AbsentError) for error in errors.values())

    @convert_store_errors()
    def newest(self) -> Checkpoint:
        """Return the newest complete checkpoint, and warn about a newer one that is damaged.

        Raises:
            CheckpointError: There is none; the message lists the damaged ones.
        """
        parent = self._require_parent()
        complete, errors = list_numbered(self._store, parent)
        if complete:
            newer = [
                number
                for number, error in errors.items()
                if number > (complete[-1].number or 0) and not isinstance(error, AbsentError)
            ]
            if newer:
                _LOG.warning("%s; the newest complete checkpoint is %s", errors[max(newer)], complete[-1].key)
            return complete[-1]
        listed = "".join(f"\n  {error}" for error in errors.values())
        raise CheckpointError(f"No complete checkpoint in {parent}{':' if listed else ''}{listed}")

    @convert_store_errors()
    def verify(self, checkpoint: str | os.PathLike[str] | None = None) -> Checkpoint:
        """Read every byte of a checkpoint and compare checksums.

        Args:
            checkpoint: Directory of the checkpoint, or its URL; None is the newest.

        Raises:
            CheckpointError: The checkpoint is damaged; the message names files and tensors.
        """
        key = None if checkpoint is None else normalize_location(checkpoint)
        return verify_files(self._store, lambda: self.newest().key if key is None else key)

    def _require_parent(self) -> str:
        if self.directory is None:
            raise CheckpointError(
                "The project has no directory for checkpoints. Set Accelerator(project_dir=...)."
            )
        return os.fspath(self.directory)


@dataclass(frozen=True)
class RunOrigin:
    """Identity of the run, as set by launcher and scheduler."""

    launch: str = ""
    """Name that `accel launch` gives a run; restarted processes have the same."""
    slurm_job: str = ""
    """Slurm job id; a requeued job has the same."""
    sky_task: str = ""
    """Task id of SkyPilot; a managed job that was started again after a preemption has the same."""
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
            sky_task=environ.get("SKYPILOT_TASK_ID", ""),
            restarted=_is_positive(environ, "TORCHELASTIC_RESTART_COUNT"),
            requeued=_is_positive(environ, "SLURM_RESTART_COUNT"),
        )

    @property
    def identity(self) -> dict[str, str]:
        """Return the identity that is stored in the checkpoints of this run."""
        names = {"launch": self.launch, "slurm_job": self.slurm_job, "sky_task": self.sky_task}
        return {name: value for name, value in names.items() if value}

    @property
    def may_resume(self) -> bool:
        """Return whether a checkpoint of this run may exist."""
        # Elastic node changes restart processes too, without a restart count.
        return bool(self.launch or self.sky_task) or self.restarted or self.requeued

    def wrote(self, identity: Mapping[str, str]) -> bool:
        """Return whether this run wrote a checkpoint that has the identity of a run."""
        if self.launch and identity.get("launch") == self.launch:
            return True
        if self.requeued and self.slurm_job and identity.get("slurm_job") == self.slurm_job:
            return True
        if self.sky_task and identity.get("sky_task") == self.sky_task:
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

    def accepts(self, checkpoint: Checkpoint) -> bool:
        """Return whether a checkpoint may be resumed from."""
        return self.asked or self.origin.wrote(checkpoint.manifest.run)

    def choose(self, checkpoints: Checkpoints) -> Checkpoint | None:
        """Return the checkpoint to resume from and print the choice; None starts from the beginning."""
        if self.asked:
            chosen = checkpoints.newest() if checkpoints.any() else None
        else:
            own = [chosen for chosen in checkpoints.list() if self.accepts(chosen)]
            chosen = own[-1] if own else None
        if chosen is not None:
            print_note(f"resuming from {chosen.key} (step {chosen.manifest.step})")
        elif self.asked:
            print_note(f"no checkpoint in {checkpoints.directory} yet: starting from the beginning")
        elif self.origin.restarted or self.origin.requeued:
            others = f" (those in {checkpoints.directory} are of other runs)" if checkpoints.any() else ""
            print_note(f"no checkpoint of this run yet: starting from the beginning{others}")
        else:
            self.report_earlier_run(checkpoints)
        return chosen

    def report_earlier_run(self, checkpoints: Checkpoints) -> None:
        """Print the newest checkpoint of another run, if there is one, since this run starts from the beginning."""
        others = [checkpoint for checkpoint in checkpoints.list() if not self.accepts(checkpoint)]
        if others:
            newest = others[-1]
            print_note(
                f"{checkpoints.directory} has checkpoint_{newest.number} (step {newest.manifest.step}) of an earlier run; this run "
                "starts from the beginning and keeps it. Launch with `accel launch --resume` to continue it."
            )


def _is_positive(environ: Mapping[str, str], name: str) -> bool:
    count = environ.get(name, "")
    return count.isdecimal() and int(count) > 0


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
    def automatic(self) -> Path | StoreURL | None:
        """Directory of checkpoints with automatic names, or its URL; None if the script names them."""
        # As in Accelerate, automatic names take precedence over a directory argument.
        return self._project.checkpoints if self._project.automatic_checkpoint_naming else None

    def target(self, store: Store) -> str:
        """Return the key of the next checkpoint; called on the first rank."""
        if self.automatic is None:
            assert self._output_dir is not None
            return normalize_location(self._output_dir)
        parent = os.fspath(self.automatic)
        return numbered_key(parent, max(self._project.iteration, next_number(store, parent)))

    def reserve_number(self, key: str) -> None:
        """Use the number of a checkpoint once its draft is open, also if the save fails; called on every rank."""
        number = parse_number(split_key(key)[1])
        if self.automatic is not None and number is not None:
            self._project.continue_after(number)

    def prune(self, store: Store, lineage: str) -> None:
        """Remove checkpoints of a lineage beyond the limit, and leftovers of crashes.

        Checkpoints of other lineages do not count and are kept, as is one that another process is reading.
        """
        if self.automatic is None:
            return
        try:
            parent, limit = os.fspath(self.automatic), self._project.total_limit
            store.remove_leftovers(parent, self._project.iteration)
            complete = [] if limit is None else list_numbered(store, parent)[0]
            counted = [
                checkpoint for checkpoint in complete if checkpoint.manifest.run.get("lineage") == lineage
            ]
            for old in counted[:-limit] if limit is not None else ():
                store.delete(old.key)
        except OSError as error:
            _LOG.warning(
                "old checkpoints in %s could not be removed: %s", self.automatic, describe_error(error)
            )
