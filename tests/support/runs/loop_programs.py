"""Programs of loops over prepared loaders, and an interpreter that continues them from any save.

A program is a tree of statements. `run_program` runs it and records its events: each batch with the number of its epoch, the
end of each loop, and draws from all generators. At a save, the interpreter stores its own position beside the checkpoint, as
a script does that continues at the same place. `continue_program` builds everything anew, with other seeds, loads the
checkpoint and runs the rest of the program, which must have the events that the uninterrupted run has after this save.
"""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from support.training.data_sets import (
    EpochSampler,
    MappedDataset,
    PythonShuffledSampler,
    VariableBatchSampler,
)
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from accel_runtime import Accelerator, DataLoaderConfiguration

Method = Literal["resume", "skip_first_batches", "continue", "stateful"]
"""How a script continues: with `resume`, or with `load_state`, in the two ways of skipping batches, or with stateful loaders."""
Order = Literal["inner first", "outer first"]
"""When the iterator of an outer loop is created: after the inner loop has ended, or before it continues."""
STREAMS = ("stream", "stateful stream", "split stream", "split stateful stream", "stream of the epoch")
ORDERED = ("in order", "shuffled", "generator", "epoch sampler", "python sampler", "batch sampler")
DRAWS_GLOBALLY = ("shuffled", "python sampler", "batch sampler")
"""Loaders whose order depends on the global generators of the process."""


@dataclass(frozen=True)
class Data:
    """A loader of a program."""

    kind: str = "in order"
    count: int = 5
    """The number of samples."""
    batch: int = 2
    drop_last: bool = False
    workers: int = 0
    persistent: bool = False
    augmented: bool = False
    """Add random numbers to each sample."""

    @property
    def num_batches(self) -> int:
        """Return the number of batches of an epoch on one process."""
        if self.kind == "batch sampler":
            return len(_vary_batches(self.count))
        parts = [self.count]
        if "split" in self.kind and self.workers > 1:
            parts = [len(range(worker, self.count, self.workers)) for worker in range(self.workers)]
        return sum(part // self.batch if self.drop_last else -(-part // self.batch) for part in parts)

    def build(self) -> DataLoader[Any]:
        """Build the loader of a script. Its own generator has a different seed in each process."""
        warnings.filterwarnings("ignore", "This DataLoader will create")
        make = _augment if self.augmented else _number
        options: dict[str, Any] = {
            "num_workers": self.workers,
            "persistent_workers": self.persistent and self.workers > 0,
        }
        if self.kind in STREAMS:
            dataset = ProgramStream(
                self.count,
                make,
                split="split" in self.kind,
                by_epoch=self.kind == "stream of the epoch",
            )
            if "stateful" in self.kind:
                dataset = StatefulProgramStream(dataset)
            return DataLoader(dataset, batch_size=self.batch, drop_last=self.drop_last, **options)
        data = MappedDataset(self.count, make)
        if self.kind == "batch sampler":
            return DataLoader(
                data, batch_sampler=VariableBatchSampler(_vary_batches(self.count), shuffle=True), **options
            )
        options |= {"batch_size": self.batch, "drop_last": self.drop_last}
        options |= {
            "in order": dict,
            "shuffled": lambda: {"shuffle": True},
            "generator": lambda: {
                "shuffle": True,
                "generator": torch.Generator().manual_seed(torch.initial_seed()),
            },
            "epoch sampler": lambda: {"sampler": EpochSampler(self.count)},
            "python sampler": lambda: {"sampler": PythonShuffledSampler(self.count)},
        }[self.kind]()
        return DataLoader(data, **options)


def _vary_batches(count):
    sizes = itertools.cycle([1, 2, 1, 3])
    numbers, batches = list(range(count)), []
    while numbers:
        size = next(sizes)
        batches.append(numbers[:size])
        numbers = numbers[size:]
    return batches


def _number(index):
    return torch.tensor([float(index)], dtype=torch.float64)


def _augment(index):
    return torch.tensor(
        [float(index), torch.rand(()).item(), random.random(), np.random.rand()],  # noqa: NPY002
        dtype=torch.float64,
    )


class ProgramStream(IterableDataset):
    """A stream of samples; every iteration begins at the first one.

    Args:
        count: The number of samples.
        make: Converts a number to a sample.
        split: Split the stream among the workers.
        by_epoch: Rotate the numbers by the number that `set_epoch` was called with.
    """

    def __init__(self, count, make, *, split=False, by_epoch=False):
        self.count, self.make, self.split = count, make, split
        self.epoch = 0
        if by_epoch:
            self.set_epoch = self._set_epoch

    def _set_epoch(self, epoch):
        self.epoch = epoch

    def numbers(self):
        """Return the numbers of this process in order."""
        numbers = [(number + self.epoch) % self.count for number in range(self.count)]
        info = get_worker_info() if self.split else None
        return numbers if info is None else numbers[info.id :: info.num_workers]

    def __iter__(self):
        return map(self.make, self.numbers())


class StatefulProgramStream(IterableDataset):
    """A stream with a state; only the first iteration after `load_state_dict` begins there."""

    def __init__(self, stream):
        self.stream = stream
        self.start = self.offset = 0

    def __iter__(self):
        self.offset, self.start = self.start, 0
        numbers = self.stream.numbers()
        while self.offset < len(numbers):
            self.offset += 1
            yield self.stream.make(numbers[self.offset - 1])

    def state_dict(self):
        return {"at": self.offset}

    def load_state_dict(self, state):
        self.start = self.offset = state["at"]


# Statements -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Draw:
    """Draw from all generators."""


@dataclass(frozen=True)
class Save:
    """Save a checkpoint."""


@dataclass(frozen=True)
class SetEpoch:
    """Call `set_epoch` of a loader that is not being iterated over."""

    loader: int
    epoch: int


@dataclass(frozen=True)
class Epochs:
    """Repeat statements."""

    count: int
    body: tuple[Any, ...]


@dataclass(frozen=True)
class Loop:
    """`for` over one loader, or over two with `zip`.

    Args:
        loaders: The numbers of the loaders.
        body: The statements for each batch.
        stop: The number of batches after which the loop is left; None: at the end of the epoch.
        leave: How: "top" is `break` before the body of the batch after the last one, "bottom" is `break` after the body of
            the last one, "islice" limits the iterable, "raise" is an exception that is caught outside of the loop.
        through: What stands between the loop and the loader: nothing, `enumerate`, or a generator, as progress bars are.
        skip: Iterate over `skip_first_batches(loader, skip)`.
        endless: The second loader begins again at its end: `zip(long, endless(short))`.
    """

    loaders: tuple[int, ...]
    body: tuple[Any, ...] = ()
    stop: int | None = None
    leave: Literal["top", "bottom", "islice", "raise"] = "top"
    through: Literal["", "enumerate", "generator"] = ""
    skip: int = 0
    endless: bool = False


@dataclass(frozen=True)
class Manual:
    """`iterator = iter(loader)`, then statements that may contain `Advance`, then `del iterator`.

    Args:
        loader: The number of the loader.
        body: The statements.
        endless: `iterator = endless(loader)`, which begins with the first `next` and again at its end.
    """

    loader: int
    body: tuple[Any, ...] = ()
    endless: bool = False


@dataclass(frozen=True)
class Advance:
    """`next(iterator)` of the enclosing `Manual` of this loader."""

    loader: int
    times: int = 1


@dataclass(frozen=True)
class Program:
    """A script: loaders and statements."""

    loaders: tuple[Data, ...]
    body: tuple[Any, ...]
    seedable: bool = False
    dispatch: bool = False

    def __str__(self):
        lines = [f"{_name(at)} = {data}" for at, data in enumerate(self.loaders)]
        options = [name for name in ("seedable", "dispatch") if getattr(self, name)]
        return "\n".join([*lines, *options, *_format(self.body, 0)])


def _name(loader: int) -> str:
    return "abcdefgh"[loader]


def _format(body: tuple[Any, ...], depth: int) -> list[str]:
    lines = []
    for statement in body:
        match statement:
            case Epochs(count, inner):
                lines += [f"for _ in range({count}):", *_format(inner, 1)]
            case Manual(loader, inner, endless):
                name = _name(loader)
                start = f"it_{name} = {'endless' if endless else 'iter'}({name})"
                lines += [start, *_format(inner, 0), f"del it_{name}"]
            case Advance(loader, times):
                lines += [f"next(it_{_name(loader)})" + f"  # {times} times" * (times > 1)]
            case Save():
                lines += ["save_state()"]
            case Draw():
                lines += ["draw()"]
            case SetEpoch(loader, epoch):
                lines += [f"{_name(loader)}.set_epoch({epoch})"]
            case Loop():
                lines += _format_loop(statement)
    return [" " * 4 * depth + line for line in lines] or [" " * 4 * depth + "pass"]


def _format_loop(loop: Loop) -> list[str]:
    names = [_name(loader) for loader in loop.loaders]
    if loop.skip:
        names[0] = f"skip_first_batches({names[0]}, {loop.skip})"
    if loop.endless:
        names[-1] = f"endless({names[-1]})"
    iterable = names[0] if len(names) == 1 else f"zip({', '.join(names)})"
    if loop.through:
        iterable = f"{loop.through}({iterable})"
    top, bottom = [], []
    if loop.stop is not None:
        if loop.leave == "islice":
            iterable = f"islice({iterable}, {loop.stop})"
        elif loop.leave == "bottom":
            bottom = [f"    if i + 1 == {loop.stop}: break"]
        else:
            top = [f"    if i == {loop.stop}: {'break' if loop.leave == 'top' else 'raise'}"]
    return [f"for x in {iterable}:", *top, *_format(loop.body, 1), *bottom]


# Positions --------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReaderPosition:
    """Position of one iterator: batches of its epoch that were delivered, and how many were left at the most."""

    done: int
    skip: int
    num_batches: int
    has_ended: bool = False
    """Whether the script has seen the end of the epoch."""

    @property
    def is_at_end(self) -> bool:
        """Return whether the last batch of the epoch has been delivered."""
        return self.done > 0 and self.skip + self.done >= self.num_batches


@dataclass(frozen=True)
class Frame:
    """Position in one statement."""

    index: int
    """Number of the statement in a block, of the repetition, or of the steps of a loop."""
    statement: Any = None
    readers: tuple[ReaderPosition, ...] = ()


@dataclass(frozen=True)
class Position:
    """A save: the positions in all statements that were running, and the number of events before."""

    frames: tuple[Frame, ...]
    num_events: int
    name: str

    @property
    def loops(self) -> list[Frame]:
        """Return the frames of running loops, outermost first."""
        return [frame for frame in self.frames if isinstance(frame.statement, Loop)]

    def allows(self, method: Method, order: Order, depth: int | None) -> bool:  # noqa: PLR0911
        """Return whether a script can continue from here in this way, and so that it is determined where.

        Args:
            method: How the state is loaded.
            order: The order in which iterators are created.
            depth: The number of loops that the script continues, from the outermost; None: all.
        """
        loops = self.loops
        if depth is not None and not 0 < depth < len(loops):
            return False
        frames = [frame for frame in _cut(self.frames, depth) if frame.readers]
        is_manual = [isinstance(frame.statement, Manual) for frame in frames]
        if order == "inner first" and True in is_manual and False in is_manual[is_manual.index(True) :]:
            return False  # the script would advance the outer iterator before it enters the inner loop
        loops = loops[:depth]
        kept = [at for at, frame in enumerate(self.frames) if getattr(frame.statement, "endless", False)]
        if kept and any(
            frame.readers and frame.readers[0].is_at_end
            for frame in self.frames[kept[0] + isinstance(self.frames[kept[0]].statement, Manual) :]
        ):
            return False  # the script may drop the endless generator at the end of the loop, or go on with it
        if any(map(self._is_unused, range(len(self.frames)))):
            return (
                False  # an endless generator that requests no batch leaves the loaded state to the next one
            )
        if any(isinstance(frame.statement, Manual) for frame in self.frames[len(_cut(self.frames, depth)) :]):
            return False  # a script that keeps an iterator may go on with it in the next step
        if depth is not None and method != "resume" and any(reader.is_at_end for reader in loops[-1].readers):
            return False  # the script enters neither this loop nor the loops within it again
        for frame in loops:
            loop = frame.statement
            if loop.stop is not None and loop.leave in {"bottom", "islice"} and frame.index >= loop.stop:
                return False  # the script leaves this loop without entering it again
            ends = [reader.is_at_end for reader in frame.readers]
            if method != "resume" and any(ends) and not all(ends) and not (loop.endless and not ends[0]):
                return False  # the script does not enter this loop again
        return True

    def _is_unused(self, at: int) -> bool:
        """Return whether a frame is that of an endless generator from which no batch is requested after the save."""
        statement = self.frames[at].statement
        if not (isinstance(statement, Manual) and statement.endless):
            return False
        index = self.frames[at + 1].index
        is_loop = isinstance(statement.body[index], Loop)
        return not _advances(statement.body[index + (not is_loop) :], statement.loader)


def _advances(body: tuple[Any, ...], loader: int) -> bool:
    """Return whether statements advance the iterator of a loader."""
    return any(
        (isinstance(each, Advance) and each.loader == loader) or _advances(getattr(each, "body", ()), loader)
        for each in body
    )


class _Reader:
    """Iterator over a loader, or over its epochs one after another."""

    def __init__(self, run: _Run, loader: int, skip: int, *, endless: bool, start: ReaderPosition | None):
        self._run, self._loader, self._skip, self._endless = run, loader, skip, endless
        self._num_batches = run.program.loaders[loader].num_batches
        self._to_drop = 0
        self._has_ended = False
        self._iterator: Any = None
        self.done = 0
        view = self._loader_without(skip)
        if start is not None:
            self.done = start.done
            self._has_ended = start.has_ended
            if start.has_ended:
                view = None
            elif run.method in {"skip_first_batches", "continue"} or start.is_at_end:
                if start.is_at_end and run.method != "resume":
                    view = None
                elif run.method == "skip_first_batches":
                    view = self._loader_without(skip + start.done)
                elif run.method == "continue":
                    self._to_drop = start.done
        self._view = view
        if view is None:
            self._iterator = iter(())
        elif not endless:
            self._iterator = iter(view)

    def _loader_without(self, skip: int) -> Any:
        loader = self._run.loaders[self._loader]
        return self._run.accelerator.skip_first_batches(loader, skip) if skip else loader

    @property
    def position(self) -> ReaderPosition:
        return ReaderPosition(self.done, self._skip, self._num_batches, self._has_ended)

    def drop(self):
        """Drop the iterator."""
        self._iterator = iter(())

    def __iter__(self):
        return self

    def __next__(self):
        if self._iterator is None:
            self._iterator = iter(self._view)
        for _ in range(self._to_drop):
            next(self._iterator)
        self._to_drop = 0
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._iterator = None
            if not self._endless:
                self._iterator, self._has_ended = iter(()), True
                raise
            self.done = 0
            self._iterator = iter(self._run.loaders[self._loader])
            batch = next(self._iterator)
        self.done += 1
        self._run.record_batch(self._loader, batch)
        return batch


class _AbandonedError(Exception):
    """The script leaves the inner loops, and continues the loop of this depth."""


class _LeftError(Exception):
    """The script leaves one loop."""


def _pass_on(iterable):
    """Yield the items, as a progress bar does."""
    yield from iterable


@dataclass
class _Run:
    """One process that runs a program."""

    program: Program
    method: Method
    folder: str
    saves: AbstractSet[int] | None
    """The numbers of the saves that are made; None: all."""
    abandon: tuple[int, int] | None = None
    """The number of a save after which inner loops are abandoned, and the number of loops that continue."""
    order: Order = "inner first"
    seed: int = 1
    gather: bool = False
    events: list[Any] = field(default_factory=list)
    positions: list[Position] = field(default_factory=list)
    num_saves: int = 0

    def __post_init__(self):
        torch.manual_seed(self.seed)
        random.seed(self.seed)
        np.random.seed(self.seed)  # noqa: NPY002
        self.accelerator = Accelerator(
            dataloader_config=DataLoaderConfiguration(
                use_seedable_sampler=self.program.seedable,
                use_stateful_dataloader=self.method == "stateful",
                dispatch_batches=self.program.dispatch or None,
                split_batches=self.gather,
            )
        )
        self.loaders = [self.accelerator.prepare(data.build()) for data in self.program.loaders]
        self._frames: list[Any] = []
        self._depth = 0

    # Events

    def record_batch(self, loader, batch):
        if self.gather:
            batch = self.accelerator.gather_for_metrics(batch, batch=batch)
        self.events.append((_name(loader), self.loaders[loader].epoch, batch.tolist()))

    def _draw(self):
        if not self.gather:
            self.events.append((torch.rand(()).item(), random.random(), np.random.rand()))  # noqa: NPY002

    def _save(self):
        self.num_saves += 1
        if self.saves is None or self.num_saves in self.saves:
            self.save_as(self.num_saves)
        if self.abandon is not None and self.abandon[0] == self.num_saves:
            raise _AbandonedError

    def save_as(self, number):
        """Save a checkpoint with the position of the script."""
        name = f"{self.folder}/{number}"
        self.accelerator.save_state(name)
        frames = tuple(frame() if callable(frame) else frame for frame in self._frames)
        self.positions.append(Position(frames, len(self.events), name))

    # Statements

    def run_block(self, body, path=()):
        """Run the statements of a block, from the one that the path begins with."""
        start = path[0].index if path else 0
        if len(path) == 1:  # the save itself
            path, start = (), start + 1
        for index in range(start, len(body)):
            self._frames.append(Frame(index))
            self._run_statement(body[index], path[1:] if index == start else ())
            self._frames.pop()

    def _run_statement(self, statement, path):  # noqa: C901
        match statement:
            case Save():
                self._save()
            case Draw():
                self._draw()
            case SetEpoch(loader, epoch):
                self.loaders[loader].set_epoch(epoch)
            case Epochs(count, body):
                for number in range(path[0].index if path else 0, count):
                    self._frames.append(Frame(number, statement))
                    self.run_block(body, path[1:] if path and number == path[0].index else ())
                    self._frames.pop()
            case Manual():
                self._run_manual(statement, path)
            case Advance(loader, times):
                for _ in range(times):
                    if next(self._find_manual(loader), None) is None:
                        self.events.append((_name(loader), "end"))
            case Loop():
                self._run_loop(statement, path)

    def _find_manual(self, loader):
        return next(
            frame.reader for frame in self._frames if isinstance(frame, _Manual) and frame.loader == loader
        )

    def _run_manual(self, statement, path):
        start = path[0].readers[0] if path else None
        reader = _Reader(self, statement.loader, 0, endless=statement.endless, start=start)
        self._frames.append(_Manual(statement, reader))
        self.run_block(statement.body, path[1:])
        # As `del` in a script: the traceback of an exception that has left a loop may keep the reader.
        reader.drop()
        self._frames.pop()

    def _run_loop(self, loop, path):
        """Run a loop; after a save, run the rest of its body and continue it."""
        depth, num_frames = self._depth, len(self._frames)
        self._depth += 1
        try:
            self._iterate(loop, path, num_frames)
        except _LeftError:
            pass
        finally:
            self._depth = depth
        del self._frames[num_frames:]
        self.events.append(("end of", *map(_name, loop.loaders)))

    def _iterate(self, loop, path, num_frames):  # noqa: C901
        done = path[0].index if path else 0
        starts = path[0].readers if path else (None,) * len(loop.loaders)
        readers = ()
        state = {"done": done}

        def create():
            return tuple(
                _Reader(
                    self,
                    loader,
                    0 if at else loop.skip,
                    endless=loop.endless and at == 1,
                    start=start,
                )
                for at, (loader, start) in enumerate(zip(loop.loaders, starts, strict=True))
            )

        def frame():
            positions = tuple(reader.position for reader in readers) if readers else starts
            return Frame(state["done"], loop, positions)

        is_innermost = path and not any(isinstance(later.statement, Loop) for later in path[1:])
        if not path or is_innermost or self.order == "outer first":
            readers = create()
        self._frames.append(frame)
        if len(path) > 1:
            self._run_body(loop, path[1:])
        if not readers:
            readers = create()
        iterable = readers[0] if len(readers) == 1 else zip(*readers, strict=False)
        if loop.through:
            iterable = {"enumerate": enumerate, "generator": _pass_on}[loop.through](iterable)
        if loop.stop is not None and loop.leave == "islice":
            iterable = itertools.islice(iterable, loop.stop - done)
        try:
            for _ in iterable:
                if loop.stop is not None and loop.leave in {"top", "raise"} and state["done"] == loop.stop:
                    if loop.leave == "raise":
                        raise _LeftError
                    break
                state["done"] += 1
                self._draw()
                self._run_body(loop, ())
                if loop.stop is not None and loop.leave == "bottom" and state["done"] == loop.stop:
                    break
        finally:
            # As in a script, whose loop drops its iterators at once; a cycle with a frame of this class may keep them.
            for reader in readers:
                reader.drop()
        del self._frames[num_frames:]

    def _run_body(self, loop, path):
        """Run the body for one batch; return early if the script abandons the loops within it."""
        depth, num_frames = self._depth, len(self._frames)
        try:
            self.run_block(loop.body, path)
        except _AbandonedError:
            if self.abandon[1] != depth:
                raise
            self._depth = depth
            del self._frames[num_frames:]


class _Manual:
    """Frame of an iterator that the script advances by itself."""

    def __init__(self, statement, reader):
        self.statement, self.reader, self.loader = statement, reader, statement.loader

    def __call__(self):
        return Frame(0, self.statement, (self.reader.position,))


@dataclass(frozen=True)
class Recording:
    """What a run of a program has done."""

    events: list[Any]
    positions: list[Position]
    num_saves: int

    def after(self, position: Position) -> list[Any]:
        """Return the events after a save."""
        return self.events[position.num_events :]


def run_program(  # noqa: PLR0913
    program: Program,
    folder: str,
    *,
    method: Method = "resume",
    saves: AbstractSet[int] | None = frozenset(),
    abandon: tuple[int, int] | None = None,
    gather: bool = False,
) -> Recording:
    """Run a program without an interruption.

    Args:
        program: The program.
        folder: The directory of its checkpoints.
        method: The method that it will be continued with: stateful loaders are an option of the run that saves, too.
        saves: The numbers of the saves to make, counted from 1; None: all.
        abandon: After this save, leave the inner loops and continue with the next batch of the loop of this depth, from 1.
        gather: Record the batches of all ranks, with `split_batches`, and no draws.
    """
    run = _Run(program, method, folder, saves, abandon, gather=gather)
    run.run_block(program.body)
    return Recording(run.events, run.positions, run.num_saves)


def continue_program(  # noqa: PLR0913
    program: Program,
    position: Position,
    folder: str,
    *,
    method: Method = "resume",
    order: Order = "inner first",
    depth: int | None = None,
    saves: AbstractSet[int] | None = frozenset(),
    again: bool = False,
    seed: int = 2,
    gather: bool = False,
) -> Recording:
    """Continue a program from a save, with objects built anew.

    Args:
        program: The program.
        position: The save.
        folder: The directory of the checkpoints that this run makes.
        method: How the state is loaded.
        order: When the iterators of outer loops are created.
        depth: The number of loops that continue, from the outermost; the rest of their bodies is left out. None: all.
        saves: The numbers of the saves to make, counted from 1 after the position.
        again: Save immediately, build everything once more and load that.
        seed: The seed of the new process.
        gather: As in `run_program`.
    """

    def start(name, seed):
        run = _Run(program, method, folder, saves, order=order, seed=seed, gather=gather)
        run.accelerator.resume(name) if method == "resume" else run.accelerator.load_state(name)
        return run

    run = start(position.name, seed)
    if again:
        name = f"{folder}/again"
        run.accelerator.save_state(name)
        run = start(name, seed + 1)
    run.run_block(program.body, _cut(position.frames, depth))
    return Recording(run.events, run.positions, run.num_saves)


def _cut(frames: tuple[Frame, ...], depth: int | None) -> tuple[Frame, ...]:
    """Return the frames up to the loop of this depth."""
    if depth is None:
        return frames
    loops = [at for at, frame in enumerate(frames) if isinstance(frame.statement, Loop)]
    return frames[: loops[depth - 1] + 1]
