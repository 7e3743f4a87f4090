"""The directories of a project."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from accel_runtime import Accelerator, ProjectConfiguration


def test_logs_are_in_the_project_directory_unless_logging_dir_is_set():
    assert ProjectConfiguration().logs is None
    assert ProjectConfiguration("project").logs == Path("project")
    assert ProjectConfiguration("project", "logs").logs == Path("logs")


@pytest.mark.parametrize(
    ("arguments", "directories"),
    [
        ({}, (None, None)),
        ({"project_dir": "a"}, ("a", Path("a"))),
        ({"project_config": ProjectConfiguration("a", "b")}, ("a", Path("b"))),
        ({"project_dir": "a", "project_config": ProjectConfiguration(logging_dir="b")}, ("a", Path("b"))),
        ({"project_dir": Path("a"), "project_config": ProjectConfiguration("a")}, (Path("a"), Path("a"))),
    ],
)
def test_the_accelerator_has_both_directories(arguments, directories):
    accelerator = Accelerator(**arguments)
    assert (accelerator.project_dir, accelerator.logging_dir) == directories
    assert accelerator.save_iteration == 0


def test_contradicting_project_directories_are_rejected():
    with pytest.raises(ValueError, match=r"project_dir='a' and ProjectConfiguration.* contradict"):
        Accelerator(project_dir="a", project_config=ProjectConfiguration("b"))


@pytest.mark.parametrize(
    ("field", "message"),
    [({"total_limit": 0}, "Invalid total_limit 0: expected at least 1"), ({"iteration": -1}, "at least 0")],
)
def test_limits_that_leave_no_checkpoint_are_rejected(field, message):
    with pytest.raises(ValueError, match=message):
        ProjectConfiguration(**field)


@pytest.mark.parametrize(("each", "writers"), [(False, [0]), (True, [0, 1])])
def test_save_writes_on_the_first_process_or_the_first_of_every_node(pair, tmp_path, each, writers):
    def save(folder, each):
        accelerator = Accelerator(project_config=ProjectConfiguration(save_on_each_node=each))
        # Both ranks of this test are on one machine; let `save` see two nodes.
        rank = accelerator.process_index
        backend = accelerator._backend
        topology = backend.topology
        backend.topology = replace(topology, local_rank=0)
        try:
            accelerator.save(torch.tensor(rank), folder / f"{rank}.pt")
        finally:
            backend.topology = topology

    pair.run(save, tmp_path, each)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{rank}.pt" for rank in writers]


def test_another_project_configuration_is_refused_with_the_cure():
    accelerator = Accelerator()
    with pytest.raises(
        RuntimeError, match=r"in use. Pass Accelerator\(project_config=...\), or assign to its fields"
    ):
        accelerator.project_configuration = ProjectConfiguration()
    accelerator.project_configuration.total_limit = 2
