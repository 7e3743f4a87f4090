"""What SPMD asks before all devices compute as one; on devices it is tested in tests/xla."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from accel_runtime import Accelerator
from accel_runtime.backends.xla.spmd import partition_spec, start_spmd
from accel_runtime.env import Settings
from accel_runtime.topology import Topology

SPMD = Settings(device="xla", spmd=True)


def runtime(*, machines=1):
    """What stands for torch_xla's runtime on a slice of several machines, which no machine of ours is."""
    return SimpleNamespace(
        is_spmd=lambda: True,
        process_count=lambda: machines,
        global_runtime_device_count=lambda: 4 * machines,
        device_type=lambda: "TPU",
    )


def test_the_devices_of_one_machine_are_counted():
    assert start_spmd(SPMD, Topology(), runtime(), lambda: False) == 4


def test_several_processes_are_refused():
    with pytest.raises(RuntimeError, match="WORLD_SIZE=2, but SPMD"):
        start_spmd(SPMD, Topology(0, 2, 0, 2, launched=True), runtime(), lambda: False)


def test_several_machines_are_refused():
    with pytest.raises(RuntimeError, match="SPMD supports one machine, but torch_xla finds 2"):
        start_spmd(SPMD, Topology(), runtime(machines=2), lambda: False)


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_spmd_without_xla_devices_is_refused_where_the_accelerator_is_made(monkeypatch, device):
    monkeypatch.setenv("ACCEL_SPMD", "1")
    monkeypatch.setenv("ACCEL_DEVICE", device)
    with pytest.raises(
        RuntimeError, match=f"needs XLA devices, but the device is {device}. Set ACCEL_DEVICE=xla"
    ):
        Accelerator()


def test_one_dimension_is_cut():
    assert partition_spec(0, 3) == ("fsdp", None, None)
    assert partition_spec(1, 2) == (None, "fsdp")
    assert partition_spec(0, 0) == ()
