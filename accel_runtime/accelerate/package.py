"""Names of Accelerate that accel takes from the installed package."""

from __future__ import annotations

import importlib
from typing import Any

from accel_runtime.environment.accelerate.package import PACKAGE_NAMES
from accel_runtime.environment.installation import format_install

__all__ = ["import_from_accelerate"]


def import_from_accelerate(module: str, name: str) -> Any:
    """Return an object of Accelerate for a module of accel that has the same path.

    Raises:
        AttributeError: accel does not take the name from Accelerate.
        ImportError: Accelerate is not installed, or too old.
    """
    path = module.replace("accel_runtime", "accelerate", 1)
    if name not in PACKAGE_NAMES.get(path, ()):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    # Not an AttributeError: `from ... import` would drop its text.
    try:
        return getattr(importlib.import_module(path), name)
    except ModuleNotFoundError as error:
        if error.name != "accelerate":
            raise
        raise ImportError(
            f"Cannot import {name!r} from {module!r}: it is a part of Accelerate, which is not installed. Run: "
            f"{format_install('accelerate')}",
            name=module,
        ) from None
    except AttributeError as error:
        version = importlib.import_module("accelerate").__version__
        raise ImportError(
            f"Cannot import {name!r} from {module!r}: Accelerate {version} does not have it. Run: "
            f"{format_install('accelerate', options='--upgrade')}",
            name=module,
        ) from error
