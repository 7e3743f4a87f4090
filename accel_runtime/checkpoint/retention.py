"""What the next checkpoint is called, and which old ones go once it is whole."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from accel_runtime.checkpoint import folder, placing
from accel_runtime.checkpoint.files import Disk
from accel_runtime.project import ProjectConfiguration

__all__ = ["Retention"]

_LOG = logging.getLogger("accel_runtime.checkpoint")


class Retention:
    """How a project names and keeps checkpoints, at one save.

    Args:
        project: Its configuration; the number of the next one is counted there.
        output_dir: What the script says.

    Raises:
        ValueError: Nobody says where; or every machine is to have one of its own.
    """

    def __init__(self, project: ProjectConfiguration, output_dir: str | os.PathLike[str] | None) -> None:
        self._project, self._given = project, output_dir
        if project.save_on_each_node:
            raise ValueError(
                "save_on_each_node=True asks for files on every machine, and save_state() writes one checkpoint for all "
                "processes, into a directory that all machines share: leave it out. save() honours it"
            )
        if output_dir is None and not project.automatic_checkpoint_naming:
            raise ValueError(
                "save_state() was given no directory; ProjectConfiguration(automatic_checkpoint_naming=True) "
                "together with project_dir names checkpoints itself"
            )
        if output_dir is None and project.checkpoints is None:
            raise ValueError("automatic_checkpoint_naming needs a project_dir: Accelerator(project_dir=...)")

    @property
    def automatic(self) -> Path | None:
        """The directory of checkpoints with automatic names; None where the script names them."""
        # As in Accelerate, automatic names win over a directory that is given.
        return self._project.checkpoints if self._project.automatic_checkpoint_naming else None

    def target(self) -> Path:
        """The name of the next checkpoint; asked on the first rank."""
        if self.automatic is None:
            assert self._given is not None
            return Path(self._given)
        number = max(self._project.iteration, folder.next_number(self.automatic))
        return self.automatic / folder.named(number)

    def saved(self, target: Path) -> None:
        """Count it, on every rank."""
        number = folder.automatic(target.name)
        if self.automatic is not None and number is not None:
            self._project.iteration = number + 1

    def prune(self, disk: Disk) -> None:
        """Remove what is beyond the limit, and what crashes have left.

        The newest that is whole always stays, and one that somebody reads until the next time.
        """
        if self.automatic is None:
            return
        try:
            placing.sweep(self.automatic, self._project.iteration, disk)
            whole, _ = folder.numbered(self.automatic)
            limit = self._project.total_limit
            for old in whole[:-limit] if limit is not None else ():
                placing.remove(old.path, disk)
        except OSError as error:
            _LOG.warning("old checkpoints in %s could not be removed: %s", self.automatic, error)
