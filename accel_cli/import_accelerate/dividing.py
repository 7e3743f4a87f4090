"""How an Accelerate config file divides models: FSDP, DeepSpeed's ZeRO and meshes, in the words of a profile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from accel_cli.import_accelerate import deepspeed, fsdp
from accel_cli.import_accelerate.fates import Fate
from accel_cli.import_accelerate.values import Refused, shown, whole
from accel_cli.import_accelerate.words import Around, Became, Vocabulary, Word, dropped, kept, off, off_or

__all__ = ["Division"]

Path = tuple[str, ...]
"""The keys that lead to a value."""

_SIZES = ("dp_replicate", "dp_shard", "tp", "cp")
_TYPES = {"fsdp_config": "FSDP", "deepspeed_config": "DEEPSPEED"}
_ULYSSES = "DeepSpeed's sequence parallelism is not in accel; parallel.cp divides sequences too"


def _size(name: str) -> Word:
    def word(value: Any, around: Around) -> Became | Refused:
        number = whole("expected a whole number of at least 1", 1)(value)
        if isinstance(number, Refused):
            return number
        if number == 1:
            return off()
        return dropped(around.idle) if around.idle else kept(f"parallel.{name}: {number}")

    return word


def _rotation(value: Any, around: Around) -> Became:
    if around.beside.get("cp_size", 1) in {1, "1"} or value == "allgather":
        return off() if value != "allgather" else kept("torch's context parallel gathers too")
    return dropped("torch's context parallel gathers (allgather)")


def _ulysses(value: Any, around: Around) -> Became:
    return off() if around.beside.get("sp_size", 1) in {1, "1"} or value in {"", None} else dropped(_ULYSSES)


_WORDS: Mapping[str, Word] = {
    **{f"{name}_size": _size(name) for name in _SIZES},
    "cp_backend": off_or(kept("it is torch's here too")),
    "cp_comm_strategy": _rotation,
    **dict.fromkeys(
        ("sp_size", "sp_backend", "sp_seq_length", "sp_seq_length_is_variable", "sp_attn_implementation"),
        _ulysses,
    ),
}
_MESH = Vocabulary(_WORDS, prefix="parallelism_config_", bare=False)
_TP = Vocabulary({"tp_size": _size("tp")})


@dataclass(frozen=True)
class Division:
    """What a file says of dividing models, and how it comes out."""

    engine: str = ""
    """The section that says how models are sharded, where `distributed_type` asks for that."""
    machines: int = 1
    precision: str = "no"
    nowhere: str = ""
    """Why there are no processes to divide models over; empty where there are."""
    fsdp_config: Mapping[str, Any] = field(default_factory=dict)
    deepspeed_config: Mapping[str, Any] = field(default_factory=dict)
    parallelism_config: Mapping[str, Any] = field(default_factory=dict)
    tp_config: Mapping[str, Any] = field(default_factory=dict)
    file: Mapping[str, Any] | None = None
    """What the JSON file for DeepSpeed says, where there is one."""

    @property
    def parallel(self) -> dict[str, Any]:
        """The section `parallel:`, without what is 1."""
        if self.nowhere:
            return {}
        mesh, alone = _MESH.own(self.parallelism_config), _TP.own(self.tp_config)
        sizes = {name: _whole(mesh.get(f"{name}_size", 1)) for name in _SIZES}
        sizes["tp"] = max(sizes["tp"], _whole(alone.get("tp_size", 1)))
        found = {name: size for name, size in sizes.items() if size > 1}
        return found or self._by_engine

    @property
    def options(self) -> dict[str, Any]:
        """The section `fully_shard:`."""
        found: dict[str, Any] = {}
        if not self._idle:
            for _, became, _ in self._became():
                found |= {} if isinstance(became, Refused) else became.keys
        return found

    @property
    def said(self) -> str:
        """The section `parallel:` on one line; empty where nothing is divided."""
        return ", ".join(f"parallel.{name}: {size}" for name, size in self.parallel.items())

    def fate(self, path: Path, value: Any) -> Fate:
        """What becomes of a value below one of the sections."""
        section, key = path[0], path[1]
        return self._sections[section][0].fate(key, value, self._around(section))

    def of_file(self) -> Iterator[tuple[Path, Any, Fate]]:
        """Every value of the JSON file with the keys that lead to it, and what becomes of it."""
        around = self._around("deepspeed_config")
        for path, value in _leaves(self.file or {}):
            yield path, value, Vocabulary({path[-1]: deepspeed.file_word(path)}).fate(path[-1], value, around)

    def misread(self) -> Iterator[tuple[str, str, str]]:
        """What has a say and cannot be understood: key, what was expected, what came."""
        for place, became, value in self._became():
            if isinstance(became, Refused):
                yield place, became.expected, shown(place, value)

    @property
    def _sections(self) -> Mapping[str, tuple[Vocabulary, Mapping[str, Any]]]:
        return {
            "fsdp_config": (fsdp.SECTION, self.fsdp_config),
            "deepspeed_config": (deepspeed.SECTION, self.deepspeed_config),
            "parallelism_config": (_MESH, self.parallelism_config),
            "tp_config": (_TP, self.tp_config),
        }

    @property
    def _strategy(self) -> str:
        """FSDP1's word for how the engine shards; empty without an engine."""
        if self.engine == "fsdp_config":
            return fsdp.strategy(fsdp.SECTION.own(self.fsdp_config))
        if self.engine != "deepspeed_config":
            return ""
        return "full_shard" if deepspeed.stage(self.deepspeed_config, self.file) else "no_shard"

    @property
    def _by_engine(self) -> dict[str, Any]:
        if self._strategy in {"", "no_shard"}:
            return {}
        hybrid = self._strategy.startswith("hybrid") and self.machines > 1
        return {**({"dp_replicate": self.machines} if hybrid else {}), "dp_shard": "auto"}

    @property
    def _idle(self) -> str:
        """Why the engine's options have no say."""
        if {"dp_shard", "cp"} & self.parallel.keys():
            return ""
        return self.nowhere or "it has no say, since nothing is sharded here"

    def _around(self, section: str) -> Around:
        vocabulary, values = self._sections[section]
        idle = self.nowhere
        if section.startswith(("fsdp", "deepspeed")):
            idle = (
                self._idle
                if section == self.engine
                else f"it has no say without distributed_type: {_TYPES[section]}"
            )
        return Around(vocabulary.own(values), self.machines, idle, self.precision, read=self.file is not None)

    def _became(self) -> Iterator[tuple[str, Became | Refused, Any]]:
        """Every value that has a say: its place, what it became, and what it was."""
        for section in (self.engine, "parallelism_config", "tp_config"):
            if section and not self.nowhere:
                vocabulary, values = self._sections[section]
                around = self._around(section)
                for key, value in values.items():
                    if value is not None and (word := vocabulary.word(key)):
                        yield f"{section}.{key}", word(value, around), value
        if self.engine == "deepspeed_config":
            around = self._around(self.engine)
            for path, value in _leaves(self.file or {}):
                if value is not None:
                    yield (
                        ".".join((deepspeed.FILE_KEY, *path)),
                        deepspeed.file_word(path)(value, around),
                        value,
                    )


def _whole(value: Any) -> int:
    """A size; 1 where it cannot be understood, which is reported elsewhere."""
    number = whole("", 1)(value)
    return number if isinstance(number, int) else 1


def _leaves(data: Mapping[str, Any], above: Path = ()) -> Iterator[tuple[Path, Any]]:
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*above, str(key)))
        else:
            yield (*above, str(key)), value
