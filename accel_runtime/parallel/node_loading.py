"""Models that one rank of each node loads: the others create them without values, and `prepare` sends them one tensor at a time."""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import socket
import sys
import traceback
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from accel_runtime.backends.base import Backend
from accel_runtime.backends.rng import RandomStates
from accel_runtime.environment.accelerate.sharding import CPU_RAM_EFFICIENT_LOADING, USE_FSDP
from accel_runtime.foundation.module_names import named_parameters, script_names
from accel_runtime.foundation.precision import name_dtype
from accel_runtime.foundation.tensor_bytes import hash_tensor
from accel_runtime.foundation.torch_internals import (
    list_buffers,
    own_tensors,
    remove_forward_pre_hooks,
    replace_data,
)
from accel_runtime.parallel.big_modeling import MetaModels, describe_dispatch
from accel_runtime.parallel.dtensor import class_of, local_shard, narrow_to, region_of
from accel_runtime.parallel.strategy import Strategy
from accel_runtime.storage.errors import describe_error, format_names

__all__ = ["NodeLoading", "PendingValues"]

_LOG = logging.getLogger("accel_runtime.parallel")
_OPERATION = "loading()"
_FREED = 1 << 23
"""Bytes of freed tensors after which the memory is returned to the operating system."""
Nodes = tuple[tuple[int, ...], ...]
"""The ranks of each node; the first of them reads."""


class NodeLoading:
    """Let the first rank of each node load models, and send the values to the others of it when the models are prepared.

    Args:
        backend: Ranks and device.
        strategy: Prepares the models.
        find_memory: Returns what allocates the parameters of models on the meta device.
    """

    def __init__(self, backend: Backend, strategy: Strategy, find_memory: Callable[[], MetaModels]) -> None:
        self._backend, self._strategy, self._find_memory = backend, strategy, find_memory
        self._depth = 0
        self._is_used = False
        """Models may have values on some ranks only; equal on all ranks."""

    @property
    def is_active(self) -> bool:
        """Return whether the script is in `load`."""
        return self._depth > 0

    @contextmanager
    def load(self) -> Iterator[None]:
        """Run the block as it is on the first rank of each node, and without values on the others; collective.

        Raises:
            RuntimeError: The block failed on a rank; raised on all.
            ValueError: The strategy of the run cannot take models that have values on some ranks only.
        """
        if self._backend.topology.world_size == 1 or self._depth:
            yield
            return
        if reason := self._strategy.loading_refusal:
            raise ValueError(f"accelerator.loading() is not supported here: {reason}")
        nodes, rank = self._nodes, self._backend.topology.rank
        self._is_used = True
        is_reader = any(rank == ranks[0] for ranks in nodes)
        before, error = RandomStates.capture(), None
        self._depth += 1
        key = f"accel/loading/{self._backend.increment_store_key('accel/loading')}"
        try:
            with ExitStack() as stack:
                if not is_reader:
                    reader = next(ranks[0] for ranks in nodes if rank in ranks)
                    stack.enter_context(_without_values(rank, reader))
                yield
        except Exception as raised:  # noqa: BLE001 - raised on all ranks
            error = raised
        finally:
            self._depth -= 1
            if is_reader:  # also after a KeyboardInterrupt: the others wait
                self._backend.set_store_key(f"{key}/{rank}", "ended")
        # Not in a collective, whose time limit reading may exceed.
        for ranks in nodes:
            if rank != ranks[0]:
                self._backend.wait_for_leader(ranks[0], f"{key}/{ranks[0]}", _OPERATION)
        outcome = _Outcome(
            None if error is None else _describe_failure(error),
            socket.gethostname(),
            {kind: before.select([kind]).fingerprint for kind in before.kinds},
            RandomStates.capture() if is_reader else None,
        )
        outcomes = self._backend.all_gather_objects(outcome, _OPERATION)
        if problems := [
            f"rank {index} of node {_find_node(nodes, index)} ({each.host}): {each.problem}"
            for index, each in enumerate(outcomes)
            if each.problem is not None
        ]:
            raise RuntimeError(
                f"accelerator.loading() failed on {'; '.join(problems)}. Correct the files or the code there; the models of this block "
                "have no values on the other ranks of a node."
            ) from error
        # The others have drawn other numbers, or none, for the initial values of weights.
        source = outcomes[nodes[_find_node(nodes, rank)][0]]
        if source.after is not None:
            alike = [kind for kind, state in outcome.before.items() if source.before.get(kind) == state]
            source.after.select(alike).restore()

    @cached_property
    def _nodes(self) -> Nodes:
        """The ranks of each node; collective at first."""
        local = [
            rank
            for (rank,) in self._backend.all_gather_numbers(
                [self._backend.topology.local_rank], "local ranks"
            )
        ]
        nodes: list[list[int]] = []
        for rank, local_rank in enumerate(local):
            if not local_rank:
                nodes.append([])
            if not nodes or local_rank != len(nodes[-1]):
                raise RuntimeError(
                    f"{_OPERATION} failed: the local ranks are {local}. Number the ranks of a machine consecutively, as `accel launch` and "
                    "`torchrun` do."
                )
            nodes[-1].append(rank)
        return tuple(map(tuple, nodes))

    def take(self, model: nn.Module, *, is_placed: bool) -> PendingValues | None:
        """Send the values of a model that some ranks only have, or return them; None if nothing is left to send; collective.

        With a strategy that takes models on the meta device, the model is there afterwards, on all ranks, and the values are returned.

        Raises:
            RuntimeError: The ranks have created different tensors, or no rank of a node has the values.
            ValueError: Tensors are of a kind that cannot be sent.
        """
        if not self._is_used or self._backend.topology.world_size == 1:
            return None
        tensors, name = _named_tensors(model), class_of(model)
        if any(hasattr(tensor, "device_mesh") for tensor in tensors.values()):
            return None  # prepared before
        facts = self._backend.all_gather_objects(
            _ModelFacts(
                {key: f"{list(tensor.shape)} {name_dtype(tensor.dtype)}" for key, tensor in tensors.items()},
                frozenset(key for key, tensor in tensors.items() if tensor.is_meta),
                describe_dispatch(model),
                tuple(key for key, tensor in tensors.items() if not _is_plain(tensor)),
            ),
            f"the tensors of {name}",
        )
        if all(each.meta == facts[0].meta for each in facts):
            return None
        readers = [ranks[0] for ranks in self._nodes]
        _check_facts(name, facts, readers)
        for module in model.modules():
            remove_forward_pre_hooks(module, _ValuesGuard)
        rank = self._backend.topology.rank
        differing: frozenset[str] = frozenset()
        if len(readers) > 1:
            hashes = (
                {key: hash_tensor(tensor) for key, tensor in tensors.items()} if rank in readers else None
            )
            gathered = self._backend.all_gather_objects(hashes, f"the values of {name}")
            first = gathered[readers[0]]
            differing = frozenset(
                key for key in first if any(gathered[reader][key] != first[key] for reader in readers)
            )
            if differing and not rank:
                _LOG.warning(
                    "%s of %s differ between the nodes: all ranks take the values of rank 0. Weights that no file has are drawn on each "
                    "node; if others differ, the nodes have read different files.",
                    format_names(sorted(differing)),
                    name,
                )
        values = {key: tensor.detach() for key, tensor in tensors.items()} if rank in readers else {}
        pending = PendingValues(
            self._backend, self._find_memory(), self._nodes, facts[0].specs, values, differing
        )
        if self._strategy.takes_meta_models:
            _replace_tensors(model, lambda tensor: torch.empty_like(tensor, device="meta"))
        else:
            pending.fill_replica(model, tensors, is_placed=is_placed)
            return None
        return pending


class _Outcome(NamedTuple):
    """The end of the block on a rank."""

    problem: str | None
    host: str
    before: Mapping[str, int]
    """Hash of the random state at its begin, by generator."""
    after: RandomStates | None
    """The random states at its end, of a rank that reads."""


class _ModelFacts(NamedTuple):
    """The tensors of a model on a rank."""

    specs: Mapping[str, str]
    """Shape and dtype by name."""
    meta: frozenset[str]
    """The names of tensors without values."""
    dispatch: str
    """Where parts of the model are, if it is on several devices."""
    special: tuple[str, ...]
    """The names of tensors that are not plain, such as quantized ones."""


def _check_facts(name: str, facts: Sequence[_ModelFacts], readers: Sequence[int]) -> None:
    first = facts[0].specs
    for rank, each in enumerate(facts):
        for key in [*first, *each.specs]:
            if first.get(key) != each.specs.get(key):
                raise RuntimeError(
                    f"Cannot prepare {name}: {key} is {each.specs.get(key, 'missing')} on rank {rank}, and "
                    f"{first.get(key, 'missing')} on rank 0. Create the model in the same way on every rank."
                )
        if each.dispatch:
            raise ValueError(
                f"Cannot prepare {name} of accelerator.loading(): on rank {rank} it is {each.dispatch}, and its values are sent from one "
                "device. Load it without a device_map, or with device_map={'': 'cpu'}."
            )
        if each.special:
            raise ValueError(
                f"Cannot prepare {name} of accelerator.loading(): {format_names(list(each.special))} cannot be sent: tensors of other classes, "
                "such as quantized weights, have more than values. Load the model outside of loading()."
            )
        if rank in readers and each.meta:
            raise RuntimeError(
                f"Cannot prepare {name} of accelerator.loading(): {format_names(sorted(each.meta))} have no values on rank {rank}, which reads "
                "for its node. Create the model outside of init_empty_weights() and torch.device('meta')."
            )


@dataclass(frozen=True)
class PendingValues:
    """The values of a model on the ranks that have read them, until they are sent."""

    backend: Backend
    memory: MetaModels
    nodes: Nodes
    specs: Mapping[str, str]
    values: dict[str, torch.Tensor]
    """Full tensors by name; empty on ranks that have not read."""
    differing: frozenset[str]
    """The names of tensors in which nodes differ, which all take from rank 0."""

    def fill_shards(self, model: nn.Module) -> None:
        """Allocate the shards of a prepared model, and fill them one tensor at a time; collective.

        Each rank that has read frees a full tensor as soon as it is sent.
        """
        layout = {key: (tensor.shape, tensor.dtype) for key, tensor in _named_tensors(model).items()}
        self.memory.materialize(model)
        targets, freed = _named_tensors(model), _FreedMemory()
        with torch.no_grad():
            for key in self.specs:
                shape, dtype = layout[key]
                value = self.values.pop(key, None)
                full = (
                    torch.empty(shape, dtype=dtype, device=self.backend.device)
                    if value is None
                    else value.to(self.backend.device).contiguous()
                )
                self._send(full, key)
                local_shard(targets[key]).copy_(narrow_to(full, region_of(targets[key], key)))
                size = full.nbytes
                del value, full
                freed.add(size)

    def fill_replica(self, model: nn.Module, tensors: Mapping[str, torch.Tensor], *, is_placed: bool) -> None:
        """Give each rank all values of a model, one tensor at a time; collective."""
        device = self.backend.device
        received: dict[int, torch.Tensor] = {}
        for key, tensor in tensors.items():
            if key in self.values:
                value = self.values.pop(key)
                full = value.to(device) if is_placed else value
            else:
                where = device if is_placed else torch.device("cpu")
                full = torch.empty_like(tensor, device=where, requires_grad=False)
            flat = full.contiguous()
            self._send(flat, key)
            if flat is not full:
                full.copy_(flat)
            received[id(tensor)] = full
        _replace_tensors(model, lambda tensor: received.pop(id(tensor)))

    def _send(self, full: torch.Tensor, key: str) -> None:
        # As bytes: process groups do not support all dtypes.
        data = full.reshape(-1).view(torch.uint8)
        if not data.numel():
            return
        if key in self.differing:
            self.backend.broadcast(data)
        else:
            self.backend.broadcast_in_node(data, self.nodes)


class _FreedMemory:
    """Return the memory of freed tensors to the operating system.

    glibc keeps that of tensors up to 32 MiB, and puts small objects into it, so that the next tensor does not fit.
    """

    def __init__(self) -> None:
        self._size = 0

    def add(self, size: int) -> None:
        """Count freed bytes, and return them from time to time."""
        self._size += size
        if self._size >= _FREED:
            self._size = 0
            with suppress(AttributeError, OSError):  # another C library
                ctypes.CDLL(None).malloc_trim(0)


def _find_node(nodes: Nodes, rank: int) -> int:
    return next(index for index, ranks in enumerate(nodes) if rank in ranks)


def _named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by their names in the script; tied ones under their first name."""
    buffers = dict(model.named_buffers())
    names = script_names(model, buffers)
    return {**dict(named_parameters(model)), **{names[key]: buffer for key, buffer in buffers.items()}}


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in {torch.Tensor, nn.Parameter, nn.Buffer}
        and not is_lazy(tensor)
        and tensor.layout is torch.strided
    )


def _replace_tensors(model: nn.Module, replace: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace the memory of parameters, which stay the same objects, and the buffers; tied ones stay tied."""
    for parameter in list(model.parameters()):
        data = replace(parameter)
        if data.device != parameter.device or data.data_ptr() != parameter.data_ptr():
            replace_data(parameter, data)
    buffers: dict[int, torch.Tensor] = {}
    originals = []  # a new buffer must not get the id of an old one
    for module in model.modules():
        for persistent in (True, False):
            for name in list_buffers(module, persistent=persistent):
                buffer = getattr(module, name)
                if buffer is not None and id(buffer) not in buffers:
                    originals.append(buffer)
                    buffers[id(buffer)] = replace(buffer)
                if buffer is not None:
                    setattr(module, name, buffers[id(buffer)])


# The other ranks of a node ------------------------------------------------------------


@contextmanager
def _without_values(rank: int, reader: int) -> Iterator[None]:
    """Create modules with parameters on the meta device; all of their tensors are there at the end."""
    modules: WeakSet[nn.Module] = WeakSet()
    freed = _FreedMemory()

    def drop_parameter(module: nn.Module, _: str, parameter: nn.Parameter | None) -> None:
        modules.add(module)
        if parameter is None or parameter.is_meta or not _is_plain(parameter):
            return
        # In place: another module may share it. Where torch refuses that, it is dropped at the end.
        size = parameter.nbytes
        with suppress(RuntimeError):
            replace_data(parameter, torch.empty_like(parameter, device="meta"))
            freed.add(size)

    def watch_buffer(module: nn.Module, *_: Any) -> None:
        # The script may compute with it still.
        modules.add(module)

    with ExitStack() as stack:
        stack.callback(register_module_parameter_registration_hook(drop_parameter).remove)
        stack.callback(register_module_buffer_registration_hook(watch_buffer).remove)
        # transformers reads no file then, on ranks other than the first of a node.
        stack.enter_context(
            _set_variables({each.variable: "true" for each in (USE_FSDP, CPU_RAM_EFFICIENT_LOADING)})
        )
        stack.callback(setattr, torch, "load", torch.load)
        torch.load = _load_without_values(torch.load)
        stack.enter_context(_skip_transformers_data())
        stack.enter_context(_MetaConversions())
        yield
    buffers: Any = WeakTensorKeyDictionary()
    for module in modules:
        _drop_values(module, buffers)
        if any(tensor.is_meta for tensor in own_tensors(module)):
            module.register_forward_pre_hook(_ValuesGuard(rank, reader), prepend=True)
    freed.add(_FREED)


def _drop_values(module: nn.Module, buffers: Any) -> None:
    """Move the buffers of a module to the meta device, and parameters that a library wrote into it without its hooks.

    `buffers` has the new ones by the old ones, which another module may share.
    """
    for parameter in module.parameters(recurse=False):
        if _is_plain(parameter) and not parameter.is_meta:
            replace_data(parameter, torch.empty_like(parameter, device="meta"))
    for persistent in (True, False):
        for name in list_buffers(module, persistent=persistent):
            buffer = getattr(module, name)
            if buffer is not None and not buffer.is_meta and _is_plain(buffer):
                if buffer not in buffers:
                    buffers[buffer] = buffer.to("meta")
                setattr(module, name, buffers[buffer])


@contextmanager
def _skip_transformers_data() -> Iterator[None]:
    """Let `from_pretrained` of transformers 5 take shapes from safetensors files, whose data it reads and converts in threads.

    Its mode for FSDP reads the files on all ranks (seen in 5.23); earlier versions have no such function, and read none in that mode.
    """
    module: Any = None
    if "transformers" in sys.modules:
        with suppress(ImportError):
            module = importlib.import_module("transformers.core_model_loading")
    materialize = getattr(module, "_materialize_copy", None)
    if materialize is None:
        yield
        return

    def skip_data(tensor: Any, device: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:  # noqa: ARG001
        return torch.empty_like(
            tensor[...], dtype=dtype, device="meta"
        )  # a slice is mapped, and read when it is used

    module._materialize_copy = skip_data  # noqa: SLF001
    try:
        yield
    finally:
        module._materialize_copy = materialize  # noqa: SLF001


@contextmanager
def _set_variables(variables: Mapping[str, str]) -> Iterator[None]:
    previous = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _load_without_values(load: Callable[..., Any]) -> Callable[..., Any]:
    """Return `torch.load` with tensors on the meta device; the data of a file in its current format is not read."""

    def load_without_values(f: Any, map_location: Any = None, *args: Any, **options: Any) -> Any:  # noqa: ARG001
        if isinstance(f, (str, os.PathLike)) and zipfile.is_zipfile(f):
            options["mmap"] = True
        return load(f, "meta", *args, **options)

    return load_without_values


class _MetaConversions(TorchFunctionMode):
    """Let tensors without values be moved to devices, where they stay without, and be copied to others, which keep theirs."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a torch function."""
        kwargs = dict(kwargs or {})
        if func in _CONVERSIONS and args[0].is_meta:
            dtype = next(
                (
                    each.dtype if isinstance(each, torch.Tensor) else each
                    for each in (*args[1:], *kwargs.values())
                    if isinstance(each, (torch.dtype, torch.Tensor))
                ),
                args[0].dtype,
            )
            return func(args[0], device="meta", dtype=dtype) if func is torch.Tensor.to else args[0]
        if func is torch.Tensor.copy_ and args[1].is_meta and not args[0].is_meta:
            return args[0]
        return func(*args, **kwargs)


_CONVERSIONS = {torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.cpu}


class _ValuesGuard:
    """Hook that raises an error in the forward pass of a module without values, until `prepare` removes it."""

    def __init__(self, rank: int, reader: int) -> None:
        self._rank, self._reader = rank, reader

    def __call__(self, module: nn.Module, _: Any) -> None:
        if any(tensor.is_meta for tensor in own_tensors(module)):
            raise RuntimeError(
                f"Cannot run {class_of(module)} on rank {self._rank}: rank {self._reader} has read its values inside of "
                "accelerator.loading(), and prepare() sends them to the other ranks of the node. Call accelerator.prepare(model) first, or "
                "accelerator.prepare_model(model, evaluation_mode=True) for a model that is not trained."
            )


# Errors -------------------------------------------------------------------------------

_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".json", ".gguf", ".h5", ".npz"}


def _describe_failure(error: Exception) -> str:
    """Return the error as text, with the file that was read, which some libraries leave out."""
    text = describe_error(error)
    file = _find_file(error)
    return (
        text.rstrip(".")
        if file is None or file.name in text
        else f"{text.rstrip('.')} (while reading {file})"
    )


def _find_file(error: BaseException) -> Path | None:
    """Return the file of weights that the innermost function of the error had a name of."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        for value in frame.f_locals.values():
            if isinstance(value, (str, os.PathLike)) and "\n" not in (text := os.fsdecode(value)):
                path = Path(text)
                if path.suffix in _WEIGHT_SUFFIXES:
                    return path
    cause = error.__cause__ or error.__context__
    return None if cause is None else _find_file(cause)
