"""This version reads the checkpoints that earlier versions have written."""

from __future__ import annotations

import cloudpickle
import pytest
from support.runs import old_checkpoints

cloudpickle.register_pickle_by_value(old_checkpoints)

CHECKPOINTS = sorted(
    (path.parent, path.stem) for folder in old_checkpoints.KEPT for path in folder.glob("*.json")
)
"""The folder of the version and the layout of each checkpoint."""


def build_case(folder, layout, size):
    """Return the test case of a checkpoint that `size` ranks read."""
    marks = [pytest.mark.slow] if size > 3 else []
    return pytest.param(folder, layout, size, id=f"{folder.name}-{layout}-{size} processes", marks=marks)


ON_THE_SAME_WORLD_SIZE = [
    build_case(folder, layout, old_checkpoints.LAYOUTS[layout].size) for folder, layout in CHECKPOINTS
]
ON_OTHER_WORLD_SIZES = [
    build_case(folder, layout, size)
    for folder, layout in CHECKPOINTS
    for size in old_checkpoints.LAYOUTS[layout].others
]


@pytest.mark.parametrize(("folder", "layout", "size"), ON_THE_SAME_WORLD_SIZE)
def test_a_checkpoint_of_each_layout_loads_on_the_world_size_that_wrote_it(clusters, folder, layout, size):
    assert clusters[size].run(old_checkpoints.read, str(folder), layout) == [True] * size


@pytest.mark.parametrize(("folder", "layout", "size"), ON_OTHER_WORLD_SIZES)
def test_a_checkpoint_of_each_layout_loads_on_other_world_sizes(clusters, folder, layout, size):
    assert clusters[size].run(old_checkpoints.read, str(folder), layout) == [True] * size


def test_every_layout_has_a_stored_checkpoint():
    assert {layout for _, layout in CHECKPOINTS} == set(old_checkpoints.LAYOUTS)
