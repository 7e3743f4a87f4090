"""Export and import of weights and objects: all ranks return once the files exist, or all raise."""

from __future__ import annotations

import io
import os
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from accel_runtime import Accelerator, ProjectConfiguration, utils
from accel_runtime.storage.errors import CheckpointError


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))


# Models ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["10GB", 30], ids=["one file", "shards"])
def test_all_ranks_see_an_exported_model_and_load_it_into_a_prepared_one(ranks, tmp_path, size):
    def run(folder, size):
        accelerator = Accelerator(mixed_precision="bf16")
        model = accelerator.prepare(network())
        accelerator.save_model(model, folder, max_shard_size=size)
        names = sorted(path.name for path in folder.iterdir())
        torch.manual_seed(4)
        other = accelerator.prepare(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)))
        accelerator.load_model(other, folder)
        same = map(torch.equal, accelerator.get_state_dict(other).values(), network().state_dict().values())
        return all(same), names

    results = ranks.run(run, tmp_path / "deep" / "export", size)
    count = 1 if size == "10GB" else 4
    assert all(same and len(names) == count + (count > 1) for same, names in results)
    tensors = {name: t for path in tmp_path.rglob("*.safetensors") for name, t in load_file(path).items()}
    assert sorted(network().state_dict()) == sorted(tensors)


@pytest.mark.parametrize("writers", ["all", "pair", "apart"])
def test_a_write_error_is_raised_on_all_ranks_with_the_writing_rank(clusters, tmp_path, writers):
    def run(folder, each):
        accelerator = Accelerator(project_config=ProjectConfiguration(save_on_each_node=each))
        folder = folder / str(accelerator.process_index) if each else folder
        try:
            accelerator.save_model(network(), folder)
        except CheckpointError as error:
            accelerator.wait_for_everyone()
            return str(error)
        return None

    if writers == "apart":  # each rank is a machine, and the second of three cannot write
        (tmp_path / "1").touch()
        messages = clusters["apart"].run(run, tmp_path, True)
        assert len(set(messages)) == 1
        assert re.match(
            rf"save_model failed on rank 1: Cannot write the model to {tmp_path}/1: ", messages[0]
        )
        assert [(tmp_path / str(rank) / "model.safetensors").exists() for rank in range(3)] == [
            True,
            False,
            True,
        ]
        return
    (tmp_path / "file").touch()
    messages = clusters[1 if writers == "all" else 2].run(run, tmp_path / "file", False)
    who = "save_model failed on rank 0: " if writers == "pair" else ""
    assert len(set(messages)) == 1
    assert re.match(rf"{who}Cannot write the model to {tmp_path}/file: .*File exists", messages[0])


def test_save_on_each_node_writes_on_every_node(clusters, tmp_path):
    def run(folder):
        accelerator = Accelerator(project_config=ProjectConfiguration(save_on_each_node=True))
        accelerator.save_model(network(), folder / str(accelerator.process_index))
        return sorted(path.name for path in folder.glob("*/model.safetensors"))

    assert clusters["apart"].run(run, tmp_path) == [["model.safetensors"] * 3] * 3


def test_concurrent_exports_to_one_directory_leave_complete_weights(clusters, tmp_path):
    def run(folder):
        accelerator = Accelerator(project_config=ProjectConfiguration(save_on_each_node=True))
        for _ in range(5):
            accelerator.save_model(network(), folder, max_shard_size=30)
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
        accelerator.load_model(model, folder)
        return model[0].weight.equal(network()[0].weight)

    assert clusters["apart"].run(run, tmp_path) == [True] * 3
    assert not list(tmp_path.glob(".*"))


def test_a_load_error_on_one_rank_changes_no_rank(pair, tmp_path):
    def run(folder):
        accelerator = Accelerator()
        model = accelerator.prepare(network())
        before = [tensor.clone() for tensor in accelerator.get_state_dict(model).values()]
        try:
            accelerator.load_model(model, folder / str(accelerator.process_index))
        except CheckpointError as error:
            return str(error), all(map(torch.equal, before, accelerator.get_state_dict(model).values()))
        return None

    for rank, kinds in enumerate([(2, 3), (2, 4)]):
        Accelerator().save_model(
            nn.Sequential(nn.Linear(*kinds), nn.Linear(kinds[1], 2)), tmp_path / str(rank)
        )
    for message, unchanged in pair.run(run, tmp_path):
        assert unchanged
        assert "0.weight has shape [4, 2] in the file and [3, 2] in the model" in message
        assert str(tmp_path / "1") in message


def test_an_export_as_pickle_is_rejected_with_the_alternative(tmp_path):
    with pytest.raises(
        ValueError, match=r"cannot write pickles.*accelerator.save\(accelerator.get_state_dict\(model\)"
    ):
        Accelerator().save_model(network(), tmp_path, safe_serialization=False)
    with pytest.raises(ValueError, match=r"Invalid max_shard_size '10 gigs': expected a number of bytes"):
        Accelerator().save_model(network(), tmp_path, max_shard_size="10 gigs")
    assert not list(tmp_path.iterdir())


def test_tied_weights_keys_of_a_model_select_the_omitted_weight(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    Accelerator().save_model(model, tmp_path)
    assert list(load_file(tmp_path / "model.safetensors")) == ["0.weight"]
    model._tied_weights_keys = ["0.weight"]
    Accelerator().save_model(model, tmp_path)
    assert list(load_file(tmp_path / "model.safetensors")) == ["1.weight"]


# Single files ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "safe"), [("state.safetensors", True), ("state.bin", True), ("state.bin", False)]
)
def test_saved_objects_load_independent_of_the_file_name(tmp_path, name, safe):
    accelerator = Accelerator()
    state = {"x": torch.arange(3.0), "y": torch.tensor(True)}
    accelerator.save(state, tmp_path / name, safe_serialization=safe)
    for loaded in (
        accelerator.load(tmp_path / name),
        accelerator.load(str(tmp_path / name), map_location="cpu"),
        utils.load(io.BytesIO((tmp_path / name).read_bytes())),
        utils.load(tmp_path / name, torch.device("cpu")),
    ):
        assert {key: value.tolist() for key, value in loaded.items()} == {"x": [0, 1, 2], "y": True}
    assert all(tensor.is_meta for tensor in accelerator.load(tmp_path / name, "meta").values())


def test_numpy_values_of_an_object_load_as_numbers_and_tensors(tmp_path):
    import numpy as np

    state = {
        "best": np.float64(0.5),
        "history": [np.arange(4).reshape(2, 2).T],
        "epoch": 3,
        "name": "run",
        "t": (1, None),
    }
    utils.save(state, tmp_path / "state")
    loaded = utils.load(tmp_path / "state")
    assert loaded.pop("history")[0].equal(torch.tensor([[0, 2], [1, 3]]))
    assert loaded == {"best": 0.5, "epoch": 3, "name": "run", "t": (1, None)}
    assert type(loaded["best"]) is float


def test_save_without_an_accelerator_writes_once(pair, tmp_path):
    def run(folder, each):
        from accel_runtime.backends import current_backend

        utils.save(
            {"x": torch.ones(1)}, folder / f"{current_backend().topology.rank}.safetensors", each, True
        )
        utils.wait_for_everyone()
        return sorted(path.name for path in folder.iterdir())

    assert pair.run(run, tmp_path, False) == [["0.safetensors"]] * 2


class Payload:
    """Code in a pickle."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_load_does_not_execute_code_in_a_file(tmp_path):
    torch.save({"fine": 1, "bad": Payload(tmp_path / "ran")}, tmp_path / "state.bin")
    for file in (tmp_path / "state.bin", io.BytesIO((tmp_path / "state.bin").read_bytes())):
        with pytest.raises(CheckpointError, match=r"was not read: it contains posix.mkdir, which only code"):
            Accelerator().load(file)
    assert not (tmp_path / "ran").exists()
    torch.load(tmp_path / "state.bin", weights_only=False)
    assert (tmp_path / "ran").exists()  # the payload works


def test_a_class_in_safe_globals_is_loaded(tmp_path):
    torch.save({"x": Trusted(3)}, tmp_path / "state.bin")
    with pytest.raises(CheckpointError, match=r"contains .*Trusted, which only code"):
        utils.load(tmp_path / "state.bin")
    import numpy as np

    with torch.serialization.safe_globals([Trusted, np.ndarray, np.dtype]):
        trusted = set(torch.serialization.get_safe_globals())
        assert utils.load(tmp_path / "state.bin")["x"].number == 3
        torch.save(np.arange(3), tmp_path / "array.bin")
        assert utils.load(tmp_path / "array.bin").equal(torch.arange(3))
        assert set(torch.serialization.get_safe_globals()) == trusted


class Trusted:
    def __init__(self, number):
        self.number = number


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (None, "gone.bin", "File not found: .*gone.bin"),
        (None, "gone.safetensors", "gone.safetensors cannot be read"),
        (b"", "state.bin", "state.bin cannot be read"),
        (b"no file of torch", "state.bin", "state.bin cannot be read"),
        (b"PK\x03\x04 cut off", "state.bin", "state.bin cannot be read"),
        (b"\xff\xff\xff\xff\xff\xff\xff\xff{", "state", "state cannot be read"),
        (b"cos\nsystem\n(S'true'\ntR.", "state.bin", "state.bin was not read|state.bin cannot be read"),
    ],
)
def test_an_unreadable_file_is_named(tmp_path, content, name, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as raised:
        utils.load(tmp_path / name)
    assert str(tmp_path / name) in str(raised.value)


def test_unsupported_options_of_load_are_rejected(tmp_path):
    save_file({"x": torch.ones(1)}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=r"weights_only=True only.*torch.load\(..., weights_only=False\)"):
        Accelerator().load(tmp_path / "x.safetensors", weights_only=False)
    with pytest.raises(TypeError, match="one device"):
        Accelerator().load(tmp_path / "x.safetensors", {"cuda:0": "cpu"})
