"""Checkpoints that are rejected: damaged tensors, invalid manifests and newer versions; which one is loaded instead.

Damage to the bytes of files is in test_faults.py.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from support.runs.file_system import Run, flip_bit, rewrite_manifest

from accel_runtime.export.objects import read_pickle
from accel_runtime.storage.directory import read_checkpoint
from accel_runtime.storage.errors import CheckpointError
from accel_runtime.storage.manifest import NAME, Manifest


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


def test_a_pipe_in_place_of_a_pickle_is_rejected_without_blocking(tmp_path):
    os.mkfifo(tmp_path / "optimizer.bin")
    with pytest.raises(CheckpointError, match=r"optimizer.bin is not a regular file"):
        read_pickle(tmp_path / "optimizer.bin")


def test_tensors_with_the_manifest_of_another_step_are_rejected(run, newest):
    shutil.copy(newest.parent / "checkpoint_0" / NAME, newest / NAME)
    message = run.fail_to_load(newest)
    assert "the file is of another save" in message


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


def test_verify_names_damaged_files(run, newest):
    assert run.acc.checkpoints.verify().path == newest
    for name in ("model.safetensors", "note.txt", NAME):
        for bit in (8 * 3, 8 * 5 + 1):
            flip_bit(newest / name, bit)
            with pytest.raises(CheckpointError) as raised:
                run.acc.checkpoints.verify(newest)
            assert str(newest / name) in str(raised.value)
            flip_bit(newest / name, bit)
    assert run.acc.checkpoints.verify(newest).manifest.step == 4


def test_a_manifest_with_values_of_wrong_types_is_rejected(run, newest):
    manifest = json.loads((newest / NAME).read_text())["checkpoint"]
    original = (newest / NAME).read_bytes()
    for key in manifest:
        for value in (None, 7.5, "text", [1], -1, True) if isinstance(manifest[key], dict) else ():
            rewrite_manifest(newest, lambda body, key=key, value=value: body.update({key: value}))
            assert str(newest) in run.fail_to_load(newest), (key, value)
        if key not in {"class_names", "run", "origin", "ranks"}:  # these may be empty
            rewrite_manifest(newest, lambda body, key=key: body.pop(key))
            assert str(newest) in run.fail_to_load(newest), key
        (newest / NAME).write_bytes(original)
    for text in ("", "null", "[]", "{}", '{"checksum":1}', "x" * 100, "\0" * 50):
        (newest / NAME).write_text(text)
        assert f"{newest / NAME} is damaged" in run.fail_to_load(newest)


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


def test_load_hooks_are_not_called_for_a_damaged_checkpoint(run, newest):
    called = []
    run.acc.register_load_state_pre_hook(
        lambda *args: called.append((Path(args[1]) / "note.txt").read_text())
    )
    flip_bit(newest / "note.txt", 5)
    run.fail_to_load(newest)
    assert called == []
    flip_bit(newest / "note.txt", 5)
    run.acc.load_state(newest)
    assert called == ["a note of the hook"]


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


def test_the_checksum_of_a_manifest_covers_its_text(newest):
    text = (newest / NAME).read_text()
    assert Manifest.parse(text, newest).text() == text
    with pytest.raises(CheckpointError, match="is damaged"):
        Manifest.parse(text.replace('"step":', '"step": '), newest)
