"""`accel top` of a submitted job: its state and the end of its log."""

import json

import pytest
from support.processes.commands import call_accel

from accel_cli.errors import UsageError
from accel_cli.extensions.slurm.launcher import Slurm
from accel_cli.launchers.job_service import Job, Jobs, Log, PollIntervals, UnreachableError
from accel_cli.launchers.job_view import JobView
from accel_cli.runs.live_view import render_lines
from accel_cli.runs.run_dir import RunFolder


class ScriptedJobs(Jobs):
    """A service whose answers are given: jobs or errors for the state, bytes or errors for the log."""

    intervals = PollIntervals(log_s=0.0, status_s=(0.0, 0.0), last_output_s=0.0)

    def __init__(self, states, output):
        self.states, self.output = states, output

    def status(self, _):
        return self._answer(self.states) or self.last

    def open_log(self, _):
        if self.output and isinstance(self.output[0], Exception):
            raise self.output.pop(0)
        jobs = self

        class Output(Log):
            def read(self):
                return jobs._answer(jobs.output) or b""

        return Output()

    def _answer(self, answers):
        answer = answers.pop(0) if answers else None
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, Job):
            self.last = answer
        return answer

    list = stop = download = None


def job(state, **fields):
    return Job("12", "train.py", state, finished=fields.get("exit_code") is not None, **fields)


def lines(view, width=60, height=8):
    drawing = view.draw(width, height)
    return render_lines(drawing.body, width, is_coloured=False), drawing.is_final


def test_a_job_is_shown_with_its_state_and_the_end_of_its_log():
    running = job(
        "RUNNING", nodes="n[0-1]", elapsed="00:01:02", restarts=2, log="/l/12.out", cost="61 billed seconds"
    )
    output = [b"one\ntwo\r\n10%\r20%\r\n\x1b[31mr", b"ed\x1b[0m \xe2\x82", b"\xac\nlast"]
    shown, is_final = lines(JobView(ScriptedJobs([running], output), "12"), height=10)
    assert shown == [
        "job 12  train.py",
        "RUNNING, for 00:01:02, nodes n[0-1], 2 restarts",
        "61 billed seconds",
        "log: /l/12.out",
        "",
        "one",
        "two",
        "20%",
        "red \N{EURO SIGN}",
        "last",
    ]
    assert not is_final


def test_a_progress_bar_without_a_newline_is_shown_and_kept_as_its_last_state():
    bars = [b"\r%d%%\x1b[31m of the steps\x1b[0m\tdone" % percent for percent in range(100)]
    jobs = ScriptedJobs([job("RUNNING")], [b"first", *bars, b"\r"])
    view = JobView(jobs, "12")
    assert lines(view)[0][-1] == "99% of the steps        done"
    assert view.to_json()["log"] == ["99% of the steps\tdone"]
    assert len(view._partial) < 50
    jobs.output += [b"\nx", b"y" * 10**6]
    assert lines(view)[0][-2] == "99% of the steps        done"
    assert len(view._partial) < 10**5


@pytest.mark.parametrize("height", range(1, 12))
def test_the_end_of_a_long_log_fits_on_the_screen(height):
    output = [b"".join(b"%d\n" % number for number in range(1000))]
    shown, _ = lines(JobView(ScriptedJobs([job("RUNNING")], output), "12"), height=height)
    assert len(shown) == height
    assert (shown[-1] == "999") == (height > 3)


def test_an_outage_of_the_service_is_shown_until_it_answers():
    outage = UnreachableError("scontrol does not answer.")
    jobs = ScriptedJobs(
        [job("PENDING", reason="Resources"), outage, job("RUNNING")], [UsageError("No log yet.")]
    )
    view = JobView(jobs, "12")
    assert lines(view)[0][1:] == ["PENDING", "Resources", "scontrol does not answer. Trying again."]
    assert lines(view)[0][1:] == ["RUNNING"]


def test_a_finished_job_has_its_exit_code_and_the_rest_of_its_log():
    jobs = ScriptedJobs(
        [job("RUNNING"), job("FAILED", exit_code=3, reason="NonZeroExitCode")], [b"a\n", b"", b"b\n"]
    )
    shown, is_final = lines(JobView(jobs, "12"))
    assert shown == ["job 12  train.py", "FAILED, exit code 3", "NonZeroExitCode", "", "a", "b"]
    assert is_final


@pytest.fixture
def slurm(monkeypatch):
    """A Slurm with one job."""
    monkeypatch.setattr(
        Slurm, "open_jobs", lambda _: ScriptedJobs([job("COMPLETED", exit_code=0)], [b"trained\n"])
    )


def test_a_name_is_that_of_a_run_before_that_of_a_job(slurm, home, cwd, capfd):
    RunFolder.create(home / "runs", "train.py", {"exit_code": 0, "target": "train.py"})
    run = call_accel(capfd, "top", "train")
    assert (run.returncode, run.stdout.partition("  ")[2].splitlines()[0]) == (0, "train.py")
    without_service = call_accel(capfd, "top", "12")
    assert (without_service.returncode, "Run '12' not found" in without_service.stderr) == (2, True)
    for options in (["--launcher", "slurm"], ["--set", "launcher.kind=slurm"]):
        assert call_accel(capfd, "top", "train", *options).stdout.startswith(
            "job 12  train.py\nCOMPLETED, exit code 0\n"
        )
    (cwd / "accel.yaml").write_text("schema_version: 1\nlauncher:\n  kind: slurm\n")
    assert call_accel(capfd, "top", "12").stdout.endswith("\n\ntrained\n")
    data = json.loads(call_accel(capfd, "top", "12", "--json").stdout)
    assert (data["job"]["state"], data["log"]) == ("COMPLETED", ["trained"])


def test_a_service_without_the_id_of_a_job_is_a_usage_error(slurm, cwd, capfd):
    result = call_accel(capfd, "top", "--launcher", "slurm")
    assert (result.returncode, "The id of the job is missing" in result.stderr) == (2, True)
