"""A hang is reported at the limit, and a healthy run is not: programs in simulated time, with pauses of all kinds."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import sysconfig
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.processes.children import Process
from support.processes.waits import wait_until

import accel_runtime
from accel_cli import worker
from accel_cli.runner import stalls
from accel_cli.runner.hang_report import Collective, GroupTrace, HangRecord, Observation, RankObservation
from accel_cli.runner.stalls import RankObserver, StallWatch
from accel_cli.runs.run_dir import RankFolder

TIMEOUT_S, STARTUP_S, STEP_S = 30, 100, 0.1
RANKS = (0, 1)


@dataclass
class Work:
    """What the ranks do in a part of a program; each field is a rate per second or a state."""

    seconds: float
    steps: float = 0
    batches: float = 0
    backwards: float = 0
    processor: tuple[float, float] = (0, 0)
    output: tuple[float, float] = (0, 0)
    transferred: tuple[float, float] = (0, 0)
    all_reduces: float = 0
    stacks: tuple[str, str] = ("train.py:5", "train.py:5")
    ended: frozenset[int] = frozenset()
    waits: frozenset[int] = frozenset()
    """The ranks in an all_reduce that the other one has not entered."""
    calls: tuple[str, str] = ("all_reduce", "all_reduce")


class Machine(RankObserver):
    """Ranks in simulated time; `pause` stops the launcher, and the ranks with it or not."""

    def __init__(self, *parts):
        super().__init__({})
        self.parts, self.now, self.worked = parts, 0.0, 0.0

    def pass_time(self, seconds, *, ranks=True):
        self.now += seconds
        self.worked += seconds if ranks else 0

    def find_part(self):
        start = 0.0
        for part in self.parts:
            if self.worked < start + part.seconds:
                return part
            start += part.seconds
        return self.parts[-1]

    def total(self, name, rank=None):
        """Return how often something has happened."""
        left, total = self.worked, 0.0
        for part in self.parts:
            rate = getattr(part, name)
            total += min(left, part.seconds) * (rate if rank is None else rate[rank])
            left -= min(left, part.seconds)
        return int(total)

    def read_clock(self):
        return self.now

    def have_scripts_begun(self):
        return True

    def read_beats(self):
        counts = {name: self.total(name) for name in ("steps", "batches", "backwards")}
        signs = tuple(counts.values())
        return {rank: SimpleNamespace(**counts, signs_of_life=signs) for rank in RANKS if any(signs)}

    def observe(self, beats, moment, *, with_others):  # noqa: ARG002 - as in the base class
        part = self.find_part()
        ranks, traces = {}, {}
        for rank in RANKS:
            ranks[rank] = RankObservation(
                (part.stacks[rank],),
                rank in part.ended,
                processor_s=self.total("processor", rank),
                transferred=self.total("transferred", rank),
                output=self.total("output", rank),
            )
            last = 1 + self.total("all_reduces")
            collectives = {last: Collective("gloo:all_reduce", (), is_completed=True)}
            if rank in part.waits:
                collectives[last + 1] = Collective(part.calls[rank], (), is_completed=False)
            if rank not in part.ended:
                traces[rank] = {"0": GroupTrace(RANKS, collectives)}
        return Observation(moment, ranks, HangRecord(traces), has_other_nodes=False)

    def format_report(self, beats, seconds):  # noqa: ARG002 - as in the base class
        return "stalled"


TRAINS = Work(20, steps=2, processor=(1, 1))
SAVES = "/accel_runtime/checkpoint/save.py in write"
HEALTHY = {
    "slow steps": [Work(800, steps=1 / 25)],
    "slow steps that sleep": [Work(800, steps=1 / 20, stacks=("train.py:3", "train.py:4"))],
    "accumulation by backward": [TRAINS, Work(500, backwards=1 / 20)],
    "batches without steps": [TRAINS, Work(500, batches=1 / 10)],
    "collectives of torch only": [TRAINS, Work(500, all_reduces=20)],
    "output only": [TRAINS, Work(500, output=(40, 0))],
    "a save": [TRAINS, Work(250, stacks=(SAVES, SAVES)), TRAINS],
    "a save of rank 0": [TRAINS, Work(250, stacks=(SAVES, SAVES), waits=frozenset({1})), TRAINS],
    "an export of rank 0": [TRAINS, Work(250, processor=(0.9, 0), waits=frozenset({1})), TRAINS],
    "a download behind a barrier": [
        TRAINS,
        Work(
            250,
            stacks=("get.py:3", "/torch/distributed/distributed_c10d.py in barrier"),
            waits=frozenset({1}),
        ),
        TRAINS,
    ],
    "an upload": [TRAINS, Work(250, transferred=(10**6, 0), waits=frozenset({1})), TRAINS],
    "a rank that finishes later": [TRAINS, Work(250, ended=frozenset({1}))],
    "a debugger": [
        TRAINS,
        Work(250, stacks=("python3.11/pdb.py in interaction", "train.py:5"), waits=frozenset({1})),
    ],
    "a compiler": [TRAINS, Work(250, processor=(3, 3)), TRAINS],
    "a slow start": [Work(500, processor=(1, 1)), TRAINS],
    "output at the start": [Work(800, output=(1, 1)), TRAINS],
}
STARTS = ("a slow start", "output at the start")
WAITS = frozenset({0})
HANGS = {
    "a rank sleeps, the other waits": (Work(9999, waits=WAITS), 1),
    "both sleep": (Work(9999), 1),
    "the waiting rank polls": (Work(9999, waits=WAITS, processor=(1, 0)), 1),
    "the waiting rank prints": (Work(9999, waits=WAITS, output=(10, 0)), 1),
    "different collectives": (
        Work(9999, waits=frozenset(RANKS), calls=("all_reduce", "broadcast"), processor=(1, 1)),
        1,
    ),
    "a collective with a rank that has ended": (Work(9999, waits=WAITS, ended=frozenset({1})), 1),
    "a rank spins": (Work(9999, waits=WAITS, processor=(0, 1)), 10),
    "a barrier that a rank does not reach": (
        Work(9999, waits=WAITS, stacks=("/torch/distributed/distributed_c10d.py in barrier", "train.py:9")),
        10,
    ),
    "a save that does not end": (Work(9999, stacks=(SAVES, SAVES)), 10),
}  # fmt: skip


@pytest.fixture(autouse=True)
def silent(monkeypatch):
    """The lines that were printed."""
    lines = []
    monkeypatch.setattr(stalls.console, "note", lines.append)
    return lines


def build_watch(machine):
    return StallWatch(machine, TIMEOUT_S, STARTUP_S)


def watch_for(machine, watch, seconds):
    """Watch for the given time, or until the program ends; return the stall that is reported."""
    end = machine.now + seconds
    while machine.now < end and machine.worked < sum(part.seconds for part in machine.parts):
        machine.pass_time(STEP_S)
        if stall := watch.check():
            return stall
    return None


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_is_not_ended_whatever_it_does(name):
    machine = Machine(*HEALTHY[name])
    assert watch_for(machine, build_watch(machine), sum(part.seconds for part in machine.parts)) is None


@pytest.mark.parametrize("program", range(50))
def test_a_healthy_run_is_not_ended_by_pauses(program):
    """Of the launcher alone, of all processes, and of the computer, at any moment and of any length."""
    choose = random.Random(program)
    names = choose.sample(sorted(HEALTHY.keys() - STARTS), 4)
    first = HEALTHY[choose.choice(STARTS)] if program % 4 == 0 else []
    parts = [*first, *(part for name in names for part in [TRAINS, *HEALTHY[name]])]
    parts = [part for index, part in enumerate(parts) if not (part.ended and index < len(parts) - 1)]
    machine = Machine(*parts)
    watch = build_watch(machine)
    total = sum(part.seconds for part in parts)
    for _ in range(20):
        assert watch_for(machine, watch, choose.uniform(0, total / 20)) is None
        machine.pass_time(
            choose.choice([0.5, 3, 20, 100, 5000]) * choose.random(), ranks=choose.random() < 0.3
        )
    assert watch_for(machine, watch, max(0, total - machine.worked)) is None


@pytest.mark.parametrize("name", HANGS)
def test_a_hang_is_reported_once_at_its_limit(name, silent):
    hang, factor = HANGS[name]
    machine = Machine(TRAINS, hang)
    watch = build_watch(machine)
    assert watch_for(machine, watch, TRAINS.seconds) is None
    stall = watch_for(machine, watch, (factor + 1.6) * TIMEOUT_S)
    assert stall is not None
    assert stall.seconds >= factor * TIMEOUT_S - 1
    assert stall.has_trained
    assert stall.is_seen
    assert silent[-1] == "stalled"
    assert len(silent) == (1 if factor == 1 else 2), "a line says why the run is left alone"
    assert watch_for(machine, watch, 20 * TIMEOUT_S) is None


@pytest.mark.parametrize("name", HANGS)
def test_a_hang_is_reported_after_a_pause(name):
    hang, factor = HANGS[name]
    machine = Machine(TRAINS, hang)
    watch = build_watch(machine)
    watch_for(machine, watch, TRAINS.seconds + 20)
    machine.pass_time(500)
    assert watch_for(machine, watch, 25) is None
    assert watch_for(machine, watch, (factor + 1.6) * TIMEOUT_S) is not None


def test_a_busy_computer_that_delays_the_launcher_does_not_hide_a_hang():
    machine = Machine(TRAINS, Work(9999, waits=WAITS))
    watch = build_watch(machine)
    for _ in range(100):
        machine.pass_time(1.9)
        if watch.check():
            return
    pytest.fail("the hang was not reported")


def test_answers_to_another_machine_do_not_hide_a_hang():
    """They take seconds while a rank does not answer, which is no pause."""
    machine = Machine(TRAINS, Work(9999, waits=WAITS))
    watch = build_watch(machine)
    for _ in range(100):
        machine.pass_time(1)
        if watch.check():
            return
        machine.pass_time(9)
        watch.skip_time()
    pytest.fail("the hang was not reported")


def test_progress_after_a_report_is_reported_too(silent):
    machine = Machine(TRAINS, Work(60, waits=WAITS), TRAINS)
    watch = build_watch(machine)
    assert watch_for(machine, watch, 60)
    assert watch_for(machine, watch, 40) is None
    assert silent[-1].startswith("progress resumed after ")


@pytest.mark.parametrize(
    ("first", "limit", "has_trained"),
    [
        ({}, STARTUP_S, False),
        ({"batches": 1}, STARTUP_S, False),
        ({"batches": 2}, TIMEOUT_S, True),
        ({"steps": 1}, TIMEOUT_S, True),
    ],
    ids=["nothing", "the first batch", "the second batch", "a step"],
)
def test_the_limit_is_longer_until_a_step_or_a_second_batch(first, limit, has_trained):
    machine = Machine(Work(1, **first), Work(9999))
    watch = build_watch(machine)
    assert watch_for(machine, watch, limit - 1) is None
    stall = watch_for(machine, watch, 4)
    assert stall is not None
    assert stall.has_trained == has_trained
    assert stall.is_seen == bool(first)


def test_the_limit_before_the_first_step_is_ten_timeouts_by_default(tmp_path):
    assert StallWatch(RankObserver({0: RankFolder(tmp_path)}), 30)._startup_timeout == 300


def test_the_time_begins_when_all_ranks_have_begun_their_script(tmp_path):
    machine = Machine(Work(9999))
    machine.have_scripts_begun = lambda: machine.now > STARTUP_S / 2
    watch = build_watch(machine)
    assert watch_for(machine, watch, 1.5 * STARTUP_S - 2) is None
    assert watch_for(machine, watch, 6) is not None


@contextmanager
def run_rank(folder, code):
    """Run a script as the rank of a folder, once it has printed a line."""
    folder.path.mkdir()
    script = folder.path / "train.py"
    script.write_text(f"import ctypes, faulthandler, os, re, signal, time\nprint(flush=True)\n{code}\n")
    environ = os.environ | {"TORCHELASTIC_ERROR_FILE": str(folder.error), "RANK": "0"}
    command = [sys.executable, worker.__file__, "script", str(script)]
    with Process(command, env=environ, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        folder.pid.write_text(str(process.pid))
        try:
            yield process
        finally:
            process.kill()


def wait_for_stack(folder, line):
    """Request the stack of a rank until its script has come to a line, and return it."""
    return wait_until(
        lambda: (main := stalls.request_stacks({0: folder})[0].main) and main[-1].endswith(line) and main,
        description=line,
    )


def wait_for_problem(folder):
    """Request the stack of a rank until it does not answer any more, and return the reason."""
    return wait_until(lambda: stalls.request_stacks({0: folder})[0].problem)


WITHOUT_SIGNAL = f"faulthandler.unregister({worker.STACK_SIGNAL})"
"""Ends the process if it gets the signal at which faulthandler reads frames that the interpreter may just be changing."""
HOLDS_THE_LOCK = {"waits": "ctypes.PyDLL(None).sleep(1000)", "computes": "re.match('(a|a)*b', 'a' * 60)"}
"""C code that Python's other threads wait for."""


def test_a_rank_that_computes_writes_its_stack_without_the_signal(tmp_path):
    folder = RankFolder(tmp_path / "rank_0")
    with run_rank(folder, f"{WITHOUT_SIGNAL}\ndef compute():\n    while True: pass\ncompute()"):
        assert 'train.py", line 5 in compute' in wait_for_stack(folder, "line 6 in <module>")[0]


def test_a_forked_child_that_computes_writes_its_stack_without_the_signal(tmp_path):
    folder = RankFolder(tmp_path / "rank_0")
    child = "print(os.getpid(), flush=True)\n    while True: pass"
    with run_rank(folder, f"{WITHOUT_SIGNAL}\nif os.fork():\n    os.wait()\nelse:\n    {child}") as process:
        pid = int(process.stdout.readline())
        wait_until(
            lambda: stalls._request_children({0: folder}, {0: pid})[0].main[0].endswith("line 8 in <module>")
        )
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("kind", HOLDS_THE_LOCK)
def test_a_rank_in_c_code_that_holds_the_lock_of_python_has_a_stack(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(stalls, "_BUSY_SHARE", stalls._BLOCKED_SHARE)  # also on a busy computer
    folder = RankFolder(tmp_path / "rank_0")
    with run_rank(folder, HOLDS_THE_LOCK[kind]):
        wait_for_stack(folder, "line 3 in <module>")


def test_a_silent_rank_that_may_wait_for_a_processor_gets_no_signal(tmp_path, monkeypatch):
    monkeypatch.setattr(stalls, "_BUSY_SHARE", 1000)
    folder = RankFolder(tmp_path / "rank_0")
    with run_rank(folder, f"{WITHOUT_SIGNAL}\n{HOLDS_THE_LOCK['computes']}") as process:
        assert wait_for_problem(folder) == "no answer: it waits for a processor"
        assert process.poll() is None


def test_a_stopped_rank_gets_no_signal_that_it_would_handle_when_it_continues(tmp_path):
    folder = RankFolder(tmp_path / "rank_0")
    with run_rank(folder, "while True: pass") as process:
        process.send_signal(signal.SIGSTOP)
        assert wait_for_problem(folder) == "no answer: it is stopped"
        pending = int(stalls._read_status(process.pid)["ShdPnd"], 16)
        assert not pending >> (worker.STACK_SIGNAL - 1) & 1


def test_a_stopped_rank_is_named_without_a_wait_for_its_collectives(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(stalls, "request_traces", lambda folders, _: asked.append(list(folders)) or {})
    folder = RankFolder(tmp_path / "rank_0")
    with run_rank(folder, "while True: pass") as process:
        process.send_signal(signal.SIGSTOP)
        wait_for_problem(folder)
        assert stalls.read_hang_record({0: folder}).problems == {0: "no answer: it is stopped"}
        assert asked == [[]]


THREADS = """
import multiprocessing, sys, threading
def read():
    raise ValueError('no data')
def leave():
    sys.exit(3)
def divide():
    1 / 0
def start(target):
    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
for _ in range(9):
    start(leave)
    start(read)
child = multiprocessing.get_context('fork').Process(target=start, args=(divide,))
child.start()
child.join()
print(flush=True)
time.sleep(1000)
"""


def test_an_exception_that_has_ended_a_thread_of_a_rank_is_in_its_record_of_a_hang(
    tmp_path, monkeypatch, capfd
):
    folder = RankFolder(tmp_path / "rank_0")
    monkeypatch.setenv("ACCEL_RANK_FOLDER", str(folder.path))
    with run_rank(folder, THREADS) as process:
        process.stdout.readline()
        record = stalls.read_hang_record({0: folder})
    assert record.thread_failures == {
        0: "a thread has failed before: ValueError: no data at train.py:6 (read)"
    }
    printed = folder.path.joinpath("stderr")
    assert (printed.read_text() if printed.exists() else capfd.readouterr().err).count(
        "ValueError: no data"
    ) == 9
    assert len(folder.thread_failures.read_text().splitlines()) == 4, "the first ones only"


def test_a_process_without_a_handler_of_the_signal_is_not_ended_by_it(tmp_path):
    folder = RankFolder(tmp_path / "rank_0")
    with run_rank(folder, f"{WITHOUT_SIGNAL}\n{HOLDS_THE_LOCK['waits']}") as process:
        assert wait_for_problem(folder).startswith("stacks are not available: ")
        assert process.poll() is None


def format_frames(*frames):
    return tuple(f'File "{file}", line {line} in {name}' for file, line, name in frames)


QUEUE = (sysconfig.get_path("stdlib") + "/queue.py", 171, "get")
SCRIPT = ("/home/me/train.py", 27, "main")
TORCH, RUNTIME = "/x/site-packages/torch/distributed/", f"{Path(accel_runtime.__file__).parent}/"


def test_the_line_of_a_rank_in_a_queue_is_that_of_the_script():
    assert stalls.format_location(format_frames(QUEUE, SCRIPT)) == "train.py:27 (main)"


@pytest.mark.parametrize(
    ("frames", "call"),
    [
        ([(f"{TORCH}distributed_c10d.py", 2, "recv"), (f"{TORCH}c10d_logger.py", 1, "wrapper"), SCRIPT], "recv()"),
        (
            [
                (f"{RUNTIME}collectives/stalls.py", 1, "wait"),
                (f"{RUNTIME}accelerator/checkpointing.py", 1, "save_state"),
                (f"{RUNTIME}collectives/signatures.py", 1, "call"),
                SCRIPT,
            ],
            "save_state()",
        ),
        ([(f"{RUNTIME}data/prepare.py", 1, "read"), SCRIPT], ""),
        ([QUEUE, SCRIPT], ""),
        ([], ""),
    ],
    ids=["of torch", "of accel", "work of accel", "of Python", "no stack"],
)  # fmt: skip
def test_a_call_that_waits_for_other_ranks_is_named(frames, call):
    assert stalls._find_waiting_call(format_frames(*frames)) == call
