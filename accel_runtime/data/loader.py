"""Prepared loader: this rank's slice of every global batch, on the device, from any offset of an epoch."""

from __future__ import annotations

import copy
import inspect
import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from types import FrameType
from typing import Any, TypeVar

from torch.nn import BatchNorm1d, BatchNorm2d, BatchNorm3d
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler
from typing_extensions import override

from accel_runtime.backends import rng
from accel_runtime.backends.base import Backend
from accel_runtime.backends.batch_copies import StreamCopies, copy_each, prefetch_batches
from accel_runtime.backends.rng import IsolatedRNG, ProcessRandomStates, RandomStates
from accel_runtime.data.active_loops import (
    ActiveLoops,
    EarlierLoops,
    LoopRecord,
    LoopStep,
    capture_stack,
    list_callers,
)
from accel_runtime.data.presharded import are_consistent, build_world_size_error
from accel_runtime.data.source import (
    Source,
    batch_size_of,
    len_or_none,
    sampler_attribute,
    sampler_of_loader,
)
from accel_runtime.data.state import (
    IterationState,
    LoadedData,
    LoaderState,
    NextBatch,
    PreshardedState,
    SourceState,
)
from accel_runtime.data.token_batches import LengthOf, TokenBatchSampler
from accel_runtime.foundation import nested
from accel_runtime.foundation.epoch_progress import EpochProgress, StepInfo
from accel_runtime.foundation.options import TokenBudget
from accel_runtime.foundation.prepared_object import PreparedObject
from accel_runtime.foundation.torch_internals import TORCH, copy_attributes, copy_loader
from accel_runtime.observe.call_sites import call_site
from accel_runtime.observe.heartbeat import heartbeat
from accel_runtime.observe.progress import LoaderEpoch
from accel_runtime.observe.throughput import TokenCounter
from accel_runtime.storage.schema import FieldError, read_value, write_record

__all__ = ["LoaderOptions", "PreparedLoader", "check_model_parallel_ranks", "skip_first_batches"]


_T = TypeVar("_T")
_LOG = logging.getLogger("accel_runtime.data")
_END = object()
_LOCAL_NORMS = (BatchNorm1d, BatchNorm2d, BatchNorm3d)
"""Layers whose statistics are those of one process; `SyncBatchNorm` is none of them."""


@dataclass(frozen=True)
class LoaderOptions:
    """Options of prepared loaders."""

    split_batches: bool = False
    """If true, the script's batch size is the global one, split among the ranks."""
    even_batches: bool = True
    """If true, the last batch is padded, so that all ranks have equal shapes; a presharded loader pads with static shapes only."""
    dispatch: bool = False
    """If true, the first rank reads for all and sends the other ranks their batches."""
    presharded: bool = False
    """If true, the script has sharded the data: each rank's loader has those of this rank only."""
    seeded: bool = False
    """If true, shuffled orders are drawn in every epoch from the seed and the epoch's number only."""
    budget: TokenBudget | None = None
    """Budget of tokens of a batch; None keeps the batches of the script."""
    length: LengthOf | None = None
    """Length of the samples, by which they are packed, or their padding is estimated."""
    padding: float | None = None
    """Estimated share of padding in the batches of the script; None if lengths are unknown."""
    seed: int | None = None
    """Seed of shuffled orders; None is torch's initial seed."""
    put_on_device: bool = True
    """If true, batches are moved to the device."""
    non_blocking: bool = False
    """If true, batches are moved asynchronously; those in pinned memory always are."""
    global_batch_size: int | None = None
    """Samples of an optimizer step over all ranks, divided into micro-batches; None if the script counts its micro-batches."""
    count_tokens: TokenCounter | None = None
    """Returns the number of tokens in a batch of this rank; None counts none."""
    rng_types: tuple[str, ...] = ()
    """Generators whose states are broadcast from the first rank at the start of an epoch."""


class PreparedLoader(DataLoader[_T], PreparedObject):  # type: ignore[misc] # of Any
    """DataLoader that yields this rank's slice of every global batch, on the device.

    Attributes are those of the script's loader.

    Args:
        loader: The script's loader.
        source: The source of the batches.
        backend: Moves batches and exchanges random states.
        loops: Records every batch that is returned.
        options: See `LoaderOptions`.
    """

    def __init__(
        self,
        loader: DataLoader[_T],
        source: Source[Any],
        backend: Backend,
        loops: ActiveLoops,
        options: LoaderOptions,
    ) -> None:
        copy_attributes(loader, self)
        self._source = source
        self._backend = backend
        self._loops = loops
        self._options = options
        self._progress = LoaderProgress(loops)
        self._skip = 0
        self._has_warned = False
        """If true, a warning of an unknown place of the next batch was written."""

    @override
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self._backend.data_rank.world_size > 1:
            _report_local_statistics(sys._getframe(1), self._backend)  # noqa: SLF001
        # Not a generator: `zip` calls it for all loops before it requests the first batch of one.
        claimed = self._progress.claim_loaded()
        iterator = self._iterate_epoch(self._loops.capture_steps(), claimed)
        if claimed is not None:
            self._progress.register(iterator, claimed)
        return iterator

    def _iterate_epoch(self, created_in: Sequence[LoopStep], claimed: IterationState | None) -> Iterator[Any]:
        rng.broadcast_rng_types(list(self._options.rng_types), self._backend)
        check_model_parallel_ranks(self._backend)
        continued = self._progress.begin(claimed)
        state, num_replayed = self._begin_epoch(continued)
        # The loops that a continued one was inside of are not those that are running now. Another one is inside of those that the
        # script has not continued yet.
        depth = state.depth if continued else self._loops.find_depth()
        running = EpochProgress(state.epoch, state.num_batches)
        record = self._progress.add(running, created_in, depth, continued=continued is not None)
        self._loops.open(record)
        device, non_blocking = self._backend.device, self._non_blocking
        put_on_device = self._options.put_on_device
        is_on_device = nested.build_device_check(device)
        record_batch = self._loops.record_batch if self._loops.records_batches else None
        progress, counts = heartbeat(), None
        if progress is not None:
            length = self._find_epoch_length(running.epoch)
            counts = progress.begin_epoch(LoaderEpoch(running.epoch, state.num_batches, length))
        finished = False
        try:
            for batch in self._iterate_batches(running, state.source, num_replayed):
                if put_on_device and not is_on_device(batch):
                    batch = nested.send_to(batch, device, non_blocking=non_blocking)  # noqa: PLW2901
                if record_batch:
                    record_batch(record, batch)
                if counts is not None:
                    counts.returned += 1
                    self._count_samples(counts, running.step_info, batch)
                if record.outer:
                    record.leave_advanced()
                yield batch
            finished = True
            self._warn_if_empty(continued, running)
        finally:
            if progress is not None and counts is not None:
                progress.end_epoch(counts, is_finished=finished)
            if finished:
                self._progress.mark_finished(record)
            else:
                nesting = record.find_nesting(capture_stack())
                self._progress.mark_left(record, self._capture_iteration(running, nesting.depth))
            self._loops.close(record, finished=finished)

    def _warn_if_empty(self, continued: IterationState | None, running: EpochProgress) -> None:
        """Warn if an epoch has no batches after a loaded state within it."""
        if continued is None or continued.ended or self._skip or self._backend.topology.rank:
            return
        if running.num_batches == continued.num_batches:
            _LOG.warning(
                "Epoch %s of the loader over %s has no batches after the loaded state, although the run that saved was within it. "
                "Check if the dataset, its length and the batch size are those of that run.",
                running.epoch,
                type(self.dataset).__name__,
            )

    def _count_samples(self, counts: LoaderEpoch, step: StepInfo | None, batch: Any) -> None:
        """Count the samples and tokens in the batches of all ranks, without padding samples."""
        if step is not None:
            counts.samples += sum(step.num_valid)
            if step.tokens:
                counts.tokens += sum(step.tokens)
                return
        if (count_tokens := self._options.count_tokens) is not None:
            counts.tokens += self._backend.data_rank.world_size * count_tokens(batch)

    def _begin_epoch(self, continued: IterationState | None) -> tuple[IterationState, int]:
        """Return the state that an iteration begins in, and the number of batches to replay from before a save."""
        if continued is None:
            epoch, start = self._progress.begin_epoch()
            state, num_returned = IterationState(epoch, start or self._source.state_type()), 0
        else:
            state, num_returned = continued, continued.num_batches
        self._notify_samplers(state.epoch)
        if not state.source.is_at_start:
            return state, 0
        skipped = self._source.skip(state.source, self._skip) if self._skip else state.source
        state = replace(state, source=skipped, num_batches=self._skip)
        return state, max(0, num_returned - self._skip)

    def _iterate_batches(
        self, progress: EpochProgress, start: SourceState, num_replayed: int
    ) -> Iterator[Any]:
        """Yield the batches of an epoch, copied asynchronously if the script allows non-blocking copies."""

        def iterate(progress: EpochProgress) -> Iterator[Any]:
            batches = self._source.iterate(progress, start)
            if not num_replayed:
                return batches
            # They were loaded before the state was saved, so the restored generators are past those draws.
            states = RandomStates.capture()
            if not isinstance(start, PreshardedState) and start.random is not None:
                states = states.update(start.random)
            return _isolate_first(batches, num_replayed, IsolatedRNG(states))

        put_on_device = self._options.put_on_device
        stream = self._backend.runtime.copy_stream if put_on_device and self._non_blocking else None
        if stream is None:
            workers = self.num_workers > 0
            return self._backend.runtime.iterate_batches(
                iterate, progress, to_device=put_on_device, loaded_by_workers=workers
            )
        if self._source.can_fetch_ahead:
            return prefetch_batches(iterate, progress, lambda: StreamCopies(stream))
        return copy_each(iterate(progress), StreamCopies(stream))

    @property
    def _non_blocking(self) -> bool:
        return self._options.non_blocking or bool(self.pin_memory)

    @override
    def __len__(self) -> int:
        """Return the number of steps; the same on every rank."""
        return max(self._source.num_steps(self.epoch) - self._skip, 0)

    def _find_epoch_length(self, epoch: int) -> int:
        """Return the number of steps of a whole epoch; 0 if it is unknown."""
        with suppress(Exception):  # a length that only the heartbeat reads must not end the script
            return self._source.num_steps(epoch)
        return 0

    @property
    def token_batches(self) -> TokenBatchSampler | None:
        """Return the sampler of batches by a budget of tokens; None without `max_tokens`."""
        batches = self.batch_sampler
        return batches if isinstance(batches, TokenBatchSampler) else None

    @property
    def epoch(self) -> int:
        """Return the number of the running epoch or, between two, of the next, from 0."""
        return self._progress.epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch, for this loader, its dataset and its samplers.

        After a state was loaded, the number of its epoch continues that epoch, the next number begins the next one, and any
        other starts an epoch of that number from its first batch.
        """
        self._progress.set_epoch(epoch)
        self._notify_samplers(epoch)

    def _notify_samplers(self, epoch: int) -> None:
        visited: list[Any] = []
        pending: list[Any] = [self.batch_sampler, self.sampler, self.dataset]
        while pending:
            item = pending.pop()
            if item is None or any(item is other for other in visited):
                continue
            visited.append(item)
            if callable(getattr(item, "set_epoch", None)):
                item.set_epoch(epoch)
            if isinstance(item, Sampler):
                # A batch sampler draws from a sampler, which may draw from another.
                pending += [getattr(item, "sampler", None), getattr(item, "batch_sampler", None)]

    @property
    def source_batch_size(self) -> int | None:
        """Return the samples in a full batch of the script's loader; None if its batches have no fixed size."""
        return batch_size_of(self)

    @property
    def total_batch_size(self) -> int:
        """Return the samples in a full global batch: with `global_batch_size`, those of an optimizer step.

        Raises:
            ValueError: The loader's batches have no fixed size.
        """
        if self._options.global_batch_size is not None:
            return self._options.global_batch_size
        if self.source_batch_size is None:
            raise ValueError(
                "total_batch_size is unknown: the batches of this loader have no fixed size. Use the size of each batch."
            )
        return self.source_batch_size * (
            1 if self._options.split_batches else self._backend.data_rank.world_size
        )

    @property
    def local_batch_size(self) -> int:
        """Return the samples of one rank in a full batch; 0 if batches have no fixed size."""
        parts = self._backend.data_rank.world_size if self._options.split_batches else 1
        return (self.source_batch_size or 0) // parts

    @property
    def counts_samples(self) -> bool:
        """Return whether it divides global batches of a fixed number of samples."""
        return self._options.global_batch_size is not None

    @property
    def steps_per_cycle(self) -> int:
        """Return the steps of a complete global batch of `global_batch_size` samples; 1 without it, or if batches have no fixed size."""
        size, batch_size = self._options.global_batch_size, self.source_batch_size
        if size is None or batch_size is None:
            return 1
        return -(-size // (batch_size * self._backend.data_rank.world_size))

    @property
    def end(self) -> str:
        """Return how the end of an epoch is handled, and the padding of batches as far as it is known, as text."""
        padding = self._options.padding
        known = (
            ""
            if padding is None
            else f"; about {padding:.1%} padding if batches are padded to their longest sample"
        )
        return f"{self._describe_end()}{known}"

    def _describe_end(self) -> str:  # noqa: PLR0911 - one for each kind of end
        if self._options.global_batch_size is not None:
            return (
                "an incomplete global batch is left out"
                if self.drop_last
                else "the last global batch has the rest"
            )
        if self._options.presharded:
            return "each process has its own data; a process without a batch left gets padding without weight"
        if self.token_batches is not None:
            return self._describe_tokens(self.token_batches)
        is_single = self._backend.data_rank.world_size == 1
        if is_single and (self.drop_last or not self._backend.runtime.static_shapes):
            return "no padding"
        if self.drop_last:
            return "an incomplete global batch is left out"
        if not self._options.even_batches:
            split = "the last batch is split evenly, gradients are weighted by samples"
            return "the last batch is not padded, so its shape differs" if is_single else split
        keeps_sizes = self.source_batch_size is None and not self._backend.runtime.static_shapes
        padded = f"the last batch is padded from the start{self._describe_padding()}"
        return (
            "batches keep their sizes; a missing one at the end is padding without weight"
            if keeps_sizes
            else padded
        )

    def _describe_tokens(self, batches: TokenBatchSampler) -> str:
        text = f"up to {batches.budget.max_tokens:,} tokens each"
        if batches.budget.padded and batches.is_known:
            text += f", {batches.find_padding(self.epoch):.1%} padding"
        if self._backend.data_rank.world_size == 1:
            return text
        return f"{text}; a missing one at the end is padding without weight"

    def _describe_padding(self) -> str:
        num_steps, num_samples = len_or_none(self), len_or_none(self.sampler)
        if num_steps is None or num_samples is None or self.source_batch_size is None:
            return ""
        if isinstance(self.dataset, IterableDataset):
            return ""
        padding = num_steps * self.total_batch_size - num_samples
        return f": {padding} sample{'' if padding == 1 else 's'} an epoch"

    @property
    def repeats(self) -> int:
        """Return the number of padding samples in the last complete epoch, over all ranks."""
        return self._progress.num_padding

    @property
    def total_dataset_length(self) -> int:
        """Return the number of samples in the dataset.

        Raises:
            TypeError: The dataset is a stream of unknown length.
        """
        return len(self.dataset)  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loader: equal on all ranks, and valid for another number of them.

        Returns:
            The fields of `LoaderState` by name: the epoch, the offset in it after the batches that were returned, and random
            states, as numbers, text and tensors only. After an iteration that the script has left, it is the state at the
            start of the next epoch.
        """
        return write_record(self.capture_state())

    def capture_state(self) -> LoaderState:
        """Return the state that `state_dict` writes."""
        return self._progress.capture(
            self._describe_data(),
            self._source.next_epoch,
            self._capture_iteration,
            self._warn_of_unknown_nesting,
        )

    def _describe_data(self) -> LoadedData:
        dataset = type(self.dataset).__qualname__
        if isinstance(self.dataset, IterableDataset):
            return LoadedData(dataset)
        batches = sampler_of_loader(self)
        if isinstance(batches, TokenBatchSampler):
            num_samples = len_or_none(self.dataset)
            return LoadedData(dataset, num_samples, batches.description, None, self._options.seeded)
        sampler = batches.sampler if type(batches) is BatchSampler else batches
        is_of_torch = type(sampler).__module__ == Sampler.__module__
        return LoadedData(
            dataset,
            len_or_none(self.dataset),
            type(sampler).__qualname__,
            len_or_none(sampler) if is_of_torch else None,
            self._options.seeded,
        )

    def _warn_of_unknown_nesting(self, time: str) -> None:
        if self._has_warned or self._backend.topology.rank:
            return
        self._has_warned = True
        _LOG.warning(
            "The loader over %s may have other batches after a resume from this state: its iterator was created within a loop over "
            "another loader, and it is unknown if the script goes on with it %s. If it does, create the iterator with "
            "iter(loader) before that loop; otherwise save when the script has dropped it (del iterator, or after the loop).",
            type(self.dataset).__name__,
            time,
        )

    def _capture_iteration(self, running: EpochProgress, depth: int) -> IterationState:
        ended = running.step_info is not None and running.step_info.is_last
        source = running.state() or self._source.state_type()
        return IterationState(running.epoch, source, running.num_batches, ended, depth)

    def load_state_dict(
        self,
        state_dict: dict[str, Any],
        *,
        random_restored: bool = False,
        position: NextBatch = "next_batch",
    ) -> None:
        """Continue from the point where `state_dict` was saved.

        Args:
            state_dict: The return value of `state_dict`.
            random_restored: If true, the caller also restores the global random generators. An epoch that had not begun
                then draws from them when it begins, as it would have without an interruption; otherwise it draws under
                the states in `state_dict`.
            position: Where the next iteration begins. `next_batch`: after the last batch that was returned; after the
                last one of an epoch, at the start of the next epoch. `epoch_start`: at the first batch of that epoch,
                in the same order, for scripts that skip batches themselves. `exact`: as `next_batch`, but after the
                last batch of an epoch the iteration ends at once, so that the script runs the code that follows the
                epoch.

        Raises:
            ValueError: The state is not that of a loader, is that of a loader of another kind, or is valid for another
                number of processes or workers only.
        """
        try:
            state: LoaderState = read_value(LoaderState, state_dict)
        except FieldError as error:
            raise ValueError(
                f"Cannot load this state into the loader: {error}. Load the return value of state_dict() of a prepared loader."
            ) from None
        self.restore_state(state, random_restored=random_restored, position=position)

    def restore_state(
        self, state: LoaderState, *, random_restored: bool = False, position: NextBatch = "next_batch"
    ) -> None:
        """Continue from a state; see `load_state_dict`."""
        for source in (*(each.source for each in state.running), state.next_epoch):
            self._check_state(source)
        state = state.move_to(position)
        if self._backend.topology.rank == 0:
            self._warn_of_other_data(state.data, within_epoch=not all(each.ended for each in state.running))
        self._source.restore(state.next_epoch)
        self._progress.restore(state.adapt_random(restored=random_restored))

    def _warn_of_other_data(self, saved: LoadedData, *, within_epoch: bool) -> None:
        differences = self._describe_data().list_differences(saved, within_epoch=within_epoch)
        if not differences:
            return
        _LOG.warning(
            "The loaded state of a loader is that of other data: %s at the save. %sIf it is another loader, prepare the "
            "loaders in the order of the run that saved%s.",
            "; ".join(differences),
            "The rest of this epoch may repeat samples or leave some out. " if within_epoch else "",
            "; to begin another epoch, call loader.set_epoch(loader.epoch + 1)" if within_epoch else "",
        )

    def _check_state(self, state: SourceState) -> None:
        """Raise ValueError if the state of a source is not valid here."""
        world = self._backend.data_rank.world_size
        if isinstance(state, PreshardedState) and state.world_size not in {None, world}:
            # Checked first: on one process such a loader has another kind, which would be a confusing message.
            raise build_world_size_error(state.world_size or 0, world)
        expected = self._source.state_type
        if not isinstance(state, expected):
            raise ValueError(  # noqa: TRY004 - the type of the argument is right
                f"Cannot load this state into the loader: it is that of a loader of the kind {state.kind!r}, and this one is of "
                f"the kind {expected.kind!r}. Load the state of a loader over the same kind of dataset."
            )
        self._source.check(state)

    @property
    def is_presharded(self) -> bool:
        """Return whether every rank has its own data, and therefore its own state."""
        return self._options.presharded and self._backend.topology.world_size > 1

    def select_state(self, states: Sequence[LoaderState]) -> LoaderState:
        """Return the state for this rank from those of all ranks of a run that may have had another number of ranks."""
        data_rank = self._backend.data_rank
        for state in states:
            source = state.running[0].source if state.running else state.next_epoch
            if not isinstance(source, PreshardedState) or source.world_size != data_rank.world_size:
                break
            if source.data_rank == data_rank.rank:
                return state
        return states[0]

    def without_first_batches(self, steps: int) -> PreparedLoader[_T]:
        """Return a copy that leaves out the first steps of every epoch; both share their progress."""
        other = copy.copy(self)
        other._skip = self._skip + steps  # noqa: SLF001 - of this class
        return other

    def override_even_batches(self, *, even_batches: bool) -> AbstractContextManager[None]:
        """Return a context in which new epochs pad their last batch, or do not."""
        return self._source.override_padding(pad_last=even_batches)

    def __getattr__(self, name: str) -> Any:
        # Attributes that a subclass of DataLoader computes are on the loader that is iterated over.
        if name == "_source":
            raise AttributeError(name)
        return getattr(self._source.inner or self.dataset, name)


def _report_local_statistics(frame: FrameType, backend: Backend) -> None:
    """Warn if torch's `update_bn` begins to iterate over a prepared loader, in the frame that is given."""
    if frame.f_code.co_name != "update_bn" or frame.f_globals.get("__name__") != "torch.optim.swa_utils":
        return
    layers = frame.f_locals["model"].modules()
    if backend.topology.rank == 0 and any(isinstance(layer, _LOCAL_NORMS) for layer in layers):
        _LOG.warning(
            "update_bn() at %s gives each of the %d processes other statistics: its loader is prepared, so each process reads a part of "
            "the data. Pass a loader that is not prepared and does not shuffle, and device=accelerator.device.",
            call_site(TORCH),
            backend.topology.world_size,
        )


def _isolate_first(batches: Iterator[Any], count: int, isolated: IsolatedRNG) -> Iterator[Any]:
    """Yield batches; the first `count` are loaded without drawing from the generators of the run."""
    for _ in range(count):
        with isolated():
            batch = next(batches, _END)
        if batch is _END:
            return
        yield batch
    yield from batches


def check_model_parallel_ranks(backend: Backend) -> None:
    """Set the random states of model-parallel ranks to those of the first of them, if they differ. Collective."""
    if backend.data_rank.model_parallel_size == 1:
        return
    module = None if backend.device.type == "cpu" else backend.runtime.rng
    states = ProcessRandomStates.capture(backend.device, module)
    fingerprints = backend.all_gather_numbers([states.fingerprint], "random states")
    if are_consistent(fingerprints, backend.grid):
        return
    first = backend.grid.first_ranks[backend.data_rank.rank]
    is_first = backend.topology.rank == first
    gathered = backend.all_gather_objects(states if is_first else None, "random states")
    if not is_first:
        gathered[first].restore(backend.device, module)


def skip_first_batches(dataloader: DataLoader[_T], num_batches: int = 0) -> DataLoader[_T]:
    """Return a loader that leaves out the first batches of every epoch, without loading their samples.

    Args:
        dataloader: A prepared loader, or an unprepared one over a map-style dataset.
        num_batches: The number of batches to skip from the start of the epoch; not needed after loading a state.

    Raises:
        ValueError: A negative number, or an unprepared loader over a stream.
    """
    if num_batches < 0:
        raise ValueError(f"Invalid num_batches={num_batches}: expected at least 0.")
    if isinstance(dataloader, PreparedLoader):
        return dataloader.without_first_batches(num_batches)
    if isinstance(dataloader.dataset, IterableDataset):
        raise ValueError(  # noqa: TRY004 - the type is right, the order is not
            "skip_first_batches() failed: the dataset of this loader is a stream. Call prepare() on the loader first."
        )
    return copy_loader(
        dataloader,
        **{sampler_attribute(dataloader): _SkippingSampler(sampler_of_loader(dataloader), num_batches)},
    )


class _SkippingSampler(Sampler[Any]):
    """Sampler or batch sampler without its first items."""

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
        """Call `set_epoch` of the wrapped sampler, if it has it."""
        if callable(getattr(self._source, "set_epoch", None)):
            self._source.set_epoch(epoch)


class LoaderProgress:
    """Progress of a loader, shared with its copies that leave out the first steps.

    docs/design/loader-state.md has the rules and their reasons.

    Args:
        loops: The loops over all loaders, which decide which loops a script continues.
    """

    def __init__(self, loops: ActiveLoops) -> None:
        self._loops = loops
        loops.loaders.add(self)
        self._next_epoch_number = 0
        self._next_epoch: SourceState | None = None
        """Loaded state in which the next epoch begins; None draws from the generators as they are."""
        self._running: list[LoopRecord] = []
        """Iterations that have not ended and that the script has not left, in the order in which they began."""
        self._claimed: list[tuple[weakref.ref[Iterator[Any]], IterationState]] = []
        """Iterators that continue a loaded iteration and that no batch was requested from yet, with its state."""
        self._loaded: tuple[IterationState, ...] = ()
        """Loaded iterations that no iterator continues yet."""
        self._left: _LeftIteration | None = None
        """The newest iteration that the script has left."""
        self._earlier = EarlierLoops()
        self.num_padding = 0
        """Number of padding samples in the last complete epoch, over all ranks. Only `mark_finished` assigns it."""

    @property
    def epoch(self) -> int:
        """Return the number of the running epoch or, between two, of the next."""
        self._drop_ended()
        epochs = [each.loop.epoch for each in self._running if each.loop is not None]
        epochs += [each.epoch for each in self._loaded]
        return epochs[-1] if epochs else self._next_epoch_number

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch; the number of a loaded iteration continues it, and another one leaves it."""
        self._drop_ended()
        if self._loaded and epoch == self._loaded[0].epoch:
            return
        if self._loaded:
            self._loops.continue_loop(self._loaded[0].depth)
            self._loaded = ()
        self._next_epoch_number = epoch

    def restore(self, state: LoaderState) -> None:
        """Continue from a state."""
        self._next_epoch_number, self._next_epoch = state.epoch, state.next_epoch
        self._loaded = state.running
        self._running, self._claimed, self._left = [], [], None
        self._loops.forget_continued()

    def list_waiting(self) -> list[int]:
        """Return the depths of loaded iterations that no running one continues yet."""
        self._drop_ended()
        return [*(state.depth for _, state in self._claimed), *(each.depth for each in self._loaded)]

    def claim_loaded(self) -> IterationState | None:
        """Return the state of the loaded iteration that a new iterator continues; None if it begins an epoch."""
        self._drop_ended()
        if not self._loaded:
            return None
        claimed, *others = self._loaded
        self._loaded = tuple(others)
        return claimed

    def register(self, iterator: Iterator[Any], claimed: IterationState) -> None:
        """Record the iterator that continues an iteration once a batch is requested from it."""
        self._claimed.append((weakref.ref(iterator), claimed))

    def begin(self, claimed: IterationState | None) -> IterationState | None:
        """Record that an iteration begins; return the state that it continues, or None if it begins an epoch."""
        if claimed is not None and any(state is claimed for _, state in self._claimed):
            self._claimed = [each for each in self._claimed if each[1] is not claimed]
            self._loops.continue_loop(claimed.depth)
            # The next epoch draws from the generators as this iteration leaves them.
            self._next_epoch = None
            return claimed
        return None

    def begin_epoch(self) -> tuple[int, SourceState | None]:
        """Return the number of the next epoch, which begins now, and its loaded state, if there is one."""
        self._drop_ended()
        number, state, self._next_epoch = self._next_epoch_number, self._next_epoch, None
        self._next_epoch_number += 1
        self._loaded = ()
        return number, state

    def add(
        self, loop: EpochProgress, created_in: Sequence[LoopStep], depth: int, *, continued: bool
    ) -> LoopRecord:
        """Record an iteration that begins, called by its generator; the arguments are those of `LoopRecord`."""
        # Of the script, that requests the first batch from the generator of the loader.
        callers = list_callers(sys._getframe(2))  # noqa: SLF001 - as `inspect.currentframe`, which returns no caller
        record = LoopRecord(loop, created_in, depth, callers, self._earlier, continued=continued)
        self._running.append(record)
        return record

    def mark_finished(self, record: LoopRecord) -> None:
        """Record that an iteration has returned all batches."""
        self._left, self.num_padding = None, record.num_padding
        record.leave_advanced()
        self._remove(record, finished=True)

    def mark_left(self, record: LoopRecord, state: IterationState) -> None:
        """Record that the script has left an iteration in this state."""
        self._left = _LeftIteration(state)
        self._remove(record, finished=False)

    def _remove(self, record: LoopRecord, *, finished: bool) -> None:
        if record in self._running:  # else a state was loaded meanwhile
            self._running.remove(record)
        self._earlier.record(record, self._loops.open_records, finished=finished)

    def capture(
        self,
        data: LoadedData,
        next_epoch: Callable[[], SourceState],
        capture_iteration: Callable[[EpochProgress, int], IterationState],
        report_unknown: Callable[[str], None],
    ) -> LoaderState:
        """Return the state of the loader.

        Args:
            data: Data of the loader.
            next_epoch: Returns the state in which the next epoch begins, unless it was loaded.
            capture_iteration: Returns the state of a running iteration of this depth.
            report_unknown: Called if it is unknown if an iterator goes on, with the time.
        """
        self._drop_ended()
        stack = capture_stack()
        running = []
        for record in self._running:
            nesting = record.find_nesting(stack)
            if nesting.unknown:
                report_unknown(nesting.unknown)
            if record.loop is not None and not nesting.has_ended:
                running.append(capture_iteration(record.loop, nesting.depth))
        running += [state for _, state in self._claimed]
        if self._left is not None and self._left.is_exception_handled():
            running.append(self._left.state)
        running += self._loaded
        state = next_epoch() if self._next_epoch is None else self._next_epoch
        if running:
            # The global generators will have advanced until then, and they differ between ranks.
            state = state.adapt_random(restored=True)
        return LoaderState(self._next_epoch_number, state, data, tuple(running))

    def _drop_ended(self) -> None:
        """Drop loaded iterations that the script does not continue.

        An iteration that was inside of another one has ended once the outer one continues.
        """
        self._claimed = [
            (iterator, state)
            for iterator, state in self._claimed
            if iterator() is not None and not self._loops.is_left(state.depth)
        ]
        self._loaded = tuple(each for each in self._loaded if not self._loops.is_left(each.depth))


class _LeftIteration:
    """An iteration that the script has left, by `break` or by an exception.

    After a `break`, the next epoch follows. A script that saves while it handles the exception, such as a
    `KeyboardInterrupt`, expects to continue after the last batch when it is started again.

    Args:
        state: The state of the iteration.
    """

    def __init__(self, state: IterationState) -> None:
        self.state = state
        """State of the iteration."""
        frame = inspect.currentframe()
        while frame is not None and (
            frame.f_code.co_flags & inspect.CO_GENERATOR or frame.f_globals is globals()
        ):
            frame = (
                frame.f_back
            )  # of this module, the generator of the loader, or one between, such as that of tqdm
        # Not the frame itself, which would keep the variables of the script.
        self._exit = None if frame is None else (id(frame), frame.f_code, frame.f_lineno)

    def is_exception_handled(self) -> bool:
        """Return whether the exception that ended the iteration is being handled now."""
        error = sys.exc_info()[1]
        while error is not None:
            trace = error.__traceback__
            while trace is not None:
                if (id(trace.tb_frame), trace.tb_frame.f_code, trace.tb_lineno) == self._exit:
                    return True
                trace = trace.tb_next
            error = error.__context__
        return False
