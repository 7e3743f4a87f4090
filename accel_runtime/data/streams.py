"""Streams on several ranks: each reads the whole stream and keeps its slice of every global batch."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader
from typing_extensions import override

from accel_runtime import rng
from accel_runtime.backends.base import Backend
from accel_runtime.data.prints import mixed
from accel_runtime.data.slices import Slicing, slicing_of
from accel_runtime.data.source import Loop, Source
from accel_runtime.data.states import Apart
from accel_runtime.data.workers import Made, Reading, Recipe

__all__ = ["Flow", "Place", "Stream", "StreamsDifferError", "split_by_node"]


class StreamsDifferError(RuntimeError):
    """The ranks, or the workers of one, do not read the same stream. Raised on every rank."""


def split_by_node(dataset: object) -> bool:
    """Whether `datasets.distributed.split_dataset_by_node` has given every rank a part of its own."""
    return getattr(dataset, "_distributed", None) is not None


class Stream(Source):
    """The global batches of one process, made of a stream that every rank reads whole.

    The script's loader is copied, not rebuilt: workers, pinning, collating and the walk of a subclass stay
    as they are. Only its dataset is seen through `Reading`.

    Args:
        loader: The script's loader over an IterableDataset.
        backend: Carries random states and prints between the ranks.
        split: Whether the script's batch size is the global one.
        even: Whether a tail is completed by repeats.

    Raises:
        ValueError: `split` is wanted, and the ranks cannot divide the batch size.
    """

    def __init__(
        self, loader: DataLoader[Any], backend: Backend, *, split: bool = False, even: bool = True
    ) -> None:
        slicing = slicing_of(loader, backend.topology.world_size, split=split, even=even)
        self._rank = backend.topology.rank
        self._backend = backend
        self._flow = Flow(loader, slicing, (self._rank,))
        self._slicing = slicing
        self._stood: WeakKeyDictionary[Loop, Place] = WeakKeyDictionary()

    @override
    def walk(self, loop: Loop, start: dict[str, Any]) -> Iterator[Any]:
        place = self._stood[loop] = Place(start, self._flow.workers)
        for made, batches, last in _checked(self._flow.batches(start, self._backend, place), self._backend):
            place.move(made)
            loop.share = self._slicing.share(made.size, self._rank, last=last)
            yield batches[0]

    @override
    def steps(self) -> int:
        return self._flow.steps()

    @override
    def position(self, loop: Loop) -> dict[str, Any]:
        place = self._stood.get(loop)
        return {} if place is None else place.position()

    @override
    def after(self, steps: int, start: dict[str, Any]) -> dict[str, Any]:
        return self._flow.after(steps, start)


class Flow:
    """The script's loader, giving what `Reading` makes of its stream.

    Args:
        loader: The script's loader over an IterableDataset.
        slicing: How samples are divided.
        ranks: Whose batches are made.
    """

    def __init__(self, loader: DataLoader[Any], slicing: Slicing, ranks: tuple[int, ...]) -> None:
        self._loader = loader
        self._slicing = slicing
        single = loader.batch_size is None
        self._recipe = Recipe(
            loader.dataset, loader.collate_fn, loader.worker_init_fn, slicing, ranks, single=single
        )
        self._kept: _Bare | None = None
        self.workers = loader.num_workers

    def batches(
        self, start: dict[str, Any], backend: Backend, place: Place
    ) -> Iterator[tuple[Made, list[Any], bool]]:
        """Every global batch after `start`: how it was made, the batch of each rank, whether it is the last."""
        first = self._started(start, backend, place)
        return _with_end(_in_order(self._unskipped(first, start.get("skip", 0), place)), self.workers)

    def steps(self) -> int:
        """How many steps an epoch has, by the stream's own length.

        Raises:
            TypeError: It has none.
        """
        if not hasattr(self._loader.dataset, "__len__"):
            kind = type(self._loader.dataset).__name__
            raise TypeError(
                f"the stream {kind} has no length; give it __len__, or count the steps as they come"
            )
        return self._slicing.steps(len(self._loader.dataset))

    def after(self, steps: int, start: dict[str, Any]) -> dict[str, Any]:
        """The position so many steps after `start`."""
        if not steps:
            return start
        samples = start.get("samples", 0) + steps * self._slicing.size
        return start | {"samples": samples, "skip": start.get("skip", 0) + steps}

    def _started(
        self, start: dict[str, Any], backend: Backend, place: Place
    ) -> Iterator[tuple[Made, list[Any]]]:
        """All batches; the first is read under random states that are the same on all ranks."""
        leads = backend.topology.rank == 0 and "rng" not in start
        here = rng.capture()
        states = start["rng"] if "rng" in start else rng.agreed(here, backend)
        place.began = {"rng": states} | self._generator(start, backend)
        apart = None if states is here else Apart(states)
        reads = apart if self.workers == 0 else None
        if reads and self._loader.generator is None:
            with reads():  # torch draws a seed for workers, also where there are none
                torch.empty((), dtype=torch.int64).random_()
        walk = iter(self._walk(start, reads))
        # With workers only their seeds are drawn here.
        with nullcontext() if apart is None or reads or leads else apart():
            first = next(walk, None)
        if reads and leads:
            reads.take_over()  # the states of the first rank go on as if it were alone
        if first is not None:
            yield first
            yield from walk

    def _generator(self, start: dict[str, Any], backend: Backend) -> dict[str, Any]:
        """The state of the loader's own generator, the first rank's on all."""
        generator = self._loader.generator
        if generator is None:
            return {}
        state = start["generator"] if "generator" in start else backend.broadcast(generator.get_state())
        generator.set_state(state)
        return {"generator": state}

    def _walk(self, start: dict[str, Any], apart: Apart | None) -> Iterator[tuple[Made, list[Any]]]:
        ranks = len(self._recipe.ranks)
        if self._kept is None or start:
            bare = _Bare(self._loader, Reading(self._recipe, start, apart))
            self._kept = bare if self._loader.persistent_workers else None
        else:
            bare = self._kept
        bare.aside.clear()
        walk = iter(bare.loader)
        for batch in walk:
            made = bare.aside.popleft()
            others = [next(walk) for _ in range(ranks - 1)]
            for _ in others:
                bare.aside.popleft()
            yield made, [batch, *others]

    def _unskipped(
        self, walk: Iterator[tuple[Made, list[Any]]], skip: int, place: Place
    ) -> Iterator[tuple[Made, list[Any]]]:
        """Without the steps that workers with parts of their own could not leave out themselves."""
        for step, (made, batches) in enumerate(walk):
            if made.worker is not None and step < skip:
                place.move(made)
            else:
                yield made, batches


class _Bare:
    """A copy of the script's loader whose walk gives bare batches, and puts aside how they were made."""

    def __init__(self, loader: DataLoader[Any], reading: Reading) -> None:
        aside: deque[Made] = deque()
        self.aside = aside
        self.loader = copy.copy(loader)
        inner = copy.copy(loader)
        ours = {"dataset": reading, "batch_sampler": None, "collate_fn": _same, "worker_init_fn": None}
        # DataLoader guards these names against assignment; the copies are ours to change.
        vars(inner).update(ours, drop_last=False, _iterator=None, _IterableDataset_len_called=None)
        # What `DataLoader.__iter__` asks, so that the walk of a subclass sees nothing but batches.
        vars(self.loader).update(_iterator=None, _get_iterator=lambda: _Walk(inner, aside))


class _Walk:
    """An iterator of torch's, with its items taken apart."""

    def __init__(self, loader: DataLoader[Any], aside: deque[Made]) -> None:
        self._loader = loader
        self._inner: Any = type(loader)._get_iterator(loader)  # noqa: SLF001 - a subclass may have its own
        self._aside = aside
        self._ready: deque[tuple[Made, Any]] = deque()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self._ready:
            made, batches = next(self._inner)
            self._ready.extend((made, batch) for batch in batches)
        made, batch = self._ready.popleft()
        self._aside.append(made)
        return batch

    def _reset(self, _: DataLoader[Any]) -> None:
        """Begin anew with the same workers."""
        self._ready.clear()
        self._inner._reset(self._loader)  # noqa: SLF001 - what `DataLoader.__iter__` calls


class Place:
    """Where a walk stands.

    Args:
        start: Where it began.
        workers: The workers of the loader.
    """

    def __init__(self, start: dict[str, Any], workers: int) -> None:
        self.began: dict[str, Any] = {}
        self._start = start
        self._made: Made | None = None
        self._samples: int = start.get("samples", 0)
        self._parts: list[dict[str, Any]] = start.get("workers") or [{"samples": 0}] * max(1, workers)

    def move(self, made: Made) -> None:
        """A batch is handed out, or left out."""
        self._made = made
        self._samples += made.size
        if made.worker is not None:
            self._parts = [
                _stand(made) if worker == made.worker else part for worker, part in enumerate(self._parts)
            ]

    def position(self) -> dict[str, Any]:
        """See `Source.position`."""
        return self._start if self._made is None else self.stand() | self.began

    def stand(self) -> dict[str, Any]:
        """The position after the last batch, without what was the same at the start of the walk."""
        assert self._made is not None
        if self._made.worker is None:
            return {"whole": True} | _stand(self._made)
        turn = (self._made.worker + 1) % len(self._parts)
        return {"samples": self._samples, "workers": self._parts, "turn": turn}


def _stand(made: Made) -> dict[str, Any]:
    if made.last:  # a dataset may have set itself back to its start already
        return {"samples": made.samples, "ended": True}
    state = {} if made.state is None else {"state": made.state, "state_at": made.samples}
    return {"samples": made.samples} | state


def _in_order(walk: Iterator[tuple[Made, list[Any]]]) -> Iterator[tuple[Made, list[Any]]]:
    """See that workers which read the same stream read the same.

    Raises:
        StreamsDifferError: They do not.
    """
    running: int | None = None
    for made, batches in walk:
        if made.worker is None:
            if running not in {None, made.before}:
                raise StreamsDifferError(
                    "the workers of this loader do not read the same stream, so samples would be lost and "
                    "repeated. Split the dataset by torch.utils.data.get_worker_info() in its __iter__, or let "
                    "every worker read alike: seed its shuffling from the epoch, not from the worker."
                )
            running = made.after
        yield made, batches


def _with_end(walk: Iterator[tuple[Made, list[Any]]], workers: int) -> Iterator[tuple[Made, list[Any], bool]]:
    """Which batch is the last: where workers have parts of their own, when all are through."""
    open_ = max(1, workers)
    ahead = next(walk, None)
    while ahead is not None:
        made, batches = ahead
        if made.worker is None or not made.last:
            yield made, batches, made.last
            ahead = next(walk, None)
            continue
        open_ -= 1
        # A worker without a sample never says that it is through.
        ahead = next(walk, None) if open_ else None
        yield made, batches, ahead is None


def _checked(
    walk: Iterator[tuple[Made, list[Any], bool]], backend: Backend
) -> Iterator[tuple[Made, list[Any], bool]]:
    """Have the ranks compare what they read: before the first batch, ever more seldom, and at the end."""
    try:
        ahead = next(walk, None)
    except StreamsDifferError:
        raise  # the same everywhere
    except Exception:
        _compare(0, 0, backend, failed=True)
        raise
    if ahead is None:
        _compare(0, 0, backend)
    running, samples, step = 0, 0, 0
    while ahead is not None:
        made, batches, last = ahead
        running, samples, step = mixed(running, made.after), samples + made.size, step + 1
        if last or step & (step - 1) == 0:
            _compare(running, samples, backend)
        yield made, batches, last
        ahead = next(walk, None)


def _compare(running: int, samples: int, backend: Backend, *, failed: bool = False) -> None:
    if backend.topology.world_size == 1:
        return
    mine = torch.tensor([samples, running, int(failed)], device=backend.device)
    everyone = backend.all_gather(mine).cpu()
    lost = everyone[:, 2].nonzero().flatten().tolist()
    if lost and not failed:
        raise RuntimeError(f"rank {', '.join(map(str, lost))} could not read the stream: see its own error")
    if lost or bool((everyone == everyone[0]).all()):
        return
    raise StreamsDifferError(
        "the ranks do not read the same stream (samples read up to here, by rank: "
        f"{everyone[:, 0].tolist()}). Every rank reads the whole stream and keeps its slices of it, so all have to "
        "read the same in the same order. If the dataset gives each rank a part of its own, say so: "
        'prepare_data_loader(loader, data="sharded"). If each process shuffles on its own, seed it alike, or '
        "have the first rank read for all: dispatch_batches=True."
    )


def _same(item: Any) -> Any:
    return item
