"""What a library adds inside the script: to a step, to a batch, to a gather, each beside the bare loop."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from benchmarks.bench import SCRIPTS, Bench
from benchmarks.measure import interleaved
from benchmarks.report import NONE, Table, number, ratio, spread

__all__ = ["measure_gather", "measure_loop"]

_LOOP = """\
Microseconds of CPU time of the training thread, one process. A step is forward and backward of Linear(4, 4),
`optimizer.step()` of SGD, `scheduler.step()` of LambdaLR and `zero_grad()`: so little arithmetic that what is
left is overhead. A batch is 32 samples of a TensorDataset of 8192; an epoch's start is shared by its 256
batches. Each library runs in an interpreter of its own, where blocks of the bare loop and of the loop with the
library take turns. Added is the median difference of two such blocks."""
_GATHER = """\
Milliseconds of wall time on two gloo processes for one `gather` of a dict of 20 tensors of 8 numbers, and for one
`gather_object` of a list of 4 small dicts. Bare is `torch.distributed.all_gather` and `torch.cat`, tensor by tensor,
or `all_gather_object`, in the same processes, block by block in turn.
Waiting for another process varies much more than computing does, so what is compared is how the library stands
to the bare code beside it."""


@dataclass(frozen=True)
class Blocks:
    """Times of the bare code and, in turn with it, of the same with a library."""

    bare: list[float]
    library: list[float]

    @property
    def added(self) -> list[float]:
        """What the library adds, block by block."""
        return [with_ - bare for bare, with_ in zip(self.bare, self.library, strict=True)]

    @property
    def times(self) -> list[float]:
        """How often the bare code goes into that with the library, block by block."""
        return [with_ / bare for bare, with_ in zip(self.bare, self.library, strict=True)]


def measure_loop(bench: Bench) -> Table:
    """Microseconds a training step and a batch."""
    script = str(SCRIPTS / "loop.py")
    runs = interleaved(
        {
            "accel": bench.run(f"{bench.accel}/python", script, "accel_runtime"),
            "Accelerate": bench.run(f"{bench.accelerate}/python", script, "accelerate"),
        },
        bench.repeats,
    )
    answers = {name: [json.loads(run.output) for run in found] for name, found in runs.items()}
    rows = []
    for what in answers["accel"][0]:
        blocks = {name: _pooled(answer[what] for answer in found) for name, found in answers.items()}
        ours = blocks["accel"].added
        for name, found in blocks.items():
            comparable = found.added != ours and median(ours) > 0
            rows.append(
                (*_shared(f"{what}: {name}", found), ratio(found.added, ours) if comparable else NONE)
            )
    header = ("", "bare", "with it", "added", "with it ÷ bare", "added ÷ accel")
    return Table("A training step and a batch, µs", _LOOP, header, rows)


def measure_gather(bench: Bench) -> Table:
    """Milliseconds a gather."""
    command = ("--standalone", "--nproc-per-node", "2", str(SCRIPTS / "gather.py"))
    runs = interleaved(
        {
            "accel": bench.run(f"{bench.accel}/torchrun", *command, "accel_runtime"),
            "Accelerate": bench.run(f"{bench.accelerate}/torchrun", *command, "accelerate"),
        },
        bench.repeats,
    )
    answers = {name: [json.loads(run.output) for run in found] for name, found in runs.items()}
    rows = []
    for what in answers["accel"][0]:
        blocks = {name: _pooled(answer[what] for answer in found) for name, found in answers.items()}
        ours = blocks["accel"].times
        rows += [
            (*_shared(f"{what}: {name}", found), NONE if found.times == ours else ratio(found.times, ours))
            for name, found in blocks.items()
        ]
    header = ("", "bare", "with it", "added", "with it ÷ bare", "that ÷ accel")
    return Table("Gathering small tensors and objects, ms", _GATHER, header, rows)


def _pooled(answers: Iterable[dict[str, list[float]]]) -> Blocks:
    """The blocks of all interpreters."""
    found = list(answers)
    return Blocks(
        bare=[time for answer in found for time in answer["bare"]],
        library=[time for answer in found for time in answer["library"]],
    )


def _shared(label: str, found: Blocks) -> tuple[str, ...]:
    """The columns both tables have."""
    added, times = number(median(found.added)), f"{median(found.times):.2f}"
    return (label, spread(found.bare), spread(found.library), added, times)
