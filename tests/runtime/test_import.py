"""Importing the runtime is fast, and every public name exists."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from importlib.metadata import version

import pytest
from support.processes.commands import INTERPRETER
from support.processes.ranks import run_script

import accel_runtime

CHEAP = """
import sys
import accel_runtime
assert accel_runtime.Settings() == accel_runtime.Settings.from_env({})
assert accel_runtime.Topology() == accel_runtime.Topology.from_env({})
dir(accel_runtime)
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "numpy", "safetensors", "accel_cli"}))
sys.modules["torch"] = None  # importing torch takes seconds; now it raises ModuleNotFoundError
try:
    accel_runtime.Accelerator
except ModuleNotFoundError as error:
    print(error.name)
"""


def test_torch_is_imported_with_the_first_name_that_needs_it():
    run = subprocess.run([sys.executable, "-c", CHEAP], capture_output=True, text=True, check=True)
    assert run.stdout == "\ntorch\n"


UNCHANGED = """
import sys, types
import torch.distributed
from torch.optim import optimizer
from torch.utils.data import dataloader

def snapshot():
    owners = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "torch"]
    owners += [value for owner in owners for value in list(vars(owner).values()) if isinstance(value, type)]
    kinds = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, type)
    return [
        (vars(owner), name, value)
        for owner in owners
        for name, value in list(vars(owner).items())
        if isinstance(value, kinds)
    ]

def count_hooks():
    return len(optimizer._global_optimizer_pre_hooks), len(optimizer._global_optimizer_post_hooks)

before, hooks = snapshot(), count_hooks()
import accel_runtime
accelerator = accel_runtime.Accelerator(cpu=True)
print(len(before) > 10_000, count_hooks() == hooks)
print(*[name for owner, name, value in before if owner.get(name) is not value])
"""


def test_an_accelerator_changes_nothing_in_torch_without_a_launcher(tmp_path):
    (tmp_path / "script.py").write_text(UNCHANGED)
    ((out, err, code),) = run_script(tmp_path / "script.py", [{}], interpreter=INTERPRETER)
    assert (code, out) == (0, "True True\n\n"), err


SLOW = "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.tensor"


@pytest.mark.slow
def test_importing_accelerator_does_not_import_slow_modules_of_torch():
    script = (
        f"import sys; from accel_runtime import Accelerator; print(*(n for n in {SLOW} if n in sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout == "\n"


@pytest.mark.parametrize("name", accel_runtime.__all__)
def test_every_public_name_exists(name):
    assert getattr(accel_runtime, name).__name__ == name
    assert name in dir(accel_runtime)


PACKAGES = {"accelerate": "accel_runtime", "accelerate.utils": "accel_runtime.utils"}
LIST = """
import importlib, json, sys, types
print(json.dumps({
    name: [key for key, value in vars(importlib.import_module(name)).items() if isinstance(value, types.ModuleType)]
    for name in sys.argv[1:]
}))
"""
COMPARE = """
import importlib, json, sys
for name, modules in json.loads(sys.argv[1]).items():
    package = importlib.import_module(name)
    assert not {*modules} - {*dir(package)}, name
    assert [getattr(package, module).__name__ for module in modules] == [f"{name}.{module}" for module in modules]
"""


def test_modules_that_an_import_of_accelerate_makes_attributes_are_attributes_here(tmp_path):
    """In new processes: here other tests may have imported them."""
    pytest.importorskip("accelerate")
    script = tmp_path / "script.py"
    script.write_text(LIST)
    ((out, err, code),) = run_script(script, [{}], arguments=[*PACKAGES], interpreter=INTERPRETER)
    assert code == 0, err
    names = {
        PACKAGES[package]: [
            name for name in modules if importlib.util.find_spec(f"{PACKAGES[package]}.{name}")
        ]
        for package, modules in json.loads(out).items()
    }
    assert min(map(len, names.values())) > 10
    script.write_text(COMPARE)
    for package in PACKAGES.values():
        arguments = [json.dumps({package: names[package]})]
        ((_, err, code),) = run_script(script, [{}], arguments=arguments, interpreter=INTERPRETER)
        assert code == 0, err


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'accel_runtime' has no attribute 'Acelerator'"):
        _ = accel_runtime.Acelerator


def test_the_version_equals_that_of_the_distribution():
    assert accel_runtime.__version__ == version("accel-runtime")


def test_scripts_can_compare_the_version_of_accelerate():
    version = tuple(map(int, accel_runtime.accelerate_version.split(".")))
    assert version >= (1, 15, 0)
    assert "accelerate_version" in dir(accel_runtime)
