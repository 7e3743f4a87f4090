"""The modules of a model whose parameters are gathered together."""

from __future__ import annotations

import pytest
from support.training.models import ResidualNet
from torch import nn

from accel_runtime.parallel.fsdp_units import find_units


def build_model():
    """Return a model with an embedding before its blocks."""
    model = ResidualNet(4, outputs=10, bias=False)
    model.first = nn.Embedding(10, 4)
    return model


def list_units(model, wrap):
    return [name for name, _ in find_units(model, wrap)]


def test_classes_are_found_by_name():
    assert list_units(build_model(), "ResidualBlock") == ["blocks.0", "blocks.1"]


def test_inner_units_are_listed_before_outer_units():
    names = list_units(build_model(), "ResidualBlock,Linear")
    assert set(names) == {
        "blocks.0",
        "blocks.1",
        "head",
        *(f"blocks.{i}.{n}" for i in (0, 1) for n in ("up", "down")),
    }
    for index in (0, 1):
        assert names.index(f"blocks.{index}.up") < names.index(f"blocks.{index}")


def test_auto_uses_no_split_modules_of_a_model():
    model = build_model()
    model._no_split_modules = ("Linear",)
    assert set(list_units(model, "auto")) == {
        "head",
        *(f"blocks.{i}.{n}" for i in (0, 1) for n in ("up", "down")),
    }


def test_auto_uses_module_lists_without_no_split_modules():
    assert list_units(build_model(), "auto") == ["blocks.0", "blocks.1"]


def test_a_model_without_module_lists_is_one_unit():
    assert list_units(nn.Sequential(nn.Linear(2, 2)), "auto") == []
    assert list_units(build_model(), "none") == []


def test_a_number_selects_the_smallest_modules_with_enough_parameters():
    # 4 * 8 + 8 and 8 * 4 + 4; a block has 76 of which none are taken yet.
    assert list_units(build_model(), "76") == ["blocks.0", "blocks.1"]
    assert set(list_units(build_model(), "40")) == {"blocks.0.up", "blocks.1.up", "first", "head"}


def test_an_unknown_class_is_rejected_with_a_suggestion():
    with pytest.raises(
        ValueError, match=r"ResidualNet has no module of class ResidualBlok; did you mean ResidualBlock\?"
    ):
        find_units(build_model(), "ResidualBlok")


def test_a_module_list_is_rejected_as_a_unit():
    with pytest.raises(ValueError, match="ModuleList has no forward pass"):
        find_units(build_model(), "ModuleList")


def test_a_module_with_a_tied_parameter_is_no_unit():
    model = build_model()
    model.head.weight = model.first.weight
    assert list_units(model, "Embedding,Linear,ResidualBlock") == list_units(model, "ResidualBlock,Linear")
    assert "head" not in list_units(model, "Linear")
    assert "first" not in list_units(model, "Embedding")


def test_a_tie_within_a_module_does_not_matter():
    model = build_model()
    model.blocks[0].down = model.blocks[0].up
    assert "blocks.0" in list_units(model, "ResidualBlock")
