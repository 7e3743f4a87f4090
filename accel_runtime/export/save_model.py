"""Export the weights of a model: safetensors in the layout of the Hugging Face Hub.

All files are written under scratch names and then renamed, the index last; files of an earlier export are removed
afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from accel_runtime.backends.base import Backend
from accel_runtime.collectives.handshake import all_gather_objects
from accel_runtime.environment.locations import is_url, normalize_location
from accel_runtime.environment.topology import Topology
from accel_runtime.foundation.module_names import state_dict
from accel_runtime.foundation.tensor_bytes import memory_key
from accel_runtime.parallel.dtensor import gather_tensor, local_shard
from accel_runtime.storage.any_store import find_remote_store
from accel_runtime.storage.errors import CheckpointError, StoreError, describe_error, errors_on_all_ranks
from accel_runtime.storage.file_system import FileSystem, list_leftovers, open_atomically
from accel_runtime.storage.tensor_file import (
    NUMBER_FORMATS,
    TensorPart,
    shard_file_name,
    write_index,
    write_safetensors,
)

__all__ = [
    "CHECKSUMS",
    "INDEX",
    "SINGLE",
    "ExportPlan",
    "add_aliases",
    "export_model",
    "export_sharded_model",
    "find_aliases",
    "select_tensors",
    "write_on_main_process",
]

SINGLE = "model.safetensors"
INDEX = f"{SINGLE}.index.json"
CHECKSUMS = "xxh3_64"
"""Key in the index for the checksums of shards: shards of two exports cannot be mixed."""
_T = TypeVar("_T")
_RESERVED = "__metadata__"
_META = "a tensor on the meta device, which has no values"
_CURE = "Use accelerator.save(accelerator.get_state_dict(model), 'model.pt') instead."
_EXPORT_FILE = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors(\.index\.json)?")


@dataclass(frozen=True)
class ExportPlan:
    """Files of an export before they are written."""

    shards: Mapping[str, Mapping[str, torch.Tensor]]
    """Tensors of each file."""
    ties: Mapping[str, str]
    """Aliases that are left out, with the name that is kept."""

    @classmethod
    def from_state(cls, state: Mapping[str, object], limit: int, tied: Iterable[str] = ()) -> ExportPlan:
        """Distribute a state dict over files of at most `limit` bytes; a larger tensor gets its own file.

        `tied` names aliases to leave out first. `CheckpointError` names everything that safetensors does not support.
        """
        tensors = select_tensors(state, _CURE)
        ties = find_aliases(tensors, tied)
        groups = _split_into_files(
            {name: tensor for name, tensor in tensors.items() if name not in ties}, limit
        )
        count = len(groups)
        names = [shard_file_name("model", number, count) for number in range(1, count + 1)]
        return cls(dict(zip(names, groups, strict=True)), ties)

    @property
    def metadata(self) -> dict[str, str]:
        """Metadata of every file; aliases are stored as safetensors does."""
        return {**self.ties, "format": "pt"}


Write = Callable[[str, Mapping[str, torch.Tensor]], None]
"""Write a file of an export: its name and its tensors."""


def open_export(
    plan: ExportPlan, location: Path | str, disk: FileSystem | None = None
) -> AbstractContextManager[Write]:
    """Return a context with a function that writes a file of the plan; at its end, files of an earlier export are removed."""
    if is_url(location):
        return _open_remote_export(plan, normalize_location(location))
    return _open_folder_export(plan, Path(location), disk or FileSystem())


@contextmanager
def _open_remote_export(plan: ExportPlan, url: str) -> Iterator[Write]:
    """Write files at a URL, which nobody sees until they are complete; the index is the last one.

    An earlier export of as many files is absent from the first file on, since its files are replaced one after the other.
    """
    store, names = find_remote_store(url), [*plan.shards, *([INDEX] if len(plan.shards) > 1 else [])]
    checksums: dict[str, str] = {}
    with _convert_errors(url):
        old = [name for name in store.list_names(url) if _EXPORT_FILE.fullmatch(name)]
        if INDEX in old and set(old) & set(plan.shards):
            store.delete([f"{url}/{INDEX}"])

        def write(name: str, tensors: Mapping[str, torch.Tensor]) -> None:
            with _convert_errors(url):
                put = partial(store.put_stream, f"{url}/{name}")
                checksums[name] = write_safetensors(put, _build_parts(tensors), plan.metadata).file.checksum

        yield write
        if INDEX in names:
            shards = {name: _build_parts(tensors) for name, tensors in plan.shards.items()}
            write_index(partial(store.put_stream, f"{url}/{INDEX}"), shards, {CHECKSUMS: checksums})
        store.delete([f"{url}/{name}" for name in old if name not in names])


@contextmanager
def _open_folder_export(plan: ExportPlan, folder: Path, disk: FileSystem) -> Iterator[Write]:
    """Write files beside their names, and rename all at the end; if writing fails, the earlier export is kept."""
    names = [*plan.shards, *([INDEX] if len(plan.shards) > 1 else [])]
    checksums: dict[str, str] = {}
    with _convert_errors(folder):
        disk.make(folder)
        with ExitStack() as renames:
            # Renamed in the opposite order, so the index is entered first.
            scratch = {
                name: renames.enter_context(open_atomically(folder / name, disk)) for name in names[::-1]
            }

            def write(name: str, tensors: Mapping[str, torch.Tensor]) -> None:
                with _convert_errors(folder):
                    written = write_safetensors(
                        partial(disk.put, scratch[name]), _build_parts(tensors), plan.metadata
                    )
                checksums[name] = written.file.checksum

            yield write
            if INDEX in scratch:
                shards = {name: _build_parts(tensors) for name, tensors in plan.shards.items()}
                write_index(partial(disk.put, scratch[INDEX]), shards, {CHECKSUMS: checksums})
        _remove_old_exports(folder, set(names), disk)


def export_model(plan: ExportPlan, location: Path | str, disk: FileSystem | None = None) -> None:
    """Write the files of an export and remove those of an earlier one."""
    with open_export(plan, location, disk) as write:
        for name, tensors in plan.shards.items():
            write(name, tensors)


@contextmanager
def _convert_errors(location: Path | str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = describe_error(error) if isinstance(error, StoreError) else str(error)
        raise CheckpointError(f"Cannot write the model to {location}: {reason}") from error


def _build_parts(tensors: Mapping[str, torch.Tensor]) -> list[TensorPart]:
    return [TensorPart.from_tensor(name, tensor) for name, tensor in tensors.items()]


def select_tensors(state: Mapping[str, object], cure: str) -> dict[str, torch.Tensor]:
    """Return a state dict; raise `CheckpointError` with a cure if safetensors does not support a part of it."""
    problems = {name: reason for name, value in state.items() if (reason := _find_problem(value))}
    if _RESERVED in state:
        problems[_RESERVED] = "a name that the format reserves"
    if problems:
        if all(reason is _META for reason in problems.values()):
            cure = "Load values with accelerator.load_model(), or write an offloaded model by its own save_pretrained()."
        lines = "".join(f"\n  {name}: {reason}" for name, reason in problems.items())
        raise CheckpointError(f"Parts of the state cannot be written as safetensors:{lines}\n{cure}")
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _find_problem(value: object) -> str | None:
    """Return the reason that safetensors does not support a value."""
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}, not a tensor"
    value = local_shard(value) if hasattr(value, "device_mesh") else value
    if type(value) not in {torch.Tensor, torch.nn.Parameter}:
        return f"a {type(value).__name__}, which has no plain memory"
    if value.is_meta:
        return _META
    if value.layout is not torch.strided or value.is_quantized:
        return f"a {'quantized' if value.is_quantized else value.layout} tensor"
    if str(value.dtype).removeprefix("torch.") not in NUMBER_FORMATS:
        return f"a tensor of {value.dtype}, which the format does not support"
    return None


def _split_into_files(tensors: Mapping[str, torch.Tensor], limit: int) -> list[dict[str, torch.Tensor]]:
    groups: list[dict[str, torch.Tensor]] = [{}]
    large: list[dict[str, torch.Tensor]] = []
    free = limit
    for name, tensor in tensors.items():
        if tensor.nbytes > limit:
            large.append({name: tensor})
            continue
        if tensor.nbytes > free:
            groups.append({})
            free = limit
        groups[-1][name] = tensor
        free -= tensor.nbytes
    return [group for group in groups if group] + large or [{}]


def _remove_old_exports(folder: Path, names: set[str], disk: FileSystem) -> None:
    """Remove files of other exports, which readers would take for a part of this one, and those of killed exports."""
    old = [path for path in folder.iterdir() if path.name not in names and _EXPORT_FILE.fullmatch(path.name)]
    old += [path for name, path in list_leftovers(folder) if _EXPORT_FILE.fullmatch(name)]
    for path in sorted(old):
        if path.is_file():
            disk.remove(path)
    disk.sync_directory(folder)


def find_aliases(state: Mapping[str, torch.Tensor], left_out: Iterable[str] = ()) -> dict[str, str]:
    """Return the aliases to leave out, with the name under which each tensor is kept.

    Only identical tensors are aliases, in shape and strides too: other views have values of their own in a
    file. Names in `left_out` are left out first; else the first name in alphabetical order is kept, as in
    safetensors.
    """
    excluded = set(left_out)
    kept: dict[Hashable, str] = {}
    aliases: dict[str, str] = {}
    # Aliases are header metadata, where `format` has another meaning.
    for name in sorted(state, key=lambda name: (name != "format", name in excluded, name)):
        tensor = state[name]
        if tensor.numel() and (first := kept.setdefault(memory_key(tensor), name)) != name:
            aliases[name] = first
    return aliases


def add_aliases(
    stored: Mapping[str, _T], live: Mapping[str, Any], ties: Mapping[str, str] | None = None
) -> dict[str, _T]:
    """Add the aliases that a file leaves out, as tied in the live state, else as the metadata of the file says."""
    keys = {name: memory_key(value) for name, value in live.items() if isinstance(value, torch.Tensor)}
    name_of = {key: name for name, key in keys.items() if name in stored and live[name].numel()}
    complete = dict(stored)
    for name in keys.keys() - stored.keys():
        source = name_of.get(keys[name]) or (ties or {}).get(name)
        if source is not None and source in stored:
            complete[name] = stored[source]
    return complete


_CALL = "save_model"


def export_sharded_model(  # noqa: PLR0913 - the facts of one call
    model: nn.Module,
    location: Path | str,
    limit: int,
    backend: Backend,
    *,
    tied: Iterable[str] = (),
    each_machine: bool,
) -> None:
    """Write the weights of a sharded model; every rank calls it.

    A writer has the tensors of one file in memory, other ranks one tensor.
    """
    all_gather = partial(all_gather_objects, _CALL, handshake=backend.handshake)
    with errors_on_all_ranks(all_gather):
        plan = ExportPlan.from_state(state_dict(model, keep_vars=True), limit, tied)
    writes = is_writer(backend.topology, each_machine=each_machine)
    with ExitStack() as export:
        write: Write | None = None

        def step(act: Callable[[], None]) -> None:
            write_on_main_process(_CALL, act, backend, each_machine=each_machine)

        def begin() -> None:
            nonlocal write
            write = export.enter_context(open_export(plan, location))

        step(begin)
        for name, tensors in plan.shards.items():
            gathered: dict[str, torch.Tensor] = {}
            for key, tensor in tensors.items():
                full = gather_tensor(tensor)
                if writes:
                    gathered[key] = full.cpu()
                del full
            # Not kept: its memory is needed for the next file.
            step(partial(_write_file, write, name, gathered))
            gathered.clear()
        step(export.close)


def _write_file(write: Write | None, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
    assert write is not None
    write(name, tensors)


_DONE = "done"


def is_writer(topology: Topology, *, each_machine: bool) -> bool:
    """Return whether this rank writes: the first of all, or the first of each node."""
    return (topology.local_rank if each_machine else topology.rank) == 0


def write_on_main_process(
    operation: str, write: Callable[[], None], backend: Backend, *, each_machine: bool
) -> None:
    """Let the first rank, or the first of each node, write; return or raise on every rank when all have ended.

    The others wait on the store and not in a collective, so writing may take longer than the collective timeout.
    """
    topology = backend.topology
    writes = is_writer(topology, each_machine=each_machine)
    writers = [
        rank
        for rank, writes_there in enumerate(all_gather_objects(operation, writes, backend.handshake))
        if writes_there
    ]
    key = f"accel/{operation}/{backend.increment_store_key(f'accel/{operation}')}"
    if writes:
        outcome = _DONE
        try:
            write()
        except CheckpointError as error:
            outcome = str(error)
        except BaseException as error:
            outcome = f"{type(error).__name__}: {error}"
            raise
        finally:
            backend.set_store_key(f"{key}/{topology.rank}", outcome)
    outcomes = {rank: backend.wait_for_store_key(rank, f"{key}/{rank}", None) for rank in writers}
    _raise_failures(operation, outcomes, topology.world_size)


def _raise_failures(operation: str, outcomes: dict[int, str], world_size: int) -> None:
    failed = {rank: outcome for rank, outcome in outcomes.items() if outcome != _DONE}
    if not failed:
        return
    if world_size == 1:
        raise CheckpointError(failed[0])
    if len(set(failed.values())) == 1:
        listed = f"rank{'s' if len(failed) > 1 else ''} {', '.join(map(str, failed))}"
        raise CheckpointError(f"{operation} failed on {listed}: {next(iter(failed.values()))}")
    lines = "".join(f"\n  rank {rank}: {outcome}" for rank, outcome in failed.items())
    raise CheckpointError(f"{operation} failed:{lines}")
