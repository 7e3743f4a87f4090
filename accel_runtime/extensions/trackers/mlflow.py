"""MLflow tracker."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import mlflow
from mlflow.utils.validation import MAX_METRICS_PER_BATCH, MAX_PARAM_VAL_LENGTH, MAX_PARAMS_TAGS_PER_BATCH
from typing_extensions import override

from accel_runtime.foundation.logged_values import add_suffix, flatten_values, split_numbers
from accel_runtime.tracking.base import BuiltInTracker, on_main_process

__all__ = ["MLflowTracker"]


class MLflowTracker(BuiltInTracker):
    """Log numbers as metrics of a run; nested names are joined by `/`.

    Args:
        experiment_name: The name of the project; `MLFLOW_EXPERIMENT_NAME` overrides it.
        logging_dir: The artifact directory of a new experiment.
        run_id: A run to continue; `MLFLOW_RUN_ID` overrides it.
        tags: Tags of a new experiment and of the run, a mapping or JSON; `MLFLOW_TAGS` overrides them.
        nested_run: Create the run inside the active one; `MLFLOW_NESTED_RUN` overrides it.
        run_name: The name of the run.
        description: The description of the run.
    """

    name = "mlflow"

    def __init__(  # noqa: PLR0913, PLR0917 - the signature scripts know
        self,
        experiment_name: str | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        tags: dict[str, Any] | str | None = None,
        nested_run: bool = False,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        super().__init__(run_name)
        getenv = os.environ.get
        self.experiment_name = getenv("MLFLOW_EXPERIMENT_NAME", experiment_name)
        self.logging_dir = None if logging_dir is None else os.fspath(logging_dir)
        self.run_id = getenv("MLFLOW_RUN_ID", run_id)
        tags = getenv("MLFLOW_TAGS", tags)
        self.tags = json.loads(tags) if isinstance(tags, str) else tags
        nested = getenv("MLFLOW_NESTED_RUN", str(nested_run))
        self.nested_run = nested.lower() in {"1", "true", "t", "yes", "y", "on"}
        self.description = description

    @override
    @on_main_process
    def start(self) -> None:
        self.active_run = mlflow.start_run(
            run_id=self.run_id,
            experiment_id=self._find_or_create_experiment(),
            run_name=self.run_name,
            nested=self.nested_run,
            tags=self.tags,
            description=self.description,
        )

    def _find_or_create_experiment(self) -> Any:
        experiment = mlflow.get_experiment_by_name(self.experiment_name)
        if experiment is not None:
            return experiment.experiment_id
        return mlflow.create_experiment(
            name=self.experiment_name, artifact_location=self.logging_dir, tags=self.tags
        )

    @property
    def tracker(self) -> Any:
        """Return the active run."""
        return self.active_run

    @override
    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record parameters; warn about text that is too long for MLflow."""
        flat = flatten_values(self.convert_configuration(values))
        too_long = {key: value for key, value in flat.items() if len(str(value)) > MAX_PARAM_VAL_LENGTH}
        self.leave_out(too_long, f"its text has more than {MAX_PARAM_VAL_LENGTH} characters")
        parameters = {key: value for key, value in flat.items() if key not in too_long}
        self._record(mlflow.log_params, parameters, MAX_PARAMS_TAGS_PER_BATCH)

    @override
    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record numbers; `kwargs` go to `mlflow.log_metrics`."""
        numbers, others = split_numbers(values)
        self.leave_out(others)
        self._record(partial(mlflow.log_metrics, step=step, **kwargs), numbers, MAX_METRICS_PER_BATCH)

    def _record(self, log: Callable[[dict[str, Any]], Any], values: dict[str, Any], size: int) -> None:
        """Record values in batches; MLflow rejects a batch because of one value, so then each is tried."""
        supported: dict[str, Any] = {}
        for key, value in values.items():
            supported[add_suffix(_replace_characters(key), supported)] = value
        for batch in _batches(supported, size):
            if not _is_accepted(log, batch):
                self.leave_out(
                    {key: value for key, value in batch.items() if not _is_accepted(log, {key: value})},
                    "MLflow rejects its name or value",
                )

    @on_main_process
    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Record a matplotlib or plotly figure under a path in the run's artifacts."""
        mlflow.log_figure(figure, artifact_file, **save_kwargs)

    @on_main_process
    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Record all files of a folder."""
        mlflow.log_artifacts(local_dir, artifact_path)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Record a file."""
        mlflow.log_artifact(local_path, artifact_path)

    @override
    @on_main_process
    def finish(self) -> None:
        mlflow.end_run()


def _replace_characters(name: str) -> str:
    """Replace what MLflow rejects in a name: characters, and parts that are not one folder."""
    parts = [re.sub(r"[^\w.\- :]", "_", part) for part in name.split("/")]
    return "/".join("_" if part in {"", ".", ".."} else part for part in parts)


def _is_accepted(log: Callable[[dict[str, Any]], Any], values: dict[str, Any]) -> bool:
    """Log values, and return False if MLflow finds one invalid."""
    try:
        log(values)
    except Exception as error:
        if getattr(error, "error_code", None) != "INVALID_PARAMETER_VALUE":
            raise
        return False
    return True


def _batches(values: dict[str, Any], size: int) -> Iterator[dict[str, Any]]:
    """Yield the items in mappings of at most `size`."""
    items = list(values.items())
    for start in range(0, len(items), size):
        yield dict(items[start : start + size])
