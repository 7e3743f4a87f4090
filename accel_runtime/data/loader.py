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

__all__ = ["LoaderOptions", "PreparedLoader", "skip_first_batches"]


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
    resume: dict[str, Any] | None = None
    """Where the next walk begins; None: at the start of the epoch."""
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
        start = self._begin()
        loop = self._progress.loop = Loop(self._progress.epoch)
        track, place = self._loops.opened(loop), self._placing()
        there = tree.presence(self._backend.device)
        note = self._loops.note if self._backend.repeats else None
        beat = heartbeat()
        finished = False
        try:
            for batch in self._backend.walked(
                lambda loop: self._source.walk(loop, start),
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
                yield batch
            finished = True
        finally:
            self._loops.closed(track, finished=finished)
            if finished:
                self._progress.epoch += 1
                self._progress.loop = None
                self._progress.repeats = track.repeats

    def _begin(self) -> dict[str, Any]:
        """The position of the next walk."""
        progress = self._progress
        if progress.loop is not None:  # a walk that was left early was an epoch too
            progress.epoch += 1
        start, progress.resume = progress.resume or {}, None
        self._tell(progress.epoch)
        return start if start.get("position") else self._source.after(self._skip, start)

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
        """Say which epoch comes next; the sampler, batch sampler or dataset that wants to know is told."""
        self._progress.epoch = epoch
        self._progress.loop = None
        self._tell(epoch)

    def _tell(self, epoch: int) -> None:
        for part in (self.batch_sampler, self.sampler, self.dataset):
            if callable(getattr(part, "set_epoch", None)):
                part.set_epoch(epoch)  # type: ignore[union-attr]

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
        alone = self._backend.data.world_size == 1
        if alone and (self.drop_last or not self._backend.static_shapes):
            return "no repeats"
        if self.drop_last:
            return "what does not fill a global batch is left out"
        if alone and not self._options.even_batches:
            return "the last batch is as short as it comes, a shape of its own"
        if not self._options.even_batches:
            return "the end is divided evenly, gradients count its samples"
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
            under: numbers, text and tensors only.
        """
        progress = self._progress
        at = (
            progress.resume or self._source.beginning() if progress.loop is None else progress.loop.position()
        )
        return {"epoch": progress.epoch, "kind": self._source.kind} | at

    def load_state_dict(self, state_dict: dict[str, Any], *, random_restored: bool = False) -> None:
        """Go on from where `state_dict` was taken, with the next walk.

        Args:
            state_dict: What `state_dict` gave.
            random_restored: The caller puts the global random generators back too, as they were then. An epoch that
                had not begun draws from them as they are when it begins, as it would have without a break; otherwise
                it draws under the states that `state_dict` kept.

        Raises:
            ValueError: It is not what `state_dict` gave, or gave for a loader of another kind; or it holds for
                another number of processes or workers only.
        """
        kind = self._source.kind
        start = {k: v for k, v in state_dict.items() if k not in {"epoch", "kind", "restored"}}
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
        if random_restored:
            start = self._source.following(start)
        self._progress.epoch, self._progress.loop, self._progress.resume = state_dict["epoch"], None, start

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
