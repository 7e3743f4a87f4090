"""Where a project keeps what its runs write."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

__all__ = ["ProjectConfiguration"]


@dataclass(frozen=True)
class ProjectConfiguration:
    """The directories of a project, and who writes into them.

    Raises:
        NotImplementedError: A field about checkpoints says something; they come with `save_state`.
    """

    project_dir: str | os.PathLike[str] | None = None
    """Where data is kept."""
    logging_dir: str | os.PathLike[str] | None = None
    """Where trackers write their files; None is `project_dir`."""
    automatic_checkpoint_naming: bool = False
    """Comes with `save_state`, in a later version."""
    total_limit: int | None = None
    """Comes with `save_state`, in a later version."""
    iteration: int = 0
    """Comes with `save_state`, in a later version."""
    save_on_each_node: bool = False
    """Whether `Accelerator.save` writes once on every machine, and not only on the first."""

    def __post_init__(self) -> None:
        for name in ("automatic_checkpoint_naming", "total_limit", "iteration"):
            if getattr(self, name):
                raise NotImplementedError(
                    f"ProjectConfiguration({name}={getattr(self, name)!r}) is about checkpoints, and this version "
                    "has no save_state yet: leave it out"
                )

    @property
    def logs(self) -> Path | None:
        """Where trackers write their files, once both directories are considered."""
        found = self.project_dir if self.logging_dir is None else self.logging_dir
        return None if found is None else Path(found)

    def within(self, project_dir: str | os.PathLike[str] | None) -> ProjectConfiguration:
        """The same with the project directory that the `Accelerator` was given.

        Raises:
            ValueError: Both name one, and they differ.
        """
        if project_dir is None:
            return self
        if self.project_dir is not None and Path(self.project_dir) != Path(project_dir):
            raise ValueError(
                f"project_dir={os.fspath(project_dir)!r} and ProjectConfiguration(project_dir="
                f"{os.fspath(self.project_dir)!r}) contradict each other; give one"
            )
        return replace(self, project_dir=project_dir)
