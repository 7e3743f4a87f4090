"""The values that fields of configuration classes accept, translate and refuse; and the checks `is_..._available`."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import importlib.metadata
import importlib.util
import inspect
import re
from types import SimpleNamespace
from unittest import mock

import torch
from support.cases import golden

from accel_runtime import utils
from accel_runtime.accelerate import imports
from accel_runtime.foundation.options import Configuration

WORDS = (
    "x no none auto true fp16 O1 cpu nvme torch deepspeed allgather FULL_SHARD NO_SHARD HYBRID_SHARD no_wrap size_based_wrap"
    " BACKWARD_PRE SHARDED_STATE_DICT power_sgd batched_power_sgd s3://b/k"
)
VALUES = (None, True, False, -1, 0, 1, 2, 4, 0.5, float("nan"), "", *WORDS.split())
"""Values of each field, most of which are for one field only."""
OF_THE_MACHINE = {(utils.TorchDynamoPlugin, "backend"), (utils.ProfileKwargs, "activities")}
"""Fields whose values depend on torch and on the device."""
SIMPLE = (str, int, float, tuple, type(None))
DEVICES = ("mlu", "musa", "npu", "sdaa", "neuron", "hpu")


def test_the_values_of_each_field_are_accepted_and_refused_as_in_the_golden_file():
    classes = [value for name in utils.__all__ if is_configuration(value := getattr(utils, name))]
    assert {configuration.__name__ for configuration in classes} == {
        configuration.__name__ for configuration in Configuration.__subclasses__()
    }
    lines = [line for configuration in classes for line in describe(configuration)]
    golden.check("options.txt", "\n".join(lines[1:]) + "\n")


def is_configuration(value):
    return inspect.isclass(value) and issubclass(value, Configuration)


def describe(configuration):
    """Return the results of each field, with the values that have it."""
    lines = ["", f"[{configuration.__name__}]"]
    for field in dataclasses.fields(configuration):
        if (configuration, field.name) in OF_THE_MACHINE:
            continue
        results = {}
        for value in VALUES:
            results.setdefault(build(configuration, field.name, value), []).append(show(value))
        most = max(results, key=lambda result: len(results[result]))
        lines.append(f"{field.name}: {results.pop(most) and most}")
        lines += [f"    {' '.join(values)}: {result}" for result, values in results.items()]
    return lines


def build(configuration, name, value):
    """Return the result of a value, which an assignment must have too."""
    results = []
    for make in (
        lambda: configuration(**{name: value}),
        lambda: (made := configuration(), setattr(made, name, value))[0],
    ):
        try:
            found = getattr(make(), name)
        except Exception as error:  # noqa: BLE001
            text = re.sub(
                rf"((?:{name}|DeepSpeed|gradient_accumulation_steps)[ =]){re.escape(repr(value))}(?!\w)",
                r"\1VALUE",
                str(error),
            )
            is_of_python = type(error) is TypeError and not text.startswith("Invalid")
            results.append("TypeError" if is_of_python else f"{type(error).__name__}: {text}")
        else:
            results.append("accepted" if found is value else f"accepted as {show(found)}")
    constructed, assigned = results
    return constructed if constructed == assigned else f"{constructed}; assigned: {assigned}"


def show(value):
    """Return the text of a value that is equal on every machine."""
    if isinstance(value, enum.Enum):
        return str(value)
    return getattr(value, "__name__", None) or (
        repr(value) if isinstance(value, SIMPLE) else type(value).__name__
    )


def test_the_checks_return_what_the_golden_file_has(monkeypatch):
    """Machines differ in their devices and packages, so that the test replaces both."""
    modules = importlib.import_module
    monkeypatch.setattr(
        importlib,
        "import_module",
        lambda name: modules(name) if name.startswith("accel_") else mock.MagicMock(),
    )
    for device in DEVICES:
        monkeypatch.setattr(torch, device, SimpleNamespace(is_available=lambda: True), raising=False)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.distributed, "is_xccl_available", lambda: False)
    checks = [getattr(imports, name) for name in imports.__all__ if name != "is_peft_model"]
    results = {check: [] for check in checks}
    for version in (None, "0.1", "99.0"):
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, version=version: name if version else None
        )
        monkeypatch.setattr(importlib.metadata, "version", lambda _, version=version: version)
        for check, found in results.items():
            found.append(check())
    lines = ["Results without any package, with old ones, and with new ones.", ""]
    for check, found in results.items():
        lines.append(
            f"{check.__name__}: {', '.join(map(str, found))}. {inspect.getdoc(check).splitlines()[0]}"
        )
    golden.check("availability.txt", "\n".join(lines) + "\n")
