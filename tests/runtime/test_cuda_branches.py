"""Branches for CUDA, run without a GPU: functions of torch are replaced by stubs that record calls."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from support.data_sets import SampleStream
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accel_runtime import Accelerator, ProfileKwargs
from accel_runtime.backends import _select_device, connect
from accel_runtime.backends.device_runtime import DeviceRuntime
from accel_runtime.backends.distributed import check_gpus_differ
from accel_runtime.backends.rng import broadcast_rng_types
from accel_runtime.checkpoint.background import StagingBuffers
from accel_runtime.environment.settings import Settings
from accel_runtime.environment.topology import Topology
from accel_runtime.foundation import nested
from accel_runtime.foundation.tensor_bytes import hash_words
from accel_runtime.monitoring import profiling
from accel_runtime.parallel import grad_norm, strategy
from accel_runtime.parallel.dtensor import gather_tensor
from accel_runtime.parallel.fully_shard import check_collective_backend
from accel_runtime.training import memory
from accel_runtime.training.gradients import LossWeight
from accel_runtime.training.loss_scaler import LossScaler
from accel_runtime.utils import is_bf16_available, is_cuda_available


def refuse(*_, **__):
    """Raise an error, as a stub of a function that must not be called."""
    raise AssertionError("this function of torch must not be called here")


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
        "synchronize": refuse,
    }.items():
        monkeypatch.setattr(torch.accelerator, name, stub)
    return chosen


def build_topology(local, count):
    return Topology(local, count, local, count, launched=True)


@pytest.mark.parametrize("backend", ["auto", "nccl", "gloo"])
def test_each_rank_selects_the_gpu_of_its_local_rank(two_gpus, backend):
    assert [_select_device("auto", build_topology(local, 2), backend) for local in range(2)] == [
        torch.device("cuda", 0),
        torch.device("cuda", 1),
    ]
    assert two_gpus == [0, 1]


def test_more_ranks_than_gpus_use_them_in_turn(two_gpus):
    taken = [_select_device("cuda", build_topology(local, 4), "gloo").index for local in range(4)]
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


@pytest.mark.parametrize(
    ("carrier", "device", "ranks"), [("nccl", "cuda", 2), ("gloo", "cpu", 2), ("gloo", "cuda", 1)]
)
def test_models_are_sharded_over_a_backend_that_can_gather_them(carrier, device, ranks):
    check_collective_backend(carrier, torch.device(device), ranks)


def test_sharding_over_gloo_on_gpus_is_refused_since_torch_crashes_there():
    with pytest.raises(RuntimeError, match=r"over gloo on cuda: .* Set process_group_backend to auto"):
        check_collective_backend("gloo", torch.device("cuda", 0), 2)


def connect_rank(uuids, carriers):
    """Connect a rank with a GPU of the given UUID that is `cuda:0` in every process; return the outcome."""
    from types import SimpleNamespace

    import torch.distributed as dist

    from accel_runtime.backends.distributed import DistributedBackend

    accelerator = Accelerator()  # holds the process group
    rank = accelerator.process_index
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=uuids[rank], pci_bus_id=1)
        )
        patched.setattr(dist, "get_backend_config", lambda: carriers)
        topology = Topology(rank, len(uuids), rank, len(uuids), launched=True)
        try:
            backend = DistributedBackend(topology, DeviceRuntime(torch.device("cuda", 0)), Settings(), {})
        except RuntimeError as error:
            return str(error)
        backend.close()
        return "connected"


@pytest.mark.parametrize(
    ("uuids", "carriers", "outcome"),
    [
        pytest.param(["x", "y"], "cpu:gloo,cuda:nccl", "connected", id="each process sees a GPU of its own"),
        pytest.param(["x", "x"], "cpu:gloo,cuda:nccl", "ranks 0, 1 on", id="all see the same GPU"),
        pytest.param(["x", "x"], "cpu:gloo,cuda:gloo", "connected", id="over gloo they share it"),
    ],
)
def test_ranks_that_see_one_gpu_each_are_compared_by_uuid(pair, uuids, carriers, outcome):
    assert all(outcome in message for message in pair.run(connect_rank, uuids, carriers))


def test_functions_used_before_a_notebook_launch_do_not_initialize_cuda(two_gpus, monkeypatch):
    emptied = []
    monkeypatch.setattr(torch.accelerator, "is_available", refuse)
    monkeypatch.setattr(torch.cuda, "is_available", refuse)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator.memory, "empty_cache", lambda: emptied.append(True))
    assert is_cuda_available()
    memory.clear_device_cache()
    assert emptied == [True]


class UnsynchronizedCopies(TorchDispatchMode):
    """Records non-blocking copies from a GPU to the CPU."""

    def __init__(self):
        super().__init__()
        self.recorded = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("non_blocking"):
            devices = args[0].device.type, torch.device(kwargs["device"]).type
            self.recorded += [devices] if devices == ("cuda", "cpu") else []
        return func(*args, **kwargs)


def test_offloaded_gradients_are_unscaled_after_the_copy_of_the_scale_is_complete(monkeypatch):
    monkeypatch.setattr(strategy, "has_dtensor", lambda _: True)
    monkeypatch.setattr(grad_norm, "unscale_shards", lambda optimizer, unscale: unscale(optimizer))
    with FakeTensorMode(), UnsynchronizedCopies() as copy_mode:
        offloaded = torch.nn.Parameter(torch.ones(3))
        offloaded.grad = torch.ones(3)
        optimizer = torch.optim.SGD([offloaded])
        factor, flag = torch.ones((), device="cuda"), torch.zeros((), device="cuda")
        inverse_scales = LossScaler("cpu")._unscale_grads_(optimizer, factor, flag, allow_fp16=False)
    assert [device.type for device in inverse_scales] == ["cpu"]
    assert copy_mode.recorded == [], "the CPU could read the value before the copy from the GPU is complete"


class CudaRuntime:
    """Stub of the functions of CUDA that pin memory.

    Args:
        fails: Whether the system cannot pin memory.
    """

    def __init__(self, fails=False):
        self._fails = fails
        self.pinned = {}

    def cudaHostRegister(self, address, size, flags):  # noqa: N802 - CUDA's name
        assert flags == 1
        if not self._fails:
            self.pinned[address] = size
        return int(self._fails)

    def cudaHostUnregister(self, address):  # noqa: N802
        del self.pinned[address]
        return 0


@pytest.fixture
def runtime(monkeypatch):
    """Install a stub of CUDA's runtime and of synchronize."""
    cuda_runtime = CudaRuntime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda_runtime)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    return cuda_runtime


def test_staging_buffers_are_pinned_reused_and_unpinned_when_deleted(runtime):
    staging = StagingBuffers(pinned=True)
    sizes = []
    for count in (1000, 5000, 3000):
        staged = staging.copy_tensors({"x": torch.arange(count)})
        assert torch.equal(staged["x"], torch.arange(count))
        sizes.append(list(runtime.pinned.values()))
        assert staged["x"].data_ptr() in runtime.pinned
    assert sizes == [[8000], [40000], [40000]], "a larger buffer replaces the old one"
    del staging, staged
    gc.collect()
    assert runtime.pinned == {}


def test_staging_buffers_work_if_memory_cannot_be_pinned(runtime, monkeypatch):
    runtime._fails = True
    reported = []

    def zeros(*_, device):
        reported.append(device)
        raise torch.AcceleratorError("CUDA error: memory cannot be registered")

    monkeypatch.setattr(torch, "zeros", zeros)
    staging = StagingBuffers(pinned=True)
    assert torch.equal(staging.copy_tensors({"x": torch.arange(7)})["x"], torch.arange(7))
    assert runtime.pinned == {}
    assert reported == ["cuda"], "the error must be cleared, or the next kernel of the script reports it"


@pytest.fixture
def pinned(monkeypatch):
    """Let loaders pin memory, and return the set of addresses of pinned tensors."""
    addresses = set()

    def pin(tensor, *_):
        # Return a copy, as pin_memory does.
        copied = tensor.clone()
        addresses.add(copied.untyped_storage().data_ptr())
        buffers.append(copied)
        return copied

    buffers = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: torch.device("cuda"))
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    return addresses


@pytest.mark.parametrize(
    "data", [TensorDataset(torch.arange(10.0)), SampleStream(torch.arange(10.0))], ids=["map", "stream"]
)
@pytest.mark.parametrize(
    "options", [{"batch_size": 4}, {"batch_size": 4, "shuffle": False}, {"batch_size": None}]
)
def test_batches_of_a_pin_memory_loader_are_pinned_and_sent_asynchronously(
    data, options, pinned, monkeypatch
):
    sent = []
    monkeypatch.setattr(nested, "build_device_check", lambda _: lambda _: False)
    real = nested.send_to
    monkeypatch.setattr(
        nested,
        "send_to",
        lambda batch, *args, **kwargs: sent.append((batch, kwargs)) or real(batch, *args, **kwargs),
    )
    if isinstance(data, IterableDataset) and "shuffle" in options:
        options = {"batch_size": 5, "drop_last": True}
    loader = Accelerator().prepare(DataLoader(data, pin_memory=True, **options))
    count = len(list(loader))
    assert count == len(sent) == {None: 10, 4: 3, 5: 2}[options["batch_size"]]
    for batch, copy_options in sent:
        assert copy_options == {"non_blocking": True}
        leaves = [leaf for leaf in nested.leaves(batch) if isinstance(leaf, torch.Tensor)]
        assert leaves
        assert all(leaf.untyped_storage().data_ptr() in pinned for leaf in leaves)


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


class OffloadedParameter:
    """A sharded parameter on the CPU of a mesh of GPUs."""

    device = torch.device("cpu")
    device_mesh = SimpleNamespace(device_type="cuda")

    def detach(self):
        return self

    def to(self, device):
        assert device == "cuda"
        return SimpleNamespace(full_tensor=lambda: "full, from the GPU")


def test_an_offloaded_parameter_is_gathered_on_the_gpus():
    assert gather_tensor(OffloadedParameter()) == "full, from the GPU"


def test_a_loss_weight_on_the_device_is_not_copied_to_the_cpu():
    weight = LossWeight.build(torch.ones(1, device="meta"), torch.device("meta"))
    assert (weight.amount.device.type, weight.amount.shape, weight.is_zero) == ("meta", (), None)


def test_a_profile_records_cpu_and_gpu_activities(monkeypatch):
    every = {ProfilerActivity.CPU, ProfilerActivity.CUDA, ProfilerActivity.XPU}
    monkeypatch.setattr(profiling, "supported_activities", lambda: every)
    assert set(ProfileKwargs()._activities(torch.device("cuda", 0))) == {
        ProfilerActivity.CPU,
        ProfilerActivity.CUDA,
    }
    assert ProfileKwargs(activities=["cuda"])._activities(torch.device("cuda")) == [ProfilerActivity.CUDA]


@pytest.mark.parametrize("supported", [True, False])
def test_bf16_availability_is_that_of_the_gpu(monkeypatch, supported):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: supported)
    assert is_bf16_available() is supported


IMPORTS = """
import sys, torch
def refuse(*_, **__):
    raise SystemExit("importing accel_runtime queries the GPU")
for place in (torch.cuda, torch.accelerator):
    for name in ("is_available", "device_count", "_lazy_init", "init", "current_device", "current_device_index"):
        if hasattr(place, name):
            setattr(place, name, refuse)
from accel_runtime import *
from accel_runtime.utils import *
import accel_runtime.notebook, accel_runtime.parallel.fully_shard, accel_runtime.parallel.dtensor, torch._dynamo
"""


@pytest.mark.slow
def test_imports_do_not_initialize_cuda_so_that_processes_can_fork_afterwards():
    process = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr) == (0, "")
