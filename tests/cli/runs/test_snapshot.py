"""What a snapshot reads from the folder of a run, and what it concludes."""

import json
import math
import os
import time

import pytest
from support.processes.commands import call_accel
from support.runs.run_folders import write_beat

from accel_cli.runs.heartbeats import Totals
from accel_cli.runs.run_dir import RunFolder
from accel_cli.runs.snapshot import RANK_FIELDS, RUN_FIELDS, RankSnapshot, RunSnapshot, read_snapshot


@pytest.fixture
def folder(home):
    """The folder of a run of two processes whose launcher is this process."""
    return RunFolder.create(home / "runs", "train.py", {"target": "train.py", "world_size": 2})


def write_rank(folder, rank, attempt=0, steps=0, **values):
    """Write the heartbeat of a rank that is this process, which has made these steps, 1 ms each, up to now."""
    files, now = folder.get_rank(attempt, rank), time.monotonic()
    recent = [step / 1000 for step in range(1, steps + 1)][-64:]
    values = {
        "clock": now - steps / 1000,
        "steps": steps,
        "recent": recent,
        "started_epoch_ns": time.time_ns(),
    } | values
    write_beat(files.beat, **values)
    files.pid.write_text(str(os.getpid()))


def write_lines(file, entries):
    file.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))


def test_a_snapshot_has_the_progress_of_each_rank_of_the_last_attempt(folder):
    write_rank(folder, 0, steps=1)
    write_rank(folder, 0, attempt=1, steps=3, batches=3, text="step at train.py:7 (<module>)")
    folder.get_rank(1, 1).path.mkdir(parents=True)
    run = read_snapshot(folder)
    assert (run.state, run.attempt, run.world_size, run.slowest) == ("running", 1, 2, None)
    rank, other = run.ranks
    assert (rank.beat.steps, rank.state) == (3, "running")
    assert rank.location == "after step() at train.py:7 (<module>)"
    assert (other.beat, other.state, other.location) == (None, "starting", "no step yet")
    assert rank.memory > 1_000_000
    assert rank.step_age >= 0


def test_the_record_of_a_run_is_read_once_for_a_snapshot(folder, monkeypatch):
    """Several reads of a run that ends meanwhile would contradict each other."""
    write_rank(folder, 0)
    reads, read = [], RunFolder.record.fget
    monkeypatch.setattr(RunFolder, "record", property(lambda run: reads.append(run) or read(run)))
    assert read_snapshot(folder).state == "running"
    folder.update({"exit_code": 0})
    reads.clear()
    assert read_snapshot(folder).state == "exit code 0"
    assert reads == [folder]


def test_a_replica_refers_to_the_rank_that_has_the_heartbeat_of_its_process(folder):
    write_rank(folder, 0)
    files = folder.get_rank(0, 1)
    files.path.mkdir()
    files.pid.write_text(str(os.getpid()))
    assert read_snapshot(folder).ranks[1].state == "starting"
    files.thread.write_text("0x1")
    write_rank(folder, 0, steps=1)
    rank = read_snapshot(folder).ranks[1]
    assert (rank.state, rank.location, rank.memory) == ("running", "see rank 0", None)
    assert [*rank.to_json()] == [*RANK_FIELDS]


def test_a_run_of_another_node_is_not_running_here(folder):
    write_rank(folder, 0, steps=1)
    folder.update({"host": "another"})
    run = read_snapshot(folder)
    assert (run.is_running, run.is_elsewhere, run.state) == (False, True, "not ended, on another")
    assert run.ranks[0].state == "running"


def test_the_rate_decreases_while_no_step_is_made(folder):
    write_rank(folder, 0, steps=10)
    rank = read_snapshot(folder).ranks[0]
    later = RankSnapshot(0, rank.beat, now=rank.now + 100)
    assert 0 < later.rate < 0.2 < rank.beat.rate_now


def measure_own_time(folder, num_slow, num_fast, *, steps, seconds):
    """Return the own time of a rank with this number of measured steps, each of which ends so many steps and seconds after the one before.

    It is 5 s a step up to the end of the slow ones, and then 10 ms.
    """
    history = [Totals(1, 0.0, *[0.0] * 8)]
    for number in range(num_slow + num_fast):
        before, own = history[-1], 5.0 if number < num_slow else 0.01
        history.append(
            before._replace(
                steps=before.steps + steps, time=before.time + seconds, own=before.own + own * steps
            )
        )
    write_rank(folder, 0, history=history, steps=history[-1].steps, recent=[history[-1].time])
    return read_snapshot(folder).ranks[0].own_time


@pytest.mark.parametrize(
    ("num_fast", "steps", "seconds"), [(20, 100, 0.1), (20, 2, 0.14), (20, 1, 0.3), (1, 10_000, 10.0)]
)
def test_own_time_leaves_out_the_first_steps_and_is_that_of_the_last_two_seconds_or_twenty_steps(
    folder, num_fast, steps, seconds
):
    """The first steps may compile for minutes, also on a fast rank."""
    own_time = measure_own_time(folder, 30, num_fast, steps=steps, seconds=seconds)
    assert own_time == pytest.approx(0.01)


@pytest.mark.parametrize(("num_measured", "steps"), [(8, 100), (18, 1)])
def test_own_time_is_not_known_after_few_steps_or_few_measured_ones(folder, num_measured, steps):
    assert measure_own_time(folder, 0, num_measured, steps=steps, seconds=0.1) is None
    assert measure_own_time(folder, 0, num_measured + 1, steps=steps, seconds=0.1) == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("times", "slowest"),
    [
        ((0.02,), None),
        ((0.02, 0.021), None),
        ((0.1, 0.105), None),
        ((0.02, 0.03), 1),
        ((0.05, 0.03, 0.03), 0),
        ((0.03, 0.03, 0.03, 0.03), None),
        ((0.0001, 0.0005), None),
        ((0.02, None, 0.03), 2),
    ],
)
def test_the_slowest_rank_is_named_only_if_it_is_clearly_slower(times, slowest, monkeypatch):
    # A step takes 0.1 s; own times that are small against it do not matter.
    monkeypatch.setattr(RankSnapshot, "own_time", property(lambda rank: times[rank.rank]))
    monkeypatch.setattr(RankSnapshot, "rate", property(lambda _: 10.0))
    ranks = tuple(RankSnapshot(rank, None) for rank in range(len(times)))
    run = RunSnapshot("id", "train.py", "running", True, 1.0, 0.0, None, 0, len(times), ranks)
    assert run.slowest == slowest


def test_metrics_are_read_from_the_last_attempt_that_logged_any(folder):
    for attempt in (0, 1, 2):
        write_rank(folder, 0, attempt)
    write_lines(folder.get_rank(0, 0).metrics, [{"time": 1.0, "step": 1, "values": {"first": 1}}])
    files = folder.get_rank(1, 0)
    write_lines(
        files.metrics,
        [
            {"jsonl": "/tracker/run.jsonl", "time": 1.0},
            {"time": 2.0, "step": 1, "values": {"loss": 2, "note": "a"}},
            {"time": 3.0, "step": None, "values": {"loss": math.nan}},
            {"time": 4.0, "step": 7, "values": {"loss": 0.5, "flag": True}},
            {
                "time": 4.0,
                "step": "7",
                "values": {"odd": {"a": [1]}, "list": [1], "huge": 10**400, "nan": "NaN"},
            },
            {"time": 4.0, "values": ["loss"]},
            ["not an object"],
        ],
    )
    with files.metrics.open("a") as file:
        file.write('{"time": 5.0, "values": {"lo')  # a line that is being written
    metrics = {series.name: series for series in read_snapshot(folder).metrics}
    assert list(metrics) == ["loss", "note", "flag", "odd", "list", "huge", "nan"]
    assert (metrics["odd"].value, metrics["odd"].step, metrics["list"].value) == ("{'a': [1]}", None, "[1]")
    assert (metrics["huge"].value, str(metrics["nan"].value)) == (math.inf, "nan")
    assert (metrics["loss"].value, metrics["loss"].step) == (0.5, 7)
    assert [str(value) for value in metrics["loss"].recent] == ["2.0", "nan", "0.5"]
    assert (metrics["note"].value, metrics["flag"].value) == ("a", "True")


def test_of_a_long_file_of_metrics_only_the_end_is_read(folder):
    write_rank(folder, 0)
    lines = ({"time": 1.0, "step": step, "values": {"loss": step}} for step in range(20_000))
    write_lines(folder.get_rank(0, 0).metrics, lines)
    (loss,) = read_snapshot(folder).metrics
    assert (loss.value, loss.step, loss.recent) == (19_999, 19_999, list(range(19_936, 20_000)))


def test_an_ended_run_has_its_end_its_failure_and_the_last_memory(folder):
    write_rank(folder, 0)
    write_lines(folder.path / "memory.jsonl", [{"rss": {"0": 5}}, {"rss": {"0": 7}, "gpu": {"0": 9}}])
    write_lines(
        folder.path / "events.jsonl",
        [
            {"time": 1.0, "event": "restart", "attempt": 1, "reason": "rank 0 failed"},
            {"time": 2.0, "event": "failure", "rank": 0, "cause": "ValueError: x", "frames": []},
        ],
    )
    started = folder.record["started"]
    folder.update({"exit_code": 3, "ended": started + 60})
    run = read_snapshot(folder)
    assert (run.state, run.is_running, run.exit_code, run.elapsed) == ("exit code 3", False, 3, 60)
    assert (run.failure, run.restart_reason) == ("rank 0: ValueError: x", "rank 0 failed")
    assert (run.ranks[0].memory, run.ranks[0].gpu_memory) == (7, 9)
    assert run.ranks[0].state == "killed"


def test_a_stall_is_shown_once_it_is_long_for_this_run(folder):
    write_rank(folder, 0, steps=1)
    run = read_snapshot(folder)
    assert run.idle_time is None
    late = RankSnapshot(0, run.ranks[0].beat, now=run.ranks[0].now + 30)
    assert RunSnapshot(**{**run.__dict__, "ranks": (late,)}).idle_time == pytest.approx(30, abs=1)
    ended = RunSnapshot(**{**run.__dict__, "ranks": (late,), "is_running": False})
    assert ended.idle_time is None


def test_json_has_the_documented_fields(folder, capfd, cwd):
    write_rank(folder, 0, steps=1)
    write_lines(folder.get_rank(0, 0).metrics, [{"time": 1.0, "step": 1, "values": {"loss": math.inf}}])
    result = call_accel(capfd, "top", "--json")
    assert result.returncode == 0, result.stderr
    data = json.loads(result.stdout, parse_constant=pytest.fail)
    assert [*data] == [*RUN_FIELDS]
    assert [[*rank] for rank in data["ranks"]] == [[*RANK_FIELDS]]
    assert data["metrics"] == {"loss": {"value": "inf", "step": 1, "recent": [None]}}
    assert (data["run"], data["running"], data["ranks"][0]["steps"]) == (folder.path.name, True, 1)


def test_without_a_terminal_one_snapshot_is_printed(folder, capfd, cwd):
    write_rank(folder, 0, steps=1)
    result = call_accel(capfd, "top")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines()[0] == f"{folder.path.name}  train.py"
    assert "\x1b" not in result.stdout
    named = call_accel(capfd, "top", "train")
    assert named.stdout.splitlines()[0] == result.stdout.splitlines()[0]


def test_a_run_that_does_not_exist_is_a_usage_error(home, folder, capfd, cwd):
    unknown = call_accel(capfd, "top", "other")
    assert (unknown.returncode, "Run 'other' not found" in unknown.stderr) == (2, True)
    folder.update({"exit_code": 0})
    ended = call_accel(capfd, "top")
    assert (ended.returncode, "No run of accel launch is in progress" in ended.stderr) == (2, True)
    assert call_accel(capfd, "top", folder.path.name).returncode == 0
