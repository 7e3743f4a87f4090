"""Several trackers: their creation on ranks, failures of one of them, and rejected arguments."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

from accel_runtime import Accelerator, GeneralTracker, LoggerType, tracking
from accel_runtime.environment.topology import Topology
from accel_runtime.tracking import (
    TRACKERS,
    Trackers,
    get_available_trackers,
    register_tracker_class,
)
from accel_runtime.tracking.base import BlankTracker


class Mine(GeneralTracker):
    """A tracker of a script for Accelerate."""

    name = "mine"
    requires_logging_directory = False

    def __init__(self, run_name, **kwargs):
        super().__init__()
        self.calls = [("made", run_name, kwargs)]

    @property
    def tracker(self):
        return self.calls

    def start(self):
        self.calls.append("start")

    def store_init_configuration(self, values):
        self.calls.append(("config", values))

    def log(self, values, step=None, **kwargs):
        self.calls.append((values, step, kwargs))

    def finish(self):
        self.calls.append("finish")


class Everywhere(Mine):
    name = "everywhere"
    main_process_only = False


class Broken(Mine):
    """A tracker that fails in the given methods."""

    name = "broken"

    def __init__(self, run_name, at=(), **kwargs):
        super().__init__(run_name, **kwargs)
        self.at = at

    def _fail(self, verb):
        if verb in self.at:
            raise OSError(f"no {verb} at https://user:hush@host/x")

    def start(self):
        self._fail("start")

    def log(self, values, step=None, **kwargs):
        self._fail("log")
        super().log(values, step, **kwargs)

    def finish(self):
        self._fail("finish")


# Values of log_with ------------------------------------------------------------------------


def test_a_tracker_of_a_script_receives_the_calls_of_accelerate():
    tracker = Mine("made by the script")
    accelerator = Accelerator(log_with=tracker)
    accelerator.init_trackers("project", config={"lr": 0.1})
    accelerator.log({"loss": 0.5}, step=3, log_kwargs={"mine": {"commit": True}})
    assert accelerator.trackers == [tracker]
    assert accelerator.get_tracker("mine") is tracker
    assert accelerator.get_tracker("mine", unwrap=True) is tracker.calls
    accelerator.end_training()
    assert tracker.calls == [
        ("made", "made by the script", {}),
        "start",
        ("config", {"lr": 0.1}),
        ({"loss": 0.5}, 3, {"commit": True}),
        "finish",
    ]


@pytest.mark.parametrize("log_with", [Mine, "mine", ["mine", Mine.name]])
def test_a_tracker_class_is_selected_by_class_or_name(log_with):
    trackers = Trackers(log_with, None, Topology())
    trackers.begin("project", init_kwargs={"mine": {"tags": 1}})
    assert [tracker.calls[0] for tracker in trackers.active] == [("made", "project", {"tags": 1})]


def test_names_enums_and_instances_can_be_mixed_without_duplicates(tmp_path):
    tracker = Mine("x")
    requested = ("jsonl", LoggerType.JSONL, tracker, tracker, "tensorboard")
    chosen = Trackers(requested, tmp_path, Topology()).chosen
    assert [choice.name for choice in chosen] == ["jsonl", "mine", "tensorboard"]


def test_all_selects_every_tracker_with_an_installed_package(tmp_path):
    chosen = Trackers(["all", Mine("x")], tmp_path, Topology()).chosen
    assert [choice.name for choice in chosen] == [*get_available_trackers(), "mine"]
    assert {"jsonl", "tensorboard"} <= set(get_available_trackers())


@pytest.mark.parametrize("log_with", [None, [], ()])
def test_calls_without_trackers_do_nothing_silently(log_with, caplog):
    accelerator = Accelerator(log_with=log_with)
    accelerator.log({"loss": 0.5})
    accelerator.init_trackers("project", init_kwargs={"wandb": {"name": "x"}})
    accelerator.log({"loss": 0.5}, log_kwargs={"wandb": {"commit": True}})
    accelerator.get_tracker("wandb", unwrap=True).config.update({"a": 1}).anything()
    accelerator.end_training()
    assert accelerator.trackers == []
    assert not caplog.records


def test_logger_type_has_the_names_of_all_trackers():
    assert {str(each) for each in LoggerType} == {"all", *TRACKERS}


@pytest.mark.parametrize(
    ("log_with", "error", "message"),
    [
        ("tensorbord", ValueError, "log_with='tensorbord'. Did you mean 'tensorboard'"),
        ("nothing_like_it", ValueError, "Available: all, aim, clearml"),
        (
            ["jsonl"],
            ValueError,
            "'jsonl' needs a directory for its files. Pass a local Accelerator.project_dir=",
        ),
        (3, TypeError, "Invalid log_with entry 3: expected a name, a subclass or an instance"),
        (dict, TypeError, "Invalid log_with entry <class 'dict'>"),
    ],
)
def test_an_invalid_log_with_is_rejected_by_the_accelerator(log_with, error, message):
    with pytest.raises(error, match=message):
        Accelerator(log_with=log_with)


def test_a_missing_package_raises_an_error_with_the_install_command(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(
        ImportError, match=r"log_with='wandb' needs the package wandb\. Install it: .* install 'wandb>=0.22'"
    ):
        Accelerator(log_with=["jsonl", "wandb"], project_dir=tmp_path)


def test_selecting_trackers_imports_no_package(tmp_path):
    code = (
        "import sys, accel_runtime.tracking as t\n"
        "from accel_runtime.tracking import Trackers\n"
        "from accel_runtime.environment.topology import Topology\n"
        f"Trackers('all', {str(tmp_path)!r}, Topology(rank=1, world_size=2)).begin('x')\n"
        "print({*t.TRACKERS, 'torch'} & set(sys.modules))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.stdout == "set()\n", process.stderr


def test_tracker_classes_have_the_names_of_accelerate():
    from accel_runtime import tracking

    assert tracking.JSONLTracker.name == "jsonl"
    with pytest.raises(AttributeError, match="no attribute 'NoTracker'"):
        _ = tracking.NoTracker


def test_an_incomplete_tracker_class_is_rejected_with_the_missing_names():
    class Half(GeneralTracker):
        name = "half"

    with pytest.raises(NotImplementedError, match="Half lacks `requires_logging_directory`, `tracker`"):
        Half()
    with pytest.raises(ValueError, match="Half lacks 'requires_logging_directory'"):
        register_tracker_class(Half)


def test_the_name_of_a_built_in_tracker_cannot_be_registered():
    class Other(Mine):
        name = "wandb"

    with pytest.raises(ValueError, match="'wandb' is used by a tracker of accel"):
        register_tracker_class(Other)
    with pytest.raises(TypeError, match="expected a subclass of GeneralTracker"):
        register_tracker_class(dict)
    register_tracker_class(Mine)


# Once, in order ---------------------------------------------------------------------------


def test_a_second_start_is_rejected_until_the_first_run_ends():
    trackers = Trackers("mine", None, Topology())
    trackers.begin("first")
    with pytest.raises(RuntimeError, match="the trackers are running already"):
        trackers.begin("second")
    trackers.end()
    trackers.end()
    trackers.begin("second")
    assert [tracker.calls[0] for tracker in trackers.active] == [("made", "second", {})]


def test_calls_before_the_start_and_after_the_end_log_one_warning(caplog):
    trackers = Trackers("mine", None, Topology())
    for _ in range(3):
        trackers.log({"loss": 1})
    assert isinstance(trackers.find("mine"), BlankTracker)
    trackers.begin("project")
    trackers.end()
    for _ in range(3):
        trackers.log({"loss": 1})
    assert [record.message for record in caplog.records] == [
        "[RANK 0] log before init_trackers: nothing is recorded",
        "[RANK 0] get_tracker before init_trackers: nothing is recorded",
        "[RANK 0] log after end_training: nothing is recorded",
    ]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda t: t.log(3), TypeError, "pass values by name"),
        (lambda t: t.log({}, step="one"), TypeError, "integer"),
        (
            lambda t: t.log({}, log_kwargs={"mien": {}}),
            ValueError,
            "log_kwargs .* 'mien'.* Did you mean 'mine'",
        ),
        (lambda t: t.begin("x", init_kwargs={"wandb": {}}), ValueError, "log_with contains mine"),
        (lambda t: t.find("wandb"), ValueError, "No tracker 'wandb' in this run: log_with contains mine"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_an_invalid_argument_is_an_error_on_every_rank(call, error, message, rank):
    with pytest.raises(error, match=message):
        call(Trackers("mine", None, Topology(rank, 2)))


def test_init_kwargs_for_a_tracker_instance_are_rejected():
    with pytest.raises(ValueError, match="arguments for 'mine', which the script created already"):
        Trackers(Mine("x"), None, Topology()).begin("project", init_kwargs={"mine": {"tags": 1}})


def test_a_tracker_that_changes_its_values_does_not_affect_others():
    class Greedy(Mine):
        name = "greedy"

        def log(self, values, *_, **__):
            values.clear()

    tracker, values = Mine("x"), {"loss": 1}
    trackers = Trackers([Greedy("x"), tracker], None, Topology())
    trackers.begin("project")
    trackers.log(values)
    assert tracker.calls[-1] == ({"loss": 1}, None, {})
    assert values == {"loss": 1}


# Failures ---------------------------------------------------------------------------------


def test_a_tracker_that_fails_to_start_is_skipped_and_the_others_continue(caplog):
    tracker = Mine("x")
    trackers = Trackers([Broken, tracker], None, Topology())
    trackers.begin("project", init_kwargs={"broken": {"at": ["start"]}})
    trackers.log({"loss": 1})
    trackers.find("broken").log({"loss": 2})
    trackers.end()
    assert tracker.calls[-2:] == [({"loss": 1}, None, {}), "finish"]
    assert [record.message for record in caplog.records] == [
        (
            "[RANK 0] tracker 'broken' failed to start, and records nothing in this run: "
            "OSError: no start at https://***@host/x"
        )
    ]


def test_a_tracker_that_fails_to_log_warns_once_and_is_called_again(caplog):
    trackers = Trackers(Broken, None, Topology())
    trackers.begin("project", init_kwargs={"broken": {"at": ["log", "finish"]}})
    (broken,) = trackers.active
    for step in range(3):
        trackers.log({"loss": 1}, step)
    broken.at = ["finish"]
    trackers.log({"loss": 1}, 3)
    trackers.end()
    assert broken.calls[-1] == ({"loss": 1}, 3, {})
    messages = [record.message.partition("'broken' ")[2].partition(":")[0] for record in caplog.records]
    assert messages == [
        "failed in log; the training continues",
        "failed in finish; the training continues",
        "failed in 3 of 4 calls of log",
    ]


def test_unknown_init_kwargs_do_not_stop_the_training(caplog, tmp_path):
    accelerator = Accelerator(log_with="jsonl", project_dir=tmp_path)
    accelerator.init_trackers("project", init_kwargs={"jsonl": {"colour": "red"}})
    accelerator.log({"loss": 1})
    accelerator.end_training()
    assert "'jsonl' failed to start" in caplog.text
    assert "colour" in caplog.text


def test_secrets_of_the_configuration_are_masked():
    tracker = Mine("x")
    trackers = Trackers(tracker, None, Topology())
    trackers.begin("project", {"hub_token": "hush", "deep": {"api_key": "hush"}, "max_tokens": 9})
    assert tracker.calls[-1] == ("config", {"hub_token": "***", "deep": {"api_key": "***"}, "max_tokens": 9})


# Ranks ------------------------------------------------------------------------------------


def test_only_the_main_process_records_unless_main_process_only_is_false(several, tmp_path):
    def run(folder):
        accelerator = Accelerator(log_with=["jsonl", Mine("x"), Everywhere], project_dir=folder)
        accelerator.init_trackers("project", {"lr": 0.1})
        accelerator.log({"rank": accelerator.process_index}, step=1)
        # Scripts call any method on any rank without a check.
        accelerator.get_tracker("jsonl").leave_out({})
        accelerator.get_tracker("jsonl", unwrap=True).flush()
        names = [tracker.name for tracker in accelerator.trackers]
        everywhere = accelerator.get_tracker("everywhere", unwrap=True)[-1]
        accelerator._trackers.end()  # the group of these processes is shared
        return names, everywhere

    actual = several.run(run, tmp_path)
    assert [names for names, _ in actual] == [["jsonl", "mine", "everywhere"]] + [["everywhere"]] * (
        several.size - 1
    )
    assert [last for _, last in actual] == [({"rank": rank}, 1, {}) for rank in range(several.size)]
    lines = (tmp_path / "project.jsonl").read_text().splitlines()
    assert [json.loads(line).get("values") for line in lines] == [None, {"rank": 0}]


def test_a_tracker_class_without_its_package_can_be_imported_but_not_created(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    for name, tracker in TRACKERS.items():
        if tracker.package is None:
            continue
        tracker_class = getattr(tracking, tracker.class_name)
        assert (tracker_class.name, tracker_class.requires_logging_directory) == (name, tracker.directory)
        assert issubclass(tracker_class, GeneralTracker)
        assert tracker_class is getattr(tracking, tracker.class_name)
        subclass = type("Own", (tracker_class,), {"name": "own"})
        package = tracker.package.replace("_", "-")
        with pytest.raises(ImportError, match=f"Cannot create Own: .* install '{package}"):
            subclass("project", logging_dir=".")
