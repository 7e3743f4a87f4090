"""Variables that are set for config files equal those that `accelerate launch` of Accelerate 1.15.0 has set."""

import json
from pathlib import Path

import pytest

from accel_cli.accelerate.variables import build_variables
from accel_runtime.environment.accelerate import launch

FILES = json.loads(
    (Path(__file__).parents[2] / "data" / "accelerate-1.15.0" / "launch_files.json").read_text()
)


DIFFERENT = {"accelerate-0_34_0_fp8": dict.fromkeys(launch.FP8_OVERRIDES, "False")}
"""Accelerate takes the characters of `(false, false, false)`, a text in YAML, for three values."""


@pytest.mark.parametrize("name", FILES)
def test_a_file_sets_the_variables_that_the_launcher_of_accelerate_has_set(name):
    assert build_variables(FILES[name]["file"]) == FILES[name]["variables"] | DIFFERENT.get(name, {})
