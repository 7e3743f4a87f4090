"""A file system call that fails during a save: all ranks raise, the previous checkpoint loads, and the next save works."""

from __future__ import annotations

import errno
import logging
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.file_system import ERRORS, FailingFileSystem, RecordingFileSystem, Run

from accel_runtime.checkpoint.errors import CheckpointError


@dataclass(frozen=True)
class Case:
    """The state of the directory before the save that fails."""

    before: int = 0
    """The number of checkpoints."""
    limit: int | None = None
    automatic: bool = True
    exchanges: bool = True
    user_files: bool = False
    """Add files of the user to the target directory."""
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
    "a directory with files of the user": Case(0, automatic=False, user_files=True),
    "a checkpoint with files of the user": Case(1, automatic=False, user_files=True),
    "a checkpoint with files of the user, by two renames": Case(
        1, automatic=False, exchanges=False, user_files=True
    ),
    "hooks that write files": Case(1, hooks=True),
}
EVEN, ODD = list(CASES)[::2], list(CASES)[1::2]
PARTS = 4
"""The number of runs that share the calls, so that each run stays far below the timeout of the ranks."""


def write_note(models, weights, output_dir):
    """Write a file into the checkpoint, as a hook of a script does."""
    note = Path(output_dir) / "extra" / f"note-{os.environ.get('RANK', '0')}.txt"
    note.parent.mkdir(exist_ok=True)
    note.write_text("kept")


def read_user_files(case, folder):
    """Return the contents of the user's files in the target directory."""
    if not case.user_files:
        return {}
    target = folder / "mine"
    contents = {str(path.relative_to(target)): path.read_text() for path in target.rglob("*.txt")}
    return contents | {
        "empty": (target / "plans" / "empty").is_dir(),
        "link": str((target / "link").readlink()),
    }


def create_initial_state(case, folder, run):
    """Create the initial state of a case; return the step of its newest checkpoint, or 0."""
    target = folder / "mine"
    if run.rank == 0:
        folder.mkdir(parents=True)
        if case.user_files:
            (target / "plans" / "empty").mkdir(parents=True)
            (target / "notes.txt").write_text("of the user")
            (target / "plans" / "more.txt").write_text("too")
            (target / "link").symlink_to("nowhere")
    run.acc.wait_for_everyone()
    run.change_project(folder, total_limit=case.limit, automatic=case.automatic)
    run.acc._file_system = RecordingFileSystem()
    for step in range(1, case.before + 1):
        run.set_step(step)
        run.acc.save_state(case.target(folder))
    return case.before


def load_step(case, folder, run):
    """Return the step that is loaded, or 0 if no checkpoint exists."""
    run.set_step(99)
    try:
        run.acc.load_state(case.target(folder))
    except CheckpointError:
        assert run.step() == 99
        return 0
    return run.step()


def list_leftovers(folder):
    """Return the hidden files and directories that a save has left."""
    return [str(p) for p in folder.rglob(".*")]


def try_to_save(case, folder, run, disk, step):
    """Save with this file system; return the error or None."""
    run.set_step(step)
    run.acc._file_system = disk
    try:
        run.acc.save_state(case.target(folder))
    except CheckpointError as error:
        return str(error)
    return None


def save_with_failing_call(run, folder, case, which, error, at):  # noqa: PLR0913, PLR0917
    """Save while call `at` fails on rank `which`; return the error, and the calls of that rank."""
    workspace = folder / f"{at}"
    before = create_initial_state(case, workspace, run)
    user_contents = read_user_files(case, workspace)
    failing = FailingFileSystem(at if run.rank == which else 0, error, exchanges=case.exchanges)
    message = try_to_save(case, workspace, run, failing, 7)
    context = f"call {at}, {failing.calls[at - 1 : at]}: {message}"
    messages = [run.gather_from_rank(message, rank) for rank in range(run.acc.num_processes)]
    assert len({text is None for text in messages}) == 1, messages
    if message:
        prefix = f"rank {which}: " if run.acc.num_processes > 1 and run.rank != which else ""
        assert prefix in message, context
        assert os.strerror(error) in message, context
        assert str(workspace) in message, context
    if run.rank == 0 and message:
        assert list_leftovers(workspace) == [], context
    run.acc.wait_for_everyone()
    assert load_step(case, workspace, run) == (before if message else 7), context
    # A file of the user that could not be restored immediately is restored by the next save.
    assert not message or read_user_files(case, workspace) == user_contents, context
    assert try_to_save(case, workspace, run, RecordingFileSystem(), 8) is None, context
    if run.rank == 0:
        assert list_leftovers(workspace) == [], context
        assert case.limit is None or len(run.acc.checkpoints.list()) == case.limit, context
    assert load_step(case, workspace, run) == 8, context
    assert read_user_files(case, workspace) == user_contents, context
    return message, run.gather_from_rank(failing.calls, which)


def build_run(case):
    """Return the run that a rank uses for all saves of a test."""
    logging.getLogger("accel_runtime.checkpoint").setLevel(logging.ERROR)
    run = Run("unused")
    if case.hooks:
        run.acc.register_save_state_pre_hook(write_note)
    return run


def select_calls(calls, quick):
    """Return the numbers of the calls that should fail: all, or only one of consecutive writes."""
    return [
        number
        for number, call in enumerate(calls, 1)
        if not quick or call != "write" or calls[number - 2 : number] != ["write", "write"]
    ]


def fail_every_call(folder, name, which, error, quick, part=slice(None)):  # noqa: PLR0913, PLR0917
    """Let each call of a rank fail in turn (error None: with alternating errors); return the number of failed saves."""
    case = CASES[name]
    run = build_run(case)
    _, calls = save_with_failing_call(run, folder, case, which, errno.EIO, 0)
    failed = 0
    for at in select_calls(calls, quick)[part]:
        message, _ = save_with_failing_call(run, folder, case, which, error or ERRORS[at % len(ERRORS)], at)
        failed += message is not None
    return failed


def test_a_failed_call_keeps_the_previous_checkpoint(alone, memory):
    (failed,) = alone.run(fail_every_call, memory, "two are kept", 0, None, True)
    assert failed > 20


def fail_every_call_on_two(pair, folder, name, which):
    """Let each call of one of two ranks fail, in several runs; return the number of failed saves."""
    failed = 0
    for first in range(PARTS):
        part = slice(first, None, PARTS)
        counts = pair.run(fail_every_call, folder / f"{first}", name, which, None, True, part)
        assert counts[0] == counts[1]
        failed += counts[0]
    return failed


@pytest.mark.slow
def test_a_failed_call_on_one_of_two_ranks_fails_the_save_on_both(pair, memory):
    assert fail_every_call_on_two(pair, memory, "the same directory", 1) > 5


def slow_for(names):
    """Return every case; those that are not among the names run in `make test-full` only."""
    return [pytest.param(name, marks=[] if name in names else pytest.mark.full) for name in CASES]


@pytest.mark.full
@pytest.mark.parametrize("error", ERRORS, ids=errno.errorcode.get)
def test_any_error_of_any_call_keeps_the_previous_checkpoint(alone, memory, error):
    (failed,) = alone.run(fail_every_call, memory, "one is kept", 0, error, False)
    assert failed > 40


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_for(EVEN))
def test_any_failed_call_keeps_the_previous_checkpoint_in_every_case(alone, memory, name):
    (failed,) = alone.run(fail_every_call, memory, name, 0, None, False)
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
def test_any_failed_call_on_either_of_two_ranks_keeps_the_previous_checkpoint(pair, memory, name, which):
    assert fail_every_call_on_two(pair, memory, name, which) > 5


def fail_all_calls_from(folder, name, error, quick):
    """Let all calls from each one on fail during one save; return the number of failed saves."""
    case = CASES[name]
    run = build_run(case)
    _, calls = save_with_failing_call(run, folder, case, 0, errno.EIO, 0)
    return sum(
        save_with_failing_disk(run, folder / "all", case, error, at) for at in select_calls(calls, quick)
    )


def save_with_failing_disk(run, folder, case, error, at):
    workspace = folder / f"{at}"
    before = create_initial_state(case, workspace, run)
    user_contents = read_user_files(case, workspace)
    disk = FailingFileSystem(at, error, forever=True, exchanges=case.exchanges)
    message = try_to_save(case, workspace, run, disk, 7)
    context = f"from call {at} on, {disk.calls[at - 1 : at]}: {message}"
    # A complete checkpoint that could not be removed is valid.
    assert load_step(case, workspace, run) in ({before, 7} if message else {7}), context
    assert try_to_save(case, workspace, run, RecordingFileSystem(), 8) is None, context
    assert list_leftovers(workspace) == [], context
    assert load_step(case, workspace, run) == 8, context
    assert read_user_files(case, workspace) == user_contents, context
    return message is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_for(ODD))
def test_a_disk_that_fails_temporarily_loses_no_complete_checkpoint(alone, memory, name):
    assert alone.run(fail_all_calls_from, memory, name, errno.EROFS, False)[0] > 40


def test_a_disk_that_fails_during_a_replacement_loses_no_complete_checkpoint(alone, memory):
    name = "a checkpoint with files of the user, by two renames"
    assert alone.run(fail_all_calls_from, memory, name, errno.EIO, True)[0] > 20
