"""The row of the table of recorders that records the numbers of steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from accel_runtime.environment.settings import SettingsError
from accel_runtime.observe.import_hooks import call_after_torch_import
from accel_runtime.observe.step_records.record import Selection
from accel_runtime.observe.step_records.recorder import Recorder

__all__ = ["NUMERICS", "Numerics"]


class Numerics:
    """The recorder; a text is that of `Selection.parse`."""

    def check(self, text: str) -> None:
        """Raise SettingsError if the text is invalid."""
        _parse(text)

    def start(self, text: str, folder: Path, environ: Mapping[str, str]) -> None:
        """Record the steps of this process once it has imported torch."""
        call_after_torch_import(Recorder(folder, _parse(text), environ).install)


NUMERICS = Numerics()


def _parse(text: str) -> Selection:
    try:
        return Selection.parse(text)
    except ValueError as error:
        raise SettingsError(f"Cannot use record_numerics: {error}") from None
