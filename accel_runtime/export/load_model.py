"""Load weights that `save_model` or another writer of the Hugging Face layout has written."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import nn

from accel_runtime.backends.quantized_tensors import PackedWeights
from accel_runtime.export.save_model import CHECKSUMS, INDEX, SINGLE, add_aliases, find_aliases
from accel_runtime.foundation.module_names import match_names, state_dict
from accel_runtime.foundation.precision import name_dtype
from accel_runtime.foundation.tensor_bytes import tensor_bytes
from accel_runtime.parallel.big_modeling import MetaModels, compute_buffers, list_meta_tensors
from accel_runtime.parallel.dtensor import ShardRegion, local_shard, region_of
from accel_runtime.storage.any_store import locate_file
from accel_runtime.storage.errors import (
    AllGatherObjects,
    CheckpointError,
    errors_on_all_ranks,
    format_names,
)
from accel_runtime.storage.schema import (
    Count,
    FieldError,
    Shape,
    ValueRule,
    is_inside,
    parse_strict_json,
    read_value,
)
from accel_runtime.storage.source_file import ReadRange, SourceFile
from accel_runtime.storage.store import parallel_map
from accel_runtime.storage.tensor_file import NUMBER_FORMATS, iterate_runs

__all__ = [
    "WeightLoader",
    "find_weight_file",
    "find_weights",
    "is_streamed",
    "list_shards",
]

_WEIGHTS_SUFFIX, _INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
_LISTED = 10
"""Number of names listed in a message."""


@dataclass(frozen=True)
class WeightFiles:
    """Weights in files, before they are read."""

    source: SourceFile
    """The weight file or the index."""
    slices: Mapping[str, TensorSlice]
    ties: Mapping[str, str]
    """Aliases that are left out, with the name that is kept, as far as the files tell."""
    checksums: Mapping[str, str]
    """Checksums by file, if there is an index."""

    def verify(self, rank: int = 0, world_size: int = 1) -> None:
        """Raise `CheckpointError` if a file does not have the checksum in its index; ranks divide the files."""
        for number, (file, expected) in enumerate(self.checksums.items()):
            if number % world_size != rank:
                continue
            checksum = self.source.sibling(file).hash()
            if checksum != expected:
                raise CheckpointError(
                    f"{self.source.sibling(file)} does not match {self.source}: it is damaged, or from another export "
                    f"({CHECKSUMS} is {checksum} and should be {expected})"
                )

    def match(
        self,
        state: Mapping[str, Any],
        mismatches: Sequence[str] = (),
        *,
        packed: PackedWeights | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> dict[str, TensorSlice]:
        """Return the tensors by the names of a model's state, with aliases; ranks divide the comparison of their values.

        `packed` are the 4-bit weights of the model, if it may have any. `CheckpointError` lists `mismatches` and names, shapes and dtypes that differ
        from the state.
        """
        names = match_names([*self.slices, *self.ties], state)
        stored = {names[name]: tensor for name, tensor in self.slices.items()}
        ties = {names[alias]: names.get(kept, kept) for alias, kept in self.ties.items()}
        slices = add_aliases(stored, state, ties)
        formats = {name: (each.shape, name_dtype(each.dtype)) for name, each in slices.items()}
        mismatches = [
            *(f"missing: {name}" for name in sorted(state.keys() - slices.keys())),
            *(f"unexpected: {name}" for name in sorted(slices.keys() - state.keys())),
            *(
                problem
                for name in sorted(state.keys() & slices.keys())
                if packed is None or not packed.find_weight(name)
                if (problem := _describe_mismatch(name, slices[name], state[name]))
            ),
            *(packed.list_mismatches(formats) if packed is not None else ()),
            *mismatches,
        ]
        aliases = find_aliases({name: state[name] for name in state if isinstance(state[name], torch.Tensor)})
        for number, (name, kept) in enumerate(aliases.items()):
            is_mine = number % world_size == rank and name in slices and kept in slices
            if is_mine and slices[name] != slices[kept] and not are_equal(slices[name], slices[kept]):
                mismatches.append(f"{name} and {kept} are one tensor in the model and differ in the file")
        if mismatches:
            more = f"\n  and {len(mismatches) - _LISTED} more" if len(mismatches) > _LISTED else ""
            lines = "".join(f"\n  {line}" for line in mismatches[:_LISTED])
            raise CheckpointError(
                f"{self.source} does not fit the model, which was not changed:{lines}{more}"
            )
        return slices

    def read(self, slices: Mapping[str, TensorSlice] | None = None) -> dict[str, torch.Tensor]:
        """Verify all files and read their tensors, or those of the result of `match`; aliases share one tensor."""
        self.verify()
        named = self.slices if slices is None else slices
        stored = list(dict.fromkeys(named.values()))
        tensors = dict(zip(stored, parallel_map(TensorSlice.read, stored), strict=True))
        return {name: tensors[each] for name, each in named.items()}


def find_weight_file(location: str | os.PathLike[str]) -> tuple[SourceFile, bool]:
    """Return the weight file or index at a path or URL, or in a directory there, and whether it is an index."""
    given = locate_file(location)
    if given.name.endswith((_WEIGHTS_SUFFIX, _INDEX_SUFFIX)) and given.exists():
        return given, given.name.endswith(_INDEX_SUFFIX)
    single, index = given.child(SINGLE), given.child(INDEX)
    if single.exists():
        return single, False
    if not index.exists():
        raise CheckpointError(f"No weights found in {given}: neither {SINGLE} nor {INDEX} exists")
    return index, True


def find_weights(location: str | os.PathLike[str]) -> WeightFiles:
    """Return the weights in a directory, of a file, or of an index, or at the URL of one; only headers are read."""
    source, is_index = find_weight_file(location)
    file_of, checksums = _parse_index(source) if is_index else ({}, {})
    slices: dict[str, TensorSlice] = {}
    metadata: dict[str, str] = {}
    for file in _list_files(source, file_of) if is_index else [source]:
        file_slices, file_metadata = read_headers(file)
        slices |= file_slices
        metadata |= file_metadata
    if missing := sorted(file_of.keys() - slices.keys()):
        raise CheckpointError(f"{source} lists {format_names(missing, _LISTED)}, but no file contains it")
    ties = {name: kept for name, kept in metadata.items() if name != "format" and kept in slices}
    return WeightFiles(source, slices, ties, checksums)


def list_shards(index: Path) -> list[Path]:
    """Return the files of an index on disk."""
    return [index.parent / file for file in sorted(set(_parse_index(locate_file(index))[0].values()))]


def _list_files(index: SourceFile, file_of: Mapping[str, str]) -> list[SourceFile]:
    return [index.sibling(file) for file in sorted(set(file_of.values()))]


def _describe_mismatch(name: str, stored: Any, live: Any) -> str | None:
    if not isinstance(live, torch.Tensor):
        return f"{name} is a {type(live).__name__} in the model and a tensor in the file"
    if stored.shape != live.shape:
        return f"{name} has shape {list(stored.shape)} in the file and {list(live.shape)} in the model"
    if not torch.can_cast(stored.dtype, live.dtype):
        return f"{name} is {stored.dtype} in the file, which cannot be cast to {live.dtype}"
    return None


_PlainName = Annotated[
    str, ValueRule("the name of a file in its directory", lambda name: is_inside(name) and "/" not in name)
]


@dataclass(frozen=True)
class _IndexMetadata:
    checksums: Mapping[_PlainName, str] | None = field(default=None, metadata={"key": CHECKSUMS})


@dataclass(frozen=True)
class _Index:
    weight_map: Mapping[str, _PlainName]
    metadata: _IndexMetadata | None = None


def _parse_index(source: SourceFile) -> tuple[Mapping[str, str], Mapping[str, str]]:
    try:
        index: _Index = read_value(_Index, parse_strict_json(source.read_text()))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{source} is not an index of weights: {error}") from error
    checksums = (index.metadata and index.metadata.checksums) or {}
    for file in {*index.weight_map.values(), *checksums}:
        if not source.sibling(file).exists():
            raise CheckpointError(f"{source.sibling(file)} is missing, but listed in {source}")
    return index.weight_map, checksums


def is_streamed(model: nn.Module) -> bool:
    """Return whether weights must be read in parts: the model is sharded or on the meta device."""
    return any(tensor.is_meta or hasattr(tensor, "device_mesh") for tensor in model.parameters()) or bool(
        list_meta_tensors(model)
    )


@dataclass(frozen=True)
class WeightLoader:
    """Loads weights into models in parts; every rank calls `load`.

    `memory` materializes models on the meta device.
    """

    all_gather: AllGatherObjects
    rank: int
    world_size: int
    memory: MetaModels

    def load(self, model: nn.Module, location: str | os.PathLike[str]) -> None:
        """Read weights from a directory, a file or an index, or from the URL of one, into a model.

        The model is unchanged if the weights do not fit; the error says if reading failed half-way.
        """
        with errors_on_all_ranks(self.all_gather), _value_errors_as_checkpoint_errors():
            weights = find_weights(location)
            state = state_dict(model, keep_vars=True)
            packed = PackedWeights(model, state)
            computed = _list_computed(
                model, {name: value for name, value in state.items() if name not in packed.scales}
            )
            slices = weights.match(state, computed, packed=packed, rank=self.rank, world_size=self.world_size)
            for name, tensor in state.items():
                region_of(tensor, name)
            weights.verify(self.rank, self.world_size)
        with ExitStack() as stack:
            with errors_on_all_ranks(self.all_gather), _value_errors_as_checkpoint_errors():
                stack.enter_context(compute_buffers(model, self.memory.device))
            try:
                with errors_on_all_ranks(self.all_gather):
                    self._fill(model, slices, packed)
            except CheckpointError as error:
                raise CheckpointError(
                    f"{error}\nThe model is now inconsistent ({weights.source} was loaded partially). Load it again."
                ) from error

    def _fill(self, model: nn.Module, slices: Mapping[str, TensorSlice], packed: PackedWeights) -> None:
        self.memory.materialize(model)
        packed.restore({name: slices[name].read() for name in packed.scales})
        done: set[int] = set()
        with torch.no_grad():
            for name, tensor in state_dict(model, keep_vars=True).items():
                if id(tensor) not in done and name not in packed.scales:
                    done.add(id(tensor))
                    read_into(local_shard(tensor), slices[name], region_of(tensor, name))


def _list_computed(model: nn.Module, state: Mapping[str, Any]) -> list[str]:
    """Return a line for each tensor that only the model's own `load_state_dict` could restore."""
    tensors = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    return [
        f"{name} is computed by the model's own state_dict, and cannot be read in parts"
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and id(value) not in tensors
    ]


@contextmanager
def _value_errors_as_checkpoint_errors() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise CheckpointError(str(error)) from error


# Parts of tensors in files -------------------------------------------------------------

_BLOCK = 1 << 23
"""Bytes that are read at a time."""
_SHORT_ROW = 1 << 9
"""For shorter rows, the bytes between them are read too, in one call."""
_MAX_HEADER = 100_000_000
"""Largest header that the reader of safetensors accepts."""
_DTYPES = {number.code: getattr(torch, name) for name, number in NUMBER_FORMATS.items()}


@dataclass(frozen=True)
class TensorSlice:
    """A tensor in a file, before it is read."""

    file: SourceFile
    start: int
    """Offset in the file, in bytes."""
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> torch.Tensor:
        """Return the full tensor on the CPU."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        try:
            with self.file.open() as read:
                read(tensor_bytes(tensor), self.start)
        except OSError as error:
            raise CheckpointError(f"{self.file} cannot be read: {error}") from error
        return tensor


_Code = Annotated[str, ValueRule("a dtype of safetensors", lambda code: code in _DTYPES)]
_Range = Annotated[tuple[Count, ...], ValueRule("start and end", lambda offsets: len(offsets) == 2)]  # noqa: PLR2004


@dataclass(frozen=True)
class _HeaderEntry:
    """A tensor in the header of a safetensors file."""

    dtype: _Code
    shape: Shape
    data_offsets: _Range

    def check(self) -> None:
        start, end = self.data_offsets
        if end - start != math.prod(self.shape) * _DTYPES[self.dtype].itemsize:
            raise FieldError(
                f"is {end - start} bytes for {self.dtype} of shape {list(self.shape)}", ("data_offsets",)
            )


def read_headers(file: SourceFile) -> tuple[dict[str, TensorSlice], dict[str, str]]:
    """Return the tensors of a safetensors file by name, and its metadata; only the header is read."""
    try:
        with file.open() as read:
            size = file.read_size()
            prefix = bytearray(8)
            read(memoryview(prefix)[: min(8, size)], 0)
            length = int.from_bytes(prefix, "little")
            text = bytearray(max(0, min(length, _MAX_HEADER, size - 8)))
            read(memoryview(text), 8)
            header = parse_strict_json(bytes(text))
        metadata = read_value(Mapping[str, str], header.pop("__metadata__", None) or {})
        entries = read_value(Mapping[str, _HeaderEntry], header)
        _check_order(entries, size - 8 - length)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{file} cannot be read: it is not a safetensors file, or damaged: {error}"
        ) from error
    slices = {
        name: TensorSlice(file, 8 + length + entry.data_offsets[0], _DTYPES[entry.dtype], entry.shape)
        for name, entry in entries.items()
    }
    return slices, metadata


def _check_order(entries: Mapping[str, _HeaderEntry], size: int) -> None:
    """Raise `ValueError` if tensors exceed the data or overlap: each of many could be as large as the file."""
    end = 0
    for entry in sorted(entries.values(), key=lambda entry: entry.data_offsets):
        if entry.data_offsets[0] < end:
            raise ValueError("its tensors overlap")
        end = max(end, entry.data_offsets[1])
    if end > size:
        raise ValueError("it is truncated")


def read_into(target: torch.Tensor, stored: TensorSlice, region: ShardRegion) -> None:
    """Read a region of a tensor in a file into memory of the same shape."""
    if not target.numel():
        return
    try:
        with stored.file.open() as read:
            for start, sizes in _split_region(stored, region):
                index = tuple(
                    slice(offset, offset + length) for offset, length in zip(start, sizes, strict=True)
                )
                offsets = tuple(first + second for first, second in zip(region.offsets, start, strict=True))
                target[index].copy_(_read_region(read, stored, ShardRegion(offsets, sizes)))
    except OSError as error:
        raise CheckpointError(f"{stored.file} cannot be read: {error}") from error


def are_equal(first: TensorSlice, second: TensorSlice) -> bool:
    """Return whether two tensors in files have equal shapes and values; nan equals nan."""
    if first.shape != second.shape:
        return False
    full = ShardRegion((0,) * len(first.shape), first.shape)
    wider = first if first.dtype.itemsize >= second.dtype.itemsize else second
    for offsets, sizes in _split_region(wider, full):
        left, right = (_open_and_read(tensor, ShardRegion(offsets, sizes)) for tensor in (first, second))
        if not (torch.equal(left, right) or torch.allclose(left, right.to(left.dtype), 0, 0, equal_nan=True)):
            return False
    return True


def _split_region(
    stored: TensorSlice, region: ShardRegion
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Split a region into parts of `_BLOCK` bytes; yield offsets in the region, and sizes."""
    sizes, count, dimension = region.sizes, stored.dtype.itemsize, len(region.sizes)
    while dimension and count * sizes[dimension - 1] <= _BLOCK:
        dimension -= 1
        count *= sizes[dimension]
    if not dimension:
        yield (0,) * len(sizes), sizes
        return
    step = max(1, _BLOCK // count)
    before, length, after = sizes[: dimension - 1], sizes[dimension - 1], sizes[dimension:]
    for index in product(*map(range, before)):
        for offset in range(0, length, step):
            yield (
                (*index, offset, *(0 for _ in after)),
                (*(1 for _ in before), min(step, length - offset), *after),
            )


def _open_and_read(stored: TensorSlice, region: ShardRegion) -> torch.Tensor:
    with stored.file.open() as read:
        return _read_region(read, stored, region)


def _read_region(read: ReadRange, stored: TensorSlice, region: ShardRegion) -> torch.Tensor:
    wide = _widen_rows(stored, region)
    buffer = torch.empty(wide.sizes, dtype=stored.dtype)
    remaining = tensor_bytes(buffer)
    for start, length in iterate_runs(stored.shape, wide.offsets, wide.sizes, stored.dtype.itemsize):
        read(remaining[:length], stored.start + start)
        remaining = remaining[length:]
    for dimension, (offset, length) in enumerate(zip(*region, strict=True)):
        buffer = buffer.narrow(dimension, offset - wide.offsets[dimension], length)
    return buffer


def _widen_rows(stored: TensorSlice, region: ShardRegion) -> ShardRegion:
    """Extend a region to full rows if its own are short and the result is small."""
    if not region.sizes or region.sizes[-1] == stored.shape[-1]:
        return region
    is_short = region.sizes[-1] * stored.dtype.itemsize < _SHORT_ROW
    wide = ShardRegion((*region.offsets[:-1], 0), (*region.sizes[:-1], stored.shape[-1]))
    return wide if is_short and math.prod(wide.sizes) * stored.dtype.itemsize <= 2 * _BLOCK else region
