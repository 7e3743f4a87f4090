"""What Slurm says of a job, read from lines it has written, and asked of commands that stand in for it."""

import os
import re

import pytest
from in_process import run

from accel_cli.errors import UsageError
from accel_cli.jobs import base as following
from accel_cli.jobs.base import Job, Jobs, Log, PollIntervals, UnreachableError, format_options
from accel_cli.jobs.slurm import SlurmJobs, parse_job_line
from accel_cli.launchers import LAUNCHERS

LINE = (
    "JobId={id} JobName={name} UserId=ann(1000) GroupId=ann(1000) MCS_label=N/A Priority=1 Nice=0 Account=(null) "
    "QOS=(null) JobState={state} Reason={reason} Dependency=(null) Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 "
    "ExitCode={code} RunTime=00:01:02 TimeLimit=01:00:00 SubmitTime=2026-01-02T03:04:05 NodeList=n[0-1] "
    "BatchHost=n0 NumNodes=2 Command=(null) WorkDir=/home/ann StdErr={log} StdIn=/dev/null StdOut={log} Power= "
)


def line(**changes):
    said = {
        "id": "12",
        "name": "train.py",
        "state": "RUNNING",
        "reason": "None",
        "code": "0:0",
        "log": "/l/slurm-%j.out",
    }
    return LINE.format(**(said | changes))


def test_a_line_of_scontrol_is_a_job():
    job, user = parse_job_line(line())
    assert user == 1000
    assert job == Job(
        id="12", name="train.py", state="RUNNING", finished=False, reason="", nodes="n[0-1]", restarts=2,
        submitted="2026-01-02T03:04:05", elapsed="00:01:02", log="/l/slurm-12.out",
    )  # fmt: skip


def test_a_name_and_a_path_with_spaces_do_not_pass_for_fields():
    name = "x UserId=root(0) JobState=COMPLETED ExitCode=0:0"
    job, user = parse_job_line(line(name=name, state="FAILED", code="3:0", log="/a b/my log.out"))
    assert (job.name, user, job.state, job.exit_code, job.log) == (name, 1000, "FAILED", 3, "/a b/my log.out")


def test_a_member_of_an_array_is_a_job():
    assert parse_job_line(line().replace("JobName", "ArrayJobId=11 ArrayTaskId=1 JobName"))[0].id == "12"


@pytest.mark.parametrize("said", ["", "No jobs in the system"])
def test_a_line_of_no_job_is_none(said):
    assert parse_job_line(said) is None


@pytest.mark.parametrize(
    ("state", "code", "comes_to"),
    [
        ("COMPLETED", "0:0", 0),
        ("FAILED", "7:0", 7),
        ("FAILED", "0:9", 137),
        ("CANCELLED", "0:15", 143),
        ("CANCELLED", "0:0", 1),
        ("TIMEOUT", "0:0", 1),
        ("NODE_FAIL", "1:0", 1),
        ("OUT_OF_MEMORY", "0:125", 137),
        ("RUNNING", "0:0", None),
        ("COMPLETING", "0:0", None),
        ("PENDING", "0:0", None),
    ],
)
def test_the_end_of_a_job_comes_to_an_exit_code_and_to_0_only_where_it_completed(state, code, comes_to):
    job, _ = parse_job_line(line(state=state, code=code))
    assert (job.exit_code, job.finished) == (comes_to, comes_to is not None)


def test_a_reason_that_waiting_does_not_mend_says_so():
    assert (
        "does not start unless that changes"
        in parse_job_line(line(state="PENDING", reason="PartitionTimeLimit"))[0].reason
    )
    assert parse_job_line(line(state="PENDING", reason="Resources"))[0].reason == "Resources"


# Commands that stand in for Slurm's ----------------------------------------------------


@pytest.fixture
def says(tmp_path, monkeypatch):
    """Makes a command that prints this and ends with this code."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin")

    def make(name, out="", err="", code=0):
        (tmp_path / "out").write_text(out)
        command = tmp_path / name
        command.write_text(
            f"#!/bin/sh\nprintf '%s' \"$*\" > {tmp_path}/asked\ncat <<'END'\n{out}\nEND\necho '{err}' >&2\nexit {code}\n"
        )
        command.chmod(0o755)

    return make


def test_the_list_has_your_jobs_only(says, monkeypatch):
    says("scontrol", f"{line(id='1')}\n{line(id='2').replace('ann(1000)', 'bob(1001)')}\n{line(id='3')}")
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    assert [job.id for job in SlurmJobs().list()] == ["1", "3"]


def test_what_slurm_has_forgotten_the_accounting_remembers(says):
    says("scontrol", err="slurm_load_jobs error: Invalid job id specified", code=1)
    says("sacct", "my|run|CANCELLED by 1000|0:15|2026-01-02T03:04:05|00:01:02|n[0-1]")
    job = SlurmJobs().status("12")
    assert (job.id, job.name) == ("12", "my|run")
    assert (job.state, job.finished, job.exit_code, job.nodes) == ("CANCELLED", True, 143, "n[0-1]")
    with pytest.raises(UsageError, match=r"slurm-12\.out in launcher\.output_dir"):
        SlurmJobs().open_log(job)


def test_without_accounting_a_forgotten_job_is_an_error(says):
    says("scontrol", err="slurm_load_jobs error: Invalid job id specified", code=1)
    says("sacct", err="Slurm accounting storage is disabled", code=1)
    with pytest.raises(
        UsageError, match=r"Unknown Slurm job 12: Slurm forgets a job a few minutes after its end"
    ):
        SlurmJobs().status("12")


def test_a_controller_that_does_not_answer_is_no_mistake_of_yours(says):
    says(
        "scontrol", err="slurm_load_jobs error: Unable to contact slurm controller (connect failure)", code=1
    )
    with pytest.raises(UnreachableError, match="Unable to contact slurm controller"):
        SlurmJobs().status("12")


def test_a_job_of_somebody_else_cannot_be_stopped(says):
    says("scancel", err="scancel: error: Kill job error on job id 12: Access/permission denied", code=1)
    with pytest.raises(UsageError, match=r"Slurm rejects scancel: .*permission denied"):
        SlurmJobs().stop("12")


@pytest.mark.parametrize("job_id", ["", "-1", "12; id", "--help", "1_2", "²"])
def test_what_is_no_id_never_reaches_slurm(job_id):
    for ask in (SlurmJobs().status, SlurmJobs().stop):
        with pytest.raises(UsageError, match=r"Invalid Slurm job id .*: expected a number"):
            ask(job_id)


# Following -----------------------------------------------------------------------------


class Played(Jobs):
    """A service that answers what a test wrote down."""

    intervals = PollIntervals(log_s=0.01, status_s=(0.01, 0.01), last_output_s=0.05)

    def __init__(self, *answers):
        self.answers, self.lines, self.ends = list(answers), [b"first\n", b"", b"last\n"], False

    def list(self):
        return []

    def status(self, _):
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def open_log(self, _):
        lines, ends = self.lines, self.ends

        class Lines(Log):
            def read(self):
                line = lines.pop(0) if lines else b""
                if isinstance(line, BaseException):
                    raise line
                return line

            def is_complete(self, _):
                return ends and not lines

        return Lines()

    def stop(self, _):
        raise AssertionError

    def download(self, *_):
        raise AssertionError


def job(state, **said):
    return Job("12", "train.py", state, finished=said.get("exit_code") is not None, **said)


def test_following_goes_on_while_the_service_does_not_answer(capfdbinary):
    silent = UnreachableError("scontrol does not answer: it is restarted")
    played = Played(silent, job("RUNNING", nodes="n0"), silent, job("FAILED", exit_code=3, log="/l"))
    assert following.follow(played, job("PENDING", reason="Resources")) == 3
    out, err = capfdbinary.readouterr()
    assert out == b"first\nlast\n"
    words = err.decode()
    assert re.search(
        r"is PENDING \(Resources\)\n.*it is restarted\. Trying again\.\n.*the service of job 12 answers again\n.*is RUNNING on n0",
        words,
    )
    assert words.endswith("error: job 12 ended as FAILED with exit code 3; its log: /l\n")


def test_a_network_that_drops_while_a_log_is_read_is_said_once_and_again_when_it_is_back(capfdbinary):
    down = UnreachableError("CloudWatch does not answer")
    played = Played(down, down, job("RUNNING"), job("COMPLETED", exit_code=0, cost="9 billable seconds"))
    played.lines = [b"first\n", down, down, down, b"last\n"]
    assert following.follow(played, job("RUNNING")) == 0
    out, err = capfdbinary.readouterr()
    assert out == b"first\nlast\n"
    words = err.decode()
    assert words.count("CloudWatch does not answer. Trying again.") == 1
    assert words.count("the service of job 12 answers again") == 1
    assert words.endswith("job 12 is COMPLETED after ; 9 billable seconds\n")


def test_the_end_of_a_log_that_cannot_be_read_does_not_change_what_the_job_comes_to(monkeypatch, capfd):
    monkeypatch.setattr(following, "_MAX_FINAL_OUTAGE_S", 0)
    played = Played()
    played.lines = [b"first\n", UnreachableError("gone")]
    assert following.follow(played, job("FAILED", exit_code=1, reason="boom", log="/l")) == 1
    out, err = capfd.readouterr()
    assert out == "first\n"
    assert "gone. The end of the log of job 12 is missing." in err
    assert err.endswith("job 12 ended as FAILED with exit code 1: boom; its log: /l\n")


def test_a_log_that_is_whole_is_not_waited_for():
    played = Played()
    played.ends, played.lines, played.intervals = (
        True,
        [b"all\n"],
        PollIntervals(0.01, (0.01, 0.01), last_output_s=3600),
    )
    assert following.follow(played, job("COMPLETED", exit_code=0)) == 0


def test_a_job_that_prints_without_a_pause_is_asked_about_too():
    played = Played(job("COMPLETED", exit_code=0))

    class Endless(list):
        def __bool__(self):
            return bool(played.answers)  # until somebody has asked

        def pop(self, _):
            return b"more\n"

    played.lines = Endless()
    assert following.follow(played, job("RUNNING")) == 0


def test_ctrl_c_leaves_the_job_and_says_how_to_come_back(capfd):
    played = Played()
    played.lines, played.jobs_options = [KeyboardInterrupt()], " --profile cloud"
    assert following.follow(played, job("RUNNING")) == 130
    assert (
        "job 12 keeps running. Follow it with accel jobs logs 12 -f --profile cloud or stop it with"
        in capfd.readouterr().err
    )


def test_a_service_that_is_silent_for_long_is_the_end(monkeypatch):
    monkeypatch.setattr(following, "_MAX_OUTAGE_S", 0)
    with pytest.raises(
        UnreachableError, match=r"gone\. Job 12 may still be running\. Follow it with accel jobs logs 12 -f"
    ):
        following.follow(Played(UnreachableError("gone")), job("RUNNING"))


def test_a_service_that_refuses_to_say_more_ends_the_following_and_not_the_job():
    with pytest.raises(
        UsageError, match=r"have expired\. Job 12 may still be running\. Follow it with accel jobs"
    ):
        following.follow(Played(UsageError("the credentials have expired")), job("RUNNING"))


def test_a_log_that_is_begun_anew_is_read_from_its_start(tmp_path):
    path = tmp_path / "log"
    log = SlurmJobs().open_log(Job("12", "x", "RUNNING", finished=False, log=str(path)))
    assert log.read() == b""
    path.write_bytes(b"a long first attempt\xff\n")
    assert (log.read(), log.read()) == (b"a long first attempt\xff\n", b"")
    path.write_bytes(b"again\n")
    assert log.read() == b"again\n"


# The table -----------------------------------------------------------------------------


@pytest.mark.parametrize("launcher", LAUNCHERS.values())
def test_every_launcher_that_submits_jobs_opens_them(launcher):
    if launcher.location == "job":
        assert isinstance(launcher.open_jobs({}), Jobs)


@pytest.mark.parametrize(
    "option", ["--launcher=single", "--set=launcher.kind=single", "--set=launcher.kind=[single]"]
)
def test_a_launcher_without_jobs_is_refused(cwd, capfd, option):
    done = run(capfd, "jobs", "list", option)
    assert done.returncode == 2
    assert re.search(r"Invalid launcher \S*'single'\S*: expected slurm or sagemaker", done.stderr)


def test_a_profile_without_jobs_leaves_slurm(says, cwd, capfd):
    says("scontrol", line(id="1"))
    for kind in ("torchrun", "[slurm]"):
        (cwd / "accel.yaml").write_text(f"schema_version: 1\nlauncher:\n  kind: {kind}\n")
        assert run(capfd, "jobs", "status", "1").returncode == 0


def test_without_slurm_and_without_a_profile_the_other_services_are_named(says, cwd, capfd):
    says("scontrol", err="no route\nscontrol: fatal: no configuration", code=1)
    for typed in (("list",), ("status", "12"), ("logs", "12", "-f"), ("stop", "12"), ("download", "12")):
        done = run(capfd, "jobs", *typed)
        assert (done.returncode, done.stderr.count("\n")) == (2 if typed[0] == "download" else 1, 1)
        assert "so slurm is assumed; use --launcher sagemaker for others" in done.stderr
    assert "sagemaker" not in run(capfd, "jobs", "list", "--launcher", "slurm").stderr
    (cwd / "accel.yaml").write_text("schema_version: 1\nlauncher:\n  kind: slurm\n")
    assert "sagemaker" not in run(capfd, "jobs", "list").stderr


def test_an_id_that_slurm_cannot_have_names_the_other_services(cwd, capfd):
    done = run(capfd, "jobs", "status", "train-20260102-030405")
    assert done.returncode == 2
    assert (
        "Invalid Slurm job id 'train-20260102-030405': expected a number. No profile selects" in done.stderr
    )
    assert "--launcher sagemaker" in done.stderr


def test_what_finds_a_job_again_is_what_was_typed_to_find_it():
    assert format_options(None, []) == ""
    assert format_options("my aws", ["launcher.kind=sagemaker", "launcher.region=eu-west-1"]) == (
        " --profile 'my aws' --launcher sagemaker --set launcher.region=eu-west-1"
    )
