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
    "fully_shard.wrap",
]
TEXTS = st.text(alphabet="ab#: '\"-", max_size=6) | st.none()
VALUES = st.integers(0, 9) | TEXTS
VALUES |= st.lists(VALUES, max_size=2) | st.dictionaries(
    st.text(alphabet="a*.", min_size=1, max_size=3), VALUES, max_size=2
)
UPDATES = st.builds(
    lambda values, variables: values | variables,
    st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4),
    st.dictionaries(
        st.sampled_from(["env.A", "env.B"]), TEXTS | st.sampled_from(["012", "1e3", "true", "null"])
    ),
)


def change_text(text, updates):
    data, lost = change_values(parse(text, "x").data, updates)
    return edit_text(text, data), lost


def test_a_value_is_replaced_in_its_line_and_comments_are_kept():
    text, _ = change_text(TEXT, {"launcher.nproc_per_node": 4, "device": "cpu"})
    assert text == TEXT.replace("nproc_per_node: 2 ", "nproc_per_node: 4 ").replace(
        "device: cuda", "device: cpu"
    )


def test_a_new_value_is_added_to_its_section_and_none_removes_its_line():
    text, _ = change_text(TEXT, {"launcher.max_restarts": 3, "env.A": "1", "device": None})
    assert text == TEXT.replace("# of four\n", "# of four\n  max_restarts: 3\n").replace(
        "device: cuda\n", "env:\n  A: '1'\n"
    )


def test_lists_and_mappings_are_written_on_one_line():
    names = [f"Block{number}" for number in range(30)]
    text, _ = change_text(TEXT, {"fully_shard.wrap": names, "parallel.tp_plan": {"*.up": "colwise"}})
    assert text.startswith(TEXT)
    assert parse(text, "x").data["fully_shard"] == {"wrap": names}
    assert parse(text, "x").data["parallel"] == {"tp_plan": {"*.up": "colwise"}}


def test_a_generated_comment_is_removed_with_its_key_and_others_are_kept():
    described = describe("torchrun")
    data = {
        "schema_version": 1,
        "launcher": {"kind": "torchrun", "nproc_per_node": 2, "ranks": "all"},
        "device": "cpu",
        "env": {"A": "1"},
    }
    text = render(data, described)
    assert f"  # {described['launcher.ranks']}\n" in text
    changed_, _ = change_text(text, {"launcher.ranks": None, "device": None, "env.A": None})
    assert changed_ == render(
        {"schema_version": 1, "launcher": {"kind": "torchrun", "nproc_per_node": 2}}, described
    )
    changed_text = text.replace(described["launcher.ranks"], "mine")
    assert "  # mine\n" in change_text(changed_text, {"launcher.ranks": None})[0]


def test_changing_the_launcher_removes_and_reports_keys_it_does_not_have():
    text, lost = change_text(TEXT, {"launcher.kind": "single"})
    assert lost == ["launcher.nproc_per_node"]
    assert parse(text, "x").data["launcher"] == {"kind": "single"}
    assert "# mine" in text


def test_changing_the_launcher_changes_the_comments_that_accel_wrote_for_its_keys():
    data = {"schema_version": 1, "launcher": {"kind": "torchrun", "nnodes": 2, "nproc_per_node": 2}}
    text = render(data, describe("torchrun")).replace(describe("torchrun")["launcher.nproc_per_node"], "mine")
    changed, _ = change_text(text, {"launcher.kind": "slurm"})
    after = {**data, "launcher": {**data["launcher"], "kind": "slurm"}}
    expected = render(after, describe("slurm")).replace(describe("slurm")["launcher.nproc_per_node"], "mine")
    assert changed == expected


@given(UPDATES)
def test_the_edited_text_parses_to_the_new_data(updates):
    data, _ = change_values(parse(TEXT, "x").data, updates)
    assert parse(edit_text(TEXT, data), "x").data == data
