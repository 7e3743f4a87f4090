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
from benchmarks.report import Blocks, Table, format_median

__all__ = ["measure_steps"]

_TEXT = """\
Microseconds of CPU time of the training thread, the mean of all ranks. A step is forward and backward of Linear(4, 4), SGD,
LambdaLR and `zero_grad()`; a shuffled loader reads 32 samples from a TensorDataset, or every step has the same batch. A batch is
such a reading without a step. On 2 processes the model is in DDP.

Bare is the loop without a library under `python` or `torchrun`, in the processes of accel. The other columns are the median
difference of blocks of 256 iterations (128 on 2 processes) that alternate with bare ones in the same processes; the last two are
of scripts under `accel launch`, and their bare loop is without what the launcher has in torch. Goals, where a bare step takes 75: at
most 2 added to a script without a library under `accel launch`; to one of accel 4 under `python`, 5 under `accel launch`, and 15
on 2 processes."""
_HEADER = ("", "bare", "accel", "Accelerate", "no library, `accel launch`", "accel, `accel launch`")
_ROUNDS = 2
"""Rounds for each repetition of the benchmarks."""
_BLOCKS = 5
"""Blocks of each loop in a round, after one that does not count."""
_Measure = Callable[[str, str], float]
"""Measures a block of a library's loop: microseconds of an iteration."""


class _Program(NamedTuple):
    """Command, and the libraries whose loops alternate with the bare one in its processes."""

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
        _Program((python["accel_runtime"],), ("accel_runtime",)),
        _Program((python["accelerate"],), ("accelerate",)),
        _Program((*launch, "1"), ("torch", "accel_runtime")),
    ]
    two_processes = [
        _Program((torchrun["accel_runtime"], *two), ("accel_runtime",)),
        _Program((torchrun["accelerate"], *two), ("accelerate",)),
        _Program((*launch, "2"), ("torch", "accel_runtime")),
    ]
    rows = [
        *_measure(bench, "1 process", 1, one_process, ("step", "step with a loader", "batch")),
        *_measure(bench, "2 processes", 2, two_processes, ("step", "step with a loader")),
    ]
    return Table("A training step and a batch, µs", _TEXT, _HEADER, rows)


def _measure(
    bench: Bench, label: str, nproc: int, programs: list[_Program], loops: tuple[str, ...]
) -> Iterator[tuple[str, ...]]:
    """Yield a row for each loop."""
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
        added = (
            format_median(Blocks(times[loop, index, "bare"], times[loop, index, library]).added)
            for index, program in enumerate(programs)
            for library in program.libraries
        )
        yield (f"{label}, {loop}", format_median(times[loop, 0, "bare"]), *added)


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
