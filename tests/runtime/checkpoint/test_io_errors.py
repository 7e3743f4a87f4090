"""Whatever call to the file system fails in a save: all ranks hear of it, the checkpoint before is there, the next works."""

from __future__ import annotations

import errno
import logging
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from failing_disk import ERRORS, Failing, Probe, Run

from accel_runtime.checkpoint.errors import CheckpointError


@dataclass(frozen=True)
class Case:
    """What is there before the save that fails."""

    before: int = 0
    """How many checkpoints."""
    limit: int | None = None
    automatic: bool = True
    exchanges: bool = True
    strangers: bool = False
    """Whether the user has files in the target directory."""
    hooks: bool = False

    def target(self, folder):
        return None if self.automatic else folder / "mine"


CASES = {
    "the first ever": Case(),
    "the second": Case(1),
    "one is kept": Case(1, limit=1),
    "two are kept": Case(2, limit=2),
    "the same directory": Case(1, automatic=False),
    "the same directory, by two renames": Case(1, automatic=False, exchanges=False),
    "a directory with files of the user": Case(0, automatic=False, strangers=True),
    "a checkpoint with files of the user": Case(1, automatic=False, strangers=True),
    "a checkpoint with files of the user, by two renames": Case(
        1, automatic=False, exchanges=False, strangers=True
    ),
    "hooks that write files": Case(1, hooks=True),
}
EVEN, ODD = list(CASES)[::2], list(CASES)[1::2]
PARTS = 4
"""Runs into which the calls are divided, so that each stays far below the time ranks are given."""


def hook(models, weights, output_dir):
    """What a script may do in the directory of a checkpoint."""
    note = Path(output_dir) / "extra" / f"note-{os.environ.get('RANK', '0')}.txt"
    note.parent.mkdir(exist_ok=True)
    note.write_text("kept")


def belongings(case, folder):
    """The user's files in the target directory, as they are."""
    if not case.strangers:
        return {}
    mine = folder / "mine"
    found = {str(path.relative_to(mine)): path.read_text() for path in mine.rglob("*.txt")}
    return found | {"empty": (mine / "plans" / "empty").is_dir(), "link": str((mine / "link").readlink())}


def prepared(case, folder, run):
    """Make what is there before; the step of the newest checkpoint, 0 for none."""
    mine = folder / "mine"
    if run.rank == 0:
        folder.mkdir(parents=True)
        if case.strangers:
            (mine / "plans" / "empty").mkdir(parents=True)
            (mine / "notes.txt").write_text("of the user")
            (mine / "plans" / "more.txt").write_text("too")
            (mine / "link").symlink_to("nowhere")
    run.acc.wait_for_everyone()
    run.move(folder, total_limit=case.limit, automatic=case.automatic)
    run.acc._file_system = Probe()
    for step in range(1, case.before + 1):
        run.put(step)
        run.acc.save_state(case.target(folder))
    return case.before


def loaded(case, folder, run):
    """The step that loading gives; 0 where there is no checkpoint."""
    run.put(99)
    try:
        run.acc.load_state(case.target(folder))
    except CheckpointError:
        assert run.step() == 99
        return 0
    return run.step()


def hidden(folder):
    """What a save has left that is no checkpoint."""
    return [str(p) for p in folder.rglob(".*")]


def saved(case, folder, run, disk, step):
    """Save on this disk; what went wrong."""
    run.put(step)
    run.acc._file_system = disk
    try:
        run.acc.save_state(case.target(folder))
    except CheckpointError as error:
        return str(error)
    return None


def one_call_fails(run, folder, case, which, error, at):  # noqa: PLR0913, PLR0917
    """A save in which a call fails on one rank; what it said, and which calls that rank made."""
    where = folder / f"{at}"
    before = prepared(case, where, run)
    own = belongings(case, where)
    failing = Failing(at if run.rank == which else 0, error, exchanges=case.exchanges)
    said = saved(case, where, run, failing, 7)
    there = f"call {at}, {failing.calls[at - 1 : at]}: {said}"
    told = [run.share(said, rank) for rank in range(run.acc.num_processes)]
    assert len({text is None for text in told}) == 1, told
    if said:
        who = f"rank {which}: " if run.acc.num_processes > 1 and run.rank != which else ""
        assert who in said, there
        assert os.strerror(error) in said, there
        assert str(where) in said, there
    if run.rank == 0 and said:
        assert hidden(where) == [], there
    run.acc.wait_for_everyone()
    assert loaded(case, where, run) == (before if said else 7), there
    # A file of the user that could not be brought back at once is with the next save.
    assert not said or belongings(case, where) == own, there
    assert saved(case, where, run, Probe(), 8) is None, there
    if run.rank == 0:
        assert hidden(where) == [], there
        assert case.limit is None or len(run.acc.checkpoints.list()) == case.limit, there
    assert loaded(case, where, run) == 8, there
    assert belongings(case, where) == own, there
    return said, run.share(failing.calls, which)


def run_of(case):
    """One run for all saves of a test on a rank, with or without hooks."""
    logging.getLogger("accel_runtime.checkpoint").setLevel(logging.ERROR)
    run = Run("unused")
    if case.hooks:
        run.acc.register_save_state_pre_hook(hook)
    return run


def turns(calls, quick):
    """Which calls to let fail: all, or of the many writes in a row only one."""
    return [
        number
        for number, call in enumerate(calls, 1)
        if not quick or call != "write" or calls[number - 2 : number] != ["write", "write"]
    ]


def every_call_fails_in_turn(folder, name, which, error, quick, part=slice(None)):  # noqa: PLR0913, PLR0917
    """Every call of a rank's save; None as the error takes them in turn. How many saves failed."""
    case = CASES[name]
    run = run_of(case)
    _, calls = one_call_fails(run, folder, case, which, errno.EIO, 0)
    failed = 0
    for at in turns(calls, quick)[part]:
        said, _ = one_call_fails(run, folder, case, which, error or ERRORS[at % len(ERRORS)], at)
        failed += said is not None
    return failed


def test_a_call_that_fails_leaves_the_checkpoint_before(alone, memory):
    (failed,) = alone.run(every_call_fails_in_turn, memory, "two are kept", 0, None, True)
    assert failed > 20


def on_two(pair, folder, name, which):
    """The same on two ranks, some calls at a time; how many saves failed."""
    failed = 0
    for first in range(PARTS):
        part = slice(first, None, PARTS)
        both = pair.run(every_call_fails_in_turn, folder / f"{first}", name, which, None, True, part)
        assert both[0] == both[1]
        failed += both[0]
    return failed


@pytest.mark.slow
def test_a_call_that_fails_on_one_of_two_ranks_fails_the_save_on_both(pair, memory):
    assert on_two(pair, memory, "the same directory", 1) > 5


def slow_for(names):
    """Every case; those that are not among the names run in `make test-full` only."""
    return [pytest.param(name, marks=[] if name in names else pytest.mark.full) for name in CASES]


@pytest.mark.full
@pytest.mark.parametrize("error", ERRORS, ids=errno.errorcode.get)
def test_any_error_of_any_call_leaves_the_checkpoint_before(alone, memory, error):
    (failed,) = alone.run(every_call_fails_in_turn, memory, "one is kept", 0, error, False)
    assert failed > 40


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_for(EVEN))
def test_any_call_whatever_was_there_leaves_the_checkpoint_before(alone, memory, name):
    (failed,) = alone.run(every_call_fails_in_turn, memory, name, 0, None, False)
    assert failed > 40


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "which"),
    [
        pytest.param(name, which, marks=[] if name in names else pytest.mark.full)
        for which, names in enumerate((EVEN, ODD))
        for name in CASES
    ],
)
def test_any_call_on_any_of_two_ranks_leaves_the_checkpoint_before(pair, memory, name, which):
    assert on_two(pair, memory, name, which) > 5


def from_then_on_all_fail(folder, name, error, quick):
    """A file system that goes bad in the midst, and is well again afterwards; how many saves failed."""
    case = CASES[name]
    run = run_of(case)
    _, calls = one_call_fails(run, folder, case, 0, errno.EIO, 0)
    return sum(one_disk_fails(run, folder / "all", case, error, at) for at in turns(calls, quick))


def one_disk_fails(run, folder, case, error, at):
    where = folder / f"{at}"
    before = prepared(case, where, run)
    own = belongings(case, where)
    disk = Failing(at, error, forever=True, exchanges=case.exchanges)
    said = saved(case, where, run, disk, 7)
    there = f"from call {at} on, {disk.calls[at - 1 : at]}: {said}"
    # What is whole and could not be taken away again counts.
    assert loaded(case, where, run) in ({before, 7} if said else {7}), there
    assert saved(case, where, run, Probe(), 8) is None, there
    assert hidden(where) == [], there
    assert loaded(case, where, run) == 8, there
    assert belongings(case, where) == own, there
    return said is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_for(ODD))
def test_a_disk_that_fails_for_a_while_costs_nothing_that_was_whole(alone, memory, name):
    assert alone.run(from_then_on_all_fail, memory, name, errno.EROFS, False)[0] > 40


def test_a_disk_that_fails_while_an_old_directory_is_replaced_costs_nothing(alone, memory):
    name = "a checkpoint with files of the user, by two renames"
    assert alone.run(from_then_on_all_fail, memory, name, errno.EIO, True)[0] > 20
