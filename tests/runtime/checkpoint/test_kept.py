"""Checkpoints that earlier versions have written are read by this one."""

from __future__ import annotations

import cloudpickle
import kept_checkpoints
import pytest

cloudpickle.register_pickle_by_value(kept_checkpoints)


@pytest.mark.parametrize("layout", kept_checkpoints.LAYOUTS)
@pytest.mark.parametrize("folder", kept_checkpoints.KEPT, ids=lambda folder: folder.name)
def test_a_checkpoint_of_each_layout_is_read_as_it_was_written(clusters, folder, layout):
    size = kept_checkpoints.LAYOUTS[layout]
    assert clusters[size].run(kept_checkpoints.read, str(folder), layout) == [True] * size


@pytest.mark.parametrize("layout", ["one", "stream", "window"])
@pytest.mark.parametrize("folder", kept_checkpoints.KEPT, ids=lambda folder: folder.name)
def test_it_is_read_on_another_number_of_processes(clusters, folder, layout):
    size = 3 - kept_checkpoints.LAYOUTS[layout]
    assert clusters[size].run(kept_checkpoints.read, str(folder), layout) == [True] * size
