"""Which checkpoints of a Trainer are complete, and the step after which all processes stop."""

import json
import os
import signal

import pytest
import torch
from safetensors.torch import save_file

transformers = pytest.importorskip("accel_runtime.transformers")
pytestmark = pytest.mark.slow  # the import of Transformers


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint as a Trainer writes it."""
    path = tmp_path / "checkpoint-20"
    (path / "sub").mkdir(parents=True)
    save_file({"a": torch.ones(8), "b": torch.ones(3)}, path / "model.safetensors", {"format": "pt"})
    save_file({}, path / "sub" / "empty.safetensors")
    torch.save({"state": torch.ones(4)}, path / "optimizer.pt")
    torch.save({"python": 1}, path / "rng_state_0.pth")
    (path / "trainer_state.json").write_text('{"global_step": 20}')
    return path


def find_damage(path):
    return transformers._find_damage(path, transformers._read_mark(path))


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.pt", "rng_state_0.pth", "trainer_state.json"]
)
@pytest.mark.parametrize("is_marked", [True, False], ids=["marked", "of a Trainer alone"])
@pytest.mark.parametrize("left", [0, 5, -1])
def test_a_truncated_file_is_found_with_a_mark_and_without(checkpoint, name, is_marked, left):
    if is_marked:
        transformers._write_mark(checkpoint, {"launch": "x"})
    assert find_damage(checkpoint) == ""
    data = (checkpoint / name).read_bytes()
    (checkpoint / name).write_bytes(data[:left])
    assert name in find_damage(checkpoint)


def test_a_missing_file_is_found_by_the_mark(checkpoint):
    transformers._write_mark(checkpoint, {})
    (checkpoint / "sub" / "empty.safetensors").unlink()
    assert find_damage(checkpoint) == "sub/empty.safetensors is missing or has another size"


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"run": 1, "files": {}}', '{"run": {}, "files": {"a": "b"}}']
)
def test_a_mark_that_is_not_one_is_as_none(checkpoint, text):
    (checkpoint / "accel.json").write_text(text)
    assert transformers._read_mark(checkpoint) is None
    assert find_damage(checkpoint) == ""


def test_a_mark_is_written_at_once_and_has_the_run(checkpoint):
    transformers._write_mark(checkpoint, {"launch": "x"})
    mark = json.loads((checkpoint / "accel.json").read_text())
    assert (mark["version"], mark["run"]) == (1, {"launch": "x"})
    assert mark["files"]["model.safetensors"] == (checkpoint / "model.safetensors").stat().st_size
    assert not list(checkpoint.glob("*.new"))


def test_a_mark_that_cannot_be_written_is_a_warning(checkpoint, caplog):
    (checkpoint / "accel.json").mkdir()
    transformers._write_mark(checkpoint, {})
    assert "cannot be marked as complete" in caplog.text


def test_checkpoints_are_listed_by_their_numbers(tmp_path):
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-x", "other-3"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-11").write_text("a file")
    assert [path.name for path in transformers._list_checkpoints(tmp_path)] == [
        "checkpoint-9",
        "checkpoint-10",
    ]
    assert transformers._list_checkpoints(tmp_path / "none") == []


@pytest.mark.parametrize("receiver", [0, 2])
def test_all_ranks_stop_after_the_same_step(ranks, receiver):
    """Ranks that train together are at most one step apart."""

    def train(receiver):
        from torch import distributed as dist

        from accel_runtime import Accelerator

        rank = Accelerator().process_index
        before = signal.getsignal(signal.SIGUSR1)  # the handler of an earlier test, perhaps
        preemption = transformers._Preemption()
        stops = []
        for _ in range(2):  # two trainings of one process
            preemption.begin()
            for step in range(1, 20):
                if dist.is_initialized():
                    dist.all_reduce(torch.ones(1))
                if rank == min(receiver, ranks_count() - 1) and step == 5:
                    os.kill(os.getpid(), signal.SIGUSR1)
                if preemption.check(step):
                    stops.append(step)
                    break
            preemption.end()
        return stops, signal.getsignal(signal.SIGUSR1) == before

    def ranks_count():
        return int(os.environ.get("WORLD_SIZE", "1"))

    results = ranks.run(train, receiver)
    assert results == [results[0]] * ranks.size
    assert results[0] == ([5, 5] if ranks.size == 1 else [7, 7], True)
