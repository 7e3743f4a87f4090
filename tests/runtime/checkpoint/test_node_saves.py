"""The table of saves on the nodes."""

from __future__ import annotations

import pytest

from accel_runtime import Accelerator, ProjectConfiguration
from accel_runtime.checkpoint import node_saves
from accel_runtime.environment.registry import Registry
from accel_runtime.storage.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("on_the_cpu")


def build_accelerator(folder, **options):
    project = ProjectConfiguration(folder / "project", automatic_checkpoint_naming=True, **options)
    return Accelerator(project_config=project)


def test_a_node_dir_is_refused_by_an_installation_without_saves_on_nodes(tmp_path, monkeypatch):
    monkeypatch.setattr(node_saves, "NODE_SAVES", Registry({}))
    build_accelerator(tmp_path).save_state()
    with pytest.raises(
        CheckpointError, match=r"Cannot save in node_dir .*: this installation .* Leave out node_dir"
    ):
        build_accelerator(tmp_path, node_dir=tmp_path / "node").save_state()
