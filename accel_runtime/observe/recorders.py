"""The table of recorders of a rank, which variables switch on, and which write files of their own into its folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from accel_runtime.environment.registry import Registry
from accel_runtime.environment.settings import RANK_FOLDER, RECORD, SettingsError

__all__ = ["RECORDERS", "RankFiles", "find_recorder", "start_recorders"]


class RankFiles(Protocol):
    """A recorder."""

    def check(self, text: str) -> None:
        """Raise SettingsError if the value of the variable is invalid."""

    def start(self, text: str, folder: Path, environ: Mapping[str, str]) -> None:
        """Record this process from now on, before the script runs.

        Args:
            text: The value of the variable.
            folder: The folder of the rank.
            environ: The environment of the rank.
        """


RECORDERS: Registry[RankFiles] = Registry(
    {
        "numerics": "accel_runtime.extensions.numerics.recorder:NUMERICS",
    },
    error=SettingsError,
)
"""Recorders by name, which is the end of the variable, in lower case."""


def find_recorder(variable: str, value: str) -> RankFiles:
    """Return the recorder of a variable; raise SettingsError if this installation has none."""
    name = variable.removeprefix(RECORD).lower()
    if name not in RECORDERS.names:
        raise SettingsError(
            f"Cannot use {variable}={value}: this installation of accel has no such recorder. Unset it."
        )
    return RECORDERS[name]


def start_recorders(environ: Mapping[str, str]) -> None:
    """Start the recorders whose variables have a value; raise SettingsError if one is invalid."""
    for variable, value in environ.items():
        if variable.startswith(RECORD) and value:
            find_recorder(variable, value).start(value, Path(environ[RANK_FOLDER]), environ)
