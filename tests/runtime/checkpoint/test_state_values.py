"""States are restored from JSON and tensors with their values and types; other values are rejected by path."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accel_runtime.checkpoint.serialization import deserialize, serialize
from accel_runtime.storage.errors import CheckpointError

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
NUMPY_TYPES = ["<f8", "<f4", "<i8", ">i4", "|u1", "|b1", "<c16", "<f2"]


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    tensor = torch.arange(math.prod(shape)).reshape(shape).to(draw(st.sampled_from(DTYPES)))
    return tensor.t() if tensor.dim() == 2 and draw(st.booleans()) else tensor


@st.composite
def arrays(draw):
    dtype = draw(st.sampled_from([dtype for dtype in NUMPY_TYPES if dtype[0] != ">"]))
    return np.arange(6).astype(dtype).reshape(draw(st.sampled_from([(6,), (2, 3), (3, 2), (1, 6)])))


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(10**3000, 10**3001) | st.just(-(10**4000)),
    st.floats(),
    st.complex_numbers(),
    st.text(),
    st.binary(),
    st.binary().map(bytearray),
    st.sampled_from(DTYPES),
    st.sampled_from([torch.device("cpu"), torch.device("cuda", 3), Path("a/b"), torch.Size([2, 3]), "$"]),
    st.sampled_from(NUMPY_TYPES).map(lambda kind: np.dtype(kind).type(1)),
)
keys = st.one_of(st.text(), st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False), st.just("$"))
state_trees = st.recursive(
    leaves | tensors() | arrays(),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys | st.tuples(st.text(), st.integers()), inner, max_size=3).map(OrderedDict),
        st.dictionaries(st.text(), inner, max_size=3).map(lambda d: defaultdict(list, d)),
        st.lists(inner, max_size=3).map(lambda items: deque(items, maxlen=5)),
        st.sets(keys, max_size=4),
        st.frozensets(keys, max_size=4),
        st.dictionaries(st.text(), st.integers(-5, 5), max_size=3).map(Counter),
    ),
    max_leaves=12,
)


def is_equal(value, other):  # noqa: PLR0911 - one line for each type
    """Compare values, types and order recursively; NaN equals NaN."""
    if type(value) is not type(other):
        return False
    if isinstance(value, torch.Tensor):
        return value.dtype == other.dtype and torch.equal(value, other)
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.newbyteorder("=") == other.dtype.newbyteorder("=") and np.array_equal(value, other)
    if isinstance(value, float | complex):
        return repr(value) == repr(other)
    if isinstance(value, dict):
        if getattr(value, "default_factory", None) is not getattr(other, "default_factory", None):
            return False
        return is_equal(list(value.items()), list(other.items()))
    if isinstance(value, deque) and value.maxlen != other.maxlen:
        return False
    if isinstance(value, list | tuple | deque):
        return len(value) == len(other) and all(map(is_equal, value, other))
    return value == other


@given(state_trees)
@settings(max_examples=150, suppress_health_check=list(HealthCheck))
def test_deserialize_restores_values_types_and_order_of_any_tree(tree):
    text, tensors_by_name = serialize(tree, "item")
    restored = deserialize(json.loads(json.dumps(text)), tensors_by_name)
    assert is_equal(restored, tree), (tree, restored)
    assert all(name.startswith("item") and "#" not in name for name in tensors_by_name)


def test_an_array_without_dimensions_is_restored():
    for value in (np.array(3.5), np.array(7, dtype="<i4")):
        text, tensors_by_name = serialize(value, "item")
        assert is_equal(deserialize(text, tensors_by_name), value)


def test_tied_tensors_are_stored_once_and_conjugates_separately():
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    tree = {"one": tensor, "tied": tensor, "other": tensor.conj(), "copy": tensor.clone()}
    text, tensors_by_name = serialize(tree, "item")
    assert len(tensors_by_name) == 3
    assert is_equal(deserialize(text, tensors_by_name), tree)


def test_a_rank_suffix_in_a_key_is_escaped():
    tree = {"a#1": torch.ones(1), "a%231": torch.zeros(1)}
    text, tensors_by_name = serialize(tree, "item")
    assert len(tensors_by_name) == 2
    assert is_equal(deserialize(text, tensors_by_name), tree)


NamedPoint = namedtuple("Point", "x y")  # noqa: PYI024 - scripts may use it
_RECURSIVE: list = []
_RECURSIVE.append(_RECURSIVE)


@pytest.mark.parametrize(
    "value",
    [
        print, object(), NamedPoint(1, 2), lambda: 0, _RECURSIVE, torch.ones(1, device="meta"), torch.eye(2).to_sparse(),
        np.array(["text"]), np.array([object()], dtype=object), defaultdict(lambda: 3), type("Text", (str,), {})("x"),
        np.longdouble(1) if np.longdouble is None else np.array([1], dtype=np.longdouble), range(3), slice(1), ...,
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_serialize_rejects_values_that_need_code_to_load_and_names_their_path(value):
    with pytest.raises(CheckpointError, match=r"^item/outer\.0.* cannot be saved"):
        serialize({"outer": [value]}, "item")


tags = st.sampled_from(
    ["tensor", "ndarray", "tuple", "set", "size", "dict", "OrderedDict", "Counter", "deque", "defaultdict", "float",
     "complex", "bytes", "bytearray", "dtype", "device", "path", "numpy", "int", "odd"]
)  # fmt: skip
keys_of_tags = st.sampled_from(
    ["$", "items", "value", "base64", "name", "tensor", "factory", "maxlen", "dtype", "hex"]
)
encoded_trees = st.recursive(
    st.none() | st.integers() | st.text(max_size=4) | tags,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(keys_of_tags, inner, max_size=4)
        | st.builds(
            lambda word, rest: rest | {"$": word}, tags, st.dictionaries(keys_of_tags, inner, max_size=4)
        )
    ),
)


@given(encoded_trees)
@settings(max_examples=150, suppress_health_check=list(HealthCheck))
def test_deserialize_of_arbitrary_json_returns_a_value_or_raises_checkpoint_error(text):
    try:
        deserialize(text, {"known": torch.ones(1)})
    except CheckpointError as error:
        assert str(error)
