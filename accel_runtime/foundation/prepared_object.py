"""The base of prepared objects, which type checkers accept where the script's object is expected."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["PreparedObject"]

if TYPE_CHECKING:
    # A class that derives from Any can be assigned to every type, as `unittest.mock.Mock` in typeshed.
    PreparedObject = Any
else:
    PreparedObject = object
