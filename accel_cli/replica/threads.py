"""What replicas that are threads of one process have each for itself: `__main__`, and where they print."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, TextIO

from accel_cli import worker

__all__ = ["Threads"]

_MARK = "accel_replica"


class Threads:
    """The replicas of this process, counted from 0; a thread counts as the replica that started it.

    Threads that are not Python's own, such as those of a device, count as the first replica.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._modules: dict[int, ModuleType] = {}
        self._streams: dict[str, dict[int, TextIO]] = {"stdout": {}, "stderr": {}}
        self._several = False

    def mine(self) -> int:
        """The number of the replica that calls."""
        return int(getattr(threading.current_thread(), _MARK, 0))

    @contextmanager
    def acting_for(self, number: int) -> Iterator[None]:
        """Have the thread that calls count as another replica for a while."""
        thread, before = threading.current_thread(), self.mine()
        setattr(thread, _MARK, number)
        try:
            yield
        finally:
            setattr(thread, _MARK, before)

    def enter(self, number: int, *, several: bool) -> None:
        """Be this replica from now on, in the thread that calls and in those it starts."""
        setattr(threading.current_thread(), _MARK, number)
        with self._lock:
            if several and not self._several:
                self._several = True
                self._share()

    def _share(self) -> None:
        _inherit(self.mine)
        for name, streams in self._streams.items():
            streams[0] = getattr(sys, name)
            setattr(sys, name, _Own(self._chosen(streams)))
        sys.modules["__main__"] = _Main(self._chosen(self._modules))

    def _chosen(self, each: dict[int, Any]) -> Callable[[], Any]:
        return lambda: each.get(self.mine()) or next(iter(each.values()))

    def print_to(self, folder: str) -> None:
        """Have this replica print to what the launcher left in its folder; others keep the process's own output."""
        for name, streams in self._streams.items():
            like = streams[0]
            own = open(  # noqa: SIM115, PTH123 - until the process ends
                worker.opened(folder, name), "w", buffering=1, encoding=like.encoding, errors=like.errors
            )
            worker.ignore_full_disk(own, f"{folder}/{name}")
            streams[self.mine()] = own

    def be_main(self, module: ModuleType) -> None:
        """Make a module the `__main__` of this replica."""
        with self._lock:
            self._modules[self.mine()] = module
            if not self._several:
                sys.modules["__main__"] = module

    def flush(self) -> None:
        """Write out what any replica has printed."""
        for stream in (
            sys.stdout,
            sys.stderr,
            *(s for each in self._streams.values() for s in each.values()),
        ):
            try:
                stream.flush()
            except (OSError, ValueError):  # its reader has gone
                continue


def _inherit(mine: Callable[[], int]) -> None:
    """Have a new thread count as the replica that starts it."""
    start = threading.Thread.start

    def started(thread: threading.Thread) -> None:
        setattr(thread, _MARK, mine())
        start(thread)

    threading.Thread.start = started  # type: ignore[method-assign,assignment]


class _Own:
    """Whatever is asked of it, the caller's own stream answers."""

    def __init__(self, chosen: Callable[[], TextIO]) -> None:
        object.__setattr__(self, "_chosen", chosen)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_chosen")(), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(object.__getattribute__(self, "_chosen")(), name, value)


class _Main(ModuleType):
    """`sys.modules["__main__"]`: whatever is asked of it, the caller's own module answers."""

    def __init__(self, chosen: Callable[[], ModuleType]) -> None:
        object.__setattr__(self, "_chosen", chosen)

    def __getattribute__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_chosen")(), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(object.__getattribute__(self, "_chosen")(), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(object.__getattribute__(self, "_chosen")(), name)
