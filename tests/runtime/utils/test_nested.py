"""Functions for nested batches."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch

from accel_runtime import utils

Pair = namedtuple("Pair", ["a", "b"])  # noqa: PYI024 - what scripts have


def test_send_to_device_moves_tensors_except_skipped_keys():
    data = {"x": torch.ones(2), "rest": [{"y": torch.ones(1), "z": torch.ones(1)}], "text": "t"}
    moved = utils.send_to_device(data, "meta", skip_keys="y")
    assert moved["x"].is_meta
    assert moved["rest"][0]["z"].is_meta
    assert moved["rest"][0]["y"] is data["rest"][0]["y"]
    assert moved["text"] == "t"
    moved_batch = utils.send_to_device(data, torch.device("meta"), non_blocking=True, skip_keys=["x", "rest"])
    assert moved_batch["x"] is data["x"]
    assert moved_batch["rest"] is data["rest"]
    assert utils.send_to_device(data, "cpu")["x"] is data["x"]


def test_concatenate_joins_nested_batches():
    batches = [{"x": Pair(torch.full((1, 2), i), [torch.full((2, 1), i)])} for i in range(3)]
    joined = utils.concatenate(batches)
    assert type(joined["x"]) is Pair
    assert joined["x"].a.tolist() == [[0, 0], [1, 1], [2, 2]]
    assert utils.concatenate([b["x"].b for b in batches], dim=1)[0].tolist() == [[0, 1, 2]] * 2
    with pytest.raises(TypeError, match="Cannot concatenate str"):
        utils.concatenate(["a", "b"])
    with pytest.raises(ValueError, match="needs at least one batch"):
        utils.concatenate([])


def test_find_batch_size_returns_the_size_of_the_first_tensor():
    assert utils.find_batch_size({"n": 3, "s": torch.tensor(1), "x": [torch.ones(5, 2)]}) == 5
    with pytest.raises(ValueError, match="Cannot find the batch size"):
        utils.find_batch_size({"x": []})


def test_recursively_apply_calls_the_function_on_matching_leaves():
    data = Pair(torch.ones(1), ["text", 2])
    added = utils.recursively_apply(lambda t, n, more=0: t + n + more, data, 1, more=2)
    assert added.a.item() == 4
    assert added.b == ["text", 2]
    assert utils.recursively_apply(str.upper, data, test_type=lambda x: isinstance(x, str)).b[0] == "TEXT"
    with pytest.raises(TypeError, match="to str: test_type does not accept it"):
        utils.recursively_apply(torch.neg, data, error_on_other_type=True)


def test_honor_type_and_listify_convert_containers():
    assert utils.honor_type(Pair(1, 2), (n + 1 for n in (1, 2))) == Pair(2, 3)
    assert type(utils.honor_type((1,), iter([2]))) is tuple
    assert utils.listify({"x": torch.tensor([1, 2]), "s": "t"}) == {"x": [1, 2], "s": "t"}


def test_convert_outputs_to_fp32_converts_only_half_precision():
    def forward(x):
        """Passes."""
        return {"h": x.half(), "b": x.bfloat16(), "d": x.double(), "n": 1}

    wrapped = utils.convert_outputs_to_fp32(forward)
    out = wrapped(torch.ones(1))
    assert [out[k].dtype for k in "hbd"] == [torch.float32, torch.float32, torch.float64]
    assert wrapped.__doc__ == "Passes."
