"""The sections `parallel:` and `fully_shard:` of a profile: into how many parts models are divided, and how."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from typing_extensions import Self

from accel_cli.launchers import LAUNCHERS
from accel_cli.profile.fields import Answers, Choice, Question, Section
from accel_runtime.env import FullyShard, Number, Parallel, SettingsError, find_nearest

__all__ = ["FullyShardSection", "ParallelSection"]

_WRAPS = "expected auto, none, a number of parameters above 0, or names of classes"


def _size(value: int | str) -> int | str:
    if isinstance(value, int) and value < 1:
        raise ValueError("expected a whole number of at least 1, or auto")
    return value


def _wrap(value: Any) -> Any:
    """Only what `fully_shard` is told the same by any way of writing it; a number as a number."""
    names = value if isinstance(value, list) else [value]
    kinds = {type(name) for name in names}
    if not names or not kinds <= {str, int} or (isinstance(value, list) and not all(map(_is_class, names))):
        raise ValueError(_WRAPS)
    text = _wrapped(value)
    try:
        FullyShard(wrap=text)
    except SettingsError:
        raise ValueError(f"{_WRAPS}{_meant(text)}") from None
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def _is_class(name: Any) -> bool:
    return isinstance(name, str) and name.isidentifier() and name not in {"auto", "none"}


def _meant(text: str) -> str:
    meant = find_nearest(text.lower(), ["auto", "none"])
    return f"; did you mean {meant}?" if meant else ""


def _wrapped(value: int | str | list[str]) -> str:
    return ",".join(value) if isinstance(value, list) else str(value)


def _reshards(value: Any) -> Any:
    if not isinstance(value, int) or (not isinstance(value, bool) and value <= 1):
        raise ValueError("expected true, false, or a number of processes above 1")
    return value


def _one_name(value: Any) -> Any:
    """A single name is a list of one."""
    return [value] if isinstance(value, str) else value


def _several(answers: Answers) -> bool:
    return LAUNCHERS[answers["kind"]].several(answers)


def _sharded(answers: Answers) -> bool:
    return _several(answers) and answers.get("dp_shard", 1) != 1


class ParallelSection(Section):
    """Into how many parts what is divided; the product is the number of processes."""

    dp_replicate: Annotated[
        int,
        Field(
            ge=1,
            description="Groups of processes that have a whole model each, and average their gradients. With everything at 1, "
            "every process has a whole model.",
        ),
        Question(
            "How many copies of the whole model?",
            suggest=lambda *_: 1,
            when=lambda answers: _sharded(answers) and _machines(answers) != 1,
            hint="1 divides it over all processes; the number of machines keeps a copy on each of them",
        ),
    ] = 1
    dp_shard: Annotated[
        int | Literal["auto"],
        Field(
            union_mode="left_to_right",
            description="Processes that divide parameters, gradients and optimizer state among them; `auto` is as many as the "
            "other sizes leave.",
        ),
        Field(json_schema_extra={"anyOf": [{"type": "integer", "minimum": 1}, {"const": "auto"}]}),
        AfterValidator(_size),
        Question(
            "Do the model, its gradients and the optimizer's state fit on one device?",
            suggest=lambda *_: 1,
            choices=(
                Choice(1, "yes: a copy on every device, the fastest"),
                Choice("auto", "no: divide them over the devices (fully_shard)"),
            ),
            when=_several,
        ),
    ] = 1
    tp: Annotated[
        int,
        Field(ge=1, description="Processes that divide the computation of single layers among them."),
    ] = 1
    cp: Annotated[int, Field(ge=1, description="Processes that divide sequences among them.")] = 1
    tp_plan: Annotated[
        dict[str, str],
        Field(
            description="Names of modules, in which `*` stands for any text without a dot, and what each does under `tp`, as "
            "in `layers.*.up: colwise`; empty takes the model's own plan."
        ),
    ] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _travels(self) -> Self:
        try:
            _ = self.settings
        except SettingsError as error:
            raise ValueError(str(error).removeprefix("Invalid parallel.")) from None
        return self

    @property
    def settings(self) -> Parallel:
        """What the processes are told."""
        return Parallel(
            dp_replicate=self.dp_replicate,
            dp_shard=self.dp_shard,
            tp=self.tp,
            cp=self.cp,
            tp_plan=tuple(self.tp_plan.items()),
        )


def _machines(answers: Answers) -> Any:
    return answers.get("nnodes", answers.get("instance_count", 1))


_NUMBERS = ", ".join(f"`{word}`" for word in get_args(Number) if word != "auto")


class FullyShardSection(Section):
    """How torch's `fully_shard` divides a model, where `parallel.dp_shard` says that it does."""

    wrap: Annotated[
        int | str | list[str],
        Field(
            union_mode="left_to_right",
            description="Modules whose parameters are gathered together: names of classes, a number of parameters from which "
            "a module is one, `none`, or `auto`: the model's own `_no_split_modules`, else what its ModuleLists hold.",
        ),
        Field(
            json_schema_extra={
                "anyOf": [
                    {"type": "integer", "minimum": 1},
                    {"type": "string"},
                    {"type": "array", "items": {"type": "string"}},
                ]
            }
        ),
        BeforeValidator(_wrap),
    ] = "auto"
    reshard_after_forward: Annotated[
        bool | int,
        Field(
            union_mode="left_to_right",
            description="Whether gathered parameters go after the forward pass and are gathered again for the backward pass "
            "(less memory); a number shards over so many processes in between.",
        ),
        BeforeValidator(_reshards),
    ] = True
    param_dtype: Annotated[
        Number,
        Field(
            description="What parameters are gathered and computed in; `auto` is the format of `mixed_precision`."
        ),
    ] = "auto"
    reduce_dtype: Annotated[Number, Field(description="What gradients are averaged in; `auto` is fp32.")] = (
        "auto"
    )
    output_dtype: Annotated[
        Number, Field(description="What the model gives back; `auto` leaves it to `mixed_precision`.")
    ] = "auto"
    cast_forward_inputs: Annotated[
        bool, Field(description="Whether inputs of gathered modules are brought to `param_dtype`.")
    ] = True
    cpu_offload: Annotated[
        bool,
        Field(description="Whether shards, gradients and optimizer state stay in host memory (slow)."),
        Question(
            "Keep parameters, gradients and optimizer state in host memory?",
            suggest=lambda *_: False,
            choices=(
                Choice(False, "no: on the devices"),
                Choice(True, "yes: fits more, and every step waits for the transfers"),
            ),
            when=_sharded,
        ),
    ] = False
    activation_checkpointing: Annotated[
        bool,
        Field(description="Whether activations of wrapped modules are computed again in the backward pass."),
        Question(
            "Compute activations again in the backward pass?",
            suggest=lambda *_: False,
            choices=(
                Choice(False, "no: keep them in memory"),
                Choice(
                    True, "yes: much less memory for long sequences or large batches, a third more to compute"
                ),
            ),
            when=_sharded,
        ),
    ] = False
    ignore: Annotated[
        list[str],
        BeforeValidator(_one_name),
        Field(
            description="Names of parameters or modules that stay whole everywhere; `*` stands for any text without a dot."
        ),
    ] = Field(default_factory=list)

    @model_validator(mode="after")
    def _travels(self) -> Self:
        try:
            _ = self.settings
        except SettingsError as error:
            raise ValueError(str(error).removeprefix("Invalid fully_shard.")) from None
        return self

    @property
    def settings(self) -> FullyShard:
        """What the processes are told."""
        return FullyShard(
            wrap=_wrapped(self.wrap),
            reshard_after_forward=self.reshard_after_forward,
            param_dtype=self.param_dtype,
            reduce_dtype=self.reduce_dtype,
            output_dtype=self.output_dtype,
            cast_forward_inputs=self.cast_forward_inputs,
            cpu_offload=self.cpu_offload,
            activation_checkpointing=self.activation_checkpointing,
            ignore=tuple(self.ignore),
        )
