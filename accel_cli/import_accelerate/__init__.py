"""Reading an Accelerate config file: what of it a profile says, and for every key that it does not, why."""

from __future__ import annotations

from accel_cli.import_accelerate.convert import Imported, convert, is_accelerate_config
from accel_cli.import_accelerate.deepspeed import named

__all__ = ["Imported", "convert", "is_accelerate_config", "named"]
