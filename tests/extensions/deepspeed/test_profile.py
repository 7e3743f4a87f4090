"""The section `deepspeed` of a profile: its file, its sources, and what it excludes."""

from __future__ import annotations

import json

import pytest
from support.launchers import plans
from support.processes.commands import call_accel

from accel_cli.errors import UsageError
from accel_cli.extensions.sagemaker import service
from accel_cli.launchers import LAUNCHERS
from accel_cli.planning.launch_options import Request
from accel_cli.planning.machine import Machine
from accel_cli.profile import yaml_io

FILE = {
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "overlap_comm": True},
    "bf16": {"enabled": True},
    "gradient_accumulation_steps": 4,
    "train_micro_batch_size_per_gpu": "auto",
}
PROJECT = """\
schema_version: 1
launcher:
  kind: torchrun
  nproc_per_node: 2
device: cpu
mixed_precision: no
deepspeed:
  stage: auto
  config_file: conf/ds.json
"""


@pytest.fixture
def accel(tmp_path, monkeypatch, home, capfd):
    """Return a function that calls a command in a project with a JSON file."""
    (tmp_path / "conf").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "conf/ds.json").write_text(json.dumps(FILE))
    (tmp_path / "accel.yaml").write_text(PROJECT)
    (tmp_path / "train.py").write_text("print(1)\n")
    monkeypatch.chdir(tmp_path)
    return lambda *args: call_accel(capfd, *args)


def test_explain_shows_every_value_with_its_source(accel):
    result = accel("launch", "--explain", "train.py")
    assert result.returncode == 0, result.stderr
    for line in (
        "layout: DeepSpeed ZeRO 2 (optimizer on cpu)",
        "* deepspeed.stage: 2  [conf/ds.json: zero_optimization.stage]",
        "* deepspeed.offload_optimizer: cpu  [conf/ds.json: zero_optimization.offload_optimizer.device]",
        "  deepspeed.offload_param: no  [default]",
        "* mixed_precision: bf16  [conf/ds.json: bf16.enabled]",
        "* gradient_accumulation_steps: 4  [conf/ds.json: gradient_accumulation_steps]",
        "  ACCEL_MIXED_PRECISION=bf16",
        "  zero_optimization.overlap_comm: True  [conf/ds.json]",
        "  train_micro_batch_size_per_gpu: auto  [conf/ds.json]",
    ):
        assert line in result.stdout.splitlines()


def test_a_key_of_the_profile_is_the_source_of_what_the_file_leaves_open(accel):
    result = accel("launch", "--explain", "--set", "deepspeed.gradient_clipping=1", "train.py")
    assert "* deepspeed.gradient_clipping: 1.0  [--set]" in result.stdout
    assert "  gradient_clipping: 1.0  [deepspeed.gradient_clipping]" in result.stdout


@pytest.mark.parametrize("folder", [".", "conf", "sub"])
def test_the_file_is_found_beside_the_profile_from_any_folder(accel, folder, tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    (tmp_path / folder / "train.py").write_text("print(1)\n")
    monkeypatch.chdir(tmp_path / folder)
    result = accel("launch", "--dry-run", "train.py")
    assert f"ACCEL_DEEPSPEED_CONFIG_FILE={tmp_path}/conf/ds.json" in result.stdout


def test_the_file_of_an_option_or_a_variable_is_relative_to_the_current_folder(accel, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path / "conf")
    (tmp_path / "conf/b.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    options = ("--set", "deepspeed.stage=auto", "--set", "deepspeed.config_file=b.json")
    result = accel("launch", "--no-profile", "--dry-run", *options, "../train.py")
    assert f"ACCEL_DEEPSPEED_CONFIG_FILE={tmp_path}/conf/b.json" in result.stdout
    monkeypatch.setenv("ACCEL_DEEPSPEED_STAGE", "3")
    monkeypatch.setenv("ACCEL_DEEPSPEED_CONFIG_FILE", "b.json")
    result = accel("launch", "--dry-run", "../train.py")
    assert f"ACCEL_DEEPSPEED_CONFIG_FILE={tmp_path}/conf/b.json" in result.stdout


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--mixed-precision", "fp16"], ["ds.json", "mixed_precision: fp16 (--mixed-precision)"]),
        (["--mixed-precision", "no"], ["ds.json", "mixed_precision: no (--mixed-precision)"]),
        (["--set", "gradient_accumulation_steps=2"], ["ds.json", "gradient_accumulation_steps: 2 (--set)"]),
        (["--set", "gradient_accumulation_steps=1"], ["ds.json", "gradient_accumulation_steps: 1 (--set)"]),
        (["--set", "deepspeed.stage=3"], ["ds.json", "deepspeed.stage"]),
        (["--set", "parallel.dp_shard=auto"], ["parallel.dp_shard", "deepspeed.stage: auto", "accel.yaml:8"]),
        (["--set", "fully_shard.cpu_offload=true"], ["fully_shard.cpu_offload", "deepspeed.stage: auto"]),
        (["--set", "device=mps"], ["device", "deepspeed.stage: auto"]),
        (["--set", "device=xla"], ["device", "deepspeed.stage: auto"]),
        (["--set", "launcher.kind=xla", "--set", "device=auto"], ["launcher.kind: xla", "deepspeed.stage"]),
        (["--set", "deepspeed.config_file=gone.json"], ["gone.json", "deepspeed.config_file"]),
    ],
)
def test_a_contradiction_names_both_places_before_anything_starts(accel, options, words):
    result = accel("launch", *options, "train.py")
    assert result.returncode == 2
    assert all(word in result.stderr for word in words), result.stderr


def test_a_number_format_that_the_file_has_too_is_accepted(accel):
    assert accel("launch", "--dry-run", "--mixed-precision", "bf16", "train.py").returncode == 0


@pytest.mark.parametrize(
    "content", ["{", '{"pipeline": {"stages": 2}}', '{"zero_optimization": {"stge": 2}}']
)
def test_an_invalid_file_is_an_error_of_every_command_that_plans(accel, content, tmp_path):
    (tmp_path / "conf/ds.json").write_text(content)
    for command in (
        ["launch", "train.py"],
        ["test"],
        ["config", "validate", "--project"],
        ["config", "show"],
    ):
        result = accel(*command)
        assert (result.returncode, "ds.json" in result.stderr) == (2, True), command


def test_config_set_writes_a_path_that_is_right_from_its_file(accel, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path / "conf")
    assignments = ["deepspeed.config_file=ds.json", "deepspeed.stage=2"]
    assert accel("config", "set", "--project", *assignments).returncode == 0
    assert "  config_file: conf/ds.json" in (tmp_path / "accel.yaml").read_text().splitlines()
    assert accel("config", "set", "--profile", "a", *assignments).returncode == 0
    assert (
        accel("config", "get", "--profile", "a", "deepspeed.config_file").stdout
        == f"{tmp_path}/conf/ds.json\n"
    )
    assert "stage: 2" in (tmp_path / "accel.yaml").read_text()
    assert accel("config", "unset", "--project", "deepspeed").returncode == 0
    assert "deepspeed" not in (tmp_path / "accel.yaml").read_text()


def test_a_profile_that_is_imported_elsewhere_still_finds_its_file(accel, tmp_path):
    assert accel("config", "import", "accel.yaml", "--profile", "copy").returncode == 0
    assert (
        accel("config", "get", "--profile", "copy", "deepspeed.config_file").stdout
        == f"{tmp_path}/conf/ds.json\n"
    )


def test_deepspeed_that_is_missing_is_an_error_before_anything_starts(accel, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    result = accel("launch", "train.py")
    assert result.returncode == 2
    assert "DeepSpeed is not installed. Install it: " in result.stderr


def test_a_folder_named_deepspeed_is_not_the_package(accel, tmp_path, monkeypatch):
    (tmp_path / "deepspeed").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert "is not installed" in accel("launch", "train.py").stderr


SENDING = {
    "kubernetes": {"image": "x"},
    "ray": {},
    "sagemaker": {"instance_type": "ml.g5.12xlarge", "region": "eu-west-1", "image_uri": "me/x:1"},
    "ssh": {"hosts": ["a", "b"], "sync": True},
}


@pytest.mark.parametrize("kind", SENDING)
def test_a_launcher_that_sends_files_passes_the_path_in_them_or_refuses(accel, kind, tmp_path, monkeypatch):
    values = {"kind": kind, **SENDING[kind]}
    profile = {
        "schema_version": 1,
        "launcher": values,
        "deepspeed": {"stage": "auto", "config_file": "conf/ds.json"},
    }
    (tmp_path / "accel.yaml").write_text(yaml_io.dump(profile))
    options = ["--offline"] if kind == "sagemaker" else []
    result = accel("launch", "--dry-run", *options, "train.py")
    assert result.returncode == 0, result.stderr
    if kind != "sagemaker":  # which prints the request only
        assert "ACCEL_DEEPSPEED_CONFIG_FILE=conf/ds.json" in result.stdout
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/train.py").write_text("print(1)\n")
    monkeypatch.chdir(tmp_path / "sub")
    result = accel("launch", "--dry-run", *options, "train.py")
    assert result.returncode == 2
    assert "Cannot send" in result.stderr
    assert "deepspeed.config_file" in result.stderr


def test_a_job_of_sagemaker_gets_the_path_in_its_source(accel, tmp_path):
    profile = {
        "schema_version": 1,
        "launcher": {"kind": "sagemaker", **SENDING["sagemaker"]},
        "deepspeed": {"stage": "auto", "config_file": "conf/ds.json"},
    }
    (tmp_path / "accel.yaml").write_text(yaml_io.dump(profile))
    plan = plans.prepare(Request("train.py"), {}, Machine(1))[1]
    assert plan.job.run["settings"]["ACCEL_DEEPSPEED_CONFIG_FILE"] == "conf/ds.json"
    (tmp_path / "conf/.gitignore").write_text("*\n")
    with pytest.raises(UsageError, match=r"conf/ds\.json is needed, but is not sent"):
        service._select_source(plan.job)


@pytest.mark.parametrize("kind", ["kubernetes", "ray"])
def test_a_file_that_is_not_sent_is_refused(accel, kind, tmp_path):
    profile = {
        "schema_version": 1,
        "launcher": {"kind": kind, **SENDING[kind], "exclude": ["*.json"]},
        "deepspeed": {"stage": "auto", "config_file": "conf/ds.json"},
    }
    (tmp_path / "accel.yaml").write_text(yaml_io.dump(profile))
    result = accel("launch", "--dry-run", "train.py")
    assert result.returncode == 2
    assert "conf/ds.json is needed, but is not sent" in result.stderr


def test_other_launchers_of_several_nodes_pass_the_path_itself(accel, tmp_path):
    assert LAUNCHERS["slurm"]().sent_folder is None
    result = accel("launch", "--dry-run", "--set", "launcher.kind=slurm", "train.py")
    assert f"ACCEL_DEEPSPEED_CONFIG_FILE={tmp_path}/conf/ds.json" in result.stdout
