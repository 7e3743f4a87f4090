"""Complete or absent: after any fault of any save, the next load gives one complete step, and the next save works.

`Saves.check` states it. A fault is a call of the file system that fails, once or from then on, a process that is killed before
a call or at any time, or missing space. The tensors of a run all contain the number of their step, so a mixture is noticed.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
import signal
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.processes.children import fork, wait_for_exit
from support.runs.file_system import (
    ERRORS,
    FOREVER,
    Fault,
    FaultyFileSystem,
    RecordingFileSystem,
    Run,
    assert_has_form,
)
from support.runs.killed_saves import run_until_killed


@dataclass(frozen=True)
class Kind:
    """A kind of save, and the state of the directory before it."""

    before: int = 1
    """The number of checkpoints before."""
    limit: int | None = None
    """Keep this number of checkpoints with automatic names."""
    named: bool = False
    """Save to a directory that the script names."""
    exchanges: bool = True
    """Whether the file system can exchange two directories."""
    user_files: bool = False
    """Add files of the user to the target directory."""
    hooks: bool = False
    """Let a hook of the script add a file to the checkpoint."""
    in_background: bool = False

    def get_target(self, folder):
        return folder / "mine" if self.named else None


KINDS = {
    "the first ever": Kind(0),
    "the second": Kind(),
    "one is kept": Kind(limit=1),
    "two are kept": Kind(2, limit=2),
    "the same directory": Kind(named=True),
    "the same directory, by two renames": Kind(named=True, exchanges=False),
    "a directory with files of the user": Kind(0, named=True, user_files=True),
    "a checkpoint with files of the user": Kind(named=True, user_files=True),
    "a checkpoint with files of the user, by two renames": Kind(named=True, exchanges=False, user_files=True),
    "hooks that write files": Kind(hooks=True),
    "one is kept, in the background": Kind(limit=1, in_background=True),
    "the same directory, in the background": Kind(named=True, in_background=True),
}
STEP = 7
"""The step of the save with the fault."""


def build_run(kind, folder, disk=None):
    disk = disk or RecordingFileSystem(exchanges=kind.exchanges)
    run = Run(folder, total_limit=kind.limit, automatic=not kind.named, disk=disk)
    if kind.hooks:
        run.acc.register_save_state_pre_hook(write_note)
    return run


def write_note(models, weights, output_dir):
    """Write a file into the checkpoint, as a hook of a script does."""
    note = Path(output_dir) / "extra" / f"note-{os.environ.get('RANK', '0')}.txt"
    note.parent.mkdir(exist_ok=True)
    note.write_text("kept")


def write_user_files(folder):
    target = folder / "mine"
    (target / "plans" / "empty").mkdir(parents=True)
    (target / "notes.txt").write_text("of the user")
    (target / "plans" / "more.txt").write_text("too")
    (target / "link").symlink_to("nowhere")


def read_user_files(kind, folder):
    """Return the contents of the user's files in the target directory."""
    if not kind.user_files:
        return {}
    target = folder / "mine"
    contents = {str(path.relative_to(target)): path.read_text() for path in target.rglob("*.txt")}
    return contents | {
        "empty": (target / "plans" / "empty").is_dir(),
        "link": str((target / "link").readlink()),
    }


def list_leftovers(folder):
    """Return the hidden files and directories that a save has left."""
    return [str(path) for path in folder.rglob(".*")]


# Functions that run on every rank -------------------------------------------------------------


def create_checkpoints(kind, folder):
    """Save the checkpoints before the save with the fault."""
    run = build_run(kind, folder)
    for step in range(1, kind.before + 1):
        assert run.save(step, kind.get_target(folder)) is None


def save_with_fault(kind, folder, fault, rank):
    """Save with a fault on a rank (None: on every rank); return the run, the error and the calls of this rank."""
    is_faulty = rank in {None, int(os.environ.get("RANK", "0"))}
    disk = FaultyFileSystem(fault if is_faulty else Fault(), exchanges=kind.exchanges)
    run = build_run(kind, folder)
    if not kind.named:
        run.load()  # a run that continues counts the checkpoint before
    error = run.save(STEP, kind.get_target(folder), disk=disk, in_background=kind.in_background)
    return run, error, disk.calls


def save_or_be_killed(*args):
    save_with_fault(*args)


def save_and_check(kind, folder, fault, rank, files):
    """Save with a failing call, and check what the invariant says; return the error and the calls of all ranks."""
    run, error, calls = save_with_fault(kind, folder, fault, rank)
    context = f"{fault}: {error} after {calls}"
    assert set(run.gather(error)) == {error}
    if error and run.rank == 0:
        assert_has_form(error)
        assert str(folder) in error, context
        assert (os.strerror(fault.error) if fault.error else "Not enough space") in error, context
        # With a fault on each rank, that of this rank may be in the removal of what the other could not write.
        is_in_removal = rank is None and "rank 1: " in error and "rank 0: " not in error
        if not (fault.count == FOREVER or is_in_removal):
            assert list_leftovers(folder) == [], context
            assert read_user_files(kind, folder) == files, context
    run.acc.wait_for_everyone()
    # A complete checkpoint that could not be removed is valid.
    steps = {kind.before, STEP} if error and fault.count == FOREVER else {kind.before} if error else {STEP}
    check_next_save(kind, folder, run, steps, files)
    return error, run.gather(calls)


def check_next_run(kind, folder, steps, files):
    """Check what the run after a killed one does; return the step that it loads."""
    return check_next_save(kind, folder, build_run(kind, folder), steps, files)


def check_next_save(kind, folder, run, steps, files):
    """Load, save and load again; return the step that is loaded first."""
    target = kind.get_target(folder)
    step = run.load(target)
    assert step in steps, f"{step} was loaded instead of {steps}"
    disk = RecordingFileSystem(exchanges=kind.exchanges)
    assert run.save(STEP + 1, target, disk=disk) is None
    assert run.load(target) == STEP + 1
    if run.rank == 0:
        assert list_leftovers(folder) == []
        assert read_user_files(kind, folder) == files
        assert kind.limit is None or len(run.acc.checkpoints.list()) == kind.limit
        assert not kind.hooks or list(folder.rglob("note-0.txt"))
    return step


# The invariant -------------------------------------------------------------------------------


class Saves:
    """Saves with faults on one number of ranks, each in a copy of the directory before it."""

    def __init__(self, cluster, folder):
        self._cluster, self._folder = cluster, folder / str(cluster.size)
        self._folder.mkdir()
        self._numbers = itertools.count()
        self._calls = {}

    def list_calls(self, name):
        """Return the calls of a save without a fault, by rank."""
        if name not in self._calls:
            ((error, self._calls[name]), *_) = self._save_and_check(name, Fault(), 0)
            assert error is None
        return self._calls[name]

    def check(self, name, fault, rank=0):
        """Check that a save with a fault on a rank (None: on all) is complete or absent; return if it was interrupted."""
        if fault.error or fault.free_bytes is not None:
            ((error, _), *_) = self._save_and_check(name, fault, rank)
            return error is not None
        kind, folder, files = self._copy_start(name)
        is_killed = self._cluster.run_until_killed(save_or_be_killed, kind, folder, fault, rank)
        steps = {kind.before, STEP} if is_killed else {STEP}
        self._cluster.run(check_next_run, kind, folder, steps, files)
        return is_killed

    def kill_at_random(self, name, kills, seed):
        """Kill runs at random times while they save in a loop; return the newest step that is sure to be saved."""
        chance, folder, last_saved = random.Random(seed), self._folder / str(next(self._numbers)), 0
        folder.mkdir()

        def start(kind=KINDS[name]):
            return nullcontext((build_run(kind, folder), kind.get_target(folder), kind.in_background))

        for number in range(kills):
            # Half of the runs complete some saves first: a busy machine completes few in a fixed time.
            first, seconds = number % 2 * 4, chance.uniform(0.001, 0.1 * self._cluster.size)
            delays = [
                seconds + chance.choice((0, chance.uniform(0, 0.02))) for _ in range(self._cluster.size)
            ]
            killed = run_until_killed(self._cluster, start, folder / "ranks", first=first, delays=delays)
            assert killed.loaded >= last_saved, f"{last_saved} had been saved"
            last_saved = max([killed.loaded, *killed.saved])
        return last_saved

    def _save_and_check(self, name, fault, rank):
        kind, folder, files = self._copy_start(name)
        return self._cluster.run(save_and_check, kind, folder, fault, rank, files)

    def _copy_start(self, name):
        """Return a kind of save, a copy of the directory before it, and the contents of the files of the user."""
        kind, start = KINDS[name], self._folder / name
        if not start.exists():
            start.mkdir()
            if kind.user_files:
                write_user_files(start)
            self._cluster.run(create_checkpoints, kind, start)
        folder = self._folder / str(next(self._numbers))
        shutil.copytree(start, folder, symlinks=True)
        return kind, folder, read_user_files(kind, folder)


@pytest.fixture(scope="module")
def one(clusters, module_memory):
    return Saves(clusters[1], module_memory)


@pytest.fixture(scope="module")
def two(clusters, module_memory):
    return Saves(clusters[2], module_memory)


@st.composite
def faults(draw, calls):
    """Generate faults of a save with these calls; rare calls are as likely as frequent ones."""
    name = draw(st.sampled_from(sorted(set(calls))))
    call = draw(st.sampled_from([number for number, each in enumerate(calls, 1) if each == name]))
    error = draw(st.sampled_from([*ERRORS, None, None]))
    return Fault(call, error, draw(st.sampled_from([1, FOREVER])))


def few(count, **options):
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(max_examples=count, suppress_health_check=checks, **options)


RENAMED = "a checkpoint with files of the user, by two renames"
UNSHRUNK = (Phase.explicit, Phase.reuse, Phase.generate)
"""For ranks that start again after a failure."""


@pytest.mark.parametrize("name", KINDS)
@given(data=st.data())
@few(2)
def test_a_save_with_a_fault_is_complete_or_absent(one, name, data):
    one.check(name, data.draw(faults(one.list_calls(name)[0])))


@pytest.mark.parametrize(
    ("name", "error"),
    [
        pytest.param("one is kept", errno.EIO, id="one is kept, fails"),
        pytest.param("one is kept", None, id="one is kept, is killed", marks=pytest.mark.slow),
        pytest.param(RENAMED, errno.EIO, id="two renames, fails", marks=pytest.mark.slow),
        pytest.param(RENAMED, None, id="two renames, is killed"),
    ],
)
def test_a_publication_that_is_interrupted_is_complete_or_absent(one, name, error):
    calls = one.list_calls(name)[0]
    # From the first change of a name to the first removal of a file.
    for number in range(calls.index("remove"), calls.index("unlink") + 1):
        one.check(name, Fault(number + 1, error))


def test_the_first_error_is_reported_if_later_calls_fail_too(one):
    first_close = one.list_calls("the second")[0].index("close") + 1
    assert one.check("the second", Fault(first_close, errno.EIO, FOREVER))


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
@given(data=st.data())
@few(5)
def test_a_save_with_one_of_many_faults_is_complete_or_absent(one, name, data):
    one.check(name, data.draw(faults(one.list_calls(name)[0])))


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
@given(data=st.data())
@few(2, phases=UNSHRUNK)
def test_a_save_with_one_of_many_faults_on_two_ranks_is_complete_or_absent(two, name, data):
    rank = data.draw(st.sampled_from([0, 1, None]))
    two.check(name, data.draw(faults(two.list_calls(name)[rank or 0])), rank)


FAILS, KILLED = Fault(error=errno.EIO), Fault()
EXHAUSTIVE = {
    "a call fails": (1, [0], [replace(FAILS, error=error) for error in ERRORS], ["one is kept"]),
    "calls fail from then on": (1, [0], [replace(FAILS, count=FOREVER)], KINDS),
    "a call fails in each kind": (1, [0], [FAILS], KINDS),
    "a call fails on one of two ranks": (2, [0, 1], [FAILS], KINDS),
    "is killed": (1, [0], [KILLED], KINDS),
    "one or both of two ranks are killed": (
        2,
        [0, 1, None],
        [KILLED],
        ["one is kept", "the same directory", "the same directory, in the background"],
    ),
}
"""World sizes, ranks that have the fault (None: all), faults, and kinds of saves."""


@pytest.mark.full
@pytest.mark.parametrize(
    "case",
    [
        pytest.param((size, name, rank, fault), id=f"{title}-{name}-{rank}-{fault.error}")
        for title, (size, ranks, faults, names) in EXHAUSTIVE.items()
        for name, rank, fault in itertools.product(names, ranks, faults)
    ],
)
def test_a_save_with_a_fault_at_every_call_is_complete_or_absent(one, two, case):
    size, name, rank, fault = case
    saves = [one, two][size - 1]
    calls = range(1, 1 + len(saves.list_calls(name)[rank or 0]), 3 if size == 2 and not fault.error else 1)
    count = sum(saves.check(name, replace(fault, call=call), rank) for call in calls)
    assert count > (5 if size == 2 else 40) if fault.error else count == len(calls)


@pytest.mark.parametrize(
    ("size", "name", "kills"),
    [
        pytest.param(1, "one is kept", 8, marks=pytest.mark.slow),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                (1, "one is kept", 50),
                (1, "the same directory, in the background", 50),
                (1, "the same directory, by two renames", 40),
                (1, "one is kept, in the background", 30),
                (2, "the same directory, in the background", 20),
                (2, "one is kept", 20),
            )
        ),
    ],
)
def test_runs_killed_at_random_times_continue_from_their_saves(one, two, size, name, kills):
    assert [one, two][size - 1].kill_at_random(name, kills, seed=5) >= kills


@pytest.mark.parametrize("name", ["two are kept", "the same directory, in the background"])
def test_missing_space_is_reported_before_anything_is_written(one, name):
    assert one.check(name, Fault(free_bytes=100))


def test_a_save_writes_next_to_its_target_and_not_to_tmpdir(memory, monkeypatch):
    elsewhere = memory / "tmp"
    elsewhere.mkdir()
    monkeypatch.setenv("TMPDIR", str(elsewhere))
    monkeypatch.setattr(tempfile, "tempdir", None)

    def save_and_be_killed():
        Run(memory, automatic=False, disk=FaultyFileSystem(Fault(20))).save(1, memory / "mine")

    assert wait_for_exit(fork(save_and_be_killed)) == -signal.SIGKILL
    assert not list(elsewhere.iterdir())
    assert list(memory.glob(".mine.saving-*"))
