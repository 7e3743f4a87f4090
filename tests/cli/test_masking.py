import pytest

from accel_cli.console import mask_secrets


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("AWS_SECRET_ACCESS_KEY", "x", "***"), ("HF_TOKEN", "x", "***"), ("WANDB_API_KEY", "x", "***"),
        ("DB_PASSWORD", "x", "***"), ("GITHUB_PAT", "x", "***"), ("env.my_token", "x", "***"),
        ("PROXY", "http://me:pw@host/x", "http://***@host/x"), ("NCCL_DEBUG", "INFO", "INFO"),
        ("HF_TOKEN", "", ""), ("volume_kms_key", "alias/x", "alias/x"), ("kms_api_key", "x", "***"), ("PATH", "/a:/b", "/a:/b"),
    ],
)  # fmt: skip
def test_secrets_are_hidden_and_the_rest_is_shown(name, value, shown):
    assert mask_secrets(name, value) == shown
