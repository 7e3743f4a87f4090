"""Public names of `accel_runtime.utils`."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

import accel_runtime
from accel_runtime import utils

NAMES = [
    "gather",
    "gather_object",
    "broadcast",
    "broadcast_object_list",
    "reduce",
    "pad_across_processes",
    "send_to_device",
    "set_seed",
    "synchronize_rng_states",
    "split_between_processes",
    "find_executable_batch_size",
    "release_memory",
    "notebook_launcher",
    "debug_launcher",
    "LocalSGD",
    "PartialState",
    "init_empty_weights",
    "skip_first_batches",
    "tqdm",
    "get_logger",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_public_function_is_in_accel_runtime_and_in_utils(name):
    assert name in accel_runtime.__all__
    assert getattr(utils, name) is getattr(accel_runtime, name)


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


@pytest.mark.parametrize(
    "package", ["datasets", "deepspeed", "peft", "rich", "torch_xla", "torchvision", "transformers", "wandb"]
)
def test_a_package_is_available_if_it_is_installed(package):
    answer = getattr(utils, f"is_{package}_available")()
    assert answer == (importlib.util.find_spec(package) is not None)
