"""A rank that a launcher watches, in the process of a test."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch

from accel_cli.runs.run_dir import RankFolder
from accel_runtime.environment.settings import RANK_FOLDER
from accel_runtime.observe import torch_hooks
from accel_runtime.observe.heartbeat import _create_progress


@contextmanager
def watch(path: Path) -> Iterator[RankFolder]:
    """Install the hooks for a rank with this folder, until the end of the context."""
    handles = []
    module, loaders = sys.modules["torch.optim.optimizer"], sys.modules["torch.utils.data.dataloader"]
    register, iterator = module.register_optimizer_step_post_hook, loaders._BaseDataLoaderIter
    _create_progress.cache_clear()
    with (
        patch.dict(os.environ, {RANK_FOLDER: str(path)}),
        patch.object(
            module, "register_optimizer_step_post_hook", lambda hook: handles.append(register(hook))
        ),
        patch.object(torch.autograd, "backward", torch.autograd.backward),
        patch.object(iterator, "__next__", iterator.__next__),
    ):
        try:
            torch_hooks.watch_progress()
            yield RankFolder(path)
        finally:
            handles[0].remove()
            _create_progress.cache_clear()
