"""Branches for GPUs that `tests/gpu` does not reach: several GPUs, other devices, and failures of the system.

Functions of torch are replaced by stubs; each comment says why a GPU cannot show the same.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity

from accel_runtime import Accelerator, ProfileKwargs
from accel_runtime.backends import _select_device, connect
from accel_runtime.backends.device_runtime import DeviceRuntime
from accel_runtime.backends.distributed import check_gpus_differ
from accel_runtime.backends.rng import broadcast_rng_types
from accel_runtime.checkpoint.background import StagingBuffers
from accel_runtime.environment.settings import Settings
from accel_runtime.environment.topology import Topology
from accel_runtime.foundation.tensor_bytes import hash_words
from accel_runtime.monitoring import profiling
from accel_runtime.training.gradients import LossWeight


@pytest.fixture
def two_gpus(monkeypatch):
    """Let `torch.accelerator` report two GPUs, and return the list of devices that were selected."""
    chosen = []
    for name, stub in {
        "is_available": lambda: True,
        "current_accelerator": lambda: torch.device("cuda"),
        "device_count": lambda: 2,
        "set_device_index": chosen.append,
        "current_device_index": lambda: chosen[-1] if chosen else 0,
    }.items():
        monkeypatch.setattr(torch.accelerator, name, stub)
    return chosen


def build_topology(local, count):
    return Topology(local, count, local, count, launched=True)


# The machine with a GPU has one, and no other device.
def test_ranks_use_the_gpus_of_their_node_in_turn(two_gpus):
    taken = [_select_device("auto", build_topology(local, 4), "gloo").index for local in range(4)]
    assert taken == two_gpus == [0, 1, 0, 1]


def test_more_ranks_than_non_cuda_devices_can_share_them_only_over_gloo(two_gpus, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    assert _select_device("xpu", build_topology(3, 4), "gloo") == torch.device("xpu", 1)
    with pytest.raises(RuntimeError, match=r"4 processes .* 2 xpu device\(s\).*process_group_backend: gloo"):
        _select_device("auto", build_topology(3, 4), "auto")
    assert Settings().process_group_backend == "auto"


def test_a_script_without_a_launcher_keeps_its_current_gpu(two_gpus, monkeypatch):
    monkeypatch.setenv("ACCEL_DEVICE", "auto")
    assert _select_device("auto", Topology(), "auto") == torch.device("cuda", 0)
    torch.accelerator.set_device_index(1)
    assert connect(Settings(), Topology()).device == torch.device("cuda", 1)
    assert two_gpus == [1], "it is not set again"


def describe_gpu(host, uuid, bus):
    return host, f"GPU-{uuid}", 0, bus, 0


# GPUs of several nodes, and drivers and versions of torch without unique identifiers.
@pytest.mark.parametrize(
    "gpus",
    [
        pytest.param([describe_gpu("a", 1, 4), describe_gpu("a", 2, 5)], id="two of a node"),
        pytest.param([describe_gpu("a", 1, 4), describe_gpu("b", 2, 4)], id="the first of two nodes"),
        pytest.param(
            [describe_gpu("a", 0, 4), describe_gpu("a", 0, 5), describe_gpu("b", 0, 4)],
            id="a driver that gives one UUID to all",
        ),
        pytest.param(
            [("a", "GPU-1", None, None, None), ("a", "GPU-2", None, None, None)], id="an older torch"
        ),
    ],
)
def test_ranks_on_different_gpus_can_use_nccl(gpus):
    check_gpus_differ(gpus, "nccl")


def test_ranks_that_share_a_gpu_over_nccl_are_named_in_the_error():
    gpus = [
        describe_gpu("a", 1, 4),
        describe_gpu("b", 3, 4),
        describe_gpu("a", 1, 4),
        describe_gpu("b", 3, 4),
        describe_gpu("b", 4, 5),
    ]
    expected = r"over nccl: some use the same GPU \(ranks 0, 2 on a; ranks 1, 3 on b\)\..*process_group_backend: gloo"
    with pytest.raises(RuntimeError, match=expected):
        check_gpus_differ(gpus, "nccl")


class CudaRuntime:
    """Stub of the function of CUDA that pins memory, on a system that cannot."""

    def cudaHostRegister(self, *_):  # noqa: N802 - CUDA's name
        return 1


# A system without memory to pin; `tests/gpu` pins it.
def test_staging_buffers_work_if_memory_cannot_be_pinned(monkeypatch):
    monkeypatch.setattr(torch.cuda, "cudart", CudaRuntime)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    reported = []

    def zeros(*_, device):
        reported.append(device)
        raise torch.AcceleratorError("CUDA error: memory cannot be registered")

    monkeypatch.setattr(torch, "zeros", zeros)
    staging = StagingBuffers(pinned=True)
    assert torch.equal(staging.copy_tensors({"x": torch.arange(7)})["x"], torch.arange(7))
    assert reported == ["cuda"], "the error must be cleared, or the next kernel of the script reports it"


# A barrier that does not wait differs by time only.
def synchronize_in_barrier():
    """Return the devices that a barrier of a CUDA rank synchronizes, and its distributed type."""
    from accel_runtime.backends.distributed import DistributedBackend

    Accelerator()  # holds the process group
    synchronized = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.accelerator, "synchronize", lambda device: synchronized.append(str(device)))
        patched.setattr(
            torch.cuda,
            "get_device_properties",
            lambda _: SimpleNamespace(uuid=str(Topology.from_env(os.environ).rank)),
        )
        backend = DistributedBackend(
            Topology.from_env(os.environ), DeviceRuntime(torch.device("cuda", 1)), Settings(), {}
        )
        backend.barrier()
        backend.close()
    return synchronized, backend.distributed_type.value


def test_a_barrier_synchronizes_the_gpu(pair):
    assert pair.run(synchronize_in_barrier) == [(["cuda:1"], "MULTI_GPU")] * 2


# `tests/gpu` has a loader of one rank.
def broadcast_gpu_rng():
    """Return the state of the GPU generator after a broadcast from the first rank."""
    from accel_runtime.backends import current_backend

    accelerator = Accelerator()
    rank_state = torch.full((16,), accelerator.process_index + 5, dtype=torch.uint8)
    restored = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.cuda, "get_rng_state", lambda: rank_state)
        patched.setattr(torch.cuda, "set_rng_state", restored.append)
        broadcast_rng_types(["cuda"], current_backend())
    return [state.tolist() for state in restored]


def test_ranks_load_the_gpu_generator_state_of_the_first_rank(pair):
    assert pair.run(broadcast_gpu_rng) == [[[5] * 16]] * 2


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(7, dtype=torch.uint8),
        torch.arange(12.0).view(3, 4),
        torch.arange(9, dtype=torch.bfloat16),
        torch.ones((), dtype=torch.float64),
        torch.empty(0),
    ],
    ids=["7-bytes", "matrix", "bf16", "scalar", "empty"],
)
def test_the_hash_of_a_gpu_tensor_depends_on_every_value_and_not_on_strides(tensor):
    assert hash_words(torch.stack([tensor, tensor + 1], -1)[..., 0]) == hash_words(tensor), (
        "strides must not change the hash"
    )
    for index in range(tensor.numel()):
        other = tensor.clone()
        other.view(-1)[index] += 1
        assert hash_words(other) != hash_words(tensor), f"value {index}"


# A copy would wait for the GPU, and differ by time only.
def test_a_loss_weight_on_the_device_is_not_copied_to_the_cpu():
    weight = LossWeight.build(torch.ones(1, device="meta"), torch.device("meta"))
    assert (weight.amount.device.type, weight.amount.shape, weight.is_zero) == ("meta", (), None)


# CPU-only builds of torch support neither.
def test_a_profile_records_cpu_and_gpu_activities(monkeypatch):
    every = {ProfilerActivity.CPU, ProfilerActivity.CUDA, ProfilerActivity.XPU}
    monkeypatch.setattr(profiling, "supported_activities", lambda: every)
    assert set(ProfileKwargs()._activities(torch.device("cuda", 0))) == {
        ProfilerActivity.CPU,
        ProfilerActivity.CUDA,
    }
    assert ProfileKwargs(activities=["cuda"])._activities(torch.device("cuda")) == [ProfilerActivity.CUDA]
