"""The properties that name one process are plain booleans."""

from __future__ import annotations

import json

import torch
import yaml

from accel_runtime import Accelerator


def test_serialisers_write_the_flags_of_a_process_as_booleans():
    accelerator = Accelerator(cpu=True)
    flags = [accelerator.is_main_process, accelerator.is_local_main_process, accelerator.is_last_process]
    assert json.dumps(flags) == "[true, true, true]"
    assert yaml.safe_dump(flags) == "- true\n- true\n- true\n"
    assert torch.tensor(flags).dtype is torch.bool
