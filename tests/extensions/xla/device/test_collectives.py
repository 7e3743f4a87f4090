"""Collectives of tensors on devices of replicas: the tests of processes, and cases of compilation."""

from __future__ import annotations

import inspect

import cloudpickle
import pytest
import torch
from support.cases.modules import load_test_module

from accel_runtime import MismatchError
from accel_runtime.foundation.nested import map_tensors

pytest.importorskip("torch_xla", reason="torch_xla is in an environment of its own: make test-xla")

CASES = load_test_module("runtime/test_collectives.py")
cloudpickle.register_pickle_by_value(CASES)

# Each of their many examples would need a compilation.
LEFT_OUT = {
    "test_gather_of_any_nested_tensors_equals_concatenation",
    "test_reduce_of_any_tensors_equals_elementwise_reduction",
    # torch_xla has not all dtypes and layouts.
    "test_a_list_of_special_tensors_is_gathered_as_objects",
    "test_dtypes_without_a_reduction_are_rejected_by_name_on_one_and_on_several_processes",
    "test_numbers_of_every_dtype_are_reduced",
    "test_tensors_that_cannot_be_merged_are_rejected_by_name_on_one_and_on_several_processes",
}


def on_device(function, *args):
    """Call a function whose tensors are created on the device of the replica by default."""
    import torch_xla

    from accel_runtime.backends import current_backend

    device = current_backend().device
    torch.set_default_device(device)
    try:
        result = function(*(map_tensors(lambda tensor: tensor.to(device), arg) for arg in args))
    finally:
        torch.set_default_device(None)
    torch_xla.sync(wait=True)
    return map_tensors(lambda tensor: tensor.cpu(), result)


class OnDevice:
    """Replicas that compute on their devices."""

    def __init__(self, replicas):
        self._replicas = replicas
        self.size = replicas.size

    def run(self, function, *args):
        return self._replicas.run(on_device, function, *args)


FOUR = pytest.param(4, id="4 replicas", marks=pytest.mark.full)


@pytest.fixture(params=[pytest.param(1, id="1 replica"), pytest.param(2, id="2 replicas"), FOUR])
def ranks(request, replicas):
    """One, two and four replicas, in turn."""
    return OnDevice(replicas[request.param])


@pytest.fixture(params=[pytest.param(2, id="2 replicas"), FOUR])
def several(request, replicas):
    """Two and four replicas, in turn."""
    return OnDevice(replicas[request.param])


globals().update(
    {
        name: case
        for name, case in vars(CASES).items()
        if name.startswith("test_")
        and name not in LEFT_OUT
        and {"ranks", "several"} & set(inspect.signature(case).parameters)
    }
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_broadcast_ignores_nonfinite_values_of_other_ranks(several, dtype):
    def broadcast(dtype):
        from accel_runtime.backends import current_backend

        b = current_backend()
        bad = float("nan") if dtype.is_floating_point else 1
        values = torch.full((3,), 0 if b.topology.rank == 1 else bad, dtype=dtype, device=b.device)
        return b.broadcast(values, 1)

    for actual in several.run(broadcast, dtype):
        assert torch.equal(actual, torch.zeros(3, dtype=dtype))


def test_scalars_with_a_different_constant_on_each_rank_are_combined(several):
    def combined():
        from accel_runtime.backends import current_backend
        from accel_runtime.backends.tensors import gather, reduce

        b = current_backend()
        integer = torch.tensor(b.topology.rank, device=b.device)
        floating = torch.tensor(float(b.topology.rank), device=b.device)
        return gather(integer, b), reduce(floating, "sum", b), reduce(integer, "sum", b)

    total = sum(range(several.size))
    for gathered, summed, counted in several.run(combined):
        assert gathered.tolist() == list(range(several.size))
        assert summed.item() == counted.item() == total


def test_replicas_that_call_different_collectives_get_an_error(several):
    def called():
        from accel_runtime.backends import current_backend
        from accel_runtime.backends.tensors import gather, reduce

        b = current_backend()
        tensor = torch.ones(2, device=b.device)
        try:
            gather(tensor, b) if b.topology.rank else reduce(tensor, "sum", b)
        except MismatchError as error:
            return str(error)

    texts = several.run(called)
    assert all("rank 0: reduce" in text and "rank 1: gather" in text for text in texts)
