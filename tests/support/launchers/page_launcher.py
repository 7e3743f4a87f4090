"""The distribution that docs/writing-a-launcher.md shows: its files, and an installation of them."""

from __future__ import annotations

import re
import sys
from contextlib import contextmanager
from pathlib import Path

from accel_runtime.environment import registry

__all__ = ["KIND", "PAGE", "importable", "install"]

KIND = "background"
PAGE = dict(
    re.findall(
        r"^```(?:python|toml)\n# ([\w.]+)\n(.*?)^```$",
        (Path(__file__).parents[3] / "docs" / "writing-a-launcher.md").read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
)
"""The files of the page, by the name in the first line of each."""


def install(site):
    """Write the distribution into a new folder, as pip would."""
    info = site / "accel_background-1.0.dist-info"
    info.mkdir(parents=True)
    for module in ("background_launcher.py", "background_jobs.py"):
        (site / module).write_text(PAGE[module])
    points = re.findall(
        r'^\[project\.entry-points\."(.+)"\]\n(\w+) = "(.+)"$', PAGE["pyproject.toml"], re.MULTILINE
    )
    assert [kind for _, kind, _ in points] == [KIND]
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: accel-background\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "".join(f"[{group}]\n{kind} = {path}\n" for group, kind, path in points)
    )


@contextmanager
def importable(site):
    """Install the distribution into a new folder, from which this process imports it."""
    install(site)
    sys.path.insert(0, str(site))
    registry._find_entry_points.cache_clear()
    try:
        yield
    finally:
        sys.path.remove(str(site))
        registry._find_entry_points.cache_clear()
        for module in ("background_launcher", "background_jobs"):
            sys.modules.pop(module, None)
