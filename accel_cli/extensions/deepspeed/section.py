"""The section `deepspeed` of a profile."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from typing_extensions import override

from accel_cli.launchers.sections import Answers, Choice, ExpandedPath, Question
from accel_cli.profile.settings_sections import EngineSection, is_sharded
from accel_runtime.environment.settings import SettingsError
from accel_runtime.extensions.deepspeed.settings import ZERO_3, DeepSpeed, OffloadDevice, read_deepspeed_file

if TYPE_CHECKING:
    from accel_cli.profile.layers import Resolved
    from accel_runtime.environment.engines import EngineConfig

__all__ = ["DeepSpeedSection"]


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


def _uses_deepspeed(answers: Answers) -> bool:
    return is_sharded(answers) and answers.get("stage", "no") != "no"


def _offloads_to_disk(answers: Answers) -> bool:
    return _uses_deepspeed(answers) and "nvme" in {
        answers.get("offload_optimizer"),
        answers.get("offload_param"),
    }


_BucketSize = Annotated[int, Field(ge=1)] | Literal["auto"]


class DeepSpeedSection(EngineSection):
    """Options of DeepSpeed's ZeRO, which replaces `parallel` and `fully_shard`."""

    summary: ClassVar[str] = (
        "Options of DeepSpeed's ZeRO, used if `deepspeed.stage` is not `no`; it replaces `parallel` and `fully_shard`."
    )

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
            when=is_sharded,
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

    @override
    def complete(self, resolved: Resolved) -> Resolved:
        """Return a profile with the number format and the accumulation of its JSON file, and DeepSpeed's configuration."""
        from accel_cli.extensions.deepspeed import json_file  # noqa: PLC0415 - it imports the profile

        return json_file.apply_deepspeed_file(resolved)

    @override
    def list_file_values(self, resolved: Resolved) -> Mapping[str, tuple[Any, str]]:
        """Return the values of the keys of the section that the JSON file sets, with their sources."""
        from accel_cli.extensions.deepspeed import json_file  # noqa: PLC0415 - it imports the profile

        return json_file.list_file_values(resolved)

    @override
    def list_configuration(self, config: EngineConfig) -> Mapping[str, tuple[Any, str]]:
        """Return the values of a configuration of DeepSpeed by path, with their sources."""
        from accel_cli.extensions.deepspeed import json_file  # noqa: PLC0415 - it imports the profile

        return json_file.list_deepspeed_values(config)
