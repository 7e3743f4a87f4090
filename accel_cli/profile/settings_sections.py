"""The sections `parallel`, `fully_shard` and `compile` of a profile, and the table of those of engines."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import BeforeValidator, Field, model_validator
from typing_extensions import override

from accel_cli.errors import UsageError
from accel_cli.launchers import LAUNCHERS
from accel_cli.launchers.sections import Answers, Choice, CountOrAuto, Question, Section
from accel_runtime.environment.engines import ENGINES, EngineConfig
from accel_runtime.environment.installation import format_install
from accel_runtime.environment.registry import Registry
from accel_runtime.environment.settings import (
    Compile,
    CompileMode,
    FullyShard,
    Number,
    Parallel,
    SettingsError,
)

__all__ = [
    "ENGINE_SECTIONS",
    "CompileSection",
    "EngineSection",
    "FullyShardSection",
    "ParallelSection",
    "SettingsSection",
    "is_sharded",
]


def _check_wrap(value: Any) -> Any:
    if not _is_wrap(value):
        raise ValueError("expected auto, none, a number of parameters above 0, or names of classes")
    return value


def _is_wrap(value: Any) -> bool:
    if isinstance(value, list):
        names = [name for name in value if isinstance(name, str) and name.isidentifier()]
        return bool(value) and names == value and not {"auto", "none"} & set(names)
    try:
        FullyShard(wrap=str(value))
    except SettingsError:
        return False
    return type(value) in {int, str}


def _format_wrap(value: int | str | list[str]) -> str:
    return ",".join(value) if isinstance(value, list) else str(value)


def _to_list(value: Any) -> Any:
    """Convert a single name to a list."""
    return [value] if isinstance(value, str) else value


def _has_several_processes(answers: Answers) -> bool:
    return LAUNCHERS[answers["kind"]].may_start_several(answers)


def is_sharded(answers: Answers) -> bool:
    """Return True if models are sharded, by torch or by an engine."""
    return _has_several_processes(answers) and answers.get("dp_shard", 1) != 1


def _is_fully_sharded(answers: Answers) -> bool:
    """Return True if models are sharded, and the question for an engine is answered with no."""
    return is_sharded(answers) and all(answers.get(ENGINES[name].switch) == "no" for name in ENGINES.names)


class SettingsSection(Section):
    """A section with the fields of a class of `accel_runtime.environment.settings`, which checks their values."""

    @property
    def settings(self) -> Any:
        """The settings that the processes receive."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        try:
            _ = self.settings
        except SettingsError as error:
            raise ValueError(re.sub(r"^(Invalid )?\w+\.(?=\w+:? )", "", str(error))) from None
        return self


class EngineSection(SettingsSection):
    """The section of an engine, by the name of its settings."""

    summary: ClassVar[str]
    """The description of the section."""

    def check_is_installed(self) -> None:
        """Raise if the package of the engine is missing in this environment.

        Raises:
            UsageError: It is.
        """
        engine = self.settings
        spec = find_spec(engine.package)
        # A folder of this name, as for JSON files, has no origin.
        if spec is None or spec.origin is None:
            raise UsageError(
                f"Cannot use {engine.key}: {engine.choice}: {engine.title} is not installed. Install it: "
                f"{format_install(engine.package, extra=engine.package)}"
            )

    def complete(self, resolved: Any) -> Any:
        """Return the `Resolved` profile with the values that the engine's file decides, and the configuration.

        Raises:
            UsageError: The file cannot be read, is invalid, or contradicts the profile.
        """
        raise NotImplementedError

    def list_file_values(self, resolved: Any) -> Mapping[str, tuple[Any, str]]:
        """Return the values of keys of the profile that the engine's file sets, with their sources."""
        raise NotImplementedError

    def list_configuration(self, config: EngineConfig) -> Mapping[str, tuple[Any, str]]:
        """Return the values of a configuration by their names, with their sources."""
        raise NotImplementedError


ENGINE_SECTIONS: Registry[type[EngineSection]] = Registry(
    {
        "deepspeed": "accel_cli.extensions.deepspeed.section:DeepSpeedSection",
    }
)
"""The section of each engine in a profile, by its name."""


class ParallelSection(SettingsSection):
    """Sizes of data, tensor, context and sequence parallelism; the product is the world size."""

    dp_replicate: Annotated[
        int,
        Field(
            ge=1,
            description="Number of model replicas, whose gradients are averaged; if all sizes are 1, every process has a replica.",
        ),
        Question(
            "How many replicas of the model?",
            suggest=lambda *_: 1,
            when=lambda answers: _is_fully_sharded(answers) and _count_nodes(answers) != 1,
            hint="1 shards it over all processes; the number of nodes keeps a replica on each node",
        ),
    ] = 1
    dp_shard: Annotated[
        CountOrAuto,
        Field(
            description="Number of processes that shard parameters, gradients and optimizer state; `auto` is all remaining ones.",
        ),
        Question(
            "Do the model, its gradients and the optimizer's state fit on one device?",
            suggest=lambda *_: 1,
            choices=(
                Choice(1, "yes: a replica on every device, the fastest"),
                Choice("auto", "no: shard them over the devices"),
            ),
            when=_has_several_processes,
        ),
    ] = 1
    tp: Annotated[
        int,
        Field(ge=1, description="Number of processes that split each layer (tensor parallelism)."),
    ] = 1
    cp: Annotated[
        int,
        Field(
            ge=1,
            description="Number of processes that split each sequence, and gather keys and values in attention (context "
            "parallelism).",
        ),
    ] = 1
    sp: Annotated[
        int,
        Field(
            ge=1,
            description="Number of processes that split each sequence, and exchange it for heads in attention (sequence "
            "parallelism, Ulysses); it divides the heads, and excludes `cp`.",
        ),
    ] = 1
    tp_plan: Annotated[
        dict[str, str],
        Field(
            description="Tensor-parallel style by module name, as in `layers.*.up: colwise`; `*` matches any text without a dot. "
            "If empty, the model's own plan is used."
        ),
    ] = Field(default_factory=dict)

    @property
    @override
    def settings(self) -> Parallel:
        """The settings that the processes receive."""
        return Parallel(**{**dict(self), "tp_plan": tuple(self.tp_plan.items())})


def _count_nodes(answers: Answers) -> Any:
    return answers.get("nnodes", answers.get("instance_count", 1))


_NUMBERS = ", ".join(f"`{word}`" for word in get_args(Number) if word != "auto")


class FullyShardSection(SettingsSection):
    """Options of torch's `fully_shard`, used if `parallel.dp_shard` is not 1."""

    wrap: Annotated[
        Annotated[int, Field(ge=1)] | str | list[str],
        Field(
            description="Modules whose parameters are gathered together: class names, a minimum number of parameters, "
            "`none`, or `auto` (the model's `_no_split_modules`, otherwise the items of its ModuleLists); the largest one "
            "is in memory at once, and many small ones synchronize often."
        ),
        BeforeValidator(_check_wrap),
    ] = "auto"
    reshard_after_forward: Annotated[
        bool | Annotated[int, Field(gt=1)],
        Field(
            description="Free gathered parameters after the forward pass and gather them again for the backward pass "
            "(less memory); `false` keeps full parameters within a step, and saves one of the two gathers; a number reshards "
            "them over that many processes."
        ),
    ] = True
    param_dtype: Annotated[
        Number,
        Field(
            description="Dtype of gathered parameters and of the computation; `auto` is that of `mixed_precision`, or of the model "
            "without it."
        ),
    ] = "auto"
    reduce_dtype: Annotated[
        Number,
        Field(
            description="Dtype in which gradients are reduced and accumulated; `auto` is fp32 for half-precision parameters, "
            "and the dtype of the model otherwise."
        ),
    ] = "auto"
    output_dtype: Annotated[
        Number,
        Field(
            description="Dtype of the model's outputs, not of modules inside it; `auto` is fp32 with `mixed_precision`, or that of the "
            "computation without it."
        ),
    ] = "auto"
    cast_forward_inputs: Annotated[
        bool, Field(description="Cast the inputs of wrapped modules to `param_dtype`.")
    ] = True
    cpu_offload: Annotated[
        bool,
        Field(description="Keep shards, gradients and optimizer state in host memory (slow)."),
        Question(
            "Keep parameters, gradients and optimizer state in host memory?",
            suggest=lambda *_: False,
            choices=(
                Choice(False, "no: on the devices"),
                Choice(True, "yes: larger models fit, but every step waits for transfers"),
            ),
            when=_is_fully_sharded,
        ),
    ] = False
    activation_checkpointing: Annotated[
        bool,
        Field(
            description="Recompute activations of wrapped modules in the backward pass (less memory, a third more computation)."
        ),
        Question(
            "Recompute activations in the backward pass?",
            suggest=lambda *_: False,
            choices=(
                Choice(False, "no: keep them in memory"),
                Choice(
                    True,
                    "yes: much less memory for long sequences or large batches, about a third more compute",
                ),
            ),
            when=_is_fully_sharded,
        ),
    ] = False
    ignore: Annotated[
        list[str],
        BeforeValidator(_to_list),
        Field(
            description="Names of parameters or modules that are not sharded, and whose gradients are averaged; `*` matches any text "
            "without a dot."
        ),
    ] = Field(default_factory=list)

    @property
    @override
    def settings(self) -> FullyShard:
        """The settings that the processes receive."""
        values = {"wrap": _format_wrap(self.wrap), "ignore": tuple(self.ignore)}
        return FullyShard(**{**dict(self), **values})


class CompileSection(SettingsSection):
    """Options of `torch.compile` for prepared models."""

    backend: Annotated[
        str, Field(description="Name of the compiler, such as `inductor`; `no` does not compile.")
    ] = "no"
    mode: Annotated[CompileMode, Field(description="What the compiler optimizes for.")] = "default"
    fullgraph: Annotated[bool, Field(description="Treat a graph break as an error.")] = False
    dynamic: Annotated[
        Literal["auto"] | bool,
        Field(description="Compile for shapes that change; `auto` lets torch detect it."),
    ] = "auto"
    regional: Annotated[
        bool,
        Field(
            description="Compile repeated blocks separately, which takes less time: the first is compiled, and the others "
            "reuse it."
        ),
    ] = False

    @property
    @override
    def settings(self) -> Compile:
        """The settings that the processes receive."""
        return Compile(**dict(self))
