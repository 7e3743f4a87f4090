"""A rank that a launcher watches, in the process of a test."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from accel_cli.runs.beats import Beat
from accel_cli.runs.run_dir import RankFolder
from accel_runtime.environment.settings import RANK_FOLDER
from accel_runtime.observe import torch_hooks
from accel_runtime.observe.heartbeat import Heartbeat, heartbeat, reset_heartbeat


@contextmanager
def watch(path: Path) -> Iterator[RankFolder]:
    """Install the hooks for a rank with this folder, until the end of the context."""
    hooks = torch_hooks.TorchHooks()
    reset_heartbeat()
    with (
        patch.dict(os.environ, {RANK_FOLDER: str(path)}),
        patch.object(torch_hooks, "_get_hooks", lambda: hooks),
    ):
        try:
            torch_hooks.watch_progress()
            yield RankFolder(path)
        finally:
            if isinstance(hooks.progress, Heartbeat):
                hooks.progress.close()
            hooks.close()
            reset_heartbeat()


def read_beat(folder: RankFolder) -> Beat:
    """Return the heartbeat of this process, with what its thread would write within a tenth of a second."""
    heartbeat().refresh()
    return Beat.read(folder.beat)
