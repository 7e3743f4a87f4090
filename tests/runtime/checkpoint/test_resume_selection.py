"""From which checkpoint a run goes on, without a process: what is there, who wrote it, and who asks."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from accel_runtime.checkpoint import directory
from accel_runtime.checkpoint.errors import CheckpointError
from accel_runtime.checkpoint.filesystem import FileSystem
from accel_runtime.checkpoint.manager import Checkpoints, ResumePolicy, RunOrigin
from accel_runtime.checkpoint.manifest import NAME

LAUNCHED = RunOrigin.from_env({"ACCEL_LAUNCH": "mine", "TORCHELASTIC_RESTART_COUNT": "0"})


@pytest.fixture
def project(handmade, tmp_path):
    """Checkpoints, each written by a run of the given marks."""

    def write(*runs):
        for number, marks in enumerate(runs):
            path = tmp_path / "checkpoints" / f"checkpoint_{number}"
            found = handmade.write(path, {"model": {"w": torch.ones(1)}}, step=number)
            (path / NAME).write_text(dataclasses.replace(found.manifest, run=marks).text())
        return Checkpoints(tmp_path / "checkpoints")

    return write


def steps(resuming, checkpoints):
    found = resuming.choose(checkpoints) if resuming.possible else None
    return found.manifest.step if found else None


def test_what_is_asked_to_go_on_takes_the_newest_of_any_run(project):
    assert steps(ResumePolicy(True, RunOrigin()), project({"launch": "a"}, {"launch": "b"})) == 1
    assert steps(ResumePolicy(True, LAUNCHED), project()) == 1


def test_a_run_takes_its_own_newest_and_never_that_of_another(project):
    checkpoints = project({"launch": "mine"}, {"launch": "mine"}, {"launch": "other"})
    assert steps(ResumePolicy(False, LAUNCHED), checkpoints) == 1
    assert steps(ResumePolicy(False, RunOrigin(launch="new")), checkpoints) is None


def test_a_job_that_slurm_runs_again_takes_its_own_and_one_that_it_runs_first_takes_none(project):
    checkpoints = project({"launch": "a", "slurm_job": "7"}, {"launch": "b", "slurm_job": "8"})
    job = {"SLURM_JOB_ID": "7", "ACCEL_LAUNCH": "c"}
    assert (
        steps(ResumePolicy(False, RunOrigin.from_env({**job, "SLURM_RESTART_COUNT": "1"})), checkpoints) == 0
    )
    # Another launch in the same allocation.
    assert steps(ResumePolicy(False, RunOrigin.from_env(job)), checkpoints) is None


def test_under_torchrun_which_names_no_run_a_restart_takes_the_newest(project):
    checkpoints = project({}, {"launch": "other"})
    assert (
        steps(ResumePolicy(False, RunOrigin.from_env({"TORCHELASTIC_RESTART_COUNT": "1"})), checkpoints) == 1
    )
    assert (
        steps(ResumePolicy(False, RunOrigin.from_env({"TORCHELASTIC_RESTART_COUNT": "0"})), checkpoints)
        is None
    )
    assert steps(ResumePolicy(False, RunOrigin.from_env({})), checkpoints) is None


def test_a_run_that_was_killed_in_its_first_save_begins_anew(project, tmp_path, capsys):
    checkpoints = project()
    directory.create_scratch(tmp_path / "checkpoints" / "checkpoint_0", "abc", FileSystem())
    assert not checkpoints.any()
    assert steps(ResumePolicy(True, LAUNCHED), checkpoints) is None
    assert capsys.readouterr().err.endswith("yet: starting from the beginning\n")


def test_where_the_only_checkpoint_is_damaged_a_run_does_not_begin_anew_in_silence(project, tmp_path):
    checkpoints = project({})
    (tmp_path / "checkpoints" / "checkpoint_0" / NAME).write_text("")
    with pytest.raises(CheckpointError, match="No complete checkpoint in"):
        steps(ResumePolicy(True, LAUNCHED), checkpoints)


def test_the_marks_of_a_run_are_what_it_was_started_with():
    assert RunOrigin.from_env({"ACCEL_LAUNCH": "x", "SLURM_JOB_ID": "7"}).identity == {
        "launch": "x",
        "slurm_job": "7",
    }
    assert RunOrigin.from_env({"TORCHELASTIC_RESTART_COUNT": "two"}) == RunOrigin()


@pytest.mark.parametrize(
    ("resuming", "said"),
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
def test_a_run_that_begins_anew_says_so_where_somebody_might_think_otherwise(project, capsys, resuming, said):
    assert resuming.choose(project()) is None
    told = capsys.readouterr().err
    assert told.endswith(said + ("\n" if resuming.asked else "")) if said else told == ""
