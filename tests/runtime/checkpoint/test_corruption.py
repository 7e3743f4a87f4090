"""Checkpoints that are rejected: damaged tensors and newer versions, on all ranks or within a load; which one is loaded instead.

Damage to the bytes of files is in the contract of stores.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from runtime.storage.test_store_contract import FileCase, check_damage
from support.runs.file_system import Run, flip_bit, rewrite_manifest

from accel_runtime.checkpoint import load
from accel_runtime.storage.directory import read_checkpoint
from accel_runtime.storage.errors import CheckpointError
from accel_runtime.storage.manifest import NAME


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """Return a project with checkpoints of steps 3 and 4; a hook has written a file into each."""
    top = tmp_path_factory.mktemp("pristine")
    run = Run(top)
    run.acc.register_save_state_pre_hook(
        lambda *args: (Path(args[2]) / "note.txt").write_text("a note of the hook")
    )
    assert run.save(3) is run.save(4) is None
    return top


@pytest.fixture
def project(pristine, memory):
    """Return a copy of the pristine project."""
    return Path(shutil.copytree(pristine, memory / "project"))


@pytest.fixture
def newest(project):
    """Return the path of the newest checkpoint."""
    return project / "checkpoints" / "checkpoint_1"


@pytest.fixture
def run(project):
    """Return a run in the project, at step 9."""
    run = Run(project)
    run.set_step(9)
    return run


def test_a_flipped_bit_in_a_tensor_names_the_tensor(run, newest):
    manifest = read_checkpoint(newest).manifest
    for name in ("model/0.weight", "optimizer/state.model.0.bias.exp_avg", "random/torch"):
        if name not in manifest.tensors:
            continue
        chunk = manifest.tensors[name].chunks[0]
        flip_bit(newest / chunk.file, 8 * chunk.start + 3)
        message = run.fail_to_load(newest)
        assert f"{newest / chunk.file} is damaged: {name} does not have its checksum" in message
        flip_bit(newest / chunk.file, 8 * chunk.start + 3)


def test_load_state_without_a_path_loads_the_newest_complete_checkpoint_and_logs_the_damaged_one(
    run, newest, caplog
):
    (newest / "model.safetensors").unlink()
    assert run.acc.load_state().path.name == "checkpoint_0"
    assert run.step() == 3
    assert f"{newest / 'model.safetensors'} is missing" in caplog.text


def test_load_state_names_every_damaged_checkpoint_if_none_is_complete(run, newest):
    (newest / NAME).unlink()
    (newest.parent / "checkpoint_0" / "model.safetensors").unlink()
    message = run.fail_to_load()
    assert str(newest) in message
    assert str(newest.parent / "checkpoint_0" / "model.safetensors") in message


def test_unknown_manifest_fields_of_a_newer_version_are_ignored(run, newest):
    def add(body):
        body |= {"more": {"code": "print(1)"}}
        for stored in body["tensors"].values():
            stored["more"] = 1
            for chunk in stored["chunks"]:
                chunk["more"] = [1]
        for file in body["files"].values():
            file["more"] = "text"

    rewrite_manifest(newest, add)
    assert run.acc.load_state(newest).manifest.step == 4


def test_a_manifest_without_optional_fields_loads(run, newest):
    rewrite_manifest(
        newest, lambda body: [body.pop(key, None) for key in ("class_names", "run", "origin", "ranks")]
    )
    assert run.acc.load_state(newest).manifest.step == 4


def test_a_newer_version_is_rejected_with_the_version_of_accel_that_wrote_it(run, newest):
    rewrite_manifest(newest, lambda body: body.update(version=2, versions={"accel": "9.9"}))
    expected = "version 2, and this accel reads version 1. It was written by accel 9.9. Install that version"
    assert expected in run.fail_to_load(newest)


def test_damage_is_raised_on_both_ranks_and_changes_nothing(pair, memory):
    def load(folder):
        run = Run(folder)
        assert run.save(2) is None
        run.set_step(5)
        files = sorted(run.acc.checkpoints.newest().path.glob("*.safetensors"))
        run.acc.wait_for_everyone()
        for file in files if run.rank == 0 else ():
            flip_bit(file, -6)
        run.acc.wait_for_everyone()
        return run.fail_to_load(), list(map(str, files))

    (message, files), (other_message, _) = pair.run(load, memory)
    assert message == other_message
    assert len(files) > 4
    assert all(file in message for file in files)


class SpecialFiles(FileCase):
    """A directory in which a pipe, which would block its reader, or a directory takes the place of a file."""

    def write_file(self, key, name, data):
        path = Path(key, name)
        path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
        data(path) if callable(data) else path.write_bytes(data)


def test_a_pipe_or_a_directory_in_place_of_a_file_is_named_and_changes_nothing(memory):
    check_damage(
        SpecialFiles(memory), {"a pipe": lambda *_: os.mkfifo, "a directory": lambda *_: Path.mkdir}, 0
    )


def test_removal_of_the_only_checkpoint_during_a_load_raises_a_clear_error(memory, monkeypatch):
    run = Run(memory)
    run.set_step(1)
    path = Path(run.acc.save_state())
    run.set_step(5)

    def remove_then_verify(snapshot, chunks, was=load.find_damage):
        shutil.rmtree(path)
        return was(snapshot, chunks)

    monkeypatch.setattr(load, "find_damage", remove_then_verify)
    with pytest.raises(CheckpointError, match="No complete checkpoint in"):
        run.acc.load_state()
    assert run.step() == 5


def test_a_read_error_after_verification_reports_an_inconsistent_state(memory, monkeypatch):
    run = Run(memory)
    run.set_step(1)
    path = Path(run.acc.save_state())
    run.set_step(5)

    def verify_then_truncate(snapshot, chunks, was=load.find_damage):
        damage = was(snapshot, chunks)
        os.truncate(path / "optimizer.safetensors", 100)
        return damage

    monkeypatch.setattr(load, "find_damage", verify_then_truncate)
    with pytest.raises(CheckpointError, match="training state is now inconsistent") as raised:
        run.acc.load_state()
    assert "optimizer.safetensors" in str(raised.value)
