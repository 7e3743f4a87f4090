"""Conversion of logged values to plain numbers, flat names and masked secrets."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from accel_runtime.foundation.logged_values import (
    flatten_values,
    mask_secrets,
    split_curves,
    split_numbers,
    to_number,
    to_numbers,
    to_plain,
)


def test_to_number_converts_only_single_elements():
    for value in (torch.tensor(2), torch.tensor([[2]]), np.int64(2), np.array([2])):
        assert (to_number(value), type(to_number(value))) == (2, int)
    assert type(to_number(np.float64(2))) is float
    several = torch.ones(2)
    assert to_number(several) is several
    assert to_number("text") == "text"
    assert to_number(None) is None
    assert to_number(True) is True


def test_nested_names_are_joined_with_slashes():
    values = {"a": {"b": {"c": torch.tensor(1)}, "d": 2}, 3: 4}
    assert flatten_values(values) == {"a/b/c": 1, "a/d": 2, "3": 4}
    assert to_numbers(values) == {"a": {"b": {"c": 1}, "d": 2}, "3": 4}


def test_names_that_become_equal_are_all_kept():
    assert to_numbers({1: "a", "1": "b", None: "d"}) == {"1_2": "a", "1": "b", "None": "d"}
    assert flatten_values({"a/b": 1, "a": {"b": 2}, "c": {}}) == {"a/b": 1, "a/b_2": 2, "c": {}}


def test_a_configuration_that_contains_itself_becomes_text_in_the_end():
    config = {"lr": 0.5}
    config["self"] = config
    assert to_plain(config, {})["self"]["self"]["lr"] == 0.5


def test_a_value_that_is_not_on_this_rank_is_not_read():
    meta = torch.empty(1, device="meta")
    assert to_number(meta) is meta


def test_numbers_and_curve_points_are_separated_from_other_values():
    values = {"a": 1, "b": True, "c": "text", "d": None, "e": {"f": 0.5}, "g": [1]}
    assert split_numbers(values) == ({"a": 1, "b": True, "e/f": 0.5}, {"c": "text", "d": None, "g": [1]})
    array = np.ones(2)
    assert split_curves({"a": 1, "c": "text", "d": None, "g": array}) == (
        {"a": 1, "c": "text"},
        {"d": None, "g": array},
    )


@pytest.mark.parametrize(
    "name",
    ["api_key", "apikey", "hub_token", "token", "WANDB_API_KEY", "password", "db.passwd", "aws_secret", "auth", "x.token"],
)  # fmt: skip
def test_secrets_are_masked(name):
    assert mask_secrets({name: "hush"}) == {name: "***"}
    assert mask_secrets({"deep": {name: "hush"}}) == {"deep": {name: "***"}}
    assert mask_secrets({"list": [{name: "hush"}, 1]}) == {"list": [{name: "***"}, 1]}


@pytest.mark.parametrize("name", ["max_tokens", "pad_token_id", "tokenizer", "token_dropout", "author", "lr"])
def test_values_without_secrets_are_not_masked(name):
    assert mask_secrets({name: "shown"}) == {name: "shown"}


def test_a_login_in_a_url_is_masked_and_empty_secrets_are_kept():
    values = {"url": "s3://me:pw@host/x", "token": None, "api_key": "", "password": 3, "auth": True}
    hidden = {"url": "s3://***@host/x", "token": None, "api_key": "", "password": "***", "auth": True}
    assert mask_secrets(values) == hidden
