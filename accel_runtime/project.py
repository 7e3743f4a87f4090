"""Where a project keeps what its runs write."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from accel_runtime.configuration import Configuration

__all__ = ["ProjectConfiguration"]


@dataclass
class ProjectConfiguration(Configuration):
    """The directories of a project, who writes into them, and how checkpoints are named and kept.

    Raises:
        ValueError: A limit that leaves no checkpoint, or a negative number.
    """

    project_dir: str | os.PathLike[str] | None = None
    """Where data is kept."""
    logging_dir: str | os.PathLike[str] | None = None
    """Where trackers write their files; None is `project_dir`."""
    automatic_checkpoint_naming: bool = False
    """Whether `save_state` names checkpoints itself: `checkpoints/checkpoint_0`, `checkpoint_1`, ... in `project_dir`."""
    total_limit: int | None = None
    """How many of those are kept; older ones go once a newer one is whole. None keeps all."""
    iteration: int = 0
    """The number of the next; a number that is taken is passed over."""
    save_on_each_node: bool = False
    """Whether `Accelerator.save` writes once on every machine, and not only on the first."""
    async_save: bool = False
    """Whether `save_state` writes in the background where it is not told otherwise; memory for it is taken after the
    first step, so that no save waits for it."""

    @override
    def _check(self) -> None:
        if self.total_limit is not None and self.total_limit < 1:
            raise ValueError(f"total_limit must be at least 1, or None; it is {self.total_limit}")
        if self.iteration < 0:
            raise ValueError(f"iteration must be at least 0; it is {self.iteration}")

    @property
    def checkpoints(self) -> Path | None:
        """Where checkpoints with automatic names lie."""
        return None if self.project_dir is None else Path(self.project_dir) / "checkpoints"

    @property
    def logs(self) -> Path | None:
        """Where trackers write their files, once both directories are considered."""
        found = self.project_dir if self.logging_dir is None else self.logging_dir
        return None if found is None else Path(found)

    def place(self, project_dir: str | os.PathLike[str] | None) -> None:
        """Take over the project directory that the `Accelerator` was given.

        Raises:
            ValueError: Both name one, and they differ.
        """
        if project_dir is None:
            return
        if self.project_dir is not None and Path(self.project_dir) != Path(project_dir):
            raise ValueError(
                f"project_dir={os.fspath(project_dir)!r} and ProjectConfiguration(project_dir="
                f"{os.fspath(self.project_dir)!r}) contradict each other; give one"
            )
        self.project_dir = project_dir
