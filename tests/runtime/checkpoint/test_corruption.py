"""Damaged checkpoints are rejected: the error names the file and the previous checkpoint, and nothing changes."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import pytest
from support.file_system import Run, is_same_state

from accel_runtime.checkpoint.errors import CheckpointError
from accel_runtime.checkpoint.manifest import NAME, Manifest, hash_bytes, read_checkpoint
from accel_runtime.export.objects import read_pickle


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """Return a project with checkpoints of steps 3 and 4; a hook has written a file into each."""
    top = tmp_path_factory.mktemp("pristine")
    run = Run(top)
    run.acc.register_save_state_pre_hook(
        lambda *args: (Path(args[2]) / "note.txt").write_text("a note of the hook")
    )
    for step in (3, 4):
        run.set_step(step)
        run.acc.save_state()
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


def load_damaged(run, path):
    """Return the error of loading; require that the training state is unchanged."""
    before = run.copy_state()
    with pytest.raises(CheckpointError) as raised:
        run.acc.load_state(path)
    assert is_same_state(run.copy_state(), before)
    assert run.step() == 9
    return str(raised.value)


def load_damaged_with_previous(run, path):
    """Return the error of loading; require that it names the previous checkpoint."""
    message = load_damaged(run, path)
    assert f"The checkpoint before it is {path.parent / 'checkpoint_0'}, of step 3." in message
    return message


def rewrite_manifest(path, change):
    """Change a manifest and update its checksum, as an attacker could."""
    text = (path / NAME).read_text()
    body = json.loads(text)["checkpoint"]
    change(body)
    forged = json.dumps(body, separators=(",", ":"))
    (path / NAME).write_text(f'{{"checksum":"{hash_bytes(forged.encode())}",\n"checkpoint":{forged}}}\n')


def list_files(path):
    return sorted(p.name for p in path.iterdir())


def flip_bit(path, bit):
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def test_a_flipped_bit_in_any_file_is_detected_and_the_file_named(run, newest, pristine):
    names = list_files(newest)
    assert len(names) > 5
    generator = random.Random(1)
    for name in names:
        size = (newest / name).stat().st_size
        # The first and last bytes, the text and padding of the header, and random ones.
        bits = {0, 7, 8 * 7, 8 * 9, 8 * (size - 1), 8 * (size // 2)} | {
            generator.randrange(8 * size) for _ in range(8)
        }
        for bit in bits:
            flip_bit(newest / name, bit)
            message = load_damaged_with_previous(run, newest)
            assert str(newest / name) in message
            flip_bit(newest / name, bit)
    run.acc.load_state(newest)
    assert run.step() == 4


@pytest.mark.full
def test_every_third_bit_of_small_files_and_headers_is_verified(run, newest):
    for name in list_files(newest):
        size = (newest / name).stat().st_size
        for bit in range(0, 8 * min(size, 400), 3):
            flip_bit(newest / name, bit)
            assert str(newest / name) in load_damaged(run, newest)
            flip_bit(newest / name, bit)


def test_a_flipped_bit_in_a_tensor_names_the_tensor(run, newest):
    manifest = read_checkpoint(newest).manifest
    for name in ("model/0.weight", "optimizer/state.model.0.bias.exp_avg", "random/torch"):
        if name not in manifest.tensors:
            continue
        chunk = manifest.tensors[name].chunks[0]
        flip_bit(newest / chunk.file, 8 * chunk.start + 3)
        assert f"{newest / chunk.file} is damaged: {name} does not have its checksum" in load_damaged(
            run, newest
        )
        flip_bit(newest / chunk.file, 8 * chunk.start + 3)


def test_a_file_of_a_different_length_is_detected_and_named(run, newest):
    for name in list_files(newest):
        data = (newest / name).read_bytes()
        for content in (b"", data[:1], data[:8], data[: len(data) // 2], data[:-1], data + b"\0"):
            (newest / name).write_bytes(content)
            message = load_damaged_with_previous(run, newest)
            assert str(newest / name) in message
        (newest / name).write_bytes(data)


def test_a_missing_file_is_named(run, newest):
    for name in list_files(newest):
        (newest / name).rename(newest.parent / "away")
        message = load_damaged_with_previous(run, newest)
        assert name in message
        (newest.parent / "away").rename(newest / name)


def test_a_directory_or_pipe_in_place_of_a_file_is_named(run, newest):
    for name in list_files(newest):
        (newest / name).unlink()
        for create in (lambda path: path.mkdir(), os.mkfifo):
            create(newest / name)
            assert name in load_damaged_with_previous(run, newest)
            (newest / name).rmdir() if (newest / name).is_dir() else (newest / name).unlink()
        shutil.copy(newest.parent / "checkpoint_0" / name, newest / name)


def test_a_pipe_in_place_of_a_pickle_is_rejected_without_blocking(tmp_path):
    os.mkfifo(tmp_path / "optimizer.bin")
    with pytest.raises(CheckpointError, match=r"optimizer.bin is not a regular file"):
        read_pickle(tmp_path / "optimizer.bin")


def test_a_data_file_of_another_save_is_named_as_damaged(run, newest):
    for name in list_files(newest):
        if name.endswith(".safetensors"):
            original = (newest / name).read_bytes()
            shutil.copy(newest.parent / "checkpoint_0" / name, newest / name)
            message = load_damaged_with_previous(run, newest)
            assert str(newest / name) in message
            assert "is damaged" in message
            (newest / name).write_bytes(original)


def test_tensors_with_the_manifest_of_another_step_are_rejected(run, newest):
    shutil.copy(newest.parent / "checkpoint_0" / NAME, newest / NAME)
    message = load_damaged_with_previous(run, newest)
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
    message = load_damaged(run, None)
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
            assert str(newest) in load_damaged(run, newest), (key, value)
        if key not in {"about", "run", "sections"}:  # manifests of older versions may lack these
            rewrite_manifest(newest, lambda body, key=key: body.pop(key))
            assert str(newest) in load_damaged(run, newest), key
        (newest / NAME).write_bytes(original)
    for text in ("", "null", "[]", "{}", '{"checksum":1}', "x" * 100, "\0" * 50):
        (newest / NAME).write_text(text)
        assert f"{newest / NAME} is damaged" in load_damaged(run, newest)


def test_unknown_manifest_fields_of_a_newer_version_are_ignored(run, newest):
    def add(body):
        body |= {"more": {"code": "print(1)"}}
        body["sections"]["weather"] = 7
        for stored in body["tensors"].values():
            stored["more"] = 1
            for chunk in stored["chunks"]:
                chunk["more"] = [1]
        for file in body["files"].values():
            file["more"] = "text"

    rewrite_manifest(newest, add)
    assert run.acc.load_state(newest).manifest.step == 4


@pytest.mark.parametrize("name", ["layout", "values", "loader"])
def test_a_newer_section_version_is_rejected_with_the_version_that_wrote_it(run, newest, name):
    rewrite_manifest(newest, lambda body: body.update(sections={name: 2}, versions={"accel": "9.9"}))
    assert (
        f"version 2 of {name}, and this version of accel reads versions up to 1: it was written by accel 9.9. Install"
        in load_damaged(run, newest)
    )


def test_a_manifest_without_section_versions_loads(run, newest):
    rewrite_manifest(newest, lambda body: [body.pop(key) for key in ("sections", "about", "run")])
    assert run.acc.load_state(newest).manifest.step == 4


def test_a_newer_format_is_rejected_with_the_version_that_wrote_it(run, newest):
    rewrite_manifest(newest, lambda body: body.update(format=2, versions={"accel": "9.9"}))
    assert "format 2, and this version of accel reads format 1: it was written by accel 9.9" in load_damaged(
        run, newest
    )


def test_load_hooks_are_not_called_for_a_damaged_checkpoint(run, newest):
    called = []
    run.acc.register_load_state_pre_hook(
        lambda *args: called.append((Path(args[1]) / "note.txt").read_text())
    )
    flip_bit(newest / "note.txt", 5)
    load_damaged(run, newest)
    assert called == []
    flip_bit(newest / "note.txt", 5)
    run.acc.load_state(newest)
    assert called == ["a note of the hook"]


def test_a_load_hook_that_fails_on_one_rank_fails_loading_on_both(pair, memory):
    def load(folder):
        run = Run(folder)
        run.set_step(2)
        run.acc.save_state()

        def hook(models, path):
            if run.rank == 1:
                raise OSError("the script has no luck")

        run.acc.register_load_state_pre_hook(hook)
        run.set_step(5)
        try:
            run.acc.load_state()
        except CheckpointError as error:
            return str(error), run.step()

    results = pair.run(load, memory)
    assert [step for _, step in results] == [5, 5]
    assert all("the script has no luck" in message for message, _ in results)


def test_damage_is_raised_on_both_ranks_and_changes_nothing(pair, memory):
    def load(folder, bit):
        run = Run(folder)
        run.set_step(2)
        run.acc.save_state()
        run.set_step(5)
        before = run.copy_state()
        path = run.acc.checkpoints.newest().path
        run.acc.wait_for_everyone()
        list_files = sorted(path.glob("*.safetensors"))
        if run.rank == 0:
            for file in list_files:
                data = bytearray(file.read_bytes())
                data[-1] ^= bit
                file.write_bytes(data)
        run.acc.wait_for_everyone()
        try:
            run.acc.load_state()
        except CheckpointError as error:
            return (
                [file.name for file in list_files if str(file) in str(error)],
                len(list_files),
                is_same_state(run.copy_state(), before),
            )

    for named, count, unchanged in pair.run(load, memory, 4):
        assert len(named) == count
        assert unchanged


def test_a_file_that_is_not_part_of_the_checkpoint_is_logged(run, newest, caplog):
    (newest / "old.bin").write_text("x")
    run.acc.load_state(newest)
    assert f"{newest}: not part of the checkpoint, and not read: old.bin" in caplog.text


def test_the_checksum_of_a_manifest_covers_its_text(newest):
    text = (newest / NAME).read_text()
    assert Manifest.parse(text, newest).text() == text
    with pytest.raises(CheckpointError, match="is damaged"):
        Manifest.parse(text.replace('"step":', '"step": '), newest)
