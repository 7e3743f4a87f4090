"""The selection of the checkpoint that a run resumes from, in one process."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from accel_runtime.checkpoint.project_checkpoints import Checkpoints, ResumePolicy, RunOrigin
from accel_runtime.storage import directory
from accel_runtime.storage.errors import CheckpointError
from accel_runtime.storage.file_store import FileStore
from accel_runtime.storage.file_system import FileSystem
from accel_runtime.storage.manifest import NAME

LAUNCHED = RunOrigin.from_env({"ACCEL_LAUNCH": "mine", "TORCHELASTIC_RESTART_COUNT": "0"})


@pytest.fixture
def project(handmade, tmp_path):
    """Return a function that writes one checkpoint for each given run identity."""

    def write(*runs):
        for number, identity in enumerate(runs):
            path = tmp_path / "checkpoints" / f"checkpoint_{number}"
            checkpoint = handmade.write(path, {"model": {"w": torch.ones(1)}}, step=number)
            (path / NAME).write_text(dataclasses.replace(checkpoint.manifest, run=identity).text())
        return Checkpoints(tmp_path / "checkpoints", FileStore())

    return write


def select_step(policy, checkpoints):
    checkpoint = policy.choose(checkpoints) if policy.possible else None
    return checkpoint.manifest.step if checkpoint else None


def test_a_requested_resume_selects_the_newest_checkpoint_of_any_run(project):
    assert select_step(ResumePolicy(True, RunOrigin()), project({"launch": "a"}, {"launch": "b"})) == 1
    assert select_step(ResumePolicy(True, LAUNCHED), project()) == 1


def test_a_restarted_run_selects_its_own_newest_checkpoint(project):
    checkpoints = project({"launch": "mine"}, {"launch": "mine"}, {"launch": "other"})
    assert select_step(ResumePolicy(False, LAUNCHED), checkpoints) == 1
    assert select_step(ResumePolicy(False, RunOrigin(launch="new")), checkpoints) is None


def test_only_a_requeued_slurm_job_selects_a_checkpoint_of_its_job(project):
    checkpoints = project({"launch": "a", "slurm_job": "7"}, {"launch": "b", "slurm_job": "8"})
    job = {"SLURM_JOB_ID": "7", "ACCEL_LAUNCH": "c"}
    assert (
        select_step(ResumePolicy(False, RunOrigin.from_env({**job, "SLURM_RESTART_COUNT": "1"})), checkpoints)
        == 0
    )
    # Another launch in the same allocation.
    assert select_step(ResumePolicy(False, RunOrigin.from_env(job)), checkpoints) is None


def test_a_recovered_task_of_skypilot_selects_a_checkpoint_of_its_own(project):
    """Each recovery of a managed job has the same task id, and a launch of its own."""
    task = {"SKYPILOT_TASK_ID": "sky-managed-1_train_2-0"}
    checkpoints = project(
        {"launch": "a", "sky_task": task["SKYPILOT_TASK_ID"]}, {"launch": "b", "sky_task": "other"}
    )
    recovered = RunOrigin.from_env({**task, "ACCEL_LAUNCH": "c"})
    assert recovered.may_resume
    assert select_step(ResumePolicy(False, recovered), checkpoints) == 0
    another = RunOrigin.from_env({"SKYPILOT_TASK_ID": "new", "ACCEL_LAUNCH": "c"})
    assert select_step(ResumePolicy(False, another), checkpoints) is None


def test_a_restart_under_torchrun_selects_the_newest_checkpoint(project):
    checkpoints = project({}, {"launch": "other"})
    assert (
        select_step(ResumePolicy(False, RunOrigin.from_env({"TORCHELASTIC_RESTART_COUNT": "1"})), checkpoints)
        == 1
    )
    assert (
        select_step(ResumePolicy(False, RunOrigin.from_env({"TORCHELASTIC_RESTART_COUNT": "0"})), checkpoints)
        is None
    )
    assert select_step(ResumePolicy(False, RunOrigin.from_env({})), checkpoints) is None


def test_a_run_killed_in_its_first_save_starts_from_the_beginning(project, tmp_path, capsys):
    checkpoints = project()
    directory.create_scratch(tmp_path / "checkpoints" / "checkpoint_0", "abc", FileSystem())
    assert not checkpoints.any()
    assert select_step(ResumePolicy(True, LAUNCHED), checkpoints) is None
    assert capsys.readouterr().err.endswith("yet: starting from the beginning\n")


def test_a_resume_fails_if_the_only_checkpoint_is_damaged(project, tmp_path):
    checkpoints = project({})
    (tmp_path / "checkpoints" / "checkpoint_0" / NAME).write_text("")
    with pytest.raises(CheckpointError, match="No complete checkpoint in"):
        select_step(ResumePolicy(True, LAUNCHED), checkpoints)


def test_the_identity_of_a_run_comes_from_its_environment():
    assert RunOrigin.from_env({"ACCEL_LAUNCH": "x", "SLURM_JOB_ID": "7"}).identity == {
        "launch": "x",
        "slurm_job": "7",
    }
    assert RunOrigin.from_env({"TORCHELASTIC_RESTART_COUNT": "two"}) == RunOrigin()


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (ResumePolicy(True, RunOrigin()), "yet: starting from the beginning"),
        (
            ResumePolicy(False, RunOrigin("mine", restarted=True)),
            "no checkpoint of this run yet: starting from the beginning\n",
        ),
        (ResumePolicy(False, LAUNCHED), ""),
    ],
    ids=["asked", "started again", "started"],
)
def test_a_start_from_the_beginning_is_reported_if_a_resume_was_expected(project, capsys, policy, expected):
    assert policy.choose(project()) is None
    output = capsys.readouterr().err
    assert output.endswith(expected + ("\n" if policy.asked else "")) if expected else output == ""
