"""The files that the main process writes for its launcher: logged values, the description, checkpoints."""

from __future__ import annotations

import errno
import io
import json
import logging
import math
import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.processes.rank_hooks import forget_progress, watch
from torch.utils.data import DataLoader, Dataset

from accel_runtime import Accelerator, ProjectConfiguration
from accel_runtime.environment.settings import RANK_FOLDER
from accel_runtime.observe import recording
from accel_runtime.observe.heartbeat import Heartbeat
from accel_runtime.observe.recording import BoundedLog


@pytest.fixture
def folder(tmp_path):
    """The folder of a rank that a launcher watches."""
    path = tmp_path / "rank_0"
    path.mkdir()
    with watch(path) as rank_folder:
        yield rank_folder


def read_lines(path):
    def refuse(text):
        raise AssertionError(f"{text} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_logged_values_are_recorded_without_any_tracker(folder):
    accelerator = Accelerator()
    accelerator.log({"loss": torch.tensor(0.5), "lr": np.float32(0.25), "phase": "warmup"}, step=np.int64(3))
    accelerator.log({"loss": 1})
    first, second = read_lines(folder.metrics)
    assert (first["step"], first["values"]) == (3, {"loss": 0.5, "lr": 0.25, "phase": "warmup"})
    assert (second["step"], second["values"]) == (None, {"loss": 1})
    assert first["time"] <= second["time"]


@pytest.mark.parametrize(
    ("value", "recorded"),
    [
        (torch.tensor([7]), {"x": 7}), (torch.ones(1, requires_grad=True), {"x": 1.0}), (np.float64(2.5), {"x": 2.5}),
        (np.bool_(True), {"x": True}), (math.nan, {"x": "NaN"}), (torch.tensor(-math.inf), {"x": "-Infinity"}),
        ({"a": 1, "b": {"c": 2}}, {"x/a": 1, "x/b/c": 2}), ("t" * 2000, {"x": "t" * 1000}),
        (torch.ones(2), {}), ([1, 2], {}), (None, {}), (object(), {}), (torch.ones(1, device="meta"), {}), (1j, {}),
    ],
)  # fmt: skip
def test_numbers_and_text_are_kept_and_other_values_left_out_silently(folder, caplog, value, recorded):
    Accelerator().log({"x": value})
    assert read_lines(folder.metrics)[0]["values"] == recorded
    assert not caplog.records


def test_a_tracker_receives_all_values_and_its_file_is_recorded_first(folder, tmp_path):
    accelerator = Accelerator(log_with="jsonl", project_dir=tmp_path / "project")
    accelerator.init_trackers("run")
    accelerator.log({"loss": 0.5, "histogram": [1, 2]}, step=1)
    accelerator.end_training()
    tracked = tmp_path / "project" / "run.jsonl"
    first, second = read_lines(folder.metrics)
    assert first["jsonl"] == str(tracked)
    assert second["values"] == {"loss": 0.5}
    assert read_lines(tracked)[0]["values"] == {"loss": 0.5, "histogram": [1, 2]}


def test_nothing_is_recorded_without_a_launcher(tmp_path, monkeypatch):
    monkeypatch.delenv(RANK_FOLDER, raising=False)
    monkeypatch.chdir(tmp_path)
    with forget_progress():
        accelerator = Accelerator()
        accelerator.prepare(torch.nn.Linear(2, 1))
        accelerator.log({"loss": 1})
        accelerator.save_state(str(tmp_path / "saved"))
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_a_process_that_the_script_starts_records_nothing(folder):
    Heartbeat(folder.beat)  # of the parent
    Accelerator().log({"loss": 1})
    assert not folder.metrics.exists()


def test_only_the_main_process_records(pair, tmp_path):
    def train(path):
        rank = int(os.environ["RANK"])
        folder = path / f"rank_{rank}"
        folder.mkdir()
        with watch(folder):
            accelerator = Accelerator()
            accelerator.prepare(torch.nn.Linear(2, 1))
            accelerator.log({"loss": 1})
            accelerator.save_state(str(path / "saved"))
        return sorted(file.name for file in folder.iterdir())

    assert pair.run(train, tmp_path) == [
        ["beat", "checkpoints.jsonl", "description.json", "metrics.jsonl"],
        ["beat"],
    ]


def test_a_full_disk_is_no_error_and_the_next_lines_are_complete(tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "_RETRY_S", 0.0)
    log = BoundedLog(tmp_path / "lines.jsonl")
    path = log._path

    class FullFile(io.FileIO):
        """A file on a disk with room for a number of bytes."""

        room = 0

        def write(self, line):
            if not self.room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(line[: self.room])

    class FullDisk:
        def __init__(self, room):
            self._room = room

        def open(self, mode, buffering):
            assert buffering == 0
            file = FullFile(path, mode)
            file.room = self._room
            return file

    for number, disk in enumerate((path, FullDisk(0), FullDisk(5), path)):
        log._path = disk
        log.append("kind", lambda number=number: {"number": number})
    assert [line["number"] for line in read_lines(path)] == [0, 3]


def test_a_removed_run_folder_is_no_error(folder):
    accelerator = Accelerator()
    for file in folder.path.iterdir():
        file.unlink()
    folder.path.rmdir()
    accelerator.log({"loss": 1})
    accelerator.prepare(torch.nn.Linear(2, 1))


@given(calls=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 60)), max_size=12))
def test_a_full_file_keeps_every_nth_line_of_each_kind_and_rare_kinds_longest(calls, tmp_path_factory):
    path = tmp_path_factory.mktemp("rank") / "lines.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording, "MAX_LINES", 16)
        log, counts = BoundedLog(path), dict.fromkeys("abc", 0)
        for kind, times in calls:
            for _ in range(times):
                log.append(kind, lambda kind=kind: {"kind": kind, "number": counts[kind]})
                counts[kind] += 1
            lines = read_lines(path)
            assert len(lines) <= 16
            for each in "abc":
                numbers_kept = [line["number"] for line in lines if line["kind"] == each]
                stride = log._series[each].stride if each in log._series else 1
                assert numbers_kept == list(range(0, counts[each], stride))
            if sum(counts.values()) > 16:
                assert len(lines) >= 4
    assert list(path.parent.iterdir()) in ([], [path])


def test_kinds_without_end_do_not_grow_the_file(tmp_path):
    log = BoundedLog(tmp_path / "lines.jsonl")
    for number in range(20000):
        log.append(number, lambda number=number: {"number": number})
    lines = read_lines(tmp_path / "lines.jsonl")
    assert recording.MAX_LINES // 4 < len(lines) <= recording.MAX_LINES
    assert lines[-1]["number"] > 15000, "the newest are among them"


def test_large_lines_are_thinned_by_their_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "_MAX_BYTES", 10_000)
    log = BoundedLog(tmp_path / "lines.jsonl")
    for number in range(200):
        log.append("large", lambda number=number: {"number": number, "text": "x" * 990})
    assert (tmp_path / "lines.jsonl").stat().st_size <= 10_000
    assert len(read_lines(tmp_path / "lines.jsonl")) >= 4


def test_the_description_has_what_was_prepared_last(folder):
    accelerator = Accelerator()
    accelerator.prepare(torch.nn.Linear(2, 1))
    loader = accelerator.prepare(DataLoader(torch.ones(6, 2), batch_size=2))
    description = json.loads(folder.description.read_text())
    assert description["text"] == str(accelerator.describe())
    assert description["data"]["models"][0]["parameters"] == 3
    assert description["data"]["loaders"][0]["steps"] == len(loader) == 3


def test_a_loader_that_is_prepared_during_the_training_does_not_describe_the_run_again(folder):
    accelerator = Accelerator()
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    before = folder.description.read_text()
    loader = accelerator.prepare(DataLoader(torch.ones(6, 2)))
    assert folder.description.read_text() == before
    accelerator.prepare(torch.nn.Linear(5, 1))
    description = json.loads(folder.description.read_text())["data"]
    assert [model["parameters"] for model in description["models"]] == [3, 6]
    assert description["loaders"][0]["steps"] == len(loader)


def test_a_loader_like_the_described_one_does_not_describe_the_run_again(folder):
    accelerator = Accelerator()
    loader = DataLoader(torch.ones(6, 2), batch_size=2)
    accelerator.prepare(loader)
    before = folder.description.stat().st_ino
    for _ in range(3):
        accelerator.prepare(loader)
    assert folder.description.stat().st_ino == before  # each write makes a file of its own
    kept = [accelerator.prepare(loader), accelerator.prepare(DataLoader(torch.ones(9, 2)))]
    accelerator.prepare(torch.nn.Linear(2, 1))
    description = json.loads(folder.description.read_text())["data"]
    assert [loader["samples"] for loader in description["loaders"]] == [6, 9]
    accelerator.free_memory(kept)
    accelerator.prepare(torch.nn.Linear(5, 1))
    description = json.loads(folder.description.read_text())["data"]
    assert [model["parameters"] for model in description["models"]] == [6]


class Endless(Dataset):
    """A dataset whose length raises an error from its fourth call on."""

    calls = 0

    def __getitem__(self, index):
        return torch.ones(2)

    def __len__(self):
        self.calls += 1
        if self.calls > 3:
            raise ZeroDivisionError
        return 4


def test_a_dataset_that_cannot_be_described_is_no_error(folder):
    dataset = Endless()
    loader = DataLoader(dataset, sampler=range(4))
    dataset.calls = 3
    loader = Accelerator().prepare(loader)
    assert len(list(loader)) == 4


def test_checkpoints_are_recorded_once_they_are_complete(folder, tmp_path):
    project = ProjectConfiguration(project_dir=tmp_path / "project", automatic_checkpoint_naming=True)
    accelerator = Accelerator(project_config=project)
    accelerator.prepare(torch.nn.Linear(2, 1))
    first = accelerator.save_state()
    second = accelerator.save_state(async_save=True)
    accelerator.wait_for_checkpoint()
    accelerator.load_state(first)
    accelerator.resume(second)
    lines = read_lines(folder.checkpoints)
    assert [(line["kind"], line["path"]) for line in lines] == [
        ("save", first), ("save", second), ("load", first), ("load", second)
    ]  # fmt: skip
    assert all(line["seconds"] >= 0 and line["time"] > 1e9 for line in lines)


def test_a_checkpoint_that_fails_is_not_recorded(folder, tmp_path):
    accelerator = Accelerator()
    accelerator.prepare(torch.nn.Linear(2, 1))
    (tmp_path / "file").touch()
    logging.disable(logging.CRITICAL)
    try:
        with pytest.raises(Exception, match="file"):
            accelerator.save_state(str(tmp_path / "file" / "saved"))
    finally:
        logging.disable(logging.NOTSET)
    assert not folder.checkpoints.exists()
