"""The sections `parallel`, `fully_shard`, `deepspeed` and `compile` of a profile."""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from typing_extensions import Self, override

from accel_cli.launchers import LAUNCHERS
from accel_cli.launchers.sections import Answers, Choice, CountOrAuto, ExpandedPath, Question, Section
from accel_runtime.environment.settings import (
    Compile,
    CompileMode,
    DeepSpeed,
    FullyShard,
    Number,
    Parallel,
    SettingsError,
)
from accel_runtime.extensions.deepspeed.settings import ZERO_3, OffloadDevice, read_deepspeed_file

__all__ = ["CompileSection", "DeepSpeedSection", "FullyShardSection", "ParallelSection"]


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


def _is_sharded(answers: Answers) -> bool:
    return _has_several_processes(answers) and answers.get("dp_shard", 1) != 1


def _is_fully_sharded(answers: Answers) -> bool:
    """Return True if models are sharded, and the question for DeepSpeed is answered with no."""
    return _is_sharded(answers) and answers.get("stage") == "no"


def _uses_deepspeed(answers: Answers) -> bool:
    return _is_sharded(answers) and answers.get("stage", "no") != "no"


class _SettingsSection(Section):
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


class ParallelSection(_SettingsSection):
    """Sizes of data, tensor and context parallelism; the product is the world size."""

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
        int, Field(ge=1, description="Number of processes that split each sequence (context parallelism).")
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


class FullyShardSection(_SettingsSection):
    """Options of torch's `fully_shard`, used if `parallel.dp_shard` is not 1."""

    wrap: Annotated[
        Annotated[int, Field(ge=1)] | str | list[str],
        Field(
            description="Modules whose parameters are gathered together: class names, a minimum number of parameters, "
            "`none`, or `auto` (the model's `_no_split_modules`, otherwise the items of its ModuleLists)."
        ),
        BeforeValidator(_check_wrap),
    ] = "auto"
    reshard_after_forward: Annotated[
        bool | Annotated[int, Field(gt=1)],
        Field(
            description="Free gathered parameters after the forward pass and gather them again for the backward pass "
            "(less memory); a number reshards them over that many processes."
        ),
    ] = True
    param_dtype: Annotated[
        Number,
        Field(
            description="Dtype of gathered parameters and of the computation; `auto` is that of `mixed_precision`."
        ),
    ] = "auto"
    reduce_dtype: Annotated[
        Number, Field(description="Dtype in which gradients are reduced; `auto` is fp32.")
    ] = "auto"
    output_dtype: Annotated[
        Number,
        Field(description="Dtype of the model's output; `auto` leaves it to `mixed_precision`."),
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
        Field(description="Recompute activations of wrapped modules in the backward pass (less memory)."),
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
            description="Names of parameters or modules that are not sharded; `*` matches any text without a dot."
        ),
    ] = Field(default_factory=list)

    @property
    @override
    def settings(self) -> FullyShard:
        """The settings that the processes receive."""
        values = {"wrap": _format_wrap(self.wrap), "ignore": tuple(self.ignore)}
        return FullyShard(**{**dict(self), **values})


def _to_stage(value: Any) -> Any:
    """Convert the text of a number to the number."""
    if isinstance(value, bool):  # a number for Python
        raise ValueError("expected no, auto, 0, 1, 2 or 3")  # noqa: TRY004 - pydantic reports no TypeError
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value


def _to_text(value: Any) -> Any:
    """Convert nothing to an empty text."""
    return "" if value is None else value


def _to_absolute(path: str) -> str:
    """Return a path as seen from the current folder; one in a file is relative to it, and has been completed."""
    return os.path.abspath(path) if path else ""  # noqa: PTH100 - links stay


def _check_config_file(path: Any) -> str | None:
    """Return the problem of a JSON file of DeepSpeed that was typed; None without one."""
    try:
        if path:
            read_deepspeed_file(os.path.expanduser(path))  # noqa: PTH111 - a `~` that stays is no exception
    except SettingsError as error:
        return str(error)
    return None


def _offloads_to_disk(answers: Answers) -> bool:
    return _uses_deepspeed(answers) and "nvme" in {
        answers.get("offload_optimizer"),
        answers.get("offload_param"),
    }


_BucketSize = Annotated[int, Field(ge=1)] | Literal["auto"]


class DeepSpeedSection(_SettingsSection):
    """Options of DeepSpeed's ZeRO, which replaces `parallel` and `fully_shard`."""

    stage: Annotated[
        Literal["no", "auto", 0, 1, 2, 3],
        BeforeValidator(_to_stage),
        Field(
            json_schema_extra={"enum": ["no", "auto", 0, 1, 2, 3]},
            description="What ZeRO shards: 1 the optimizer state, 2 gradients too, 3 parameters too; `auto` is the stage of "
            "`config_file`, and `no` does not use DeepSpeed.",
        ),
        Question(
            "Which library shards them?",
            suggest=lambda *_: "no",
            choices=(
                Choice("no", "fully_shard of torch (recommended): nothing to install, and the most options"),
                Choice(3, "DeepSpeed ZeRO-3: as fully_shard, with offloading to NVMe disks"),
                Choice(2, "DeepSpeed ZeRO-2: optimizer state and gradients, if the parameters fit"),
                Choice(1, "DeepSpeed ZeRO-1: the optimizer state only"),
                Choice("auto", "DeepSpeed, with everything from a JSON file that you have"),
            ),
            when=_is_sharded,
        ),
    ] = "no"
    config_file: Annotated[
        str | None,
        BeforeValidator(_to_text),
        ExpandedPath,
        AfterValidator(_to_absolute),
        Field(
            description="JSON file of DeepSpeed, relative to the file with this key; the other keys of this section replace what it "
            "leaves out or sets to `auto`, and must not contradict it."
        ),
        Question(
            "JSON file of DeepSpeed?",
            suggest=lambda *_: "",
            check=_check_config_file,
            when=_uses_deepspeed,
            hint="a path; Enter without one uses the options of the profile alone",
        ),
    ] = ""
    offload_optimizer: Annotated[
        OffloadDevice,
        Field(
            description="Device of the optimizer state and its steps: `cpu`, or `nvme` with stage 3; `no` leaves it on the device of the "
            "model."
        ),
        Question(
            "Where is the optimizer state?",
            suggest=lambda *_: "no",
            choices=(
                Choice("no", "on the devices: the fastest"),
                Choice("cpu", "in host memory: larger models fit, steps are slower"),
                Choice(
                    "nvme",
                    "on a local NVMe disk: the largest models",
                    lambda _, answers: answers["stage"] == ZERO_3,
                ),
            ),
            when=lambda answers: _uses_deepspeed(answers) and answers["stage"] != "auto",
        ),
    ] = "no"
    offload_param: Annotated[
        OffloadDevice,
        Field(
            description="Device of the sharded parameters of stage 3: `cpu` or `nvme`; `no` leaves them on the device of the model."
        ),
        Question(
            "Where are parameters that are not in use?",
            suggest=lambda *_: "no",
            choices=(
                Choice("no", "on the devices: the fastest"),
                Choice("cpu", "in host memory"),
                Choice("nvme", "on a local NVMe disk"),
            ),
            when=lambda answers: _uses_deepspeed(answers) and answers["stage"] == ZERO_3,
        ),
    ] = "no"
    nvme_path: Annotated[
        str,
        Field(description="Directory on a local disk of every node for what is offloaded to `nvme`."),
        Question(
            "Which directory on the NVMe disk?",
            suggest=lambda *_: "/local_nvme",
            when=_offloads_to_disk,
            hint="the same path on every node",
        ),
    ] = ""
    zero3_init: Annotated[
        bool,
        Field(
            description="With stage 3, shard a model while `from_pretrained` loads it, so that it need not fit into memory."
        ),
    ] = False
    gradient_clipping: Annotated[
        float,
        Field(
            ge=0,
            description="Norm to which gradients are clipped at every step; 0 leaves clipping to the script.",
        ),
    ] = 0.0
    reduce_bucket_size: Annotated[
        _BucketSize,
        Field(
            description="Number of gradients that are reduced together; `auto` depends on the model's hidden size."
        ),
    ] = "auto"
    prefetch_bucket_size: Annotated[
        _BucketSize,
        Field(
            description="Number of parameters that stage 3 gathers ahead; `auto` depends on the model's hidden size."
        ),
    ] = "auto"
    param_persistence_threshold: Annotated[
        _BucketSize,
        Field(
            description="Number of elements below which stage 3 does not shard a parameter; `auto` depends on the model's hidden size."
        ),
    ] = "auto"

    @property
    @override
    def settings(self) -> DeepSpeed:
        """The settings that the processes receive."""
        return DeepSpeed(**{**dict(self), "stage": str(self.stage)})


class CompileSection(_SettingsSection):
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
