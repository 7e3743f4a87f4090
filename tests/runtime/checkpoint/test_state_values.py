"""A state comes back from JSON and tensors with the values and the types it had; what cannot is refused by its path."""

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

from accel_runtime.checkpoint.errors import CheckpointError
from accel_runtime.checkpoint.serialization import deserialize, serialize

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
KINDS = ["<f8", "<f4", "<i8", ">i4", "|u1", "|b1", "<c16", "<f2"]


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    made = torch.arange(math.prod(shape)).reshape(shape).to(draw(st.sampled_from(DTYPES)))
    return made.t() if made.dim() == 2 and draw(st.booleans()) else made


@st.composite
def arrays(draw):
    kind = draw(st.sampled_from([kind for kind in KINDS if kind[0] != ">"]))
    return np.arange(6).astype(kind).reshape(draw(st.sampled_from([(6,), (2, 3), (3, 2), (1, 6)])))


numbers = st.one_of(
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
    st.sampled_from(KINDS).map(lambda kind: np.dtype(kind).type(1)),
)
keys = st.one_of(st.text(), st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False), st.just("$"))
trees = st.recursive(
    numbers | tensors() | arrays(),
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


def equal(one, other):  # noqa: PLR0911 - a kind a line
    """Equal in value and type, all the way down, in the same order; NaN is itself."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype.newbyteorder("=") == other.dtype.newbyteorder("=") and np.array_equal(one, other)
    if isinstance(one, float | complex):
        return repr(one) == repr(other)
    if isinstance(one, dict):
        if getattr(one, "default_factory", None) is not getattr(other, "default_factory", None):
            return False
        return equal(list(one.items()), list(other.items()))
    if isinstance(one, deque) and one.maxlen != other.maxlen:
        return False
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


@given(trees)
@settings(max_examples=150, suppress_health_check=list(HealthCheck))
def test_any_tree_comes_back_with_its_values_types_and_order(tree):
    text, found = serialize(tree, "item")
    again = deserialize(json.loads(json.dumps(text)), found)
    assert equal(again, tree), (tree, again)
    assert all(name.startswith("item") and "#" not in name for name in found)


def test_an_array_without_dimensions_stays_one():
    for value in (np.array(3.5), np.array(7, dtype="<i4")):
        text, found = serialize(value, "item")
        assert equal(deserialize(text, found), value)


def test_tied_tensors_are_kept_once_and_a_conjugate_is_not_its_original():
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    tree = {"one": tensor, "tied": tensor, "other": tensor.conj(), "copy": tensor.clone()}
    text, found = serialize(tree, "item")
    assert len(found) == 3
    assert equal(deserialize(text, found), tree)


def test_a_rank_mark_in_a_name_is_not_taken_for_one():
    tree = {"a#1": torch.ones(1), "a%231": torch.zeros(1)}
    text, found = serialize(tree, "item")
    assert len(found) == 2
    assert equal(deserialize(text, found), tree)


Point = namedtuple("Point", "x y")  # noqa: PYI024 - what a script may have
_ITSELF: list = []
_ITSELF.append(_ITSELF)


@pytest.mark.parametrize(
    "odd",
    [
        print, object(), Point(1, 2), lambda: 0, _ITSELF, torch.ones(1, device="meta"), torch.eye(2).to_sparse(),
        np.array(["text"]), np.array([object()], dtype=object), defaultdict(lambda: 3), type("Text", (str,), {})("x"),
        np.longdouble(1) if np.longdouble is None else np.array([1], dtype=np.longdouble), range(3), slice(1), ...,
    ],
    ids=lambda odd: type(odd).__name__,
)  # fmt: skip
def test_what_loading_could_not_make_without_running_code_is_refused_by_its_path(odd):
    with pytest.raises(CheckpointError, match=r"^item/outer\.0.* cannot be saved"):
        serialize({"outer": [odd]}, "item")


words = st.sampled_from(
    ["tensor", "ndarray", "tuple", "set", "size", "dict", "OrderedDict", "Counter", "deque", "defaultdict", "float",
     "complex", "bytes", "bytearray", "dtype", "device", "path", "numpy", "int", "odd"]
)  # fmt: skip
fields = st.sampled_from(
    ["$", "items", "value", "base64", "name", "tensor", "factory", "maxlen", "dtype", "hex"]
)
noise = st.recursive(
    st.none() | st.integers() | st.text(max_size=4) | words,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(fields, inner, max_size=4)
        | st.builds(lambda word, rest: rest | {"$": word}, words, st.dictionaries(fields, inner, max_size=4))
    ),
)


@given(noise)
@settings(max_examples=150, suppress_health_check=list(HealthCheck))
def test_text_that_nobody_packed_gives_plain_things_or_an_error_that_says_so(text):
    try:
        deserialize(text, {"known": torch.ones(1)})
    except CheckpointError as error:
        assert str(error)
