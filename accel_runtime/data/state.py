"""States of prepared loaders and of their sources: what a checkpoint holds, and how states follow from each other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Self

from typing_extensions import override

from accel_runtime.backends.rng import RandomStates
from accel_runtime.foundation.epoch_progress import CyclePart
from accel_runtime.storage.schema import Count, FieldError, ValueRule

__all__ = [
    "DatasetState",
    "IterationState",
    "LoadedData",
    "LoaderState",
    "MapStyleState",
    "NextBatch",
    "PreshardedState",
    "ReaderState",
    "SourceState",
    "StreamState",
]


@dataclass(frozen=True)
class _EpochState:
    """Offset in an epoch of data that all ranks share; equal on all ranks, and valid for any number of them."""

    begun: bool = False
    """If true, the random draws of the start of the epoch are done; otherwise the next iteration makes them."""
    offset: Count = 0
    """Number of samples before the next batch; of batches, if the script's batch sampler makes them."""
    random: RandomStates | None = None
    """Random states at the start of the epoch; None draws from the generators as they are then."""
    cycle_offset: Count = 0
    """Samples of the current cycle before the next batch; in a stream, `offset` does not include them."""
    cycle_size: Count = 0
    """Samples of a cycle, if `cycle_offset` is within one."""

    @property
    def is_at_start(self) -> bool:
        """Return whether no batch of the epoch was returned or skipped."""
        return not (self.offset or self.cycle_offset)

    def enter_cycle(self, offset: int, cycle: CyclePart | None) -> Self:
        """Return the state within a cycle, after `offset` of its samples; 0 is the end of the cycle."""
        return (
            self if cycle is None or not offset else replace(self, cycle_offset=offset, cycle_size=cycle.size)
        )

    def check_cycle(self, size: int | None) -> None:
        """Raise ValueError if the state is within a cycle of another size."""
        if self.cycle_offset and self.cycle_size != size:
            now = f"global_batch_size={size}" if size else "no global_batch_size"
            raise ValueError(
                f"Cannot resume this loader: the state was saved after {self.cycle_offset} samples of an optimizer step of "
                f"{self.cycle_size}, and this run has {now}. Resume with global_batch_size={self.cycle_size}, or from a state that "
                "was saved after an optimizer step."
            )

    def skip(self, steps: int, stride: int) -> Self:
        """Return the state `steps` steps later, each of `stride` samples."""
        return replace(self, offset=self.offset + steps * stride)

    def restart(self) -> Self:
        """Return the start of the same epoch, in the same order."""
        return replace(self, offset=0, cycle_offset=0, cycle_size=0) if self.begun else self

    def rewind(self) -> Self:
        """Return the state before the draws of the start of the epoch, which are then made again with the same result."""
        return replace(self, begun=False, offset=0, cycle_offset=0, cycle_size=0)

    def adapt_random(self, *, restored: bool) -> Self:
        """Return the state for a run that has restored the global generators, or has not.

        If it has, an epoch that has not begun draws from them; otherwise from the states here.
        """
        if not restored or self.begun or self.random is None:
            return self
        return replace(self, random=self.random.select_generators())


@dataclass(frozen=True)
class MapStyleState(_EpochState):
    """Offset in an epoch of a map-style dataset."""

    kind: ClassVar[str] = "map_style"
    seed: Annotated[int, ValueRule("an integer of 64 bits", lambda seed: -(2**63) <= seed < 2**64)] | None = (
        None
    )
    """Seed of shuffled orders, which are drawn from it and the number of the epoch."""
    workers_persist: bool = False
    """If true, the workers are those of an earlier epoch, and no seed is drawn for them."""
    fingerprint: Count | None = None
    """Fingerprint of the samples before `offset`, if a sampler of the script draws the order."""

    @override
    def skip(self, steps: int, stride: int) -> Self:
        return replace(super().skip(steps, stride), fingerprint=None)

    @override
    def restart(self) -> Self:
        return replace(super().restart(), fingerprint=None)


@dataclass(frozen=True)
class DatasetState:
    """The own state of a dataset, and the samples that followed it, to verify it when it is loaded."""

    state: Any
    """Return value of its `state_dict()`."""
    offset: Count
    """Number of samples that its reader had read."""
    num_samples: Count
    """Number of samples that were read after it."""
    fingerprint: Count
    """Fingerprint of these samples."""
    random: RandomStates | None = None
    """Random states at `offset`; None if they are those at the start of the iteration."""


@dataclass(frozen=True)
class ReaderState:
    """Offset of one reader of a stream: of a worker, or of the process itself."""

    offset: Count = 0
    """Number of samples in the batches that were returned."""
    ended: bool = False
    """If true, the reader has returned all of its samples."""
    dataset: DatasetState | None = None
    """State of the dataset, if it has one."""


@dataclass(frozen=True)
class StreamState(_EpochState):
    """Offset in an epoch of a stream."""

    kind: ClassVar[str] = "iterable"
    skipped_steps: Count = 0
    """Number of steps that are still to be read and dropped; `offset` includes them."""
    draws_in_turn: bool = False
    """If true, the stream draws from the global generators, in turn with the script."""
    reader: ReaderState | None = None
    """State of the dataset, if every reader reads the whole stream."""
    workers: tuple[ReaderState, ...] | None = None
    """Offset of each worker, if the dataset splits itself among the workers."""
    next_worker: Count = 0
    """Worker that returns the next batch."""
    worker_seed: Count | None = None
    """Seed that persistent workers share since their first iteration."""
    worker_iterations: Count = 0
    """Number of iterations that persistent workers began before this one."""

    def check(self) -> None:
        """Raise `FieldError` if the next worker is not one of them."""
        if self.workers is not None and self.next_worker >= len(self.workers):
            raise FieldError(
                f"is {self.next_worker}, and there are {len(self.workers)} workers", ("next_worker",)
            )

    @override
    def skip(self, steps: int, stride: int) -> Self:
        skipped = replace(self, skipped_steps=self.skipped_steps + steps)
        return super(StreamState, skipped).skip(steps, stride)

    @override
    def restart(self) -> Self:
        start = replace(self, skipped_steps=0, reader=None, workers=None, next_worker=0)
        return super(StreamState, start).restart() if self.begun else self

    @override
    def rewind(self) -> Self:
        return type(self)(random=self.random)

    @override
    def adapt_random(self, *, restored: bool) -> Self:
        adapted = super().adapt_random(restored=restored)
        return adapted if restored else replace(adapted, draws_in_turn=False)


@dataclass(frozen=True)
class PreshardedState:
    """Offset in an epoch of data that the script shards: specific to a rank, and valid for their number."""

    kind: ClassVar[str] = "presharded"
    offset: Count = 0
    """Number of steps before the next batch."""
    world_size: Annotated[int, ValueRule("at least 1", lambda size: size > 0)] | None = None
    """Number of data ranks that saved the state; None if it is valid for any number."""
    data_rank: Count | None = None
    """Data rank that saved the state; None if `world_size` is."""
    local: MapStyleState | StreamState | None = None
    """State of the rank's own data; None at the start of the first epoch."""
    random_at_start: RandomStates | None = None
    """Random states of the process at the start of the epoch, if the process itself reads the data."""
    random_of_next: RandomStates | None = None
    """Random states that the batch after the newest one was read under, since each is read one step ahead."""

    @property
    def is_at_start(self) -> bool:
        """Return whether no batch of the epoch was returned or skipped."""
        return not self.offset

    def skip(self, steps: int, stride: int) -> PreshardedState:
        """Return the state `steps` steps later, in which the rank reads `stride` samples each."""
        local = None if self.local is None else self.local.skip(steps, stride)
        return replace(self, offset=self.offset + steps, local=local)

    def restart(self) -> PreshardedState:
        """Return the start of the same epoch, in the same order."""
        if self.local is None:
            return self
        return replace(self, offset=0, local=self.local.restart(), random_of_next=None)

    def adapt_random(self, *, restored: bool) -> PreshardedState:
        """Return the state for a run that has restored the global generators, or has not."""
        return self if self.local is None else replace(self, local=self.local.adapt_random(restored=restored))


NextBatch = Literal["next_batch", "epoch_start", "exact"]
"""Point at which a loader continues after a state was loaded; see `PreparedLoader.load_state_dict`."""
SourceState = MapStyleState | StreamState | PreshardedState
"""State of a source: of an epoch that has begun or, before its first batch, of one that begins with the next iteration."""


@dataclass(frozen=True)
class IterationState:
    """State of an iteration over a loader that is running."""

    epoch: Count
    """Number of its epoch."""
    source: SourceState
    """Offset after the newest batch."""
    num_batches: Count = 0
    """Number of batches that it has returned or skipped."""
    ended: bool = False
    """If true, the newest batch is the last one of the epoch."""
    depth: Count = 0
    """Number of running iterations that this one is inside of; see `LoopRecord.find_nesting`."""

    def restart(self) -> IterationState:
        """Return the state at the start of the epoch; `num_batches` stays the number of those returned before."""
        return replace(self, source=self.source.restart(), ended=False)


@dataclass(frozen=True)
class LoadedData:
    """Data of a loader, as far as they are known without reading samples, to find those of another loader."""

    dataset: str
    """Name of the class of the dataset."""
    num_samples: Count | None = None
    """Length of the dataset; None for a stream."""
    sampler: str = ""
    """Name of the class that draws the order; empty for a stream."""
    num_drawn: Count | None = None
    """Number of samples that a sampler of torch draws in an epoch; other samplers may draw any number."""
    seeded: bool = False
    """If true, orders are drawn from a seed and the number of the epoch only."""

    def list_differences(self, saved: LoadedData, *, within_epoch: bool) -> list[str]:
        """Return the differences from the data of a saved state, as text; those of the order matter within an epoch only."""
        values: list[tuple[str, Any, Any, str]] = [
            ("the dataset is a", self.dataset, saved.dataset, ""),
            ("the dataset has", self.num_samples, saved.num_samples, " samples"),
        ]
        if within_epoch:
            values.append(("the order is drawn by a", self.sampler, saved.sampler, ""))
            if self.num_samples == saved.num_samples and self.sampler == saved.sampler:
                values.append(("the sampler draws", self.num_drawn, saved.num_drawn, " samples"))
            values.append(("use_seedable_sampler is", self.seeded, saved.seeded, ""))
        return [f"{name} {now}{unit}, not {then}" for name, now, then, unit in values if now != then]


@dataclass(frozen=True)
class LoaderState:
    """State of a prepared loader: where its next iterations begin."""

    epoch: Count
    """Number of the next epoch that begins."""
    next_epoch: SourceState
    """State in which it begins."""
    data: LoadedData
    """Data of the loader."""
    running: tuple[IterationState, ...] = ()
    """Iterations that are running, in the order in which they began; not those that the script has left."""

    def move_to(self, position: NextBatch) -> LoaderState:
        """Return the state for a run that continues at this position."""
        if position == "exact":
            return self
        running = tuple(each for each in self.running if not each.ended)
        if position == "epoch_start":
            running = tuple(each.restart() for each in running)
        return replace(self, running=running)

    def adapt_random(self, *, restored: bool) -> LoaderState:
        """Return the state for a run that has restored the global generators, or has not."""
        running = [replace(each, source=each.source.adapt_random(restored=restored)) for each in self.running]
        next_epoch = self.next_epoch.adapt_random(restored=restored)
        return replace(self, next_epoch=next_epoch, running=tuple(running))
