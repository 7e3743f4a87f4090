"""The table of remote stores."""

from __future__ import annotations

import pytest
import torch

from accel_runtime.environment.registry import Registry
from accel_runtime.export.save_model import ExportPlan, export_model
from accel_runtime.storage import any_store
from accel_runtime.storage.any_store import locate_file, open_store
from accel_runtime.storage.errors import RequestError

URL = "s3://bucket/run"
USES = {
    "list": lambda: open_store().list(URL),
    "read": lambda: locate_file(URL),
    "export": lambda: export_model(ExportPlan.from_state({"weight": torch.ones(1)}, 1 << 20), URL),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_url_without_a_store_of_its_kind_is_refused_with_the_cure(use, monkeypatch):
    monkeypatch.setattr(any_store, "REMOTE_STORES", Registry({}))
    with pytest.raises(
        RequestError,
        match=r"Cannot use s3://bucket/run: this installation of accel has no store of s3://\. Use a directory",
    ):
        use()
