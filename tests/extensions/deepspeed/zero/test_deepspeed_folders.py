"""Checkpoints that DeepSpeed writes now: what accel reads of them is bitwise what is in memory."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_model

from accel_runtime.extensions.foreign_checkpoints.deepspeed_manifest import open_deepspeed_checkpoint
from accel_runtime.storage.tensor_file import MergeRequest, merge_tensors

pytest.importorskip(
    "deepspeed.runtime", reason="deepspeed is in an environment of its own: make test-deepspeed"
)

OF_ACCELERATE = Path(__file__).parents[3] / "data" / "accelerate-1.15.0" / "checkpoints" / "checkpoint_0"
MAKER = Path(__file__).parents[3] / "data" / "deepspeed-0.19.8" / "make.py"


@pytest.mark.parametrize(
    "case",
    [
        "stage3-elsewhere",
        *(
            pytest.param(case, marks=pytest.mark.full)
            for case in (
                "stage1",
                "stage1-bf16",
                "stage2",
                "stage2-bf16",
                "stage2-elastic",
                "stage2-offload",
                "stage3-bf16",
                "stage3-offload",
                "universal2",
            )
        ),
    ],
)
def test_a_new_checkpoint_has_the_weights_and_moments_in_memory(case, tmp_path):
    environ = {**os.environ, "PYTHONWARNINGS": "ignore"}
    subprocess.run([sys.executable, MAKER, tmp_path, case], check=True, env=environ)
    expected = load_file(tmp_path / case / "expected.safetensors")
    found = {}
    with open_deepspeed_checkpoint(tmp_path / case / "checkpoint") as snapshot:
        for item in ("model", "optimizer"):
            merge_tensors(snapshot, tmp_path / f"{item}.safetensors", MergeRequest(item))
            found |= load_file(tmp_path / f"{item}.safetensors")
        assert snapshot.checkpoint.manifest.step == 3
    for name, tensor in expected.items():
        kind, _, parameter = name.partition(".")
        stored = found[parameter if kind in {"weight", "buffer"} else f"state.model.{parameter}.{kind}"]
        assert stored.to(tensor.dtype).equal(tensor), name


def load_and_compare(case, stage):
    """Load a checkpoint of DeepSpeed into ZeRO; return the names of tensors that differ from those in DeepSpeed's memory."""
    from unittest import mock

    from accel_runtime import Accelerator

    spec = importlib.util.spec_from_file_location("make_deepspeed_data", MAKER)
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    with mock.patch.dict(os.environ, {"ACCEL_DEEPSPEED_STAGE": stage}):
        accelerator = Accelerator()
    model, optimizer = accelerator.prepare(*maker.build())
    accelerator.load_state(MAKER.parent / case / "checkpoint", strict=False)
    expected = load_file(MAKER.parent / case / "expected.safetensors")
    view = accelerator._run.strategy.open_state([model], [optimizer.optimizer])
    found = {}
    for name, parameter in view.models[0].named_parameters():
        found[f"weight.{name}"] = parameter
        found |= {f"{key}.{name}": value for key, value in view.optimizers[0].state[parameter].items()}
    full = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in found.items()
    }
    assert optimizer.steps == 3
    return [
        name for name in expected.keys() & full.keys() if not full[name].float().equal(expected[name].float())
    ]


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_checkpoints_of_deepspeed_load_into_zero_of_any_stage(clusters, stage):
    for case in ("stage3-sub-groups", "accelerate", "stage1-bf16-fp32-gradients"):
        assert clusters[3].run(load_and_compare, case, stage) == [[]] * 3


def load_tied_folder(folder, stage):
    """Return the weights of a stage after a load of a folder of Accelerate."""
    from unittest import mock

    from support.training.models import TokenNet

    from accel_runtime import Accelerator

    with mock.patch.dict(os.environ, {"ACCEL_DEEPSPEED_STAGE": stage}):
        accelerator = Accelerator()
    model = TokenNet(7, 4, tied=True)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.load_state(folder)
    assert optimizer.steps == 1
    return accelerator.get_state_dict(model, everywhere=True)


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_tied_weights_that_accelerate_stores_once_load_into_zero_of_any_stage(clusters, tmp_path, stage):
    from support.training.models import TokenNet

    model = TokenNet(7, 4, tied=True)
    optimizer = torch.optim.AdamW(model.parameters())
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.step()
    folder = Path(shutil.copytree(OF_ACCELERATE, tmp_path / "folder"))
    for name in ("scheduler.bin", "custom_checkpoint_0.pkl"):
        (folder / name).unlink()
    save_model(model, folder / "model.safetensors")
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")
    assert len(load_file(folder / "model.safetensors")) < len(model.state_dict())
    for state in clusters[3].run(load_tied_folder, folder, stage):
        torch.testing.assert_close(state, dict(model.state_dict()), atol=0, rtol=0)
