"""AWS accounts: the source of the region, retries, and error messages of one line."""

import re
import subprocess
import sys

import pytest

from accel_cli.errors import AccelError, UsageError
from accel_cli.extensions.sagemaker import aws
from accel_cli.extensions.sagemaker.aws import Account, get_error_code, is_unknown_job
from accel_cli.launchers.job_service import UnreachableError


@pytest.fixture(autouse=True)
def nobody(monkeypatch, tmp_path):
    """No configuration of AWS but what a test writes."""
    import os

    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return tmp_path


@pytest.fixture
def somebody(nobody, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    return nobody


def configured(folder, text):
    (folder / "config").write_text(text)


def refused(name, message="", operation="CreateTrainingJob", status=400):
    from botocore.exceptions import ClientError

    answer = {
        "Error": {"Code": name, "Message": message},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    return ClientError(answer, operation)


def format_error(error, account=None, doing="start the job"):
    """What becomes of an error."""
    with pytest.raises(AccelError) as caught, (account or Account("eu-west-1")).translate_errors(doing):
        raise error
    assert "\n" not in str(caught.value)
    return caught.value


def test_the_region_of_the_profile_has_the_highest_precedence(nobody, monkeypatch):
    configured(nobody, "[default]\nregion = eu-north-1\n[profile work]\nregion = eu-south-1\n")
    assert Account().region == "eu-north-1"
    assert Account(aws_profile="work").region == "eu-south-1"
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-2")
    assert Account().region == "us-east-2"
    monkeypatch.setenv("AWS_REGION", "us-west-1")
    assert Account().region == "us-west-1"
    assert Account(region="us-east-1").region == "us-east-1"
    assert Account(region="us-east-1").session.region_name == "us-east-1"


def test_a_missing_region_is_an_error_with_the_places_to_set_it():
    with pytest.raises(UsageError, match=r"No AWS region is set\. Set launcher\.region.*aws configure"):
        Account().region  # noqa: B018


def test_an_unknown_aws_profile_is_an_error_with_the_existing_ones(nobody):
    configured(nobody, "[profile research]\nregion = eu-south-1\n[profile work]\n")
    with pytest.raises(UsageError) as caught:
        Account(aws_profile="reserch").region  # noqa: B018
    assert "no profile 'reserch': it has research, work. Did you mean research?" in str(caught.value)


def test_missing_credentials_are_an_error_with_the_command_that_creates_them(nobody):
    account = Account("us-east-1")
    with (
        pytest.raises(UsageError, match=r"No AWS credentials found\. Run aws configure"),
        account.translate_errors("ask"),
    ):
        account.client("sts").get_caller_identity()


def test_an_expired_login_is_an_error_with_the_command_and_the_profile(nobody):
    configured(
        nobody,
        "[profile work]\nsso_start_url = https://x\nsso_region = eu-west-1\nsso_account_id = 1\nsso_role_name = a\n",
    )
    account = Account("us-east-1", "work")
    with pytest.raises(UsageError, match="Run aws sso login --profile work"), account.translate_errors("ask"):
        account.client("sts").get_caller_identity()


def test_an_invalid_aws_configuration_is_an_error_of_one_line(nobody, monkeypatch):
    configured(nobody, "nonsense\n")
    with pytest.raises(UsageError, match="Cannot read the AWS configuration: Unable to parse"):
        Account("us-east-1").client("sts")
    configured(nobody, "")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "many")
    with pytest.raises(UsageError, match=r"Invalid AWS configuration: .*many"):
        Account("us-east-1").client("sts")


def test_a_throttled_request_is_retried_and_reported_once(aws, capsys):
    account = Account("us-east-1")
    for kind in ("throttled", "broken"):
        aws.fault("ListTrainingJobs", kind)
    assert account.client("sagemaker").list_training_jobs()["TrainingJobSummaries"] == []
    assert aws.calls() == ["sagemaker:ListTrainingJobs"] * 3
    words = "AWS is busy or does not answer (ListTrainingJobs); trying again"
    assert capsys.readouterr().err == f"accel: {words}\n"
    aws.fault("ListTrainingJobs", "throttled")
    account.client("sagemaker").list_training_jobs()
    assert capsys.readouterr().err == "", "the same burst"


def test_a_service_that_stays_throttled_is_unreachable(aws, monkeypatch):
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    aws.fault("ListTrainingJobs", "throttled", times=None)
    account = Account("us-east-1")
    with pytest.raises(UnreachableError, match="Cannot list: AWS is too busy or has a problem"):  # noqa: SIM117
        with account.translate_errors("list"):
            account.client("sagemaker").list_training_jobs()
    assert aws.calls() == ["sagemaker:ListTrainingJobs"] * 2


def test_a_network_failure_is_reported_as_unreachable(somebody, monkeypatch, capsys):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    account = Account("us-east-1")
    with (
        pytest.raises(UnreachableError, match="Cannot ask: AWS does not answer"),
        account.translate_errors("ask"),
    ):
        account.client("sts").get_caller_identity()
    assert (
        capsys.readouterr().err == "accel: AWS is busy or does not answer (GetCallerIdentity); trying again\n"
    )


def test_an_unknown_region_is_distinguished_from_a_network_failure():
    from botocore.exceptions import EndpointConnectionError

    error = EndpointConnectionError(endpoint_url="https://api.sagemaker.us-esat-1.amazonaws.com/")
    message = format_error(error, Account("us-esat-1"))
    assert type(message) is UsageError
    assert "SageMaker is not known to be in region 'us-esat-1'. Did you mean us-" in str(message)


PASS_ROLE = (
    "User: arn:aws:iam::1:user/bob is not authorized to perform: iam:PassRole on resource: arn:aws:iam::1:role/x "
    "because no identity-based policy allows the iam:PassRole action"
)
QUOTA = (
    "The account-level service limit 'ml.p3.2xlarge for training job usage' is 0 Instances, with current utilization "
    "of 0 Instances and a request delta of 1 Instances. Please use AWS Service Quotas to request an increase."
)
ENUM = (
    "1 validation error detected: Value 'ml.x.y' at 'resourceConfig.instanceType' failed: " + "ml.a, " * 900
)


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (refused("ExpiredTokenException"), UsageError, "have expired. Run aws sso login"),
        (refused("InvalidClientTokenId", "The security token is invalid", status=403), UsageError, "AWS does not know the access key of the default"),
        (refused("AccessDeniedException", PASS_ROLE), UsageError, "user/bob is not authorized to perform: iam:PassRole on resource"),
        (
            refused("AccessDenied", PASS_ROLE.replace("PassRole", "GetRole")),
            UsageError,
            "allows the iam:GetRole action. Ask an administrator for the permission.",
        ),
        (refused("403", "Forbidden", "HeadBucket"), UsageError, "AWS denied HeadBucket: Forbidden"),
        (refused("SlowDown", status=503), UnreachableError, "AWS is too busy or has a problem"),
        (refused("InternalFailure", status=500), UnreachableError, "(CreateTrainingJob: 500 InternalFailure)"),
        (
            refused("ResourceLimitExceeded", QUOTA),
            UsageError,
            "request an increase. Request a higher quota at https://console.aws.amazon.com/servicequotas/home/services/",
        ),
        (
            refused("ResourceLimitExceeded", "The requested resource training-job/ml.p2.xlarge is not available in this region"),
            UsageError,
            "training-job/ml.p2.xlarge is not available in this region. Request a higher quota",
        ),
        (refused("ResourceInUse"), UsageError, "Cannot start the job: a training job of this name exists already"),
        (refused("ValidationException", "Could not assume role arn:x"), UsageError, "with ValidationException: Could not assume role arn:x."),
        (refused("ValidationException", ENUM), UsageError, "ValidationException: 1 validation error"),
        (refused("NoSuchBucket", operation="PutObject"), UsageError, "AWS refused PutObject with NoSuchBucket"),
        (
            refused("Brand\nNew", "line one\nline two"),
            UsageError,
            "Cannot start the job: AWS refused CreateTrainingJob with BrandNew: line one line two.",
        ),
    ],
)  # fmt: skip
def test_a_rejected_request_is_one_sentence(error, kind, words):
    if "\n" in get_error_code(error):
        error.response["Error"]["Code"] = "BrandNew"
    message = format_error(error)
    assert type(message) is kind
    assert words in str(message)
    assert len(str(message)) < 700


@pytest.mark.parametrize(
    ("code", "text", "is_unknown"),
    [
        ("ValidationException", "Requested resource not found.", True),  # SageMaker's; moto's is another
        ("ValidationException", "1 validation error detected", False),
        ("ThrottlingException", "Requested resource not found.", False),
    ],
)
def test_a_job_is_unknown_by_the_text_of_sagemaker(code, text, is_unknown):
    assert is_unknown_job(refused(code, text, "DescribeTrainingJob")) is is_unknown


@pytest.mark.parametrize(
    ("region", "host"),
    [("cn-north-1", "console.amazonaws.cn"), ("us-gov-west-1", "console.amazonaws-us-gov.com")],
)
def test_the_console_url_depends_on_the_aws_partition(region, host):
    assert f"https://{host}/servicequotas" in str(
        format_error(refused("ResourceLimitExceeded", QUOTA), Account(region))
    )


def test_errors_that_are_not_from_aws_are_raised_unchanged():
    with pytest.raises(ZeroDivisionError), Account("us-east-1").translate_errors("count"):
        1 / 0  # noqa: B018
    with pytest.raises(UsageError, match="as it was"), Account("us-east-1").translate_errors("count"):
        raise UsageError("as it was")


def test_a_missing_boto3_is_an_error_with_the_install_command(tmp_path):
    (tmp_path / "boto3.py").write_text("raise ImportError('No module named boto3')")
    code = "from accel_cli.extensions.sagemaker.aws import Account\nAccount('us-east-1').client('sts')"
    process = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{code}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "'boto3>=1.43.90'" in process.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("code", "cure"),
    [
        ("InvalidClientTokenId", r"AWS does not know the access key of profile team \(InvalidClientTokenId\): .*aws configure --profile team"),
        ("UnrecognizedClientException", r"AWS does not know the access key .* another partition than region eu-west-1"),
        ("SignatureDoesNotMatch", r"the secret key of profile team does not belong to its access key, or the clock"),
    ],
)  # fmt: skip
def test_keys_that_aws_rejects_have_a_cure(code, cure):
    message = "The security token included in the request is invalid."
    text = str(format_error(refused(code, message, status=403), Account("eu-west-1", "team")))
    assert re.search(f"^Cannot start the job: {cure}", text), text


def test_version_2_of_the_sagemaker_sdk_is_refused(monkeypatch):
    versions = {"sagemaker": "2.257.7"}
    monkeypatch.setattr(aws, "version", versions.__getitem__)
    with pytest.raises(
        UsageError, match=r"cannot run beside the SageMaker SDK 2\.257\.7: .* update the SDK to version 3"
    ):
        aws.import_sdk("logs")
    versions["sagemaker"] = "3.27.0"
    assert aws.import_sdk("logs").__name__ == "sagemaker.core.logs"
