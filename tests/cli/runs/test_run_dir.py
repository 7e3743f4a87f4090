"""Folders of runs: records, search, and removal of the oldest; the file with the reason of a failure."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from accel_cli.errors import UsageError
from accel_cli.runs import run_dir
from accel_cli.runs.run_dir import RunFolder, find_recent_runs, find_run, find_running_run, read_log

KEPT_RUNS = 3


def set_age(run, days):
    """Make the files of a run as old as if nothing was written since."""
    for path in [*run.path.rglob("*"), run.path]:
        os.utime(path, (time.time() - days * 24 * 3600,) * 2)


def test_a_killed_run_is_removed_once_its_files_are_a_day_old(tmp_path):
    run = RunFolder.create(tmp_path, "train.py", {})
    run.get_rank(0, 0).path.mkdir(parents=True)
    run.update({"pid": 0, "started": time.time() - 60})
    set_age(run, 2)
    run.get_rank(0, 0).output.write_text("step 1\n")
    RunFolder.create(tmp_path, "next.py", {}, keep_runs=1)
    assert run.path.exists()
    set_age(run, 2)
    RunFolder.create(tmp_path, "last.py", {}, keep_runs=1)
    assert not run.path.exists()


@pytest.mark.parametrize("location", [{"host": "other"}, {"pid_namespace": "pid:[1]"}])
def test_a_run_of_another_machine_or_container_is_removed_once_its_files_are_old(tmp_path, location):
    """Its process id is not that of a process here, so it may be in progress."""
    run = RunFolder.create(tmp_path, "train.py", {})
    run.update({"started": time.time() - 60, **location})
    state = "not ended, on other" if "host" in location else "not ended, in another container"
    status = run.read_status()
    assert (status.is_elsewhere, status.is_running, status.state) == (True, False, state)
    for days, remains in ((2, True), (31, False)):
        set_age(run, days)
        RunFolder.create(tmp_path, f"next{days}.py", {}, keep_runs=1, keep_days=30)
        assert run.path.exists() == remains


def test_runs_are_listed_with_their_records_newest_first(tmp_path):
    for n in range(3):
        RunFolder.create(tmp_path, f"s{n}.py", {"argv": ["python", f"s{n}.py"]}).update({"exit_code": n})
    assert [run.record["exit_code"] for run in find_recent_runs(tmp_path)] == [2, 1, 0]
    assert not any(run.read_status().is_running for run in find_recent_runs(tmp_path))


def test_the_oldest_runs_are_removed_unless_they_are_running(tmp_path):
    running = RunFolder.create(tmp_path, "long.py", {})
    for n in range(KEPT_RUNS + 5):
        RunFolder.create(tmp_path, f"s{n}.py", {}, keep_runs=KEPT_RUNS).update({"exit_code": 0})
    remaining = find_recent_runs(tmp_path)
    assert running.read_status().is_running
    assert running.path in [run.path for run in remaining]
    assert len(remaining) == KEPT_RUNS + 1


def test_runs_that_ended_long_ago_are_removed_by_their_age(tmp_path):
    day = 24 * 3600
    runs = {}
    for name, started, ended in (("old", 40, 39), ("long", 40, 20), ("new", 10, 9)):
        runs[name] = RunFolder.create(tmp_path, f"{name}.py", {})
        times = {"started": time.time() - started * day, "ended": time.time() - ended * day}
        runs[name].update({**times, "exit_code": 0})
    running = RunFolder.create(tmp_path, "running.py", {})
    running.update({"started": time.time() - 40 * day})
    last = RunFolder.create(tmp_path, "last.py", {}, keep_days=30)
    assert find_recent_runs(tmp_path) == [last, runs["new"], running, runs["long"]]
    RunFolder.create(tmp_path, "next.py", {}, keep_days=15)
    assert not runs["long"].path.exists()
    assert running.path.exists()


def test_runs_that_start_at_the_same_time_ignore_removed_folders(tmp_path):
    def begin(n):
        RunFolder.create(tmp_path, f"s{n}.py", {"n": n}, keep_runs=1).update({"exit_code": 0})

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(begin, range(300)))
    RunFolder.create(tmp_path, "last.py", {}, keep_runs=1)
    assert len(find_recent_runs(tmp_path)) == 1


def test_the_record_of_a_removed_run_is_empty(tmp_path):
    run = RunFolder.create(tmp_path, "train.py", {})
    (run.path / "run.json").unlink()
    assert run.record == {}
    assert not run.read_status().is_running
    assert find_recent_runs(tmp_path) == []


def test_run_folders_are_readable_by_their_user_only(tmp_path):
    run = RunFolder.create(tmp_path, "train.py", {})
    assert os.stat(run.path).st_mode & 0o077 == 0  # noqa: PTH116


def test_runs_of_other_nodes_that_share_the_folder_are_not_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("time.strftime", lambda _: "20260101-000000")
    monkeypatch.setattr("socket.gethostname", lambda: "h0")
    away = RunFolder.create(tmp_path, "train.py", {})
    monkeypatch.setattr("socket.gethostname", lambda: "h1")
    here = [
        RunFolder.create(tmp_path, "train.py", {}) for _ in range(KEPT_RUNS + 1)
    ]  # of the same process id, too
    for run in here:
        run.update({"exit_code": 0})
    RunFolder.create(tmp_path, "train.py", {}, keep_runs=KEPT_RUNS)
    status = away.read_status()
    assert (status.state, status.is_running) == ("not ended, on h0", False)
    assert len(find_recent_runs(tmp_path)) == KEPT_RUNS + 1


def test_other_folders_are_never_removed(tmp_path):
    """A folder that has a `run.json`, and a link."""
    user_folder = tmp_path / "exp"
    user_folder.mkdir()
    (user_folder / "run.json").write_text(json.dumps({"started": 1.0}))
    (user_folder / "model.pt").touch()
    (tmp_path / "20200101-000000-train-1").symlink_to(user_folder)
    for number in range(KEPT_RUNS + 2):
        RunFolder.create(tmp_path, f"train{number}.py", {"exit_code": 0}, keep_runs=KEPT_RUNS)
    assert (user_folder / "model.pt").exists()
    assert len(find_recent_runs(tmp_path)) == KEPT_RUNS + 2


@pytest.mark.service("root")
def test_runs_of_other_users_are_never_removed(tmp_path):
    other = tmp_path / "20200101-000000-train-2"
    other.mkdir()
    (other / "run.json").write_text(json.dumps({"started": 2.0, "exit_code": 0}))
    os.chown(other, 12345, 12345)
    for number in range(KEPT_RUNS + 2):
        RunFolder.create(tmp_path, f"train{number}.py", {"exit_code": 0}, keep_runs=KEPT_RUNS)
    assert other.exists()


@pytest.mark.parametrize("content", ["", "[1]", "nonsense", '{"started": "x"}', "{}", None])
def test_an_invalid_run_record_does_not_stop_a_launch(tmp_path, content):
    broken = tmp_path / "20200101-000000-train-1"
    broken.mkdir()
    if content is None:
        os.mkfifo(broken / "run.json")
    else:
        (broken / "run.json").write_text(content)
    run = RunFolder.create(tmp_path, "train.py", {})
    assert find_recent_runs(tmp_path) == [run]
    assert find_run(tmp_path).path == run.path


@pytest.mark.parametrize(
    ("field", "value"),
    [("pid", "x"), ("pid", -1), ("pid", 10**30), ("pid_start", [1]), ("host", ["h"]), ("ended", "x"), ("ended", 10**400),
     ("exit_code", "x")],
)  # fmt: skip
def test_a_record_with_a_field_of_another_type_does_not_stop_a_launch(tmp_path, field, value):
    broken = RunFolder.create(tmp_path, "broken.py", {})
    broken.update({"pid": 0, "started": time.time() - 60, field: value})
    set_age(broken, 2)
    status = broken.read_status()
    assert (status.is_running, status.state, status.ended) == (False, "launcher was killed", None)
    run = RunFolder.create(tmp_path, "train.py", {}, keep_runs=1)
    assert find_recent_runs(tmp_path) == [run]


def test_folders_without_a_number_are_no_attempts_and_no_ranks(tmp_path):
    run = RunFolder.create(tmp_path, "train.py", {})
    for name in ("attempt_0", "attempt_1", "attempt_10", "attempt_old", "attempt_", "attempt_1.bak"):
        for rank in ("rank_0", "rank_2", "rank_copy"):
            (run.path / name / rank).mkdir(parents=True)
    assert run.attempts == [0, 1, 10]
    assert list(run.list_ranks(1)) == [0, 2]


def test_a_run_dated_in_the_future_is_not_the_newest(tmp_path):
    ahead = RunFolder.create(tmp_path, "ahead.py", {})
    ahead.update({"started": time.time() + 365 * 24 * 3600, "exit_code": 0})
    older, newer = (RunFolder.create(tmp_path, name, {}) for name in ("older.py", "newer.py"))
    older.update({"started": time.time() - 60, "exit_code": 0})
    assert find_recent_runs(tmp_path) == [newer, older, ahead]
    assert find_run(tmp_path) == newer


def test_a_log_that_is_a_named_pipe_is_an_error(tmp_path):
    run = RunFolder.create(tmp_path, "train.py", {})
    run.update({"exit_code": 0})
    output = run.get_rank(0, 0).output
    output.parent.mkdir(parents=True)
    os.mkfifo(output)
    with pytest.raises(OSError, match="not a regular file"):
        list(read_log(run))


def test_the_name_of_a_run_is_limited_in_length(tmp_path):
    assert len(RunFolder.create(tmp_path, "a" * 255, {}).path.name) < 255


def test_the_default_run_is_the_newest_that_started_processes_or_may_do_so(tmp_path):
    trained = RunFolder.create(tmp_path / "runs", "train.py", {"exit_code": 0})
    trained.get_rank(0, 0).path.mkdir(parents=True)
    alone = RunFolder.create(tmp_path / "runs", "never-met.py", {"exit_code": 1})
    assert find_run(tmp_path / "runs") == trained
    assert find_run(tmp_path / "runs", alone.path.name) == alone
    waiting = RunFolder.create(tmp_path / "runs", "waits.py", {})
    assert find_run(tmp_path / "runs") == waiting
    only = RunFolder.create(tmp_path / "other", "never-met.py", {"exit_code": 1})
    assert find_run(tmp_path / "other") == only


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("src/train.py", "train"),
        ("pkg.train", "pkg.train"),
        ("./run.sh", "run"),
        ("/usr/bin/python3.11", "python3.11"),
    ],
)
def test_a_run_is_found_by_the_name_of_its_script_module_or_program(tmp_path, target, name):
    run = RunFolder.create(tmp_path, target, {})
    assert run.stem == name
    assert find_run(tmp_path, name) == run


def test_a_run_is_found_by_its_id_the_beginning_of_it_or_its_script(tmp_path, monkeypatch):
    for day, name in ((1, "train.py"), (2, "train.py"), (3, "evaluate.py")):
        monkeypatch.setattr("time.strftime", lambda _, day=day: f"2026010{day}-000000")
        RunFolder.create(tmp_path, name, {"exit_code": 0})
    evaluated, second, first = find_recent_runs(tmp_path)
    assert find_run(tmp_path, first.path.name) == first
    assert find_run(tmp_path, "20260102") == second
    assert find_run(tmp_path, "evaluate") == find_run(tmp_path, "evaluate.py") == evaluated
    assert find_run(tmp_path, "train") == second
    with pytest.raises(UsageError) as ambiguous:
        find_run(tmp_path, "202601")
    assert str(ambiguous.value) == (
        f"Run '202601' is ambiguous: it matches {evaluated.path.name}, {second.path.name}, {first.path.name}. Give the id of "
        "one run."
    )
    with pytest.raises(UsageError, match=r"Run 'tra' not found in .*\. List the runs with accel runs, and "):
        find_run(tmp_path, "tra")


def test_a_run_in_progress_is_preferred_to_ended_runs_of_the_same_script(tmp_path):
    with pytest.raises(UsageError, match="No run of accel launch is in progress"):
        find_running_run(tmp_path)
    ended = RunFolder.create(tmp_path, "train.py", {"exit_code": 3})
    running = RunFolder.create(tmp_path, "train.py", {})
    assert find_running_run(tmp_path) == find_running_run(tmp_path, "train") == running
    with pytest.raises(UsageError) as error:
        find_running_run(tmp_path, ended.path.name)
    assert f"is not in progress here: exit code 3. Running: {running.path.name}." in str(error.value)


def test_a_run_whose_process_id_belongs_to_a_later_process_is_not_running(tmp_path):
    run = RunFolder.create(tmp_path, "train.py", {})
    assert run.read_status().is_running
    run.update({"pid_start": run.record["pid_start"] - 1})
    status = run.read_status()
    assert (status.is_running, status.state) == (False, "launcher was killed")


def test_no_reason_is_written_without_a_failure_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_dir.write_reason(None, "why")
    assert not list(tmp_path.iterdir())


def test_the_first_reason_is_kept_and_write_errors_are_ignored(tmp_path):
    file = str(tmp_path / "failure")
    run_dir.write_reason(file, "first")
    run_dir.write_reason(file, "second")
    run_dir.write_reason(str(tmp_path / "absent" / "failure"), "why")
    assert (tmp_path / "failure").read_text() == "first"


def test_a_reason_is_written_to_an_empty_file_as_kubernetes_makes_one(tmp_path):
    (tmp_path / "failure").touch()
    run_dir.write_reason(str(tmp_path / "failure"), "why")
    assert (tmp_path / "failure").read_text() == "why"


def test_a_truncated_reason_ends_with_a_complete_character(tmp_path):
    run_dir.write_reason(str(tmp_path / "failure"), "x" + "ü" * 1024)
    reason = (tmp_path / "failure").read_bytes()
    assert len(reason) == 1023
    assert reason.decode().endswith("ü")


def test_an_empty_name_finds_no_run(tmp_path):
    RunFolder.create(tmp_path, "train.py", {})
    for find in (find_run, find_running_run):
        with pytest.raises(UsageError, match="Run '' not found"):
            find(tmp_path, "")
