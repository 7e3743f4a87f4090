"""The tracker that writes JSON lines."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_runtime import Accelerator
from accel_runtime.tracking.jsonl import JSONLTracker


@pytest.fixture
def tracker(tmp_path):
    tracker = JSONLTracker("project", str(tmp_path / "logs"))
    tracker.start()
    yield tracker
    tracker.finish()


def read_lines(tracker):
    def refuse(text):
        raise AssertionError(f"{text} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in tracker.path.read_text().splitlines()]


def test_each_log_call_writes_a_line_with_step_and_time(tracker):
    before = time.time()
    tracker.store_init_configuration({"lr": 0.1})
    tracker.log({"loss": 0.5}, step=3)
    tracker.log({"loss": 0.25})
    config, first, second = read_lines(tracker)
    assert config["config"] == {"lr": 0.1}
    assert (first["step"], first["values"]) == (3, {"loss": 0.5})
    assert (second["step"], second["values"]) == (None, {"loss": 0.25})
    assert before <= config["time"] <= first["time"] <= second["time"] <= time.time()


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (torch.tensor(0.5), 0.5), (torch.tensor([7]), 7), (torch.tensor(1.5, dtype=torch.bfloat16), 1.5),
        (torch.ones(2, 2, requires_grad=True), [[1, 1], [1, 1]]), (np.float32(0.25), 0.25), (np.int64(3), 3),
        (np.bool_(True), True), (np.arange(3), [0, 1, 2]), (None, None), (True, True), ("text", "text"),
        ({"a": {"b": torch.tensor(1)}}, {"a": {"b": 1}}), ((1, [2]), [1, [2]]), (Path("a/b"), "a/b"),
        (math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity"), (torch.tensor(math.nan), "NaN"),
    ],
)  # fmt: skip
def test_values_are_converted_to_json(tracker, value, written):
    tracker.log({"x": value})
    assert read_lines(tracker)[0]["values"] == {"x": written}


def test_a_value_without_a_json_form_is_left_out_with_one_warning(tracker, caplog):
    for _ in range(2):
        tracker.log({"loss": 1, "thing": object()})
    assert [line["values"] for line in read_lines(tracker)] == [{"loss": 1}] * 2
    assert [record.message for record in caplog.records] == [
        "[RANK 0] tracker 'jsonl' does not record 'thing': it does not support object"
    ]


def test_a_run_is_appended_after_an_incomplete_line(tmp_path):
    path = tmp_path / "project.jsonl"
    path.write_text('{"values": {"loss": 1}}\n{"val')
    tracker = JSONLTracker("project", str(tmp_path))
    tracker.start()
    tracker.log({"loss": 2})
    tracker.finish()
    first, torn, last = path.read_text().splitlines()
    assert (json.loads(first)["values"], torn, json.loads(last)["values"]) == (
        {"loss": 1},
        '{"val',
        {"loss": 2},
    )


@given(
    st.dictionaries(
        st.text(), st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False)
    )
)  # fmt: skip
def test_plain_values_are_read_back_unchanged(tmp_path_factory, values):
    tracker = JSONLTracker("project", str(tmp_path_factory.mktemp("logs")))
    tracker.start()
    tracker.log(values, step=0)
    tracker.finish()
    assert read_lines(tracker)[0]["values"] == values


def test_the_accelerator_writes_the_file_to_the_logging_directory(tmp_path):
    accelerator = Accelerator(log_with="jsonl", project_dir=tmp_path)
    accelerator.init_trackers("project")
    accelerator.log({"loss": torch.tensor(1.0)}, step=np.int64(2))
    accelerator.end_training()
    (line,) = (tmp_path / "project.jsonl").read_text().splitlines()
    assert json.loads(line)["step"] == 2
