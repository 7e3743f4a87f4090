"""The checkpoints of a project: which there are, which is the newest that is whole, and whether one still is."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from accel_runtime.checkpoint import folder
from accel_runtime.checkpoint.errors import CheckpointError
from accel_runtime.checkpoint.folder import Found
from accel_runtime.checkpoint.verifying import every_byte

__all__ = ["Checkpoints"]

_LOG = logging.getLogger("accel_runtime.checkpoint")


class Checkpoints:
    """What `accelerator.checkpoints` is.

    Args:
        directory: Where `checkpoint_0`, `checkpoint_1`, ... lie; None where the project has no directory.
    """

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory
        """Where they lie."""

    def list(self) -> list[Found]:
        """Those that are whole as far as manifest and sizes tell, the oldest first; each has a `path` and a `manifest`."""
        return folder.numbered(self._known())[0]

    def any(self) -> bool:
        """Whether there is one of such a name, whole or damaged; what a first save has left unfinished is none."""
        if self.directory is None or not self.directory.is_dir():
            return False
        names = (path.name for path in self.directory.iterdir())
        return any(folder.automatic(name) is not None for name in names) or bool(self.list())

    def newest(self) -> Found:
        """The newest of them; a warning names a newer one that is damaged.

        Raises:
            CheckpointError: There is none; the message says what is wrong with those of the name.
        """
        found, wrong = folder.numbered(self._known())
        if found:
            last = folder.next_number(self._known()) - 1
            if last != found[-1].number and (self._known() / folder.named(last)).exists():
                _LOG.warning("%s; the newest that is whole is %s", wrong[-1], found[-1].path)
            return found[-1]
        told = "".join(f"\n  {error}" for error in wrong)
        raise CheckpointError(f"{self._known()} has no checkpoint that is whole{':' if told else ''}{told}")

    def verify(self, checkpoint: str | os.PathLike[str] | None = None) -> Found:
        """Read every byte of a checkpoint and compare checksums.

        Args:
            checkpoint: Its directory; None is the newest.

        Raises:
            CheckpointError: It is damaged; the message names files and tensors.
        """
        found = self.newest() if checkpoint is None else folder.find(Path(checkpoint))
        wrong = every_byte(found)
        if wrong:
            raise CheckpointError("\n".join(wrong))
        return found

    def _known(self) -> Path:
        if self.directory is None:
            raise CheckpointError(
                "this project has no directory: Accelerator(project_dir=...) says where its checkpoints are"
            )
        return self.directory
