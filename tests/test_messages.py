"""The wording of all messages: one golden file a package. Other tests check the class and the word that matters."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.cases import golden
from support.sources.messages import list_messages

ROOT = Path(__file__).parents[1]
PACKAGES = [
    package
    for root in ("accel_cli", "accel_runtime")
    for package in (
        root,
        *sorted(
            path.parent.relative_to(ROOT).as_posix()
            for path in [
                *(ROOT / root).glob("*/__init__.py"),
                *(ROOT / root / "extensions").glob("*/__init__.py"),
            ]
            if path.parent.name != "extensions"
        ),
    )
]
"""The packages of both halves, and their extensions."""


@pytest.mark.parametrize("package", PACKAGES)
def test_the_messages_of_a_package_are_those_of_its_golden_file(package: str) -> None:
    if messages := list_messages(package):
        golden.check(f"messages/{package.replace('/', '.')}.txt", messages)


def test_no_golden_file_is_of_a_package_without_messages() -> None:
    assert golden.names("messages") == {
        package.replace("/", ".") for package in PACKAGES if list_messages(package)
    }
