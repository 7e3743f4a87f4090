"""The profile's model: its keys with their descriptions, and the JSON schema built from it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

from pydantic import (
    AfterValidator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    SerializeAsAny,
    create_model,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, SchemaValidator, core_schema

from accel_cli.launchers import LAUNCHERS
from accel_cli.launchers.launcher import Launcher
from accel_cli.launchers.sections import Answers, Choice, Question, Section
from accel_cli.launchers.single import Single
from accel_cli.planning.machine import Machine
from accel_cli.profile.settings_sections import (
    ENGINE_SECTIONS,
    CompileSection,
    EngineSection,
    FullyShardSection,
    ParallelSection,
)
from accel_runtime.environment.engines import ENGINES
from accel_runtime.environment.settings import Device, LogLevel, MixedPrecision, ProcessGroupBackend, Settings

__all__ = [
    "SCHEMA_VERSION",
    "SECTIONS",
    "SETTINGS_SECTIONS",
    "Profile",
    "describe",
    "json_schema",
    "known_keys",
]

SCHEMA_VERSION = 1
_FIRST_WORDS = re.compile(r"(?<=[a-z)]{2})[.;](?=\s|$)")
"""Matches the end of the first sentence or clause of a description."""
SETTINGS_SECTIONS: Mapping[str, type[Section]] = MappingProxyType(
    {
        "parallel": ParallelSection,
        "fully_shard": FullyShardSection,
        **{name: ENGINE_SECTIONS[name] for name in ENGINE_SECTIONS.names},
        "compile": CompileSection,
    }
)
"""The sections with the same keys for every launcher."""
SECTIONS = ("launcher", *SETTINGS_SECTIONS, "env")
"""Keys of a profile that hold keys themselves."""


def _suggest_precision(machine: Machine, answers: Answers) -> str:
    return "bf16" if LAUNCHERS[answers["kind"]].prefers_bf16(machine) else "no"


def _supports_fp16(_: Machine, answers: Answers) -> bool:
    return "fp16" in LAUNCHERS[answers["kind"]].formats


def _check_names(env: dict[str, str]) -> dict[str, str]:
    for name, value in env.items():
        if not name or "=" in name or any(map(str.isspace, name)) or "\0" in name + value:
            raise ValueError(f"{name!r} cannot name an environment variable")
    return env


class _LauncherSection:
    """The annotation of a launcher section: `kind` chooses the class, and no other launcher is loaded."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            _validate_launcher, serialization=handler(source).get("serialization")
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, _: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return handler(_build_union(dict(LAUNCHERS)))


def _validate_launcher(value: Any) -> Launcher:
    if isinstance(value, Launcher):
        return value
    kind = value.get("kind") if isinstance(value, dict) else None
    known = kind if isinstance(kind, str) and kind in LAUNCHERS else "single"
    launcher: Launcher = SchemaValidator(_build_union({known: LAUNCHERS[known]})).validate_python(value)
    return launcher


def _build_union(launchers: Mapping[str, type[Launcher]]) -> CoreSchema:
    """Return the schema of a section that is of one of some launchers."""
    choices = {kind: launcher.__pydantic_core_schema__ for kind, launcher in launchers.items()}
    return core_schema.tagged_union_schema(choices, discriminator="kind")


class _Settings(Section):
    """The keys before the sections of engines."""

    schema_version: Annotated[
        Literal[1],
        Field(description="Version of the file format."),
    ] = 1
    launcher: Annotated[
        SerializeAsAny[Launcher], _LauncherSection, Field(description="Launcher that starts the processes.")
    ] = Single()
    device: Annotated[
        Device,
        Field(description="Device; `auto` is the accelerator that torch detects, otherwise the CPU."),
    ] = "auto"
    mixed_precision: Annotated[
        MixedPrecision,
        Field(description="Mixed precision of the forward pass: `no` keeps the dtype of the model."),
        Question(
            "Mixed precision?",
            suggest=_suggest_precision,
            choices=(
                Choice("no", "no: the model's own dtype, usually float32"),
                Choice("bf16", "bf16: bfloat16, half the memory; for TPUs, GPUs since 2020, and recent CPUs"),
                Choice("fp16", "fp16: float16 with loss scaling; for older GPUs", available=_supports_fp16),
            ),
        ),
    ] = "no"
    process_group_backend: Annotated[
        ProcessGroupBackend,
        Field(
            description="Backend of collectives; `auto` is torch's default for the device, `smddp` is SageMaker's "
            "library on instances that have it."
        ),
    ] = "auto"
    process_group_timeout: Annotated[
        int,
        Field(ge=1, description="Seconds a collective waits for the other processes before it fails."),
    ] = 1800
    log_level: Annotated[
        LogLevel, Field(description="Log level that `get_logger` sets; `auto` leaves it to the script.")
    ] = "auto"
    gradient_accumulation_steps: Annotated[
        int,
        Field(
            ge=1,
            description="Micro-batches per optimizer step, unless the script passes another number. A Trainer has an argument of "
            "its own, `gradient_accumulation_steps`.",
        ),
    ] = 1
    global_batch_size: Annotated[
        Literal["none"] | Annotated[int, Field(ge=1)],
        Field(
            description="Samples per optimizer step over all processes, unless the script passes another number: each step sees the samples "
            "that one process would see, whatever the number of processes. `none` counts micro-batches instead.",
        ),
    ] = "none"
    resume: Annotated[
        bool,
        Field(
            description="Load the newest checkpoint in `accelerator.resume()`; restarted processes always load it."
        ),
    ] = False
    measure_flops: Annotated[
        bool,
        Field(
            description="Count the floating-point operations of the third step, which takes longer, for the FLOP/s and the utilization "
            "(MFU) of the run."
        ),
    ] = False
    check_replay: Annotated[
        Annotated[int, Field(ge=1)] | Literal["never"],
        Field(
            description="Run one in so many forward and backward passes of each model that an `Accelerator` prepares again, twice, and "
            "warn if the results differ.",
        ),
    ] = "never"
    shared_files: Annotated[
        bool,
        Field(
            description="True if all nodes share a file system; launchers whose nodes do not share one set it to false. "
            "The first node then writes the whole checkpoint, and every node needs a copy of it to resume."
        ),
    ] = True
    node_dir: Annotated[
        str,
        Field(
            description="Save most checkpoints with automatic names in this directory on the disk of each node, which is faster; empty "
            "saves all in the project directory. A script may set its own."
        ),
    ] = ""
    store_every: Annotated[
        int,
        Field(
            ge=1,
            description="With `node_dir`, save one of so many checkpoints in the project directory, which outlives the nodes.",
        ),
    ] = 10
    store_timeout: Annotated[
        int,
        Field(
            ge=1,
            description="Repeat a failing call to an object store for so many seconds; then the save or load fails.",
        ),
    ] = 180
    parallel: Annotated[
        ParallelSection, Field(description="Sizes of data, tensor, context and sequence parallelism.")
    ] = ParallelSection()
    fully_shard: Annotated[
        FullyShardSection, Field(description="Options of sharding, used if `parallel.dp_shard` is not 1.")
    ] = FullyShardSection()


if TYPE_CHECKING:
    _EngineSections = _Settings
else:
    _EngineSections = create_model(
        "_EngineSections",
        __base__=_Settings,
        **{
            name: (
                ENGINE_SECTIONS[name],
                Field(default=ENGINE_SECTIONS[name](), description=ENGINE_SECTIONS[name].summary),
            )
            for name in ENGINE_SECTIONS.names
        },
    )
    """The keys up to the sections of engines."""


class Profile(_EngineSections):
    """Settings for running scripts on this machine."""

    compile: Annotated[
        CompileSection,
        Field(
            description="Options of `torch.compile`, unless the script passes its own. A Trainer has an argument of its own, "
            "`torch_compile`."
        ),
    ] = CompileSection()
    env: Annotated[
        dict[str, str],
        AfterValidator(_check_names),
        Field(
            # `yaml_io` reads numbers and truth values as text.
            json_schema_extra={"additionalProperties": {"type": ["string", "number", "boolean"]}},
            description="Environment variables of the processes; variables that are already set keep their value.",
        ),
    ] = Field(default_factory=dict)

    @property
    def settings(self) -> Settings:
        """The settings that the processes receive."""
        sections = {name: getattr(self, name).settings for name in SETTINGS_SECTIONS}
        engines = tuple(sections[name] for name in ENGINES.names)
        names = {field.name for field in fields(Settings)} & set(Profile.model_fields)
        return Settings(**{name: sections.get(name, getattr(self, name)) for name in names}, engines=engines)

    @property
    def engine(self) -> EngineSection | None:
        """The section of the engine that trains models; None if torch does."""
        engine = self.settings.engine
        section: EngineSection | None = getattr(self, engine.name) if engine else None
        return section

    def data(self) -> dict[str, Any]:
        """Return the profile as plain data, without unset and empty values, and defaults of the sections of settings."""
        data = self.model_dump()
        data |= {name: getattr(self, name).model_dump(exclude_defaults=True) for name in SETTINGS_SECTIONS}
        # Only here: inside a patch of a job, None removes a member.
        launcher = {name: value for name, value in data["launcher"].items() if value not in (None, {}, [])}
        return {
            name: value for name, value in {**data, "launcher": launcher}.items() if value not in (None, {})
        }


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a profile file, for editors and validators."""
    schema = Profile.model_json_schema()
    schema["required"] = ["schema_version"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "accel profile"}


def known_keys(kind: str | None = None) -> dict[str, str]:
    """Return the description of each dotted key that a profile may have, with all launchers or with one kind."""
    keys = {} if kind else {"launcher.kind": f"Launcher that starts the processes: {', '.join(LAUNCHERS)}."}
    for key, field in _list_fields([LAUNCHERS[kind]] if kind else LAUNCHERS.values()):
        keys.setdefault(key, field.description or "")
    return keys


def list_values(key: str) -> list[str]:
    """Return the values of a dotted key that have a name, with all launchers: `no`, `bf16`, `true`, `auto`, ..."""
    annotations = [field.annotation for name, field in _list_fields(LAUNCHERS.values()) if name == key]
    names = {value for annotation in annotations for value in _list_names(annotation)}
    return sorted(LAUNCHERS) if key == "launcher.kind" else sorted(names)


def _list_fields(launchers: Iterable[type[Launcher]]) -> Iterator[tuple[str, FieldInfo]]:
    """Yield the dotted keys of a profile with their fields."""
    for launcher in launchers:
        yield from ((f"launcher.{name}", field) for name, field in launcher.model_fields.items())
    for name, field in Profile.model_fields.items():
        if name in SETTINGS_SECTIONS:
            inner = SETTINGS_SECTIONS[name].model_fields.items()
            yield from ((f"{name}.{key}", each) for key, each in inner)
        elif name not in {"launcher", "schema_version"}:
            yield name, field


def _list_names(annotation: Any) -> Iterator[str]:
    """Yield the names among the values of a type."""
    if annotation is bool:
        yield from ("true", "false")
    for part in get_args(annotation):
        if get_origin(annotation) is not Literal:
            yield from _list_names(part)
        elif isinstance(part, str):
            yield part


def describe(kind: str) -> dict[str, str]:
    """Return a short description of each key, by dotted key, for a kind of launcher."""
    return {key: _FIRST_WORDS.split(text)[0].replace("`", "") for key, text in known_keys(kind).items()}
