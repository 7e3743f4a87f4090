"""Nodes that do not share the directory of checkpoints are reported before the first step."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accel_runtime import Accelerator, ProjectConfiguration
from accel_runtime.storage import file_store
from accel_runtime.storage.file_store import FileStore, explain_separate_nodes
from accel_runtime.storage.file_system import FileSystem

AUTOMATIC = {"automatic_checkpoint_naming": True}


class SeparateFiles(FileSystem):
    """The file system of a node that does not see the directories of the first node."""

    def sees(self, folder):
        return dist.get_rank() == 0 and super().sees(folder)


def prepare(folder, options, separate=True, shared_files=True, optimizer=True):
    """Prepare a training on nodes with separate or shared files; return the warnings, and whether nodes have looked."""
    from accel_runtime.storage import file_store

    calls, warnings = [], []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logger = logging.getLogger("accel_runtime.checkpoint")
    explain = file_store.explain_separate_nodes
    wait, file_store._WAIT_S = file_store._WAIT_S, 0
    file_store.explain_separate_nodes = lambda *args, **keys: calls.append(args[0]) or explain(*args, **keys)
    logger.addHandler(handler)
    try:
        accelerator = Accelerator(project_config=ProjectConfiguration(project_dir=folder, **options))
        accelerator._checkpoints._store = FileStore(SeparateFiles() if separate else FileSystem())
        accelerator._run.options.settings = replace(accelerator.settings, shared_files=shared_files)
        model = nn.Linear(2, 1)
        accelerator.prepare(model)
        for _ in range(2 if optimizer else 0):
            accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    finally:
        logger.removeHandler(handler)
        file_store.explain_separate_nodes = explain
        file_store._WAIT_S = wait
    return warnings, calls


def test_separate_files_are_an_error_before_the_first_step_that_names_the_nodes_and_the_cure(
    clusters, tmp_path
):
    folder = tmp_path / "runs" / "1"
    with pytest.raises(Exception, match="Checkpoints cannot be saved in") as raised:
        clusters["apart"].run(prepare, folder, AUTOMATIC)
    text = str(raised.value)
    assert f"saved in {folder / 'checkpoints'}: nodes " in text
    assert "(rank 1), " in text
    assert "(rank 2) do not see what node " in text
    assert "(rank 0) creates there" in text
    assert "or set shared_files: false (ACCEL_SHARED_FILES=0)" in text
    assert list(tmp_path.iterdir()) == []


def test_separate_files_are_a_warning_if_the_script_may_save_elsewhere_or_nothing(clusters, tmp_path):
    results = clusters["apart"].run(prepare, tmp_path, {})
    assert [len(warnings) for warnings, _ in results] == [1, 0, 0]
    assert results[0][0][0].startswith(f"Checkpoints cannot be saved in {tmp_path}: nodes ")
    assert list(tmp_path.iterdir()) == []


def test_shared_files_are_checked_once_and_nothing_stays(clusters, tmp_path):
    results = clusters["apart"].run(prepare, tmp_path / "new", AUTOMATIC, False)
    assert results == [([], [tmp_path / "new" / "checkpoints"]), ([], [None]), ([], [None])]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("size", "optimizer"),
    [(2, True), (1, True), ("apart", False)],
    ids=["one node", "one process", "evaluation"],
)
def test_one_node_and_a_run_that_does_not_train_look_at_nothing(clusters, tmp_path, size, optimizer):
    results = clusters[size].run(prepare, tmp_path, AUTOMATIC, size == "apart", True, optimizer)
    assert {tuple(map(len, result)) for result in results} == {(0, 0)}


@pytest.mark.parametrize("folder", [None, "runs"])
def test_without_a_directory_or_with_separate_files_by_choice_nothing_is_created(clusters, tmp_path, folder):
    place, options = (tmp_path / folder, AUTOMATIC) if folder else (None, {})
    results = clusters["apart"].run(prepare, place, options, True, folder is None)
    assert results == [([], [None])] * 3
    assert list(tmp_path.iterdir()) == []


class Gathered:
    """The collective call of rank 0, with the answers of the other nodes to its second call."""

    def __init__(self, *answers):
        self._answers = [(), answers]

    def __call__(self, item):
        return [item, *self._answers.pop(0)]


def explain(folder, *answers, sharded=False):
    return explain_separate_nodes(folder, Gathered(*answers), "a", FileSystem(), sharded=sharded)


def test_sharded_models_need_a_shared_directory(tmp_path):
    text = explain(tmp_path, ("b", False), ("c", True), (None, True), sharded=True)
    assert "node b (rank 1) does not see what node a (rank 0) creates there" in text
    assert "shared_files" not in text
    assert explain(tmp_path, ("b", True), sharded=True) == ""


def test_a_directory_that_rank_0_cannot_write_is_reported(tmp_path):
    (tmp_path / "file").touch()
    text = explain(tmp_path / "file" / "checkpoints", ("b", True))
    assert text.startswith(
        f"Checkpoints cannot be saved in {tmp_path / 'file' / 'checkpoints'}: node a (rank 0): "
    )
    assert "Not a directory" in text


def test_a_directory_that_appears_late_counts_as_seen(tmp_path, monkeypatch):
    class Late(FileSystem):
        looks = 0

        def sees(self, _):
            self.looks += 1
            return self.looks > 2

    late = Late()
    monkeypatch.setattr(file_store, "_POLL_S", 0)
    assert explain_separate_nodes(tmp_path, Gathered(), "a", late, sharded=False) == ""
    assert late.looks == 3
