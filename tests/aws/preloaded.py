"""What the interpreter that forks `accel` imports for AWS, before the first command: it takes a second of each."""

import aws.calls  # noqa: F401 - it notes the calls of the command
import boto3
import sagemaker.core.helper.session_helper
import sagemaker.core.image_uris
import sagemaker.core.logs  # noqa: F401 - once torch is loaded, it makes torch create folders for its compiler
from aws.models import keep_models

keep_models()
_session = boto3.session.Session("nobody", "nothing", region_name="us-east-1")
for service in ("iam", "logs", "s3", "sagemaker", "sts"):
    _session.client(service)
