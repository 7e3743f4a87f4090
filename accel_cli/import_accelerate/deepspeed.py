"""`deepspeed_config` of an Accelerate file, and the JSON file it may name: what becomes of each key under `fully_shard`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_cli.errors import Problem, ProfileError
from accel_cli.import_accelerate.values import Refused, plain, truth, whole
from accel_cli.import_accelerate.words import (
    Around,
    Became,
    Vocabulary,
    Word,
    dropped,
    kept,
    off,
    off_or,
    said,
)
from accel_cli.profile.validation_errors import one_of

__all__ = ["FILE_KEY", "SECTION", "file_word", "named", "precision", "stage"]

FILE_KEY = "deepspeed_config_file"
_ZERO = "zero_optimization"
_STAGES = {
    1: "ZeRO-1: optimizer state is sharded, and here gradients and parameters between steps too",
    2: "ZeRO-2: parameters are gathered once in a step, and sharded between steps",
    3: "ZeRO-3",
}
_DEVICES = ("none", "cpu", "nvme")
_NUMBERS = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16", "bfp16": "bf16"}
_MEETS = "the same command runs on every machine, so none is told of the others"
_MODEL_FIRST = (
    "the script says it: create the model on the meta device (init_empty_weights), and let accelerator.load_model() read "
    "the file after prepare()"
)
_EXPERTS = "accel has no word for experts alone: fully_shard.wrap takes their classes together with those of your layers"
_TUNING = "it tunes DeepSpeed's own communication; fully_shard has nothing of it to tune"
_ACCUMULATION = dropped("the script says it: Accelerator(gradient_accumulation_steps=...)")
_CLIPPING = dropped("the script does it: accelerator.clip_grad_norm_()")
_WHOLE = dropped("accelerator.save_model() writes whole weights, in the format the parameters have")


def named(data: Mapping[str, Any], folder: Path) -> Mapping[str, Any] | None:
    """What the JSON file says that an Accelerate config names; None where it names none, or there is none.

    Args:
        data: The config, parsed.
        folder: The one that has the config; Accelerate itself looks in the current one.

    Raises:
        ProfileError: The file is there, and is no JSON object.
    """
    section = data.get("deepspeed_config")
    path = section.get(FILE_KEY) if isinstance(section, Mapping) else None
    if not isinstance(path, str) or not path:
        return None
    found = next((file for file in (Path(path), folder / path) if file.is_file()), None)
    if found is None:
        return None
    try:
        said_so = json.loads(found.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ProfileError([Problem(str(found), "", f"this is not JSON: {error}")]) from None
    if not isinstance(said_so, dict):
        raise ProfileError([Problem(str(found), "", "expected keys and values")])
    return said_so


def stage(section: Mapping[str, Any], file: Mapping[str, Any] | None) -> int:
    """The ZeRO stage; that of a file which is not here is taken for 3, which needs the least memory."""
    if section.get(FILE_KEY):
        zero = (file or {}).get(_ZERO, {"stage": 0}) if file is not None else {"stage": 3}
        found = zero.get("stage", 0) if isinstance(zero, Mapping) else 0
    else:
        found = section.get("zero_stage", 2)
    number = whole("", 0, 3)(found)
    return number if isinstance(number, int) else 3


def precision(file: Mapping[str, Any] | None) -> str | None:
    """The number format that the JSON file switches on; None where it leaves that to others."""
    for name in ("bf16", "bfloat16", "fp16"):
        section = (file or {}).get(name)
        if isinstance(section, Mapping) and section.get("enabled") is True:
            return "fp16" if name == "fp16" else "bf16"
    return None


def _stage(value: Any, _: Around) -> Became | Refused:
    number = whole("expected a ZeRO stage, 0 to 3", 0, 3)(value)
    if isinstance(number, Refused):
        return number
    if number == 0:
        return kept("parallel.dp_shard: 1, a whole model on every process")
    return said(_STAGES[number], reshard_after_forward=number == 3)  # noqa: PLR2004 - the stage that gathers twice


def _offload(what: str) -> Word:
    def word(value: Any, _: Around) -> Became | Refused:
        device = plain(value)
        if device not in _DEVICES:
            return Refused(one_of(_DEVICES))
        if device == "none":
            return off()
        if device == "nvme":
            return said("accel keeps nothing on disks, but in host memory", taken=False, cpu_offload=True)
        return said(f"{what}, and the rest of the model's state with it", cpu_offload=True)

    return word


def _file(_: Any, around: Around) -> Became:
    if around.read:
        return kept("what it says is listed below")
    return dropped(
        "there is no such file here, so nothing of it was read; parallel.dp_shard: auto, which needs the least memory"
    )


_WORDS: Mapping[str, Word] = {
    "zero_stage": _stage,
    "offload_optimizer_device": _offload("optimizer state"),
    "offload_param_device": _offload("parameters"),
    "offload_optimizer_nvme_path": off_or(dropped("accel keeps nothing on disks"), "none"),
    "offload_param_nvme_path": off_or(dropped("accel keeps nothing on disks"), "none"),
    "gradient_accumulation_steps": off_or(_ACCUMULATION, 1, "1", "auto"),
    "gradient_clipping": off_or(_CLIPPING, "auto", "none"),
    "zero3_init_flag": off_or(dropped(_MODEL_FIRST)),
    "zero3_save_16bit_model": off_or(_WHOLE),
    "deepspeed_moe_layer_cls_names": off_or(dropped(_EXPERTS)),
    FILE_KEY: _file,
    **dict.fromkeys(
        (
            "deepspeed_multinode_launcher",
            "deepspeed_hostfile",
            "deepspeed_exclusion_filter",
            "deepspeed_inclusion_filter",
        ),
        off_or(dropped(_MEETS)),
    ),
}
SECTION = Vocabulary(_WORDS)
"""`deepspeed_config`."""


def _hpz(value: Any, _: Around) -> Became | Refused:
    number = whole("expected a number of processes", 1)(value)
    if isinstance(number, Refused):
        return number
    return said("ZeRO++'s second partition", reshard_after_forward=number) if number > 1 else off()


def _mics(value: Any, _: Around) -> Became | Refused:
    number = whole("expected a number of processes, or -1", -1)(value)
    if isinstance(number, Refused):
        return number
    if number <= 1:
        return off()
    return dropped(
        f"say parallel.dp_shard: {number}, and parallel.dp_replicate with as many copies as that leaves"
    )


def _reduces(value: Any, _: Around) -> Became | Refused:
    number = _NUMBERS.get(str(plain(value)))
    return said(reduce_dtype=number) if number else Refused(one_of(_NUMBERS))


def _enabled(name: str) -> Word:
    def word(value: Any, around: Around) -> Became | Refused:
        if plain(value) == "auto":
            return kept("mixed_precision says it")
        meant = truth(value)
        if isinstance(meant, Refused) or not meant:
            return meant if isinstance(meant, Refused) else off()
        if around.precision == name:
            return kept(f"mixed_precision: {name}")
        return dropped("mixed_precision is in the config too, and says otherwise")

    return word


_FILE: Mapping[str, Word] = {
    f"{_ZERO}.stage": _stage,
    f"{_ZERO}.offload_optimizer.device": _offload("optimizer state"),
    f"{_ZERO}.offload_param.device": _offload("parameters"),
    f"{_ZERO}.offload_optimizer.pin_memory": off_or(kept("shards in host memory are pinned")),
    f"{_ZERO}.offload_param.pin_memory": off_or(kept("shards in host memory are pinned")),
    f"{_ZERO}.zero_hpz_partition_size": _hpz,
    f"{_ZERO}.mics_shard_size": _mics,
    f"{_ZERO}.stage3_gather_16bit_weights_on_model_save": off_or(_WHOLE),
    "bf16.enabled": _enabled("bf16"),
    "bfloat16.enabled": _enabled("bf16"),
    "fp16.enabled": _enabled("fp16"),
    "communication_data_type": _reduces,
    "gradient_accumulation_steps": off_or(_ACCUMULATION, 1),
    "gradient_clipping": off_or(_CLIPPING, 0, 0.0),
}
"""Of the JSON file, by the keys that lead to a value."""
_BELOW: Mapping[str, str] = {
    _ZERO: _TUNING,
    "fp16": "the script says how the loss is scaled: GradScalerKwargs",
    "optimizer": "the script makes it: a plain optimizer of torch in place of DummyOptim",
    "scheduler": "the script makes it: a plain scheduler of torch in place of DummyScheduler",
    "train_batch_size": "the script says it, with its DataLoader",
    "train_micro_batch_size_per_gpu": "the script says it, with its DataLoader",
    "activation_checkpointing": "fully_shard.activation_checkpointing: true computes activations again",
}
"""Of the rest of it, by the first key."""


def file_word(path: tuple[str, ...]) -> Word:
    """What a value of the JSON file becomes, from the keys that lead to it."""
    key = ".".join(path)
    known = _FILE.get(key) or off_or(
        dropped(_BELOW.get(path[0], "it is DeepSpeed's own, and accel has nothing like it"))
    )

    def word(value: Any, around: Around) -> Became | Refused:
        if plain(value) == "auto" and path[-1] != "enabled":
            return kept("Accelerate fills it in from what the script says, and so does accel")
        return known(value, around)

    return word
