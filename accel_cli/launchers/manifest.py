"""The native manifest of a job: what the profile adds to it, merged into what the launcher generates, and its text as YAML."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml
from typing_extensions import override

from accel_cli.errors import UsageError

__all__ = ["PatchRules", "format_manifests", "merge_patch"]

_DIRECTIVE, _DELETE = "$patch", "delete"
"""The member of an item that removes the generated item of the same name, as for kubectl."""


@dataclass(frozen=True)
class PatchRules:
    """The lists that are merged item by item, and the members that a patch must not set."""

    key: str
    """The key of the profile with the patch."""
    item_keys: Mapping[str, str] = field(default_factory=dict)
    """The member that identifies an item, by the name of its list; items of other lists replace the generated ones."""
    appended: frozenset[str] = frozenset()
    """The lists whose items are added to the generated ones."""
    reserved: Mapping[str, str] = field(default_factory=dict)
    """What to do instead, by the path of a member that the launcher sets, such as `spec.containers[accel].command`."""

    def check(self, path: str, value: Any) -> None:
        """Raise if a patch sets, removes or replaces a member that the launcher sets.

        Raises:
            UsageError: With what to do instead.
        """
        is_merged = isinstance(value, (Mapping, list))
        for name, cure in self.reserved.items():
            if path == name or (not is_merged and name.startswith((f"{path}.", f"{path}["))):
                raise UsageError(f"Cannot set {self.key}.{path}: accel sets {name} itself. {cure}")


def merge_patch(generated: Any, patch: Any, rules: PatchRules, path: str = "") -> Any:
    """Return generated data with a patch merged into it: mappings by member, lists as the rules say.

    A value of None removes a member, and an item with `$patch: delete` the generated item of the same name.

    Raises:
        UsageError: The patch sets what the launcher sets, or an item of a list has no name.
    """
    if isinstance(patch, Mapping):
        result = dict(generated) if isinstance(generated, Mapping) else {}
        for name, value in patch.items():
            inner = f"{path}.{name}" if path else str(name)
            rules.check(inner, value)
            if value is None:
                result.pop(name, None)
            else:
                result[name] = merge_patch(result.get(name), value, rules, inner)
        return result
    if isinstance(patch, list):
        name, existing = path.rpartition(".")[2], generated if isinstance(generated, list) else []
        if name in rules.appended:
            return [*existing, *(item for item in patch if item not in existing)]
        if name in rules.item_keys:
            return list(_merge_items(existing, patch, rules, path))
    return patch


def _merge_items(existing: list[Any], patch: list[Any], rules: PatchRules, path: str) -> Iterator[Any]:
    """Yield the items of a list, the patched ones in their place, and then the new ones."""
    key = rules.item_keys[path.rpartition(".")[2]]
    changes: dict[str, Any] = {}
    for index, item in enumerate(patch):
        if not isinstance(item, Mapping) or key not in item:
            raise UsageError(
                f"Invalid {rules.key}.{path}[{index}]: expected an item with {key}. Add {key}, which selects the item that is changed."
            )
        changes[str(item[key])] = item
    for old in existing:
        change = changes.pop(str(old.get(key)), None)
        merged = old if change is None else _merge_item(old, change, rules, f"{path}[{old[key]}]")
        if merged is not None:
            yield merged
    for name, item in changes.items():
        if (added := _merge_item({}, item, rules, f"{path}[{name}]")) is not None:
            yield added


def _merge_item(old: Mapping[str, Any], change: Mapping[str, Any], rules: PatchRules, path: str) -> Any:
    """Return an item with its changes; None if it is removed."""
    is_removed = change.get(_DIRECTIVE) == _DELETE
    rules.check(path, None if is_removed else change)
    return None if is_removed else merge_patch(old, change, rules, path)


# As YAML

_AMBIGUOUS = re.compile(r"[-+]?\.?[0-9][\w.:+-]*|[yYnN]")
"""Text that readers of YAML 1.2 or in Go take for a number or a truth value without quotes, but PyYAML does not: 1e3, 089, y."""


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block, text that could be a number in quotes, and no references to equal data."""

    def represent_str(self, data: str) -> Any:
        style = "|" if "\n" in data else "'" if _AMBIGUOUS.fullmatch(data) else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style)

    @override
    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(str, _Dumper.represent_str)


def format_manifests(manifests: Sequence[Any]) -> str:
    """Return manifests as documents of YAML, without a newline at the end."""
    # One line for each text, which may be a script.
    text = yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**9)
    return str(text).rstrip("\n")
