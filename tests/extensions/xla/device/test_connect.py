"""Errors if torch_xla is missing, does not match torch, or was started by another launcher."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
from support.processes.waits import limit

from accel_runtime import Accelerator
from accel_runtime.environment.installation import format_new_environment

HERE = importlib.util.find_spec("torch_xla") is not None
SCRIPT = "from accel_runtime import Accelerator\na = Accelerator()\nprint(a.device, a.num_processes)\n"


def ran(*command, **variables):
    """Run a process with the given variables."""
    environ = {name: text for name, text in os.environ.items() if not name.startswith("ACCEL_")}
    return subprocess.run(
        [sys.executable, *command],
        env=environ | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=limit(300),
    )


@pytest.mark.skipif(HERE, reason="torch_xla is installed")
@pytest.mark.parametrize("variables", [{"ACCEL_DEVICE": "xla"}, {"PJRT_DEVICE": "TPU"}], ids=str)
def test_a_missing_torch_xla_is_reported_with_the_install_command(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError) as raised:
        Accelerator()
    assert "No module named 'torch_xla'" in str(raised.value)
    assert format_new_environment("xla") in str(raised.value)


def test_an_incompatible_torch_is_named(tmp_path):
    (tmp_path / "torch_xla.py").write_text(
        "raise ImportError('_XLAC.so: undefined symbol: _ZN5torch8autograd10deleteNodeEPNS0_4NodeE')"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    process = ran("-c", SCRIPT, ACCEL_DEVICE="xla", PYTHONPATH=path)
    assert process.returncode == 1
    message = process.stderr.splitlines()[-1]
    assert "torch_xla cannot be loaded with torch 2." in message
    assert "undefined symbol" in message
    assert "released in pairs" in message


@pytest.mark.full
@pytest.mark.skipif(not HERE, reason="torch_xla is in an environment of its own: make test-xla")
def test_the_variable_of_torch_xla_selects_xla():
    assert ran("-c", SCRIPT, PJRT_DEVICE="CPU").stdout.split() == ["xla:0", "1"]


@pytest.mark.skipif(not HERE, reason="torch_xla is in an environment of its own: make test-xla")
def test_an_installed_torch_xla_alone_does_not_select_xla():
    environ = {"PJRT_DEVICE": ""}
    assert ran("-c", SCRIPT, **environ).stdout.split() == ["cpu", "1"]


@pytest.mark.full
@pytest.mark.skipif(not HERE, reason="torch_xla is in an environment of its own: make test-xla")
def test_torchrun_with_torch_xla_is_rejected(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    process = ran(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)),
        ACCEL_DEVICE="xla",
        PJRT_DEVICE="CPU",
    )
    assert process.returncode != 0
    assert "WORLD_SIZE=2, but torch_xla finds 1 replica(s)" in process.stderr
    assert "accel launch and launcher.kind: xla" in process.stderr
