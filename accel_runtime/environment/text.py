"""Text that crosses a process, a file or a terminal: conversions that never raise; standard library only."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

__all__ = ["CONTROLS", "decode_text", "encode_text", "escape_controls", "parse_json", "print_note"]

# Surrogates that do not stand for a byte: a Python text may contain them, as `"\ud800"`, and no encoding does.
_LONE_SURROGATE = re.compile("[\ud800-\udc7f\udd00-\udfff]")
# Control characters, the marks that change the direction of a text (https://trojansource.codes), and surrogates.
_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
CONTROLS = re.compile(rf"{_CONTROL.pattern}|[\t\n]")
"""Characters that control a terminal, move to another place, or are in no file that is UTF-8."""

_MAX_DEPTH = 100
_TOO_DEEP = f"JSON is nested more than {_MAX_DEPTH} levels deep"


def print_note(text: str) -> None:
    """Print a line of accel for the terminal, whatever the logging."""
    if sys.stderr is not None:
        print(f"accel: {text}", file=sys.stderr, flush=True)  # noqa: T201


def encode_text(text: str) -> bytes:
    """Encode a text as UTF-8, the inverse of `decode_text`; surrogates that do not stand for a byte are written as escapes."""
    try:
        return text.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return _LONE_SURROGATE.sub(_escape, text).encode(errors="surrogateescape")


def decode_text(data: bytes) -> str:
    """Decode UTF-8; other bytes become surrogates, as in the arguments and paths that Python decodes (PEP 383)."""
    return data.decode(errors="surrogateescape")


def escape_controls(text: str, *, keep_lines: bool = True) -> str:
    r"""Return a text with its control characters as escapes, such as `\x1b`, so that it cannot control a terminal.

    Args:
        text: A text, perhaps of another person: the name of a file, a field of a checkpoint.
        keep_lines: If true, newlines and tabs stay.
    """
    return (_CONTROL if keep_lines else CONTROLS).sub(_escape, text)


def parse_json(text: str | bytes) -> Any:
    """Parse JSON of another program.

    Bytes that are not UTF-8 become surrogates, as in `decode_text`.

    Raises:
        ValueError: The text is not JSON, or is nested more than 100 levels deep.
    """
    text = decode_text(text) if isinstance(text, bytes) else text
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if text.count("[") + text.count("{") > _MAX_DEPTH:
        _check_depth(value)
    return value


def _check_depth(value: Any) -> None:
    """Raise ValueError if containers are nested so deeply that recursive functions, such as `json.dumps`, may fail."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        containers = [item for item in level if isinstance(item, (dict, list))]
        level = [item for each in containers for item in (each.values() if isinstance(each, dict) else each)]
        if not level:
            return
    raise ValueError(_TOO_DEEP)


def _escape(match: re.Match[str]) -> str:
    return ascii(match[0])[1:-1]
