"""Serialization of objects for collectives, with tensors outside of the pickle."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_runtime.collectives.handshake import deserialize_object, serialize_object


def send_through_bytes(item):
    parcel = serialize_object(item)
    room = memoryview(bytearray(b"\xff" * parcel.size))
    parcel.write(room)
    return deserialize_object(room)


PLAIN = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.binary(), st.floats(allow_nan=False)),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner), st.tuples(inner, inner)),
)


@given(PLAIN)
def test_any_plain_object_is_deserialized_unchanged(item):
    assert send_through_bytes(item) == item


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int64, torch.bfloat16, torch.complex64, torch.float8_e5m2]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (3, 5)])
def test_tensors_in_a_list_are_deserialized_unchanged(dtype, shape):
    tensor = torch.randn(shape).to(dtype)
    flag, actual, text = send_through_bytes([torch.tensor(True), tensor, "x"])
    assert (flag.item(), text, actual.dtype, actual.shape) == (True, "x", dtype, shape)
    assert torch.equal(actual.to(torch.complex64), tensor.to(torch.complex64))


def test_a_slice_is_serialized_without_its_full_storage_and_gradient():
    full = torch.randn(1000, 1000, requires_grad=True)
    parcel = serialize_object({"part": full[:, :2].T})
    assert parcel.size < 10_000
    actual = send_through_bytes({"part": full[:, :2].T})["part"]
    assert torch.equal(actual, full[:, :2].T)
    assert not actual.requires_grad


def test_deserialized_tensors_are_writable_and_keep_shared_identity():
    tensor = torch.ones(3)
    first, second = send_through_bytes([tensor, tensor])
    first.zero_()
    assert first is second
    assert tensor.tolist() == [1, 1, 1]


def test_parameters_and_sparse_tensors_are_serialized():
    sparse = torch.eye(2).to_sparse()
    parameter, actual = send_through_bytes([torch.nn.Parameter(torch.ones(2)), sparse])
    assert isinstance(parameter, torch.nn.Parameter)
    assert torch.equal(actual.to_dense(), torch.eye(2))


def test_numpy_arrays_are_serialized_outside_of_the_pickle():
    np = pytest.importorskip("numpy")
    array = np.arange(10_000).reshape(100, 100)
    assert len(serialize_object(array).head) < 1000
    assert (send_through_bytes({"x": array})["x"] == array).all()
