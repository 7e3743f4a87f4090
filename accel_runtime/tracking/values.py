"""What a script logs, in the forms that trackers take: plain numbers, flat names, no secrets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["curves", "deep", "flat", "masked", "numbers", "plain", "public"]

# `token` alone would hide `max_tokens` and `pad_token_id`, which are no secrets.
_SECRET = re.compile(
    r"secret|password|passwd|credential|private_?key|api_?key|access_?key|cookie|(^|[_.-])(auth|pat)$|(^|[_.-])token$",
    re.IGNORECASE,
)
_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_HIDDEN = "***"


def plain(value: Any) -> Any:
    """The Python number in a tensor, array or NumPy scalar of one element; anything else as it is."""
    if isinstance(value, (bool, int, float, str)) or not callable(getattr(value, "item", None)):
        # A NumPy float64 is a Python float too, and text formats would print its type.
        return float(value) if isinstance(value, float) else value
    size = getattr(value, "numel", lambda: getattr(value, "size", None))()
    return value.item() if size == 1 else value


def deep(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """The same mapping with every value `plain`, at any depth."""
    return {key: deep(value) if isinstance(value, Mapping) else plain(value) for key, value in values.items()}


def flat(values: Mapping[Any, Any], above: str = "") -> dict[str, Any]:
    """Nested mappings as one, the names joined by `/`, every value `plain`."""
    done: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{above}{key}"
        done |= flat(value, f"{name}/") if isinstance(value, Mapping) else {name: plain(value)}
    return done


def numbers(values: Mapping[Any, Any]) -> tuple[dict[str, int | float], dict[str, Any]]:
    """The flattened values that are numbers, and the others."""
    every = flat(values)
    counted = {key: value for key, value in every.items() if isinstance(value, (bool, int, float))}
    return counted, {key: value for key, value in every.items() if key not in counted}


def curves(values: Mapping[Any, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The flattened values that can be points of a curve or media, and the others: None, and whole arrays."""
    every = flat(values)
    left = {k: v for k, v in every.items() if v is None or callable(getattr(v, "tolist", None))}
    return {key: value for key, value in every.items() if key not in left}, left


def public(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """A configuration with `***` in place of what its name says is secret, and of logins in addresses."""
    return {key: _public(str(key), value) for key, value in values.items()}


def _public(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return public(value)
    if isinstance(value, str):
        return _HIDDEN if value and _SECRET.search(name) else masked(value)
    return value


def masked(text: str) -> str:
    """The text without logins in addresses."""
    return _IN_URL.sub(_HIDDEN, text)
