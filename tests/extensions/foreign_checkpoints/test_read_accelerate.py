"""Checkpoints of Accelerate: every item is read or rejected with a reason, and no code in them is executed."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from accel_runtime import Accelerator
from accel_runtime.backends.rng import RandomStates
from accel_runtime.checkpoint.training_state import RNGItemState
from accel_runtime.export.objects import NeedsCodeError, read_pickle, rewrite_file
from accel_runtime.export.save_model import add_aliases
from accel_runtime.extensions.foreign_checkpoints.accelerate_format import (
    read_accelerate_checkpoint,
    read_random_states,
)
from accel_runtime.extensions.foreign_checkpoints.folders import is_accelerate_checkpoint
from accel_runtime.storage.errors import CheckpointError
from accel_runtime.storage.schema import read_value

pytestmark = pytest.mark.usefixtures("on_the_cpu", "by_value")

DATA = Path(__file__).parents[2] / "data" / "accelerate-1.15.0"
WRITTEN = DATA / "checkpoints" / "checkpoint_0"
EXPECTED = json.loads((DATA / "expected.json").read_text())
LOADER = "Skip processed batches with accelerator.skip_first_batches(loader, n)"


@pytest.fixture
def folder(tmp_path):
    """Return a copy of the stored checkpoint."""
    return Path(shutil.copytree(WRITTEN, tmp_path / "checkpoint_0"))


def list_rejected(loaded_state):
    return {rejected.item: rejected.reason for rejected in loaded_state.refused}


# What Accelerate 1.15.0 wrote ------------------------------------------------------------


def test_only_a_checkpoint_of_accelerate_is_recognised(folder, tmp_path):
    assert is_accelerate_checkpoint(folder)
    assert not is_accelerate_checkpoint(tmp_path)
    assert not is_accelerate_checkpoint(folder / "model.safetensors")
    assert not is_accelerate_checkpoint(tmp_path / "gone")
    (folder / "checkpoint.json").touch()
    assert not is_accelerate_checkpoint(folder)


def test_a_folder_with_only_weights_is_not_a_checkpoint(tmp_path):
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / "pytorch_model.bin").touch()
    assert not is_accelerate_checkpoint(tmp_path)


def test_a_run_continues_from_a_checkpoint_of_accelerate():
    """Model, optimizer, scheduler and registered object load into prepared ones."""
    accelerator = Accelerator()
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=9.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=24)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    loaded_state = read_accelerate_checkpoint(WRITTEN, 0)
    model.load_state_dict(loaded_state.items["model"])
    assert loaded_state.items["optimizer"]["format"] == "torch"
    optimizer.load_state_dict(loaded_state.items["optimizer"]["state_dict"])
    scheduler.load_state_dict(loaded_state.items["scheduler"])
    assert model(torch.arange(24.0).view(12, 2) / 24).flatten().tolist() == pytest.approx(EXPECTED["output"])
    states = optimizer.state_dict()["state"]
    assert {str(k): state["exp_avg"].tolist() for k, state in states.items()} == EXPECTED["exp_avg"]
    assert states[0]["step"] == EXPECTED["optimizer_step"]
    assert (scheduler.scheduler.last_epoch, scheduler.get_last_lr()) == (
        EXPECTED["last_epoch"],
        EXPECTED["lr"],
    )
    registered = loaded_state.items["registered"]
    assert registered.pop("weights").tolist() == [0, 1, 2]
    assert registered == {"score": 0.75, "epochs": [0, 1]}
    assert loaded_state.step == EXPECTED["step"]
    assert loaded_state.world_size == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_draws_the_same_numbers_as_under_accelerate(rank):
    import numpy as np

    states_before = RandomStates.capture()
    states = read_random_states(WRITTEN)[rank].states
    assert states.kinds == ("torch", "python", "numpy")
    try:
        states.restore()
        random_numbers = {
            "torch": torch.rand(2).tolist(),
            "python": random.random(),
            "numpy": float(np.random.rand()),  # noqa: NPY002
        }
    finally:
        states_before.restore()
    assert random_numbers == EXPECTED["drawn"][rank]


def test_only_the_offset_of_loaders_is_missing():
    loaded_state = read_accelerate_checkpoint(WRITTEN, 1)
    assert loaded_state.items.keys() == {
        "model",
        "optimizer",
        "scheduler",
        "registered",
        "random",
    }
    assert list_rejected(loaded_state).keys() == {"loader"}
    assert LOADER in list_rejected(loaded_state)["loader"]


def test_random_states_of_a_rank_that_did_not_save_are_rejected():
    loaded_state = read_accelerate_checkpoint(WRITTEN, 2)
    assert list_rejected(loaded_state)["random"] == (
        "the checkpoint was written by 2 processes and has no random states of rank 2"
    )
    assert loaded_state.step == EXPECTED["step"]
    every = read_random_states(WRITTEN)
    for rank in (0, 1):
        item = read_accelerate_checkpoint(WRITTEN, rank).items["random"]
        assert read_value(RNGItemState, item).process == every[rank]


def test_the_state_of_a_device_is_read_by_its_index(folder):
    states = read_pickle(folder / "random_states_1.pkl")
    every = [torch.tensor([n], dtype=torch.uint8) for n in (5, 6)]
    torch.save(
        states | {"torch_cuda_manual_seed": every, "numpy_random_seed": states["numpy_random_seed"]},
        folder / "random_states_1.pkl",
    )
    read = [
        read_accelerate_checkpoint(folder, 1, torch.device(*name)).items["random"]["process"]
        for name in (("cuda", 1), ("cpu",))
    ]
    assert read[0]["device"]["cuda"].tolist() == [6]
    assert "device" not in read[1]
    assert (
        "the random states are not those of Accelerate"
        in list_rejected(read_accelerate_checkpoint(folder, 1, torch.device("cuda", 2)))["random"]
    )


# Other files it may have -----------------------------------------------------------------


def test_models_in_the_old_format_and_in_shards_are_read(folder):
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(OrderedDict(state), folder / "pytorch_model.bin")
    Accelerator().save_model(nn.Linear(2, 3), folder / "shards", max_shard_size=12)
    for path in (folder / "shards").iterdir():
        path.rename(folder / path.name.replace("model.safetensors.index", "model_1.safetensors.index"))
    for number, half in enumerate([["0.weight", "0.bias"], ["1.weight", "1.bias"]]):
        torch.save(
            {name: state[name] for name in half}, folder / f"pytorch_model_2-0000{number}-of-00002.bin"
        )
    file_by_name = {name: f"pytorch_model_2-0000{name[0]}-of-00002.bin" for name in state}
    (folder / "pytorch_model_2.bin.index.json").write_text(json.dumps({"weight_map": file_by_name}))
    loaded_state = read_accelerate_checkpoint(folder, 0)
    assert loaded_state.items["model"].keys() == loaded_state.items["model_2"].keys() == state.keys()
    assert all(loaded_state.items["model_2"][name].equal(state[name]) for name in state)
    assert loaded_state.items["model_1"]["weight"].shape == (3, 2)
    assert list_rejected(loaded_state).keys() == {"loader"}


def test_names_of_tied_weights_are_added_from_the_model(folder):
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    save_file({"0.weight": torch.ones(2, 2)}, folder / "model.safetensors", {"format": "pt"})
    model.load_state_dict(
        add_aliases(read_accelerate_checkpoint(folder, 0).items["model"], model.state_dict())
    )
    assert model[1].weight.equal(torch.ones(2, 2))


def test_several_objects_of_a_kind_are_numbered_and_a_gap_is_reported(folder):
    for kind, ending in (("optimizer", "bin"), ("scheduler", "bin"), ("model", "safetensors")):
        shutil.copy(folder / f"{kind}.{ending}", folder / f"{kind}_2.{ending}")
    shutil.copy(folder / "optimizer.bin", folder / "optimizer_1.bin")
    shutil.copy(folder / "custom_checkpoint_0.pkl", folder / "custom_checkpoint_2.pkl")
    (folder / "random_states_0.pkl").unlink()
    loaded_state = read_accelerate_checkpoint(folder, 1)
    assert {
        "optimizer",
        "optimizer_1",
        "optimizer_2",
        "model_2",
        "scheduler_2",
        "registered_2",
    } <= loaded_state.items.keys()
    reasons = list_rejected(loaded_state)
    assert reasons.keys() == {"scheduler_1", "model_1", "registered_1", "random", "step_counts", "loader"}
    assert (
        reasons["scheduler_1"] == f"{folder}/scheduler_1.bin is missing, but there is one with the number 2"
    )
    assert reasons["registered_1"].startswith(f"{folder}/custom_checkpoint_1.pkl is missing")
    assert reasons["random"].startswith(f"{folder}/random_states_0.pkl is missing")


def test_a_scaler_is_read_and_offsets_of_loaders_are_rejected(folder):
    torch.save({"scale": 1024.0, "growth_factor": 2.0}, folder / "scaler.pt")
    torch.save({"_num_yielded": 3}, folder / "dl_state_dict.bin")
    loaded_state = read_accelerate_checkpoint(folder, 0)
    assert loaded_state.items["scaler"] == {"scale": 1024.0, "growth_factor": 2.0}
    assert (
        "the position of loaders that others can use (dl_state_dict.bin)"
        in list_rejected(loaded_state)["loader"]
    )
    assert LOADER in list_rejected(loaded_state)["loader"]


def test_states_of_each_rank_are_rejected_with_the_command_that_merges_them(folder):
    (folder / "pytorch_model_fsdp_rank0.bin").touch()
    reasons = list_rejected(read_accelerate_checkpoint(folder, 0))
    assert "pytorch_model_fsdp_rank0.bin" in reasons["model"]
    assert "accelerate merge-weights" in reasons["model"]


def test_sharded_states_without_their_metadata_are_rejected_as_incomplete(folder):
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        (folder / name).mkdir()
    (folder / "model.safetensors").unlink()
    reasons = list_rejected(read_accelerate_checkpoint(folder, 0))
    assert "pytorch_model_fsdp_0 is not complete: it has no .metadata" in reasons["model"]
    assert "optimizer_0 is not complete: it has no .metadata" in reasons["optimizer"]


# Damage ----------------------------------------------------------------------------------

ITEMS = {
    "model.safetensors": "model",
    "optimizer.bin": "optimizer",
    "scheduler.bin": "scheduler",
    "custom_checkpoint_0.pkl": "registered",
    "random_states_1.pkl": "random",
    "random_states_0.pkl": "step_counts",
}


@pytest.mark.parametrize("fraction", [0.0, 0.5, 0.99])
@pytest.mark.parametrize("name", ITEMS)
def test_a_truncated_file_is_named_and_the_others_are_read(folder, name, fraction):
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: int(len(data) * fraction)])
    loaded_state = read_accelerate_checkpoint(folder, 1)
    assert list_rejected(loaded_state).keys() == {ITEMS[name], "loader"}
    assert re.match(rf"{folder}/{name} cannot be read", list_rejected(loaded_state)[ITEMS[name]])
    assert loaded_state.items.keys() == set(ITEMS.values()) - {ITEMS[name], "step_counts"}


@pytest.mark.parametrize("content", [[1, 2], {"a": "b"}, 3, None], ids=str)
@pytest.mark.parametrize("name", ["optimizer.bin", "random_states_0.pkl"])
def test_a_file_with_unexpected_content_is_named(folder, name, content):
    torch.save(content, folder / name)
    reasons = list_rejected(read_accelerate_checkpoint(folder, 0))
    item = ITEMS[name]
    assert "loader" in reasons
    assert str(folder / name) in reasons[item]


def test_a_weights_file_without_tensors_is_named(folder):
    (folder / "model.safetensors").unlink()
    torch.save({"x": "text"}, folder / "pytorch_model.bin")
    assert (
        list_rejected(read_accelerate_checkpoint(folder, 0))["model"]
        == f"{folder}/pytorch_model.bin does not contain weights: x is not a tensor"
    )


# Code ------------------------------------------------------------------------------------


class Payload:
    """Code in a pickle."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


class SetStatePayload:
    """Code in a pickle that is executed by `__setstate__`."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return SetStatePayload, ("",), {"path": str(self.path)}

    def __setstate__(self, state):
        Path(state["path"]).mkdir()


@pytest.mark.parametrize("payload", [Payload, SetStatePayload])
@pytest.mark.parametrize(
    "name", [*ITEMS, "scaler.pt", "pytorch_model.bin", "sampler.bin", "dl_state_dict.bin"]
)
def test_malicious_code_in_a_file_is_not_executed(folder, name, payload):
    if name == "pytorch_model.bin":
        (folder / "model.safetensors").unlink()
    marker = folder / "ran"
    bad = {"state": payload(marker), "param_groups": [], "step": 1}
    torch.save(bad, folder / name)
    loaded_state = read_accelerate_checkpoint(folder, 1)
    assert not marker.exists()
    item = {"scaler.pt": "scaler", "pytorch_model.bin": "model"}.get(name) or ITEMS.get(name, "loader")
    assert (
        str(folder / name) in list_rejected(loaded_state)[item] or name in list_rejected(loaded_state)[item]
    )
    with (folder / name).open("rb") as file:
        torch.load(file, weights_only=False)
    assert marker.exists()  # the payload works


class Score:
    """A class of the script."""


@pytest.mark.full
def test_the_command_in_the_error_converts_a_file_that_needs_code(folder):
    import numpy as np

    structured = np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f4")])
    torch.save(
        {"path": Path("a/b"), "names": np.array(["x", "y"]), "big": np.arange(3, dtype=">i4")},
        folder / "custom_checkpoint_0.pkl",
    )
    reason = list_rejected(read_accelerate_checkpoint(folder, 0))["registered"]
    assert re.match(
        rf"{folder}/custom_checkpoint_0.pkl was not read: it contains pathlib\S+, which only code", reason
    )
    command = shlex.split(reason.splitlines()[-1])
    assert command[0] == sys.executable  # a `python` on PATH may be another one
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr) == (0, "")
    loaded_state = read_accelerate_checkpoint(folder, 0)
    assert list_rejected(loaded_state).keys() == {"loader"}
    registered = loaded_state.items["registered"]
    assert registered.pop("big").tolist() == [0, 1, 2]
    assert registered == {"path": "a/b", "names": ["x", "y"]}
    with pytest.raises(CheckpointError, match=r"it\['s'\]\[1\] is a numpy.ndarray: change the saved state"):
        rewrite_file(folder / "custom_checkpoint_0.pkl", {"s": [1, structured]})
    with pytest.raises(CheckpointError, match=r"it\['score'\] is a .*Score: change the saved state"):
        rewrite_file(folder / "custom_checkpoint_0.pkl", {"score": Score()})
    assert read_accelerate_checkpoint(folder, 0).items["registered"].keys() == {
        "path",
        "names",
        "big",
    }  # unchanged


@pytest.mark.parametrize(
    "crafted",
    [
        "np.array([None])",
        "np.array([(1, None)], dtype=[('a', 'i8'), ('b', 'O')])",
        "np.array(['2020'], dtype='M8[D]')",
        "np.array(['x'])",
        "np.ma.masked_array([1], [True])",
    ],
)
def test_only_arrays_of_numbers_are_rebuilt(tmp_path, crafted):
    import numpy as np

    torch.save({"x": eval(crafted)}, tmp_path / "x")  # noqa: S307 - from the parameters above
    assert np
    with pytest.raises(NeedsCodeError, match=f"{tmp_path}/x was not read"):
        read_pickle(tmp_path / "x")


def test_an_array_with_too_few_bytes_for_its_shape_is_rejected(tmp_path):
    import numpy as np

    class WrongShape:
        def __reduce__(self):
            rebuild, arguments, state = np.arange(3).__reduce__()
            return rebuild, arguments, (state[0], (10**6,), *state[2:])

    torch.save(WrongShape(), tmp_path / "x")
    with pytest.raises(CheckpointError, match=r"24 bytes for an array of shape \(1000000,\)"):
        read_pickle(tmp_path / "x")


def test_an_expanded_tensor_is_refused(folder):
    state = read_pickle(folder / "optimizer.bin")
    state["state"][0]["exp_avg"] = torch.zeros(1).expand(1 << 40)
    torch.save(state, folder / "optimizer.bin")
    assert "its tensors need" in list_rejected(read_accelerate_checkpoint(folder, 0))["optimizer"]
