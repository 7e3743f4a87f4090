"""Floating-point operations of a step, and the rates of devices."""

import warnings

import pytest
import torch
from support.processes.rank_hooks import watch

from accel_cli.runs.heartbeats import Beat
from accel_runtime import Accelerator
from accel_runtime.environment.settings import SettingsError
from accel_runtime.observe.flops import PEAK_FLOPS, find_peak_flops

FLOPS = 32 * 64 * 128 * 2 * 2 + 32 * 128 * 2 * 3
"""Of a step of the model below: products with the inputs, for the weights, and for the activations between both layers."""


def build_model():
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1))


def train(model, optimizer, steps=5, backward=torch.Tensor.backward):
    for _ in range(steps):
        backward(model(torch.randn(32, 64)).sum())
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCEL_MEASURE_FLOPS", "1")
    with watch(tmp_path) as rank_folder:
        yield rank_folder


def read_flops(folder):
    beat = Beat.read(folder.beat)
    return beat.flops, beat.peak_flops


def test_the_third_step_of_a_script_is_counted(folder):
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, steps=2)
    assert read_flops(folder) == (0, 0)
    train(model, optimizer, steps=1)
    assert read_flops(folder) == (FLOPS, 0)
    train(torch.nn.Linear(64, 1), optimizer)
    assert read_flops(folder) == (FLOPS, 0), "only one step is counted"


def test_accumulated_passes_of_an_accelerator_belong_to_one_step(folder):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = build_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(10):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.randn(32, 64)).sum())
            optimizer.step()
            optimizer.zero_grad()
    assert read_flops(folder) == (2 * FLOPS, 0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_a_compiled_model_has_the_operations_of_the_model_and_no_warning(folder):
    model = build_model()
    compiled = torch.compile(model, backend="aot_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        train(compiled, torch.optim.SGD(model.parameters(), lr=0.1))
    assert read_flops(folder) == (FLOPS, 0)


def test_nothing_is_counted_unless_it_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.delenv("ACCEL_MEASURE_FLOPS", raising=False)
    with watch(tmp_path) as folder:
        model = build_model()
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert read_flops(folder) == (0, 0)


def test_an_invalid_switch_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCEL_MEASURE_FLOPS", "maybe")
    model = build_model()
    with watch(tmp_path), pytest.raises(SettingsError, match="Invalid ACCEL_MEASURE_FLOPS 'maybe'"):
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=1)


@pytest.mark.parametrize(
    ("device", "dtype", "tf32", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", True, 989),
        ("NVIDIA H100 PCIe", "bfloat16", True, 756),
        ("NVIDIA H100 NVL", "float16", True, 835),
        ("NVIDIA A100-SXM4-80GB", "float32", True, 156),
        ("NVIDIA A100-SXM4-80GB", "float32", False, 19.5),
        ("NVIDIA L40S", "bfloat16", False, 362),
        ("NVIDIA L4", "bfloat16", False, 121),
        ("Tesla V100-SXM2-16GB", "float32", True, 15.7),
        ("Tesla T4", "float16", False, 65),
        ("AMD Instinct MI300X", "bfloat16", False, 1307),
        ("NVIDIA H100 80GB HBM3", "float8_e4m3fn", True, 0),
        ("NVIDIA GeForce RTX 5090", "bfloat16", True, 0),
        ("", "bfloat16", True, 0),
    ],
)
def test_the_rate_of_a_device_depends_on_its_name_and_the_number_format(device, dtype, tf32, tera):
    assert find_peak_flops(device, dtype, allows_tf32=tf32) == pytest.approx(tera * 1e12)


def test_a_device_is_found_by_its_longest_name():
    for name in PEAK_FLOPS:
        assert find_peak_flops(f"NVIDIA {name}", "bfloat16", allows_tf32=True) == PEAK_FLOPS[name]["half"]
