"""What `accel checkpoint` finds: what is there, whole or not, and what may go."""

from __future__ import annotations

import shutil

import pytest
import torch

from accel_cli import checkpoints
from accel_cli.errors import AccelError
from accel_runtime.checkpoint.safetensors_file import MergeRequest


def unwatched(*_):
    pass


COMMANDS = {
    "list": checkpoints.list_checkpoints,
    "verify": lambda directory: checkpoints.verify_checkpoint(directory, unwatched),
    "show": lambda directory, tensors=False: checkpoints.show_checkpoint(directory, tensors=tensors),
    "export": lambda directory, output, **request: checkpoints.export_checkpoint(
        directory, output, MergeRequest(**request), unwatched
    ),
    "prune": lambda directory, keep, now: checkpoints.prune_checkpoints(
        directory, keep, unwatched if now else None
    ),
}


def ask(command, directory, **more):
    """Return the exit code, and the result or the error."""
    try:
        return 0, {"result": COMMANDS[command](str(directory), **more)}
    except AccelError as error:
        return error.exit_code, {"error": str(error)}


@pytest.fixture
def project(handmade, tmp_path):
    """A project with so many checkpoints; step 10 for the second, and so on."""

    def write(count):
        for number in range(count):
            path = tmp_path / "checkpoints" / f"checkpoint_{number}"
            model = {"w": torch.full((64,), float(number)), "b": torch.ones(3).half()}
            handmade.write(path, {"model": model}, cuts={"model/w": (2,)}, step=10 * number)
        return tmp_path / "checkpoints"

    return write


def names(paths):
    return [path.rsplit("/", 1)[1] for path in paths]


def test_checkpoints_are_listed_by_number_whole_or_not(project, tmp_path):
    folder = project(12)
    (folder / "checkpoint_3" / "model-0.safetensors").write_bytes(b"short")
    (folder / "checkpoint_5" / "checkpoint.json").unlink()
    (folder / ".checkpoint_12.saving-c3").mkdir()
    (folder / "notes").mkdir()
    for directory in (tmp_path, folder):
        code, said = ask("list", directory)
        assert code == 0
        found = said["result"]["checkpoints"]
        assert names(entry["path"] for entry in found) == [f"checkpoint_{number}" for number in range(12)]
        wrong = {entry["number"]: entry["problem"] for entry in found if entry["problem"]}
        assert set(wrong) == {3, 5}
        assert "has 5 bytes and should have" in wrong[3]
        assert "has no checkpoint.json" in wrong[5]
        assert found[11]["step"] == 110
        assert names(said["result"]["leftovers"]) == [".checkpoint_12.saving-c3"]


def test_one_that_a_crash_left_beside_its_name_is_listed_under_it(project):
    folder = project(2)
    (folder / "checkpoint_1").rename(folder / ".checkpoint_1.saving-a1")
    found = ask("list", folder)[1]["result"]["checkpoints"]
    assert names(entry["path"] for entry in found) == ["checkpoint_0", "checkpoint_1"]
    assert found[1]["location"].endswith(".checkpoint_1.saving-a1")
    assert ask("verify", folder)[1]["result"]["complete"]


def test_what_accelerate_wrote_is_named_as_such(tmp_path):
    path = tmp_path / "checkpoints" / "checkpoint_0"
    path.mkdir(parents=True)
    for name in ("model.safetensors", "optimizer.bin", "random_states_0.pkl"):
        (path / name).write_bytes(b"x")
    (entry,) = ask("list", tmp_path)[1]["result"]["checkpoints"]
    assert entry["written_by"] == "accelerate"
    for command in ("verify", "show"):
        code, said = ask(command, path)
        assert code == 2
        assert "was written by Accelerate" in said["error"]


def test_every_byte_is_verified(project, handmade):
    folder = project(1)
    path = folder / "checkpoint_0"
    assert ask("verify", folder)[1]["result"]["complete"]
    for file in sorted(path.glob("*.safetensors")):
        whole = file.read_bytes()
        for at in range(0, len(whole), 7):
            handmade.flip(file, at)
            code, said = ask("verify", path)
            assert code == 0
            (problem,) = said["result"]["problems"]
            assert str(file) in problem
            assert "is damaged" in problem
            file.write_bytes(whole)


def test_a_damaged_tensor_is_named_and_the_checkpoint_before_it_that_is_whole(project, handmade):
    folder = project(4)
    handmade.flip(folder / "checkpoint_3" / "model-1.safetensors", -1)
    handmade.flip(folder / "checkpoint_2" / "model-2.safetensors", 20)
    found = ask("verify", folder)[1]["result"]
    assert not found["complete"]
    assert found["problems"] == [
        f"{folder}/checkpoint_3/model-1.safetensors is damaged: model/w does not have its checksum"
    ]
    assert found["earlier"]["path"] == f"{folder}/checkpoint_1"


def test_a_file_of_another_save_and_one_that_is_gone_are_named(project):
    folder = project(2)
    (folder / "checkpoint_1" / "model-0.safetensors").unlink()
    (problem,) = ask("verify", folder)[1]["result"]["problems"]
    assert "model-0.safetensors is missing from the checkpoint" in problem


def test_what_is_no_part_of_a_checkpoint_is_told_and_no_damage(project):
    folder = project(1)
    (folder / "checkpoint_0" / "notes.txt").write_text("mine")
    found = ask("verify", folder)[1]["result"]
    assert found["complete"]
    assert found["untracked"] == ["notes.txt"]


def test_what_a_checkpoint_holds_is_shown(project):
    folder = project(2)
    found = ask("show", folder, tensors=True)[1]["result"]
    (item,) = found["items"]
    assert (found["step"], found["world_size"]) == (10, 1)
    assert (item["name"], item["tensors"], item["dtypes"]) == ("model", 2, {"float32": 256, "float16": 6})
    assert [chunk["offsets"] for chunk in found["tensors"]["model/w"]["chunks"]] == [(0,), (32,)]


def test_a_newer_one_that_is_not_whole_is_passed_over_and_told(project, tmp_path):
    folder = project(3)
    (folder / "checkpoint_2" / "checkpoint.json").write_text("{")
    for command, more in (("show", {}), ("export", {"output": str(tmp_path / "m.safetensors")})):
        found = ask(command, folder, **more)[1]["result"]
        assert names([found["path"]]) == ["checkpoint_1"]
        (passed,) = found["skipped"]
        assert "checkpoint_2/checkpoint.json is damaged" in passed


def test_pruning_keeps_the_newest_that_are_whole_and_removes_what_crashes_left(project):
    folder = project(6)
    (folder / "checkpoint_5" / "checkpoint.json").unlink()
    (folder / ".checkpoint_1.saving-a1").mkdir()
    (folder / ".checkpoint_6.saving-b2").mkdir()
    before = sorted(path.name for path in folder.iterdir())
    told = ask("prune", folder, keep=2, now=False)[1]["result"]
    assert names(entry["path"] for entry in told["removed"]) == [
        "checkpoint_0",
        "checkpoint_1",
        "checkpoint_2",
    ]
    assert sorted(path.name for path in folder.iterdir()) == before
    assert ask("prune", folder, keep=2, now=True)[0] == 0
    # What has a number above the newest may be a save that runs.
    left = sorted(path.name for path in folder.iterdir())
    assert left == [".checkpoint_6.saving-b2", "checkpoint_3", "checkpoint_4", "checkpoint_5"]


def test_nothing_is_pruned_where_none_that_stays_is_whole_to_the_last_byte(project, handmade):
    folder = project(3)
    handmade.flip(folder / "checkpoint_2" / "model-0.safetensors", -1)
    code, said = ask("prune", folder, keep=1, now=True)
    assert code == 1
    assert "Nothing was removed" in said["error"]
    assert len(list(folder.iterdir())) == 3
    assert ask("prune", folder, keep=2, now=True)[0] == 0
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint_1", "checkpoint_2"]


def test_what_cannot_be_met_has_another_code_than_damage(project, tmp_path):
    assert ask("list", tmp_path / "nowhere")[0] == 2
    assert ask("show", tmp_path)[0] == 2
    folder = project(1)
    assert ask("export", folder, output=str(tmp_path / "m"), item="none")[0] == 2
    (folder / "checkpoint_0" / "checkpoint.json").write_text("{}")
    assert ask("show", folder)[0] == 1
    shutil.rmtree(folder / "checkpoint_0")
    assert ask("show", folder)[0] == 2
