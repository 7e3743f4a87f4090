"""The Slurm launcher: batch scripts, compared with golden files and read by bash, and plans of steps."""

import os
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from support.launchers.launch_specs import build_spec
from support.processes.commands import call_accel
from support.processes.waits import limit

from accel_cli.errors import UsageError
from accel_cli.extensions.slurm.launcher import Slurm
from accel_cli.planning.plan import quote_for_bash

GOLDEN = Path(__file__).parent / "golden"
PROFILES = {
    "one-node": Slurm(),
    "two-nodes": Slurm(
        nnodes=2,
        gpus_per_node="a100:4",
        partition="gpu",
        account="team",
        time="2-12:00:00",
        qos="high",
        cpus_per_task=16,
        mem="64G",
        job_name="my run",
        output_dir="logs/a b",
        max_restarts=3,
        sbatch_args=["--constraint=a100", '--comment="two words"'],
        setup=["module load cuda", "source ~/venv/bin/activate"],
    ),
    "array": Slurm(array="0-9%2", output_dir="logs"),
    "requeue": Slurm(nnodes=2, nproc_per_node=2, requeue=True, signal="USR1@120"),
    "warned": Slurm(nproc_per_node=2, signal="SIGUSR2@60"),
}


@pytest.mark.parametrize("name", PROFILES)
def test_the_batch_script_equals_its_golden_file_and_is_valid_bash(name):
    script = PROFILES[name].plan(build_spec("--lr", "-1", "a b", "it's", "$HOME")).job.script
    golden = GOLDEN / f"{name}.sh"
    if os.environ.get("WRITE_GOLDEN"):
        golden.write_text(script)
    assert script == golden.read_text()
    assert subprocess.run(["bash", "-n"], input=script.encode(), check=False).returncode == 0


def test_an_option_of_accel_launch_sets_the_array(capfd, cwd, script):
    script("")
    done = call_accel(
        capfd, "launch", "--cpu", "--set=launcher.kind=slurm", "--array", "1,3", "--dry-run", "train.py"
    )
    assert "#SBATCH --array=1,3\n" in done.stdout, done.stderr
    for text in ("a", "1-", "1%0", "1,", "%2"):
        with pytest.raises(ValidationError, match="expected indexes such as 0-9"):
            Slurm(array=text)


@pytest.mark.parametrize("node", [0, 1])
def test_the_nodes_of_a_job_derive_its_rendezvous_from_the_variables_of_their_step(
    capfd, cwd, home, script, node
):
    script("")
    text = Slurm(nnodes=2, nproc_per_node=3).plan(build_spec()).job.script.replace("\\\n", "")
    words = shlex.split(text, comments=True)
    launch = words[words.index("accel_cli") + 1 :]
    variables = {**step(SLURM_JOB_ID="54711", SLURM_STEP_ID="0"), "SLURM_NODEID": str(node)}
    done = call_accel(capfd, launch[0], "--cpu", "--explain", *launch[1:], env=os.environ | variables)
    assert done.returncode == 0, done.stderr
    assert "start: 6 processes (3 on each of 2 nodes)\n" in done.stdout
    assert f"  rdzv_endpoint: n03:24711\n  node_rank: {node}\n  run_id: 54711.0\n" in done.stdout


def test_a_job_near_its_time_limit_is_requeued_once(tmp_path):
    stubs = {
        "srun": f"touch {tmp_path}/started; while [ ! -e {tmp_path}/warned ]; do /bin/sleep 0.05; done",
        "scancel": f"touch {tmp_path}/warned",
        "scontrol": f'echo "$*" >> {tmp_path}/calls',
        "sleep": f"while [ ! -e {tmp_path}/limit ]; do /bin/sleep 0.05; done",
    }
    for name, text in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    script = Slurm(requeue=True, signal="USR1@120").plan(build_spec()).job.script
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "requeue_pid": "1"}
    process = subprocess.Popen(["bash", "-c", script], env=environ)
    while not (tmp_path / "started").exists():
        time.sleep(0.05)
    time.sleep(0.5)  # bash waits for srun now
    process.send_signal(signal.SIGUSR1)
    process.wait(limit(60))
    (tmp_path / "limit").touch()
    time.sleep(0.5)
    assert (tmp_path / "calls").read_text() == "requeue 7\n"


def test_every_golden_batch_script_has_a_profile():
    assert {path.stem for path in GOLDEN.glob("*.sh")} == set(PROFILES)


def test_a_slurm_plan_needs_no_gpu_on_this_machine():
    plan = PROFILES["two-nodes"].plan(build_spec(device="cuda"))
    assert (plan.launcher, plan.nnodes, plan.nproc_per_node, plan.device) == ("slurm", 2, 4, "cuda")
    assert plan.argv == ("sbatch", "--parsable", "--export=ALL")
    assert plan.job.output_dir == "logs/a b"


@pytest.mark.parametrize(
    ("launcher", "options", "count"),
    [
        (Slurm(), {}, 1),
        (Slurm(gpus_per_node=8), {}, 8),
        (Slurm(gpus_per_node=8), {"device": "cpu"}, 1),
        (Slurm(gpus_per_node=8, nproc_per_node=2), {}, 2),
        (Slurm(gpus_per_node=0, nproc_per_node=3), {}, 3),
    ],
)
def test_auto_starts_one_process_for_each_requested_gpu(launcher, options, count):
    assert launcher.plan(build_spec(**options)).nproc_per_node == count


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("--gres=gpu:2", 2),
        ("--gres gpu:a100:2", 2),
        ("--gres=gpu", 1),
        ("--gres=gpu:a100", 1),
        ("--gres=gres/gpu:4", 4),
        ("--gres=nvme:1,gpu:3(S:0-1)", 3),
        ("--gres=gpu:a100:2,gpu:v100:1", 3),
        ("--gres=shard:4", 1),
        ("--constraint=a100 --gres=gpu:2", 2),
        ("-G4", 4),
        ("-G a100:4", 4),
        ("--gpus=4", 4),
        ("--gpus-per-task=2", 2),
    ],
)
def test_gpus_of_sbatch_args_are_counted(line, count):
    plan = Slurm(sbatch_args=[line]).plan(build_spec())
    assert (plan.nproc_per_node, plan.device) == (count, "GPU")
    with pytest.raises(ValidationError, match="GPUs are requested by gpus_per_node too"):
        Slurm(sbatch_args=[line], gpus_per_node=2)


@pytest.mark.parametrize("line", ["--gres=nvme:1", "--gres=none", "--tres-per-task=cpu:2", "--gpu-bind=none"])
def test_options_of_sbatch_without_gpus_request_none(line):
    plan = Slurm(sbatch_args=[line]).plan(build_spec())
    assert (plan.nproc_per_node, plan.device) == (1, "cpu")


def test_gpus_of_all_nodes_together_are_counted_on_one_node_only():
    with pytest.raises(ValidationError, match="--gpus is for all nodes together"):
        Slurm(nnodes=2, sbatch_args=["--gpus=4"])
    assert Slurm(nnodes=2, sbatch_args=["--gres=gpu:4"]).plan(build_spec()).nproc_per_node == 4


@pytest.mark.parametrize("name", ["SBATCH_GRES", "SBATCH_GPUS_PER_NODE", "SBATCH_OUTPUT"])
def test_a_variable_that_overrides_the_batch_script_is_an_error(name):
    with pytest.raises(UsageError, match=rf"{name}=x overrides the batch script\. Unset it"):
        Slurm().plan(build_spec(environ={name: "x"}))


def test_more_processes_than_requested_gpus_are_an_error_except_on_the_cpu():
    launcher = Slurm(gpus_per_node="a100:2", nproc_per_node=4)
    with pytest.raises(UsageError, match=r"nproc_per_node 4: launcher.gpus_per_node requests 2"):
        launcher.plan(build_spec())
    assert launcher.plan(build_spec(device="cpu")).nproc_per_node == 4
    with pytest.raises(UsageError, match=r"nproc_per_node 4: launcher.sbatch_args requests 2"):
        Slurm(sbatch_args=["--gres=gpu:2"], nproc_per_node=4).plan(build_spec())


@pytest.mark.parametrize(
    ("kind", "command"),
    [
        ("script", "\n  -- train.py x\n"),
        ("module", "\n  -m -- train.py x\n"),
        ("program", "\n  --no-python -- train.py x\n"),
    ],
)
def test_scripts_modules_and_programs_are_passed_to_srun(kind, command):
    assert Slurm().plan(build_spec("x", kind=kind)).job.script.endswith(command)


def test_unprintable_characters_are_replaced_in_the_job_name():
    target = "a\n#SBATCH --uid=0.py"
    plan = Slurm().plan(build_spec(target=target))
    assert "#SBATCH '--job-name=a_#SBATCH --uid=0.py'\n" in plan.job.script
    assert not [line for line in plan.job.script.splitlines() if line.startswith("#SBATCH --uid")]


@settings(max_examples=60)
@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])) | st.binary(max_size=8).map(
    lambda some: os.fsdecode(some.replace(b"\0", b""))), max_size=6))  # fmt: skip
def test_bash_reads_a_quoted_word_unchanged_from_one_line(words):
    line = " ".join(["printf '%s\\0'", *map(quote_for_bash, words)])
    assert "\r" not in line
    assert "\n" not in line
    done = subprocess.run(["bash"], input=os.fsencode(line), capture_output=True, check=True)
    assert done.stdout.split(b"\0")[:-1] == (list(map(os.fsencode, words)) or [b""])


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("time", "4 hours", "expected minutes"),
        ("time", 0, "expected minutes"),
        ("mem", "64 GB", "expected a size such as 64G"),
        ("gpus_per_node", "many", "a type and a number such as a100:4"),
        ("gpus_per_node", -1, "a type and a number such as a100:4"),
        ("signal", "TERM@60", "expected USR1@SECONDS"),
        ("signal", "USR1", "expected USR1@SECONDS"),
        ("partition", "a\nb", "text on one line"),
        ("job_name", " ", "text on one line"),
        ("output_dir", "logs/%j", "expected a folder"),
        (
            "output_dir",
            "$NO_SUCH_VARIABLE/logs",
            "expected a path whose variables are set; NO_SUCH_VARIABLE is not",
        ),
        ("sbatch_args", ["a100"], "expected options of sbatch"),
        ("sbatch_args", ["--nodes=4"], "cannot contain --nodes, which accel sets"),
        ("sbatch_args", ["-p gpu"], "cannot contain -p"),
        ("sbatch_args", ["-N2"], "cannot contain -N"),
        ("sbatch_args", ["--node=2"], "cannot contain --nodes"),
        ("sbatch_args", ["--constraint=a100 --ntasks 4"], "cannot contain --ntasks"),
        ("sbatch_args", ["--ntasks-per-gpu=1"], "cannot contain --ntasks-per-gpu"),
        ("sbatch_args", ["--comment='a"], "No closing quotation"),
        (
            "sbatch_args",
            ["--gpus-per-socket=1"],
            "GPUs of --gpus-per-socket cannot be counted; use gpus_per_node",
        ),
        ("sbatch_args", ["--gpus-per-tas=2"], "GPUs of --gpus-per-tas cannot be counted"),
        ("sbatch_args", ["--tres-per-task=cpu:2,gres/gpu:1"], "GPUs of --tres-per-task cannot be counted"),
        ("sbatch_args", ["--gres=gpu:2k"], "GPUs of --gres gpu:2k cannot be counted"),
        ("sbatch_args", ["--gres=gpu:1", "--gpus=2"], "--gres and --gpus both request GPUs"),
        ("nproc_per_node", 0, "greater than or equal to 1"),
    ],
)
def test_an_invalid_value_for_sbatch_is_an_error(key, value, message):
    with pytest.raises(ValidationError, match=message):
        Slurm(**{key: value})


@pytest.mark.parametrize("value", [30, "30", "30:00", "4:00:00", "2-12", "2-12:00:00", "UNLIMITED"])
def test_time_limits_have_the_formats_of_slurm(value):
    assert f"\n#SBATCH --time={value}\n" in Slurm(time=value).plan(build_spec()).job.script


# Inside an allocation -------------------------------------------------------------------


def step(**changes):
    variables = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "2",
        "SLURM_STEP_NODELIST": "n[03-04]",
        "SLURM_STEP_NUM_NODES": "2",
    }
    return variables | {"SLURM_STEP_NUM_TASKS": "2"} | changes


def test_a_step_with_one_task_per_node_runs_agents():
    plan = Slurm(nnodes=2, nproc_per_node=3, max_restarts=1).plan(build_spec(environ=step()))
    assert (plan.launcher, plan.nnodes, plan.nproc_per_node) == ("torchrun", 2, 3)
    agent = plan.agent
    assert (agent.run_id, agent.rdzv_endpoint, agent.max_restarts) == ("slurm-7.2", "n03:20201", 1)


def test_submitting_from_inside_a_job_is_an_error():
    with pytest.raises(
        UsageError, match=r"already inside the Slurm job 7.*srun --nodes=2 --ntasks-per-node=1"
    ):
        Slurm(nnodes=2).plan(build_spec(environ={"SLURM_JOB_ID": "7"}))


@pytest.mark.parametrize("changes", [{"SLURM_STEP_NUM_TASKS": "4"}, {"SLURM_STEP_NUM_NODES": "1"}])
def test_a_step_of_another_size_than_the_profile_is_an_error(changes):
    with pytest.raises(UsageError, match=r"the profile needs one on each of 2\. Use srun"):
        Slurm(nnodes=2).plan(build_spec(environ=step(**changes)))
