"""What has no effect in Accelerate is reported once its state is made, and about resuming when it is known."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from accel_runtime.environment.accelerate.import_hook import report_at_first_use

RESUME = "resume: true has no effect. Load the checkpoint."


def build_module(device="cpu", kind="MULTI_CPU"):
    """Return a module as `accelerate.state`, whose state gets a device and a type."""

    class AcceleratorState:
        def __init__(self):
            self.device, self.distributed_type = torch.device(device), SimpleNamespace(value=kind)

    module = ModuleType("accelerate.state")
    module.AcceleratorState = AcceleratorState
    return module


@pytest.fixture
def make_state(monkeypatch, capfd):
    """Return a function that makes a state twice, and returns what was printed."""
    monkeypatch.delenv("RANK", raising=False)

    def make(text="", variables=(), **facts):
        for name in variables:
            monkeypatch.setenv(name, "true")
        module = build_module(**facts)
        report_at_first_use(module, text)
        module.AcceleratorState()
        module.AcceleratorState()
        return capfd.readouterr().err.splitlines()

    return make


@pytest.fixture
def step(monkeypatch):
    """Return a function that makes a step of an optimizer; global hooks are removed after the test."""
    monkeypatch.delitem(sys.modules, "accel_runtime.transformers", raising=False)  # imported by another test
    hooks = sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks
    before = dict(hooks)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    yield optimizer.step
    for key in [key for key in hooks if key not in before]:
        del hooks[key]


@pytest.mark.parametrize("name", ["DEEPSPEED", "FSDP"])
def test_sharding_of_a_script_on_the_cpu_is_reported_once(name, make_state):
    variable = f"ACCELERATE_USE_{name}"
    (line,) = make_state(variables=[variable])
    assert "of the script has no effect: Accelerate does not shard on the CPU" in line
    assert make_state() == [line]


def test_sharding_that_accelerate_does_is_not_reported(make_state):
    assert make_state() == []
    assert make_state(variables=["ACCELERATE_USE_DEEPSPEED"], device="cuda", kind="DEEPSPEED") == []
    assert make_state(variables=["ACCELERATE_USE_FSDP"], device="cuda", kind="FSDP") == []


def test_another_process_than_the_first_reports_nothing(make_state, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert make_state(json.dumps({"limits": ["a. b."]}), variables=["ACCELERATE_USE_FSDP"]) == []


def test_resuming_without_effect_is_reported_at_the_first_step_only(make_state, step, capfd):
    assert make_state(json.dumps({"resume_limit": RESUME})) == []
    step()
    step()
    assert capfd.readouterr().err == f"accel: {RESUME}\n"


def test_a_callback_that_is_imported_after_the_state_resumes(make_state, step, monkeypatch, capfd):
    make_state(json.dumps({"resume_limit": RESUME}))
    monkeypatch.setitem(sys.modules, "accel_runtime.transformers", ModuleType("accel_runtime.transformers"))
    step()
    assert capfd.readouterr().err == ""


def test_a_refusal_ends_the_process_before_the_state_is_made(make_state, capfd):
    with pytest.raises(SystemExit) as ended:
        make_state(json.dumps({"limits": ["a. b."], "refusal": "Cannot shard."}))
    assert ended.value.code == 2
    assert capfd.readouterr().err == "accel: a. b.\naccel: Cannot shard.\n"
