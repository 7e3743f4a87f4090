"""Checks for packages, devices and dtypes."""

from __future__ import annotations

import importlib
import importlib.metadata
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from accel_runtime.accelerate import imports


@pytest.fixture
def package(monkeypatch):
    """Install a package for a test: `package(name, version)`."""

    def install(name, version="1.0", module=None):
        find_spec, versions = importlib.util.find_spec, importlib.metadata.version
        modules = importlib.import_module
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda module_name: module_name if module_name == name else find_spec(module_name),
        )
        monkeypatch.setattr(
            importlib.metadata,
            "version",
            lambda module_name: version if module_name == name else versions(module_name),
        )
        monkeypatch.setattr(
            importlib,
            "import_module",
            lambda module_name: module if module_name.startswith(name) else modules(module_name),
        )

    return install


@pytest.mark.parametrize(("version", "at_least"), [("0.43.1", "0.39"), ("0.43.1", "0.43.1"), ("1.0", None)])
def test_a_package_that_is_new_enough_is_available(package, version, at_least):
    package("bitsandbytes", version)
    assert imports.is_bnb_available(at_least)
    assert imports.is_bnb_available(min_version=at_least)


def test_a_package_that_is_too_old_is_not_available(package):
    package("bitsandbytes", "0.9")
    assert imports.is_bnb_available()
    assert not imports.is_bnb_available("0.10")
    assert not imports.is_4bit_bnb_available()


@pytest.mark.parametrize("device", ["mlu", "musa", "npu", "sdaa"])
@pytest.mark.parametrize("there", [True, False])
def test_a_device_of_another_package_is_available_if_torch_reports_it(package, monkeypatch, device, there):
    available = getattr(imports, f"is_{device}_available")
    assert not available()
    package(f"torch_{device}")
    assert not available(check_device=True)
    monkeypatch.setattr(torch, device, SimpleNamespace(is_available=lambda: there), raising=False)
    assert available() is available(True) is there


@pytest.mark.parametrize(
    ("kind", "tpu", "gpu"), [("TPU", True, False), ("CUDA", False, True), ("CPU", False, False)]
)
def test_is_torch_xla_available_checks_the_device_on_request(package, kind, tpu, gpu):
    package("torch_xla", module=SimpleNamespace(device_type=lambda: kind))
    assert imports.is_torch_xla_available()
    assert imports.is_torch_xla_available(check_is_tpu=True) is imports.is_torch_xla_available(True) is tpu
    assert imports.is_torch_xla_available(check_is_gpu=True) is gpu
    assert imports.is_bf16_available(ignore_tpu=True) is not tpu
    with pytest.raises(ValueError, match="a TPU or a GPU"):
        imports.is_torch_xla_available(check_is_tpu=True, check_is_gpu=True)


def test_is_mps_available_compares_the_version_of_torch(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert imports.is_mps_available()
    assert imports.is_mps_available("2.9")
    assert not imports.is_mps_available(min_version="99.0")


def test_is_peft_model_recognizes_wrapped_models(package):
    class PeftModel(nn.Linear):
        pass

    model = PeftModel(1, 1)
    assert not imports.is_peft_model(model)
    package("peft", module=SimpleNamespace(PeftModel=PeftModel))
    assert imports.is_peft_model(model)
    assert imports.is_peft_model(nn.DataParallel(model))
    assert not imports.is_peft_model(nn.Linear(1, 1))
