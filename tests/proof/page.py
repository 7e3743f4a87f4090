"""Write `docs/proof.md` and the numbers of the first pages from the records of the parts."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any, cast

from proof import ROOT, Part, read_record

from benchmarks.summary import headline_speed, summarize

__all__ = ["FIRST_PAGES", "NAMES", "PAGE", "insert_numbers", "render_numbers", "render_page", "write_pages"]

PAGE = ROOT / "docs" / "proof.md"
FIRST_PAGES = {ROOT / "README.md": "docs/", ROOT / "docs" / "index.md": ""}
"""Pages with the numbers, and the folder of the documentation in their links."""
NAMES = ("faults", "saves", "soak", "losses", "scripts", "guarantees")
"""The parts, in the order of the page; each is a module of this package."""
NUMBERS = ("faults", "saves", "soak", "scripts", "guarantees")
"""The parts whose numbers are on the first pages, with that of the speed."""
BEGIN, END = "<!-- proof -->\n", "<!-- /proof -->\n"
"""What encloses the numbers of a first page."""
_INTRODUCTION = """\
# Proof

Claims of this documentation, measured. `make proof` runs everything and writes this page; the command below each section runs
that section alone. Its records are in `docs/proof/`. Faults, hosts and saves are real: processes, signals, network namespaces,
disks and an S3 server on the machine that is named; cases that came out wrong are listed.
"""


def render_page() -> str:
    """Return the page."""
    sections = []
    for name, part, record in _read_parts():
        where = f"`make proof PARTS={name}`, on {record['date']}, on {record['machine']}."
        sections.append(f"## {part.TITLE}\n\n{part.render(record['results']).strip()}\n\n{where}\n")
    speed = (
        f"## Speed\n\n{summarize().strip()}\n\n`make bench`, and `make bench-gpu` on a machine with a GPU.\n"
    )
    return "\n".join([_INTRODUCTION, *sections, speed])


def render_numbers(folder: str) -> str:
    """Return the numbers of a page whose links to the documentation begin with `folder`."""
    headlines = [part.headline(record["results"]) for name, part, record in _read_parts() if name in NUMBERS]
    numbers = "".join(f"- **{number}** {text}\n" for number, text in [*headlines, headline_speed()])
    return f"{numbers}\n`make proof` measures them. [Proof]({folder}proof.md) has the methods, and each case that came out wrong.\n"


def insert_numbers(text: str, folder: str) -> str:
    """Return the text of a first page with its numbers replaced."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}{render_numbers(folder)}{END}{after}"


def write_pages() -> None:
    """Write the page, and the numbers of the first pages."""
    PAGE.write_text(render_page(), encoding="utf-8")
    for page, folder in FIRST_PAGES.items():
        page.write_text(insert_numbers(page.read_text(encoding="utf-8"), folder), encoding="utf-8")


def _read_parts() -> Iterator[tuple[str, Part, dict[str, Any]]]:
    for name in NAMES:
        if record := read_record(name):
            yield name, cast("Part", import_module(f"proof.{name}")), record
