"""Functions of the entry point of the container that need no process."""

import json

import pytest

from accel_cli.extensions.sagemaker import entry

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (user@host)\nGCC version: 12\n"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n"


def variables(root, hosts=("algo-1",), **files):
    """Return the variables of the last of several hosts."""
    config = root / "input" / "config"
    config.mkdir(parents=True)
    for name, content in files.items():
        (config / f"{name}.json").write_text(json.dumps(content))
    return entry.build_variables(
        root, {"hosts": list(hosts), "current_host": hosts[-1], "network_interface_name": "lo"}
    )


def test_hosts_are_ordered_by_number(tmp_path):
    environ = variables(tmp_path, ["algo-1", "algo-11", "algo-12", "algo-2", "algo-10"])
    assert json.loads(environ["SM_HOSTS"]) == ["algo-1", "algo-2", "algo-10", "algo-11", "algo-12"]
    assert (environ["SM_CURRENT_HOST"], environ["SM_CURRENT_HOST_RANK"]) == ("algo-10", "2")
    assert (environ["NCCL_HOSTID"], environ["NCCL_SOCKET_IFNAME"]) == ("algo-10", "lo")
    assert "GLOO_SOCKET_IFNAME" not in variables(tmp_path / "alone")


def test_each_channel_has_a_variable_except_for_that_of_accel(tmp_path):
    channels = {"my-data.v2": {"TrainingInputMode": "File"}, "accel": {}, "train": {}}
    environ = variables(tmp_path, inputdataconfig=channels)
    folder = str(tmp_path / "input" / "data" / "my-data.v2")
    # SageMaker's toolkit has the second name, which a shell does not accept.
    assert environ["SM_CHANNEL_MY_DATA_V2"] == environ["SM_CHANNEL_MY-DATA.V2"] == folder
    assert json.loads(environ["SM_CHANNELS"]) == ["my-data.v2", "train"]
    assert "SM_CHANNEL_ACCEL" not in environ
    training_env = json.loads(environ["SM_TRAINING_ENV"])
    assert training_env["channel_input_dirs"]["train"] == environ["SM_CHANNEL_TRAIN"]
    assert (training_env["hosts"], training_env["model_dir"]) == (["algo-1"], environ["SM_MODEL_DIR"])


@pytest.mark.parametrize(
    ("driver", "libraries", "needed"),
    [
        (CLOSED, ["libcuda.so", "libcuda.so.1", "libcuda.so.580.65.06"], True),
        (OPEN, ["libcuda.so.1", "libcuda.so.580.65.06"], False),
        (OPEN, ["libcuda.so.1", "libcuda.so.575.57.08"], False),
        (OPEN, ["libcuda.so.1", "libcuda.so.580.100"], True),  # 100 is above 65
        (OPEN, [], False),
        ("", ["libcuda.so.580.65.06"], False),
        (None, ["libcuda.so.580.65.06"], False),
    ],
)
def test_driver_libraries_of_the_image_are_used_with_an_older_driver(tmp_path, driver, libraries, needed):
    compat = tmp_path / "compat"
    compat.mkdir()
    for name in libraries:
        (compat / name).touch()
    if driver is not None:
        (tmp_path / "version").write_text(driver)
    assert entry.needs_compat(tmp_path / "version", compat) is needed


def test_a_linked_folder_merges_source_files_and_prefers_those_of_the_platform(tmp_path):
    runs, checkpoints = tmp_path / "code" / "runs", tmp_path / "checkpoints"
    for file, text in (
        (runs / "a/new", "new"),
        (runs / "a/both", "source"),
        (checkpoints / "a/both", "saved"),
    ):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (runs / "link").symlink_to("a/new")
    entry.link_folder(runs, checkpoints)
    assert runs.resolve() == checkpoints
    assert {name: (checkpoints / name).read_text() for name in ("a/new", "a/both", "link")} == {
        "a/new": "new",
        "a/both": "saved",
        "link": "new",
    }


def test_a_missing_folder_is_linked_and_an_existing_file_is_kept(tmp_path):
    (tmp_path / "model").mkdir()
    entry.link_folder(tmp_path / "code" / "deep" / "out", tmp_path / "model")
    (tmp_path / "code" / "deep" / "out" / "x").touch()
    assert (tmp_path / "model" / "x").exists()
    (tmp_path / "code" / "file").touch()
    with pytest.raises(FileExistsError):
        entry.link_folder(tmp_path / "code" / "file", tmp_path / "model")
    assert (tmp_path / "code" / "file").is_file()


def test_a_secret_is_read_by_name_or_arn_or_as_a_key_of_an_object(manager):
    arn = manager["arn"]
    references = {"A": "wandb", "B": arn, "C": f"{arn}:key::", "D": f"{arn}:number::"}
    assert entry.read_secrets(references, "us-east-1") == {
        "A": manager["wandb"],
        "B": manager["object"],
        "C": "inner",
        "D": "7",
    }


@pytest.mark.parametrize(
    ("secret", "reason"),
    [
        ("absent", "secrets.KEY: absent cannot be read: ResourceNotFoundException: "),
        ("forbidden", "forbidden cannot be read: ClientError: An error occurred (AccessDeniedException)"),
        ("binary", "binary is binary, and a variable holds text"),
        ("{arn}:other::", "is not a JSON object with the key other"),
        ("{arn}:null::", "{arn}:null:: has no value for the key null"),
    ],
)
def test_an_unreadable_secret_is_one_message_without_its_value(aws, manager, secret, reason):
    if secret == "forbidden":
        aws.fault("GetSecretValue", "denied")
    with pytest.raises(entry.JobError) as caught:
        entry.read_secrets({"KEY": secret.format(**manager)}, "us-east-1")
    assert reason.format(**manager) in str(caught.value)
    assert "inner" not in str(caught.value)


def test_a_missing_boto3_is_an_error_with_the_install_command(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "boto3", None)
    with pytest.raises(
        entry.JobError, match=r"secrets\.KEY: this image has no boto3 to read it\. Choose an image"
    ):
        entry.read_secrets({"KEY": "wandb"}, "us-east-1")
    assert entry.read_secrets({}, None) == {}
