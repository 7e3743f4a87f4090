"""Walking nested batches."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple

import pytest
import torch

from accel_runtime import nested as tree

Point = namedtuple("Point", "x y")  # noqa: PYI024 - the old spelling is what scripts have


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
def test_containers_keep_their_type_and_every_leaf_is_visited_in_order(nested):
    visited = []
    copy = tree.map_leaves(lambda leaf: visited.append(leaf) or leaf, nested)
    assert copy == nested
    assert type(copy) is type(nested)
    assert visited == tree.leaves(nested)


def test_a_default_dict_keeps_its_factory():
    copy = tree.map_leaves(str, defaultdict(list, a=1))
    assert copy["b"] == []


def test_only_tensors_are_mapped_by_map_tensors():
    assert tree.map_tensors(lambda t: t.item(), [torch.tensor(1), 2, "3", None]) == [1, 2, "3", None]


def test_send_moves_tensors_and_what_can_move_itself():
    class Movable:
        device = torch.device("cpu")

        def to(self, device):
            self.device = device
            return self

    meta = torch.device("meta")
    tensor, movable, text = tree.send_to([torch.ones(2), Movable(), "text"], meta)
    assert tensor.device == movable.device == meta
    assert text == "text"


def test_send_does_not_copy_what_is_there_already():
    tensor = torch.ones(2)
    assert tree.send_to({"x": tensor}, torch.device("cpu"))["x"] is tensor


def test_a_container_that_can_move_itself_keeps_what_is_not_among_its_items():
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
