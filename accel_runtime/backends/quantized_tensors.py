"""Which parameters and buffers a strategy can divide, average, cast and send: quantized weights, unusual dtypes, tensor subclasses.

Every strategy passes its models through one of the checks here before it changes them. Three properties decide:

| | example | sharded | averaged | cast by `param_dtype` | sent at `prepare` |
|---|---|---|---|---|---|
| float16, bfloat16, float32, float64 | weights | yes | yes | yes | yes |
| complex | | yes | yes | no | yes |
| frozen integers, bool, float8, float4 | packed weights, tables | yes | refused if trained | no | as bytes |
| int1 to int7, uint1 to uint7 | | refused | refused | no | as bytes |
| 4-bit weights of bitsandbytes, in any storage | `Params4bit` | yes, once they are quantized | no gradient | no | with their scales |
| 8-bit weights of bitsandbytes | `Int8Params` | refused | no gradient | no | with their scales |
| tensor subclasses, as of torchao | `Int8Tensor` | if the class implements it | no gradient | no | their inner tensors |
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from accel_runtime.backends.base import Backend
from accel_runtime.foundation.module_names import named_parameters, script_names
from accel_runtime.foundation.precision import name_dtype
from accel_runtime.foundation.tensor_bytes import hash_tensor
from accel_runtime.storage.errors import CheckpointError

__all__ = [
    "PackedWeights",
    "as_bytes",
    "broadcast_parts",
    "broadcast_quantized",
    "describe_tensor",
    "find_format",
    "is_composed",
    "is_sendable",
    "keep_weights_unpacked",
    "keeps_dtype",
    "list_unsendable",
    "parts_of",
    "refuse_quantized",
    "refuse_unaveraged",
    "refuse_undivided",
    "refuse_unsent_buffers",
]

_SENT = frozenset(
    {
        *(torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool, torch.float16, torch.bfloat16),
        *(torch.float32, torch.float64, torch.complex64, torch.complex128),
    }
)
"""The dtypes that collectives of all backends of torch take (gloo of torch 2.13 has the fewest)."""
_AVERAGED = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
)
_CAST = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_UNCOPIED = frozenset(
    dtype
    for bits in range(1, 8)
    for name in (f"int{bits}", f"uint{bits}")
    if isinstance(dtype := getattr(torch, name, None), torch.dtype)
)
"""Dtypes of which torch copies no elements (2.13)."""
_FOUR_BIT, _EIGHT_BIT = "4-bit weights of bitsandbytes", "8-bit weights of bitsandbytes"


def find_format(tensor: torch.Tensor) -> str:
    """Return how a tensor is quantized, as text; empty for a plain one.

    bitsandbytes keeps the scales in attributes of its parameters, which also a shard of one has; others have a class of tensors.
    """
    if hasattr(tensor, "quant_state") and hasattr(tensor, "bnb_quantized"):
        return _FOUR_BIT
    if hasattr(tensor, "SCB") and hasattr(tensor, "has_fp16_weights"):
        return "" if getattr(tensor, "has_fp16_weights", False) else _EIGHT_BIT
    return type(tensor).__name__ if is_composed(tensor) else ""


def is_composed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor consists of others, and is no DTensor."""
    return hasattr(type(tensor), "__tensor_flatten__") and not hasattr(tensor, "device_mesh")


def keeps_dtype(tensor: torch.Tensor) -> bool:
    """Return whether a cast to another dtype would destroy the values of a tensor: those of packed weights are no numbers."""
    return tensor.dtype not in _CAST or bool(find_format(tensor))


def describe_tensor(tensor: torch.Tensor) -> str:
    """Return the dtype of a tensor, and how it is quantized."""
    text = find_format(tensor)
    return f"{name_dtype(tensor.dtype)}{', ' + text if text else ''}"


# Checks of a model before it is changed ------------------------------------------------


def refuse_unaveraged(model: nn.Module) -> None:
    """Raise ValueError if a trained parameter has a dtype in which torch adds no gradients."""
    for name, parameter in named_parameters(model):
        if parameter.requires_grad and parameter.dtype not in _AVERAGED:
            raise ValueError(
                f"Cannot train {name} of {type(model).__name__} on several processes: it is {describe_tensor(parameter)}, and torch "
                "adds up no gradients of this dtype. Freeze it (requires_grad_(False)), or convert it to float32 or bfloat16."
            )


def refuse_undivided(model: nn.Module, ignored: Collection[nn.Parameter]) -> None:
    """Raise ValueError if a parameter cannot be divided over the ranks."""
    for name, parameter in named_parameters(model):
        if parameter in ignored:
            continue
        reason, cure = _explain_undivided(name, parameter)
        if reason:
            raise ValueError(
                f"Cannot shard {name} of {type(model).__name__}: it is {describe_tensor(parameter)}, {reason}. {cure}"
            )


def _explain_undivided(name: str, parameter: nn.Parameter) -> tuple[str, str]:
    """Return why `fully_shard` cannot divide a parameter, and what to do; empty texts if it can."""
    pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
    copies = f"keep all of it on every rank (fully_shard.ignore: [{pattern!r}]), or train without sharding (remove dp_shard)."
    match find_format(parameter):
        case "":
            if parameter.dtype in _UNCOPIED:
                return "of which torch copies no elements", f"Pack it into uint8, {copies}"
        case text if text == _FOUR_BIT:
            if not getattr(parameter, "bnb_quantized", True):
                return (
                    "but not quantized yet, which the move of the model to its device does",
                    "Call model.to(accelerator.device) before prepare().",
                )
        case text if text == _EIGHT_BIT:
            return (
                "and its scales are attributes of the parameter, which a shard does not have",
                f"Load the model in 4 bits (BitsAndBytesConfig(load_in_4bit=True)), {copies}",
            )
        case _:
            if not hasattr(parameter, "fsdp_pre_all_gather"):
                return (
                    "and its class does not implement how fully_shard divides and gathers it",
                    f"{copies[0].upper()}{copies[1:]}",
                )
    return "", ""


def refuse_quantized(
    model: nn.Module, operation: str, parameters: Iterable[nn.Parameter] | None = None
) -> None:
    """Raise ValueError if parameters, by default all of a model, are quantized or have a dtype that cannot be divided as numbers."""
    chosen = None if parameters is None else set(parameters)
    for name, parameter in named_parameters(model):
        if (chosen is None or parameter in chosen) and (
            find_format(parameter) or parameter.dtype in _UNCOPIED
        ):
            raise ValueError(
                f"{operation} cannot train {name} of {type(model).__name__}: it is {describe_tensor(parameter)}, whose elements are "
                "not the weights. Load the model without quantization, or train it with DDP or fully_shard."
            )


def refuse_unsent_buffers(model: nn.Module) -> None:
    """Raise ValueError if a buffer has a dtype in which forward passes cannot broadcast it."""
    buffers = dict(model.named_buffers())
    for name, buffer in buffers.items():
        if not is_sendable(buffer):
            raise ValueError(
                f"Buffer {script_names(model, buffers)[name]!r} of {type(model).__name__} cannot be broadcast to the other processes: it "
                f"is {describe_tensor(buffer)}, which torch sends no tensors of. Convert it, for example to int64 or float32, or pass "
                "Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)])."
            )


def keep_weights_unpacked(model: nn.Module) -> None:
    """Disable the inference layout of bitsandbytes on CPUs.

    Its evaluation replaces the data of a 4-bit weight, which `fully_shard` gathers again as it was, and keeps the scales of the
    other layout: later passes would compute with wrong weights (bitsandbytes 0.50).
    """
    for module in model.modules():
        if vars(module).get("support_avx512bf16_for_cpu"):  # 0 or 1, or False
            module.support_avx512bf16_for_cpu = 0  # type: ignore[assignment]


# State dicts -----------------------------------------------------------------------------

_TEXT_KEY, _OFFSET = "quant_state", "nested_offset"
_TABLES = {"quant_map": ("code",), "nested_quant_map": ("state2", "code")}
"""Attributes of a QuantState with tables, which layers may share."""


class PackedWeights:
    """The entries of a state dict that make up 4-bit weights of bitsandbytes.

    Layers write the scales beside each weight, and `load_state_dict` reads none: it takes them for unknown entries. Here the
    scales of a weight are restored with it. Its format stays that of the model, which the script has chosen.

    Args:
        model: Contains the weights, or shards of them.
        state: State dict of the model, with the names of the script; its tensors are the live ones.
    """

    def __init__(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        self._weights = {
            name: parameter
            for name, parameter in named_parameters(model, remove_duplicate=False)
            if find_format(parameter) == _FOUR_BIT and getattr(parameter, "quant_state", None) is not None
        }
        self._state = {name: value for name, value in state.items() if self.find_weight(name)}
        self.scales = frozenset(name for name in self._state if name not in self._weights)
        """The entries that `load_state_dict` does not read."""

    def find_weight(self, name: str) -> str:
        """Return the name of the weight that an entry, of a model or of a file, belongs to; empty for others."""
        if name in self._weights:
            return name
        weight = name.rpartition(".")[0].removesuffix(f".{_TEXT_KEY}")
        return weight if weight in self._weights else ""

    def is_read_in_place(self, name: str) -> bool:
        """Return whether an entry is memory of one weight alone."""
        return name not in self.scales or name.rpartition(".")[2] in {"absmax", "nested_absmax"}

    def list_mismatches(self, saved: Mapping[str, tuple[tuple[int, ...], str]]) -> list[str]:
        """Return a sentence for each entry of another shape or dtype; `saved` has those of a checkpoint."""
        return [
            f"{name} is {list(saved[name][0])} {saved[name][1]} as saved and {list(live.shape)} {name_dtype(live.dtype)} here, and packed "
            "weights are not converted: load the model with the BitsAndBytesConfig of the save"
            for name, live in self._state.items()
            if name in saved and not self._fits(name, *saved[name])
        ]

    def list_unfit(self, saved: Mapping[str, tuple[tuple[int, ...], str]]) -> frozenset[str]:
        """Return the entries of weights that do not fit as a whole."""
        unfit = {
            self.find_weight(name)
            for name in saved.keys() | self._state.keys()
            if name not in saved or name not in self._state or not self._fits(name, *saved[name])
        }
        return frozenset(name for name in self._state if self.find_weight(name) in unfit)

    def _fits(self, name: str, shape: tuple[int, ...], dtype: str) -> bool:
        live = self._state[name]
        # The text with the format has as many bytes as its numbers have digits.
        return (self._is_text(name) or tuple(live.shape) == shape) and name_dtype(live.dtype) == dtype

    def restore(self, values: Mapping[str, Any]) -> None:
        """Restore the scales among the values of a state dict, whose shapes fit.

        Raises:
            CheckpointError: A weight has another format.
        """
        scales = self.scales & values.keys()
        offsets = {
            self.find_weight(name): _read_offset(self.find_weight(name), self._state[name], values[name])
            for name in scales
            if self._is_text(name)
        }
        for name in scales:
            weight, key, value = self.find_weight(name), name.rpartition(".")[2], values[name]
            state: Any = self._weights[weight].quant_state  # type: ignore[attr-defined]
            if self._is_text(name):
                if offsets[weight] is not None:
                    state.offset.fill_(offsets[weight])
            elif key in _TABLES:
                *path, attribute = _TABLES[key]
                for each in path:
                    state = getattr(state, each)
                live = getattr(state, attribute)
                if not torch.equal(live, value.to(live.device)):
                    setattr(state, attribute, value.to(live.device, copy=True))
            elif (live := self._state[name].detach()).data_ptr() != value.data_ptr():
                live.copy_(value)

    def _is_text(self, name: str) -> bool:
        return name in self.scales and name.rpartition(".")[0].endswith(f".{_TEXT_KEY}")


def _read_offset(weight: str, live: torch.Tensor, saved: torch.Tensor) -> float | None:
    """Return the mean of the scales of a weight, which its text has beside the format; None if they are not quantized.

    Raises:
        CheckpointError: The format is not that of the live text.
    """
    here, there = _read_text(live), _read_text(saved)
    offset = there.get(_OFFSET)
    different = [
        f"{key} is {there.get(key)!r} as saved and {here.get(key)!r} here"
        for key in dict.fromkeys((*here, *there))
        if (there.get(key) != here.get(key) if key != _OFFSET else type(offset) is not type(here.get(key)))
    ]
    if different:
        raise CheckpointError(
            f"Cannot load {weight}: it is packed in another format ({'; '.join(different)}). Load the model with the "
            "BitsAndBytesConfig and the dtype of the save."
        )
    return offset


def _read_text(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the format of a weight, which bitsandbytes writes as the bytes of JSON."""
    try:
        read = json.loads(bytes(tensor.tolist()))
    except ValueError:
        read = None
    return read if isinstance(read, dict) else {}


# Sending ---------------------------------------------------------------------------------


def is_sendable(tensor: torch.Tensor) -> bool:
    """Return whether collectives take a tensor as it is."""
    return tensor.dtype in _SENT and not is_composed(tensor)


def list_unsendable(model: nn.Module) -> list[str]:
    """Return the names of parameters and buffers that DDP cannot send."""
    tensors: dict[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return [name for name, tensor in tensors.items() if not is_sendable(tensor)]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor whose dtype collectives do not take as a flat view of its bytes, others as they are."""
    flat = tensor.detach()
    return flat if is_sendable(flat) else flat.reshape(-1).view(torch.uint8)


def parts_of(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the plain tensors that make up a parameter or buffer, with the ends of their names: its own, and its scales."""
    if is_composed(tensor):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        for name in names:
            for end, part in parts_of(getattr(tensor, name)):
                yield f".{name}{end}", part
        return
    yield "", tensor
    text = find_format(tensor)
    if text == _FOUR_BIT:
        yield from _list_scales(getattr(tensor, "quant_state", None))
    elif text == _EIGHT_BIT and isinstance(scales := getattr(tensor, "SCB", None), torch.Tensor):
        yield ".SCB", scales


def _list_scales(state: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a QuantState of bitsandbytes."""
    for name in ("absmax", "offset"):
        if isinstance(value := getattr(state, name, None), torch.Tensor):
            yield f".{prefix}{name}", value
    if (nested := getattr(state, "state2", None)) is not None:
        yield from _list_scales(nested, f"{prefix}nested_")


def broadcast_quantized(model: nn.Module, backend: Backend) -> None:
    """Broadcast what DDP does not: the scales of quantized weights, and tensors that collectives take as bytes only.

    Nothing is sent for models without any of them, and without a difference. `broadcast_parameters` sends them too.
    """
    tensors: dict[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    parts = {
        f"{name}{end}": part
        for name, tensor in tensors.items()
        if find_format(tensor) or not is_sendable(tensor)
        for end, part in parts_of(tensor)
    }
    if parts:
        broadcast_parts(type(model).__name__, parts, backend)


def broadcast_parts(model_name: str, tensors: Mapping[str, torch.Tensor], backend: Backend) -> None:
    """Broadcast plain tensors by name, of a model of a class; only those that differ are sent. See `broadcast_parameters`."""
    hashes_by_rank = backend.all_gather_objects(
        {
            name: (
                f"{list(tensor.shape)} {name_dtype(tensor.dtype)}",
                None if tensor.is_meta else hash_tensor(tensor),
            )
            for name, tensor in tensors.items()
        },
        f"the tensors of {model_name}",
    )
    first = hashes_by_rank[0]
    for rank, hashes in enumerate(hashes_by_rank):
        if mismatch := _describe_mismatch(first, hashes):
            raise RuntimeError(f"{model_name} differs between rank {rank} and rank 0: {mismatch}")
    for name, tensor in tensors.items():
        if any(hashes[name] != first[name] for hashes in hashes_by_rank):
            with torch.no_grad():
                if is_sendable(tensor):
                    tensor.copy_(backend.broadcast(tensor.detach().contiguous()))
                else:  # torch copies no elements of some dtypes
                    tensor.data = tensor.data.contiguous()
                    as_bytes(tensor).copy_(backend.broadcast(as_bytes(tensor).clone()))


def _describe_mismatch(
    first: dict[str, tuple[str, int | None]], other: dict[str, tuple[str, int | None]]
) -> str:
    for name in [*first, *other]:
        if name not in first or name not in other:
            return f"{name} is on one of them only"
        if first[name][0] != other[name][0]:
            return f"{name} is {other[name][0]}, and on rank 0 {first[name][0]}"
        if (first[name][1] is None) != (other[name][1] is None):
            return (
                f"{name} is on the meta device on one of them only. Load the model in `with accelerator.loading():`, or make it on the meta "
                "device on all ranks, and call accelerator.load_model(model, path) after prepare()"
            )
    return ""
