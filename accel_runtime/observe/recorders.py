"""Recorders of a rank, which variables switch on and which write files of their own into its folder, and the batches that they see."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from accel_runtime.environment.registry import Registry
from accel_runtime.environment.settings import RANK_FOLDER, RECORD, SettingsError
from accel_runtime.observe.import_hooks import call_after_import

__all__ = ["RECORDERS", "LoadedBatches", "RankFiles", "find_recorder", "start_recorders"]

_END = object()


class RankFiles(Protocol):
    """A recorder."""

    def check(self, text: str) -> None:
        """Raise SettingsError if the value of the variable is invalid."""

    def start(self, text: str, folder: Path, environ: Mapping[str, str]) -> None:
        """Record this process from now on, before the script runs.

        Args:
            text: The value of the variable.
            folder: The folder of the rank.
            environ: The environment of the rank.
        """


RECORDERS: Registry[RankFiles] = Registry(
    {
        "numerics": "accel_runtime.extensions.numerics.recorder:NUMERICS",
    },
    error=SettingsError,
)
"""Recorders by name, which is the end of the variable, in lower case."""


def find_recorder(variable: str, value: str) -> RankFiles:
    """Return the recorder of a variable; raise SettingsError if this installation has none."""
    name = variable.removeprefix(RECORD).lower()
    if name not in RECORDERS.names:
        raise SettingsError(
            f"Cannot use {variable}={value}: this installation of accel has no such recorder. Unset it."
        )
    return RECORDERS[name]


def start_recorders(environ: Mapping[str, str]) -> None:
    """Start the recorders whose variables have a value; raise SettingsError if one is invalid."""
    for variable, value in environ.items():
        if variable.startswith(RECORD) and value:
            find_recorder(variable, value).start(value, Path(environ[RANK_FOLDER]), environ)


class LoadedBatches:
    """Call functions with each batch that this process receives; a prepared loader has those that it returns, not those that it reads.

    Args:
        on_batch: Called with an iterator, its batch, and the index or indices that were requested for it; None if they are unknown.
        on_end: Called with an iterator whose epoch has ended.
        on_load: Called with each iterator of torch that has loaded a batch, also for a prepared loader.
    """

    def __init__(
        self,
        on_batch: Callable[[Any, Any, Any], None],
        on_end: Callable[[Any], None],
        on_load: Callable[[Any], None] = lambda _: None,
    ) -> None:
        self._on_batch, self._on_end, self._on_load, self._pid = on_batch, on_end, on_load, os.getpid()
        self._indices: weakref.WeakKeyDictionary[Any, deque[Any]] = weakref.WeakKeyDictionary()
        """The indices of the batches that iterators of torch have requested and not returned yet."""
        self._preparing: list[deque[Any]] = []
        """The indices of the batches that prepared loaders read now, the innermost last."""

    def install(self) -> None:
        """Install the hooks once the loaders are imported."""
        call_after_import("torch.utils.data.dataloader", self._watch_loaders)
        call_after_import("accel_runtime.data.loader", self._watch_prepared_loaders)

    def _watch_loaders(self, module: ModuleType) -> None:
        base = module._BaseDataLoaderIter  # noqa: SLF001 - the class of all its iterators (torch 2.9 to 2.13)
        load, next_index, reset = base.__next__, base._next_index, base._reset  # noqa: SLF001

        @wraps(next_index)
        def record_index(iterator: Any) -> Any:
            index = next_index(iterator)
            self._indices.setdefault(iterator, deque()).append(index)
            return index

        @wraps(reset)
        def forget_indices(iterator: Any, *args: Any, **kwargs: Any) -> Any:
            self._indices.pop(iterator, None)
            return reset(iterator, *args, **kwargs)

        @wraps(load)
        def load_and_record(iterator: Any) -> Any:
            if os.getpid() != self._pid:
                return load(iterator)
            try:
                batch = load(iterator)
            except StopIteration:
                self._on_end(iterator)
                raise
            self._on_load(iterator)
            queue = self._indices.get(iterator)
            index = queue.popleft() if queue else None
            if self._preparing:
                self._preparing[-1].append(index)
            else:
                self._on_batch(iterator, batch, index)
            return batch

        base.__next__, base._next_index, base._reset = load_and_record, record_index, forget_indices  # noqa: SLF001

    def _watch_prepared_loaders(self, module: ModuleType) -> None:
        iterate = module.PreparedLoader.__iter__

        @wraps(iterate)
        def iterate_and_record(loader: Any) -> Iterator[Any]:
            return self._record_prepared(iterate(loader))

        module.PreparedLoader.__iter__ = iterate_and_record

    def _record_prepared(self, batches: Iterator[Any]) -> Iterator[Any]:
        indices: deque[Any] = deque()
        while True:
            self._preparing.append(indices)
            try:
                batch = next(batches, _END)
            finally:
                self._preparing.pop()
            if batch is _END:
                self._on_end(batches)
                return
            self._on_batch(batches, batch, indices.popleft() if indices else None)
            yield batch
