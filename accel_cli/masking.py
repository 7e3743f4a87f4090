"""Keeping secrets off the screen: which variables hide their value."""

from __future__ import annotations

import re

__all__ = ["is_secret", "masked"]

_SECRET = re.compile(
    r"SECRET|TOKEN|PASSWORD|PASSWD|CREDENTIAL|PRIVATE|API_?KEY|ACCESS_?KEY|(?<!KMS)_KEY$|_PAT$|COOKIE|AUTH",
    re.IGNORECASE,
)
_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def is_secret(name: str) -> bool:
    """Whether the name of a variable speaks of a secret."""
    return bool(_SECRET.search(name))


def masked(name: str, value: str) -> str:
    """The value, unless the name speaks of a secret; a login inside an address is masked too."""
    return "***" if value and is_secret(name) else _IN_URL.sub("***", value)
