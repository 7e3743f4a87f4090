import os
import sys

import pytest
import torch

from accel_cli.planning import machine
from accel_cli.planning.machine import Machine


def test_the_devices_of_torch_are_detected_by_a_child_process():
    detected = machine.detect(os.environ)
    assert detected.problem is None
    assert detected.torch == torch.__version__
    assert len(detected.devices) == (
        torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    )


def test_a_missing_torch_is_a_problem_of_one_line(monkeypatch, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    detected = machine.detect(os.environ)
    assert detected.problem.startswith("Cannot import torch: ImportError: no torch here. Reinstall it: ")
    assert detected.cpus > 0


def test_an_interpreter_that_does_not_start_is_a_problem(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert "Cannot detect the devices of torch" in machine.detect(os.environ).problem


def test_the_summary_counts_equal_devices():
    assert Machine(8, "cuda", ("H100", "H100", "A10")).summary == "2 x H100, 1 x A10, 8 CPU cores"


@pytest.mark.full
def test_devices_are_detected_although_the_working_folder_has_modules_with_names_of_packages(cwd):
    (cwd / "typing_extensions.py").write_text("raise ImportError('not the package')")
    assert machine.detect(os.environ).problem is None
