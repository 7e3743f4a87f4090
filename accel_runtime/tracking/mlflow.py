"""MLflow."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import mlflow
from mlflow.utils.validation import MAX_METRICS_PER_BATCH, MAX_PARAM_VAL_LENGTH, MAX_PARAMS_TAGS_PER_BATCH
from typing_extensions import override

from accel_runtime.tracking.base import Provided, on_main_process
from accel_runtime.tracking.values import flat, numbers

__all__ = ["MLflowTracker"]


class MLflowTracker(Provided):
    """Numbers become metrics of a run; nested names are joined by `/`.

    Args:
        experiment_name: The project's name; `MLFLOW_EXPERIMENT_NAME` wins.
        logging_dir: Where a new experiment keeps its artifacts.
        run_id: A run to go on with; `MLFLOW_RUN_ID` wins.
        tags: Of a new experiment and of the run, a mapping or JSON; `MLFLOW_TAGS` wins.
        nested_run: Whether the run lies inside the one that is active; `MLFLOW_NESTED_RUN` wins.
        run_name: The run's name.
        description: The run's description.
    """

    name = "mlflow"
    requires_logging_directory = False

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
        super().__init__()
        told = os.environ.get
        self.experiment_name = told("MLFLOW_EXPERIMENT_NAME", experiment_name)
        self.logging_dir = None if logging_dir is None else os.fspath(logging_dir)
        self.run_id = told("MLFLOW_RUN_ID", run_id)
        given = told("MLFLOW_TAGS", tags)
        self.tags = json.loads(given) if isinstance(given, str) else given
        nested = told("MLFLOW_NESTED_RUN", str(nested_run))
        self.nested_run = nested.lower() in {"1", "true", "t", "yes", "y", "on"}
        self.run_name = run_name
        self.description = description

    @override
    @on_main_process
    def start(self) -> None:
        self.active_run = mlflow.start_run(
            run_id=self.run_id,
            experiment_id=self._experiment(),
            run_name=self.run_name,
            nested=self.nested_run,
            tags=self.tags,
            description=self.description,
        )

    def _experiment(self) -> Any:
        found = mlflow.get_experiment_by_name(self.experiment_name)
        if found is not None:
            return found.experiment_id
        return mlflow.create_experiment(
            name=self.experiment_name, artifact_location=self.logging_dir, tags=self.tags
        )

    @property
    def tracker(self) -> Any:
        """The active run."""
        return self.active_run

    @override
    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record parameters; text that is longer than MLflow takes is left out, and told."""
        every = flat(values)
        left = {key: value for key, value in every.items() if len(str(value)) > MAX_PARAM_VAL_LENGTH}
        self.leave_out(left)
        kept = {key: value for key, value in every.items() if key not in left}
        for part in _parts(kept, MAX_PARAMS_TAGS_PER_BATCH):
            mlflow.log_params(part)

    @override
    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record numbers; `kwargs` go to `mlflow.log_metrics`."""
        counted, others = numbers(values)
        self.leave_out(others)
        for part in _parts(counted, MAX_METRICS_PER_BATCH):
            mlflow.log_metrics(part, step=step, **kwargs)

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


def _parts(values: dict[str, Any], size: int) -> Iterator[dict[str, Any]]:
    """The items, at most `size` at a time."""
    items = list(values.items())
    for start in range(0, len(items), size):
        yield dict(items[start : start + size])
