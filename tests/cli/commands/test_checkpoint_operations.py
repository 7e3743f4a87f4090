"""The results of `accel checkpoint`: list, verify, show, export and prune."""

from __future__ import annotations

import shutil

import pytest
import torch

from accel_cli.commands import checkpoint_operations
from accel_cli.errors import AccelError
from accel_runtime.storage.tensor_file import MergeRequest


def ignore_progress(*_):
    pass


COMMANDS = {
    "list": checkpoint_operations.list_checkpoints,
    "verify": lambda directory: checkpoint_operations.verify_checkpoint(directory, ignore_progress),
    "show": lambda directory, tensors=False: checkpoint_operations.show_checkpoint(
        directory, tensors=tensors
    ),
    "export": lambda directory, output, **request: checkpoint_operations.export_checkpoint(
        directory, output, MergeRequest(**request), ignore_progress
    ),
    "prune": lambda directory, keep, now: checkpoint_operations.prune_checkpoints(
        directory, keep, ignore_progress if now else None
    ),
}


def run_command(command, directory, **options):
    """Return the exit code, and the result or the error."""
    try:
        return 0, {"result": COMMANDS[command](str(directory), **options)}
    except AccelError as error:
        return error.exit_code, {"error": str(error)}


@pytest.fixture
def project(handmade, tmp_path):
    """Return a function that writes checkpoints of the steps 0, 10, 20, ..."""

    def write(count):
        for number in range(count):
            path = tmp_path / "checkpoints" / f"checkpoint_{number}"
            model = {"w": torch.full((64,), float(number)), "b": torch.ones(3).half()}
            handmade.write(path, {"model": model}, cuts={"model/w": (2,)}, step=10 * number)
        return tmp_path / "checkpoints"

    return write


def names(paths):
    return [path.rsplit("/", 1)[1] for path in paths]


def test_list_contains_all_checkpoints_by_number_with_their_problems(project, tmp_path):
    folder = project(12)
    (folder / "checkpoint_3" / "model-0.safetensors").write_bytes(b"short")
    (folder / "checkpoint_5" / "checkpoint.json").unlink()
    (folder / ".checkpoint_12.saving-c3").mkdir()
    (folder / "notes").mkdir()
    for directory in (tmp_path, folder):
        code, output = run_command("list", directory)
        assert code == 0
        entries = output["result"]["checkpoints"]
        assert names(entry["path"] for entry in entries) == [f"checkpoint_{number}" for number in range(12)]
        problems = {entry["number"]: entry["problem"] for entry in entries if entry["problem"]}
        assert set(problems) == {3, 5}
        assert "has 5 bytes and should have" in problems[3]
        assert "has no checkpoint.json" in problems[5]
        assert entries[11]["step"] == 110
        assert names(output["result"]["leftovers"]) == [".checkpoint_12.saving-c3"]


def test_a_checkpoint_that_a_crash_left_unrenamed_is_listed_by_its_name(project):
    folder = project(2)
    (folder / "checkpoint_1").rename(folder / ".checkpoint_1.saving-a1")
    entries = run_command("list", folder)[1]["result"]["checkpoints"]
    assert names(entry["path"] for entry in entries) == ["checkpoint_0", "checkpoint_1"]
    assert entries[1]["location"].endswith(".checkpoint_1.saving-a1")
    assert run_command("verify", folder)[1]["result"]["complete"]


def test_a_checkpoint_of_accelerate_is_listed_as_such_and_not_verified(tmp_path):
    path = tmp_path / "checkpoints" / "checkpoint_0"
    path.mkdir(parents=True)
    for name in ("model.safetensors", "optimizer.bin", "random_states_0.pkl"):
        (path / name).write_bytes(b"x")
    (entry,) = run_command("list", tmp_path)[1]["result"]["checkpoints"]
    assert entry["written_by"] == "accelerate"
    for command in ("verify", "show"):
        code, output = run_command(command, path)
        assert code == 2
        assert "was written by Accelerate" in output["error"]


def test_verify_detects_a_damaged_byte_anywhere(project, handmade):
    folder = project(1)
    path = folder / "checkpoint_0"
    assert run_command("verify", folder)[1]["result"]["complete"]
    for file in sorted(path.glob("*.safetensors")):
        original = file.read_bytes()
        for at in range(0, len(original), 7):
            handmade.flip(file, at)
            code, output = run_command("verify", path)
            assert code == 0
            (problem,) = output["result"]["problems"]
            assert str(file) in problem
            assert "is damaged" in problem
            file.write_bytes(original)


def test_verify_names_a_damaged_tensor_and_the_last_complete_checkpoint(project, handmade):
    folder = project(4)
    handmade.flip(folder / "checkpoint_3" / "model-1.safetensors", -1)
    handmade.flip(folder / "checkpoint_2" / "model-2.safetensors", 20)
    result = run_command("verify", folder)[1]["result"]
    assert not result["complete"]
    assert result["problems"] == [
        f"{folder}/checkpoint_3/model-1.safetensors is damaged: model/w does not have its checksum"
    ]
    assert result["earlier"]["path"] == f"{folder}/checkpoint_1"


def test_verify_names_a_missing_file(project):
    folder = project(2)
    (folder / "checkpoint_1" / "model-0.safetensors").unlink()
    (problem,) = run_command("verify", folder)[1]["result"]["problems"]
    assert "model-0.safetensors is missing from the checkpoint" in problem


def test_verify_lists_untracked_files_without_damage(project):
    folder = project(1)
    (folder / "checkpoint_0" / "notes.txt").write_text("mine")
    result = run_command("verify", folder)[1]["result"]
    assert result["complete"]
    assert result["untracked"] == ["notes.txt"]


def test_show_lists_items_and_chunks_of_tensors(project):
    folder = project(2)
    result = run_command("show", folder, tensors=True)[1]["result"]
    (item,) = result["items"]
    assert (result["step"], result["world_size"]) == (10, 1)
    assert (item["name"], item["tensors"], item["dtypes"]) == ("model", 2, {"float32": 256, "float16": 6})
    assert [chunk["offsets"] for chunk in result["tensors"]["model/w"]["chunks"]] == [(0,), (32,)]


def test_show_and_export_skip_a_damaged_checkpoint_and_report_it(project, tmp_path):
    folder = project(3)
    (folder / "checkpoint_2" / "checkpoint.json").write_text("{")
    for command, options in (("show", {}), ("export", {"output": str(tmp_path / "m.safetensors")})):
        result = run_command(command, folder, **options)[1]["result"]
        assert names([result["path"]]) == ["checkpoint_1"]
        (skipped,) = result["skipped"]
        assert "checkpoint_2/checkpoint.json is damaged" in skipped


def test_prune_keeps_the_newest_complete_checkpoints_and_removes_leftovers(project):
    folder = project(6)
    (folder / "checkpoint_5" / "checkpoint.json").unlink()
    (folder / ".checkpoint_1.saving-a1").mkdir()
    (folder / ".checkpoint_6.saving-b2").mkdir()
    before = sorted(path.name for path in folder.iterdir())
    result = run_command("prune", folder, keep=2, now=False)[1]["result"]
    assert names(entry["path"] for entry in result["removed"]) == [
        "checkpoint_0",
        "checkpoint_1",
        "checkpoint_2",
    ]
    assert sorted(path.name for path in folder.iterdir()) == before
    assert run_command("prune", folder, keep=2, now=True)[0] == 0
    # A directory with a higher number may be a running save.
    remaining = sorted(path.name for path in folder.iterdir())
    assert remaining == [".checkpoint_6.saving-b2", "checkpoint_3", "checkpoint_4", "checkpoint_5"]


def test_prune_removes_nothing_if_all_kept_checkpoints_are_damaged(project, handmade):
    folder = project(3)
    handmade.flip(folder / "checkpoint_2" / "model-0.safetensors", -1)
    code, output = run_command("prune", folder, keep=1, now=True)
    assert code == 1
    assert "Nothing was removed" in output["error"]
    assert len(list(folder.iterdir())) == 3
    assert run_command("prune", folder, keep=2, now=True)[0] == 0
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint_1", "checkpoint_2"]


def test_an_invalid_request_and_damage_have_different_exit_codes(project, tmp_path):
    assert run_command("list", tmp_path / "nowhere")[0] == 2
    assert run_command("show", tmp_path)[0] == 2
    folder = project(1)
    assert run_command("export", folder, output=str(tmp_path / "m"), item="none")[0] == 2
    (folder / "checkpoint_0" / "checkpoint.json").write_text("{}")
    assert run_command("show", folder)[0] == 1
    shutil.rmtree(folder / "checkpoint_0")
    assert run_command("show", folder)[0] == 2
