"""Stubs of the packages of trackers: they record calls, and reject those that the real package would reject.

The signatures are those of the versions named in `docs/tracking.md`; `test_contract.py` compares them with the
real packages, where these are installed.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import types

import pytest

from accel_runtime.tracking import TRACKERS

SIGNATURES = {
    "wandb": {
        "init": "entity=None, project=None, dir=None, id=None, name=None, notes=None, tags=None, config=None, mode=None",
        "Run.log": "data, step=None, commit=None",
        "Run.finish": "exit_code=None",
        "Image": "data_or_path, mode=None, caption=None",
        "Table": "columns=None, data=None, rows=None, dataframe=None",
    },
    "mlflow": {
        "get_experiment_by_name": "name",
        "create_experiment": "name, artifact_location=None, tags=None",
        "start_run": "run_id=None, experiment_id=None, run_name=None, nested=False, parent_run_id=None, tags=None, "
        "description=None",
        "log_params": "params, synchronous=None, run_id=None",
        "log_metrics": "metrics, step=None, synchronous=None, run_id=None",
        "log_figure": "figure, artifact_file, *, save_kwargs=None",
        "log_artifact": "local_path, artifact_path=None, run_id=None",
        "log_artifacts": "local_dir, artifact_path=None, run_id=None",
        "end_run": "status='FINISHED'",
    },
    "comet_ml": {
        "start": "api_key=None, workspace=None, project=None, project_name=None, experiment_key=None, mode=None, "
        "online=None",
        "CometExperiment.log_parameters": "parameters, prefix=None",
        "CometExperiment.set_step": "step",
        "CometExperiment.log_metric": "name, value, step=None",
        "CometExperiment.log_other": "key, value",
        "CometExperiment.end": "",
    },
    "aim": {
        "Run": "run_hash=None, *, repo=None, read_only=False, experiment=None",
        "Run.track": "value, name=None, step=None, epoch=None, *, context=None",
        "Run.close": "",
        "Image": "image, caption='', format=None, quality=90, optimize=False",
        "Text": "text",
    },
    "clearml": {
        "Task.current_task": "",
        "Task.init": "project_name=None, task_name=None, task_type=None, tags=None",
        "Task.connect_configuration": "configuration, name=None",
        "Task.get_logger": "",
        "Task.close": "",
        "Logger.report_scalar": "title, series, value, iteration",
        "Logger.report_single_value": "name, value",
        "Logger.report_image": "title, series, iteration=None, local_path=None, image=None",
        "Logger.report_table": "title, series, iteration=None, table_plot=None",
    },
    "dvclive": {
        "Live": "dir='dvclive', resume=False, report=None, save_dvc_exp=True",
        "Live.log_metric": "name, val, timestamp=False, plot=True",
        "Live.log_params": "params",
        "Live.next_step": "",
        "Live.end": "",
    },
    "swanlab": {
        "init": "*, reinit=None, log_dir=None, mode=None, workspace=None, project=None, name=None",
        "Run.log": "data, step=None",
        "Run.finish": "",
        "Image": "data_or_path, mode=None, caption=None",
        "Text": "content, caption=None",
    },
    "trackio": {
        "init": "project, name=None, group=None, space_id=None",
        "Run.log": "metrics, step=None",
        "Run.finish": "",
    },
}
"""The signatures of the functions that accel calls, by package."""

RESULT_TYPES = {
    "wandb.init": "Run", "trackio.init": "Run", "swanlab.init": "Run", "aim.Run": "Run", "dvclive.Live": "Live",
    "comet_ml.start": "CometExperiment", "clearml.Task.init": "Task", "clearml.Task.get_logger": "Logger",
}  # fmt: skip
"""Calls that return an object with methods."""


class StubObject:
    """An object of a stub that records calls and assignments."""

    def __init__(self, package, calls, path=""):
        vars(self).update(_package=package, _calls=calls, _path=path)

    def __getattr__(self, name):
        path = f"{self._path}.{name}".removeprefix(".")
        known = SIGNATURES[self._package]
        if name == "config":
            return types.SimpleNamespace(
                update=lambda values, **_: self._calls.append(("config.update", values))
            )
        if not any(f"{other}.".startswith(f"{path}.") for other in known):
            raise AttributeError(f"{self._package} has no {path} that we know of")
        return StubObject(self._package, self._calls, path)

    def __setattr__(self, name, value):
        self._calls.append((f"{self._path}.{name} =", value))

    def __setitem__(self, name, value):
        self._calls.append((f"{self._path}[{name}] =", value))

    def __bool__(self):
        return True

    def __call__(self, *args, **kwargs):
        signature = inspect.signature(eval(f"lambda {SIGNATURES[self._package][self._path]}: None"))  # noqa: S307
        self._calls.append((self._path, dict(signature.bind(*args, **kwargs).arguments)))
        made = RESULT_TYPES.get(f"{self._package}.{self._path}")
        if made:
            return StubObject(self._package, self._calls, made)
        return (self._path, *args) if self._path in {"Image", "Text", "Table"} else None


@pytest.fixture
def stub(monkeypatch):
    """Return a function that replaces a package by its stub and returns the list of recorded calls."""

    def install(package):
        calls = []
        module = StubObject(package, calls)
        vars(module)["__spec__"] = importlib.machinery.ModuleSpec(package, None)
        monkeypatch.setitem(sys.modules, package, module)
        submodules = {
            "mlflow": ("mlflow.utils.validation", _LIMITS),
            "dvclive": ("dvclive.plots", {"Metric": _Metric}),
        }
        if package in submodules:
            name, holds = submodules[package]
            monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**holds))
        # The module of a tracker keeps the package that it imported.
        module_name = find_module(package)
        monkeypatch.delitem(sys.modules, module_name, raising=False)
        parent = importlib.import_module(module_name.rpartition(".")[0])
        monkeypatch.setattr(parent, package, None, raising=False)
        return calls

    yield install
    for package in SIGNATURES:
        sys.modules.pop(find_module(package), None)


def find_module(package):
    """Return the name of the module of the tracker that needs a package."""
    return next(f"accel_runtime.{entry.module}" for entry in TRACKERS.values() if entry.package == package)


_LIMITS = {"MAX_PARAM_VAL_LENGTH": 20, "MAX_PARAMS_TAGS_PER_BATCH": 2, "MAX_METRICS_PER_BATCH": 2}


class _Metric:
    @staticmethod
    def could_log(value):
        return isinstance(value, (int, float, str))


@pytest.fixture
def signatures():
    """Return the signatures of the stubs."""
    return SIGNATURES
