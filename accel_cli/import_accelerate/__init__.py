"""Convert an Accelerate config file to a profile, with an answer for each of its keys."""

from __future__ import annotations

from accel_cli.import_accelerate.convert import Imported, convert, read_deepspeed_file
from accel_cli.profile.store import is_accelerate_config

__all__ = ["Imported", "convert", "is_accelerate_config", "read_deepspeed_file"]
