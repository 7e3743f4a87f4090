"""The page of proofs and the numbers of the first pages are those of the records, and the first pages are short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from proof import RECORDS, ROOT, read_record
from proof.page import FIRST_PAGES, NAMES, PAGE, insert_numbers, render_numbers, render_page

DOCS = ROOT / "docs"
TEN = (
    "install",
    "five-lines",
    "launch",
    "data",
    "precision",
    "sharding",
    "checkpoints",
    "watching",
    "when-it-fails",
    "migrate",
)
WORDS_OF_A_FIRST_PAGE = 900
MEASURED = {"proof", "benchmarks", "benchmarks-gpu", "gpu"}
"""Pages that a measurement writes."""
WORDS = 60_000
"""Of all pages but the design notes and those of measurements; what a build generates from the sources is no file here."""


def count_words(page: Path) -> int:
    return len(page.read_text(encoding="utf-8").split())


def test_every_part_has_a_record_and_no_record_is_without_a_part() -> None:
    assert {path.stem for path in RECORDS.glob("*.json")} == set(NAMES)


def test_the_page_is_that_of_the_records() -> None:
    """`make proof` writes it; `python -m proof --render` does after a change of its texts, or after `make bench`."""
    assert PAGE.read_text(encoding="utf-8") == render_page()


@pytest.mark.parametrize("page", FIRST_PAGES, ids=lambda page: page.name)
def test_the_numbers_of_a_first_page_are_those_of_the_records(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == insert_numbers(text, FIRST_PAGES[page])


def test_the_first_pages_have_six_numbers() -> None:
    assert len(re.findall(r"^- \*\*.*\d", render_numbers(""), re.MULTILINE)) == 6


def test_a_promise_that_no_test_notices_is_counted_and_named() -> None:
    from proof import guarantees

    results = read_record("guarantees")["results"]
    number = len(results["promises"])
    assert guarantees.headline(results)[0] == f"{number} of {number}"
    first, *others = results["promises"]
    broken = {"promises": [{**first, "problem": "the tests end with 0 though it is broken"}, *others]}
    assert guarantees.headline(broken)[0] == f"{number - 1} of {number}"
    assert "- the tests end with 0 though it is broken" in guarantees.render(broken)


@pytest.mark.parametrize("name", TEN)
def test_a_first_page_is_short(name: str) -> None:
    assert count_words(DOCS / f"{name}.md") <= WORDS_OF_A_FIRST_PAGE


def test_the_ten_first_pages_come_first_in_the_navigation() -> None:
    section = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("  - Get started:\n")[2]
    pages = re.findall(r": ([\w-]+)\.md$", section.partition("\n  - ")[0], re.MULTILINE)
    assert tuple(pages) == TEN


def test_the_docs_that_are_written_by_hand_are_short() -> None:
    pages = [
        page for page in DOCS.rglob("*.md") if page.parent != DOCS / "design" and page.stem not in MEASURED
    ]
    assert sum(map(count_words, pages)) <= WORDS


def test_the_readme_has_ten_links_to_the_documentation() -> None:
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Documentation\n")[2]
    links = re.findall(r"\]\(", "".join(re.findall(r"^- .*$", section, re.MULTILINE)))
    assert len(links) == 10
