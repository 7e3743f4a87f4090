"""The hardware that torch finds on this machine."""

from __future__ import annotations

import json
import subprocess
import sys

import torch


def test_the_probe_prints_the_hardware_as_one_line_of_json():
    command = [sys.executable, "-m", "accel_runtime.torch_probe"]
    hardware = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    there = torch.accelerator.is_available()
    assert hardware["torch"] == torch.__version__
    assert len(hardware["devices"]) == (torch.accelerator.device_count() if there else 0)
    assert hardware["accelerator"] == (torch.accelerator.current_accelerator().type if there else None)
    assert hardware["bf16"] in ([True, False] if there else [False])
