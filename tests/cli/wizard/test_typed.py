"""Parsing of typed answers, and formatting of values so that they can be typed again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_cli.wizard.questions import format_answer, is_optional, parse_answer

Texts = dict[str, str]
NAMES = st.text("abcXYZ019_.-/", min_size=1, max_size=8)
VALUES = st.text("ab =:0[]()+.{}*", min_size=1, max_size=12).map(str.strip).filter(bool)


@pytest.mark.parametrize("text", ["007", "1e-4", "no", "true", "~", "null", "s3://Bucket/PATH", "a: b", "[x"])
@pytest.mark.parametrize("annotation", [str, str | None])
def test_text_is_kept_as_typed(text, annotation):
    assert parse_answer(f" {text} ", annotation) == text


@pytest.mark.parametrize(("text", "value"), [("7", 7), ("auto", "auto"), ("2h", "2h"), ("a100:4", "a100:4")])
def test_a_possible_number_is_parsed_as_yaml(text, value):
    assert parse_answer(text, int | str) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("train=s3://Bucket/a", {"train": "s3://Bucket/a"}),
        ("a=1, b=no,c=007", {"a": "1", "b": "no", "c": "007"}),
        (
            "loss=loss=([0-9.]{1,3}), acc = acc ([01.]+)",
            {"loss": "loss=([0-9.]{1,3})", "acc": "acc ([01.]+)"},
        ),
        ("team=vision,", {"team": "vision"}),
    ],
)
def test_a_mapping_is_parsed_from_one_line(text, value):
    assert parse_answer(text, Texts) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a", "invalid entry 'a'"),
        ("a=", "invalid entry 'a='"),
        ("=b", "invalid entry '=b'"),
        ("a=1, a=2", "a is given twice"),
    ],
)
def test_an_invalid_mapping_is_an_error(text, message):
    with pytest.raises(ValueError, match=message):
        parse_answer(text, Texts)


def test_a_list_is_separated_by_commas_or_spaces():
    assert parse_answer("subnet-1, subnet-2 subnet-3", list[str]) == ["subnet-1", "subnet-2", "subnet-3"]


@pytest.mark.parametrize("annotation", [str | None, Texts, list[str], int | None])
def test_a_hyphen_clears_an_optional_value(annotation):
    assert is_optional(annotation)
    assert parse_answer("-", annotation) is None


def test_a_hyphen_is_text_for_a_required_value():
    assert not is_optional(str)
    assert parse_answer("-", str) == "-"


@given(st.dictionaries(NAMES, VALUES, min_size=1, max_size=3))
def test_formatted_values_can_be_parsed(value):
    assert parse_answer(format_answer(value), Texts) == value


def test_channels_with_options_are_formatted():
    value = {"train": {"uri": "s3://b/x", "input_mode": "FastFile"}, "test": "s3://b/y"}
    assert format_answer(value) == "train={uri: s3://b/x, input_mode: FastFile}, test=s3://b/y"
