"""Directories of checkpoints: search, order of system calls, numbering, and leftovers of crashes."""

from __future__ import annotations

import errno

import pytest
from support.runs.file_system import FOREVER, Fault, FaultyFileSystem, RecordingFileSystem

from accel_runtime.storage import directory
from accel_runtime.storage.errors import CheckpointError
from accel_runtime.storage.file_store import FileStore
from accel_runtime.storage.file_system import FileSystem
from accel_runtime.storage.manifest import NAME, FileEntry, Manifest, hash_bytes
from accel_runtime.storage.store import find_previous_checkpoint, list_numbered, next_number


def write_checkpoint(path, save, *, text="bytes", saved_at="2026-11-21T15:00:00Z", step=1):
    """Write a checkpoint of one file into a directory."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "data").write_text(text)
    file = FileEntry(len(text), hash_bytes(text.encode()))
    manifest = Manifest(save, saved_at, 1, step, {}, {}, files={"data": file})
    (path / NAME).write_text(manifest.text())
    return path


def save_checkpoint(target, save, disk=None, **about):
    """Save a checkpoint with the same steps as `save_state`."""
    disk = disk or FileSystem()
    scratch, lock = directory.create_scratch(target, save, disk)
    write_checkpoint(scratch, save, **about)
    directory.commit_directory(scratch, target, disk)
    disk.unlock(lock)


def find(path):
    return FileStore().find(str(path))


def list_names(path):
    return sorted(entry.name for entry in path.iterdir())


def test_files_and_links_that_others_have_added_are_listed(tmp_path):
    target = tmp_path / "mine"
    save_checkpoint(target, "a1")
    (target / "logs").mkdir()
    (target / "logs" / "1").touch()
    (target / "link").symlink_to(tmp_path)
    with FileStore().open(str(target)) as snapshot:
        assert snapshot.list_untracked() == ["link", "logs/1"]


@pytest.mark.parametrize("exchanges", [True, False])
def test_saving_replaces_a_checkpoint_and_keeps_files_of_the_user(tmp_path, exchanges):
    target = tmp_path / "mine"
    (target / "logs" / "empty").mkdir(parents=True)
    (target / "notes").write_text("of the user")
    for save in ("a1", "b2", "c3"):
        save_checkpoint(target, save, RecordingFileSystem(exchanges=exchanges))
        assert find(target).manifest.save == save
        assert list_names(target) == [NAME, "data", "logs", "notes"]
        assert (target / "logs" / "empty").is_dir()
    assert list_names(tmp_path) == ["mine"]


def test_directories_are_synced_before_and_after_the_rename(tmp_path):
    disk = RecordingFileSystem()
    save_checkpoint(tmp_path / "mine", "a1", disk)
    calls = [call for call in disk.calls if call in {"remove", "sync_directory", "rename"}]
    assert calls == ["remove", "sync_directory", "rename", "sync_directory"]


def test_a_directory_without_a_manifest_is_not_a_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="is not a checkpoint: it has no"):
        find(tmp_path)


def test_a_complete_checkpoint_that_a_crash_left_unrenamed_is_found_and_renamed_later(tmp_path):
    write_checkpoint(tmp_path / ".checkpoint_4.saving-a1", "a1")
    assert find(tmp_path / "checkpoint_4").manifest.save == "a1"
    assert [checkpoint.number for checkpoint in list_numbered(FileStore(), str(tmp_path))[0]] == [4]
    assert next_number(FileStore(), str(tmp_path)) == 5
    directory.remove_leftovers(tmp_path, 6, FileSystem())
    assert list_names(tmp_path) == ["checkpoint_4"]


def test_after_a_crash_during_a_replacement_the_new_checkpoint_is_used(tmp_path):
    write_checkpoint(tmp_path / ".mine.replaced-b2", "a1", saved_at="2026-11-21T15:00:00Z")
    write_checkpoint(
        tmp_path / ".mine.saving-b2", "b2", saved_at="2026-11-20T15:00:00Z"
    )  # the clock was set back
    (tmp_path / ".mine.replaced-b2" / "notes").write_text("of the user")
    assert find(tmp_path / "mine").manifest.save == "b2"
    save_checkpoint(tmp_path / "mine", "c3")
    assert find(tmp_path / "mine").manifest.save == "c3"
    assert list_names(tmp_path / "mine") == [NAME, "data", "notes"]
    assert list_names(tmp_path) == ["mine"]


def test_leftovers_of_an_interrupted_removal_are_removed(tmp_path):
    save_checkpoint(tmp_path / "checkpoint_7", "a1")
    leftover = write_checkpoint(tmp_path / ".checkpoint_7.removing", "b2")
    (leftover / NAME).unlink()
    (leftover / "model-00002-of-00002").write_text("old")
    assert [checkpoint.manifest.save for checkpoint in list_numbered(FileStore(), str(tmp_path))[0]] == ["a1"]
    directory.remove_leftovers(tmp_path, 9, FileSystem())
    assert list_names(tmp_path) == ["checkpoint_7"]
    assert list_names(tmp_path / "checkpoint_7") == [NAME, "data"]


def test_the_old_checkpoint_is_kept_if_a_replacement_cannot_be_undone(tmp_path):
    target, recorder = tmp_path / "mine", RecordingFileSystem()
    save_checkpoint(target, "a0")
    save_checkpoint(target, "a1", recorder)
    # After the exchange, directories can be neither synced nor exchanged back.
    disk = FaultyFileSystem(Fault(recorder.calls.index("exchange") + 2, errno.EIO, FOREVER))
    scratch, lock = directory.create_scratch(target, "b2", disk)
    write_checkpoint(scratch, "b2")
    with pytest.raises(OSError, match="Input/output error"):
        directory.commit_directory(scratch, target, disk)
    directory.discard_scratch(scratch, FileSystem())
    FileSystem().unlock(lock)
    assert directory.read_checkpoint(target).manifest.save == "b2"
    assert directory.read_checkpoint(scratch).manifest.save == "a1"


def test_checkpoints_are_saved_if_directories_cannot_be_synced(tmp_path, monkeypatch):
    import os
    import stat

    def sync(file, was=os.fsync):
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        was(file)

    monkeypatch.setattr(os, "fsync", sync)
    save_checkpoint(tmp_path / "mine", "a1")
    assert find(tmp_path / "mine").manifest.save == "a1"


def test_checkpoint_numbers_are_compared_numerically(tmp_path):
    for number in (2, 10, 9):
        save_checkpoint(tmp_path / f"checkpoint_{number}", "a1")
    (tmp_path / "checkpoint_x").mkdir()
    assert [checkpoint.number for checkpoint in list_numbered(FileStore(), str(tmp_path))[0]] == [2, 9, 10]
    previous = find_previous_checkpoint(FileStore(), str(tmp_path), 10)
    assert previous is not None
    assert previous.number == 9
    assert find_previous_checkpoint(FileStore(), str(tmp_path), 2) is None
    assert find_previous_checkpoint(FileStore(), str(tmp_path), None) is None
