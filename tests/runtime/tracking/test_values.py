"""What a script logs, made plain, flat and public."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from accel_runtime.tracking.base import (
    flatten_values,
    mask_secrets,
    split_curves,
    split_numbers,
    to_number,
    to_numbers,
)


def test_one_element_is_a_python_number_and_more_stay_what_they_are():
    for value in (torch.tensor(2), torch.tensor([[2]]), np.int64(2), np.array([2])):
        assert (to_number(value), type(to_number(value))) == (2, int)
    assert type(to_number(np.float64(2))) is float
    several = torch.ones(2)
    assert to_number(several) is several
    assert to_number("text") == "text"
    assert to_number(None) is None
    assert to_number(True) is True


def test_nested_names_are_joined():
    values = {"a": {"b": {"c": torch.tensor(1)}, "d": 2}, 3: 4}
    assert flatten_values(values) == {"a/b/c": 1, "a/d": 2, "3": 4}
    assert to_numbers(values) == {"a": {"b": {"c": 1}, "d": 2}, 3: 4}


def test_numbers_and_points_are_told_from_the_rest():
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
def test_secrets_are_hidden(name):
    assert mask_secrets({name: "hush"}) == {name: "***"}
    assert mask_secrets({"deep": {name: "hush"}}) == {"deep": {name: "***"}}


@pytest.mark.parametrize("name", ["max_tokens", "pad_token_id", "tokenizer", "token_dropout", "author", "lr"])
def test_what_is_no_secret_is_shown(name):
    assert mask_secrets({name: "shown"}) == {name: "shown"}


def test_a_login_in_an_address_is_hidden_and_what_says_nothing_is_left_alone():
    values = {"url": "s3://me:pw@host/x", "token": None, "api_key": "", "password": 3, "auth": True}
    hidden = {"url": "s3://***@host/x", "token": None, "api_key": "", "password": "***", "auth": True}
    assert mask_secrets(values) == hidden
