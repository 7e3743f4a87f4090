"""Where this process stands among the others, and what each of them does or does not do."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch

from accel_runtime import splitting
from accel_runtime.backends.base import Backend
from accel_runtime.current import set_current_backend
from accel_runtime.flag import Flag
from accel_runtime.kinds import DistributedType
from accel_runtime.turns import leader_first

__all__ = ["Processes"]

_F = TypeVar("_F", bound=Callable[..., Any])


class Processes:
    """What an `Accelerator` and a `PartialState` know and do as one process among several."""

    _backend: Backend

    # Where it stands -------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """What this process computes on."""
        return self._backend.device

    @property
    def num_processes(self) -> int:
        """How many processes run the script."""
        return self._backend.topology.world_size

    @property
    def process_index(self) -> int:
        """This process among all, from 0."""
        return self._backend.topology.rank

    @property
    def local_process_index(self) -> int:
        """This process among those of its machine, from 0."""
        return self._backend.topology.local_rank

    @property
    def data_parallel_size(self) -> int:
        """Into how many parts every global batch is divided: fewer than processes where several compute one together."""
        return self._backend.data.world_size

    @property
    def data_parallel_rank(self) -> int:
        """Which of these parts this process has, from 0."""
        return self._backend.data.rank

    @property
    def is_main_process(self) -> Flag:
        """Whether this is the first process of all."""
        return Flag(self.process_index == 0)

    @property
    def is_local_main_process(self) -> Flag:
        """Whether this is the first process of its machine."""
        return Flag(self.local_process_index == 0)

    @property
    def is_last_process(self) -> Flag:
        """Whether this is the last process of all."""
        return Flag(self.process_index == self.num_processes - 1)

    @property
    def distributed_type(self) -> DistributedType:
        """How the processes work together: `NO`, `MULTI_CPU`, `MULTI_GPU`, ..."""
        return self._backend.kind

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.num_processes > 1

    # Who does it -----------------------------------------------------------------------

    def on_main_process(self, function: _F) -> _F:
        """A decorator: only the first process of all runs the function, the others return None."""
        return _only(function, lambda: bool(self.is_main_process))

    def on_local_main_process(self, function: _F) -> _F:
        """A decorator: only the first process of each machine runs the function, the others return None."""
        return _only(function, lambda: bool(self.is_local_main_process))

    def on_last_process(self, function: _F) -> _F:
        """A decorator: only the last process runs the function, the others return None."""
        return _only(function, lambda: bool(self.is_last_process))

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> Any:
        """A decorator: only the process of this index runs the function, the others return None.

        Raises:
            ValueError: No `process_index`, or one that no process has.
        """
        index = _index("process_index", process_index, self.num_processes)
        if function is None:
            return functools.partial(self.on_process, process_index=index)
        return _only(function, lambda: self.process_index == index)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:
        """A decorator: only the process of this index on each machine runs the function.

        Raises:
            ValueError: No `local_process_index`, or one that no process has.
        """
        count = self._backend.topology.local_world_size
        index = _index("local_process_index", local_process_index, count)
        if function is None:
            return functools.partial(self.on_local_process, local_process_index=index)
        return _only(function, lambda: self.local_process_index == index)

    def main_process_first(self) -> AbstractContextManager[None]:
        """The first process runs the block, then the others do: one downloads, the rest find it in the cache.

        The others wait on the store and in no collective, so the block may take longer than the process
        group's timeout. Every process has to come here.

        Raises:
            RuntimeError: On the others, where the first process's block raised.
        """
        return leader_first(self._backend, 0, "main_process_first()")

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """`main_process_first` on each machine of its own.

        Raises:
            RuntimeError: The block of the machine's first process raised.
        """
        first = self.process_index - self.local_process_index
        return leader_first(self._backend, first, "local_main_process_first()")

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """This process's part of the inputs: each item to exactly one process, in order.

        Processes that compute one part of the batch together (tensor and context parallel) get the same items, and
        count as one.

        Args:
            inputs: A list, a tuple, a tensor, a dataset with `select`, or a dict of such, also nested, all
                of one length. It is never changed. The first `len % num_processes` processes get one more.
            apply_padding: Repeat the last item, so that every process has as many as the first, and
                `gather` can follow; the repeats are at the end of what is gathered.

        Raises:
            TypeError: Something that cannot be split.
            ValueError: The values of a dict differ in length; or padding where there is no item to repeat.
        """
        place = self._backend.data
        yield splitting.split(inputs, place.rank, place.world_size, pad=apply_padding)

    # Together --------------------------------------------------------------------------

    def wait_for_everyone(self) -> None:
        """Wait until every process is here."""
        self._backend.barrier()

    def print(self, *values: Any, **options: Any) -> None:
        """`print`, once a machine."""
        if self.is_local_main_process:
            print(*values, **options)  # noqa: T201 - this is what it is for

    def _connected(self, backend: Backend) -> None:
        """Use this backend, also for functions that are not told which."""
        self._backend = backend
        set_current_backend(backend)


def _only(function: _F, here: Callable[[], bool]) -> _F:
    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        return function(*args, **options) if here() else None

    return run  # type: ignore[return-value]


def _index(name: str, index: int | None, count: int) -> int:
    if index is None:
        raise ValueError(f"{name} says which process runs the function; it is not given")
    if not 0 <= index < count:
        raise ValueError(f"{name} lies from 0 to {count - 1} here; it is {index}")
    return index
