"""The file of the reason: small, whole letters, and the first reason stays."""

from accel_cli.runner import run_dir
from accel_cli.runner.failures import ExceptionInfo, Failure, Frame, format_reason


def failure(tmp_path, **more):
    known = {"rank": 3, "host": "algo-2", "pid": 7, "exitcode": 1, "time": 0.0, "log": str(tmp_path / "log")}
    return Failure(**{**known, **more})


def test_a_plan_that_names_no_file_leaves_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_dir.write_reason(None, "why")
    assert not list(tmp_path.iterdir())


def test_the_first_reason_stays_and_a_disk_that_refuses_hides_nothing(tmp_path):
    file = str(tmp_path / "failure")
    run_dir.write_reason(file, "first")
    run_dir.write_reason(file, "second")
    run_dir.write_reason(str(tmp_path / "absent" / "failure"), "why")
    assert (tmp_path / "failure").read_text() == "first"


def test_a_long_reason_ends_with_a_whole_letter(tmp_path):
    run_dir.write_reason(str(tmp_path / "failure"), "x" + "ü" * 1024)
    said = (tmp_path / "failure").read_bytes()
    assert len(said) == 1023
    assert said.decode().endswith("ü")


def test_of_a_deep_traceback_the_last_calls_are_said_below_the_cause(tmp_path):
    frames = tuple(Frame(f"/opt/ml/code/{'deep/' * 12}{n}.py", n, f"call{n}", "x" * 90) for n in range(12))
    said = format_reason(
        failure(tmp_path, chain=(ExceptionInfo("ValueError", "ValueError: boom\n", frames),))
    )
    head, *places = said.splitlines()
    assert head == "exit code 1 on algo-2, rank 3: ValueError: boom"
    assert "in call11" in places[-2]
    assert len(said.encode()) <= run_dir.REASON_SIZE


def test_what_left_no_exception_is_said_by_its_last_lines(tmp_path):
    (tmp_path / "log").write_text("one\n\ntwo\n")
    killed = format_reason(failure(tmp_path, exitcode=-9, out_of_memory=True))
    assert killed.splitlines() == [
        "exit code 137 on algo-2, rank 3: terminated by SIGKILL: killed by the kernel because memory ran out", "one", "two"
    ]  # fmt: skip
