"""Jobs of Slurm, with recorded output and fake commands, and following a job."""

import os
import re
import shutil
from pathlib import Path

import pytest
from support.launchers.slurm_answers import line
from support.processes.commands import call_accel

from accel_cli.errors import UsageError
from accel_cli.extensions.slurm import service as slurm_jobs
from accel_cli.extensions.slurm.service import SlurmJobs, parse_job_line
from accel_cli.launchers import job_service as following
from accel_cli.launchers.job_service import Job, Jobs, Log, PollIntervals, UnreachableError, format_options


def test_a_line_of_scontrol_is_parsed_to_a_job():
    job, user = parse_job_line(line())
    assert user == 1000
    assert job == Job(
        id="12", name="train.py", state="RUNNING", finished=False, reason="", nodes="n[0-1]", restarts=2,
        submitted="2026-01-02T03:04:05", elapsed="00:01:02", log="/l/slurm-12.out",
    )  # fmt: skip


def test_job_names_and_log_paths_that_look_like_fields_are_parsed_as_text():
    name = "x UserId=root(0) JobState=COMPLETED ExitCode=0:0"
    job, user = parse_job_line(line(name=name, state="FAILED", code="3:0", log="/a b/my log.out"))
    assert (job.name, user, job.state, job.exit_code, job.log) == (name, 1000, "FAILED", 3, "/a b/my log.out")


@pytest.mark.parametrize("text", ["", "No jobs in the system"])
def test_a_line_without_a_job_is_parsed_to_none(text):
    assert parse_job_line(text) is None


@pytest.mark.parametrize(
    ("state", "code", "exit_code"),
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
def test_the_exit_code_of_a_job_is_0_only_if_it_completed(state, code, exit_code):
    job, _ = parse_job_line(line(state=state, code=code))
    assert (job.exit_code, job.finished) == (exit_code, exit_code is not None)


def test_a_reason_that_blocks_a_job_forever_is_explained():
    assert (
        "does not start unless that changes"
        in parse_job_line(line(state="PENDING", reason="PartitionTimeLimit"))[0].reason
    )
    assert parse_job_line(line(state="PENDING", reason="Resources"))[0].reason == "Resources"


# Fake commands of Slurm ---------------------------------------------------------------


@pytest.fixture
def fake_command(tmp_path, monkeypatch):
    """Create a command that prints a text and exits with a code."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin")

    def make(name, out="", err="", code=0):
        command = tmp_path / name
        command.write_text(f"#!/bin/sh\ncat <<'END'\n{out}\nEND\necho '{err}' >&2\nexit {code}\n")
        command.chmod(0o755)

    return make


def test_a_task_of_an_array_has_the_name_that_slurm_gives_it(monkeypatch):
    def task(number, index, **changes):
        return line(
            id=number, array=f"ArrayJobId=6 ArrayTaskId={index} ", log="/l/slurm-%A_%a.out", **changes
        )

    job = parse_job_line(task("9", "2", state="FAILED", code="7:0"))[0]
    assert (job.id, job.log, job.exit_code) == ("6_2", "/l/slurm-6_2.out", 7)
    waiting = parse_job_line(task("6", "3-9%2", state="PENDING", reason="JobArrayTaskLimit"))[0]
    assert (waiting.id, waiting.reason[:17]) == ("6_[3-9%2]", "JobArrayTaskLimit")
    answers = {
        "6": [task("6", "3-9"), task("8", "1"), task("7", "0", state="COMPLETED")],
        "6_1": [task("8", "1")],
    }
    monkeypatch.setattr(slurm_jobs, "_run", lambda *words: "\n".join(answers[words[-1]]))
    assert SlurmJobs().status("6_1").id == "6_1"
    with pytest.raises(
        UsageError,
        match=r"Job 6 is an array: 6_0 COMPLETED, 6_1 RUNNING, 6_\[3-9\] RUNNING\. Name one .* 6_0;",
    ):
        SlurmJobs().status("6")


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        ("PartitionConfig", "PartitionConfig: the partition does not have the nodes"),
        (
            "Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved",
            "Nodes required for job are DOWN, DRAINED or reserved",
        ),
    ],
)
def test_a_reason_of_slurm_is_explained_and_readable(reason, shown):
    assert parse_job_line(line(state="PENDING", reason=reason))[0].reason.startswith(shown)


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_the_first_error_of_a_log_is_the_reason_of_a_failure_without_one(tmp_path, monkeypatch, chunk):
    text = "not accel: error: x\naccel: error: rank 0 of 2 on n1: ValueError: b\u00f6.\naccel: error: rank 1: later\nsrun: error: y\n"
    (tmp_path / "log").write_text(text)
    monkeypatch.setattr(following, "_LOG_CHUNK", chunk)
    log = following.FileLog(tmp_path / "log")
    while log.read():
        pass
    assert log.first_error == "rank 0 of 2 on n1: ValueError: b\u00f6"


def test_list_returns_jobs_of_this_user_only(fake_command, monkeypatch):
    fake_command(
        "scontrol", f"{line(id='1')}\n{line(id='2').replace('ann(1000)', 'bob(1001)')}\n{line(id='3')}"
    )
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    assert [job.id for job in SlurmJobs().list()] == ["1", "3"]


def test_the_status_of_a_job_that_the_controller_forgot_comes_from_sacct(fake_command):
    fake_command("scontrol", err="slurm_load_jobs error: Invalid job id specified", code=1)
    fake_command("sacct", "my|run|CANCELLED by 1000|0:15|2026-01-02T03:04:05|00:01:02|n[0-1]")
    job = SlurmJobs().status("12")
    assert (job.id, job.name) == ("12", "my|run")
    assert (job.state, job.finished, job.exit_code, job.nodes) == ("CANCELLED", True, 143, "n[0-1]")
    with pytest.raises(UsageError, match=r"slurm-12\.out in launcher\.output_dir"):
        SlurmJobs().open_log(job)


def test_a_controller_that_does_not_answer_raises_unreachable_error(fake_command):
    fake_command(
        "scontrol", err="slurm_load_jobs error: Unable to contact slurm controller (connect failure)", code=1
    )
    with pytest.raises(UnreachableError, match="Unable to contact slurm controller"):
        SlurmJobs().status("12")


def test_stopping_a_job_of_another_user_is_an_error(fake_command):
    fake_command(
        "scancel", err="scancel: error: Kill job error on job id 12: Access/permission denied", code=1
    )
    with pytest.raises(UsageError, match=r"Slurm rejects scancel: .*permission denied"):
        SlurmJobs().stop("12")


@pytest.mark.parametrize("job_id", ["", "-1", "12; id", "--help", "1_", "1_a", "_1", "²"])
def test_an_invalid_job_id_is_not_passed_to_slurm(job_id):
    for call in (SlurmJobs().status, SlurmJobs().stop):
        with pytest.raises(UsageError, match=r"Invalid Slurm job id .*: expected a number"):
            call(job_id)


def submit(capfd, cwd, *args):
    (cwd / "train.py").write_text("")
    return call_accel(capfd, "launch", "--set", "launcher.kind=slurm", *args, "train.py")


BANNER = "*** Welcome to the cluster ***\nMaintenance on 2026-12-01, 3 nodes are down\n"


@pytest.mark.parametrize(
    "printed",
    [
        "4711",
        "4711;cluster",
        f"{BANNER}4711",
        f"{BANNER}4711\nHave a nice day",
        f"2026\n{BANNER}\x1b[32m4711\x1b[0m\r",
        "Submitted batch job 4711",
        f"{BANNER}sbatch: Submitted batch job 4711 on cluster c1",
        "ä\n4711",
    ],
)
def test_the_id_of_a_job_is_found_in_the_output_of_sbatch(fake_command, cwd, capfd, printed):
    fake_command("sbatch", printed)
    done = submit(capfd, cwd, "--detach")
    assert (done.returncode, done.stdout) == (0, "4711\n")


def test_a_banner_that_is_not_utf_8_does_not_hide_the_id(fake_command, cwd, capfd):
    fake_command("sbatch")
    command = Path(shutil.which("sbatch"))
    command.write_bytes(b"#!/bin/sh\nprintf 'Gr\xfc\xdfe\\n4711\\n'\n")
    assert submit(capfd, cwd, "--detach").stdout == "4711\n"


@pytest.mark.parametrize(
    "answer",
    [
        (BANNER, "", 0),
        ("", "", 0),
        ("job 4711 is queued", "", 0),
        ("", "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation", 1),
        ("", "sbatch: error: Batch job submission failed: Zero Bytes were transmitted or received", 1),
        ("4711", "the mail to your group failed", 3),
    ],
)
def test_a_submission_with_an_unclear_end_is_an_error_that_says_how_to_find_the_job(
    fake_command, cwd, capfd, answer
):
    fake_command("sbatch", *answer)
    done = submit(capfd, cwd)
    assert (done.returncode, done.stdout) == (1, "")
    assert "may be running" in done.stderr
    assert "accel jobs list --launcher slurm or squeue --me before you submit it again" in done.stderr


def test_a_rejected_submission_is_an_error_whatever_the_banner_is(fake_command, cwd, capfd):
    fake_command("sbatch", BANNER, "sbatch: error: invalid partition", 1)
    done = submit(capfd, cwd)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Slurm rejects the job: sbatch: error: invalid partition" in done.stderr
    assert "may be running" not in done.stderr


def test_the_status_is_found_among_the_lines_of_a_banner(fake_command):
    fake_command("scontrol", f"{BANNER}{line(id='12')}\nbye")
    assert SlurmJobs().status("12").state == "RUNNING"
    fake_command("scontrol", err="slurm_load_jobs error: Invalid job id specified", code=1)
    fake_command("sacct", f"{BANNER}a|b\nrun|COMPLETED|0:0|2026-01-02T03:04:05|00:01:02|n0\n| bye |")
    assert SlurmJobs().status("12").exit_code == 0


def test_a_status_that_cannot_be_read_is_an_outage(fake_command):
    fake_command("scontrol", BANNER)
    with pytest.raises(UnreachableError, match=r"scontrol printed 'Maintenance on 2026-12-01"):
        SlurmJobs().status("12")


def test_a_job_whose_first_status_fails_may_be_running(fake_command, cwd, capfd):
    fake_command("sbatch", "12")
    fake_command("scontrol", err="slurm_load_jobs error: Unable to contact slurm controller", code=1)
    done = submit(capfd, cwd)
    assert done.returncode == 1
    assert "Job 12 may still be running. Follow it with accel jobs logs 12 -f" in done.stderr


# Following -----------------------------------------------------------------------------


class FakeService(Jobs):
    """A service with scripted results and log lines."""

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


def job(state, **fields):
    return Job("12", "train.py", state, finished=fields.get("exit_code") is not None, **fields)


def test_follow_continues_after_calls_that_fail(capfdbinary):
    outage = UnreachableError("scontrol does not answer: it is restarted")
    service = FakeService(outage, job("RUNNING", nodes="n0"), outage, job("FAILED", exit_code=3, log="/l"))
    assert following.follow(service, job("PENDING", reason="Resources")) == 3
    out, err = capfdbinary.readouterr()
    assert out == b"first\nlast\n"
    messages = err.decode()
    assert re.search(
        r"is PENDING \(Resources\)\n.*it is restarted\. Trying again\.\n.*the service of job 12 answers again\n.*is RUNNING on n0",
        messages,
    )
    assert messages.endswith("error: job 12 ended as FAILED with exit code 3; its log: /l\n")


def test_follow_prints_one_line_at_the_start_and_one_at_the_end_of_an_outage(capfdbinary):
    outage = UnreachableError("CloudWatch does not answer")
    service = FakeService(
        outage, outage, job("RUNNING"), job("COMPLETED", exit_code=0, cost="9 billable seconds")
    )
    service.lines = [b"first\n", outage, outage, outage, b"last\n"]
    assert following.follow(service, job("RUNNING")) == 0
    out, err = capfdbinary.readouterr()
    assert out == b"first\nlast\n"
    messages = err.decode()
    assert messages.count("CloudWatch does not answer. Trying again.") == 1
    assert messages.count("the service of job 12 answers again") == 1
    assert messages.endswith("job 12 is COMPLETED after ; 9 billable seconds\n")


def test_an_unreadable_end_of_a_log_does_not_change_the_exit_code(monkeypatch, capfd):
    monkeypatch.setattr(following, "_MAX_FINAL_OUTAGE_S", 0)
    service = FakeService()
    service.lines = [b"first\n", UnreachableError("gone")]
    assert following.follow(service, job("FAILED", exit_code=1, reason="boom", log="/l")) == 1
    out, err = capfd.readouterr()
    assert out == "first\n"
    assert "gone. The end of the log of job 12 is missing." in err
    assert err.endswith("job 12 ended as FAILED with exit code 1: boom; its log: /l\n")


def test_follow_returns_at_once_if_the_log_is_complete():
    service = FakeService()
    service.ends, service.lines, service.intervals = (
        True,
        [b"all\n"],
        PollIntervals(0.01, (0.01, 0.01), last_output_s=3600),
    )
    assert following.follow(service, job("COMPLETED", exit_code=0)) == 0


def test_follow_reads_the_status_of_a_job_that_prints_without_a_pause():
    service = FakeService(job("COMPLETED", exit_code=0))

    class Endless(list):
        def __bool__(self):
            return bool(service.answers)  # until the status has been read

        def pop(self, _):
            return b"more\n"

    service.lines = Endless()
    assert following.follow(service, job("RUNNING")) == 0


def test_ctrl_c_leaves_the_job_running_and_prints_how_to_follow_it(capfd):
    service = FakeService()
    service.lines, service.jobs_options = [KeyboardInterrupt()], " --profile cloud"
    assert following.follow(service, job("RUNNING")) == 130
    assert (
        "job 12 keeps running. Follow it with accel jobs logs 12 -f --profile cloud or stop it with"
        in capfd.readouterr().err
    )


def test_follow_ends_after_a_long_outage(monkeypatch):
    monkeypatch.setattr(following, "_MAX_OUTAGE_S", 0)
    with pytest.raises(
        UnreachableError, match=r"gone\. Job 12 may still be running\. Follow it with accel jobs logs 12 -f"
    ):
        following.follow(FakeService(UnreachableError("gone")), job("RUNNING"))


def test_follow_ends_if_the_service_rejects_a_call():
    with pytest.raises(
        UsageError, match=r"have expired\. Job 12 may still be running\. Follow it with accel jobs"
    ):
        following.follow(FakeService(UsageError("the credentials have expired")), job("RUNNING"))


def test_a_truncated_log_is_read_from_its_start(tmp_path):
    path = tmp_path / "log"
    log = SlurmJobs().open_log(Job("12", "x", "RUNNING", finished=False, log=str(path)))
    assert log.read() == b""
    path.write_bytes(b"a long first attempt\xff\n")
    assert (log.read(), log.read()) == (b"a long first attempt\xff\n", b"")
    path.write_bytes(b"again\n")
    assert log.read() == b"again\n"


# The launcher of `accel jobs` -----------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("--launcher=single", "its processes end with accel launch"),
        ("--set=launcher.kind=single", "its processes end with accel launch"),
        ("--profile=hosts", "its processes end with accel launch"),
        ("--set=launcher.kind=[single]", "it is unknown"),
        ("--launcher=nomad", "it is unknown"),
    ],
)
def test_selecting_a_launcher_without_jobs_is_an_error_with_the_reason(cwd, capfd, option, reason):
    (cwd / "hosts.yaml").write_text("schema_version: 1\nlauncher: {kind: ssh, hosts: [node1]}\n")
    assert call_accel(capfd, "config", "import", "hosts.yaml", "--profile", "hosts").returncode == 0
    result = call_accel(capfd, "jobs", "list", option)
    assert result.returncode == 2
    assert re.search(
        rf"Cannot use accel jobs with launcher .*: {reason}.*\. Use --launcher slurm or sagemaker or kubernetes or ray or skypilot\.",
        result.stderr,
    )


def test_slurm_is_assumed_if_the_launcher_of_the_profile_has_no_jobs(fake_command, cwd, capfd):
    fake_command("scontrol", line(id="1"))
    for kind in ("torchrun", "[slurm]"):
        (cwd / "accel.yaml").write_text(f"schema_version: 1\nlauncher:\n  kind: {kind}\n")
        assert call_accel(capfd, "jobs", "status", "1").returncode == 0


def test_errors_of_the_assumed_slurm_name_the_other_services(fake_command, cwd, capfd):
    fake_command("scontrol", err="no route\nscontrol: fatal: no configuration", code=1)
    for command in (("list",), ("status", "12"), ("logs", "12", "-f"), ("stop", "12"), ("download", "12")):
        result = call_accel(capfd, "jobs", *command)
        assert (result.returncode, result.stderr.count("\n")) == (2 if command[0] == "download" else 1, 1)
        assert (
            "so slurm is assumed; use --launcher sagemaker or kubernetes or ray or skypilot for others"
            in result.stderr
        )
    assert "sagemaker" not in call_accel(capfd, "jobs", "list", "--launcher", "slurm").stderr
    (cwd / "accel.yaml").write_text("schema_version: 1\nlauncher:\n  kind: slurm\n")
    assert "sagemaker" not in call_accel(capfd, "jobs", "list").stderr


def test_an_id_that_is_invalid_for_slurm_names_the_other_services(cwd, capfd):
    result = call_accel(capfd, "jobs", "status", "train-20260102-030405")
    assert result.returncode == 2
    assert (
        "Invalid Slurm job id 'train-20260102-030405': expected a number, or that of an array and of its task as in 6_1. No profile selects"
        in result.stderr
    )
    assert "--launcher sagemaker" in result.stderr


def test_format_options_returns_the_options_that_find_the_job_again():
    assert format_options(None, []) == ""
    assert format_options("my aws", ["launcher.kind=sagemaker", "launcher.region=eu-west-1"]) == (
        " --profile 'my aws' --launcher sagemaker --set launcher.region=eu-west-1"
    )
