"""Functions on nested batches."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple

import pytest
import torch

from accel_runtime.foundation import nested as tree

Point = namedtuple("Point", "x y")  # noqa: PYI024 - scripts use this form


class Pair(tuple):
    __slots__ = ()


@pytest.mark.parametrize(
    "nested",
    [
        [1, [2, 3]],
        (1, (2,), []),
        Point(1, [2]),
        Pair((1, 2)),
        {"a": 1, "b": {"c": 2}},
        OrderedDict(a=1, b=2),
        UserDict(a=1, b=[2]),
        defaultdict(list, a=1),
        7,
        "text",
        None,
    ],
    ids=lambda nested: type(nested).__name__,
)
def test_map_leaves_keeps_container_types_and_visits_leaves_in_order(nested):
    visited = []
    copy = tree.map_leaves(lambda leaf: visited.append(leaf) or leaf, nested)
    assert copy == nested
    assert type(copy) is type(nested)
    assert visited == tree.leaves(nested)


def test_map_leaves_keeps_the_factory_of_a_defaultdict():
    copy = tree.map_leaves(str, defaultdict(list, a=1))
    assert copy["b"] == []


def test_map_tensors_maps_only_tensors():
    assert tree.map_tensors(lambda t: t.item(), [torch.tensor(1), 2, "3", None]) == [1, 2, "3", None]


def test_send_to_moves_tensors_and_objects_with_a_to_method():
    class Movable:
        device = torch.device("cpu")

        def to(self, device):
            self.device = device
            return self

    meta = torch.device("meta")
    tensor, movable, text = tree.send_to([torch.ones(2), Movable(), "text"], meta)
    assert tensor.device == movable.device == meta
    assert text == "text"


def test_send_to_does_not_copy_tensors_on_the_device():
    tensor = torch.ones(2)
    assert tree.send_to({"x": tensor}, torch.device("cpu"))["x"] is tensor


def test_send_to_keeps_attributes_of_containers_with_a_to_method():
    class Encoding(UserDict):
        def to(self, device):
            self.data = {key: value.to(device) for key, value in self.data.items()}
            return self

    meta = torch.device("meta")
    encoding = Encoding(x=torch.ones(2))
    encoding.lengths = [2]
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2)])
    (sent, moved), _ = tree.send_to([(encoding, packed), None], meta)
    assert sent["x"].device == moved.data.device == meta
    assert sent.lengths == [2]
    assert moved.batch_sizes.device.type == "cpu"  # where torch needs it


def test_a_mapping_with_batch_dimensions_keeps_their_number():
    class Batch(UserDict):
        batch_dims = 0

        def auto_batch_size_(self, batch_dims):
            self.batch_dims = batch_dims

    batch = Batch(x=torch.ones(2, 3))
    batch.batch_dims = 2
    assert tree.map_tensors(torch.neg, batch).batch_dims == 2
