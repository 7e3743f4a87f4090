"""The file with the reason of a failure."""

from accel_cli.runner import run_dir
from accel_cli.runner.failures import ExceptionInfo, Failure, Frame, format_reason


def failure(tmp_path, **more):
    known = {"rank": 3, "host": "algo-2", "pid": 7, "exitcode": 1, "time": 0.0, "log": str(tmp_path / "log")}
    return Failure(**{**known, **more})


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


def test_a_truncated_reason_ends_with_a_complete_character(tmp_path):
    run_dir.write_reason(str(tmp_path / "failure"), "x" + "ü" * 1024)
    reason = (tmp_path / "failure").read_bytes()
    assert len(reason) == 1023
    assert reason.decode().endswith("ü")


def test_the_reason_has_the_last_frames_of_a_deep_traceback(tmp_path):
    frames = tuple(Frame(f"/opt/ml/code/{'deep/' * 12}{n}.py", n, f"call{n}", "x" * 90) for n in range(12))
    reason = format_reason(
        failure(tmp_path, chain=(ExceptionInfo("ValueError", "ValueError: boom\n", frames),))
    )
    head, *places = reason.splitlines()
    assert head == "exit code 1 on algo-2, rank 3: ValueError: boom"
    assert "in call11" in places[-2]
    assert len(reason.encode()) <= run_dir.REASON_SIZE


def test_the_reason_of_a_failure_without_an_exception_has_the_end_of_the_log(tmp_path):
    (tmp_path / "log").write_text("one\n\ntwo\n")
    killed = format_reason(failure(tmp_path, exitcode=-9, out_of_memory=True))
    assert killed.splitlines() == [
        "exit code 137 on algo-2, rank 3: terminated by SIGKILL: killed by the kernel because memory ran out", "one", "two"
    ]  # fmt: skip
