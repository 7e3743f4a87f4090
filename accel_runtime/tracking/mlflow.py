"""MLflow tracker."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import mlflow
from mlflow.utils.validation import MAX_METRICS_PER_BATCH, MAX_PARAM_VAL_LENGTH, MAX_PARAMS_TAGS_PER_BATCH
from typing_extensions import override

from accel_runtime.tracking.base import BuiltInTracker, flatten_values, on_main_process, split_numbers

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
        flat = flatten_values(values)
        too_long = {key: value for key, value in flat.items() if len(str(value)) > MAX_PARAM_VAL_LENGTH}
        self.leave_out(too_long)
        parameters = {key: value for key, value in flat.items() if key not in too_long}
        for batch in _batches(parameters, MAX_PARAMS_TAGS_PER_BATCH):
            mlflow.log_params(batch)

    @override
    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record numbers; `kwargs` go to `mlflow.log_metrics`."""
        numbers, others = split_numbers(values)
        self.leave_out(others)
        for batch in _batches(numbers, MAX_METRICS_PER_BATCH):
            mlflow.log_metrics(batch, step=step, **kwargs)

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


def _batches(values: dict[str, Any], size: int) -> Iterator[dict[str, Any]]:
    """Yield the items in mappings of at most `size`."""
    items = list(values.items())
    for start in range(0, len(items), size):
        yield dict(items[start : start + size])
