"""A soak: one training on two hosts with a fault every 5 to 20 seconds, compared bit for bit with an uninterrupted one.

The hosts are network namespaces, and need root. A launcher that ends before the training is started again with the same command,
as a service manager does. `Soak` runs and records facts; `judge` decides from them what went wrong.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import statistics
import sys
import threading
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, chdir, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from proof import Options
from proof.soak_training import replace_file
from support.hosts.network import Host, Hosts, hosts
from support.processes.commands import INTERPRETER
from support.processes.services import prepare_service

__all__ = ["TITLE", "Exit", "Facts", "Fault", "Report", "Row", "headline", "judge", "render", "run"]

TITLE = "A soak on two hosts"
RANKS = 4
STEP_S = 0.1
"""Time that a step of the soak sleeps, like a step of a larger model; the uninterrupted training does not."""
SAVE_STEPS = 5
"""Steps of the soak from one save to the next; the uninterrupted training does not save."""
PAUSE_S = (5, 20)
"""Seconds of training until the next fault."""
LOST_AFTER_S = 15
"""Seconds until a host that does not respond is lost (`process_group_timeout`)."""
RECOVERY_LIMIT_S = 240
"""A run that makes no new step for so long after a fault hangs."""
LAST_STEPS = 40
"""Steps after the last fault."""
STARTED_AGAIN_AFTER_S = 1.0
SCRIPT = Path(__file__).with_name("soak_training.py")


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        title: Its name on the page.
        share: The number of faults of this kind in a round of all kinds.
        reports: Patterns of the reasons that launchers must give, by their hosts; `{rank}` and `{host}` are those of the fault.
        ends: Hosts whose launchers end, by the documentation; they are started again.
        seconds: The shortest and longest time for which a link is cut.
    """

    title: str
    share: int
    reports: Mapping[str, str]
    ends: tuple[str, ...] = ()
    seconds: tuple[float, float] | None = None


KILLED = r"rank {rank} on ({host}): terminated by SIGKILL"
LOST = r"h1 \(10\.77\.0\.11\) does not respond"
NO_RENDEZVOUS = r"h1 \(10\.77\.0\.11\) lost the connection to the rendezvous at h0:29400"
KINDS = {
    "rank": Kind("SIGKILL of a rank", 5, {"h0": KILLED, "h1": KILLED}),
    "rank twice": Kind(
        "SIGKILL of a rank, and of its successor within a second", 2, {"h0": KILLED, "h1": KILLED}
    ),
    "launcher": Kind("SIGKILL of a launcher", 2, {"h0": LOST}, ("h1",)),
    "host": Kind("SIGKILL of all processes of a host", 2, {"h0": LOST}, ("h1",)),
    "short cut": Kind("link cut for 1 to 4 s", 2, {}, (), (1, 4)),
    "long cut": Kind("link cut for 25 to 30 s", 1, {"h0": LOST, "h1": NO_RENDEZVOUS}, ("h1",), (25, 30)),
    "rendezvous launcher": Kind(
        "SIGKILL of the launcher that serves the rendezvous", 1, {"h1": NO_RENDEZVOUS}, ("h0", "h1")
    ),
    "rendezvous host": Kind(
        "SIGKILL of all processes of the host with the rendezvous", 1, {"h1": NO_RENDEZVOUS}, ("h0", "h1")
    ),
}


class Fault(NamedTuple):
    """A fault: when, of which kind, and the rank and host that it hit (`h0|h1` for two kills of a rank that has moved)."""

    time: float
    kind: str
    rank: int | None
    host: str


class Exit(NamedTuple):
    """The end of a launcher before that of the training."""

    time: float
    host: str
    code: int


class Report(NamedTuple):
    """A reason that a launcher has printed for a restart or for its own end."""

    time: float
    host: str
    text: str


class Row(NamedTuple):
    """A step of a rank: its number, its time, and its loss in hexadecimal digits."""

    step: int
    time: float
    loss: str


@dataclass
class Facts:
    """What has happened in a soak.

    Attributes:
        rows: The steps of each rank, repeated ones too, in the order in which they were made.
        reference: The loss of each step of the uninterrupted training, by rank.
        unequal: Names of parts of the final state that differ, with their ranks.
        hangs: Faults after which the run had to be ended from outside.
    """

    faults: list[Fault] = field(default_factory=list)
    exits: list[Exit] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    rows: list[list[Row]] = field(default_factory=list)
    reference: list[dict[int, str]] = field(default_factory=list)
    unequal: list[str] = field(default_factory=list)
    hangs: list[Fault] = field(default_factory=list)


# Judgement ------------------------------------------------------------------------------------


def judge(facts: Facts) -> dict[str, Any]:
    """Return the counts of a soak, and a line for everything that went wrong."""
    lost = measure_lost_seconds(facts)
    kinds = {
        name: {
            "faults": sum(fault.kind == name for fault in facts.faults),
            "lost_s": [
                round(s, 2) for fault, s in zip(facts.faults, lost, strict=True) if fault.kind == name
            ],
        }
        for name in KINDS
    }
    ended = [f"{describe(fault)}: the launcher on {exit_.host} ended with code {exit_.code}"
             for fault, exit_ in pair_with_faults(facts.faults, facts.exits)
             if fault is None or exit_.host not in KINDS[fault.kind].ends]  # fmt: skip
    steps = [row.step for row in facts.rows[0]]
    return {
        "kinds": kinds,
        "steps": max(steps),
        "repeated": len(steps) - len(set(steps)),
        "reports": len(facts.reports),
        "wrong_reports": judge_reports(facts),
        "ended": ended,
        "hangs": [describe(fault) for fault in facts.hangs],
        "unequal": [*facts.unequal, *find_other_losses(facts)],
    }


def measure_lost_seconds(facts: Facts) -> list[float]:
    """Return for each fault the longest time between two new steps until the next fault, less the usual time of a step."""
    marks, newest = [], 0
    for row in facts.rows[0]:
        if row.step > newest:
            newest = row.step
            marks.append(row.time)
    gaps = [after - before for before, after in itertools.pairwise(marks)]
    usual = statistics.median(gaps)
    lost = []
    for began, ended in itertools.pairwise([*(fault.time for fault in facts.faults), float("inf")]):
        first, last = bisect_right(marks, began), bisect_right(marks, ended)
        lost.append(max((gaps[number - 1] for number in range(max(first, 1), last)), default=0.0) - usual)
    return lost


def judge_reports(facts: Facts) -> list[str]:
    """Return a line for each wrong report, and for each that a launcher should have made."""
    wrong, right = [], set()
    for fault, report in pair_with_faults(facts.faults, facts.reports):
        pattern = "" if fault is None else get_pattern(fault, report.host)
        if pattern and re.search(pattern, report.text):
            right.add((fault, report.host))
        else:
            wrong.append(f"{describe(fault)}: {report.host} reported: {report.text}")
    wrong += [
        f"{describe(fault)}: {host} did not report it"
        for fault in facts.faults
        for host in KINDS[fault.kind].reports
        if (fault, host) not in right
    ]
    return wrong


def get_pattern(fault: Fault, host: str) -> str:
    """Return the pattern of the reason that the launcher of a host must give for a fault, "" for none."""
    return KINDS[fault.kind].reports.get(host, "").format(rank=fault.rank, host=fault.host)


def find_other_losses(facts: Facts) -> list[str]:
    """Return a line for each rank that made a step with another loss than without faults, or left one out."""
    lines = []
    for rank, (rows, reference) in enumerate(zip(facts.rows, facts.reference, strict=True)):
        if other := sorted({row.step for row in rows if reference.get(row.step) != row.loss}):
            lines.append(
                f"rank {rank}: the losses of {len(other)} steps differ, the first is step {other[0]}"
            )
        if missing := reference.keys() - {row.step for row in rows}:
            lines.append(f"rank {rank}: {len(missing)} steps were not made")
    return lines


def pair_with_faults(faults: Sequence[Fault], events: Sequence[Any]) -> Iterator[tuple[Fault | None, Any]]:
    """Return each event with the fault before it, or None without one."""
    times = [fault.time for fault in faults]
    for event in events:
        number = bisect_right(times, event.time)
        yield (faults[number - 1] if number else None), event


def describe(fault: Fault | None) -> str:
    if fault is None:
        return "without a fault"
    return f"{fault.kind}, {fault.host}" + ("" if fault.rank is None else f", rank {fault.rank}")


# The run ----------------------------------------------------------------------------------------


class Soak:
    """A training on two hosts, whose launchers are started again when they end.

    Args:
        two: The hosts.
        folder: An empty folder for the files of the training.
        arguments: The seconds that each step sleeps, and the steps from one save to the next.
        facts: What happens is added to it.
    """

    def __init__(self, two: Hosts, folder: Path, arguments: tuple[float, int], facts: Facts) -> None:
        folder.mkdir()
        self._started = self._printed = time.monotonic()
        self._is_ending = False
        self._hosts, self._folder, self._arguments, self._facts = two, folder, arguments, facts
        self._processes: dict[str, Any] = {}
        self._readers: list[threading.Thread] = []
        self._starts_at = dict.fromkeys((host.name for host in two), 0.0)
        self._tail, self._offset = "", 0
        self.newest = 0
        self.pids: set[str] = set()
        """The processes of rank 0 that have made a step."""

    @property
    def has_ended(self) -> bool:
        """Return True if all launchers have ended; one that has failed is not among the processes."""
        return len(self._processes) == len(self._hosts) and all(
            process.poll() == 0 for process in self._processes.values()
        )

    def watch(self) -> None:
        """Read new steps, start launchers that are due, and print the progress each minute."""
        if time.monotonic() > self._printed + 60:
            self._printed = time.monotonic()
            self._print_progress()
        with suppress(FileNotFoundError), (self._folder / "steps-0").open() as file:
            file.seek(self._offset)
            text = file.read()
            self._offset += len(text)
            for line in (self._tail + text).splitlines(keepends=True):
                if not line.endswith("\n"):
                    self._tail = line
                    break
                self._tail = ""
                step, _, pid, _ = line.split()
                self.newest = max(self.newest, int(step))
                self.pids.add(pid)
        for host in self._hosts:
            process = self._processes.get(host.name)
            code = None if process is None else process.poll()
            if code is not None and not (code == 0 and self._is_ending):
                self._facts.exits.append(Exit(time.monotonic(), host.name, code))
                self._forget(host)
            elif process is None and time.monotonic() >= self._starts_at[host.name]:
                self._start(host)

    def wait(self, condition: Any, seconds: float) -> bool:
        """Watch until a condition holds; return False if it does not within a time."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            self.watch()
            time.sleep(0.02)
        return True

    def read_rank(self, rank: int) -> tuple[int, str]:
        """Return the process id and the host of a rank."""
        pid, host = (self._folder / f"rank-{rank}").read_text().split()
        return int(pid), host

    def end_with(self, step: int) -> None:
        """Set the last step."""
        self._is_ending = True
        with replace_file(self._folder / "last") as part:
            part.write_text(str(step))

    def get_launcher(self, host: str) -> Any:
        """Return the process of a launcher, or None if it has ended."""
        return self._processes.get(host)

    def start_again(self) -> None:
        """End all processes of a run that hangs, and start the launchers again."""
        for host in self._hosts:
            host.kill()
            if host.name in self._processes:
                self._processes[host.name].wait()
                self._forget(host)

    def close(self) -> None:
        """End all processes, and wait until their output has been read."""
        for host in self._hosts:
            for process in host.processes:
                process.kill()  # it may not have entered its host
            host.kill()
            for process in host.processes:
                process.wait()
            host.processes.clear()
        for reader in self._readers:
            reader.join()

    def _forget(self, host: Host) -> None:
        """Start the launcher of a host again later."""
        host.processes.remove(self._processes.pop(host.name))
        self._starts_at[host.name] = time.monotonic() + STARTED_AGAIN_AFTER_S

    def _print_progress(self) -> None:
        counts = Counter(fault.kind for fault in self._facts.faults)
        print(
            f"{self._folder.name}: {(time.monotonic() - self._started) / 60:.1f} min, step {self.newest}, "
            f"{len(self._facts.faults)} faults ({', '.join(f'{count} {kind}' for kind, count in counts.items())}), "
            f"{len(self._facts.exits)} launchers ended, {len(self._facts.hangs)} hangs",
            file=sys.stderr,
            flush=True,
        )

    def _start(self, host: Host) -> None:
        (process,) = Hosts([host]).launch(
            "-q", "--cpu", "--nnodes", str(len(self._hosts)), "--nproc-per-node", str(RANKS // len(self._hosts)),
            "--rdzv-endpoint", "h0:29400", "--max-restarts", "100000", "--resume",
            "--set", f"process_group_timeout={LOST_AFTER_S}",
            str(SCRIPT), str(self._folder), *map(str, self._arguments),
            env={"OMP_NUM_THREADS": "1", "ACCEL_HOME": str(self._folder / "home")},
        )  # fmt: skip
        self._processes[host.name] = process
        reader = threading.Thread(target=self._read_output, args=(host.name, process), daemon=True)
        reader.start()
        self._readers.append(reader)

    def _read_output(self, host: str, process: Any) -> None:
        """Record the reasons of restarts and errors of a launcher, and write all lines into a file."""
        with process.stdout, (self._folder / f"output-{host}").open("a", encoding="utf-8") as file:
            for line in process.stdout:
                file.write(f"{time.monotonic():.3f} {line}")
                file.flush()
                if match := re.match(r"accel: (?:restart \d+ of \d+|error): (.*)", line):
                    self._facts.reports.append(Report(time.monotonic(), host, match[1]))


class FaultInjector:
    """Faults of a soak.

    Args:
        soak: The training.
        two: Its hosts.
        chance: Random numbers with the seed of the soak.
        facts: The faults are added to it.
    """

    def __init__(self, soak: Soak, two: Hosts, chance: random.Random, facts: Facts) -> None:
        self._soak, self._hosts, self._chance, self._facts = soak, two, chance, facts
        self._deck: list[str] = []

    def inject(self) -> bool:
        """Inject a fault of the next kind, and wait for a new step; return False if none is made."""
        if not self._deck:
            self._deck = [name for name, kind in KINDS.items() for _ in range(kind.share)]
            self._chance.shuffle(self._deck)
        kind, soak, before = self._deck.pop(), self._soak, set(self._soak.pids)
        rank, host = None, self._hosts["rendezvous" not in kind]
        if kind.startswith("rank"):
            rank = self._chance.randrange(RANKS)
            pid, name = soak.read_rank(rank)
            host = next(each for each in self._hosts if each.name == name)
        elif kind.endswith("cut"):
            host = self._chance.choice(self._hosts)
        self._facts.faults.append(Fault(time.monotonic(), kind, rank, host.name))
        if rank is not None:
            kill_process(pid)
            if kind == "rank twice":
                self._kill_successor(rank, pid)
                soak.watch()
                before = set(soak.pids)  # the successors of all ranks may have made steps
        elif kind.endswith("launcher"):
            if process := soak.get_launcher(host.name):
                process.kill()
        elif kind.endswith("host"):
            host.kill()
        else:
            return self._cut(host, kind)
        newest = soak.newest
        return soak.wait(lambda: soak.pids - before and soak.newest > newest, RECOVERY_LIMIT_S)

    def _kill_successor(self, rank: int, pid: int) -> None:
        """Kill the process that takes the place of a rank, within its first second."""
        if self._soak.wait(lambda: self._soak.read_rank(rank)[0] != pid, RECOVERY_LIMIT_S):
            time.sleep(self._chance.uniform(0, 1))
            successor, name = self._soak.read_rank(rank)
            fault = self._facts.faults[-1]
            if name != fault.host:
                self._facts.faults[-1] = fault._replace(host="h0|h1")
            kill_process(successor)

    def _cut(self, host: Host, kind: str) -> bool:
        first, last = KINDS[kind].seconds or (0, 0)
        ends, soak = time.monotonic() + self._chance.uniform(first, last), self._soak
        host.cut()
        try:
            soak.wait(lambda: time.monotonic() > ends, RECOVERY_LIMIT_S)
        finally:
            host.mend()
        newest = soak.newest
        return soak.wait(lambda: soak.newest > newest, RECOVERY_LIMIT_S)


def kill_process(pid: int) -> None:
    """Kill a rank; one that has ended by itself is found by what the launchers report."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def run(options: Options, seed: int | None = None) -> dict[str, Any]:
    """Train with faults for a time, train the same steps without, and compare.

    Args:
        options: The time and the folder.
        seed: The seed of a soak whose faults are repeated, or None for other ones.
    """
    prepare_service("root")
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    facts = Facts()
    with end_at_sigterm(), chdir(options.folder), ExitStack() as stack:
        stack.callback(INTERPRETER.close)
        with hosts(2) as two:
            last, seconds = run_with_faults(two, options, random.Random(seed), facts)
        with hosts(2) as two:
            run_without_faults(two, options.folder, last)
    facts.rows = [read_rows(options.folder / "soak" / f"steps-{rank}") for rank in range(RANKS)]
    references = [read_rows(options.folder / "reference" / f"steps-{rank}") for rank in range(RANKS)]
    facts.reference = [{row.step: row.loss for row in rows} for rows in references]
    facts.unequal = compare_states(options.folder)
    return {"seed": seed, "seconds": round(seconds), **judge(facts)}


def run_with_faults(two: Hosts, options: Options, chance: random.Random, facts: Facts) -> tuple[int, float]:
    """Train with faults until the time is over and some steps after; return the last step and the seconds with faults."""
    soak = Soak(two, options.folder / "soak", (STEP_S, SAVE_STEPS), facts)
    injector = FaultInjector(soak, two, chance, facts)
    try:
        if not soak.wait(lambda: soak.newest > 0, RECOVERY_LIMIT_S):
            raise RuntimeError(f"The training did not start: see {options.folder / 'soak'}")
        started = time.monotonic()
        while True:
            pause_ends = time.monotonic() + chance.uniform(*PAUSE_S)
            soak.wait(lambda end=pause_ends: time.monotonic() > end, RECOVERY_LIMIT_S)
            if time.monotonic() > started + options.seconds and facts.faults:
                break
            if not injector.inject():
                facts.hangs.append(facts.faults[-1])
                soak.start_again()
                newest = soak.newest
                if not soak.wait(lambda newest=newest: soak.newest > newest, RECOVERY_LIMIT_S):
                    raise RuntimeError(f"The training did not start again: see {options.folder / 'soak'}")
        last, seconds = soak.newest + LAST_STEPS, time.monotonic() - started
        soak.end_with(last)
        if not soak.wait(lambda: soak.has_ended, RECOVERY_LIMIT_S):
            raise RuntimeError(f"The training did not end: see {options.folder / 'soak'}")
        return last, seconds
    finally:
        soak.close()


def run_without_faults(two: Hosts, folder: Path, last: int) -> None:
    """Train the same steps without faults and without sleeping."""
    reference = Soak(two, folder / "reference", (0, 0), Facts())
    reference.end_with(last)
    try:
        if not reference.wait(lambda: reference.has_ended, RECOVERY_LIMIT_S + last):
            raise RuntimeError(f"The uninterrupted training did not end: see {folder / 'reference'}")
    finally:
        reference.close()


def read_rows(path: Path) -> list[Row]:
    """Return the steps of a rank."""
    rows = [line.split() for line in path.read_text().splitlines()]
    return [Row(int(step), float(seconds), loss) for step, seconds, _, loss in rows]


def compare_states(folder: Path) -> list[str]:
    """Return the parts of the final states that differ between the two trainings, with their ranks."""
    import torch

    unequal = []
    for rank in range(RANKS):
        soak, reference = (torch.load(folder / name / f"final-{rank}") for name in ("soak", "reference"))
        unequal += [
            f"rank {rank}: {part} differ" for part in soak if not is_equal(soak[part], reference[part])
        ]
    return unequal


def is_equal(value: Any, other: Any) -> bool:
    """Return True if two nested states are equal bit for bit."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.dtype == other.dtype and torch.equal(value, other)
    if isinstance(value, Mapping):
        return value.keys() == other.keys() and all(is_equal(each, other[key]) for key, each in value.items())
    if isinstance(value, list | tuple):
        return len(value) == len(other) and all(map(is_equal, value, other))
    return bool(value == other)


@contextmanager
def end_at_sigterm() -> Iterator[None]:
    """Let SIGTERM raise SystemExit within this context, so that hosts and processes end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def render(results: Mapping[str, Any]) -> str:
    """Return the section of the page."""
    minutes, faults = results["seconds"] / 60, count_faults(results)
    rows = [
        f"| {kind.title} | {len(lost)} | {format_seconds(lost)} | {' and '.join(kind.ends) or '-'} |"
        for name, kind in KINDS.items()
        if (lost := results["kinds"][name]["lost_s"]) or results["kinds"][name]["faults"]
    ]
    lines = [
        (
            f"A small transformer (dropout, a shuffled loader with random augmentation in a worker, AdamW with a schedule, accumulation, "
            f"a save every {SAVE_STEPS} steps) trained for {minutes:.0f} minutes under `accel launch --max-restarts` on two hosts, h0 and "
            "h1, which are network namespaces, with two ranks each. "
            f"After {PAUSE_S[0]} to {PAUSE_S[1]} s of training it got the next of {faults} faults, and a launcher that had ended was started "
            "again after one second with the same command (`--resume`), as a service manager does."
        ),
        "",
        (
            "The seconds lost are the longest time between two steps that are new, from a fault to the next one, less the usual time of a "
            "step: they have the detection, the restart, the steps that are repeated and, of a link, the time in which it was cut. "
            f"`process_group_timeout` was {LOST_AFTER_S} s, the rendezvous on h0."
        ),
        "",
        "| Fault | Number | Seconds lost: median, maximum | Launchers that had to be started again |",
        "| --- | ---: | ---: | --- |",
        *rows,
        "",
        (
            "The machine of the rendezvous cannot be replaced while the run goes on, so that the launchers of both hosts end without it; a "
            "scheduler or a service manager starts them again."
        ),
        "",
        f"- The final weights, moments of the optimizer and random states of all {RANKS} ranks, and the losses of all {results['steps']} "
        f"steps ({results['repeated']} of them were repeated): "
        + format_wrong(results["unequal"], "equal to those of the same training without faults, bit for bit"),
        f"- Reports of the launchers, {results['reports']}: "
        + format_wrong(results["wrong_reports"], "all named the rank or the host that was hit"),
        "- Launchers that ended though the training could go on: " + format_wrong(results["ended"], "none"),
        "- Hangs, which had to be ended from outside: " + format_wrong(results["hangs"], "none"),
        "",
        f"The seed was {results['seed']}.",
    ]
    return "\n".join(lines)


def headline(results: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the number of faults, and what they changed and cost."""
    lost = [seconds for kind in results["kinds"].values() for seconds in kind["lost_s"]]
    equal = "equal to" if not results["unequal"] else "**different from**"
    return (
        f"{count_faults(results)} faults in {results['seconds'] / 60:.0f} min",
        f"on two hosts: weights {equal} those of the uninterrupted run, median {statistics.median(lost):.1f} s lost",
    )


def count_faults(results: Mapping[str, Any]) -> int:
    return sum(kind["faults"] for kind in results["kinds"].values())


def format_seconds(lost: Sequence[float]) -> str:
    return f"{statistics.median(lost):.1f}, {max(lost):.1f}"


def format_wrong(lines: Sequence[str], otherwise: str) -> str:
    """Return lines as a nested list with their number, or other text without any."""
    if not lines:
        return f"{otherwise}."
    return "\n".join([f"**{len(lines)} wrong**:", *(f"    - {line}" for line in lines)])
