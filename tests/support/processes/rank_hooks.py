"""A rank that a launcher watches, in the process of a test."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from unittest.mock import patch

from accel_cli.runs.heartbeats import Beat
from accel_cli.runs.run_dir import RankFolder
from accel_runtime.environment.settings import RANK_FOLDER
from accel_runtime.observe import heartbeat, torch_hooks


@contextmanager
def forget_progress() -> Iterator[None]:
    """Create the progress of this process anew, until the end of the context."""
    create = heartbeat._create_progress.__wrapped__
    with (
        patch.object(heartbeat, "_create_progress", lru_cache(maxsize=1)(create)),
        patch.object(heartbeat._LOCAL, "progress", None, create=True),
    ):
        yield


@contextmanager
def watch(path: Path) -> Iterator[RankFolder]:
    """Install the hooks for a rank with this folder, until the end of the context."""
    hooks = torch_hooks.TorchHooks()
    with (
        forget_progress(),
        patch.dict(os.environ, {RANK_FOLDER: str(path)}),
        patch.object(torch_hooks, "_get_hooks", lambda: hooks),
    ):
        try:
            torch_hooks.watch_progress(heartbeat.heartbeat)
            yield RankFolder(path)
        finally:
            if isinstance(hooks.progress, heartbeat.Heartbeat):
                hooks.progress.close()
            hooks.close()


def read_beat(folder: RankFolder) -> Beat:
    """Return the heartbeat of this process, with what its thread would write within a tenth of a second."""
    heartbeat.heartbeat().refresh()
    return Beat.read(folder.beat)
