"""Checkpoints that earlier versions have written are read by this one."""

from __future__ import annotations

import cloudpickle
import old_checkpoints
import pytest

cloudpickle.register_pickle_by_value(old_checkpoints)

CHECKPOINTS = sorted(
    (path.parent, path.stem) for folder in old_checkpoints.KEPT for path in folder.glob("*.json")
)
"""Folders of versions, and the layouts in each."""


def reads(folder, layout, size):
    """Return the case of a checkpoint that so many processes read."""
    marks = [pytest.mark.slow] if size > 3 else []
    return pytest.param(folder, layout, size, id=f"{folder.name}-{layout}-{size} processes", marks=marks)


AS_WRITTEN = [reads(folder, layout, old_checkpoints.LAYOUTS[layout].size) for folder, layout in CHECKPOINTS]
BY_OTHERS = [
    reads(folder, layout, size)
    for folder, layout in CHECKPOINTS
    for size in old_checkpoints.LAYOUTS[layout].others
]


@pytest.mark.parametrize(("folder", "layout", "size"), AS_WRITTEN)
def test_a_checkpoint_of_each_layout_is_read_as_it_was_written(clusters, folder, layout, size):
    assert clusters[size].run(old_checkpoints.read, str(folder), layout) == [True] * size


@pytest.mark.parametrize(("folder", "layout", "size"), BY_OTHERS)
def test_it_is_read_on_another_number_of_processes(clusters, folder, layout, size):
    assert clusters[size].run(old_checkpoints.read, str(folder), layout) == [True] * size


def test_there_is_a_checkpoint_of_each_layout():
    assert {layout for _, layout in CHECKPOINTS} == set(old_checkpoints.LAYOUTS)
