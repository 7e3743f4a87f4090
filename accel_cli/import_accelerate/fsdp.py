"""`fsdp_config` of an Accelerate file, of FSDP1 and FSDP2: what becomes of each of its keys."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from accel_cli.import_accelerate.values import Read, Refused, plain, texts, truth, whole
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
from accel_runtime.env import FSDP1_STRATEGIES

__all__ = ["SECTION", "strategy"]

_KEEPS = frozenset({"shard_grad_op", "hybrid_shard_zero2"})
_POLICIES = ("transformer_based_wrap", "size_based_wrap", "no_wrap")
_SMALLEST = 100_000_000
"""From how many parameters on Accelerate wraps a module, unless told otherwise."""
_NAME = re.compile(r"[\w.]+")
_MODEL_FIRST = (
    "the script says it: create the model on the meta device (init_empty_weights), and let accelerator.load_model() read "
    "the file after prepare()"
)


def strategy(beside: Mapping[str, Any]) -> str:
    """FSDP1's word for what the section asks for; `full_shard` where it says nothing."""
    said_so = beside.get("sharding_strategy") if plain(beside.get("version", 1)) in {1, "1"} else None
    return (
        _strategy(said_so if said_so is not None else beside.get("reshard_after_forward", True))
        or "full_shard"
    )


def _strategy(value: Any) -> str | None:
    word = plain(value)
    if isinstance(word, bool):
        return "full_shard" if word else "shard_grad_op"
    if str(word).isascii() and str(word).isdigit() and 0 < int(word) <= len(FSDP1_STRATEGIES):
        return FSDP1_STRATEGIES[int(word) - 1]
    return word if word in FSDP1_STRATEGIES else None


def _reshards(value: Any, around: Around) -> Became | Refused:
    """A strategy, or whether parameters are gathered twice."""
    wanted = _strategy(value)
    if wanted is None:
        return Refused(f"{one_of(['true', 'false', *map(str.upper, FSDP1_STRATEGIES)])}")
    if wanted != strategy(around.beside):
        return dropped("the section says it twice, and the other key is taken")
    if wanted == "no_shard":
        return kept("parallel.dp_shard: 1, a whole model on every process")
    if wanted.startswith("hybrid") and around.machines > 1:
        return said(
            f"parallel.dp_replicate: {around.machines}, a copy on each machine",
            reshard_after_forward=wanted not in _KEEPS,
        )
    return said(reshard_after_forward=wanted not in _KEEPS)


def _version(value: Any, _: Around) -> Became | Refused:
    number = whole("expected 1 or 2", 1, 2)(value)
    if isinstance(number, Refused):
        return number
    return kept(
        "accel has FSDP2 only (fully_shard), in whose words the rest is said"
        if number == 1
        else "accel has no other"
    )


def _flag(**keys: Any) -> Word:
    """Keys that are said where the word is true."""

    def word(value: Any, _: Around) -> Became | Refused:
        meant = truth(value)
        if isinstance(meant, Refused):
            return meant
        return said(**keys) if meant else off()

    return word


def _policy(value: Any, around: Around) -> Became | Refused:
    word = plain(value)
    if word not in _POLICIES:
        return Refused(one_of(map(str.upper, _POLICIES)))
    if word == "no_wrap":
        return said(wrap="none")
    if word == "size_based_wrap":
        smallest = _number(around.beside.get("min_num_params", _SMALLEST))
        return said(wrap=_SMALLEST if isinstance(smallest, Refused) else smallest)
    classes = _classes(around.beside.get("transformer_layer_cls_to_wrap"))
    return said(wrap=classes) if classes else said("the model's own _no_split_modules", wrap="auto")


def _classes(value: Any) -> list[str]:
    read = texts(value if value is not None else [])
    return (
        []
        if isinstance(read, Refused)
        else [name.strip() for entry in read for name in entry.split(",") if name.strip()]
    )


def _layers(value: Any, around: Around) -> Became | Refused:
    read = texts(value)
    if isinstance(read, Refused):
        return read
    if not all(name.isidentifier() for name in _classes(value)):
        return Refused("expected names of classes with commas between")
    if plain(around.beside.get("auto_wrap_policy")) != _POLICIES[0]:
        return dropped("Accelerate uses it with TRANSFORMER_BASED_WRAP only")
    return said(wrap=_classes(value)) if _classes(value) else kept("not set")


def _smallest(value: Any, around: Around) -> Became | Refused:
    number = _number(value)
    if isinstance(number, Refused):
        return number
    if plain(around.beside.get("auto_wrap_policy")) != "size_based_wrap":
        return dropped("Accelerate uses it with SIZE_BASED_WRAP only")
    return said(wrap=number)


def _number(value: Any) -> Any:
    """Reads a number of parameters, also as 1e8."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    read: Read = whole("expected a whole number of at least 1", 1)
    return read(value)


def _backward(value: Any, _: Around) -> Became | Refused:
    word = plain(value)
    if word in {"backward_pre", 1, "1"}:
        return kept("fully_shard always gathers the next module early in the backward pass")
    if word in {"backward_post", "no_prefetch", 2, "2"}:
        return dropped(
            "fully_shard always gathers the next module early, as BACKWARD_PRE does: a little more memory, and faster"
        )
    return Refused("expected BACKWARD_PRE, BACKWARD_POST or NO_PREFETCH")


def _state(value: Any, _: Around) -> Became | Refused:
    word = plain(value)
    if word == "sharded_state_dict":
        return kept("checkpoints are sharded, and any number of processes reads them")
    if word in {"full_state_dict", "local_state_dict"}:
        return dropped("checkpoints are always sharded; accelerator.save_model() writes whole weights")
    return Refused("expected SHARDED_STATE_DICT, FULL_STATE_DICT or LOCAL_STATE_DICT")


def _ignored(value: Any, _: Around) -> Became | Refused:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return Refused("expected names of modules, or a regular expression")
    if all(_NAME.fullmatch(name) for name in names):
        return said(ignore=list(names)) if names else kept("not set")
    return dropped(
        "it is a regular expression: list the names in fully_shard.ignore, where * stands for any text without a dot"
    )


def _original(value: Any, _: Around) -> Became | Refused:
    meant = truth(value)
    if isinstance(meant, Refused):
        return meant
    return (
        kept("parameters always keep their names")
        if meant
        else dropped("parameters always keep their names and shapes")
    )


_WORDS: Mapping[str, Word] = {
    "version": _version,
    "sharding_strategy": _reshards,
    "reshard_after_forward": _reshards,
    "offload_params": _flag(cpu_offload=True),
    "auto_wrap_policy": _policy,
    "transformer_layer_cls_to_wrap": _layers,
    "min_num_params": _smallest,
    "backward_prefetch": _backward,
    "forward_prefetch": off_or(kept("fully_shard gathers the next module early by itself")),
    "state_dict_type": _state,
    "use_orig_params": _original,
    "cpu_ram_efficient_loading": off_or(dropped(_MODEL_FIRST)),
    "sync_module_states": off_or(kept("every process ends up with the parameters of the first one")),
    "activation_checkpointing": _flag(activation_checkpointing=True),
    "activation_checkpointing_offload": off_or(dropped("accel keeps what is checkpointed on the device")),
    "ignored_modules": _ignored,
}
SECTION = Vocabulary(_WORDS, prefix="fsdp_")
"""`fsdp_config`."""
