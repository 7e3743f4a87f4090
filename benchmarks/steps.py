"""Measure what libraries and launchers add to a training step and to a batch."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import mean
from typing import NamedTuple, TextIO

from benchmarks.bench import SCRIPTS, Bench, Run
from benchmarks.report import Blocks, Table

__all__ = ["measure_steps"]

_TEXT = """\
Microseconds of CPU time of the training thread, the mean of all ranks. A step is forward and backward of
Linear(4, 4), `optimizer.step()` of SGD, `scheduler.step()` of LambdaLR and `zero_grad()`, with so little arithmetic
that overhead dominates. Every step uses the same batch, or a shuffled loader reads 32 samples for each from a
TensorDataset. A batch is such a reading without a step. On 2 processes the model is in DDP.

Bare is the loop without a library, in the same processes as the loop of the library. *No library* is that loop under
`accel launch`; bare beside it, and beside accel there, is without what the launcher has in torch: its hook after each
step, and the looks of its thread. One program at a time runs a block of 256 iterations (128 on 2 processes) after one
that does not count, so that blocks of all rows alternate. Each round starts new processes. Added is the median
difference of blocks. Goals, where a bare step takes 75: at most 2 added to a script without a library under
`accel launch`; to one of accel 4 under `python`, 5 under `accel launch`, and 15 on 2 processes."""
_ROUNDS = 2
"""Rounds for each repetition of the benchmarks."""
_BLOCKS = 5
"""Blocks of each loop in a round, after one that does not count."""
_NAMES = {"torch": "no library", "accel_runtime": "accel", "accelerate": "Accelerate"}
_Measure = Callable[[str, str], float]
"""Measures a block of a library's loop: microseconds of an iteration."""


class _Program(NamedTuple):
    """Launcher as the page shows it, its command, and the libraries whose loops alternate with the bare one in its processes."""

    launcher: str
    command: tuple[str, ...]
    libraries: tuple[str, ...]


def measure_steps(bench: Bench) -> Table:
    """Measure microseconds of training steps and batches on one process and on two."""
    python, torchrun = (
        {"accel_runtime": f"{bench.accel}/{program}", "accelerate": f"{bench.accelerate}/{program}"}
        for program in ("python", "torchrun")
    )
    launch = (f"{bench.accel}/accel", "launch", "--quiet", "--nproc-per-node")
    two = ("--standalone", "--nproc-per-node", "2")
    one_process = [
        _Program("accel launch", (*launch, "1"), ("torch", "accel_runtime")),
        _Program("python", (python["accel_runtime"],), ("accel_runtime",)),
        _Program("python", (python["accelerate"],), ("accelerate",)),
    ]
    two_processes = [
        _Program("accel launch", (*launch, "2"), ("torch", "accel_runtime")),
        _Program("torchrun", (torchrun["accel_runtime"], *two), ("accel_runtime",)),
        _Program("torchrun", (torchrun["accelerate"], *two), ("accelerate",)),
    ]
    rows = [
        *_measure(bench, "1 process", 1, one_process, ("step", "step with a loader", "batch")),
        *_measure(bench, "2 processes", 2, two_processes, ("step", "step with a loader")),
    ]
    header = ("", "bare", "library", "added", "library ÷ bare")
    return Table("A training step and a batch, µs", _TEXT, header, rows)


def _measure(
    bench: Bench, label: str, nproc: int, programs: list[_Program], loops: tuple[str, ...]
) -> Iterator[tuple[str, ...]]:
    """Yield a row for each loop of each library of each program."""
    times: dict[tuple[str, int, str], list[float]] = {
        (loop, index, library): []
        for loop in loops
        for index, program in enumerate(programs)
        for library in ("bare", *program.libraries)
    }
    for _ in range(_ROUNDS * bench.repeats):
        with ExitStack() as stack:
            measures = [stack.enter_context(_start(bench, program, nproc)) for program in programs]
            for block in range(_BLOCKS + 1):
                for (loop, index, library), measured in times.items():
                    microseconds = measures[index](library, loop)
                    if block:
                        measured.append(microseconds)
    for loop in loops:
        for index, program in enumerate(programs):
            for library in program.libraries:
                blocks = Blocks(times[loop, index, "bare"], times[loop, index, library])
                yield blocks.to_row(f"{label}, {loop}: {_NAMES[library]}, `{program.launcher}`")


@contextmanager
def _start(bench: Bench, program: _Program, nproc: int) -> Iterator[_Measure]:
    """Start the processes of a program, and yield a function that lets all of them run a block."""
    address = str(bench.cwd / "step.sock")
    with ThreadPoolExecutor(1) as commands:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(address)
            server.listen()
            server.settimeout(1)
            run = bench.command(*program.command, str(SCRIPTS / "step.py"), address, *program.libraries)
            done = commands.submit(run)
            ranks = [_accept(server, done) for _ in range(nproc)]
        Path(address).unlink()

        def measure(library: str, loop: str) -> float:
            for rank in ranks:
                print(library, loop, file=rank, flush=True)
            return mean(float(rank.readline()) for rank in ranks)

        try:
            yield measure
        finally:
            for rank in ranks:
                with suppress(BrokenPipeError):  # to a process that failed
                    rank.close()
            done.result()  # with the output of a command that failed


def _accept(server: socket.socket, done: Future[Run]) -> TextIO:
    """Return the connection of the next rank, or raise the error of a command that failed before."""
    while True:
        try:
            connection = server.accept()[0]
        except TimeoutError:
            if done.done():
                done.result()
        else:
            with connection:
                return connection.makefile("rw")
