"""Which modules of a model are gathered as a whole."""

from __future__ import annotations

import pytest
from torch import nn

from accel_runtime.parallel.fully_shard import find_units


class Block(nn.Module):
    def __init__(self, size=4):
        super().__init__()
        self.up, self.down = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(4, 10, bias=False)


class Said(Model):
    _no_split_modules = ("Linear",)


def names(model, wrap):
    return [name for name, _ in find_units(model, wrap)]


def test_classes_are_found_by_name():
    assert names(Model(), "Block") == ["blocks.0", "blocks.1"]


def test_what_lies_inside_another_comes_first():
    found = names(Model(), "Block,Linear")
    assert set(found) == {
        "blocks.0",
        "blocks.1",
        "head",
        *(f"blocks.{i}.{n}" for i in (0, 1) for n in ("up", "down")),
    }
    for index in (0, 1):
        assert found.index(f"blocks.{index}.up") < found.index(f"blocks.{index}")


def test_auto_is_what_the_model_says_of_itself():
    assert set(names(Said(), "auto")) == {
        "head",
        *(f"blocks.{i}.{n}" for i in (0, 1) for n in ("up", "down")),
    }


def test_auto_is_what_the_lists_of_a_model_hold_where_it_says_nothing():
    assert names(Model(), "auto") == ["blocks.0", "blocks.1"]


def test_a_model_without_lists_is_one_unit():
    assert names(nn.Sequential(nn.Linear(2, 2)), "auto") == []
    assert names(Model(), "none") == []


def test_a_number_takes_the_smallest_modules_with_so_many_parameters_of_their_own():
    # 4 * 8 + 8 and 8 * 4 + 4; a block has 76 of which none are taken yet.
    assert names(Model(), "76") == ["blocks.0", "blocks.1"]
    assert set(names(Model(), "40")) == {"blocks.0.up", "blocks.1.up", "embed", "head"}


def test_a_class_that_is_not_there_is_refused_with_the_one_that_was_meant():
    with pytest.raises(ValueError, match=r"Model has no module of class Blok; did you mean Block\?"):
        find_units(Model(), "Blok")


def test_a_list_of_modules_is_no_unit():
    with pytest.raises(ValueError, match="ModuleList has no forward pass"):
        find_units(Model(), "ModuleList")


def test_a_module_with_a_tied_parameter_stays_with_the_rest():
    model = Model()
    model.head.weight = model.embed.weight
    assert names(model, "Embedding,Linear,Block") == names(model, "Block,Linear")
    assert "head" not in names(model, "Linear")
    assert "embed" not in names(model, "Embedding")


def test_a_tie_inside_of_a_module_stays_inside():
    model = Model()
    model.blocks[0].down = model.blocks[0].up
    assert "blocks.0" in names(model, "Block")
