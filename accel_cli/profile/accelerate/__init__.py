"""Reading an Accelerate config file: what of it a profile says, and for every key that it does not, why."""

from __future__ import annotations

from accel_cli.profile.accelerate.convert import Imported, convert, is_accelerate
from accel_cli.profile.accelerate.deepspeed import named

__all__ = ["Imported", "convert", "is_accelerate", "named"]
