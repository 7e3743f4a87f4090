"""A checkpoint that is not what was written is refused: by name, with the one before it, and with nothing changed."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import pytest
from failing_disk import Run, same

from accel_runtime.checkpoint.errors import CheckpointError
from accel_runtime.checkpoint.manifest import NAME, Manifest, hash_bytes, read_checkpoint
from accel_runtime.export.objects import read_pickle


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """Two checkpoints, of step 3 and 4; a hook has written a file into each."""
    top = tmp_path_factory.mktemp("pristine")
    run = Run(top)
    run.acc.register_save_state_pre_hook(
        lambda *args: (Path(args[2]) / "note.txt").write_text("a note of the hook")
    )
    for step in (3, 4):
        run.put(step)
        run.acc.save_state()
    return top


@pytest.fixture
def project(pristine, memory):
    """A copy of them."""
    return Path(shutil.copytree(pristine, memory / "project"))


@pytest.fixture
def newest(project):
    """The newer one."""
    return project / "checkpoints" / "checkpoint_1"


@pytest.fixture
def run(project):
    """A run in the project, of step 9."""
    run = Run(project)
    run.put(9)
    return run


def refused(run, path):
    """What loading says; nothing live has changed by it."""
    before = run.live()
    with pytest.raises(CheckpointError) as raised:
        run.acc.load_state(path)
    assert same(run.live(), before)
    assert run.step() == 9
    return str(raised.value)


def refused_with_offer(run, path):
    """The same, and it offers the checkpoint before."""
    said = refused(run, path)
    assert f"The checkpoint before it is {path.parent / 'checkpoint_0'}, of step 3." in said
    return said


def rewritten(path, change):
    """Change a manifest and give it the right checksum, as somebody might who means harm."""
    text = (path / NAME).read_text()
    body = json.loads(text)["checkpoint"]
    change(body)
    forged = json.dumps(body, separators=(",", ":"))
    (path / NAME).write_text(f'{{"checksum":"{hash_bytes(forged.encode())}",\n"checkpoint":{forged}}}\n')


def files(path):
    return sorted(p.name for p in path.iterdir())


def flipped(path, bit):
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def test_a_bit_that_flips_anywhere_is_noticed_and_the_file_named(run, newest, pristine):
    names = files(newest)
    assert len(names) > 5
    chance = random.Random(1)
    for name in names:
        size = (newest / name).stat().st_size
        # The first and last bytes, the header's text and padding, and any others.
        bits = {0, 7, 8 * 7, 8 * 9, 8 * (size - 1), 8 * (size // 2)} | {
            chance.randrange(8 * size) for _ in range(8)
        }
        for bit in bits:
            flipped(newest / name, bit)
            said = refused_with_offer(run, newest)
            assert str(newest / name) in said
            flipped(newest / name, bit)
    run.acc.load_state(newest)
    assert run.step() == 4


@pytest.mark.full
def test_any_bit_of_the_smallest_files_and_of_every_header_is_noticed(run, newest):
    for name in files(newest):
        size = (newest / name).stat().st_size
        for bit in range(0, 8 * min(size, 400), 3):
            flipped(newest / name, bit)
            assert str(newest / name) in refused(run, newest)
            flipped(newest / name, bit)


def test_a_bit_in_a_tensor_names_the_tensor(run, newest):
    manifest = read_checkpoint(newest).manifest
    for name in ("model/0.weight", "optimizer/state.model.0.bias.exp_avg", "random/torch"):
        if name not in manifest.tensors:
            continue
        chunk = manifest.tensors[name].chunks[0]
        flipped(newest / chunk.file, 8 * chunk.start + 3)
        assert f"{newest / chunk.file} is damaged: {name} does not have its checksum" in refused(run, newest)
        flipped(newest / chunk.file, 8 * chunk.start + 3)


def test_a_file_of_another_length_is_noticed_and_named(run, newest):
    for name in files(newest):
        data = (newest / name).read_bytes()
        for wrong in (b"", data[:1], data[:8], data[: len(data) // 2], data[:-1], data + b"\0"):
            (newest / name).write_bytes(wrong)
            said = refused_with_offer(run, newest)
            assert str(newest / name) in said
        (newest / name).write_bytes(data)


def test_a_file_that_is_missing_is_named(run, newest):
    for name in files(newest):
        (newest / name).rename(newest.parent / "away")
        said = refused_with_offer(run, newest)
        assert name in said
        (newest.parent / "away").rename(newest / name)


def test_something_else_in_the_place_of_a_file_is_named(run, newest):
    for name in files(newest):
        (newest / name).unlink()
        for put in (lambda path: path.mkdir(), os.mkfifo):
            put(newest / name)
            assert name in refused_with_offer(run, newest)
            (newest / name).rmdir() if (newest / name).is_dir() else (newest / name).unlink()
        shutil.copy(newest.parent / "checkpoint_0" / name, newest / name)


def test_a_pipe_in_the_place_of_a_pickle_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "optimizer.bin")
    with pytest.raises(CheckpointError, match=r"optimizer.bin is not a regular file"):
        read_pickle(tmp_path / "optimizer.bin")


def test_a_data_file_of_another_save_is_named(run, newest):
    for name in files(newest):
        if name.endswith(".safetensors"):
            mine = (newest / name).read_bytes()
            shutil.copy(newest.parent / "checkpoint_0" / name, newest / name)
            said = refused_with_offer(run, newest)
            assert str(newest / name) in said
            assert "is damaged" in said
            (newest / name).write_bytes(mine)


def test_tensors_of_one_step_under_the_manifest_of_another_are_refused(run, newest):
    shutil.copy(newest.parent / "checkpoint_0" / NAME, newest / NAME)
    said = refused_with_offer(run, newest)
    assert "the file is of another save" in said


def test_the_newest_that_is_whole_is_loaded_where_none_is_named_and_the_other_is_told(run, newest, caplog):
    (newest / "model.safetensors").unlink()
    assert run.acc.load_state().path.name == "checkpoint_0"
    assert run.step() == 3
    assert f"{newest / 'model.safetensors'} is missing" in caplog.text


def test_where_none_is_whole_every_one_is_named(run, newest):
    (newest / NAME).unlink()
    (newest.parent / "checkpoint_0" / "model.safetensors").unlink()
    said = refused(run, None)
    assert str(newest) in said
    assert str(newest.parent / "checkpoint_0" / "model.safetensors") in said


def test_verify_says_what_loading_would(run, newest):
    assert run.acc.checkpoints.verify().path == newest
    for name in ("model.safetensors", "note.txt", NAME):
        for bit in (8 * 3, 8 * 5 + 1):
            flipped(newest / name, bit)
            with pytest.raises(CheckpointError) as raised:
                run.acc.checkpoints.verify(newest)
            assert str(newest / name) in str(raised.value)
            flipped(newest / name, bit)
    assert run.acc.checkpoints.verify(newest).manifest.step == 4


def test_a_manifest_whose_parts_have_wrong_types_is_refused(run, newest):
    whole = json.loads((newest / NAME).read_text())["checkpoint"]
    original = (newest / NAME).read_bytes()
    for key in whole:
        for wrong in (None, 7.5, "text", [1], -1, True) if isinstance(whole[key], dict) else ():
            rewritten(newest, lambda body, key=key, wrong=wrong: body.update({key: wrong}))
            assert str(newest) in refused(run, newest), (key, wrong)
        if key not in {"about", "run", "sections"}:  # what older versions may lack
            rewritten(newest, lambda body, key=key: body.pop(key))
            assert str(newest) in refused(run, newest), key
        (newest / NAME).write_bytes(original)
    for text in ("", "null", "[]", "{}", '{"checksum":1}', "x" * 100, "\0" * 50):
        (newest / NAME).write_text(text)
        assert f"{newest / NAME} is damaged" in refused(run, newest)


def test_what_only_a_newer_version_knows_is_left_alone_wherever_it_stands(run, newest):
    def add(body):
        body |= {"more": {"code": "print(1)"}}
        body["sections"]["weather"] = 7
        for stored in body["tensors"].values():
            stored["more"] = 1
            for chunk in stored["chunks"]:
                chunk["more"] = [1]
        for file in body["files"].values():
            file["more"] = "text"

    rewritten(newest, add)
    assert run.acc.load_state(newest).manifest.step == 4


@pytest.mark.parametrize("name", ["layout", "values", "loader"])
def test_a_newer_version_of_a_section_is_refused_with_who_wrote_it(run, newest, name):
    rewritten(newest, lambda body: body.update(sections={name: 2}, versions={"accel": "9.9"}))
    assert (
        f"version 2 of {name}, and this version of accel reads versions up to 1: it was written by accel 9.9. Install"
        in refused(run, newest)
    )


def test_a_checkpoint_from_before_sections_had_versions_is_loaded(run, newest):
    rewritten(newest, lambda body: [body.pop(key) for key in ("sections", "about", "run")])
    assert run.acc.load_state(newest).manifest.step == 4


def test_a_newer_format_says_who_wrote_it(run, newest):
    rewritten(newest, lambda body: body.update(format=2, versions={"accel": "9.9"}))
    assert "format 2, and this version of accel reads format 1: it was written by accel 9.9" in refused(
        run, newest
    )


def test_hooks_of_loading_are_not_called_on_a_damaged_checkpoint(run, newest):
    called = []
    run.acc.register_load_state_pre_hook(
        lambda *args: called.append((Path(args[1]) / "note.txt").read_text())
    )
    flipped(newest / "note.txt", 5)
    refused(run, newest)
    assert called == []
    flipped(newest / "note.txt", 5)
    run.acc.load_state(newest)
    assert called == ["a note of the hook"]


def test_a_hook_that_fails_on_one_rank_fails_loading_on_both(pair, memory):
    def load(folder):
        run = Run(folder)
        run.put(2)
        run.acc.save_state()

        def hook(models, path):
            if run.rank == 1:
                raise OSError("the script has no luck")

        run.acc.register_load_state_pre_hook(hook)
        run.put(5)
        try:
            run.acc.load_state()
        except CheckpointError as error:
            return str(error), run.step()

    both = pair.run(load, memory)
    assert [step for _, step in both] == [5, 5]
    assert all("the script has no luck" in said for said, _ in both)


def test_damage_that_one_of_two_ranks_sees_is_raised_on_both(pair, memory):
    def load(folder, bit):
        run = Run(folder)
        run.put(2)
        run.acc.save_state()
        run.put(5)
        before = run.live()
        path = run.acc.checkpoints.newest().path
        run.acc.wait_for_everyone()
        files = sorted(path.glob("*.safetensors"))
        if run.rank == 0:
            for file in files:
                data = bytearray(file.read_bytes())
                data[-1] ^= bit
                file.write_bytes(data)
        run.acc.wait_for_everyone()
        try:
            run.acc.load_state()
        except CheckpointError as error:
            return (
                [file.name for file in files if str(file) in str(error)],
                len(files),
                same(run.live(), before),
            )

    for named, count, unchanged in pair.run(load, memory, 4):
        assert len(named) == count
        assert unchanged


def test_what_was_not_read_is_told(run, newest, caplog):
    (newest / "old.bin").write_text("x")
    run.acc.load_state(newest)
    assert f"{newest}: not part of the checkpoint, and not read: old.bin" in caplog.text


def test_the_text_of_a_manifest_is_what_its_checksum_is_of(newest):
    text = (newest / NAME).read_text()
    assert Manifest.parse(text, newest).text() == text
    with pytest.raises(CheckpointError, match="is damaged"):
        Manifest.parse(text.replace('"step":', '"step": '), newest)
