"""What `log_with` says, as trackers that can be made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_runtime.env import nearest
from accel_runtime.tracking import TRACKERS, Known, get_available_trackers, register_tracker_class
from accel_runtime.tracking.base import GeneralTracker

__all__ = ["Choice", "choose"]


@dataclass(frozen=True)
class Choice:
    """A tracker of a run, before it is made."""

    name: str
    main_process_only: bool
    make: Callable[..., GeneralTracker]
    """Takes the project's name and the tracker's own arguments."""
    instance: GeneralTracker | None = None
    """The script's own, where it made one."""


def choose(log_with: Any, logging_dir: Path | None) -> tuple[Choice, ...]:
    """The trackers a script asks for, each once.

    Args:
        log_with: Names, members of `LoggerType`, subclasses or instances of `GeneralTracker`; one, or several in
            a list or tuple. `all` stands for every tracker whose package is installed.
        logging_dir: Where those that write files write them.

    Raises:
        ValueError: A name nobody has, or a tracker that needs a directory and has none.
        ImportError: The package of a tracker is not installed.
        TypeError: Something that is no tracker.
    """
    asked = [] if log_with is None else list(log_with) if isinstance(log_with, (list, tuple)) else [log_with]
    return tuple(_one(item, logging_dir) for item in _once(_spelled_out(asked)))


def _spelled_out(asked: Iterable[Any]) -> Iterator[Any]:
    for item in asked:
        if isinstance(item, str) and item == "all":
            yield from get_available_trackers()
        else:
            yield str(item) if isinstance(item, str) else item


def _once(items: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    for item in items:
        if not any(item is other or (isinstance(item, str) and item == other) for other in found):
            found.append(item)
    return found


def _one(item: Any, logging_dir: Path | None) -> Choice:
    if isinstance(item, str) and item in TRACKERS:
        return _known(item, TRACKERS[item], logging_dir)
    if isinstance(item, str):
        return _class(_own(item), logging_dir)
    if isinstance(item, type) and issubclass(item, GeneralTracker):
        return _class(item, logging_dir)
    if isinstance(item, GeneralTracker):
        return _instance(item)
    raise TypeError(f"log_with takes names, subclasses and instances of GeneralTracker; it holds {item!r}")


def _known(name: str, known: Known, logging_dir: Path | None) -> Choice:
    if not known.installed:
        raise ImportError(f"log_with={name!r} needs the package {known.package}: pip install {known.package}")
    place = _place(name, known.directory, logging_dir)
    return Choice(
        name,
        main_process_only=True,
        make=lambda project, **options: known.load()(project, *place, **options),
    )


def _class(found: type[GeneralTracker], logging_dir: Path | None) -> Choice:
    register_tracker_class(found)
    place = _place(found.name, found.requires_logging_directory, logging_dir)
    make: Any = found  # whose arguments are its own affair
    return Choice(
        found.name,
        found.main_process_only,
        make=lambda project, **options: make(project, *place, **options),
    )


def _instance(tracker: GeneralTracker) -> Choice:
    if not hasattr(tracker, "name"):
        raise TypeError(f"the tracker {type(tracker).__name__} has to define `name`")

    def make(_: str, **options: Any) -> GeneralTracker:
        assert not options  # they were refused
        return tracker

    return Choice(tracker.name, tracker.main_process_only, make, tracker)


def _own(name: str) -> type[GeneralTracker]:
    # The one defined last wins: a notebook's cell defines its class at every run.
    own = {found.name: found for found in _below(GeneralTracker) if isinstance(vars(found).get("name"), str)}
    if name in own:
        return own[name]
    known = ["all", *TRACKERS, *own]
    meant = nearest(name, known)
    hint = f"did you mean {meant!r}? " if meant else ""
    raise ValueError(f"log_with={name!r} is no tracker; {hint}There are {', '.join(known)}")


def _below(top: type[GeneralTracker]) -> Iterator[type[GeneralTracker]]:
    for below in top.__subclasses__():
        if not below.__module__.startswith("accel_runtime."):
            yield below
        yield from _below(below)


def _place(name: str, needed: bool, logging_dir: Path | None) -> tuple[str, ...]:
    if not needed:
        return ()
    if logging_dir is None:
        raise ValueError(
            f"the tracker {name!r} writes files: say where with Accelerator(project_dir=...) "
            "or ProjectConfiguration(logging_dir=...)"
        )
    return (str(logging_dir),)
