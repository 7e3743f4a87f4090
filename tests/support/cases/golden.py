"""Compare text with a file under `tests/data/golden`; `WRITE_GOLDEN=1` writes the files instead."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "data" / "golden"
CONTEXT = 2
"""Equal lines shown around each difference."""


def check(name, text):
    """Fail with a diff unless a golden file holds this text.

    Args:
        name: The path of the file below `FOLDER`.
        text: What is compared; it must not depend on the machine, the time or the versions of packages.
    """
    path = FOLDER / name
    if os.environ.get("WRITE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    golden = path.read_text(encoding="utf-8") if path.exists() else ""
    if text != golden:
        diff = difflib.unified_diff(golden.splitlines(), text.splitlines(), name, "now", "", "", CONTEXT, "")
        pytest.fail(
            "\n".join(
                [
                    *diff,
                    "",
                    f"If the change is intended, run this test with WRITE_GOLDEN=1 to rewrite {name}.",
                ]
            ),
            pytrace=False,
        )


def names(folder):
    """Return the names of the golden files in a folder, without their suffix."""
    return {path.stem for path in (FOLDER / folder).iterdir()}
