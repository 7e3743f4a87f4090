"""Iterations over prepared loaders, and the steps that gathered data belong to."""

from __future__ import annotations

import itertools
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol
from weakref import WeakSet

import torch

from accel_runtime.foundation import nested
from accel_runtime.foundation.steps import EpochProgress, StepInfo

__all__ = [
    "ActiveLoops",
    "LoadedIterations",
    "LoopRecord",
    "ModelInputHook",
]


_CLOCK = itertools.count(1)
"""Order of the events of all loops."""
_MAX_RECENT = 4
"""Number of recent batches per loop, and of finished loops, whose tensors are recognized; scripts may look ahead."""


class LoopRecord:
    """Batches and steps of one loop."""

    def __init__(self, loop: EpochProgress) -> None:
        self.loop: EpochProgress | None = loop
        """None after the loop: it would keep the dataset and the loader's workers."""
        self.recent: deque[tuple[list[weakref.ref[torch.Tensor]], StepInfo]] = deque(maxlen=_MAX_RECENT)
        self.steps: list[tuple[StepInfo, int]] = []
        """Run-length encoded steps so far: step info and number of repetitions."""
        self.times = (0, 0)
        """Times of the last two batches (newest first), counted over all loops."""
        self.num_skipped = loop.num_batches
        """Number of batches that were not returned in this loop, but before it."""

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
        return self.loop is not None and other.loop is not None and self.loop.is_inside(other.loop)

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
        self._peers = peers
        if peers is not None:
            peers.add(self)
        self.has_padding = has_padding
        """If false, batches need not be recorded."""
        self.open_records: list[LoopRecord] = []
        """Running loops, the innermost last. Only `open` and `close` change the list, in place."""
        self._finished: deque[LoopRecord] = deque(maxlen=_MAX_RECENT)
        self.latest = 0
        """Time of the newest batch, or of the start of the newest loop."""
        self._model_input: weakref.ref[torch.Tensor] | None = None
        self._continued_depth: float = math.inf
        self.loaders: WeakSet[LoadedIterations] = WeakSet()
        """What the loaders of these loops have loaded."""

    @property
    def running(self) -> list[EpochProgress]:
        """Return the running iterations, the innermost last."""
        return [record.loop for record in self.open_records if record.loop is not None]

    def continue_loop(self, depth: int) -> None:
        """Record that the script continues, or gives up, a loop that had this depth when a state was saved."""
        self._continued_depth = min(self._continued_depth, depth)

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

    @property
    def model_step(self) -> StepInfo | None:
        """Return the step that a prepared model computed on last, or the newest step if that is unknown."""
        if self.has_padding and (info := self._find_model_step()) is not None:
            return info
        return self.current_step

    def open(self, loop: EpochProgress) -> LoopRecord:
        """Add a loop, and return its record for `record_batch` and `close`."""
        record = LoopRecord(loop)
        self.open_records.append(record)
        self.latest = next(_CLOCK)
        return record

    def record_batch(self, record: LoopRecord, batch: Any) -> None:
        """Record a batch that is about to be returned to the script."""
        info = record.step_info
        assert info is not None
        self.latest = next(_CLOCK)
        record.times = (self.latest, record.times[0])
        record.recent.append(([weakref.ref(tensor) for tensor in _tensors(batch)], info))
        if record.steps and record.steps[-1][0] is info:
            record.steps[-1] = (info, record.steps[-1][1] + 1)
        else:
            record.steps.append((info, 1))

    def close(self, record: LoopRecord, *, finished: bool) -> None:
        """Remove a loop that has reached its end, or was left by `break` or an exception."""
        self.open_records.remove(record)
        record.loop = None
        self._model_input = None
        if finished and self.has_padding:
            self._finished.append(record)

    def record_model_input(self, inputs: Any) -> None:
        """Record the inputs that a prepared model is about to compute on."""
        tensor = next(_tensors(inputs), None)
        self._model_input = None if tensor is None else weakref.ref(tensor)

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
            if info := self._find_step(_tensors(batch)):
                return [info]
            raise ValueError(
                "gather_for_metrics(batch=...) failed: the batch is unknown. Pass one of the last "
                f"{_MAX_RECENT} batches of a prepared loader, unchanged and with a tensor in it."
            )
        if info := self._find_step(_tensors(data)) or self._find_model_step():
            return [info]
        return self._find_steps_by_rows(_count_rows(data))

    def _find_latest(self) -> ActiveLoops:
        """Return these loops, or those of another Accelerator that have advanced later if none of these is open."""
        if self.open_records or not self._peers or len(self._peers) == 1:
            return self
        newer = [
            loops
            for loops in self._peers
            if loops.latest > self.latest and (loops.is_open or not self._finished)
        ]
        return max(newer, key=lambda loops: loops.latest, default=self)

    def _find_step(self, tensors: Iterator[torch.Tensor]) -> StepInfo | None:
        records = self.records
        if self._peers and len(self._peers) > 1:
            records += [record for loops in self._peers - {self} for record in loops.records]
        candidates = list(tensors)
        steps = (record.find_step(tensor) for record in records for tensor in candidates)
        return next((info for info in steps if info is not None), None)

    def _find_model_step(self) -> StepInfo | None:
        tensor = self._model_input() if self._model_input is not None else None
        return self._find_step(iter([tensor])) if tensor is not None else None

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


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in nested.leaves(tree) if isinstance(leaf, torch.Tensor))


def _count_rows(data: Any) -> int | None:
    """Return the number of rows of some data, or None if it is unknown."""
    leaves = nested.leaves(data)
    if leaves and isinstance(leaves[0], torch.Tensor):
        # A nested tensor has no shape.
        return leaves[0].size(0) if leaves[0].dim() else None
    return len(data) if isinstance(data, list) else None


class ModelInputHook:
    """Forward hook that records which batch a prepared model computes on."""

    def __init__(self, loops: ActiveLoops) -> None:
        self._loops = loops

    def __call__(self, _module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Record the inputs."""
        self._loops.record_model_input((args, kwargs))

    def __reduce__(self) -> tuple[Callable[[], ModelInputHook], tuple[()]]:
        return _build_unused_hook, ()


def _build_unused_hook() -> ModelInputHook:
    """Return the hook of a copied or saved model, which belongs to no run."""
    return ModelInputHook(ActiveLoops(0, has_padding=False))
