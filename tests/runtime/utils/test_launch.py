"""`PrepareForLaunch`, `patch_environment` and `write_basic_config`."""

from __future__ import annotations

import json
import os

import pytest
import torch
from torch.multiprocessing import start_processes

from accel_runtime import Accelerator
from accel_runtime.utils import PrepareForLaunch, patch_environment, write_basic_config


def test_variables_are_set_in_a_block_and_restored_at_its_end(monkeypatch):
    monkeypatch.setenv("KEPT", "before")
    monkeypatch.delenv("NEW", raising=False)
    with pytest.raises(KeyError), patch_environment(kept=1, New=True):
        inside = os.environ["KEPT"], os.environ["NEW"], os.environ["NOT_THERE"]
    with patch_environment(kept=1, New=True):
        inside = os.environ["KEPT"], os.environ["NEW"]
    assert inside == ("1", "True")
    assert os.environ["KEPT"] == "before"
    assert "NEW" not in os.environ


@pytest.fixture
def restored():
    """Restore the environment after a test that sets the variables of a rank."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.usefixtures("restored")
def test_prepare_for_launch_sets_the_rank_and_calls_the_function():
    def function(*args):
        return args, [os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]

    calls = []
    os.environ |= {"WORLD_SIZE": "4", "NPROC": "2", "NODE_RANK": "1"}
    PrepareForLaunch(lambda *args: calls.append(function(*args)), "XLA")(1, "a")
    PrepareForLaunch(lambda *args: calls.append(function(*args)), distributed_type="MULTI_CPU")(1, "a", "b")
    assert calls == [(("a",), [None, None, None]), (("a", "b"), ["3", "1", "2"])]


def record(folder):
    accelerator = Accelerator()
    ranks = accelerator.gather(torch.tensor([accelerator.process_index])).tolist()
    (folder / str(accelerator.process_index)).write_text(json.dumps(ranks))
    accelerator.end_training()


def test_processes_of_a_script_rendezvous_through_a_file(tmp_path):
    output_folder = tmp_path / "found"
    output_folder.mkdir()
    with patch_environment(world_size=2, accelerate_debug_rdv_file=tmp_path / "meet"):
        start_processes(PrepareForLaunch(record, debug=True), (output_folder,), nprocs=2, start_method="fork")
    assert [json.loads((output_folder / str(rank)).read_text()) for rank in range(2)] == [[0, 1]] * 2


@pytest.mark.slow
def test_write_basic_config_does_not_overwrite_a_profile(home, caplog):
    path = write_basic_config(mixed_precision="bf16")
    assert "mixed_precision: bf16" in path.read_text()
    before = path.read_text()
    assert write_basic_config("fp16") is False
    assert path.read_text() == before
    assert "exists and was not changed" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"save_location": "x.json"}, "accel config default --profile"),
        ({"mixed_precision": "fp8"}, "no, bf16, fp16"),
    ],
)
def test_invalid_arguments_of_write_basic_config_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        write_basic_config(**options)
