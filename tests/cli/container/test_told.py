"""What the platform's files become, without a process."""

import json

import pytest

from accel_cli.container import told
from accel_cli.container.problem import ContainerError


def written(folder, hosts, host, **files):
    said = {"hosts": hosts, "current_host": host, "network_interface_name": "eth0"}
    for name, content in {
        "resourceconfig": {**said, "current_instance_type": "ml.m5.large"},
        **files,
    }.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def variables(folder, found, **more):
    return told.variables(folder, found, machine={"NUM_GPUS": 8, "NUM_CPUS": 96}, more=more)


def test_twelve_hosts_are_numbered_as_a_person_counts(tmp_path):
    names = sorted(f"algo-{number}" for number in range(1, 13))
    found = told.read(written(tmp_path, names, "algo-10"))
    assert found.hosts == tuple(f"algo-{number}" for number in range(1, 13))
    assert (found.rank, found.hosts[0]) == (9, "algo-1")
    assert variables(tmp_path, found)["SM_CURRENT_HOST_RANK"] == "9"


def test_a_channel_of_any_name_is_found_and_that_of_accel_is_not_among_them(tmp_path):
    channels = {"my-data.v2": {"TrainingInputMode": "File"}, "accel": {}, "train": {}}
    found = told.read(written(tmp_path, ["algo-1"], "algo-1", inputdataconfig=channels))
    said = variables(tmp_path, found)
    folder = str(tmp_path / "input" / "data" / "my-data.v2")
    # The second is the toolkit's own, which no shell can write.
    assert said["SM_CHANNEL_MY_DATA_V2"] == said["SM_CHANNEL_MY-DATA.V2"] == folder
    assert json.loads(said["SM_CHANNELS"]) == ["my-data.v2", "train"]
    assert "SM_CHANNEL_ACCEL" not in said


def test_hyperparameters_are_there_as_sagemakers_toolkit_has_them(tmp_path):
    given = {"lr": "0.1", "name": "it's", "mp_parameters": '{"hybrid_shard_degree": 2}', "a=b": "1"}
    found = told.read(written(tmp_path, ["algo-1"], "algo-1", hyperparameters=given))
    said = variables(tmp_path, found)
    assert (said["SM_HP_LR"], said["SM_HP_NAME"]) == ("0.1", "it's")
    assert json.loads(said["SM_HP_MP_PARAMETERS"]) == {"hybrid_shard_degree": 2}
    assert json.loads(said["SM_HPS"])["lr"] == 0.1
    assert not [name for name in said if "=" in name]


def test_the_model_parallel_configuration_of_the_profile_is_a_hyperparameter_too(tmp_path):
    found = told.read(written(tmp_path, ["algo-1"], "algo-1"))
    said = variables(tmp_path, found, mp_parameters={"tensor_parallel_degree": 4})
    assert json.loads(said["SM_HP_MP_PARAMETERS"]) == {"tensor_parallel_degree": 4}


def test_everything_is_in_one_variable_too(tmp_path):
    found = told.read(written(tmp_path, ["algo-1"], "algo-1", inputdataconfig={"train": {}}))
    said = variables(tmp_path, found)
    whole = json.loads(said["SM_TRAINING_ENV"])
    assert whole["channel_input_dirs"] == {"train": said["SM_CHANNEL_TRAIN"]}
    assert (whole["hosts"], whole["num_gpus"], whole["model_dir"]) == (["algo-1"], 8, said["SM_MODEL_DIR"])


@pytest.mark.parametrize("host", ["algo-3", None])
def test_files_that_do_not_name_the_hosts_are_refused(tmp_path, host):
    if host:
        written(tmp_path, ["algo-1", "algo-2"], host)
    with pytest.raises(ContainerError, match=r"resourceconfig\.json"):
        told.read(tmp_path)
