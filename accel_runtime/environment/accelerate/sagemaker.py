"""The keys of Accelerate's config file for training jobs of Amazon SageMaker."""

from __future__ import annotations

from accel_runtime.environment.accelerate import launch
from accel_runtime.environment.accelerate.setting import Choices, IntegerRange, Setting

__all__ = [
    "ADDITIONAL_ARGUMENTS",
    "DISTRIBUTED_TYPE",
    "INSTANCE_TYPE",
    "PYTORCH_VERSION",
    "PY_VERSION",
    "SETTINGS",
    "SMDDP_TYPES",
    "TRANSFORMERS_VERSION",
]

SMDDP_TYPES = ("ml.p4d.24xlarge", "ml.p4de.24xlarge")
"""Instance types that run SageMaker's data-parallel library; AWS has ended its support for P3."""
DISTRIBUTED_TYPE = Setting(
    launch.DISTRIBUTED_TYPE.key, values=Choices(("NO", "DATA_PARALLEL", "MODEL_PARALLEL"))
)
INSTANCE_TYPE = Setting("ec2_instance_type", values="instance type", profile_key="launcher.instance_type")
PYTORCH_VERSION = Setting("pytorch_version", values="text", profile_key="launcher.pytorch_version")
TRANSFORMERS_VERSION = Setting(
    "transformers_version", values="text", reason="list transformers in the file of launcher.requirements"
)
PY_VERSION = Setting("py_version", values="text", reason="the image determines the version of Python")
ADDITIONAL_ARGUMENTS = "additional_args"
"""The section with arguments of SageMaker's estimator."""
SETTINGS = (
    *launch.COMMON,
    launch.COMPUTE_ENVIRONMENT,
    DISTRIBUTED_TYPE,
    Setting("base_job_name", values="text", profile_key="launcher.base_job_name"),
    INSTANCE_TYPE,
    Setting("iam_role_name", values="text", profile_key="launcher.role"),
    Setting("image_uri", values="text", profile_key="launcher.image_uri"),
    Setting(launch.NUM_MACHINES.key, values=IntegerRange(1), profile_key="launcher.instance_count"),
    Setting("profile", values="text", profile_key="launcher.aws_profile"),
    PYTORCH_VERSION,
    Setting("region", values="text", profile_key="launcher.region"),
    Setting(
        "sagemaker_inputs_file",
        values="text",
        reason="write its channels in launcher.inputs: {train: s3://bucket/folder}",
    ),
    Setting(
        "sagemaker_metrics_file",
        values="text",
        reason="write its metrics in launcher.metrics: {loss: 'loss ([0-9.]+)'}",
    ),
    TRANSFORMERS_VERSION,
    PY_VERSION,
)
"""The keys of a file of `compute_environment: AMAZON_SAGEMAKER`, without its sections."""
