"""Project directories, trackers and profiles of an `Accelerator`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch.profiler import profile

from accel_runtime.accelerator.properties import AcceleratorProperties
from accel_runtime.options import ProjectConfiguration
from accel_runtime.profiling import ProfileKwargs, profiled
from accel_runtime.tracking.base import GeneralTracker
from accel_runtime.tracking.trackers import Trackers

__all__ = ["TrackingMethods"]


class TrackingMethods(AcceleratorProperties):
    """Methods of `Accelerator` for trackers and profiles."""

    def _init_tracking(
        self,
        log_with: Any,
        project_dir: str | os.PathLike[str] | None,
        project_config: ProjectConfiguration | None,
    ) -> None:
        self.project_configuration = project_config or ProjectConfiguration()
        self.project_configuration.place(project_dir)
        self._trackers = Trackers(log_with, self.project_configuration.logs, self._backend.topology)
        self.project_configuration.observe(self._project_changed)

    def _project_changed(self, config: ProjectConfiguration, name: str) -> None:
        if name in {"project_dir", "logging_dir"} and config is self.project_configuration:
            if self._trackers.active:
                self._warn_if_prepared(config, name, self._trackers.active, "tracker(s)")
            else:
                self._trackers.set_directory(config.logs)

    @property
    def project_dir(self) -> str | os.PathLike[str] | None:
        """Return the directory of the project."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> Path | None:
        """Return the directory of tracker files."""
        return self.project_configuration.logs

    @property
    def save_iteration(self) -> int:
        """Return the number of the next checkpoint with an automatic name."""
        return self.project_configuration.iteration

    @property
    def log_with(self) -> list[str]:
        """Return the names of the requested trackers."""
        return [choice.name for choice in self._trackers.chosen]

    @property
    def trackers(self) -> list[GeneralTracker]:
        """Return the trackers that record on this process."""
        return self._trackers.active

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Start the trackers; a tracker that fails to start causes a warning and records nothing.

        Args:
            project_name: The name of the project, run or experiment.
            config: The configuration of the run, which trackers store; values that look like secrets are masked.
            init_kwargs: Arguments by the name of the tracker, such as `{"wandb": {"tags": ["a"]}}`.

        Raises:
            RuntimeError: If the trackers are running already.
            ValueError: If there are arguments for a tracker that `log_with` does not contain, or that the script created.
        """
        self._trackers.begin(project_name, config, init_kwargs)

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Record values with every tracker; the first failure of a tracker causes a warning and no error.

        Args:
            values: Numbers or text by name; also tensors of one element, and other objects that a tracker supports.
            step: The step of the values.
            log_kwargs: Arguments by the name of the tracker.

        Raises:
            TypeError: If `values` is not a mapping, or `step` not an integer.
            ValueError: If there are arguments for a tracker that `log_with` does not contain.
        """
        self._trackers.log(values, step, log_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker by name; on processes that do not record, its methods do nothing.

        Args:
            name: The name in `log_with`.
            unwrap: Return the object that the tracker wraps, such as the run of wandb.

        Raises:
            ValueError: If `log_with` contains other trackers, but not this one.
        """
        return self._trackers.find(name, unwrap=unwrap)

    def end_training(self) -> None:
        """Finish the trackers, and destroy the process group if no other `Accelerator` uses it."""
        self._trackers.end()
        self._backend.close()

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[profile]:
        """Return a context that profiles the operations inside.

        Args:
            profile_handler: Options that replace those of `kwargs_handlers`.
        """
        return profiled(profile_handler or self.profile_handler or ProfileKwargs(), self._backend)
