"""Factories of models: import, call, and errors with the source line."""

from __future__ import annotations

import sys

import pytest
import torch

from accel_runtime.extensions.estimate.factory import call_factory, find_factory
from accel_runtime.extensions.estimate.memory import EstimateError

MODULE = """
import torch
from torch import nn

def plain():
    return nn.Linear(4, 2)

def with_inputs():
    return nn.Linear(4, 2), torch.zeros(8, 4)

def sized(batch_size=3, seq_length=5):
    return {"model": nn.Linear(4, 2), "inputs": {"input": torch.zeros(batch_size, seq_length, 4)}}

def needs_length(seq_length):
    return sized(1, seq_length)

def needs_width(width):
    return nn.Linear(width, 2)

class Net(nn.Linear):
    def __init__(self):
        super().__init__(4, 2)

    @classmethod
    def large(cls):
        return cls()

built = nn.Linear(1, 1)
number = 3

def raises():
    raise ValueError("a width of 0")

def to_cpu():
    return nn.Linear(4, 2).to("cpu")

def allocates():
    return nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2, device="cpu"))

def quits():
    raise SystemExit(3)

def nothing():
    return None

def wrong_key():
    return {"model": nn.Linear(4, 2), "input": torch.zeros(8, 4)}

def no_model():
    return {"inputs": torch.zeros(8, 4)}

def wrong_optimizer():
    return nn.Linear(4, 2), None, "adamw"

def wrong_loss():
    return nn.Linear(4, 2), torch.zeros(8, 4), None, 0.5
"""


@pytest.fixture
def module(cwd, monkeypatch):
    """Return a file of factories in the working folder, which is on the path as for `python -m`."""
    (cwd / "models.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(cwd))
    yield cwd / "models.py"
    for name in ("models", "sibling", "broken"):
        sys.modules.pop(name, None)


def call_target(target, **sizes):
    return call_factory(find_factory(target), target, sizes)


def get_error(target, **sizes):
    with pytest.raises(EstimateError) as raised:
        call_target(target, **sizes)
    assert raised.value.__suppress_context__ or raised.value.__context__ is None
    return str(raised.value)


@pytest.mark.parametrize(
    "target", ["models:plain", "models.py:plain", "./models.py:plain", "models:Net", "models:Net.large"]
)
def test_a_factory_is_a_function_or_class_of_a_module_or_file(module, target):
    spec = call_target(target)
    assert spec.model.weight.is_meta
    assert (spec.inputs, spec.optimizer, spec.loss) == (None, None, None)


def test_a_factory_file_can_import_a_sibling_module(module, cwd):
    (cwd / "deep").mkdir()
    (cwd / "deep" / "sibling.py").write_text("WIDTH = 7")
    (cwd / "deep" / "net.py").write_text(
        "import torch, sibling\ndef make():\n    return torch.nn.Linear(sibling.WIDTH, 1)"
    )
    assert call_target("deep/net.py:make").model.in_features == 7


def test_sizes_are_passed_to_the_factory_or_resize_the_inputs(module):
    assert call_target("models:sized").inputs["input"].shape == (3, 5, 4)
    assert call_target("models:sized", batch_size=2, seq_length=9).inputs["input"].shape == (2, 9, 4)
    assert call_target("models:needs_length", seq_length=9).inputs["input"].shape == (1, 9, 4)
    assert call_target("models:with_inputs").inputs.shape == (8, 4)
    resized = call_target("models:with_inputs", batch_size=2).inputs
    assert (resized.shape, resized.is_meta) == ((2, 4), True)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("models", "Invalid target 'models': expected MODULE:FACTORY"),
        (":plain", "expected MODULE:FACTORY"),
        ("modles:plain", "Module modles not found in"),
        ("models.deeper:plain", "Module models.deeper not found"),
        ("other.py:plain", "File not found: other.py"),
        ("models:plian", "models has no plian; did you mean plain?"),
        ("models:xyzzy", "models has no xyzzy; it has Net, allocates"),
        ("models:Net.larg", "has no larg; did you mean large?"),
        ("models:number", "models:number is of type int"),
        ("models:nothing", "models:nothing returned NoneType. Return a torch.nn.Module"),
        ("models:no_model", "returned dict without one"),
        ("models:wrong_key", "a dict with 'input'; did you mean inputs?"),
        ("models:wrong_optimizer", "returned str as optimizer"),
        ("models:wrong_loss", "returned float as loss"),
        ("models:needs_width", "needs the argument width. Give it a default"),
        ("models:needs_length", "needs the argument seq_length. Set --seq-length"),
        ("builtins:dict", "builtins:dict cannot be called: its parameters are unknown (no signature found"),
        ("models:allocates", "whose 1.weight on cpu has memory"),
    ],
)
def test_an_invalid_factory_is_reported_with_one_message(module, target, words):
    assert words in get_error(target)


@pytest.mark.parametrize("target", ["script.py:mdoel", "script:mdoel", "script.py:mdoel.large"])
def test_an_unknown_name_is_rejected_before_the_source_is_executed(cwd, monkeypatch, target):
    monkeypatch.syspath_prepend(cwd)
    (cwd / "script.py").write_text("import os\ndef model(): pass\nopen('ran', 'w')\n")
    assert get_error(target) == f"{target.partition(':')[0]} has no mdoel; did you mean model?"
    assert "it has model" in get_error(target.replace("mdoel", "xyzzy"))
    assert not (cwd / "ran").exists()


@pytest.mark.parametrize(
    "source",
    [
        "if True:\n    def make(): return {}",
        "make = lambda: {}",
        "try:\n    from other import make\nexcept ImportError:\n    class make: pass",
        "globals()['make'] = lambda: {}",
        "def define():\n    global make\n    make = lambda: {}\ndefine()",
        "def __getattr__(name):\n    return lambda: {}",
        "for make in (lambda: {},): pass",
        "(make := lambda: {})",
        "from other import *",
    ],
)
def test_a_dynamically_defined_factory_is_found(cwd, monkeypatch, source):
    monkeypatch.delitem(sys.modules, "other", raising=False)
    (cwd / "other.py").write_text("make = lambda: {}")
    (cwd / "script.py").write_text(source)
    assert "returned dict without one" in get_error("script.py:make")


def test_a_model_in_a_variable_has_its_first_value_and_no_memory(cwd):
    (cwd / "script.py").write_text(
        "import torch\nmodel = None\nmodel = torch.nn.Linear(4, 2)\nmodel = wrap(model)\nmodel.train()\n"
    )
    assert call_target("script.py:model").model.weight.is_meta


def test_a_model_of_an_imported_package_has_memory(cwd, monkeypatch):
    monkeypatch.syspath_prepend(str(cwd))
    (cwd / "package").mkdir()
    (cwd / "package" / "__init__.py").write_text("import torch\nbuilt = torch.nn.Linear(1, 1)")
    assert "is a model with memory" in get_error("package:built")


TRAINING = """
from __future__ import annotations
import argparse, os, sys
import torch
sys.path.insert(0, "deep")
import sibling
import nowhere_to_be_found
try:
    import another_missing as fast
except ImportError:
    fast = None
parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=sibling.WIDTH)
args = parser.parse_args()
options = {"depth": 1}
options["depth"] = 2
torch.set_default_dtype(torch.float64)
torch.distributed.init_process_group("nonsense")

def layer():
    loss = args.width
    return torch.nn.Linear(loss, loss)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(layer() for _ in range(options["depth"]))

def make():
    return Net() if fast is None else None

loss = open("ran", "w")
for loss in range(3):
    options = nowhere_to_be_found.train(make())
vars(args)
"""


def test_only_the_statements_that_a_factory_needs_are_executed(cwd, monkeypatch):
    """Neither training nor imports and arguments that the model does not need."""
    monkeypatch.setattr(sys, "argv", ["estimate", "--unknown"])
    (cwd / "deep").mkdir()
    (cwd / "deep" / "sibling.py").write_text("WIDTH = 7")
    (cwd / "script.py").write_text(TRAINING)
    try:
        model = call_target("script.py:make").model
    finally:
        torch.set_default_dtype(torch.float32)
    assert [tuple(p.shape) for p in model.parameters()] == [(7, 7), (7,)] * 2
    assert next(model.parameters()).dtype == torch.float64
    assert not (cwd / "ran").exists()


def test_an_error_of_a_factory_is_reported_with_its_line(module):
    assert (
        get_error("models:raises")
        == f"models:raises failed: {module}:{line('a width of 0')}: ValueError: a width of 0"
    )
    assert "SystemExit: 3" in get_error("models:quits")
    moved = get_error("models:to_cpu")
    assert f"{module}:{line('.to(')}: NotImplementedError" in moved, (
        "the line of the script, not that of torch"
    )
    assert "called on the meta device" in moved


def test_an_error_of_an_import_is_reported_with_its_line(module, cwd):
    (cwd / "broken.py").write_text("import torch\nimport nowhere\nf = nowhere.Linear\n")
    assert (
        get_error("broken:f")
        == f"broken cannot be imported: {cwd}/broken.py:2: ModuleNotFoundError: No module named 'nowhere'"
    )
    (cwd / "broken.py").write_text("def f(:\n")
    assert f"{cwd}/broken.py:1: SyntaxError" in get_error(f"{cwd}/broken.py:f")


def test_sizes_without_an_effect_are_rejected(module):
    assert "--batch-size needs inputs, and models:plain returns none" in get_error(
        "models:plain", batch_size=2
    )
    assert "--seq-length is for factories with a parameter seq_length" in get_error(
        "models:with_inputs", seq_length=2
    )


def test_inputs_of_a_factory_are_created_on_the_meta_device(module):
    spec = call_target("models:with_inputs")
    assert spec.inputs.device == torch.device("meta")


def line(text):
    return next(number for number, text_of_line in enumerate(MODULE.splitlines(), 1) if text in text_of_line)
