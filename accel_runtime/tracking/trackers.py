"""The trackers of a run: made once, asked together, and none of their failures ends the training."""

from __future__ import annotations

import logging
import operator
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from accel_runtime.env import nearest
from accel_runtime.logging import MultiProcessAdapter
from accel_runtime.topology import Topology
from accel_runtime.tracking.base import BlankTracker, GeneralTracker
from accel_runtime.tracking.choice import Choice, choose
from accel_runtime.tracking.values import masked, public

__all__ = ["Trackers"]


class Trackers:
    """What `Accelerator` hands its records to.

    Args:
        log_with: Which trackers; see `choose`.
        logging_dir: Where those that write files write them.
        topology: Where this process stands. Trackers are made on the first process, those that are not
            `main_process_only` on every one.

    Raises:
        ValueError: A tracker that does not exist, or that needs a directory and has none.
        ImportError: The package of a tracker is not installed.
        TypeError: Something that is no tracker.
    """

    def __init__(self, log_with: Any, logging_dir: Path | None, topology: Topology) -> None:
        self._log_with, self._rank = log_with, topology.rank
        self.set_directory(logging_dir)
        self._running: list[_Watched] = []
        self._began = self._ended = False
        self._logger = MultiProcessAdapter(logging.getLogger(__name__))

    def set_directory(self, logging_dir: Path | None) -> None:
        """Set where trackers that are started from now on write their files.

        Raises:
            ValueError: A tracker needs a directory and has none.
        """
        self.chosen = choose(self._log_with, logging_dir)
        """Every tracker asked for, on every process."""
        self._mine = [c for c in self.chosen if self._rank == 0 or not c.main_process_only]

    @property
    def active(self) -> list[GeneralTracker]:
        """Those that record on this process."""
        return [watched.tracker for watched in self._running]

    def begin(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Make and start the trackers; one that fails to start is told about and set aside.

        Raises:
            RuntimeError: They run already.
            ValueError: Arguments for a tracker that was not asked for, or that the script has made itself.
        """
        if self._began and not self._ended:
            raise RuntimeError(
                "the trackers run already: init_trackers is called once, and again after end_training"
            )
        told = self._by_name("init_kwargs", init_kwargs)
        for choice in self.chosen:
            if choice.instance is not None and told.get(choice.name):
                raise ValueError(
                    f"init_kwargs has arguments for {choice.name!r}, but the script has made that tracker itself"
                )
        self._began, self._ended = True, False
        self._running = [
            watched
            for choice in self._mine
            if (watched := _started(choice, project_name, dict(told.get(choice.name, {})), self._logger))
        ]
        if config is not None:
            hidden = public(config)
            for watched in self._running:
                watched.ask("store_init_configuration", watched.tracker.store_init_configuration, hidden)

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Hand values to every tracker that records on this process.

        Raises:
            TypeError: `values` is no mapping, or `step` no whole number.
            ValueError: Arguments for a tracker that was not asked for.
        """
        if not isinstance(values, Mapping):
            raise TypeError(
                f"log takes values by name, such as {{'loss': 0.5}}; it got {type(values).__name__}"
            )
        told = self._by_name("log_kwargs", log_kwargs)
        counted = None if step is None else operator.index(step)
        if not self._recording("log"):
            return
        for watched in self._running:
            # Every tracker has a mapping of its own, since some write into what they are given.
            own = told.get(watched.name, {})
            watched.ask("log", watched.tracker.log, dict(values), step=counted, **own)

    def find(self, name: str, *, unwrap: bool = False) -> Any:
        """The tracker of this name, or what it wraps; blank where nothing is recorded.

        Raises:
            ValueError: Trackers were asked for, but not this one.
        """
        if self.chosen and name not in [choice.name for choice in self.chosen]:
            known = ", ".join(choice.name for choice in self.chosen)
            raise ValueError(f"there is no tracker {name!r} in this run; log_with asked for {known}")
        if self._recording("get_tracker"):
            for watched in self._running:
                if watched.name == name:
                    found: Any = watched.tracker
                    return found.tracker if unwrap else found
        return BlankTracker()

    def end(self) -> None:
        """Finish the trackers; a second call does nothing."""
        for watched in self._running:
            watched.end()
        self._running = []
        self._ended = True

    def _recording(self, asked: str) -> bool:
        """Whether the run is on; told once if a script asks outside of it."""
        if self._mine and (self._ended or not self._began):
            when = "after end_training" if self._ended else "before init_trackers"
            self._logger.warning_once("%s %s: nothing is recorded", asked, when, main_process_only=False)
        return self._began and not self._ended

    def _by_name(
        self, what: str, told: Mapping[str, Mapping[str, Any]] | None
    ) -> dict[str, Mapping[str, Any]]:
        names = [choice.name for choice in self.chosen]
        given = {str(name): kwargs for name, kwargs in (told or {}).items()}
        for name in given:
            if self.chosen and name not in names:
                meant = nearest(name, names)
                hint = f"; did you mean {meant!r}?" if meant else f"; log_with asked for {', '.join(names)}"
                raise ValueError(f"{what} has arguments for {name!r}, which is no tracker of this run{hint}")
        return given


class _Watched:
    """A running tracker, whose failures are counted and told once."""

    def __init__(self, name: str, tracker: GeneralTracker, logger: MultiProcessAdapter) -> None:
        self.name = name
        self.tracker = tracker
        self._logger = logger
        self._calls: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()

    def ask(self, verb: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Call a method; a failure is told the first time, and the run goes on."""
        self._calls[verb] += 1
        try:
            method(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whatever a tracker raises, the training goes on
            self._failures[verb] += 1
            if self._failures[verb] == 1:
                _tell(self._logger, self.name, f"failed in {verb}, and the run goes on", error)

    def end(self) -> None:
        """Finish, and say how often it failed."""
        self.ask("finish", self.tracker.finish)
        if self._failures["log"] > 1:
            counts = (self._failures["log"], self._calls["log"])
            self._logger.warning(
                "tracker %r failed in %d of %d calls of log", self.name, *counts, main_process_only=False
            )


def _started(
    choice: Choice, project_name: str, kwargs: dict[str, Any], logger: MultiProcessAdapter
) -> _Watched | None:
    try:
        tracker = choice.make(project_name, **kwargs)
        tracker.start()
    except Exception as error:  # noqa: BLE001 - a service that is down is no reason not to train
        _tell(logger, choice.name, "could not start, and records nothing in this run", error)
        return None
    return _Watched(choice.name, tracker, logger)


def _tell(logger: MultiProcessAdapter, name: str, what: str, error: Exception) -> None:
    logger.warning(
        "tracker %r %s: %s: %s", name, what, type(error).__name__, masked(str(error)), main_process_only=False
    )
