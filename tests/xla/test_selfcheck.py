"""`accel test` on replicas of torch_xla's CPU device."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch_xla", reason="torch_xla is in an environment of its own: make test-xla")

HERE = Path(__file__).parent


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.full), 2])
def test_the_self_check_passes_on_replicas_in_bf16(tmp_path, replicas):
    told = {
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": str(replicas),
        "ACCEL_HOME": str(tmp_path),
        "ACCEL_MIXED_PRECISION": "bf16",
        # Lets replicas of the CPU device meet.
        "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parent.parent}",
    }
    (tmp_path / "accel.yaml").write_text("schema_version: 1\nlauncher:\n  kind: xla\n")
    done = subprocess.run(
        [sys.executable, "-m", "accel_cli", "test"],
        cwd=tmp_path, env=os.environ | told, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("ok ")]
    assert f"{replicas} of {replicas} ranks answer, on xla" in said[0]
    assert len(said) == 5
