from hypothesis import given
from hypothesis import strategies as st

from accel_cli.profile.edit import change_values, edit_text
from accel_cli.profile.schema import describe
from accel_cli.profile.store import render
from accel_cli.profile.yaml_io import parse

TEXT = """\
# mine
schema_version: 1
launcher:  # how
  kind: torchrun
  # two, since the other two are taken
  nproc_per_node: 2   # of four
device: cuda
"""
KEYS = [
    "device",
    "mixed_precision",
    "launcher.nproc_per_node",
    "launcher.max_restarts",
    "env.A",
    "env.B",
    "fully_shard.wrap",
]
VALUES = st.integers(0, 9) | st.text(alphabet="ab#: '\"-", max_size=6) | st.none()
VALUES |= st.lists(VALUES, max_size=2) | st.dictionaries(
    st.text(alphabet="a*.", min_size=1, max_size=3), VALUES, max_size=2
)


def change(text, updates):
    data, lost = change_values(parse(text, "x").data, updates)
    return edit_text(text, data), lost


def test_a_value_is_replaced_in_its_line_and_comments_stay():
    text, _ = change(TEXT, {"launcher.nproc_per_node": 4, "device": "cpu"})
    assert text == TEXT.replace("nproc_per_node: 2 ", "nproc_per_node: 4 ").replace(
        "device: cuda", "device: cpu"
    )


def test_a_new_value_goes_to_its_section_and_a_none_takes_its_line_out():
    text, _ = change(TEXT, {"launcher.max_restarts": 3, "env.A": "1", "device": None})
    assert text == TEXT.replace("# of four\n", "# of four\n  max_restarts: 3\n").replace(
        "device: cuda\n", "env:\n  A: '1'\n"
    )


def test_lists_and_keys_with_values_go_on_one_line_and_comments_stay():
    names = [f"Block{number}" for number in range(30)]
    text, _ = change(TEXT, {"fully_shard.wrap": names, "parallel.tp_plan": {"*.up": "colwise"}})
    assert text.startswith(TEXT)
    assert parse(text, "x").data["fully_shard"] == {"wrap": names}
    assert parse(text, "x").data["parallel"] == {"tp_plan": {"*.up": "colwise"}}


def test_the_comment_that_accel_wrote_above_a_key_goes_with_it_and_no_other_does():
    described = describe("torchrun")
    data = {
        "schema_version": 1,
        "launcher": {"kind": "torchrun", "nproc_per_node": 2, "ranks": "all"},
        "device": "cpu",
        "env": {"A": "1"},
    }
    text = render(data, described)
    assert f"  # {described['launcher.ranks']}\n" in text
    changed_, _ = change(text, {"launcher.ranks": None, "device": None, "env.A": None})
    assert changed_ == render(
        {"schema_version": 1, "launcher": {"kind": "torchrun", "nproc_per_node": 2}}, described
    )
    mine = text.replace(described["launcher.ranks"], "mine")
    assert "  # mine\n" in change(mine, {"launcher.ranks": None})[0]


def test_another_kind_of_launcher_loses_the_keys_it_does_not_have_and_says_so():
    text, lost = change(TEXT, {"launcher.kind": "single"})
    assert lost == ["launcher.nproc_per_node"]
    assert parse(text, "x").data["launcher"] == {"kind": "single"}
    assert "# mine" in text


@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4))
def test_the_text_always_says_the_new_data(updates):
    data, _ = change_values(parse(TEXT, "x").data, updates)
    assert parse(edit_text(TEXT, data), "x").data == data
