"""The prepared loader: this rank's part of every global batch, on the device, from any position of an epoch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler
from typing_extensions import override

from accel_runtime import rng, tree
from accel_runtime.backends.base import Backend
from accel_runtime.data.copies import alike_in_copies
from accel_runtime.data.loops import Loops
from accel_runtime.data.script import altered, batch_size_of, sampler_of, slot_of
from accel_runtime.data.separate import elsewhere
from accel_runtime.data.source import Loop, Source
from accel_runtime.heartbeat import heartbeat
from accel_runtime.randomness import Apart, capture

__all__ = ["LoaderOptions", "NextBatch", "PreparedLoader", "skip_first_batches"]


_ABOUT = {"epoch", "kind", "restored", "batches", "upcoming"}
"""The keys of a loader's state that are not those of a position of its source."""
_END = object()

NextBatch = Literal["next_batch", "epoch_start", "exact"]
"""Where a loader begins after a state was loaded; see `PreparedLoader.load_state_dict`."""


@dataclass(frozen=True)
class LoaderOptions:
    """How loaders are prepared."""

    split_batches: bool = False
    """Whether the script's batch size is the global one, to be split among the ranks."""
    even_batches: bool = True
    """Whether the end of an epoch is filled up, so that all ranks see equal shapes."""
    dispatch: bool = False
    """Whether the first rank alone reads, and sends the others their parts."""
    data: Literal["global", "sharded"] = "global"
    """Whether the loader has the data of all ranks, or those of its own rank already."""
    seeded: bool = False
    """Whether shuffled orders are drawn anew for every epoch from a seed and the epoch's number alone."""
    seed: int | None = None
    """That seed; None is what torch was seeded with."""
    place: bool = True
    """Whether batches are moved to the device."""
    non_blocking: bool = False
    """Whether batches are moved while the script goes on; those in pinned memory always are."""
    rng_types: tuple[str, ...] = ()
    """The generators every rank takes over from the first at the start of an epoch."""


@dataclass
class _Progress:
    """How far a loader has come; shared with its copies that leave out the first steps."""

    epoch: int = 0
    """Of the walk under way or left; of the next one, where none is."""
    loop: Loop | None = None
    """The walk under way or left early."""
    batches: int = 0
    """How many batches of the epoch under way were handed out or skipped."""
    resume: dict[str, Any] | None = None
    """Where the next walk begins; None: at the start of the epoch."""
    upcoming: dict[str, Any] | None = None
    """Where the epoch after that of `resume` begins, if `resume` is the end of its epoch."""
    saved_batches: int = 0
    """How many batches had been handed out when the state that `resume` comes from was taken."""
    repeats: int = 0
    """How many samples the last whole epoch trained on twice, over all ranks."""


class PreparedLoader(DataLoader[Any]):
    """A DataLoader that gives this rank its part of every global batch, on the device.

    Attributes are those of the script's loader.

    Args:
        loader: The script's loader.
        source: What its batches come from.
        backend: Carries random states, where the options ask for it.
        loops: Learns of every batch handed out.
        options: See `LoaderOptions`.
    """

    def __init__(
        self, loader: DataLoader[Any], source: Source, backend: Backend, loops: Loops, options: LoaderOptions
    ) -> None:
        # DataLoader guards names against assignment, and its own __init__ would build another loader.
        vars(self).update({k: v for k, v in vars(loader).items() if k != "_iterator"})
        self._source = source
        self._backend = backend
        self._loops = loops
        self._options = options
        self._progress = _Progress()
        self._skip = 0

    @override
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        rng.share_states(list(self._options.rng_types), self._backend)
        alike_in_copies(self._backend)
        progress = self._progress
        start, redone = self._begin()
        loop = progress.loop = Loop(progress.epoch)
        track, place = self._loops.opened(loop), self._placing()
        there = tree.presence(self._backend.device)
        note = self._loops.note if self._backend.repeats else None
        beat = heartbeat()
        finished = False
        try:
            for batch in self._backend.walked(
                lambda loop: _walk(self._source, loop, start, redone),
                loop,
                place=place is not None,
                loaded_beside=self.num_workers > 0,
            ):
                if place and not there(batch):
                    batch = place(batch)  # noqa: PLW2901 - the same batch, elsewhere
                if note:
                    note(track, batch)
                if beat is not None:
                    beat.batch()
                progress.batches += 1
                yield batch
            finished = True
        finally:
            self._loops.closed(track, finished=finished)
            if finished:
                progress.epoch += 1
                progress.loop = None
                progress.repeats = track.repeats

    def _begin(self) -> tuple[dict[str, Any], int]:
        """Return the position of the next walk, and how many of its batches were handed out before a state was saved."""
        progress = self._progress
        if progress.loop is not None:  # a walk that was left early was an epoch too
            progress.epoch += 1
        start, progress.resume, progress.upcoming = progress.resume or {}, None, None
        saved, progress.saved_batches = progress.saved_batches, 0
        self._tell(progress.epoch)
        if start.get("position"):
            progress.batches = saved
            return start, 0
        progress.batches = self._skip
        return self._source.after(self._skip, start), max(0, saved - self._skip)

    def _placing(self) -> Callable[[Any], Any] | None:
        """How a batch comes to the device; None where it is there already."""
        device = self._backend.device
        if not self._options.place:
            return None
        non_blocking = self._options.non_blocking or self.pin_memory
        return lambda batch: tree.send(batch, device, non_blocking=non_blocking)

    @override
    def __len__(self) -> int:
        """The number of steps; the same on every rank."""
        return max(self._source.steps() - self._skip, 0)

    @property
    def epoch(self) -> int:
        """The number of the epoch under way or, between two, of the next, from 0."""
        return self._progress.epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch, for this loader and for each of its samplers and its dataset with `set_epoch`.

        After a state was loaded, another number than that of its epoch begins that other epoch at its start.
        """
        progress = self._progress
        if epoch != progress.epoch and progress.resume is not None:
            progress.resume = progress.upcoming if epoch == progress.epoch + 1 else None
            progress.upcoming, progress.saved_batches = None, 0
        progress.epoch = epoch
        progress.loop = None
        self._tell(epoch)

    def _tell(self, epoch: int) -> None:
        told: list[Any] = []
        parts: list[Any] = [self.batch_sampler, self.sampler, self.dataset]
        while parts:
            part = parts.pop()
            if part is None or any(part is one for one in told):
                continue
            told.append(part)
            if callable(getattr(part, "set_epoch", None)):
                part.set_epoch(epoch)
            if isinstance(part, Sampler):
                # A batch sampler draws from a sampler, which may draw from another.
                parts += [getattr(part, "sampler", None), getattr(part, "batch_sampler", None)]

    @property
    def source_batch_size(self) -> int | None:
        """Samples in a full batch of the script's loader; None where its batches have no fixed size."""
        return batch_size_of(self)

    @property
    def total_batch_size(self) -> int:
        """Samples in a full global batch.

        Raises:
            ValueError: The loader's batches have no fixed size.
        """
        if self.source_batch_size is None:
            raise ValueError("this loader's batches have no fixed size")
        return self.source_batch_size * (1 if self._options.split_batches else self._backend.data.world_size)

    @property
    def end(self) -> str:
        """What becomes of the end of an epoch, for people."""
        if self._options.data == "sharded":
            return "each process has data of its own; one that is out repeats a batch that counts for nothing"
        alone, even = self._backend.data.world_size == 1, self._options.even_batches
        if alone and (self.drop_last or not self._backend.static_shapes):
            return "no repeats"
        if self.drop_last:
            return "what does not fill a global batch is left out"
        if not even:
            divided = "the end is divided evenly, gradients count its samples"
            return "the last batch is as short as it comes, a shape of its own" if alone else divided
        if self.source_batch_size is None and not self._backend.static_shapes:
            return (
                "batches keep their sizes; one that is missing at the end is a repeat that counts for nothing"
            )
        return f"the end is filled up from the start{self._filled()}"

    def _filled(self) -> str:
        count, size = _length(self), self.source_batch_size
        samples = _length(self.sampler)
        if count is None or size is None or samples is None or isinstance(self.dataset, IterableDataset):
            return ""
        return f": {count * self.total_batch_size - samples} repeats an epoch"

    @property
    def repeats(self) -> int:
        """How many samples of the last whole epoch were repeats, over all ranks."""
        return self._progress.repeats

    @property
    def total_dataset_length(self) -> int:
        """Samples in the dataset.

        Raises:
            TypeError: It is a stream of unknown length.
        """
        return len(self.dataset)  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands: equal on all ranks, and valid for another number of them.

        Returns:
            The epoch, the position in it, counting the batches handed out, and the random states the epoch is drawn
            under: numbers, text and tensors only. After the last batch of an epoch, also where the next one begins.
        """
        progress, loop = self._progress, self._progress.loop
        state = {"epoch": progress.epoch, "kind": self._source.kind}
        if loop is None:
            pending = {"batches": progress.saved_batches} if progress.resume else {}
            upcoming = {"upcoming": progress.upcoming} if progress.upcoming else {}
            return state | (progress.resume or self._source.beginning()) | pending | upcoming
        ended = loop.share is not None and loop.share.last
        upcoming = {"upcoming": self._source.beginning()} if ended else {}
        return state | loop.position() | {"batches": progress.batches} | upcoming

    def load_state_dict(
        self,
        state_dict: dict[str, Any],
        *,
        random_restored: bool = False,
        position: NextBatch = "next_batch",
    ) -> None:
        """Continue from where `state_dict` was taken.

        Args:
            state_dict: The return value of `state_dict`.
            random_restored: The caller puts the global random generators back too, as they were then. An epoch that
                had not begun draws from them as they are when it begins, as it would have without a break; otherwise
                it draws under the states that `state_dict` kept.
            position: Where the next iteration begins. `next_batch`: after the last batch that was handed out; after
                the last one of an epoch, at the start of the next epoch. `epoch_start`: at the first batch of that
                epoch, in the same order, for scripts that skip batches themselves. `exact`: as `next_batch`, but
                after the last batch of an epoch the iteration ends at once, so that the script does what follows
                the epoch.

        Raises:
            ValueError: It is not what `state_dict` gave, or gave for a loader of another kind; or it holds for
                another number of processes or workers only.
        """
        kind = self._source.kind
        start = {k: v for k, v in state_dict.items() if k not in _ABOUT}
        world = self._backend.data.world_size
        if start.get("world_size", world) != world:
            # First of all: on one process such a loader is of another kind, which says nothing to a person.
            raise elsewhere(start["world_size"], world)
        if not isinstance(state_dict.get("epoch"), int) or state_dict.get("kind") != kind:
            raise ValueError(
                f"this loader's state has an epoch and kind={kind!r}; this one has "
                f"{ {key: state_dict[key] for key in ('epoch', 'kind') if key in state_dict} or 'neither' }"
            )
        self._source.check(start)
        progress, epoch = self._progress, state_dict["epoch"]
        upcoming, saved_batches = state_dict.get("upcoming"), state_dict.get("batches", 0)
        if random_restored and upcoming is not None:
            upcoming = self._source.following(upcoming)
        if upcoming is not None and position != "exact":
            progress.epoch, progress.resume = epoch + 1, upcoming
            progress.upcoming, progress.saved_batches = None, 0
        else:
            start = self._source.restart(start) if position == "epoch_start" else start
            progress.epoch = epoch
            progress.resume = self._source.following(start) if random_restored else start
            progress.upcoming, progress.saved_batches = upcoming, saved_batches
        progress.loop = None

    @property
    def own_data(self) -> bool:
        """Whether every part of a batch comes from data of its own, so that each has a state of its own."""
        return self._options.data == "sharded" and self._backend.topology.world_size > 1

    def state_of(self, everyone: Sequence[Any]) -> Any:
        """What holds for this rank, out of the states of another number of ranks, which may have had as many parts."""
        parts = (everyone[0] or {}).get("world_size", 0)
        if parts != self._backend.data.world_size or len(everyone) % parts:
            return everyone[0]
        return everyone[self._backend.data.rank * (len(everyone) // parts)]

    def skipping(self, steps: int) -> PreparedLoader:
        """This loader without the first steps of every epoch; both count the same epochs."""
        other = copy.copy(self)
        vars(other)["_skip"] = self._skip + steps
        return other

    @contextmanager
    def overridden(self, *, even_batches: bool) -> Iterator[None]:
        """Inside, epochs that begin treat their end so."""
        with self._source.overridden(even=even_batches):
            yield

    def __getattr__(self, name: str) -> Any:
        # Attributes a subclass of DataLoader computes live on the loader that is walked.
        if name == "_source":
            raise AttributeError(name)
        return getattr(self._source.inner or self.dataset, name)


def _walk(source: Source, loop: Loop, start: dict[str, Any], redone: int) -> Iterator[Any]:
    """Iterate over the batches from `start`; the first `redone` are loaded without drawing from the run's generators.

    They were loaded before the state was saved, so the generators that were restored have those draws behind them.
    """
    if not redone:
        return source.walk(loop, start)
    return _isolate_first(source.walk(loop, start), redone, Apart(capture() | start.get("random", {})))


def _isolate_first(batches: Iterator[Any], count: int, isolated: Apart) -> Iterator[Any]:
    for _ in range(count):
        with isolated():
            batch = next(batches, _END)
        if batch is _END:
            return
        yield batch
    yield from batches


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """A loader that leaves out the first batches of every epoch, without loading their samples.

    Args:
        dataloader: A prepared loader; or one that is not, over a dataset with indices.
        num_batches: How many, from the start of the epoch. A state that was loaded says the position itself.

    Raises:
        ValueError: A negative number; or a stream that is not prepared yet.
    """
    if num_batches < 0:
        raise ValueError(f"num_batches must be at least 0; it is {num_batches}")
    if isinstance(dataloader, PreparedLoader):
        return dataloader.skipping(num_batches)
    if isinstance(dataloader.dataset, IterableDataset):
        raise ValueError(  # noqa: TRY004 - the type is right, the order is not
            "prepare() this loader before skip_first_batches: its dataset is a stream"
        )
    return altered(dataloader, **{slot_of(dataloader): _Skipping(sampler_of(dataloader), num_batches)})


class _Skipping(Sampler[Any]):
    """A sampler or batch sampler without the first of what it draws."""

    def __init__(self, source: Any, count: int) -> None:
        self._source, self._count = source, count
        if isinstance(source, BatchSampler):
            self.sampler, self.batch_size, self.drop_last = (
                source.sampler,
                source.batch_size,
                source.drop_last,
            )

    @override
    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._source), self._count, None)

    def __len__(self) -> int:
        return max(len(self._source) - self._count, 0)

    def set_epoch(self, epoch: int) -> None:
        """Pass it on."""
        if callable(getattr(self._source, "set_epoch", None)):
            self._source.set_epoch(epoch)
