"""Checks before SPMD starts; SPMD on devices is tested in tests/extensions/xla/device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from accel_runtime import Accelerator
from accel_runtime.environment.settings import Settings
from accel_runtime.environment.topology import Topology
from accel_runtime.extensions.xla.spmd import partition_spec, start_spmd

pytestmark = pytest.mark.usefixtures("on_the_cpu")

SPMD = Settings(device="xla", spmd=True)


def runtime(*, machines=1):
    """Return a stub of the runtime of torch_xla on a slice of several nodes."""
    return SimpleNamespace(
        is_spmd=lambda: True,
        process_count=lambda: machines,
        global_runtime_device_count=lambda: 4 * machines,
        device_type=lambda: "TPU",
    )


def test_start_spmd_returns_the_number_of_devices():
    assert start_spmd(SPMD, Topology(), runtime(), lambda: False) == 4


def test_several_processes_are_rejected():
    with pytest.raises(RuntimeError, match="WORLD_SIZE=2, but SPMD"):
        start_spmd(SPMD, Topology(0, 2, 0, 2, launched=True), runtime(), lambda: False)


def test_several_nodes_are_rejected():
    with pytest.raises(RuntimeError, match="SPMD supports one machine, but torch_xla finds 2"):
        start_spmd(SPMD, Topology(), runtime(machines=2), lambda: False)


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_spmd_without_xla_devices_is_rejected_by_the_accelerator(monkeypatch, device):
    monkeypatch.setenv("ACCEL_SPMD", "1")
    monkeypatch.setenv("ACCEL_DEVICE", device)
    with pytest.raises(
        RuntimeError, match=f"needs the device xla, but the device is {device}. Set ACCEL_DEVICE"
    ):
        Accelerator()


def test_a_partition_spec_shards_one_dimension():
    assert partition_spec(0, 3) == ("fsdp", None, None)
    assert partition_spec(1, 2) == (None, "fsdp")
    assert partition_spec(0, 0) == ()
