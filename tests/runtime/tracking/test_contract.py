"""Every tracker satisfies the contract of `tracking/base.py`; and the calls of each package, and that the package has them.

A new tracker needs an entry in `READERS`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import subprocess
import sys
from argparse import Namespace
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
import yaml

from accel_runtime.environment.topology import Topology
from accel_runtime.foundation.logged_values import flatten_values
from accel_runtime.tracking import TRACKERS, Trackers

PACKAGED = sorted(set(TRACKERS) - {"jsonl", "tensorboard"})

# The rules of all trackers ---------------------------------------------------------------


class Recorded(NamedTuple):
    """The data of a run, as its tracker has recorded them."""

    config: dict
    points: list
    """Name, step and value of each number."""
    is_ended: bool


def pick(calls, name):
    """Return the arguments of the calls of a function."""
    return [arguments for called, arguments in calls if called == name]


def read_run(calls, argument):
    """Read the calls of a package whose runs record mappings."""
    points = [
        (name, call["step"], value)
        for call in pick(calls, "Run.log")
        for name, value in flatten_values(call[argument]).items()
    ]
    return Recorded(pick(calls, "config.update")[0], points, pick(calls, "Run.finish") == [{}])


def read_aim(calls, _):
    points = [(call["name"], call["step"], call["value"]) for call in pick(calls, "Run.track")]
    return Recorded(pick(calls, "Run[hparams] =")[0], points, pick(calls, "Run.close") == [{}])


def read_clearml(calls, _):
    points = [
        (call["title"], call["iteration"], call["value"]) for call in pick(calls, "Logger.report_scalar")
    ]
    config = pick(calls, "Task.connect_configuration")[0]["configuration"]
    return Recorded(config, points, pick(calls, "Task.close") == [{}])


def read_comet(calls, _):
    points = [
        (call["name"], call["step"], call["value"]) for call in pick(calls, "CometExperiment.log_metric")
    ]
    config = pick(calls, "CometExperiment.log_parameters")[0]["parameters"]
    return Recorded(config, points, pick(calls, "CometExperiment.end") == [{}])


def read_dvclive(calls, _):
    (step,) = set(pick(calls, "Live.step ="))
    points = [(call["name"], step, call["val"]) for call in pick(calls, "Live.log_metric")]
    return Recorded(pick(calls, "Live.log_params")[0]["params"], points, pick(calls, "Live.end") == [{}])


def read_mlflow(calls, _):
    points = [
        (name, call["step"], value)
        for call in pick(calls, "log_metrics")
        for name, value in call["metrics"].items()
    ]
    config = {name: value for call in pick(calls, "log_params") for name, value in call["params"].items()}
    return Recorded(config, points, pick(calls, "end_run") == [{}])


def read_jsonl(tracker, _):
    config, *lines = map(json.loads, tracker.path.read_text().splitlines())
    points = [
        (name, line["step"], value)
        for line in lines
        for name, value in flatten_values(line["values"]).items()
    ]
    return Recorded(config["config"], points, tracker.tracker.closed)


def read_tensorboard(tracker, _):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    points = []
    for folder, name in ((tracker.logging_dir, "{}"), (tracker.logging_dir / "deep_x", "{}/x")):
        if not folder.exists():
            continue
        events = EventAccumulator(str(folder)).Reload()
        points += [
            (name.format(tag), event.step, event.value)
            for tag in events.Tags()["scalars"]
            for event in events.Scalars(tag)
        ]
    (file,) = Path(tracker.logging_dir).glob("*/hparams.yml")
    return Recorded(yaml.safe_load(file.read_text()), points, tracker.writer.file_writer is None)


READERS = {
    "aim": read_aim,
    "clearml": read_clearml,
    "comet_ml": read_comet,
    "dvclive": read_dvclive,
    "jsonl": read_jsonl,
    "mlflow": read_mlflow,
    "swanlab": lambda calls, _: read_run(calls, "data"),
    "tensorboard": read_tensorboard,
    "trackio": lambda calls, _: read_run(calls, "metrics"),
    "wandb": lambda calls, _: read_run(calls, "data"),
}
"""For each tracker, a function that reads what it has recorded: from the calls of the stub of its package, or from its files."""
NUMBERS = {"loss": torch.tensor(0.5), "acc": np.float32(0.25), "deep": {"x": torch.tensor(2)}}
CONFIG = {"lr": 0.5, "deep": {"a": 1}, "api_key": "hush"}


@pytest.fixture(params=READERS)
def name(request):
    """The name of each tracker in turn."""
    return request.param


@pytest.fixture
def record(name, stub, tmp_path):
    """Return a function that logs values in a run, and returns what the tracker has recorded."""

    def run(*values, step=3, config=CONFIG):
        calls = stub(name) if name in PACKAGED else None
        trackers = Trackers(name, tmp_path, Topology())
        trackers.begin("project", config)
        (tracker,) = trackers.active
        for each in values:
            trackers.log(each, step)
        trackers.end()
        trackers.log({"loss": 9}, step)
        return READERS[name](tracker if calls is None else calls, tracker)

    return run


def test_every_tracker_has_a_reader():
    assert sorted(READERS) == sorted(TRACKERS)


def test_the_class_of_a_tracker_is_as_its_entry_describes_it(name, stub):
    if name in PACKAGED:
        stub(name)
    entry = TRACKERS[name]
    assert (entry.load().name, entry.load().requires_logging_directory) == (name, entry.directory)


def test_numbers_are_recorded_as_plain_numbers_with_their_step_until_the_end(record):
    recorded = record(NUMBERS)
    assert sorted(recorded.points) == [("acc", 3, 0.25), ("deep/x", 3, 2), ("loss", 3, 0.5)]
    assert {type(value) for _, _, value in recorded.points} <= {int, float}
    assert recorded.is_ended


def test_the_configuration_is_recorded_without_secrets(record):
    assert flatten_values(record(NUMBERS).config) == {"lr": 0.5, "deep/a": 1, "api_key": "***"}


class Color(Enum):
    RED = "red"


@dataclass
class Settings:
    lr: float = 0.5
    hub_token: str = "hush"


ODD_CONFIG = {
    1: "one", "1": "other", (1, 2): 3, None: 4, Color.RED: 6, "a": {2: {3: "deep"}, "b": 1}, "a/b": 2, "": 7,
    "path": Path("x"), "enum": Color.RED, "number": np.float32(0.5), "flag": np.bool_(True), "rows": np.arange(3),
    "tensor": torch.tensor(2), "meta": torch.empty(2, device="meta"), "dtype": torch.bfloat16, "nan": float("nan"),
    "list": [1, None, Path("y"), {4: np.int64(5)}, {"token": "hush"}], "settings": Settings(), "space": Namespace(x=1),
    "big": 2**70, "complex": 1j, "bytes": b"z", "empty": {}, "type": Path, "text": np.str_("t"),
}  # fmt: skip
"""Names and values that a format of settings may not support."""


def list_names(values):
    """Return the names in nested mappings and lists."""
    if isinstance(values, dict):
        return [*values, *(name for value in values.values() for name in list_names(value))]
    return [name for value in values for name in list_names(value)] if isinstance(values, list) else []


def test_a_configuration_of_any_names_and_values_is_recorded(record, name, caplog):
    config = record(NUMBERS, config=ODD_CONFIG).config
    assert "failed" not in caplog.text
    assert {type(each) for each in list_names(config)} == {str}
    assert "hush" not in json.dumps(config, allow_nan=False)
    flat = flatten_values(config)
    left_out = caplog.text.count("does not record")
    assert len(flat) + left_out == 28, flat
    assert not left_out or name == "mlflow", "MLflow supports 20 characters in the tests"
    assert (str(flat["1"]), str(flat["1_2"]), flat["a/2/3"]) == ("other", "one", "deep")


def test_large_arrays_of_a_configuration_are_named(record, caplog):
    flat = flatten_values(record(NUMBERS, config={"rows": np.zeros(2000), "lr": 0.5}).config)
    assert str(flat.pop("lr")) == "0.5"
    assert not flat
    assert "does not record 'rows': it has more than 1024 elements" in caplog.text


def test_numbers_with_names_that_are_not_text_are_recorded(record, caplog):
    points = sorted(record({1: 0.5, None: 1.5}).points)
    assert points == [("1", 3, 0.5), ("None", 3, 1.5)]
    assert "failed" not in caplog.text


def test_values_that_a_tracker_does_not_support_are_named_once_and_hide_no_number(record, caplog):
    mixed = {"loss": 0.5, "note": "good", "none": None, "rows": np.ones(3), "thing": object()}
    points = [point for point in record(mixed, mixed).points if point[0] == "loss"]
    assert points == [("loss", 3, 0.5)] * 2
    assert "failed" not in caplog.text
    for left_out in ("note", "none", "rows", "thing"):
        assert caplog.text.count(f"does not record {left_out!r}") <= 1


def test_the_methods_of_a_tracker_do_nothing_on_other_ranks(name, stub, tmp_path, monkeypatch):
    ranks = {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}
    for variable, value in (ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}).items():
        monkeypatch.setenv(variable, str(value))
    calls, entry = stub(name) if name in PACKAGED else [], TRACKERS[name]
    folder = tmp_path / "logs"
    tracker = entry.load()("project", *([str(folder)] if entry.directory else []))
    tracker.start()
    tracker.store_init_configuration(CONFIG)
    tracker.log(NUMBERS, step=3)
    tracker.finish()
    assert calls == []
    assert not folder.exists()


# The calls of each package ---------------------------------------------------------------

VALUES = {
    "loss": torch.tensor(0.5),
    "train_acc": np.float32(0.25),
    "note": "good",
    "none": None,
    "deep": {"x": torch.tensor(2)},
}
PLAIN = {"loss": 0.5, "train_acc": 0.25, "note": "good", "none": None, "deep": {"x": 2}}
FLAT = {"loss": 0.5, "train_acc": 0.25, "note": "good", "deep/x": 2}


def start_and_log(package, stub, tmp_path, config=None, steps=(3,), **init):
    calls = stub(package)
    trackers = Trackers(package, tmp_path, Topology())
    trackers.begin("project", config, {package: init})
    assert [tracker.name for tracker in trackers.active] == [package], "it started"
    for step in steps:
        trackers.log(VALUES, step)
    return trackers, calls


def test_wandb_receives_plain_values_with_the_step(stub, tmp_path):
    trackers, calls = start_and_log("wandb", stub, tmp_path, {"lr": 0.1}, mode="offline")
    trackers.find("wandb").log_images({"faces": [1, 2]}, step=4)
    trackers.find("wandb").log_table("t", columns=["a"], data=[[1]], step=4)
    trackers.end()
    assert calls[:3] == [
        ("init", {"project": "project", "mode": "offline"}),
        ("config.update", {"lr": 0.1}),
        ("Run.log", {"data": PLAIN, "step": 3}),
    ]
    images = [call for call in calls[3:] if call[0] == "Run.log"]
    assert images[0][1] == {"data": {"faces": [("Image", 1), ("Image", 2)]}, "step": 4}
    assert ("Table", {"columns": ["a"], "data": [[1]], "dataframe": None}) in calls
    assert calls[-1] == ("Run.finish", {})


def test_trackio_receives_plain_values_with_the_step(stub, tmp_path):
    trackers, calls = start_and_log("trackio", stub, tmp_path, {"lr": 0.1}, name="first")
    trackers.end()
    assert calls == [
        ("init", {"project": "project", "name": "first"}),
        ("config.update", {"lr": 0.1}),
        ("Run.log", {"metrics": PLAIN, "step": 3}),
        ("Run.finish", {}),
    ]


def test_swanlab_receives_flat_values_and_text_objects(stub, tmp_path):
    trackers, calls = start_and_log("swanlab", stub, tmp_path, {"lr": 0.1}, mode="offline")
    trackers.find("swanlab").log_images({"faces": [1]}, step=4)
    trackers.end()
    assert calls[0] == ("init", {"project": "project", "mode": "offline"})
    expected = {**FLAT, "note": ("Text", "good")}
    assert ("Run.log", {"data": expected, "step": 3}) in calls
    assert ("Run.log", {"data": {"faces": [("Image", 1)]}, "step": 4}) in calls
    assert calls[-1] == ("Run.finish", {})


def test_comet_receives_metrics_and_other_values(stub, tmp_path):
    trackers, calls = start_and_log("comet_ml", stub, tmp_path, {"a": {"b": 1}}, online=False)
    trackers.end()
    assert calls == [
        ("start", {"project_name": "project", "online": False}),
        ("CometExperiment.log_parameters", {"parameters": {"a/b": 1}}),
        ("CometExperiment.set_step", {"step": 3}),
        ("CometExperiment.log_metric", {"name": "loss", "value": 0.5, "step": 3}),
        ("CometExperiment.log_metric", {"name": "train_acc", "value": 0.25, "step": 3}),
        ("CometExperiment.log_other", {"key": "note", "value": "good"}),
        ("CometExperiment.log_metric", {"name": "deep/x", "value": 2, "step": 3}),
        ("CometExperiment.end", {}),
    ]


def test_aim_receives_single_values_in_the_logging_directory(stub, tmp_path):
    trackers, calls = start_and_log("aim", stub, tmp_path, {"lr": np.float32(0.5)})
    trackers.find("aim").log_images({"face": (1, "smiling")}, step=4, kwargs={"track": {"context": {}}})
    trackers.end()
    assert calls[:3] == [
        ("Run", {"repo": str(tmp_path)}),
        ("Run.name =", "project"),
        ("Run[hparams] =", {"lr": 0.5}),
    ]
    tracked = [call[1] for call in calls if call[0] == "Run.track"]
    assert tracked[0] == {"value": 0.5, "name": "loss", "step": 3}
    assert tracked[2] == {"value": ("Text", "good"), "name": "note", "step": 3}
    assert [each["name"] for each in tracked] == ["loss", "train_acc", "note", "deep/x", "face"]
    assert ("Image", {"image": 1, "caption": "smiling"}) in calls
    assert calls[-1] == ("Run.close", {})


def test_clearml_receives_scalars_in_the_series_of_the_name_prefix(stub, tmp_path):
    trackers, calls = start_and_log("clearml", stub, tmp_path, {"lr": 0.1}, steps=(3, None), tags=["a"])
    trackers.find("clearml").log_images({"eval_face": 1}, step=4)
    trackers.find("clearml").log_table("t", columns=["a"], data=[[1]])
    trackers.end()
    # `current_task` of the stub returns None, so a task is created.
    named = {"project_name": "project", "task_name": "project", "tags": ["a"]}
    assert calls[:2] == [("Task.current_task", {}), ("Task.init", named)]
    scalar = {"title": "acc", "series": "train", "value": 0.25, "iteration": 3}
    assert ("Logger.report_scalar", scalar) in calls
    assert ("Logger.report_single_value", {"name": "train_acc", "value": 0.25}) in calls
    assert ("Logger.report_image", {"title": "face", "series": "eval", "iteration": 4, "image": 1}) in calls
    table = {"title": "t", "series": "train", "iteration": None, "table_plot": [["a"], [1]]}
    assert ("Logger.report_table", table) in calls
    assert calls[-1] == ("Task.close", {})


def test_clearml_variables_override_the_names(stub, tmp_path, monkeypatch):
    monkeypatch.setenv("CLEARML_PROJECT", "theirs")
    _, calls = start_and_log("clearml", stub, tmp_path)
    assert calls[1] == ("Task.init", {"project_name": "theirs", "task_name": "project"})


def test_dvclive_receives_metrics_and_next_step(stub, tmp_path):
    trackers, calls = start_and_log("dvclive", stub, tmp_path, {"lr": 0.1, "none": None}, save_dvc_exp=False)
    trackers.end()
    assert calls[:3] == [
        ("Live", {"save_dvc_exp": False}),
        ("Live.log_params", {"params": {"lr": 0.1}}),
        ("Live.step =", 3),
    ]
    metrics = {call[1]["name"]: call[1]["val"] for call in calls if call[0] == "Live.log_metric"}
    assert metrics == FLAT
    assert calls[-2:] == [("Live.next_step", {}), ("Live.end", {})]


def test_mlflow_receives_numbers_in_batches_of_supported_size(stub, tmp_path, caplog):
    trackers, calls = start_and_log("mlflow", stub, tmp_path, {"a": 1, "b": 2, "c": 3, "long": "x" * 21})
    tracker = trackers.find("mlflow")
    tracker.log_figure("figure", "a.png", save_kwargs={"dpi": 9})
    tracker.log_artifact("file", "there")
    tracker.log_artifacts("folder")
    trackers.end()
    assert calls[:2] == [
        ("get_experiment_by_name", {"name": "project"}),
        ("create_experiment", {"name": "project", "artifact_location": None, "tags": None}),
    ]
    assert [c[1]["params"] for c in calls if c[0] == "log_params"] == [{"a": 1, "b": 2}, {"c": 3}]
    parts = [c[1] for c in calls if c[0] == "log_metrics"]
    assert parts == [
        {"metrics": {"loss": 0.5, "train_acc": 0.25}, "step": 3},
        {"metrics": {"deep/x": 2}, "step": 3},
    ]
    assert ("log_figure", {"figure": "figure", "artifact_file": "a.png", "save_kwargs": {"dpi": 9}}) in calls
    assert calls[-1] == ("end_run", {})
    assert "does not record 'long'" in caplog.text
    assert "does not record 'note'" in caplog.text


def test_mlflow_variables_override_the_arguments(stub, tmp_path, monkeypatch):
    variables = {
        "EXPERIMENT_NAME": "theirs",
        "RUN_ID": "7",
        "TAGS": json.dumps({"a": "b"}),
        "NESTED_RUN": "true",
    }
    for name, value in variables.items():
        monkeypatch.setenv(f"MLFLOW_{name}", value)
    _, calls = start_and_log("mlflow", stub, tmp_path, run_name="mine")
    assert calls[0] == ("get_experiment_by_name", {"name": "theirs"})
    started = dict(calls)["start_run"]
    assert (started["run_id"], started["nested"], started["run_name"]) == ("7", True, "mine")
    assert started["tags"] == {"a": "b"}


@pytest.mark.parametrize("package", PACKAGED)
def test_the_installed_package_has_the_signatures_of_the_stub(package, signatures):
    """In a new process, since these packages have side effects at import."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    check = f"""
import importlib, inspect, json
package = importlib.import_module({package!r})
homes = {{"comet_ml.CometExperiment": "comet_ml.experiment", "swanlab.Run": "swanlab.sdk.internal.run"}}
for path, written in {signatures[package]!r}.items():
    owner = path.partition(".")[0]
    home = importlib.import_module(homes.get({package!r} + "." + owner, {package!r}))
    found = home if hasattr(home, owner) else importlib.import_module({package!r} + ".run")
    for name in path.split("."):
        found = getattr(found, name)
    ours = inspect.signature(eval("lambda " + written + ": None")).parameters
    theirs = inspect.signature(found).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in theirs.values())
    missing = [name for name in ours if name not in theirs and not open_ended]
    assert not missing, (path, missing, str(theirs))
"""
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", check], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr


def test_every_package_has_a_stub(signatures):
    assert sorted(signatures) == PACKAGED
    for table in signatures.values():
        for written in table.values():
            inspect.signature(eval(f"lambda {written}: None"))  # noqa: S307


def test_wandb_records_the_other_values_if_it_rejects_one(stub, tmp_path, caplog, monkeypatch):
    calls = stub("wandb")
    trackers = Trackers("wandb", tmp_path, Topology())
    trackers.begin("project")
    rows = []

    class Run:
        def log(self, data, step=None, commit=None):
            if any(isinstance(value, torch.dtype) for value in data.values()):
                raise TypeError("Object of type dtype is not JSON serializable")
            rows.append((data, step, commit))

    monkeypatch.setattr(trackers.find("wandb"), "run", Run())
    trackers.log({"loss": 0.5, "dtype": torch.bfloat16, "note": "good"}, step=3)
    assert rows == [({"loss": 0.5}, 3, False), ({"note": "good"}, 3, False), ({}, 3, None)]
    assert "tracker 'wandb' does not record 'dtype': it does not support dtype" in caplog.text
    assert calls


def test_mlflow_receives_names_that_it_supports(stub, tmp_path):
    calls = stub("mlflow")
    trackers = Trackers("mlflow", tmp_path, Topology())
    trackers.begin("project", {"a[0]": 1, "a(0)": 2})
    trackers.log({"../x": 0.5, "loss@k": 1.5})
    names = [name for called, call in calls if called == "log_params" for name in call["params"]]
    assert names == ["a_0_", "a_0__2"]
    assert [name for called, call in calls if called == "log_metrics" for name in call["metrics"]] == [
        "_/x",
        "loss_k",
    ]


def test_mlflow_records_the_other_values_if_it_rejects_one(stub, tmp_path, caplog, monkeypatch):
    stub("mlflow")
    trackers = Trackers("mlflow", tmp_path, Topology())
    trackers.begin("project")
    rows = []

    def log_metrics(values, step=None):
        if "bad" in values:
            error = ValueError("invalid")
            error.error_code = "INVALID_PARAMETER_VALUE"
            raise error
        rows.append((values, step))

    module = sys.modules["accel_runtime.extensions.trackers.mlflow"]
    monkeypatch.setattr(module, "mlflow", SimpleNamespace(log_metrics=log_metrics, end_run=lambda: None))
    trackers.log({"bad": 1, "loss": 0.5}, step=3)
    assert rows == [({"loss": 0.5}, 3)]
    assert "does not record 'bad': MLflow rejects its name or value" in caplog.text


def test_clearml_does_not_receive_numbers_that_it_would_replace_by_0(stub, tmp_path, caplog):
    calls = stub("clearml")
    trackers = Trackers("clearml", tmp_path, Topology())
    trackers.begin("project")
    trackers.log({"loss": float("nan"), "acc": 0.5}, step=3)
    assert [call["title"] for call in pick(calls, "Logger.report_scalar")] == ["acc"]
    assert "does not record 'loss': ClearML would store nan" in caplog.text
