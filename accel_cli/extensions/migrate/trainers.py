"""Scripts that train by the Trainer of a library, which `accel launch` runs as they are."""

from __future__ import annotations

import ast
from collections.abc import Iterator

__all__ = ["find_trainer"]

_LIBRARIES = {"transformers", "trl", "sentence_transformers", "setfit", "lightning", "pytorch_lightning"}
_SUFFIXES = ("Trainer", "LightningModule")


def find_trainer(tree: ast.Module) -> str:
    """Return the Trainer that a script trains with, such as `SFTTrainer of trl`; empty without one, or if the script has a training loop too."""
    names = dict(_list_names(tree))
    if not names or _has_own_loop(tree, names):
        return ""
    return next((names[name] for name in _list_used(tree) if name in names), "")


def _list_names(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the expressions for Trainers and LightningModules, with their descriptions."""
    aliases = {
        alias.asname: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.asname
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            library = (node.module or "").partition(".")[0]
            for alias in node.names:
                if library in _LIBRARIES and alias.name.endswith(_SUFFIXES):
                    yield alias.asname or alias.name, f"{alias.name} of {library}"
        elif isinstance(node, ast.Attribute) and node.attr.endswith(_SUFFIXES):
            root = ast.unparse(node).partition(".")[0]
            library = aliases.get(root, root).partition(".")[0]
            if library in _LIBRARIES:
                yield ast.unparse(node), f"{node.attr} of {library}"


def _list_used(tree: ast.Module) -> Iterator[str]:
    """Yield the expressions that are called, and those from which classes are derived."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)
        elif isinstance(node, ast.ClassDef):
            yield from map(ast.unparse, node.bases)


def _has_own_loop(tree: ast.Module, trainers: dict[str, str]) -> bool:
    """Return whether a backward pass stands outside the classes that are derived from a Trainer."""
    derived = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base) in trainers for base in node.bases)
        for inner in ast.walk(node)
    }
    return any(
        isinstance(node, ast.Attribute) and node.attr == "backward" and node not in derived
        for node in ast.walk(tree)
    )
