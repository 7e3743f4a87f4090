import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from accel_cli.errors import ProfileError
from accel_cli.profile.yaml_io import dump, inline, parse, scalar

KEYS = st.text(min_size=1, max_size=8)
LEAVES = (
    st.none() | st.booleans() | st.integers(-(10**15), 10**15) | st.text(max_size=20) | st.floats(-1e9, 1e9)
)
DATA = st.dictionaries(
    KEYS,
    st.recursive(LEAVES, lambda kids: st.lists(kids, max_size=3) | st.dictionaries(KEYS, kids, max_size=3)),
    max_size=5,
)


@given(DATA)
def test_dumped_data_are_parsed_to_equal_data(data):
    assert parse(dump(data), "x").data == data


@given(st.text(max_size=200))
def test_any_text_is_parsed_or_rejected_with_its_location(text):
    try:
        assert isinstance(parse(text, "some.yaml").data, dict)
    except ProfileError as error:
        assert str(error).startswith("some.yaml")


@given(st.text(alphabet="[]{}&*!|>%@`'\"#:-?, \n\tab01~<=", max_size=60))
def test_any_punctuation_is_parsed_or_rejected_with_its_location(text):
    try:
        assert isinstance(parse(text, "some.yaml").data, dict)
    except ProfileError as error:
        assert str(error).startswith("some.yaml")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"), ("on", "on"), ("off", "off"), ("Yes", "Yes"), ("1:30", "1:30"), ("1:4", "1:4"),
        ("2024-01-01", "2024-01-01"), ("0x10", "0x10"), ("010", 10), ("true", True), ("null", None), ("~", None),
        ("1e-3", 1e-3), ("-0.5", -0.5), ("[1, a]", [1, "a"]), ("'2'", "2"), ("!!float 1", 1.0), ("!!str 1", "1"), ("", None), ("9" * 40, float("9" * 40)),
    ],
)  # fmt: skip
def test_scalars_are_those_of_yaml_1_2(text, value):
    assert scalar(text, "x") == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "x:3: a: duplicate key; first on line 1"),
        ("a: &here 1\nb: *here", "x:1: b: anchors and aliases are not supported"),
        ("a: &a [*a]", "anchors and aliases"),
        ("a: !!python/object:os.system x", "x:1: a: the tag"),
        ("- 1", "x:1: expected keys and values, got a list"),
        ("just text", "x:1: expected keys and values, got text"),
        ("a: [1", "x:1: invalid YAML"),
        (
            "a: 1\n---\na: 2",
            "x:2: invalid YAML: expected a single document in the stream, but found another document",
        ),
        ("[" * 500, "x"),
        ("{a: " * 400 + "1" + "}" * 400, "nested too deeply"),
        ("? [a, b]\n: 1", "expected text as a key"),
        ("\x00", "invalid YAML"),
        ("a: !!float .", "x:1: a: '.' is not a value of the tag !!float"),
        ("a: !!int 0x10", "x:1: a: '0x10' is not a value of the tag !!int"),
        ("a: !!bool maybe", "x:1: a: 'maybe' is not a value of the tag !!bool"),
        ("a: !!null 1", "x:1: a: '1' is not a value of the tag !!null"),
    ],
)
def test_unsupported_yaml_is_rejected_with_its_line(text, message):
    with pytest.raises(ProfileError) as caught:
        parse(text, "x")
    assert message in str(caught.value)


def test_every_key_has_its_line():
    lines = parse("a: 1\nb:\n  c: 2\n  d: [x,\n    y]\n", "x").lines
    assert (lines["a"], lines["b.c"], lines["b.d"]) == (1, 3, 4)


def test_an_empty_file_has_no_data():
    assert parse("# only a comment\n", "x").data == {}


def test_comments_are_written_above_their_keys():
    data = {"a": {"b": 1, "c": ["x: y", "# z"], "d": {"e": "f"}}, "g": "no\nline", "h": {}}
    text = dump(data, {"a.b": "First, in words that are more than a line of eighty columns can hold, so in two",
                       "a.c": "second", "g": "third"})  # fmt: skip
    assert parse(text, "").data == data
    assert max(map(len, text.splitlines())) <= 80
    lines = text.splitlines()
    assert lines[:4] == ["a:", lines[1], lines[2], "  b: 1"]
    assert lines[lines.index("  c:") - 1] == "  # second"
    assert "# third" in lines


NUMBERS = [
    "012345678901", "12.10", "1234567e8", "12345678901234567890", "1e3", ".5", "5.", "+1", "-0", "007", "0o17", "0x1F", "1_000",
    "0b1", "1:30", "2020-01-01", "true", "False", "TRUE", "yes", "no", "on", "y", ".inf", "nan", "1.0.0", "3e", "0.10", "1E+05",
]  # fmt: skip


@pytest.mark.parametrize("text", NUMBERS)
def test_a_variable_of_the_profile_is_the_text_of_the_file(text):
    block, flow = parse(f"env:\n  A: {text}  # why\n", "x").data, parse(f"env: {{A: {text}}}", "x").data
    assert block == flow == {"env": {"A": text}}
    assert parse(dump(block), "x").data == block
    assert scalar(text, "x", "env.A") == text
    accelerate = parse(f"additional_args:\n  environment:\n    A: {text}\n", "x")
    assert accelerate.data == {"additional_args": {"environment": {"A": text}}}


def test_a_version_of_the_profile_keeps_its_last_zero():
    assert parse("launcher:\n  trainer_version: 2.10", "x").data == {"launcher": {"trainer_version": "2.10"}}
    assert parse("pytorch_version: 2.10\nprofile: 0123", "x").data == {
        "pytorch_version": "2.10",
        "profile": "0123",
    }


def test_several_values_of_one_assignment_are_rejected():
    with pytest.raises(ProfileError, match="expected one value"):
        scalar("1\nother: 2", "x")


@pytest.mark.parametrize(
    "text", ["no", "On", "1:30", "2026-01-02", "0x1F", "1_000", "=", "bf16", "0", "true"]
)
def test_readers_of_yaml_1_1_read_what_is_written(text):
    data = {text: {text: text}}
    assert yaml.safe_load(dump(data)) == parse(dump(data), "test").data == data
    assert yaml.safe_load(f"a: {inline(text)}") == {"a": text}
