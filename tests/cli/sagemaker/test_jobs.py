"""What SageMaker says of a job, as a job of ours."""

import datetime as dt

import pytest

from accel_cli.sagemaker.jobs import parse_job

BEGAN = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.timezone.utc)


def told(**changes):
    said = {
        "TrainingJobName": "train-1",
        "CreationTime": BEGAN,
        "LastModifiedTime": BEGAN + dt.timedelta(seconds=50),
        "TrainingJobStatus": "Completed",
        "SecondaryStatus": "Completed",
    }
    return {key: value for key, value in (said | changes).items() if value is not None}


@pytest.mark.parametrize(
    ("status", "state", "comes_to"),
    [
        ("InProgress", "Starting", None),
        ("InProgress", "Training", None),
        ("InProgress", "Uploading", None),
        ("InProgress", "Interrupted", None),
        ("Stopping", "Stopping", None),
        ("Completed", "Completed", 0),
        ("Failed", "Failed", 1),
        ("Stopped", "Stopped", 2),
        ("Stopped", "MaxRuntimeExceeded", 2),
        ("Stopped", "MaxWaitTimeExceeded", 2),
    ],
)
def test_an_end_comes_to_an_exit_code_and_only_an_end_does(status, state, comes_to):
    job = parse_job(told(TrainingJobStatus=status, SecondaryStatus=state))
    assert (job.state, job.exit_code, job.finished) == (state, comes_to, comes_to is not None)


def test_a_list_says_less_and_that_is_enough():
    job = parse_job(told(SecondaryStatus=None, TrainingEndTime=BEGAN + dt.timedelta(seconds=3723)))
    assert (job.state, job.elapsed, job.nodes, job.cost) == ("Completed", "01:02:03", "", "")
    stopped = parse_job(told(TrainingJobStatus="Stopped", SecondaryStatus="MaxRuntimeExceeded"))
    assert (stopped.reason, stopped.elapsed) == ("stopped: max_run was reached", "00:00:50")


def test_a_job_that_has_not_trained_yet_has_no_host_that_could_print():
    resources = {"InstanceType": "ml.m5.large", "InstanceCount": 4}
    assert parse_job(told(ResourceConfig=resources)).hosts == 0
    assert parse_job(told(ResourceConfig=resources, TrainingStartTime=BEGAN)).hosts == 4


def test_hosts_of_instance_groups_are_counted():
    groups = [
        {"InstanceGroupName": name, "InstanceType": f"ml.{name}.large", "InstanceCount": count}
        for name, count in (("m5", 1), ("c5", 2))
    ]
    job = parse_job(told(ResourceConfig={"InstanceGroups": groups}, TrainingStartTime=BEGAN))
    assert (job.hosts, job.nodes) == (3, "")


def test_a_job_under_way_says_what_the_platform_says_of_it():
    steps = [
        {"Status": "Starting", "StatusMessage": "Preparing"},
        {"Status": "Interrupted", "StatusMessage": "No capacity"},
    ]
    job = parse_job(
        told(TrainingJobStatus="InProgress", SecondaryStatus="Interrupted", SecondaryStatusTransitions=steps)
    )
    assert (job.reason, job.restarts) == ("No capacity", 1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "100 billable seconds"),
        (
            {"ResourceConfig": {"InstanceType": "x", "InstanceCount": 2}},
            "100 billable seconds on each of 2 instances",
        ),
        (
            {"BillableTimeInSeconds": 31, "EnableManagedSpotTraining": True},
            "31 billable seconds, spot saved 69 %",
        ),
        (
            {"TrainingTimeInSeconds": 0, "BillableTimeInSeconds": 0, "EnableManagedSpotTraining": True},
            "0 billable seconds",
        ),
        ({"BillableTimeInSeconds": None}, ""),
    ],
)
def test_what_is_paid_for(changes, said):
    assert (
        parse_job(told(**{"TrainingTimeInSeconds": 100, "BillableTimeInSeconds": 100} | changes)).cost == said
    )
