"""Files of a run that another user or a damaged disk has written: commands neither hang, nor fail, nor fill the memory."""

import json
import os
import resource
import struct
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.processes.commands import run_accel

from accel_cli.extensions.report.data import read_run
from accel_cli.runs.run_dir import RunFolder
from accel_cli.runs.run_files import LineReader, read_bytes, read_json, read_last_objects, read_pid, read_text
from accel_cli.runs.snapshot import read_snapshot
from accel_runtime.environment import settings as env

MIB = 1 << 20


def write_sparse(path):
    with path.open("wb") as file:
        file.truncate(1 << 40)


CONDITIONS = {
    "a named pipe": os.mkfifo,
    "a link to a device without an end": lambda path: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path: path.symlink_to(path),
    "a folder": lambda path: path.mkdir(),
    "null bytes": lambda path: path.write_bytes(bytes(env.BEAT_SIZE)),
    "a number with a null byte": lambda path: path.write_text("12\0"),
    "a huge number": lambda path: path.write_text("9" * 10_000),
    "bytes that are no UTF-8": lambda path: path.write_bytes(b'{"event": "\xff\xfe", "time": 1}\n' * 3),
    "deeply nested JSON": lambda path: path.write_text("[" * 200_000),
    "JSON nested as deeply as Python parses": lambda path: path.write_text(
        '{"time": 1, "event": ' + "[" * 900 + "]" * 900 + "}"
    ),
    "an array of random bytes": lambda path: path.write_bytes(os.urandom(env.BEAT_SIZE)),
    "a terabyte without content": write_sparse,
}


@pytest.fixture
def run(tmp_path):
    """A run in progress of this process, whose files are missing."""
    run = RunFolder.create(tmp_path / "runs", "train.py", {"target": "train.py"})
    run.get_rank(0, 0).path.mkdir(parents=True)
    return run


@pytest.mark.slow
@pytest.mark.parametrize("create", CONDITIONS.values(), ids=CONDITIONS)
def test_commands_end_with_files_of_a_run_that_are(create, run, tmp_path):
    folder = run.get_rank(0, 0)
    files = [path for path in vars(folder).values() if path != folder.path]
    for path in [*files, run.path / "events.jsonl", run.path / "memory.jsonl"]:
        create(path)
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    for command in ("top", "top --json", "stacks", "report", "runs"):
        result = run_accel(*command.split(), "--log-dir", tmp_path / "runs", cwd=tmp_path, timeout=30)
        assert (result.returncode, "Traceback" in result.stderr) == (0, False), result.stderr
    logs = (
        run_accel("logs", "--log-dir", tmp_path / "runs", text=False, timeout=30)
        if _is_small(folder.output)
        else None
    )
    assert logs is None or b"Traceback" not in logs.stderr
    # In KiB; torch alone takes hundreds of MiB.
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < max(before, 2048 * 1024)


def _is_small(path):
    return path.is_file() and path.stat().st_size < MIB


@pytest.mark.parametrize("create", CONDITIONS.values(), ids=CONDITIONS)
def test_a_run_record_is_ignored_that_is(create, run, tmp_path):
    record = run.path / "run.json"
    record.unlink()
    create(record)
    result = run_accel("runs", "--log-dir", tmp_path / "runs", timeout=30)
    assert (result.returncode, result.stdout) == (0, "")


def test_a_file_that_is_read_at_once_is_read_up_to_a_size(tmp_path):
    write_sparse(tmp_path / "file")
    assert read_bytes(tmp_path / "file", max_size=5) == bytes(5)
    assert len(read_text(tmp_path / "file")) == 16 * MIB


def test_the_lines_of_a_file_are_read_up_to_a_size_that_a_report_names(tmp_path, run, monkeypatch):
    monkeypatch.setattr("accel_cli.runs.run_files.MAX_LINES_SIZE", 100)
    file = run.path / "events.jsonl"
    file.write_text('{"time": 1, "event": "end"}\n' * 50)
    lines = LineReader(file)
    assert (len(list(lines)), lines.is_truncated) == (3, True)


def test_a_report_keeps_the_newest_of_very_many_events(run, monkeypatch):
    monkeypatch.setattr("accel_cli.extensions.report.data._MAX_EVENTS", 3)
    file = run.get_rank(0, 0).checkpoints
    file.write_text(
        "".join(json.dumps({"time": index, "path": f"step_{index}"}) + "\n" for index in range(9))
    )
    data = read_run(run)
    assert [event.text for event in data.events] == [
        f"step_{index}, in an unknown time" for index in (6, 7, 8)
    ]
    assert "attempt_0/rank_0/checkpoints.jsonl has 9 events; the report has the last 3." in data.notes


@given(content=st.binary(max_size=200))
def test_any_content_is_read_without_an_exception(content, tmp_path_factory):
    file = tmp_path_factory.mktemp("run") / "file"
    file.write_bytes(content)
    assert read_pid(file) in {None, int(content) if content.isdigit() else None}
    assert all(isinstance(each, dict) for each in [*read_last_objects(file), *LineReader(file)])
    with suppress(ValueError):
        assert isinstance(read_json(file), dict)


@settings(max_examples=20)
@given(
    numbers=st.lists(
        st.integers(-(2**63), 2**63 - 1), min_size=len(env.BEAT_NUMBERS), max_size=len(env.BEAT_NUMBERS)
    )
)
def test_a_heartbeat_with_any_numbers_is_shown(numbers, tmp_path_factory):
    run = RunFolder.create(tmp_path_factory.mktemp("runs"), "train.py", {"exit_code": 0})
    folder = run.get_rank(0, 0)
    folder.path.mkdir(parents=True)
    numbers[env.BEAT_NUMBERS.index("pid")] = 1
    folder.beat.write_bytes(struct.pack(f"={len(numbers)}q", *numbers).ljust(env.BEAT_SIZE, b"\x7f"))
    json.dumps(read_snapshot(run).to_json())
    read_run(run)


def test_a_process_id_is_a_number_of_ascii_digits(tmp_path):
    file = tmp_path / "pid"
    for text, pid in (
        ("12", 12),
        ("", None),
        ("-1", None),
        ("\u0661", None),
        ("4294967296", None),
        ("1\n", None),
    ):
        file.write_text(text)
        assert read_pid(file) == pid


def test_a_missing_file_has_no_content(tmp_path):
    missing = tmp_path / "missing"
    assert (read_text(missing), read_pid(missing), list(read_last_objects(missing))) == ("", None, [])
