"""Branches for CUDA, run without a GPU against functions of torch that note what is called and refuse the rest."""

from __future__ import annotations

import gc
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accel_runtime import Accelerator, memory, precision, tree
from accel_runtime.backends import _device
from accel_runtime.checkpoint.staging import Staging
from accel_runtime.env import Settings
from accel_runtime.parallel import unscaling
from accel_runtime.precision import LossScaler
from accel_runtime.topology import Topology
from accel_runtime.utils import is_cuda_available


def refuse(*_, **__):
    """Stand for a function that must not be called."""
    raise AssertionError("this function of torch must not be called here")


@pytest.fixture
def two_gpus(monkeypatch):
    """A machine with two GPUs, as far as `torch.accelerator` is asked; the devices that were made current."""
    chosen = []
    for name, stub in {
        "is_available": lambda: True,
        "current_accelerator": lambda: torch.device("cuda"),
        "device_count": lambda: 2,
        "set_device_index": chosen.append,
        "synchronize": refuse,
    }.items():
        monkeypatch.setattr(torch.accelerator, name, stub)
    return chosen


def place(local, count):
    return Topology(local, count, local, count, launched=True)


@pytest.mark.parametrize("backend", ["auto", "nccl", "gloo"])
def test_a_rank_takes_the_gpu_of_its_local_rank_before_it_joins_the_others(two_gpus, backend):
    assert [_device("auto", place(local, 2), backend) for local in range(2)] == [
        torch.device("cuda", 0),
        torch.device("cuda", 1),
    ]
    assert two_gpus == [0, 1]


def test_more_ranks_than_gpus_share_them_over_gloo_only(two_gpus):
    shared = [_device("cuda", place(local, 4), "gloo").index for local in range(4)]
    assert shared == two_gpus == [0, 1, 0, 1]
    with pytest.raises(RuntimeError, match=r"4 processes .* 2 cuda device\(s\).*process_group_backend: gloo"):
        _device("auto", place(3, 4), "auto")
    assert Settings().process_group_backend == "auto"


def test_what_a_notebook_asks_before_a_launch_does_not_start_cuda(two_gpus, monkeypatch):
    emptied = []
    monkeypatch.setattr(torch.accelerator, "is_available", refuse)
    monkeypatch.setattr(torch.cuda, "is_available", refuse)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator.memory, "empty_cache", lambda: emptied.append(True))
    assert is_cuda_available()
    memory.clear_device_cache()
    assert emptied == [True]


class Copies(TorchDispatchMode):
    """Notes copies from a GPU to the CPU that nothing waits for."""

    def __init__(self):
        super().__init__()
        self.unawaited = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("non_blocking"):
            way = args[0].device.type, torch.device(kwargs["device"]).type
            self.unawaited += [way] if way == ("cuda", "cpu") else []
        return func(*args, **kwargs)


def test_offloaded_gradients_are_unscaled_by_a_scale_that_has_arrived(monkeypatch):
    monkeypatch.setattr(precision, "any_divided", lambda _: True)
    monkeypatch.setattr(unscaling, "unscaled", lambda optimizer, unscale: unscale(optimizer))
    with FakeTensorMode(), Copies() as copies:
        offloaded = torch.nn.Parameter(torch.ones(3))
        offloaded.grad = torch.ones(3)
        optimizer = SimpleNamespace(param_groups=[{"params": [offloaded]}])
        factor, flag = torch.ones((), device="cuda"), torch.zeros((), device="cuda")
        found = LossScaler("cpu")._unscale_grads_(optimizer, factor, flag, allow_fp16=False)
    assert [device.type for device in found] == ["cpu"]
    assert copies.unawaited == [], "the CPU would read what a copy from the GPU has not written yet"


class Runtime:
    """CUDA's functions that pin memory; every other is unknown.

    Args:
        refuses: Whether the system pins nothing.
    """

    def __init__(self, refuses=False):
        self._refuses = refuses
        self.pinned = {}

    def cudaHostRegister(self, address, size, flags):  # noqa: N802 - CUDA's name
        assert flags == 1
        if not self._refuses:
            self.pinned[address] = size
        return int(self._refuses)

    def cudaHostUnregister(self, address):  # noqa: N802
        del self.pinned[address]
        return 0


@pytest.fixture
def runtime(monkeypatch):
    """CUDA's runtime, and a synchronize that finds all copies done."""
    own = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: own)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    return own


def test_pinned_memory_is_as_large_as_the_state_and_is_unpinned_before_it_goes(runtime):
    staging = Staging(pinned=True)
    sizes = []
    for count in (1000, 5000, 3000):
        copies = staging.copies({"x": torch.arange(count)})
        assert torch.equal(copies["x"], torch.arange(count))
        sizes.append(list(runtime.pinned.values()))
        assert copies["x"].data_ptr() in runtime.pinned
    assert sizes == [[8000], [40000], [40000]], "larger memory takes the place of the old"
    del staging, copies
    gc.collect()
    assert runtime.pinned == {}


def test_memory_that_the_system_does_not_pin_is_used_as_it_is(runtime, monkeypatch):
    runtime._refuses = True
    reported = []

    def zeros(*_, device):
        reported.append(device)
        raise torch.AcceleratorError("CUDA error: memory cannot be registered")

    monkeypatch.setattr(torch, "zeros", zeros)
    staging = Staging(pinned=True)
    assert torch.equal(staging.copies({"x": torch.arange(7)})["x"], torch.arange(7))
    assert runtime.pinned == {}
    assert reported == ["cuda"], "the error is taken from CUDA, or the script's next kernel reports it"


class Numbers(IterableDataset):
    """A stream."""

    def __iter__(self):
        return iter(torch.arange(10.0))


@pytest.fixture
def pinned(monkeypatch):
    """A machine whose loaders pin memory; notes where each tensor that was pinned lies."""
    seen = set()

    def pin(tensor, *_):
        # A copy, as pinning makes one: what accel handed on in its own wrapping would be missed.
        copied = tensor.clone()
        seen.add(copied.untyped_storage().data_ptr())
        kept.append(copied)
        return copied

    kept = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: torch.device("cuda"))
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    return seen


@pytest.mark.parametrize("data", [TensorDataset(torch.arange(10.0)), Numbers()], ids=["map", "stream"])
@pytest.mark.parametrize(
    "options", [{"batch_size": 4}, {"batch_size": 4, "shuffle": False}, {"batch_size": None}]
)
def test_every_batch_of_a_loader_with_pinned_memory_is_pinned_and_sent_without_waiting(
    data, options, pinned, monkeypatch
):
    sent = []
    monkeypatch.setattr(tree, "presence", lambda _: lambda _: False)
    real = tree.send
    monkeypatch.setattr(
        tree,
        "send",
        lambda batch, *args, **kwargs: sent.append((batch, kwargs)) or real(batch, *args, **kwargs),
    )
    if isinstance(data, IterableDataset) and "shuffle" in options:
        options = {"batch_size": 5, "drop_last": True}
    loader = Accelerator().prepare(DataLoader(data, pin_memory=True, **options))
    count = len(list(loader))
    assert count == len(sent) == {None: 10, 4: 3, 5: 2}[options["batch_size"]]
    for batch, how in sent:
        assert how == {"non_blocking": True}
        leaves = [leaf for leaf in tree.leaves(batch) if isinstance(leaf, torch.Tensor)]
        assert leaves
        assert all(leaf.untyped_storage().data_ptr() in pinned for leaf in leaves)


IMPORTS = """
import sys, torch
def refuse(*_, **__):
    raise SystemExit("importing accel_runtime asks for a GPU")
for place in (torch.cuda, torch.accelerator):
    for name in ("is_available", "device_count", "_lazy_init", "init", "current_device", "current_device_index"):
        if hasattr(place, name):
            setattr(place, name, refuse)
from accel_runtime import *
from accel_runtime.utils import *
import accel_runtime.launchers, accel_runtime.backends.sharded, accel_runtime.parallel.gathering, torch._dynamo
"""


@pytest.mark.slow
def test_imports_do_not_ask_for_a_gpu_so_that_processes_can_be_forked_after_them():
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
