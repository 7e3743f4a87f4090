"""What SPMD asks before all devices compute as one; on devices it is tested in tests/xla."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from accel_runtime import Accelerator
from accel_runtime.backends.meshing import along, devices
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
    assert devices(SPMD, Topology(), runtime(), lambda: False) == 4


def test_several_processes_are_refused():
    with pytest.raises(RuntimeError, match="WORLD_SIZE=2 says that there are 2 processes, but SPMD"):
        devices(SPMD, Topology(0, 2, 0, 2, launched=True), runtime(), lambda: False)


def test_several_machines_are_refused():
    with pytest.raises(RuntimeError, match="of one machine here, and torch_xla sees 2 machines"):
        devices(SPMD, Topology(), runtime(machines=2), lambda: False)


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_spmd_without_xla_devices_is_refused_where_the_accelerator_is_made(monkeypatch, device):
    monkeypatch.setenv("ACCEL_SPMD", "1")
    monkeypatch.setenv("ACCEL_DEVICE", device)
    with pytest.raises(
        RuntimeError, match=f"a way to use XLA devices, and the device is {device}: set ACCEL_DEVICE=xla"
    ):
        Accelerator()


def test_one_dimension_is_cut():
    assert along(0, 3) == ("fsdp", None, None)
    assert along(1, 2) == (None, "fsdp")
    assert along(0, 0) == ()
