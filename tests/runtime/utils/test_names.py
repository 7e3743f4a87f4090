"""Public names of `accel_runtime.utils`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from accel_runtime import utils


@pytest.mark.parametrize("name", utils.__all__)
def test_every_public_name_of_utils_exists(name):
    assert getattr(utils, name).__name__ == name
    assert name in dir(utils)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"'accel_runtime.utils' has no attribute 'gathr'"):
        _ = utils.gathr


def test_importing_utils_does_not_import_torch():
    code = "import sys, accel_runtime.utils; print('torch' in sys.modules)"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout == "False\n"
