"""Questions and choices on narrow screens, and long lists."""

import pytest
from prompt_toolkit.layout import ScrollbarMargin
from questionary.prompts.common import InquirerControl

from accel_cli.wizard import session


@pytest.fixture
def columns(monkeypatch):
    def resize(number):
        monkeypatch.setenv("COLUMNS", str(number))

    return resize


@pytest.mark.parametrize("number", [20, 40, 80])
def test_a_choice_is_broken_between_words_below_its_first_line(columns, number):
    columns(number)
    title = "bf16: bfloat16, half the memory; for NVIDIA GPUs since Ampere, and for most others"
    lines = session._wrap_title(title).splitlines()
    assert all(len(line) < number for line in lines)
    assert " ".join(line.strip() for line in lines) == title
    assert all(line.startswith("   ") for line in lines[1:])


def test_a_question_is_broken_between_words_and_its_way_back_is_not(columns):
    columns(40)
    question, hint = session._wrap_question(
        "How many GPUs on each node?", "(or a type like a100:4; < goes back)"
    )
    lines = f"? {question} {hint}".splitlines()
    assert max(map(len, lines)) < 40
    assert [line for line in lines if "< goes back" in line]


@pytest.mark.parametrize(("number", "is_below"), [(40, True), (120, False)])
def test_an_answer_that_does_not_fit_beside_its_question_is_below_it(columns, number, is_below):
    columns(number)
    text = session._wrap_before_answers("Mixed precision?", ["(arrows, Enter)", "fp16: with loss scaling"])
    assert text.endswith("\n ") is is_below


def test_a_long_list_has_a_limited_height_and_scrolls(monkeypatch, columns):
    columns(80)
    asked = []
    monkeypatch.setattr(
        session.questionary.Question, "unsafe_ask", lambda question: asked.append(question) or 0
    )
    session._select("Which region?", [f"region-{number}" for number in range(35)])
    windows = asked[0].application.layout.find_all_windows()
    (window,) = [each for each in windows if isinstance(each.content, InquirerControl)]
    assert window.height.max == 12
    assert isinstance(window.right_margins[0], ScrollbarMargin)
