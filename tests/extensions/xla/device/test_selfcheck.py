"""`accel test` on replicas of torch_xla's CPU device."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes.waits import limit

pytest.importorskip("torch_xla", reason="torch_xla is in an environment of its own: make test-xla")

HERE = Path(__file__).parent


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.full), 2])
def test_the_self_check_passes_on_replicas_in_bf16(tmp_path, replicas):
    variables = {
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": str(replicas),
        "ACCEL_HOME": str(tmp_path),
        "ACCEL_MIXED_PRECISION": "bf16",
        # Lets replicas of the CPU device meet.
        "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parents[3]}",
    }
    (tmp_path / "accel.yaml").write_text("schema_version: 1\nlauncher:\n  kind: xla\n")
    process = subprocess.run(
        [sys.executable, "-m", "accel_cli", "test"],
        cwd=tmp_path, env=os.environ | variables, capture_output=True, text=True, timeout=limit(500), check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
    passed_lines = [line for line in process.stdout.splitlines() if line.startswith("ok ")]
    assert f"{replicas} of {replicas} ranks answer, on xla" in passed_lines[0]
    assert len(passed_lines) == 5
