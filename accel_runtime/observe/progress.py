"""Progress of a process: its steps, batches and collectives, and the parts of one of its steps. Without torch."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from time import monotonic_ns
from typing import Any, NamedTuple

from typing_extensions import override

from accel_runtime.observe.call_sites import CallSite

__all__ = [
    "LoaderEpoch",
    "MeasuredProgress",
    "Progress",
    "ProgressCounts",
    "StepPart",
    "StepParts",
    "TorchEpoch",
    "count_batches",
]


@dataclass(slots=True, eq=False)
class LoaderEpoch:
    """Epoch of a loader, which counts its batches in `returned`, `samples` and `tokens`."""

    number: int
    """Number of the epoch, from 0."""
    first: int
    """Number of batches that were skipped at its start."""
    length: int
    """Number of batches, skipped ones included; 0 if it is unknown."""
    returned: int = field(init=False)
    """Number of batches that were returned or skipped."""
    samples: int = field(default=0, init=False)
    """Samples of all ranks in the returned batches."""
    tokens: int = field(default=0, init=False)
    trained_samples: int = field(default=0, init=False)
    """Samples of batches that an optimizer step has followed."""
    trained_tokens: int = field(default=0, init=False)
    begin_ns: int = field(init=False)
    begin_counts: tuple[int, int] = field(default=(0, 0), init=False)
    """Steps and backward passes of the process at its begin."""
    is_over: bool = field(default=False, init=False)
    """True if the loader returns no more batches."""
    reported: int = field(init=False)
    """Number of batches that the launcher knows."""

    def __post_init__(self) -> None:
        self.returned = self.reported = self.first
        self.begin_ns = monotonic_ns()

    @property
    def is_prepared(self) -> bool:
        """Return whether it is that of a prepared loader, whose batches are counted on all ranks alike."""
        return True

    def refresh(self) -> None:
        """Update the counts, if the loader does not."""

    def mark_trained(self) -> None:
        """Record that a step has followed the returned batches."""
        self.trained_samples, self.trained_tokens = self.samples, self.tokens

    def count_trained(self) -> tuple[int, int]:
        """Return the samples and tokens of batches that a step has followed."""
        return self.trained_samples, self.trained_tokens


@dataclass(slots=True, eq=False)
class TorchEpoch(LoaderEpoch):
    """Epoch of a loader of torch, whose iterator counts the batches."""

    state: Mapping[str, Any]
    """Attributes of the iterator, which may be deleted."""
    batch_size: int = field(default=0, init=False)
    """Samples of all ranks in a batch; 0 while each batch is looked at."""
    most_samples: int = field(default=0, init=False)
    """Samples of all ranks in the epoch."""
    trained_batches: int = field(default=0, init=False)
    """Number of batches that a step has followed, if samples are computed from it."""

    @property
    @override
    def is_prepared(self) -> bool:
        return False

    @override
    def refresh(self) -> None:
        self.returned = self.state["_num_yielded"]
        if self.batch_size:
            self.samples = min(self.returned * self.batch_size, self.most_samples)

    @override
    def mark_trained(self) -> None:
        if self.batch_size:
            self.trained_batches = self.state["_num_yielded"]
        else:
            self.trained_samples, self.trained_tokens = self.samples, self.tokens

    @override
    def count_trained(self) -> tuple[int, int]:
        if self.batch_size:
            return min(self.trained_batches * self.batch_size, self.most_samples), 0
        return self.trained_samples, self.trained_tokens

    def count_by_batches(self, batch_size: int, most_samples: int) -> None:
        """Compute the samples from the number of batches from now on."""
        self.batch_size, self.most_samples = batch_size, most_samples

    def is_finished(self) -> bool:
        """Return whether all batches were returned, as far as known."""
        self.refresh()
        return not self.length or self.returned >= self.length

    def release(self) -> None:
        """Keep the number of batches only of the iterator."""
        self.state = {"_num_yielded": self.returned}


class ProgressCounts(NamedTuple):
    """Progress of a process since the last collective, comparable between ranks that run the same program."""

    collectives: int
    """Number of collectives of accel entered since the start."""
    backwards: int
    """Number of backward passes begun since the last of these collectives."""
    steps: int
    """Number of optimizer steps since then."""
    batches: int
    """Number of batches returned since then."""

    def is_beyond(self, other: ProgressCounts) -> bool:
        """Return whether these counts are ahead of the others in any number."""
        if self.collectives != other.collectives:
            return self.collectives > other.collectives
        return any(own > others for own, others in zip(self, other, strict=True))


class Progress:
    """Progress of this process, in numbers that its other threads may read.

    Prepared loaders count batches in the attributes of their epochs, and `Accelerator.backward` increments `backwards`. Prepared
    optimizers call `count_step`, unless hooks in torch do.
    """

    counts_any_step = False
    """True if hooks in torch call `count_step` for any optimizer."""

    def __init__(self) -> None:
        self.steps = self.backwards = self.collectives = 0
        self._epochs: tuple[LoaderEpoch, ...] = ()
        """Running epochs, and those that are over while a step on their last batches may follow."""
        self._has_ended_epochs = False
        """True if there are such ones that are over."""
        self._ended_batches = 0
        """Batches of prepared loaders in other epochs."""
        self._ended_samples = self._ended_tokens = 0
        """Samples and tokens of other epochs that were trained on."""
        self.step_flops, self.peak_flops = 0, 0
        """Floating-point operations of a step of this rank, and those that its device can execute per second; 0 if unknown."""
        self.inside: tuple[str, CallSite] | None = None
        """Current collective of accel, and its line."""
        self.in_store: tuple[str, CallSite] | None = None
        """Current wait for a key that another rank sets, and its line."""
        self._base = self._previous_base = (0, 0, 0)
        """Backward passes, steps and batches at the last collective, and at the one before it."""
        self._stepped: set[int] = set()
        """The ids of what was stepped in the newest step."""
        self._error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")

    @property
    def has_failed(self) -> bool:
        """Return whether the script has ended with an exception, as far as known when the interpreter exits.

        Without a launcher's worker, a SystemExit is not known: Python clears it before the functions of `atexit`.
        """
        # A launcher's worker writes the file and ends the interpreter as if nothing had been raised.
        return hasattr(sys, "last_value") or (bool(self._error_file) and Path(self._error_file).exists())

    @property
    def batches(self) -> int:
        """Return the number of batches that prepared loaders have returned."""
        return self._ended_batches + count_batches(epoch for epoch in self._epochs if epoch.is_prepared)

    @property
    def counts(self) -> ProgressCounts:
        """Return the counts that are compared with other ranks."""
        backwards, steps, batches = self._base
        return ProgressCounts(
            self.collectives, self.backwards - backwards, self.steps - steps, self.batches - batches
        )

    @property
    def counts_before_collective(self) -> ProgressCounts:
        """Return the counts with which this process entered its current collective."""
        backwards, steps, batches = (
            last - previous for last, previous in zip(self._base, self._previous_base, strict=True)
        )
        return ProgressCounts(self.collectives - 1, backwards, steps, batches)

    def restart_counts(self) -> None:
        """Restart the counts of backward passes, steps and batches; ranks may have had different numbers of them."""
        self._base = (self.backwards, self.steps, self.batches)

    def count_step(self, optimizer: Any) -> None:
        """Count a call of an optimizer's `step`, and what was trained on.

        Nothing is stepped twice in one step: several optimizers that step in turn, as in a GAN, make one. An engine may step the
        groups of its parameters one after the other, with one optimizer: they differ in their parameters.
        """
        for epoch in self._epochs:
            epoch.mark_trained()
        if self._has_ended_epochs:
            self._drop_ended()
        stepped = id(optimizer)
        for group in optimizer.param_groups:
            if parameters := group["params"]:
                stepped = id(parameters[0])
                break
        if stepped in self._stepped or not self._stepped:
            self._stepped.clear()
            self.steps += 1
        self._stepped.add(stepped)

    def _drop_ended(self) -> None:
        """Drop epochs that are over, after a step on their last batches."""
        self._has_ended_epochs = False
        self._drop([epoch for epoch in self._epochs if epoch.is_over])

    def count_trained(self) -> tuple[int, int]:
        """Return the samples and tokens of all ranks that were trained on."""
        samples, tokens = self._ended_samples, self._ended_tokens
        for epoch in self._epochs:
            more_samples, more_tokens = epoch.count_trained()
            samples, tokens = samples + more_samples, tokens + more_tokens
        return samples, tokens

    def begin_epoch(self, epoch: LoaderEpoch) -> LoaderEpoch:
        """Count the batches of an epoch, and return it."""
        epoch.begin_counts = (self.steps, self.backwards)
        self._epochs = (*self._epochs, epoch)
        return epoch

    def end_epoch(self, epoch: LoaderEpoch, *, is_finished: bool) -> None:
        """Count no more batches of an epoch.

        Its last samples count once a step follows, unless it was an evaluation: all batches, without a backward pass.

        Args:
            epoch: The epoch.
            is_finished: True if all batches were returned.
        """
        epoch.refresh()
        epoch.is_over = True
        is_evaluation = is_finished and epoch.begin_counts == (self.steps, self.backwards)
        if is_evaluation or (epoch.samples, epoch.tokens) == epoch.count_trained():
            self._drop([epoch])
        else:
            self._has_ended_epochs = True

    def _drop(self, dropped: Sequence[LoaderEpoch]) -> None:
        self._ended_batches += count_batches(epoch for epoch in dropped if epoch.is_prepared)
        for epoch in dropped:
            samples, tokens = epoch.count_trained()
            self._ended_samples += samples
            self._ended_tokens += tokens
        self._epochs = tuple(epoch for epoch in self._epochs if epoch not in dropped)

    def record_flops(self, flops: int, peak_flops: int) -> None:
        """Record the floating-point operations of a step of this rank, and those that its device can execute per second."""
        self.step_flops, self.peak_flops = flops, peak_flops

    def begin_collective(self) -> None:
        """Count a collective of torch that accel makes on all ranks."""
        self.collectives += 1
        self._previous_base = self._base
        self.restart_counts()

    def end_collective(self) -> None:
        """Record the end of a collective without a handshake."""

    def enter(self, operation: str, site: CallSite) -> None:
        """Count and record a collective with a handshake."""
        self.begin_collective()
        self.inside = (operation, site)

    def exit(self) -> None:
        """Record the end of the collective."""
        self.inside = None

    @contextlib.contextmanager
    def wait_in_store(self, operation: str, site: CallSite) -> Iterator[None]:
        """Record a wait for a key that another rank sets, inside the context."""
        self.in_store = (operation, site)
        try:
            yield
        finally:
            self.in_store = None


def count_batches(epochs: Iterable[LoaderEpoch]) -> int:
    """Return the number of batches that were returned in epochs."""
    return sum(epoch.returned - epoch.first for epoch in epochs)


class StepPart(Enum):
    """Part of a step."""

    DATA = "data"
    """A wait for a batch."""
    FORWARD = "forward"
    """From a batch to its backward pass."""
    BACKWARD = "backward"
    """A backward pass, until the gradients of this rank are complete."""
    UPDATE = "update"
    """From a backward pass to the end of the step."""
    WAIT = "wait"
    """A wait for other ranks."""
    REST = "rest"
    """From the end of a step to the next batch."""


class StepParts:
    """Times of the parts of one step, from the end of the step before it to its own.

    Args:
        now: The time of its begin, in ns.
        part: The part that it begins in.
        is_whole: False if it is measured from a later moment on, so that only the current part is known.
        is_backward: True in a backward pass whose end will be recorded.
    """

    def __init__(
        self, now: int, part: StepPart = StepPart.REST, *, is_whole: bool = True, is_backward: bool = False
    ) -> None:
        self.begin_ns = self.since_ns = now
        self.part, self.is_whole = part, is_whole
        self.times = dict.fromkeys(StepPart, 0)
        """Time of each part that has ended, in ns."""
        self.is_backward = is_backward
        self._num_waits, self._around_wait = 0, part

    def begin(self, part: StepPart) -> None:
        """Begin another part."""
        now = monotonic_ns()
        self.times[self.part] += now - self.since_ns
        self.since_ns, self.part = now, part

    def begin_backward(self) -> None:
        """Begin a backward pass."""
        self.is_backward = True
        if self.part is StepPart.REST:  # of a script that loads its data itself
            self.part = StepPart.FORWARD
        self.begin(StepPart.BACKWARD)

    def complete_gradients(self) -> None:
        """Record that the gradients of this rank are complete; the pass may wait for those of the other ranks."""
        if self.is_backward and self.part is StepPart.BACKWARD:
            self.begin(StepPart.WAIT)

    def end_backward(self) -> None:
        """End the backward pass."""
        self.is_backward = False
        self.begin(StepPart.UPDATE)

    def begin_wait(self) -> None:
        """Begin to wait for other ranks, within another part."""
        self._num_waits += 1
        if self._num_waits == 1:
            self._around_wait = self.part
            self.begin(StepPart.WAIT)

    def end_wait(self) -> None:
        """End the wait, and continue the part around it."""
        if self._num_waits:  # 0: it began before this step was measured
            self._num_waits -= 1
            if self._num_waits == 0:
                self.begin(self._around_wait)


class MeasuredProgress(Progress):
    """Progress that hooks in torch record: steps of any optimizer, and parts of steps while these are measured."""

    counts_any_step = True

    def __init__(self) -> None:
        super().__init__()
        self.parts: StepParts | None = None
        """The parts of the current step, while they are measured."""

    def _record(self, parts: StepParts) -> None:
        """Record that another part has begun."""

    def begin_part(self, part: StepPart) -> None:
        """Begin a part: a wait for a batch, what follows it, or what follows a loop."""
        if self.parts is not None:
            self.parts.begin(part)
            self._record(self.parts)

    def begin_backward(self) -> bool:
        """Begin a backward pass; return False if it is a part of one, or no step is measured."""
        parts = self.parts
        if parts is None or parts.is_backward:
            return False
        parts.begin_backward()
        self._record(parts)
        return True

    def complete_gradients(self) -> None:
        """Record that the gradients of this rank are complete, in a backward pass that may wait for those of others."""
        if self.parts is not None:
            self.parts.complete_gradients()
            self._record(self.parts)

    def end_backward(self) -> None:
        """End the backward pass."""
        if self.parts is not None:
            self.parts.end_backward()
            self._record(self.parts)

    def begin_wait(self) -> None:
        """Begin to wait for other ranks."""
        if self.parts is not None:
            self.parts.begin_wait()
            self._record(self.parts)

    def end_wait(self) -> None:
        """End the wait."""
        if self.parts is not None:
            self.parts.end_wait()
            self._record(self.parts)
