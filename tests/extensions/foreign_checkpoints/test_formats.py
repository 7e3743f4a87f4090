"""The table of formats of other programs."""

from __future__ import annotations

import pytest

from accel_runtime.environment.registry import Registry
from accel_runtime.storage import formats
from accel_runtime.storage.any_store import open_store
from accel_runtime.storage.errors import CheckpointError, RequestError
from accel_runtime.storage.scan import find_complete_checkpoint


@pytest.mark.parametrize("name", ["optimizer.bin", ".metadata"])
def test_a_folder_of_a_format_that_is_not_installed_is_no_checkpoint(name, tmp_path, monkeypatch):
    (tmp_path / name).touch()
    with pytest.raises(RequestError, match=r"was written by|accel checkpoint import"):
        find_complete_checkpoint(str(tmp_path), open_store())
    monkeypatch.setattr(formats, "FORMATS", Registry({}, "accel.none"))
    with pytest.raises(RequestError, match="No checkpoint found in"):
        find_complete_checkpoint(str(tmp_path), open_store())
    with pytest.raises(CheckpointError, match=r"is not a checkpoint: it has no checkpoint\.json"):
        open_store().find(str(tmp_path))
