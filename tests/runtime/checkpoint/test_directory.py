"""Where checkpoints are found, in what order they are put there, and what is done about what crashes have left."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from failing_disk import Probe

from accel_runtime.checkpoint import directory
from accel_runtime.checkpoint.errors import CheckpointError
from accel_runtime.checkpoint.filesystem import FileSystem
from accel_runtime.checkpoint.manifest import NAME, FileEntry, Manifest, hash_bytes, read_checkpoint


def put(path, save, *, text="bytes", saved_at="2026-11-21T15:00:00Z", step=1):
    """A checkpoint of one file, written into a directory."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "data").write_text(text)
    file = FileEntry(len(text), hash_bytes(text.encode()))
    manifest = Manifest(save, saved_at, 1, step, {}, {}, files={"data": file})
    (path / NAME).write_text(manifest.text())
    return path


def saved(target, save, disk=None, **about):
    """Save one in the steps of the real thing."""
    disk = disk or FileSystem()
    scratch, lock = directory.create_scratch(target, save, disk)
    put(scratch, save, **about)
    directory.commit_directory(scratch, target, disk)
    disk.unlock(lock)


def names(path):
    return sorted(one.name for one in path.iterdir())


def test_one_that_is_saved_is_found(tmp_path):
    saved(tmp_path / "deep" / "mine", "a1")
    assert directory.find_checkpoint(tmp_path / "deep" / "mine").manifest.save == "a1"
    assert names(tmp_path / "deep") == ["mine"]


@pytest.mark.parametrize("exchanges", [True, False])
def test_one_of_the_same_name_is_replaced_and_files_of_the_user_stay(tmp_path, exchanges):
    target = tmp_path / "mine"
    (target / "logs" / "empty").mkdir(parents=True)
    (target / "notes").write_text("of the user")
    for save in ("a1", "b2", "c3"):
        saved(target, save, Probe(exchanges=exchanges))
        assert directory.find_checkpoint(target).manifest.save == save
        assert names(target) == [NAME, "data", "logs", "notes"]
        assert (target / "logs" / "empty").is_dir()
    assert names(tmp_path) == ["mine"]


def test_what_is_synced_before_what(tmp_path):
    disk = Probe()
    saved(tmp_path / "mine", "a1", disk)
    calls = [call for call in disk.calls if call in {"remove", "sync_directory", "rename"}]
    assert calls == ["remove", "sync_directory", "rename", "sync_directory"]


def test_without_a_manifest_there_is_none(tmp_path):
    with pytest.raises(CheckpointError, match="is not a checkpoint: it has no"):
        directory.find_checkpoint(tmp_path)


def test_one_that_a_crash_left_on_its_way_is_found_and_gets_its_name_with_the_next_save(tmp_path):
    put(tmp_path / ".checkpoint_4.saving-a1", "a1")
    assert directory.find_checkpoint(tmp_path / "checkpoint_4").manifest.save == "a1"
    assert [found.number for found in directory.list_numbered(tmp_path)[0]] == [4]
    assert directory.next_number(tmp_path) == 5
    directory.remove_leftovers(tmp_path, 6, FileSystem())
    assert names(tmp_path) == ["checkpoint_4"]


def test_one_that_is_marked_unfinished_is_none(tmp_path):
    left = put(tmp_path / ".checkpoint_4.saving-a1", "a1")
    (left / ".unfinished").touch()
    assert directory.list_numbered(tmp_path)[0] == []
    directory.remove_leftovers(tmp_path, 6, FileSystem())
    assert names(tmp_path) == []


def test_of_two_that_a_crash_left_the_one_that_replaces_counts(tmp_path):
    put(tmp_path / ".mine.replaced-b2", "a1", saved_at="2026-11-21T15:00:00Z")
    put(tmp_path / ".mine.saving-b2", "b2", saved_at="2026-11-20T15:00:00Z")  # the clock went back
    (tmp_path / ".mine.replaced-b2" / "notes").write_text("of the user")
    assert directory.find_checkpoint(tmp_path / "mine").manifest.save == "b2"
    saved(tmp_path / "mine", "c3")
    assert directory.find_checkpoint(tmp_path / "mine").manifest.save == "c3"
    assert names(tmp_path / "mine") == [NAME, "data", "notes"]
    assert names(tmp_path) == ["mine"]


def test_what_a_crash_left_of_a_removal_is_nobodys(tmp_path):
    saved(tmp_path / "checkpoint_7", "a1")
    going = put(tmp_path / ".checkpoint_7.removing", "b2")
    (going / NAME).unlink()
    (going / "model-00002-of-00002").write_text("old")
    assert [found.manifest.save for found in directory.list_numbered(tmp_path)[0]] == ["a1"]
    directory.remove_leftovers(tmp_path, 9, FileSystem())
    assert names(tmp_path) == ["checkpoint_7"]
    assert names(tmp_path / "checkpoint_7") == [NAME, "data"]


def test_what_a_living_process_writes_is_left_alone(tmp_path):
    disk = FileSystem()
    scratch, lock = directory.create_scratch(tmp_path / "checkpoint_1", "a1", disk)
    directory.remove_leftovers(tmp_path, 9, FileSystem())
    assert scratch.is_dir()
    with pytest.raises(CheckpointError, match="is being written by another process"):
        directory.create_scratch(tmp_path / "checkpoint_1", "b2", FileSystem())
    disk.unlock(lock)
    directory.remove_leftovers(tmp_path, 9, FileSystem())
    assert not scratch.exists()


def test_one_that_is_read_is_not_removed(tmp_path):
    saved(tmp_path / "mine", "a1")
    disk = FileSystem()
    readers = [disk.lock(tmp_path / "mine", shared=True) for _ in range(2)]
    assert not directory.remove_checkpoint(tmp_path / "mine", disk)
    for reader in readers:
        assert reader is not None
        disk.unlock(reader)
    assert directory.remove_checkpoint(tmp_path / "mine", disk)
    assert names(tmp_path) == []


class Stuck(FileSystem):
    """A directory cannot be confirmed, and nothing can be taken back."""

    renamed = 0

    def sync_directory(self, folder):
        if self.renamed:
            raise OSError(errno.EIO, "Input/output error", str(folder))
        super().sync_directory(folder)

    def exchange(self, one, other):
        if self.renamed:
            raise OSError(errno.EIO, "Input/output error", str(one))
        self.renamed += 1
        super().exchange(one, other)


def test_where_a_replacement_cannot_be_undone_the_old_one_is_not_thrown_away(tmp_path):
    target, disk = tmp_path / "mine", Stuck()
    saved(target, "a1")
    scratch, lock = directory.create_scratch(target, "b2", disk)
    put(scratch, "b2")
    with pytest.raises(OSError, match="Input/output error"):
        directory.commit_directory(scratch, target, disk)
    directory.discard_scratch(scratch, disk)
    disk.unlock(lock)
    assert read_checkpoint(target).manifest.save == "b2"
    assert read_checkpoint(scratch).manifest.save == "a1"


def test_where_directories_cannot_be_synced_checkpoints_are_saved_all_the_same(tmp_path, monkeypatch):
    import os
    import stat

    def sync(file, was=os.fsync):
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        was(file)

    monkeypatch.setattr(os, "fsync", sync)
    saved(tmp_path / "mine", "a1")
    assert directory.find_checkpoint(tmp_path / "mine").manifest.save == "a1"


def test_numbers_are_compared_as_numbers(tmp_path):
    for number in (2, 10, 9):
        saved(tmp_path / f"checkpoint_{number}", "a1")
    (tmp_path / "checkpoint_x").mkdir()
    assert [found.number for found in directory.list_numbered(tmp_path)[0]] == [2, 9, 10]
    before = directory.find_previous_checkpoint(tmp_path / "checkpoint_10")
    assert before is not None
    assert before.number == 9
    assert directory.find_previous_checkpoint(tmp_path / "checkpoint_2") is None
    assert directory.find_previous_checkpoint(Path("elsewhere")) is None
