"""Signatures of public functions that communicate: their arguments are part of the handshake of each exchange."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from accel_runtime.foundation.keywords import check_keywords, list_keywords

__all__ = ["Signature", "add_arguments", "collective", "get_signature"]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_SIGNATURE = "__collective__"


@dataclass(frozen=True)
class Signature:
    """The name of a public function that communicates, and its parameters."""

    name: str
    compared: tuple[tuple[int, str, Any, str], ...]
    """Position, name and default of each parameter that must be equal on all ranks, and its default as text."""
    rank_local: tuple[str, ...]
    """Parameters that may differ between ranks."""

    def format(self, args: tuple[Any, ...], options: dict[str, Any]) -> str:
        """Return a call as text: the name, and the compared arguments that are not their default."""
        parts = []
        for position, name, default, default_text in self.compared:
            value = args[position] if position < len(args) else options.get(name, default)
            if value is not default and (text := repr(value)) != default_text:
                parts.append(f"{name}={text}")
        return f"{self.name}({', '.join(parts)})" if parts else self.name


class _Current(threading.local):
    """The innermost public function that communicates, with its arguments; by thread, as XLA's replicas are threads."""

    call: tuple[Signature, tuple[Any, ...], dict[str, Any]] | None = None


_CURRENT = _Current()


def collective(*rank_local: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Mark a public function that communicates: all ranks must call it with equal arguments.

    Every exchange inside it compares them in its handshake, so a new parameter is compared unless it is listed.

    Args:
        *rank_local: Parameters that may differ between ranks: the data, or arguments that the function compares by itself.
    """

    def mark(function: Callable[_P, _R]) -> Callable[_P, _R]:
        signature, known = _read_signature(function, rank_local), list_keywords(function)

        @functools.wraps(function)
        def call(*args: _P.args, **options: _P.kwargs) -> _R:
            if options and known is not None:
                check_keywords(function.__name__, options, known)
            outer, _CURRENT.call = _CURRENT.call, (signature, args, options)
            try:
                return function(*args, **options)
            finally:
                _CURRENT.call = outer

        setattr(call, _SIGNATURE, signature)
        return call

    return mark


def _read_signature(function: Callable[..., Any], rank_local: tuple[str, ...]) -> Signature:
    parameters = inspect.signature(function).parameters
    rank_local = tuple(name for name in ("self", *rank_local) if name != "self" or name in parameters)
    if unknown := set(rank_local) - parameters.keys():
        raise TypeError(f"{function.__qualname__} has no parameter {', '.join(sorted(unknown))}")
    compared = tuple(
        (
            sys.maxsize if parameter.kind is parameter.KEYWORD_ONLY else position,
            name,
            parameter.default,
            repr(parameter.default),
        )
        for position, (name, parameter) in enumerate(parameters.items())
        if name not in rank_local
    )
    return Signature(function.__name__, compared, rank_local)


def get_signature(function: Any) -> Signature | None:
    """Return the signature of a function that is marked as collective, else None."""
    return getattr(function, _SIGNATURE, None)


def add_arguments(operation: str) -> str:
    """Return the name of an exchange with the arguments of the public function that it is a part of."""
    if _CURRENT.call is None:
        return operation
    signature, args, options = _CURRENT.call
    text = signature.format(args, options)
    name, separator, rest = operation.partition(" ")
    return f"{text}{separator}{rest}" if name == signature.name else f"{operation} in {text}"
