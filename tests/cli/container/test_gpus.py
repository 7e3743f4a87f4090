"""GPUs, from the files that show them."""

import pytest

from accel_cli.container import gpus

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (user@host)\nGCC version: 12\n"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n"


@pytest.mark.parametrize(
    ("said", "count"),
    [(None, 3), ("", 0), ("0,2", 2), ("-1", 0), ("1,-1,2", 1), ("GPU-6c1b, GPU-77", 2), ("0,1,2,3,4", 3)],
)
def test_gpus_are_counted_as_cuda_sees_them(tmp_path, said, count):
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert gpus.count({} if said is None else {"CUDA_VISIBLE_DEVICES": said}, tmp_path) == count


@pytest.mark.parametrize(
    ("driver", "brought", "needed"),
    [
        (CLOSED, ["libcuda.so", "libcuda.so.1", "libcuda.so.580.65.06"], True),
        (OPEN, ["libcuda.so.1", "libcuda.so.580.65.06"], False),
        (OPEN, ["libcuda.so.1", "libcuda.so.575.57.08"], False),
        (OPEN, ["libcuda.so.1", "libcuda.so.580.100"], True),  # 100 is above 65
        (OPEN, [], False),
        ("", ["libcuda.so.580.65.06"], False),
    ],
)
def test_the_images_own_library_is_for_hosts_whose_driver_is_older(driver, brought, needed):
    assert gpus.needs_compat(driver, brought) is needed


def test_the_images_own_library_comes_before_what_is_on_the_path(tmp_path):
    compat = tmp_path / "compat"
    compat.mkdir()
    (compat / "libcuda.so.580.65.06").touch()
    (tmp_path / "version").write_text(CLOSED)
    found = [gpus.compatible(env, compat, tmp_path / "version") for env in ({}, {"LD_LIBRARY_PATH": "/mine"})]
    assert found == [{"LD_LIBRARY_PATH": str(compat)}, {"LD_LIBRARY_PATH": f"{compat}:/mine"}]
    assert gpus.compatible({}, compat, tmp_path / "absent") == {}
