"""Checkpoints that DeepSpeed writes now: what accel reads of them is bitwise what is in memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from accel_runtime.storage.deepspeed_manifest import open_deepspeed_checkpoint
from accel_runtime.storage.tensor_file import MergeRequest, merge_tensors

MAKER = Path(__file__).parents[1] / "data" / "deepspeed-0.19.8" / "make.py"


@pytest.mark.parametrize(
    "case",
    [
        "stage3-elsewhere",
        *(
            pytest.param(case, marks=pytest.mark.slow)
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
