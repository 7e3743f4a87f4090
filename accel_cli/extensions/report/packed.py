"""Text in a third of its size: deflated, and in 85 characters that a page can contain."""

from __future__ import annotations

import base64
import gzip

__all__ = ["pack", "unpack"]

_REPLACED, _REPLACEMENTS = "<&`", ",'\""
"""Characters of the alphabet that may end or begin markup, and others in their place."""


def pack(text: str) -> str:
    """Return a text as `unpack`, or the script of the page, reads it."""
    data = base64.b85encode(gzip.compress(text.encode("utf-8", "replace"), 9, mtime=0)).decode("ascii")
    return data.translate(str.maketrans(_REPLACED, _REPLACEMENTS))


def unpack(text: str) -> str:
    """Return the text that was packed."""
    data = base64.b85decode(text.strip().translate(str.maketrans(_REPLACEMENTS, _REPLACED)))
    return gzip.decompress(data).decode("utf-8")
