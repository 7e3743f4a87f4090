"""Conversion of Accelerate's configuration files for Amazon SageMaker."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from accel_cli.accelerate.config_conversion import Imported, convert
from accel_cli.errors import ProfileError
from accel_cli.profile import yaml_io
from accel_cli.profile.schema import Profile
from tests.cli.accelerate.test_accelerate import list_convertible_keys

# Written by `accelerate config` of 1.15.0, with a few arguments added by hand.
WRITTEN = """
additional_args:
  environment:
    HF_TOKEN: hf_secret
    HF_HOME: /opt/Cache
  aws_access_key_id: AKIASECRET
  volume_size: 200
base_job_name: accelerate-sagemaker-1
compute_environment: AMAZON_SAGEMAKER
debug: false
distributed_type: DATA_PARALLEL
dynamo_config: {}
ec2_instance_type: ml.p4d.24xlarge
enable_cpu_affinity: false
gpu_ids: all
iam_role_name: Training
image_uri: null
mixed_precision: bf16
num_machines: 2
profile: research
py_version: py38
pytorch_version: 1.10.2
region: eu-west-1
sagemaker_inputs_file: Data/Inputs.tsv
sagemaker_metrics_file: Metrics.tsv
transformers_version: 4.17.0
use_cpu: false
"""
LEAST = "compute_environment: AMAZON_SAGEMAKER\ndistributed_type: 'NO'\n"
P4D = "compute_environment: AMAZON_SAGEMAKER\ndistributed_type: DATA_PARALLEL\nec2_instance_type: ml.p4d.24xlarge\n"


def import_config(text: str) -> Imported:
    return convert(yaml_io.parse(text, "config.yaml").data, "config.yaml")


def import_with_args(lines: str, above: str = LEAST) -> Imported:
    return import_config(above + "additional_args:\n" + "".join(f"  {line}\n" for line in lines.splitlines()))


def list_problems(text: str) -> list[str]:
    with pytest.raises(ProfileError) as caught:
        import_config(text)
    return [str(problem) for problem in caught.value.problems]


def map_reasons(pairs: tuple[tuple[str, str], ...]) -> dict[str, str]:
    return {line.partition(": ")[0]: text for line, text in pairs}


def test_the_compiler_of_a_job_is_that_of_the_file():
    lines = "dynamo_config:\n  dynamo_backend: INDUCTOR\n  dynamo_mode: max-autotune\n"
    result = import_config(LEAST + lines)
    assert result.data["compile"] == {"backend": "inductor", "mode": "max-autotune"}
    assert "dynamo_config.dynamo_mode" not in map_reasons(result.left)


def test_a_file_written_by_accelerate_becomes_the_same_job():
    result = import_config(WRITTEN)
    launcher = Profile.model_validate(result.data).launcher.model_dump(exclude_none=True)
    expected = {
        "kind": "sagemaker",
        "aws_profile": "research",
        "region": "eu-west-1",
        "role": "Training",
        "instance_type": "ml.p4d.24xlarge",
        "instance_count": 2,
        "nproc_per_node": "auto",
        "base_job_name": "accelerate-sagemaker-1",
        "volume_size": 200,
    }
    assert {key: launcher[key] for key in expected} == expected
    assert not {"pytorch_version", "image_uri"} & set(launcher)
    assert result.data["mixed_precision"] == "bf16"
    assert result.data["env"] == {"HF_HOME": "/opt/Cache"}
    mapped = map_reasons(result.mapped)
    assert mapped["compute_environment"] == "launcher.kind: sagemaker"
    assert mapped["ec2_instance_type"] == "launcher.instance_type: ml.p4d.24xlarge"
    assert mapped["num_machines"] == "launcher.instance_count: 2"
    assert mapped["additional_args.environment.HF_HOME"] == "env.HF_HOME: /opt/Cache"


def test_unsupported_keys_are_omitted_with_a_reason():
    omitted = map_reasons(import_config(WRITTEN).left)
    assert set(omitted) == {
        "additional_args.environment.HF_TOKEN", "additional_args.aws_access_key_id", "distributed_type",
        "sagemaker_inputs_file", "sagemaker_metrics_file",
        "py_version", "pytorch_version", "transformers_version",
    }  # fmt: skip
    assert "accel needs torch 2.9 or newer" in omitted["pytorch_version"]
    assert "launcher.secrets.HF_TOKEN" in omitted["additional_args.environment.HF_TOKEN"]
    assert "launcher.aws_profile" in omitted["additional_args.aws_access_key_id"]
    assert "launcher.requirements" in omitted["transformers_version"]


def test_every_key_is_reported_exactly_once():
    result = import_config(WRITTEN)
    keys = sorted([*map_reasons(result.mapped), *map_reasons(result.left)])
    assert keys == sorted(list_convertible_keys(yaml_io.parse(WRITTEN, "config.yaml").data))


def test_no_secret_is_printed_or_written():
    result = import_config(WRITTEN)
    assert "secret" not in str(result.data).lower().replace("'secrets'", "")
    text = str([*result.mapped, *result.left]).lower()
    assert "hf_secret" not in text
    assert "akiasecret" not in text


def test_distributed_type_no_is_one_process_on_a_host():
    result = import_config(LEAST)
    assert result.data["launcher"]["nproc_per_node"] == 1
    assert map_reasons(result.mapped)["distributed_type"] == "launcher.nproc_per_node: 1"


def test_torch_distributed_in_additional_args_starts_a_process_for_each_gpu():
    result = import_with_args("distribution: {torch_distributed: {enabled: true}}")
    assert "nproc_per_node" not in result.data["launcher"]
    assert "torchrun" in map_reasons(result.mapped)["additional_args.distribution"]
    assert (
        "torchrun"
        in map_reasons(import_with_args("distribution: {mpi: {enabled: true}}").left)[
            "additional_args.distribution"
        ]
    )


@pytest.mark.parametrize("kind", ["ml.p3.16xlarge", "ml.p3dn.24xlarge", "ml.g5.12xlarge"])
def test_smddp_is_omitted_for_instance_types_without_it(kind):
    result = import_config(P4D.replace("ml.p4d.24xlarge", kind) + "image_uri: me/image:1\n")
    assert "torchrun trains on every GPU over NCCL" in map_reasons(result.left)["distributed_type"]
    assert "process_group_backend" not in result.data


def test_smddp_is_omitted_for_images_without_it():
    assert "needs an image that contains it" in map_reasons(import_config(P4D).left)["distributed_type"]


def test_smddp_is_used_with_a_custom_image():
    result = import_config(P4D + "image_uri: me/image:1\n")
    assert result.data["process_group_backend"] == "smddp"
    assert map_reasons(result.mapped)["distributed_type"] == "process_group_backend: smddp"


def test_model_parallelism_is_omitted_with_a_reason():
    omitted = map_reasons(import_config(LEAST.replace("'NO'", "MODEL_PARALLEL")).left)
    assert "model-parallel library" in omitted["distributed_type"]


def test_the_misspelled_instance_type_of_accelerate_is_corrected():
    result = import_config(P4D.replace("p4d", "p4dn"))
    assert result.data["launcher"]["instance_type"] == "ml.p4d.24xlarge"
    assert map_reasons(result.mapped)["ec2_instance_type"] == "launcher.instance_type: ml.p4d.24xlarge"
    below = import_with_args("instance_type: ml.p4dn.24xlarge")
    assert below.data["launcher"]["instance_type"] == "ml.p4d.24xlarge"


@pytest.mark.parametrize(
    ("version", "is_kept"), [("2.9.0", True), ("2.13", True), ("2.8.1", False), ("1.10.2", False)]
)
def test_a_supported_torch_version_is_kept(version, is_kept):
    result = import_config(f"{LEAST}pytorch_version: '{version}'\n")
    assert result.data["launcher"].get("pytorch_version") == (version if is_kept else None)
    assert ("pytorch_version" in map_reasons(result.mapped)) is is_kept


def test_the_torch_version_is_omitted_with_a_custom_image():
    result = import_config(LEAST + "image_uri: 1.dkr.ecr/Me:Tag\npytorch_version: '2.13'\n")
    assert result.data["launcher"]["image_uri"] == "1.dkr.ecr/Me:Tag"
    assert "pytorch_version" not in result.data["launcher"]
    assert "launcher.image_uri" in map_reasons(result.left)["pytorch_version"]


def test_estimator_arguments_become_keys_of_the_launcher():
    result = import_with_args("""\
use_spot_instances: true
max_run: 3600
max_wait: 7200
subnets: [subnet-1, subnet-2]
security_group_ids: [sg-1]
tags: [{Key: Team, Value: Vision}]
output_kms_key: alias/Out
volume_kms_key: alias/Vol
checkpoint_s3_uri: s3://Bucket/Ck
enable_network_isolation: yes
encrypt_inter_container_traffic: true
metric_definitions: [{Name: loss, Regex: 'loss: ([0-9.]+)'}]
source_dir: src
framework_version: '2.12'
instance_count: 3
role: Other
base_job_name: mine""")
    launcher = result.data["launcher"]
    expected = {
        "spot": True, "max_run": 3600, "max_wait": 7200, "subnets": ["subnet-1", "subnet-2"],
        "security_group_ids": ["sg-1"], "tags": {"Team": "Vision"}, "output_kms_key": "alias/Out",
        "volume_kms_key": "alias/Vol", "checkpoint_uri": "s3://Bucket/Ck", "network_isolation": True,
        "encrypt_traffic": True, "metrics": {"loss": "loss: ([0-9.]+)"}, "source_dir": "src",
        "pytorch_version": "2.12", "instance_count": 3, "role": "Other", "base_job_name": "mine",
    }  # fmt: skip
    assert {key: launcher[key] for key in expected} == expected
    assert result.left == ()
    assert map_reasons(result.mapped)["additional_args.tags"] == "launcher.tags: {Team: Vision}"
    assert (
        map_reasons(result.mapped)["additional_args.volume_kms_key"] == "launcher.volume_kms_key: alias/Vol"
    )


def test_tags_can_be_a_mapping_and_keep_alive_is_converted():
    result = import_with_args("tags: {Team: Vision}\nkeep_alive_period_in_seconds: 600")
    assert result.data["launcher"]["tags"] == {"Team": "Vision"}
    assert result.data["launcher"]["keep_alive"] == 600
    assert map_reasons(result.mapped)["additional_args.tags"] == "launcher.tags: {Team: Vision}"


def test_an_estimator_argument_overrides_the_key_of_the_file():
    result = import_with_args("instance_type: ml.g5.xlarge", P4D)
    assert result.data["launcher"]["instance_type"] == "ml.g5.xlarge"
    assert "take precedence" in map_reasons(result.left)["ec2_instance_type"]


def test_an_omitted_estimator_argument_keeps_the_key_of_the_file():
    result = import_with_args("framework_version: '1.10'", LEAST + "pytorch_version: '2.13'\n")
    assert result.data["launcher"]["pytorch_version"] == "2.13"


def test_other_estimator_arguments_are_omitted_with_a_reason():
    result = import_with_args("""\
hyperparameters: {lr: 0.1, epochs: 3}
output_path: s3://Bucket/out
input_mode: FastFile
debugger_hook_config: {S3OutputPath: s3://Bucket}
instance_tpye: ml.g5.xlarge
sagemaker_session: x""")
    omitted = map_reasons(result.left)
    assert "pass them to the script" in omitted["additional_args.hyperparameters"]
    assert "launcher.bucket" in omitted["additional_args.output_path"]
    assert "launcher.inputs" in omitted["additional_args.input_mode"]
    assert "does not have this setting" in omitted["additional_args.debugger_hook_config"]
    assert "did you mean instance_type?" in omitted["additional_args.instance_tpye"]
    assert "does not know this key" in omitted["additional_args.sagemaker_session"]
    assert len(omitted) == 6


def test_disabled_estimator_arguments_are_not_reported_as_unused():
    result = import_with_args("""\
debugger_hook_config: false
disable_profiler: true
use_spot_instances: false
keep_alive_period_in_seconds: 0
max_wait: null
input_mode: File
checkpoint_local_path: /opt/ml/checkpoints
environment: {}
tags: []""")
    assert result.left == ()
    assert result.data["launcher"].get("spot") in {None, False}
    assert "keep_alive" not in result.data["launcher"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("additional_args: {max_run: long}", "config.yaml: additional_args.max_run: expected a whole number of at least 0, got 'long'"),
        ("additional_args: {tags: Team}", "config.yaml: additional_args.tags: expected a list of entries with Key and Value"),
        ("additional_args: {tags: [{Key: a}]}", "config.yaml: additional_args.tags: expected a list of entries with Key and Value"),
        ("additional_args: {environment: [A]}", "config.yaml: additional_args.environment: expected keys and values"),
        ("additional_args: {environment: {A: [1]}}", "config.yaml: additional_args.environment.A: expected text, got [1]"),
        ("additional_args: {use_spot_instances: maybe}", "config.yaml: additional_args.use_spot_instances: expected true or false"),
        ("additional_args: 3", "config.yaml: additional_args: expected keys and values, got 3"),
        ("ec2_instance_type: large", "config.yaml: ec2_instance_type: launcher.instance_type: expected an instance type such as ml.g5.xlarge"),
        ("region: Paris", "config.yaml: region: launcher.region: expected text that matches"),
        ("additional_args: {checkpoint_s3_uri: /data}", "config.yaml: additional_args.checkpoint_s3_uri: launcher.checkpoint_uri: expected an address in S3"),
        ("additional_args: {use_spot_instances: true, keep_alive_period_in_seconds: 9}", "keep_alive: spot instances cannot be kept"),
        ("additional_args: {max_wait: 9}", "max_wait: only spot jobs wait"),
        ("additional_args: {subnets: [a]}", "subnets and security_group_ids need each other"),
        ("num_processes: 4", "config.yaml: num_processes: Accelerate does not know this key (it belongs to compute_environment: LOCAL_MACHINE)"),
        ("fsdp_config: {fsdp_version: 2}", "config.yaml: fsdp_config: Accelerate does not know this key (it belongs to compute_environment: LOCAL_MACHINE)"),
        ("regoin: x", "config.yaml: regoin: Accelerate does not know this key (did you mean region?)"),
    ],
)  # fmt: skip
def test_values_that_no_job_supports_are_problems_of_their_keys(lines, message):
    problems = list_problems(f"{LEAST}{lines}\n")
    assert len(problems) == 1, problems
    assert message in problems[0]


def test_all_mistakes_are_reported_at_once():
    problems = list_problems(
        LEAST + "regoin: x\nmixed_precision: fp64\nadditional_args: {max_run: a, volume_size: b}\n"
    )
    assert len(problems) == 4


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KEYS = """
    mixed_precision fp16 use_cpu debug gpu_ids num_machines dynamo_backend ec2_instance_type iam_role_name image_uri
    profile region base_job_name pytorch_version transformers_version py_version sagemaker_inputs_file
    sagemaker_metrics_file dynamo_config enable_cpu_affinity"""
ARGUMENTS = """
    environment tags metric_definitions subnets security_group_ids max_run max_wait use_spot_instances volume_size
    keep_alive_period_in_seconds hyperparameters distribution instance_type instance_count role image_uri
    framework_version checkpoint_s3_uri checkpoint_local_path debugger_hook_config rules input_mode HF_TOKEN nonsense"""


@given(
    st.dictionaries(st.sampled_from(KEYS.split()), ANYTHING, max_size=5),
    st.dictionaries(st.sampled_from(ARGUMENTS.split()), ANYTHING, max_size=5),
    st.sampled_from(["NO", False, "DATA_PARALLEL", "MODEL_PARALLEL"]),
)
@example({"sagemaker_inputs_file": {"": None, "0": None}}, {}, "NO")
def test_any_file_becomes_a_profile_with_all_keys_reported_or_problems(keys, arguments, kind):
    file = {
        **keys,
        "compute_environment": "AMAZON_SAGEMAKER",
        "distributed_type": kind,
        "additional_args": arguments,
    }
    try:
        result = convert(file, "config.yaml")
    except ProfileError as error:
        assert error.problems
        return
    Profile.model_validate(result.data)
    assert len(result.mapped) + len(result.left) == len(list_convertible_keys(file))
    assert all(text for _, text in (*result.mapped, *result.left))
