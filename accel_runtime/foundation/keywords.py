"""Errors for unknown keywords of public functions and classes, with the name that was probably meant."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

from accel_runtime.environment.settings import find_nearest

__all__ = ["check_keywords", "check_keywords_of", "check_keywords_of_methods", "list_keywords"]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_C = TypeVar("_C", bound=type)


def list_keywords(function: Callable[..., Any]) -> frozenset[str] | None:
    """Return the names of the parameters of a function; None if it takes any keyword."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(
        parameter.name
        for parameter in parameters
        if parameter.kind in {parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY}
    )


def check_keywords(name: str, used: Iterable[str], known: frozenset[str]) -> None:
    """Raise TypeError if a call has a keyword that does not exist.

    Args:
        name: The function or class that is called.
        used: The keywords of the call.
        known: The names of all parameters.
    """
    for keyword in used:
        if keyword not in known:
            names = sorted(known - {"self"})
            nearest = find_nearest(keyword, names)
            hint = f"Did you mean {nearest}?" if nearest else f"Its arguments are {', '.join(names)}."
            raise TypeError(f"Cannot call {name}() with {keyword}=: it has no such argument. {hint}")


def check_keywords_of(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make calls of a function with an unknown keyword raise the error of `check_keywords`."""
    known = list_keywords(function)
    assert known is not None
    name = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]

    @functools.wraps(function)
    def call(*args: _P.args, **options: _P.kwargs) -> _R:
        if options:
            check_keywords(name, options, known)
        return function(*args, **options)

    return call


def check_keywords_of_methods(kind: _C) -> _C:
    """Apply `check_keywords_of` to the constructor and the public methods of a class that have keywords."""
    for name, method in list(vars(kind).items()):
        is_public = name == "__init__" or not name.startswith("_")
        if is_public and isinstance(method, FunctionType) and not hasattr(method, "__wrapped__"):
            known = list_keywords(method)
            if known is not None and known > {"self"}:
                setattr(kind, name, check_keywords_of(method))
    return kind
