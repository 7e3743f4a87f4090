"""The part of the facade that keeps a record of a run: directories, trackers and profiles."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch.profiler import profile

from accel_runtime.facade.configuration import ConfigurationObjects
from accel_runtime.profiling import ProfileKwargs, profiled
from accel_runtime.project import ProjectConfiguration
from accel_runtime.tracking.base import GeneralTracker
from accel_runtime.tracking.trackers import Trackers

__all__ = ["Recording"]


class Recording(ConfigurationObjects):
    """What `Accelerator` records, and where; it is given its parts by `_record`."""

    project_configuration: ProjectConfiguration
    """The directories of the project."""

    def _record(
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
        """Where the project keeps its data."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> Path | None:
        """Where trackers write their files."""
        return self.project_configuration.logs

    @property
    def save_iteration(self) -> int:
        """The number of the next checkpoint that `save_state` names itself."""
        return self.project_configuration.iteration

    @property
    def log_with(self) -> list[str]:
        """The names of the trackers that were asked for."""
        return [choice.name for choice in self._trackers.chosen]

    @property
    def trackers(self) -> list[GeneralTracker]:
        """The trackers that record on this process."""
        return self._trackers.active

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Start the trackers; one that cannot start is told about, and the run goes on without it.

        Args:
            project_name: What trackers call the project, run or experiment.
            config: The run's configuration, which trackers store; what its names say is secret is hidden.
            init_kwargs: Arguments by the name of the tracker, such as `{"wandb": {"tags": ["a"]}}`.

        Raises:
            RuntimeError: They run already.
            ValueError: Arguments for a tracker that was not asked for, or that the script has made itself.
        """
        self._trackers.begin(project_name, config, init_kwargs)

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Hand values to every tracker; a failure is told once, and the run goes on.

        Args:
            values: Numbers or text by name; also tensors of one element, and what a tracker takes beside.
            step: The step they belong to.
            log_kwargs: Arguments by the name of the tracker.

        Raises:
            TypeError: `values` is no mapping, or `step` no whole number.
            ValueError: Arguments for a tracker that was not asked for.
        """
        self._trackers.log(values, step, log_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """A tracker by name; one whose methods do nothing on processes that do not record.

        Args:
            name: As in `log_with`.
            unwrap: Give what the tracker wraps, such as the run of wandb.

        Raises:
            ValueError: Trackers were asked for, but not this one.
        """
        return self._trackers.find(name, unwrap=unwrap)

    def end_training(self) -> None:
        """Finish the trackers, and leave the process group when no other `Accelerator` uses it."""
        self._trackers.end()
        self._backend.leave()

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[profile]:
        """The context that profiles what is inside.

        Args:
            profile_handler: In place of the one in `kwargs_handlers`.
        """
        return profiled(profile_handler or self.profile_handler or ProfileKwargs(), self._backend)
