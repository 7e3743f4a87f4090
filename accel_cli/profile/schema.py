"""The profile's model: the keys a file may have, what they mean, and the JSON schema made of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, Union

from pydantic import AfterValidator, BeforeValidator, Field

from accel_cli.launchers import LAUNCHERS
from accel_cli.launchers.base import Launcher
from accel_cli.launchers.single import Single
from accel_cli.planning.machine import Machine
from accel_cli.profile.fields import Answers, Choice, Question, Section
from accel_cli.profile.parallel import FullyShardSection, ParallelSection
from accel_runtime.env import Device, LogLevel, MixedPrecision, ProcessGroupBackend, Settings

__all__ = [
    "DIVIDING",
    "SCHEMA_VERSION",
    "SECTIONS",
    "Profile",
    "describe",
    "json_schema",
    "known_keys",
    "section_of",
]

SCHEMA_VERSION = 1
_FIRST_WORDS = re.compile(r"(?<=[a-z)]{2})[.;](?=\s|$)")
"""Where the first sentence of a description ends, or its first half."""
DIVIDING: Mapping[str, type[Section]] = MappingProxyType(
    {"parallel": ParallelSection, "fully_shard": FullyShardSection}
)
"""The sections whose keys are the same for every launcher."""
SECTIONS = ("launcher", *DIVIDING, "env")
"""Keys of a profile that have keys below them."""


def _precision(machine: Machine, answers: Answers) -> str:
    return "bf16" if LAUNCHERS[answers["kind"]].suits_bf16(machine) else "no"


def _knows_fp16(_: Machine, answers: Answers) -> bool:
    return "fp16" in LAUNCHERS[answers["kind"]].formats


def _numbers_as_text(env: Any) -> Any:
    """`NCCL_IB_DISABLE: 1` means the text a shell would pass on."""
    if not isinstance(env, dict):
        return env
    return {name: str(value) if type(value) in {int, float} else value for name, value in env.items()}


def _names(env: dict[str, str]) -> dict[str, str]:
    for name, value in env.items():
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(f"{name!r} is no name of an environment variable")
    return env


class Profile(Section):
    """How scripts run on this machine."""

    schema_version: Annotated[
        Literal[1],
        Field(description="Version of this file's layout; older files are brought up to date on reading."),
    ] = 1
    launcher: Annotated[
        # The union is made from the table, so that a new launcher is one line there and none here.
        Union[tuple(LAUNCHERS.values())],  # type: ignore[valid-type]  # noqa: UP007
        Field(discriminator="kind", description="How the processes start."),
    ] = Single()
    device: Annotated[
        Device, Field(description="What to compute on; `auto` is the accelerator torch finds, else the CPU.")
    ] = "auto"
    mixed_precision: Annotated[
        MixedPrecision,
        Field(description="Number format of the forward pass: `no` keeps what the model has."),
        Question(
            "Mixed precision?",
            suggest=_precision,
            choices=(
                Choice("no", "no: compute in what the model has, usually float32"),
                Choice("bf16", "bf16: bfloat16, half the memory; for TPUs, GPUs since 2020, and recent CPUs"),
                Choice("fp16", "fp16: float16 with a scaled loss; for older GPUs", offered=_knows_fp16),
            ),
        ),
    ] = "no"
    process_group_backend: Annotated[
        ProcessGroupBackend,
        Field(
            description="What carries collectives; `auto` is torch's choice for the device, `smddp` is SageMaker's own "
            "library on the instances that have it."
        ),
    ] = "auto"
    process_group_timeout: Annotated[
        int,
        Field(ge=1, description="Seconds a collective waits for the other processes before it is an error."),
    ] = 1800
    log_level: Annotated[
        LogLevel, Field(description="Level that `get_logger` sets in scripts; `auto` leaves it to them.")
    ] = "auto"
    resume: Annotated[
        bool,
        Field(
            description="Whether `accelerator.resume()` goes on from the newest checkpoint; processes that are "
            "started again do so anyway."
        ),
    ] = False
    shared_files: Annotated[
        bool,
        Field(
            description="Whether all machines see the same files; where they do not, the first one writes all of a "
            "checkpoint, and every one needs a copy of it to go on."
        ),
    ] = True
    parallel: Annotated[
        ParallelSection, Field(description="Into how many parts models, batches and sequences are divided.")
    ] = ParallelSection()
    fully_shard: Annotated[
        FullyShardSection, Field(description="How models are sharded, where `parallel.dp_shard` is not 1.")
    ] = FullyShardSection()
    env: Annotated[
        dict[str, str],
        BeforeValidator(_numbers_as_text),
        AfterValidator(_names),
        Field(description="Environment variables for the processes; those already set are left alone."),
    ] = Field(default_factory=dict)

    @property
    def settings(self) -> Settings:
        """What the processes are told."""
        return Settings(
            device=self.device,
            mixed_precision=self.mixed_precision,
            process_group_backend=self.process_group_backend,
            process_group_timeout=self.process_group_timeout,
            log_level=self.log_level,
            resume=self.resume,
            shared_files=self.shared_files,
            parallel=self.parallel.settings,
            fully_shard=self.fully_shard.settings,
        )

    @property
    def start(self) -> Launcher:
        """The launcher section, by its common type."""
        launcher: Launcher = self.launcher
        return launcher

    def data(self) -> dict[str, Any]:
        """Plain data that says everything; what is unset or empty is left out, and what divides nothing."""
        data = self.model_dump(exclude_none=True)
        data |= {name: getattr(self, name).model_dump(exclude_defaults=True) for name in DIVIDING}
        data["launcher"] = {name: value for name, value in data["launcher"].items() if value not in ({}, [])}
        return {name: value for name, value in data.items() if value != {}}


def json_schema() -> dict[str, Any]:
    """The JSON schema of a profile file, for editors and checkers."""
    schema = Profile.model_json_schema()
    schema["required"] = ["schema_version"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "accel profile"}


def known_keys() -> dict[str, str]:
    """Every dotted key a profile may hold, with its description."""
    keys = {"launcher.kind": "How the processes start: " + ", ".join(LAUNCHERS) + "."}
    for section in LAUNCHERS.values():
        for name, field in section.model_fields.items():
            keys.setdefault(f"launcher.{name}", field.description or "")
    for name, field in Profile.model_fields.items():
        if name in DIVIDING:
            inner = DIVIDING[name].model_fields.items()
            keys |= {f"{name}.{key}": each.description or "" for key, each in inner}
        elif name not in {"launcher", "schema_version"}:
            keys[name] = field.description or ""
    return keys


def describe(kind: str) -> dict[str, str]:
    """What each key of a profile means, in a few words, by dotted key.

    Args:
        kind: The launcher's.
    """
    own = {
        f"launcher.{name}": field.description or "" for name, field in LAUNCHERS[kind].model_fields.items()
    }
    return {
        key: _FIRST_WORDS.split(text)[0].replace("`", "") for key, text in {**known_keys(), **own}.items()
    }


def section_of(key: str) -> type[Section]:
    """The section that has a dotted key of those that are the same for every launcher; else the profile itself."""
    return DIVIDING.get(key.partition(".")[0], Profile) if "." in key else Profile
