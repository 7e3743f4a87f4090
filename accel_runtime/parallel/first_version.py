"""What only the first FSDP has, or Accelerate alone: accepted where it is what happens anyway, else refused with what to say instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

__all__ = ["WORDS", "Word", "strategy"]


@dataclass(frozen=True)
class Word:
    """An option that is not passed on."""

    anyway: tuple[Any, ...]
    """Values that ask for what happens anyway."""
    instead: str
    """What another value is refused with."""


WORDS: Mapping[str, Word] = MappingProxyType(
    {
        "fsdp_version": Word(
            (2, "2"),
            "models are sharded with torch's fully_shard, which is version 2; leave it out, and the options of version 1 too",
        ),
        "backward_prefetch": Word(
            ("backward_pre",),
            "fully_shard always gathers the next module during the backward pass; leave it out",
        ),
        "state_dict_type": Word(
            ("sharded_state_dict",),
            "checkpoints hold what each rank has, and load on any number of ranks; leave it out. Whole weights come from "
            "get_state_dict() and save_model()",
        ),
        "state_dict_config": Word((), "checkpoints need no such object; leave it out"),
        "optim_state_dict_config": Word((), "checkpoints need no such object; leave it out"),
        "limit_all_gathers": Word((True,), "fully_shard always limits what is gathered ahead; leave it out"),
        "use_orig_params": Word((True,), "fully_shard always keeps the model's own parameters; leave it out"),
        "param_init_fn": Word(
            (),
            "a model on the meta device is filled by accelerator.load_model(), or by its modules' reset_parameters(); leave "
            "it out",
        ),
        "sync_module_states": Word(
            (True,), "ranks always begin with the parameters of the first one; leave it out"
        ),
        "forward_prefetch": Word(
            (False,),
            "fully_shard gathers the next module by itself; for more, call set_modules_to_forward_prefetch() of the prepared "
            "modules",
        ),
        "activation_checkpointing_offload": Word(
            (False,), "inputs of checkpointed modules stay on the device; leave it out"
        ),
        "cpu_ram_efficient_loading": Word(
            (False,),
            "create the model on the meta device (init_empty_weights) and let accelerator.load_model() read the file after "
            "prepare(): each rank then reads its own part only",
        ),
    }
)
"""By the name of the field."""

_STRATEGIES: Mapping[str, str] = MappingProxyType(
    {
        "shard_grad_op": "reshard_after_forward=False",
        "hybrid_shard": "ParallelismConfig(dp_replicate_size=number of machines, dp_shard_size=processes of one)",
        "hybrid_shard_zero2": "ParallelismConfig(dp_replicate_size=number of machines, dp_shard_size=processes of one) and "
        "reshard_after_forward=False",
        "no_shard": "no fsdp_plugin at all: models are replicated without one",
    }
)
_NUMBERS = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
"""In the order in which Accelerate counts them from 1."""


def strategy(field: str, value: object) -> None:
    """Accept a sharding strategy that is what happens anyway.

    Args:
        field: Where it stands, for the message.
        value: torch's `ShardingStrategy`, its name or its number.

    Raises:
        ValueError: Another one; the message has its word.
    """
    name = text(value)
    if name.isdigit() and 0 < int(name) <= len(_NUMBERS):
        name = _NUMBERS[int(name) - 1]
    if name == "full_shard":
        return
    if name not in _STRATEGIES:
        known = ", ".join(["full_shard", *_STRATEGIES])
        raise ValueError(f"FullyShardedDataParallelPlugin: {field} is none of {known}; it is {value!r}")
    raise ValueError(
        f"FullyShardedDataParallelPlugin: {field}={name.upper()} is a word of FSDP's first version; say "
        f"{_STRATEGIES[name]}"
    )


def text(value: object) -> str:
    """A member of an enumeration, or its text, in small letters."""
    return str(getattr(value, "name", value)).lower()
