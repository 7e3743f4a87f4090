import os
import sys

import torch

from accel_cli.planning import machine
from accel_cli.planning.machine import Machine


def test_the_child_process_says_what_torch_finds():
    found = machine.detect(os.environ)
    assert found.problem is None
    assert found.torch == torch.__version__
    assert len(found.devices) == (torch.accelerator.device_count() if torch.accelerator.is_available() else 0)


def test_a_python_without_torch_is_told_in_one_line(monkeypatch, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = machine.detect(os.environ)
    assert found.problem.startswith("Cannot import torch: ImportError: no torch here. Reinstall it: ")
    assert found.cpus > 0


def test_an_interpreter_that_does_not_start_is_told(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert "Cannot detect the devices of torch" in machine.detect(os.environ).problem


def test_the_summary_counts_equal_devices():
    assert Machine(8, "cuda", ("H100", "H100", "A10")).summary == "2 x H100, 1 x A10, 8 CPU cores"
