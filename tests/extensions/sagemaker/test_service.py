"""Descriptions of training jobs, parsed into jobs of accel; and the list of them."""

import datetime as dt

import pytest
from botocore.stub import ANY, Stubber

from accel_cli.extensions.sagemaker.aws import Account
from accel_cli.extensions.sagemaker.service import SageMakerJobs, parse_job

BEGAN = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)


def describe_job(**changes):
    description = {
        "TrainingJobName": "train-1",
        "CreationTime": BEGAN,
        "LastModifiedTime": BEGAN + dt.timedelta(seconds=50),
        "TrainingJobStatus": "Completed",
        "SecondaryStatus": "Completed",
    }
    return {key: value for key, value in (description | changes).items() if value is not None}


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
def test_only_an_ended_job_has_an_exit_code(status, state, comes_to):
    job = parse_job(describe_job(TrainingJobStatus=status, SecondaryStatus=state))
    assert (job.state, job.exit_code, job.finished) == (state, comes_to, comes_to is not None)


def test_a_job_of_a_list_has_state_and_elapsed_time():
    job = parse_job(describe_job(SecondaryStatus=None, TrainingEndTime=BEGAN + dt.timedelta(seconds=3723)))
    assert (job.state, job.elapsed, job.nodes, job.cost) == ("Completed", "01:02:03", "", "")
    stopped = parse_job(describe_job(TrainingJobStatus="Stopped", SecondaryStatus="MaxRuntimeExceeded"))
    assert (stopped.reason, stopped.elapsed) == ("stopped: max_run was reached", "00:00:50")


@pytest.mark.parametrize(
    ("state", "limit", "reason"),
    [
        ("MaxRuntimeExceeded", "MaxRuntimeInSeconds", "stopped: max_run of 3600 s was reached"),
        ("MaxWaitTimeExceeded", "MaxWaitTimeInSeconds", "stopped: max_wait of 3600 s was reached"),
    ],
)
def test_a_job_that_a_limit_stopped_has_the_limit_as_its_reason(state, limit, reason):
    stop = {"StoppingCondition": {limit: 3600}}
    assert (
        parse_job(describe_job(TrainingJobStatus="Stopped", SecondaryStatus=state, **stop)).reason == reason
    )


def test_the_newest_jobs_are_listed_oldest_first_with_one_call(aws):
    account = Account("us-east-1")
    arn = "arn:aws:sagemaker:us-east-1:123456789012:training-job/job"
    newest = [
        {
            **describe_job(TrainingJobName=f"job-{number}", SecondaryStatus=None),
            "TrainingJobArn": arn,
        }
        for number in range(50)
    ]
    asked = {
        "SortBy": "CreationTime",
        "SortOrder": "Descending",
        "CreationTimeAfter": ANY,
        "MaxResults": 50,
    }
    with Stubber(account.client("sagemaker")) as stub:
        stub.add_response("list_training_jobs", {"TrainingJobSummaries": newest, "NextToken": "more"}, asked)
        listed = SageMakerJobs(account).list()
    assert [job.id for job in listed] == [f"job-{number}" for number in reversed(range(50))]


def test_a_job_before_its_training_has_no_hosts():
    resources = {"InstanceType": "ml.m5.large", "InstanceCount": 4}
    assert parse_job(describe_job(ResourceConfig=resources)).hosts == 0
    assert parse_job(describe_job(ResourceConfig=resources, TrainingStartTime=BEGAN)).hosts == 4


def test_hosts_of_instance_groups_are_counted():
    groups = [
        {"InstanceGroupName": name, "InstanceType": f"ml.{name}.large", "InstanceCount": count}
        for name, count in (("m5", 1), ("c5", 2))
    ]
    job = parse_job(describe_job(ResourceConfig={"InstanceGroups": groups}, TrainingStartTime=BEGAN))
    assert (job.hosts, job.nodes) == (3, "")


def test_a_running_job_has_the_status_message_of_the_platform():
    steps = [
        {"Status": "Starting", "StatusMessage": "Preparing"},
        {"Status": "Interrupted", "StatusMessage": "No capacity"},
    ]
    job = parse_job(
        describe_job(
            TrainingJobStatus="InProgress", SecondaryStatus="Interrupted", SecondaryStatusTransitions=steps
        )
    )
    assert (job.reason, job.restarts) == ("No capacity", 1)


@pytest.mark.parametrize(
    ("changes", "message"),
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
def test_the_cost_is_the_billable_time(changes, message):
    assert (
        parse_job(describe_job(**{"TrainingTimeInSeconds": 100, "BillableTimeInSeconds": 100} | changes)).cost
        == message
    )
