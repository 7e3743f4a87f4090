import pytest

from accel_cli.console import mask_arguments, mask_secrets


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("AWS_SECRET_ACCESS_KEY", "x", "***"), ("HF_TOKEN", "x", "***"), ("WANDB_API_KEY", "x", "***"),
        ("DB_PASSWORD", "x", "***"), ("GITHUB_PAT", "x", "***"), ("env.my_token", "x", "***"),
        ("PROXY", "http://me:pw@host/x", "http://***@host/x"), ("NCCL_DEBUG", "INFO", "INFO"),
        ("HF_TOKEN", "", ""), ("tokenizer_name", "bert", "bert"), ("volume_kms_key", "alias/x", "alias/x"), ("kms_api_key", "x", "***"), ("PATH", "/a:/b", "/a:/b"),
    ],
)  # fmt: skip
def test_secrets_are_hidden_and_the_rest_is_shown(name, value, shown):
    assert mask_secrets(name, value) == shown


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("--hf-token=abc --lr=0.1", "--hf-token=*** --lr=0.1"), ("--hf-token abc --lr 0.1", "--hf-token *** --lr 0.1"),
        ("wandb.api_key=abc optimizer.lr=0.1", "wandb.api_key=*** optimizer.lr=0.1"), ("+hf_token=abc", "+hf_token=***"),
        ("++db.password=abc ~model", "++db.password=*** ~model"), ("-token=abc", "-token=***"),
        ("--password -abc 0.1", "--password *** 0.1"), ("--auth --password abc", "--auth *** ***"),
        ("data=http://me:pw@host/x", "data=http://***@host/x"), ("http://me:pw@host/x?a=b", "http://***@host/x?a=b"),
        ("--epochs 3 train -- x", "--epochs 3 train -- x"),
    ],
)  # fmt: skip
def test_secrets_among_the_arguments_of_a_script_are_hidden(arguments, shown):
    """As options, as assignments of Hydra, and as values that begin with a hyphen."""
    assert mask_arguments(arguments.split()) == shown.split()
