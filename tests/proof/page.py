"""Write `docs/proof.md` and the numbers of the first pages from the records of the parts."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from proof import ROOT, Part, read_record

__all__ = ["NAMES", "PAGE", "render_page", "write_page"]

PAGE = ROOT / "docs" / "proof.md"
NAMES = ("faults", "saves", "soak", "losses", "scripts")
"""The parts, in the order of the page; each is a module of this package."""


def render_page() -> str:
    """Return the page."""
    sections = []
    for name in NAMES:
        if record := read_record(name):
            part = cast("Part", import_module(f"proof.{name}"))
            where = f"`make proof PARTS={name}` wrote this on {record['date']}, on {record['machine']}."
            sections.append(f"## {part.TITLE}\n\n{part.render(record['results']).strip()}\n\n{where}\n")
    return "# Proof\n\n" + "\n".join(sections)


def write_page() -> None:
    """Write the page."""
    PAGE.write_text(render_page(), encoding="utf-8")
