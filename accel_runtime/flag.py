"""A truth that reads as a property and as a call, as scripts of every age spell it."""

from __future__ import annotations

from typing_extensions import Self, override

__all__ = ["Flag"]


class Flag(int):
    """`if accelerator.is_main_process:` and `if accelerator.is_main_process():` mean the same.

    `bool` cannot be subclassed, so this is an `int`: true and false work everywhere, `is True` does not.
    """

    def __new__(cls, value: object) -> Self:
        """A flag as true as `value`."""
        return super().__new__(cls, bool(value))

    def __call__(self) -> bool:
        """The plain truth."""
        return bool(self)

    @override
    def __repr__(self) -> str:
        return repr(bool(self))

    __str__ = __repr__
