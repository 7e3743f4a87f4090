"""`patch_environment` under the name of Accelerate's `utils.environment`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["patch_environment"]


@contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """Set environment variables inside a `with` block, and restore them afterwards.

    Args:
        **kwargs: Values by name; names are converted to upper case, and values to text.
    """
    new = {name.upper(): str(value) for name, value in kwargs.items()}
    before = {name: os.environ.get(name) for name in new}
    os.environ.update(new)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
