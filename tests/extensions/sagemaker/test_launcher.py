"""The SageMaker section of a profile: validation without AWS, and its plan."""

import os
from dataclasses import replace

import pytest
from pydantic import ValidationError
from support.launchers import plans
from support.launchers.launch_specs import build_spec

from accel_cli.errors import UsageError
from accel_cli.extensions.sagemaker.launcher import SageMaker
from accel_cli.planning.launch_options import Request
from accel_cli.planning.machine import Machine
from accel_cli.profile import planner
from accel_runtime.environment.settings import Parallel, Settings

ARN = "arn:aws:secretsmanager:us-east-1:123456789012:secret:wandb-AbCdEf"


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A folder with a script, in which the launch is made."""
    (tmp_path / "train.py").write_text("")
    (tmp_path / "requirements.txt").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_wait": 90000}, "max_wait: only spot jobs wait"),
        ({"spot": True, "max_run": 100, "max_wait": 99}, "max_wait: expected at least max_run, 100"),
        ({"spot": True, "keep_alive": 60}, "keep_alive: spot instances cannot be kept"),
        ({"subnets": ["subnet-1"]}, "subnets and security_group_ids need each other"),
        ({"security_group_ids": ["sg-1"]}, "subnets and security_group_ids need each other"),
        ({"network_isolation": True, "secrets": {"A": "b"}}, "network_isolation: secrets need a network"),
        ({"network_isolation": True, "requirements": "r.txt"}, "network_isolation: requirements need a network"),
        ({"instance_type": "g5.xlarge"}, "expected an instance type such as ml.g5.xlarge"),
        ({"instance_count": 0}, "greater than or equal to 1"),
        ({"nproc_per_node": 0}, "greater than or equal to 1"),
        ({"job_name": "-a"}, "letters, digits and hyphens"),
        ({"job_name": "a" * 64}, "at most 63"),
        ({"inputs": {"accel": "s3://b/x"}}, "but not accel as the key, got 'accel'"),
        ({"inputs": {"a b": "s3://b/x"}}, "as the key, got 'a b'"),
        ({"inputs": {"train": "https://b/x"}}, "s3://bucket/folder"),
        ({"inputs": {"train": {"uri": "s3://b/x", "input_mode": "Pipe"}}}, "'File' or 'FastFile'"),
        ({"bucket": "s3://mine"}, "without s3://"),
        ({"model_dir": "/opt/ml/model"}, "a folder below"),
        ({"checkpoint_dir": "../runs"}, "a folder below"),
        ({"checkpoint_dir": "."}, "a folder below"),
        ({"secrets": {"A B": "x"}}, "the name of an environment variable as the key, got 'A B'"),
        ({"secrets": {"A": f"{ARN}:key:AWSPREVIOUS:"}}, "ARN:key::, since a stage or version is not supported"),
        ({"secrets": {"A": f"{ARN}:key::version"}}, "ARN:key::, since a stage or version is not supported"),
        ({"region": "Frankfurt"}, "pattern"),
        ({"pytorch_version": 2.9}, "expected text in quotes such as '2.9'"),
        ({"exclude": ["../x"]}, "expected a pattern of files"),
        ({"include": ["a", "!b"]}, "expected a pattern of files"),
        ({"keep_alive": 21601}, "21600"),
    ],
)  # fmt: skip
def test_an_invalid_section_is_an_error_with_a_reason(options, message):
    with pytest.raises(ValidationError, match=message.replace("(", r"\(")):
        SageMaker(**options)


def test_max_wait_of_spot_defaults_to_a_day_more_than_max_run():
    assert SageMaker(max_run=100).total_limit is None
    assert SageMaker(spot=True, max_run=100).total_limit == 100 + 86400
    assert SageMaker(spot=True, max_run=100, max_wait=200).total_limit == 200


def test_the_plan_has_the_instances_and_the_command_of_a_host(tree):
    section = SageMaker(
        instance_type="ml.p4d.24xlarge",
        instance_count=2,
        requirements="requirements.txt",
        checkpoint_dir="runs",
    )
    spec = build_spec("--lr", "1e-4", env={"NCCL_DEBUG": "INFO"}, mixed_precision="bf16")
    plan = planner.build_plan(section, spec)
    assert (plan.nnodes, plan.device, plan.process_description) == (
        2,
        "ml.p4d.24xlarge",
        "a process for each GPU",
    )
    assert SageMaker(instance_type="ml.m5.large").plan(build_spec()).process_description == ""
    assert SageMaker(nproc_per_node=4).plan(build_spec()).nproc_per_node == 4
    run = plan.job.run
    assert (run["kind"], run["target"], run["args"]) == ("script", "train.py", ["--lr", "1e-4"])
    assert (run["cwd"], run["requirements"], run["checkpoint_dir"]) == (".", "requirements.txt", "runs")
    # Every instance has a checkpoint folder of its own.
    assert run["settings"] == Settings(mixed_precision="bf16", shared_files=False).to_env()
    assert SageMaker().plan(build_spec()).job.run["settings"] == Settings().to_env()
    assert run["env"] == {"NCCL_DEBUG": "INFO"}
    assert plan.job.section.instance_count == 2


def test_device_cpu_starts_one_process_on_an_instance_with_gpus(tree):
    section, spec = SageMaker(instance_type="ml.p4d.24xlarge", instance_count=2), build_spec(device="cpu")
    plan = section.plan(spec)
    assert (plan.process_description, plan.nproc_per_node) == ("", 1)
    assert section.get_world_sizes(spec, plan) == (2,)


def test_the_arn_of_a_secret_can_end_with_a_key():
    secrets = {"A": ARN, "B": f"{ARN}:key::", "C": f"{ARN}:key", "D": "wandb"}
    assert SageMaker(secrets=secrets).secrets == secrets


def test_a_script_in_a_subfolder_starts_there_and_the_source_folder_is_sent(tree, monkeypatch):
    (tree / "work").mkdir()
    (tree / "work" / "a.py").write_text("")
    monkeypatch.chdir(tree / "work")
    run = SageMaker(source_dir="..").plan(build_spec(target=str(tree / "work" / "a.py"))).job.run
    assert (run["cwd"], run["target"]) == ("work", "a.py")


def test_the_absolute_path_of_a_script_can_contain_a_linked_folder(tree, monkeypatch):
    for name in ("work", "scripts"):
        (tree / name).mkdir()
    (tree / "scripts" / "a.py").write_text("")
    (tree / "scripts" / "b.py").symlink_to("a.py")
    (tree / "link").symlink_to("scripts")
    monkeypatch.chdir(tree / "work")
    run = SageMaker(source_dir="..").plan(build_spec(target=str(tree / "link" / "b.py"))).job.run
    assert run["target"] == "../scripts/b.py"


def test_libraries_of_sagemaker_are_used_with_a_custom_image(tree):
    section = SageMaker(image_uri="mine:1")
    run = section.plan(build_spec(process_group_backend="smddp")).job.run
    assert "smddp" in run["settings"].values()


@pytest.mark.parametrize("shape", [{}, {"parallel": Parallel(dp_shard=8), "mixed_precision": "bf16"}])
def test_accel_launch_on_a_host_has_the_settings_and_launcher_of_the_profile(tree, home, shape):
    section = SageMaker(instance_count=2, nproc_per_node=4, max_restarts=2, ranks="0,3", stall_timeout=60)
    run = planner.build_plan(section, build_spec(**shape)).job.run
    flag, *sets = run["options"]
    assert (flag, set(sets[::2])) == ("--no-profile", {"--set"})
    hosts = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2", "SM_MASTER_PORT": "7777"}
    request = Request("train.py", options={"no_profile": True, "set": sets[1::2]})
    machine = Machine(8, "cuda", ("A100",) * 4)
    resolved, plan = plans.prepare(request, {**hosts, **run["settings"]}, machine)
    assert resolved.profile.settings == Settings(**shape, shared_files=False)
    launcher = resolved.profile.launcher
    assert (launcher.kind, launcher.nnodes, launcher.rdzv_endpoint) == ("torchrun", 2, "algo-1:7777")
    assert (launcher.max_restarts, launcher.ranks, launcher.stall_timeout) == (2, "0,3", 60)
    assert (launcher.shutdown_timeout, launcher.rdzv_timeout) == (110, 1800)
    assert (plan.nproc_per_node, plan.device, plan.agent.node_rank) == (4, "cuda", 1)


def test_a_module_and_a_program_are_launched_as_such(tree):
    for kind, option in (("module", "-m"), ("program", "--no-python")):
        run = SageMaker().plan(replace(build_spec(), kind=kind)).job.run
        assert run["options"][:2] == ["--no-profile", option]


def test_builtin_modules_of_accel_send_no_source_folder(tree):
    builtin_job = replace(build_spec(target="accel_runtime.selfcheck", kind="module"), is_builtin=True)
    plan = SageMaker(source_dir="/etc", requirements="gone.txt").plan(builtin_job)
    assert plan.job.source is None
    assert plan.job.run["requirements"] is None
    assert SageMaker().plan(build_spec()).job.source == "."


@pytest.mark.parametrize(
    ("options", "request_options", "message"),
    [
        ({}, {"target": "/etc/hosts"}, "The script /etc/hosts is not in"),
        ({"source_dir": "sub"}, {}, "The script train.py is not in"),
        ({"source_dir": "sub"}, {"kind": "module"}, "The current directory is not in"),
        ({"requirements": "gone.txt"}, {}, "File not found: gone.txt"),
        ({"requirements": "/etc/hosts"}, {}, "launcher.requirements /etc/hosts is not in"),
        ({}, {"device": "mps"}, "device: mps is not available on SageMaker"),
        ({}, {"process_group_backend": "smddp"}, "smddp needs an image with"),
        ({}, {"env": {"HF_TOKEN": "abc"}}, "env.HF_TOKEN looks like a secret"),
        ({"secrets": {"A": "x"}}, {"env": {"A": "1"}}, "A is in both env and launcher.secrets"),
        ({}, {"env": {"A": "ä" * 65535}}, "env.A is too long: 131,072 bytes, and Linux accepts 131,071. Pass it in a file"),
    ],
)  # fmt: skip
def test_unsupported_requests_are_rejected_without_aws(tree, options, request_options, message):
    (tree / "sub").mkdir()
    with pytest.raises(UsageError, match=message):
        SageMaker(**options).plan(build_spec(**request_options))


def test_an_argument_that_linux_does_not_accept_is_rejected(tree):
    assert SageMaker().plan(build_spec("--x", "a" * 131_071)).job.run["args"]
    with pytest.raises(UsageError, match="Argument 2 of the script is too long: 131,072 bytes"):
        SageMaker().plan(build_spec("--x", "a" * 131_072))


def test_arguments_that_are_not_valid_text_are_passed_byte_for_byte(tree):
    raw = os.fsdecode(b"\xff\xfe")
    assert os.fsencode(SageMaker().plan(build_spec(raw)).job.run["args"][0]) == b"\xff\xfe"
