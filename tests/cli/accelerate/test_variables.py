"""Variables that are set for config files equal those that `accelerate launch` of Accelerate 1.15.0 has set."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

from accel_cli.accelerate.variables import build_variables
from accel_runtime.environment.accelerate import launch

DATA = Path(__file__).parents[2] / "data" / "accelerate-1.15.0"
FILES = json.loads((DATA / "launch_files.json").read_text())
RECORD = """import json
from record_launch_files import RECORDED, record
print(json.dumps({name: record(entry["file"]) for name, entry in json.loads(RECORDED.read_text()).items()}))
"""

DIFFERENT = {
    # Accelerate takes the characters of `(false, false, false)`, a text in YAML, for three values.
    "accelerate-0_34_0_fp8": dict.fromkeys(launch.FP8_OVERRIDES, "False"),
    # Its launcher forgets the directory, and its plugin then offloads to a directory `none`.
    "own-zero3-nvme": {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH": "/nvme"},
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_sets_the_variables_that_the_launcher_of_accelerate_has_set(name):
    assert build_variables(FILES[name]["file"]) == FILES[name]["variables"] | DIFFERENT.get(name, {})


@pytest.mark.slow
@pytest.mark.skipif(importlib.metadata.version("accelerate") != "1.15.0", reason="recorded with 1.15.0")
def test_the_launcher_of_the_installed_accelerate_sets_the_recorded_variables():
    result = subprocess.run(
        [sys.executable, "-c", RECORD], cwd=DATA, capture_output=True, text=True, check=True, timeout=600
    )
    assert json.loads(result.stdout.splitlines()[-1]) == {
        name: entry["variables"] for name, entry in FILES.items()
    }
