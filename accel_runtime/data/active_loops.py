"""Iterations over prepared loaders, and the steps that gathered data belong to."""

from __future__ import annotations

import dis
import itertools
import math
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias
from weakref import WeakKeyDictionary, WeakSet

import torch

from accel_runtime.foundation import nested
from accel_runtime.foundation.epoch_progress import EpochProgress, StepInfo

__all__ = ["ActiveLoops", "LoadedIterations", "LoopRecord", "capture_stack", "list_callers"]


_CLOCK = itertools.count(1)
"""Order of the events of all loops."""
_MAX_RECENT = 4
"""Number of recent batches per loop, and of finished loops, whose tensors are recognized; scripts may look ahead."""


class LoopStep(NamedTuple):
    """A loop and its number of batches at some time."""

    loop: weakref.ref[LoopRecord]
    """Weak: a record has the states of its source, which hold datasets and the workers of loaders."""
    num_batches: int

    @property
    def is_newest(self) -> bool:
        """Return whether the loop is running and has returned no other batch since, and at least one."""
        record = self.loop()
        return record is not None and record.loop is not None and self.has_same_count(record.loop)

    def has_same_count(self, loop: EpochProgress) -> bool:
        """Return whether the loop has this number of batches, at least one."""
        return loop.num_batches == self.num_batches > 0


class _Advance(NamedTuple):
    """How a loop over a loader that has ended advanced beside another one."""

    step: int | None
    """The step of the other loop that it was inside of, as an evaluation is; None if it had batches in several steps."""
    created_inside: bool
    """If true, its iterator was created within the other loop."""


class EarlierLoops:
    """How earlier loops over a loader advanced beside others that are running.

    A loader that a script begins again, when it has ended, advances with the same loops as before.
    """

    def __init__(self) -> None:
        self._advances: WeakKeyDictionary[LoopRecord, _Advance] = WeakKeyDictionary()
        self.outlives: bool | None = None
        """If true, a loop went on after the end of the one that its iterator was created in; None if unknown."""

    def record(self, ended: LoopRecord, others: Iterable[LoopRecord], *, finished: bool) -> None:
        """Record that a loop over this loader has reached its end or was left, while the others are running."""
        if ended.num_batches_at_end is not None and ended.loop is not None:
            self.outlives = finished or ended.loop.num_batches > ended.num_batches_at_end
        for other in others:
            if other is not ended and other.loop is not None and (finished or not ended.is_unused_in(other)):
                self._advances[other] = _Advance(ended.find_step_of(other), ended.was_created_in(other))

    def find_together(self, other: LoopRecord) -> _Advance | None:
        """Return how the newest loop over this loader advanced, if it advanced together with the other one."""
        advance = self._advances.get(other)
        return advance if advance is not None and advance.step is None else None

    def ended_inside(self, step: LoopStep) -> bool:
        """Return whether it ended within an earlier step of the other loop, as an evaluation does."""
        other = step.loop()
        advance = None if other is None else self._advances.get(other)
        return advance is not None and advance.step is not None and advance.step < step.num_batches


class Nesting(NamedTuple):
    """Place of a loop among the running ones."""

    depth: int
    """Number of running loops that it is inside of. Loops that advance together, as those of `zip`, have the same depth."""
    has_ended: bool = False
    """If true, the script does not advance it again, although its iterator exists."""
    unknown: Literal["", "in later steps", "in the next epoch"] = ""
    """When it is unknown if the script goes on with its iterator."""


class LoopRecord:
    """Batches and steps of one loop.

    Args:
        loop: The progress of the iteration.
        created_in: Loops that were running when its iterator was created, innermost last.
        depth: The depth that it has outside of these: that of the state that it continues from, or one inside of loops of a loaded
            state that the script has not continued yet.
        callers: The function calls that requested its first batch.
        earlier: What earlier loops over the same loader have shown.
        continued: If true, it continues from a loaded state, and is not inside of the loops that are running now.
    """

    def __init__(  # noqa: PLR0913 - what its loader knows of it
        self,
        loop: EpochProgress,
        created_in: Sequence[LoopStep] = (),
        depth: int = 0,
        callers: Sequence[Caller] = (),
        earlier: EarlierLoops | None = None,
        *,
        continued: bool = False,
    ) -> None:
        self.loop: EpochProgress | None = loop
        """None after the loop: it would keep the dataset and the loader's workers."""
        self.recent: deque[tuple[list[weakref.ref[torch.Tensor]], StepInfo]] = deque(maxlen=_MAX_RECENT)
        self.steps: list[tuple[StepInfo, int]] = []
        """Run-length encoded steps so far: step info and number of repetitions."""
        self.times = (0, 0)
        """Times of the last two batches (newest first), counted over all loops."""
        self.num_skipped = loop.num_batches
        """Number of batches that were not returned in this loop, but before it."""
        self._depth = depth
        self._callers = callers
        self._earlier = earlier or EarlierLoops()
        self._created_in: list[weakref.ref[LoopRecord]] = []
        self.outer: list[LoopStep] = []
        """Loops that it may be inside of: it had no batch after one of theirs."""
        for step in created_in:
            if (other := step.loop()) is not None:
                before = self._earlier.find_together(other)
                if before is None or before.created_inside:
                    self._created_in.append(step.loop)
                if before is None and step.is_newest and not continued:
                    self.outer.append(step)
        self.num_batches_at_end: int | None = None
        """Number of its batches at the end of the loop that it was created in; None if that is running."""

    def leave_advanced(self) -> None:
        """Record that the loop goes on: it is not inside of loops that have advanced since it began."""
        self.outer = [step for step in self.outer if step.is_newest]

    def continue_outer(self, depth: int) -> None:
        """Record that a loop of a loaded state, which had this depth, goes on while this one is running."""
        self._depth = min(self._depth, depth)

    def was_created_in(self, other: LoopRecord) -> bool:
        """Return whether its iterator, or the first of those that it replaced, was created within another loop."""
        return any(reference() is other for reference in self._created_in)

    def find_step_of(self, other: LoopRecord) -> int | None:
        """Return the step of another loop in which this one began, if it has had no batch in a later step."""
        return next((step.num_batches for step in self.outer if step.loop() is other), None)

    def is_unused_in(self, other: LoopRecord) -> bool:
        """Return whether the loop was running when another one began, and has had no batch since."""
        loop = self.loop
        return loop is not None and any(
            step.loop() is self and step.has_same_count(loop) for step in other.outer
        )

    def find_nesting(self, stack: CallStack) -> Nesting:
        """Return the place of the loop among the running ones; docs/design/loader-state.md has the rules.

        Args:
            stack: The running function calls.
        """
        depth, has_ended = self._depth, False
        unknown: Literal["", "in later steps", "in the next epoch"] = ""
        for step in self.outer:
            other = step.loop()
            if other is None or other.loop is None:
                continue
            is_inside = self._is_inside(step, other, stack)
            if is_inside is None:
                unknown = "in later steps"
            if step.is_newest and is_inside is not False:
                depth = max(depth, other.find_nesting(stack).depth + 1)
            elif is_inside:
                has_ended = True
        if depth == self._depth and not self.is_at_last and self._ends_with_epoch():
            has_ended = self._earlier.outlives is False
            unknown = unknown or ("in the next epoch" if self._earlier.outlives is None else "")
        return Nesting(depth, has_ended, unknown)

    def _ends_with_epoch(self) -> bool:
        """Return whether the loop that its iterator was created in has no batch left, and may end it."""
        return any((other := reference()) is not None and other.is_at_last for reference in self._created_in)

    def _is_inside(self, step: LoopStep, other: LoopRecord, stack: CallStack) -> bool | None:
        """Return whether the loop ends before the other one advances; None if that is unknown."""
        caller, caller_of_other = find_caller(self._callers, stack), find_caller(other._callers, stack)
        if caller is not None and caller == caller_of_other:
            return False  # one statement advances both, as with `zip`
        if caller is not None and is_looping(caller, stack):
            return step.is_newest
        if self._earlier.ended_inside(step):
            return True
        # A function that has returned, or a generator, keeps the iterator.
        return False if caller is not None and caller != self._callers[0] else None

    @property
    def is_open(self) -> bool:
        """Return whether the loop is running."""
        return self.loop is not None

    @property
    def is_at_last(self) -> bool:
        """Return whether the loop is running and has returned the last batch of the epoch."""
        return (info := self.step_info) is not None and info.is_last

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Return the number of samples in the newest batch of each rank; empty before the first and after the loop."""
        return () if (info := self.step_info) is None else info.batch_sizes

    def is_inside(self, other: LoopRecord) -> bool:
        """Return whether the loop began after the newest batch of another one, and both are running."""
        return self.loop is not None and any(step.loop() is other and step.is_newest for step in self.outer)

    @property
    def step_info(self) -> StepInfo | None:
        """Return the step of the newest batch; None before the first and after the loop."""
        return None if self.loop is None else self.loop.step_info

    def find_step(self, tensor: torch.Tensor) -> StepInfo | None:
        """Return the step whose batch contained this tensor, or the tensor it is a view of."""
        same = (tensor, tensor._base)  # noqa: SLF001 - torch's documented attribute for the base of a view
        for references, info in reversed(self.recent):
            alive = [t for reference in references if (t := reference()) is not None]
            if any(candidate is t for candidate in alive for t in same):
                return info
        return None

    def num_rows(self, rank: int) -> int:
        """Return how many samples this rank has received so far, padding included."""
        return sum(info.batch_sizes[rank] * times for info, times in self.steps)

    @property
    def num_padding(self) -> int:
        """Return how many padding samples all ranks have received so far."""
        return sum(info.num_padding * times for info, times in self.steps)


class ModelInputs:
    """Function before the forward passes of prepared models, which records what they compute on."""

    def __init__(self) -> None:
        self._newest: weakref.ref[torch.Tensor] | None = None

    def __call__(self, _module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Record the first tensor of the inputs."""
        if args and type(args[0]) is torch.Tensor:  # as in most models
            self._newest = weakref.ref(args[0])
            return
        tensors = nested.list_tensors(args) or nested.list_tensors(kwargs)
        self._newest = weakref.ref(tensors[0]) if tensors else None

    def find_newest(self) -> torch.Tensor | None:
        """Return the first tensor of the newest forward pass, if it exists."""
        return None if self._newest is None else self._newest()

    def forget(self) -> None:
        """Forget the newest forward pass."""
        self._newest = None

    def __reduce__(self) -> tuple[type[ModelInputs], tuple[()]]:
        return ModelInputs, ()  # a copied or saved model belongs to no run


class LoadedIterations(Protocol):
    """Iterations of a loader that a state has, and that no iterator continues yet."""

    def list_waiting(self) -> Iterable[int]:
        """Return their depths."""
        ...


class ActiveLoops:
    """Running loops (the innermost last) and recently finished ones.

    A script may use a loader of one `Accelerator` with the methods of another one, which has no open loop: it then uses the
    loops of the other one.

    Args:
        rank: The rank of this process.
        has_padding: If true, batches may contain padding; otherwise nothing is recorded.
        peers: The loops of all Accelerators of this thread, to which these are added.
    """

    def __init__(self, rank: int, *, has_padding: bool, peers: WeakSet[ActiveLoops] | None = None) -> None:
        self._rank = rank
        self.has_padding = has_padding
        """If false, no batch has padding."""
        self.open_records: list[LoopRecord] = []
        """Running loops, the innermost last. Only `open` and `close` change the list, in place."""
        self._finished: deque[LoopRecord] = deque(maxlen=_MAX_RECENT)
        self.latest = 0
        """Time of the newest batch, or of the start of the newest loop."""
        self.model_inputs = ModelInputs()
        """Called before each forward pass of a prepared model."""
        self.scaled: list[weakref.ref[torch.Tensor]] = next((each.scaled for each in peers or ()), [])
        """Tensors of batches whose loss has another weight than 1, shared by all peers."""
        self.has_weights: bool = any(each.has_weights for each in peers or ())
        """If true, batches have tokens, by which their losses are weighted. Only `expect_weights` sets it, also for all peers."""
        self._continued_depth: float = math.inf
        self.loaders: WeakSet[LoadedIterations] = WeakSet()
        """What the loaders of these loops have loaded."""
        self._peers = peers
        if peers is not None:
            peers.add(self)

    def capture_steps(self) -> list[LoopStep]:
        """Return the running loops with their numbers of batches, the innermost last."""
        return [
            LoopStep(weakref.ref(record), record.loop.num_batches)
            for record in self.open_records
            if record.loop is not None
        ]

    def continue_loop(self, depth: int) -> None:
        """Record that the script continues, or gives up, a loop that had this depth when a state was saved."""
        self._continued_depth = min(self._continued_depth, depth)
        for record in self.open_records:
            record.continue_outer(depth)

    def forget_continued(self) -> None:
        """Record that a state is loaded, none of whose loops is continued yet."""
        self._continued_depth = math.inf

    def find_depth(self) -> int:
        """Return the depth of a loop that begins before the script continues those of a loaded state: it is inside of them."""
        return max((depth + 1 for loader in self.loaders for depth in loader.list_waiting()), default=0)

    def is_left(self, depth: int) -> bool:
        """Return whether a loop of this depth has ended since the state was saved: one that it was inside of went on."""
        return depth > self._continued_depth

    @property
    def is_open(self) -> bool:
        """Return whether a loop is running."""
        return bool(self.open_records)

    @property
    def has_returned_batches(self) -> bool:
        """Return whether one of the running loops has returned a batch."""
        return any(each.loop and each.loop.num_batches > each.num_skipped for each in self.open_records)

    @property
    def have_begun(self) -> bool:
        """Return whether a loop has ever been running."""
        return self.latest > 0 or self.current_step is not None

    @property
    def records(self) -> list[LoopRecord]:
        """Return the running loops, innermost first, then the finished ones, newest first."""
        return [*reversed(self.open_records), *reversed(self._finished)]

    def find_open(self) -> list[LoopRecord]:
        """Return the running loops, the innermost last; those of another Accelerator if only these are running."""
        return self.open_records or self._find_latest().open_records

    @property
    def current_step(self) -> StepInfo | None:
        """Return the newest step of the innermost loop; None outside of all loops."""
        if self.open_records:
            return self.open_records[-1].step_info
        return None if (loops := self._find_latest()) is self else loops.current_step

    def find_trained_step(self) -> StepInfo | None:
        """Return the step that a prepared model computed on last: the newest one if that is unknown; None outside of all loops."""
        return self._find_model_step() or self.current_step

    def find_loss_scale(self) -> float:
        """Return the weight of this rank's mean loss in the step that a prepared model computed on last.

        It is that of the newest step if the step is unknown, and 1 outside of all loops.
        """
        loop = self.open_records[-1].loop if self.open_records else None
        info = self.current_step if loop is None else loop.step_info
        if not self.scaled and (info is None or info.loss_scale == 1.0):
            return 1.0  # of all recent steps, so it need not be known which one it is
        self.scaled[:] = [reference for reference in self.scaled if reference() is not None]
        info = self._find_model_step() or info
        return 1.0 if info is None else info.loss_scale

    @property
    def records_batches(self) -> bool:
        """Return whether batches are recorded, so that the step that a loss was computed from is found."""
        return self.has_padding or self.has_weights

    def expect_weights(self) -> None:
        """Record that batches have tokens, by which losses are weighted."""
        for loops in {self, *(self._peers or ())}:
            loops.has_weights = True

    def find_weight(self) -> int | None:
        """Return the tokens of this rank in the step that a prepared model computed on last, or in the newest step.

        None if its batches have none, and outside of all loops.
        """
        info = self.find_trained_step()
        return info.tokens[self._rank] if info is not None and info.tokens else None

    def open(self, record: LoopRecord) -> None:
        """Add a loop; `record_batch` and `close` take its record."""
        self.open_records.append(record)
        self.latest = next(_CLOCK)

    def record_batch(self, record: LoopRecord, batch: Any) -> None:
        """Record a batch that is about to be returned to the script."""
        assert record.loop is not None
        info = record.loop.step_info
        assert info is not None
        self.latest = next(_CLOCK)
        record.times = (self.latest, record.times[0])
        references = list(map(weakref.ref, nested.list_tensors(batch)))
        record.recent.append((references, info))
        if info.loss_scale != 1:
            self.scaled[:] = [*(each for each in self.scaled if each() is not None), *references]
        if record.steps and record.steps[-1][0] is info:
            record.steps[-1] = (info, record.steps[-1][1] + 1)
        else:
            record.steps.append((info, 1))

    def close(self, record: LoopRecord, *, finished: bool) -> None:
        """Remove a loop that has reached its end, or was left by `break` or an exception."""
        self.open_records.remove(record)
        for other in self.open_records:
            if other.loop is not None and other.was_created_in(record):
                other.num_batches_at_end = other.loop.num_batches
        record.loop = None
        self.model_inputs.forget()
        if finished and self.records_batches:
            self._finished.append(record)

    def find_steps(self, data: Any, batch: Any = None) -> Sequence[StepInfo]:
        """Return the steps that `data` was computed from; empty if it belongs to no loop or nothing is padded.

        Checked in this order: the batch passed, tensors that came with a batch, the last input of a prepared model,
        a loop that has just finished and returned as many samples, the innermost loop. Raises ValueError if the batch is
        unknown, or if `data` may belong to several steps with different padding.
        """
        if not self.has_padding:
            return []
        if (loops := self._find_latest()) is not self:
            return loops.find_steps(data, batch)
        if batch is not None:
            if info := self._find_step(nested.list_tensors(batch)):
                return [info]
            raise ValueError(
                "gather_for_metrics(batch=...) failed: the batch is unknown. Pass one of the last "
                f"{_MAX_RECENT} batches of a prepared loader, unchanged and with a tensor in it."
            )
        if info := self._find_step(nested.list_tensors(data)) or self._find_model_step():
            return [info]
        return self._find_steps_by_rows(_count_rows(data))

    def _find_latest(self) -> ActiveLoops:
        """Return these loops, or those of another Accelerator that have advanced later if none of these is open."""
        if self.open_records or self._peers is None or len(self._peers) <= 1:
            return self
        newer = [
            loops
            for loops in self._peers
            if loops.latest > self.latest and (loops.is_open or not self._finished)
        ]
        return max(newer, key=lambda loops: loops.latest, default=self)

    def _find_step(self, tensors: Sequence[torch.Tensor]) -> StepInfo | None:
        records = self.records
        if self._peers and len(self._peers) > 1:
            records += [record for loops in self._peers - {self} for record in loops.records]
        steps = (record.find_step(tensor) for record in records for tensor in tensors)
        return next((info for info in steps if info is not None), None)

    def _find_model_step(self) -> StepInfo | None:
        tensor = self.model_inputs.find_newest()
        return None if tensor is None else self._find_step([tensor])

    def _find_steps_by_rows(self, num_rows: int | None) -> Sequence[StepInfo]:
        """Return the steps of data of which only the number of rows is known."""
        newest = self.open_records[-1] if self.open_records else None
        since = newest.times[0] if newest else 0
        for record in reversed(self._finished):
            if num_rows and record.times[0] > since and num_rows == record.num_rows(self._rank):
                steps = [info for info, times in record.steps for _ in range(times)]
                if len(steps) == 1 and steps[0].num_padding:
                    raise ValueError(
                        "gather_for_metrics() cannot tell if the data come from the loop that has just ended: they have "
                        f"{num_rows} rows, as its only batch, which was padded. Gather inside the loop or with batch=batch; "
                        "use gather() for data that are not from the loop."
                    )
                return steps
        if newest is None or (info := newest.step_info) is None:
            return []
        # Loops that have advanced since this loop's last batch but one, so it is not nested in them.
        before = newest.times[1]
        others = [other.step_info for other in self.open_records[:-1] if before and other.times[0] > before]
        if any(other and other[:2] != info[:2] for other in others):
            raise ValueError(
                "gather_for_metrics() cannot tell which batch the data come from: several loops advance together (zip), and "
                "the padding of their batches differs at this step. Pass the batch: gather_for_metrics(data, batch=batch)."
            )
        return [info]


def _count_rows(data: Any) -> int | None:
    """Return the number of rows of some data, or None if it is unknown."""
    leaves = nested.leaves(data)
    if leaves and isinstance(leaves[0], torch.Tensor):
        # A nested tensor has no shape.
        return leaves[0].size(0) if leaves[0].dim() else None
    return len(data) if isinstance(data, list) else None


class Caller(NamedTuple):
    """A function call, and the instruction that it executes."""

    frame: int
    """Identity of the frame; not the frame itself, which would keep the variables of the script."""
    code: CodeType
    instruction: int


CallStack: TypeAlias = Mapping[tuple[int, CodeType], int]
"""Instructions of all function calls that are running."""


def list_callers(frame: FrameType | None) -> tuple[Caller, ...]:
    """Return a frame and all that called it, innermost first."""
    callers = []
    while frame is not None:
        callers.append(Caller(id(frame), frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(callers)


def capture_stack() -> CallStack:
    """Return the function calls that are running; a generator between two of its values is not one of them."""
    callers = list_callers(sys._getframe(1))  # noqa: SLF001 - as `inspect.currentframe`, which returns no caller
    return {(caller.frame, caller.code): caller.instruction for caller in callers}


def find_caller(callers: Sequence[Caller], stack: CallStack) -> Caller | None:
    """Return the innermost of some callers that is still running; None if all have returned or run in another thread."""
    return next((caller for caller in callers if (caller.frame, caller.code) in stack), None)


def is_looping(caller: Caller, stack: CallStack) -> bool:
    """Return whether the caller requested a batch by a `for` statement, whose body it executes now."""
    end = _find_ends(caller.code).get(caller.instruction)
    return end is not None and caller.instruction < stack[caller.frame, caller.code] < end


@lru_cache(maxsize=64)
def _find_ends(code: CodeType) -> dict[int, int]:
    """Return the offsets of the `for` statements of some code, with those of their ends."""
    return {each.offset: int(each.argval) for each in dis.get_instructions(code) if each.opname == "FOR_ITER"}
