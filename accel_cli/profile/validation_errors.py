"""What is wrong with a profile, in words: pydantic's findings with place, expectation and nearest name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import takewhile
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from accel_cli.errors import SHOWN, Problem
from accel_cli.launchers import LAUNCHERS
from accel_cli.launchers.base import Launcher
from accel_cli.profile.fields import Section
from accel_cli.profile.schema import SECTIONS, Profile, known_keys, section_of
from accel_runtime.env import explain_fsdp1_option, find_nearest

__all__ = ["did_you_mean", "explain", "one_of", "unknown_key"]

_WORDS = {
    "int_type": "expected a whole number",
    "bool_type": "expected true or false",
    "float_type": "expected a number",
    "string_type": "expected text",
    "dict_type": "expected keys and values",
    "list_type": "expected a list",
    "model_type": "expected keys and values",
    "model_attributes_type": "expected keys and values",
    "greater_than_equal": "expected at least {ge}",
    "greater_than": "expected more than {gt}",
    "string_too_short": "expected at least {min_length} character",
    "less_than_equal": "expected at most {le}",
}
_LONGEST = 60
_SHORTEST_PREFIX, _LONGEST_REST = 4, 3
"""A beginning that two names share says what was meant from this length on, with at most so much behind it."""
_SHORTEST_WHOLE = 3
"""A name that is all of the beginning of another says what was meant from this length on."""
_EXAMPLES = {
    "launcher": "launcher.kind",
    "parallel": "parallel.dp_shard",
    "fully_shard": "fully_shard.wrap",
    "env": "env.NAME, a variable",
}
_MEET = "launcher.rdzv_endpoint, HOST:PORT"
_RENAMED = {
    "num_processes": "launcher.nproc_per_node, the number of processes on each machine",
    "num_machines": "launcher.nnodes",
    "machine_rank": "the option --node-rank of accel launch, if machines do not number themselves",
    "node_rank": "the option --node-rank of accel launch, if machines do not number themselves",
    "main_process_ip": _MEET,
    "main_process_port": _MEET,
    "master_addr": _MEET,
    "master_port": _MEET,
    "use_cpu": "device: cpu",
    "compute_environment": "launcher.kind",
    "distributed_type": "launcher.kind, and the sections parallel and fully_shard",
    "fsdp_config": "the sections parallel and fully_shard",
    "deepspeed_config": "the sections parallel and fully_shard",
    "parallelism_config": "the section parallel",
    "dynamo_config": "Accelerator(dynamo_backend=...) in the script",
    "num_cpu_threads_per_process": "launcher.omp_num_threads",
    "downcast_bf16": "mixed_precision: bf16",
}
"""How a profile says keys of Accelerate and torchrun."""


def explain(error: ValidationError, where: Mapping[str, str]) -> list[Problem]:
    """Pydantic's findings as ours, one for each key.

    Args:
        error: What pydantic found.
        where: File and line, or option, by dotted key; the empty key is the whole.
    """
    problems: dict[str, Problem] = {}
    for item in error.errors(include_url=False):
        section, key = _locate([str(part) for part in item["loc"]])
        key = _find_field(item, key, section)
        if key in problems:
            continue
        if len(problems) < SHOWN:
            problems[key] = _problem(item, key, section, _place(key, where))
        else:  # looking for what was meant takes time, and nobody reads so many
            problems[key] = Problem(_place(key, where), key, str(item["msg"]))
        if item["type"] == "union_tag_invalid":
            problems |= {problem.key: problem for problem in _judge_keys(item, where)}
    return list(problems.values())


def unknown_key(key: str, where: str, kind: object = None) -> Problem:
    """A key no profile has, with the one that was probably meant.

    Args:
        key: The key.
        where: File and line, or option.
        kind: The `launcher.kind` in force, whose keys are guessed first; None if it is not known.
    """
    kinds = _list_kinds(key)
    if key in SECTIONS:
        return Problem(where, key, f"this is a section. Name a key of it, such as {_EXAMPLES[key]}")
    if kinds:
        return Problem(where, key, f"this key belongs to launcher.kind: {' or '.join(kinds)}")
    if instead := explain_fsdp1_option(key.rpartition(".")[2]):
        return Problem(where, key, f"this is a word of FSDP1; under fully_shard, {instead}")
    return Problem(where, key, "this key is not known", hint=_hint_key(key, kind))


def _list_kinds(key: str) -> list[str]:
    """Return the launchers that have a key of the section `launcher`; none for a key of another section."""
    section, _, name = key.rpartition(".")
    return [kind for kind, each in LAUNCHERS.items() if section == "launcher" and name in each.model_fields]


def _hint_key(key: str, kind: object) -> str:
    """Return the hint for an unknown key: what it is called here, or which key was probably meant."""
    section, _, name = key.rpartition(".")
    if section in {"", "launcher"} and name in _RENAMED:
        return f"use {_RENAMED[name]}"
    if name.isdigit():
        return "quote a value that has commas: '0,1'"
    meant = _guess_key(key, kind)
    kinds = _list_kinds(meant or "")
    if kind in LAUNCHERS and kinds and kind not in kinds:
        return f"did you mean {meant}, a key of launcher.kind: {' or '.join(kinds)}?"
    return did_you_mean(meant)


def did_you_mean(meant: str | None) -> str:
    """The hint that names what was probably meant, or no hint."""
    return f"did you mean {meant}?" if meant else ""


def one_of(words: Iterable[str]) -> str:
    """What was expected where there are only these: `expected a, b or c`."""
    listed = list(words)
    return (
        f"expected {listed[0]}" if len(listed) == 1 else f"expected {', '.join(listed[:-1])} or {listed[-1]}"
    )


def _guess_key(key: str, kind: object) -> str | None:
    """Return the key that was probably meant: of its section first, which is the active launcher's own for `launcher`."""
    section, _, name = key.rpartition(".")
    known = list(known_keys())
    active = LAUNCHERS.get(kind) if isinstance(kind, str) else None
    near = [f"launcher.{field}" for field in active.model_fields] if active else []
    if section != "launcher":
        near = [*(full for full in known if full.rpartition(".")[0] == section), *near]
    groups = [{full.rpartition(".")[2]: full for full in reversed(group)} for group in (near, known) if group]
    for group in groups:
        if name in group:
            return group[name]
    for group in groups:
        if meant := _match_prefix(name, reversed(group)) or _match_letters(name, group):
            return group[meant]
    # Behind a known section, any short name looks like any other.
    return find_nearest(key, known) if section and section.partition(".")[0] not in SECTIONS else None


def _match_prefix(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that begins with a name, or shares most of its beginning, if that is most of it."""
    known = list(known)
    if whole := [other for other in known if len(name) >= _SHORTEST_WHOLE and other.startswith(name)]:
        return whole[0]
    shared = {
        other: sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(name, other, strict=False)))
        for other in known
    }
    best = max(shared, key=lambda other: shared[other], default="")
    return best if shared.get(best, 0) >= max(_SHORTEST_PREFIX, len(name) - _LONGEST_REST) else None


def _match_letters(name: str, known: Iterable[str]) -> str | None:
    """Return the known name with nearly the letters of a name; in front of few letters, the first has to be right."""
    return find_nearest(
        name, [other for other in known if len(name) > _SHORTEST_PREFIX or other[0] == name[:1]]
    )


def _locate(loc: list[str]) -> tuple[type[Section], str]:
    """The section a finding is about, and its dotted key."""
    section = section_of(".".join(loc))
    if loc[:1] == ["launcher"] and len(loc) > 1:
        # pydantic names the member of the union it tried, which is no part of the key.
        section = LAUNCHERS[loc[1]]
        loc = [loc[0], *loc[2:]]
    return section, ".".join(loc[: 2 if loc[0] in SECTIONS else 1])


def _judge_keys(item: Mapping[str, Any], where: Mapping[str, str]) -> list[Problem]:
    """Return the mistakes in a launcher section of an unknown kind, as one of the kind that was probably meant."""
    kind = find_nearest(item["ctx"]["tag"], list(LAUNCHERS))
    if kind is None:
        fields = {name for section in LAUNCHERS.values() for name in section.model_fields}
        unknown = [f"launcher.{name}" for name in item["input"] if name not in fields]
        return [unknown_key(key, _place(key, where)) for key in unknown[:SHOWN]]
    try:
        Profile.model_validate({"launcher": {**item["input"], "kind": kind}})
    except ValidationError as error:
        return explain(error, where)
    return []


def _find_field(item: Mapping[str, Any], key: str, section: type[Section]) -> str:
    """Return the key of the field that a finding about a whole section is about, if it is about one."""
    if item["type"] == "union_tag_invalid":
        return "launcher.kind"
    name, colon, _ = str(item.get("ctx", {}).get("error", "")).partition(": ")
    named = isinstance(item["input"], (dict, BaseModel)) and colon and name in section.model_fields
    return f"{key}.{name}" if named and key else key


def _problem(item: Mapping[str, Any], key: str, section: type[Section], where: str) -> Problem:
    kind, came = item["type"], item["input"]
    if kind == "extra_forbidden":
        return unknown_key(
            key, where, section.model_fields["kind"].default if issubclass(section, Launcher) else None
        )
    if kind == "union_tag_invalid":
        return _unknown_kind(str(item["ctx"]["tag"]), where)
    if kind == "union_tag_not_found":
        return Problem(where, "launcher.kind", one_of(LAUNCHERS), "nothing", _suggest_kind(came))
    if kind == "value_error":
        whole = isinstance(came, (dict, BaseModel))
        text = str(item["ctx"]["error"]).removeprefix(f"{key.rpartition('.')[2]}: " if whole else "")
        return Problem(where, key, text, "" if whole else _shown(came))
    literals = _literals(section, key.rpartition(".")[2])
    meant = (
        find_nearest(came, [word for word in literals if isinstance(word, str)])
        if isinstance(came, str)
        else None
    )
    return Problem(where, key, _expected(item, key, section, literals), _shown(came), did_you_mean(meant))


def _suggest_kind(section: Mapping[str, Any]) -> str:
    """Return the hint that names the kind to set, as far as the keys of a launcher section tell it."""
    kinds = [kind for kind, launcher in LAUNCHERS.items() if set(section) <= set(launcher.model_fields)]
    return f"set launcher.kind too: {' or '.join(kinds)}" if section and kinds else ""


def _unknown_kind(kind: str, where: str) -> Problem:
    return Problem(
        where,
        "launcher.kind",
        one_of(LAUNCHERS),
        repr(kind),
        did_you_mean(find_nearest(kind, list(LAUNCHERS))),
    )


def _expected(item: Mapping[str, Any], key: str, section: type[Section], literals: list[Any]) -> str:
    if literals and item["type"] in {"literal_error", "int_type", "string_type"}:
        field = section.model_fields[key.rpartition(".")[2]]
        number = ["a whole number"] if int in get_args(field.annotation) else []
        return one_of([*number, *map(str, literals)])
    words = _WORDS.get(item["type"])
    return words.format(**item.get("ctx", {})) if words else str(item["msg"])


def _literals(section: type[Section], name: str) -> list[Any]:
    """The fixed values a field may have."""
    field = section.model_fields.get(name)
    if field is None:
        return []
    parts = (field.annotation, *get_args(field.annotation))
    return [value for part in parts for value in get_args(part) if isinstance(value, (str, int))]


def _shown(value: object) -> str:
    text = "keys and values" if isinstance(value, dict) else repr(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def _place(key: str, where: Mapping[str, str]) -> str:
    """The nearest place known: the key's own, its section's, or the whole."""
    while key and key not in where:
        key = key.rpartition(".")[0]
    return where.get(key, where.get("", "profile"))
