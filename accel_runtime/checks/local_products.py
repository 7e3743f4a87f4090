"""Check that the first step of an optimizer multiplies sharded matrices, not the shards of each process."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from typing_extensions import override

from accel_runtime.foundation.module_names import named_parameters
from accel_runtime.foundation.nested import has_dtensor
from accel_runtime.foundation.torch_internals import (
    TORCH,
    TorchDispatchMode,
    list_written,
    local_tensor,
    tree_leaves,
)
from accel_runtime.observe.call_sites import CallSite, call_site

__all__ = ["observe_products"]

_LOG = logging.getLogger("accel_runtime.checks.local_products")
_COLLECTIVES = {"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"}
"""The namespaces of operations that send tensors."""
_PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}
"""Products of two matrices, with the index of the first one; all others of torch consist of them."""
_DECOMPOSITIONS = {"_linalg_svd", "linalg_qr"}
_GENERATED = "<eval_with_key>"
"""The start of the file names of graphs of torch.compile."""
_CAN_OBSERVE = hasattr(TorchDispatchMode, "ignore_compile_internals")
"""False before torch 2.10, which never compiles a function that is first called inside of a mode."""


@contextmanager
def observe_products(optimizer: torch.optim.Optimizer, models: Iterable[nn.Module]) -> Iterator[None]:
    """Observe the first step of an optimizer, and warn after it if it multiplies shards; optimizers of torch are right or refused."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if type(optimizer).__module__.startswith("torch.optim.") or not (
        has_dtensor(parameters) and _CAN_OBSERVE
    ):
        yield
        return
    names = {parameter: name for model in models for name, parameter in named_parameters(model)}
    observer = _ProductObserver({names[p]: p for p in parameters if p in names})
    with observer:
        yield
    if observer.found is not None and not observer.sends:
        shard, site = observer.found
        _LOG.warning(
            "The step of %s differs from that of one process: at %s it multiplies the shard [%d, %d] of %s %s, which this process "
            "has, as if it were the matrix. Compute with the parameters and gradients as they are, since torch gathers them for "
            "each product, or with their full_tensor().",
            type(optimizer).__name__,
            site,
            shard.rows,
            shard.columns,
            shard.name,
            list(shard.full),
        )


class _Shard(NamedTuple):
    """A tensor of this process that was computed from a part of a matrix, and from no other process."""

    name: str
    """Name of the parameter."""
    rows: int
    columns: int
    full: tuple[int, ...]
    """Shape of the parameter."""


class _ProductObserver(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Find a product of two tensors that are both computed from one shard only, in a step that sends no tensor itself.

    Operations of DTensors, which send what they need, are seen as one operation each.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, as torch would never compile functions that are first called inside of another mode."""
        return True

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shards: dict[StorageWeakRef, _Shard] = {}
        self.found: tuple[_Shard, CallSite] | None = None
        """The first such product, with the line of the script."""
        self.sends = False
        """True if the step sends tensors itself: then its products of shards may be parts of a product."""
        for name, parameter in parameters.items():
            for tensor in (parameter, parameter.grad):
                if tensor is not None:
                    self._record_dtensor(tensor, name)

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.sends = self.sends or func.namespace in _COLLECTIVES
        if not (self.sends or self.found):
            self._find_product(func, args)
        result = func(*args, **kwargs)
        if not (self.sends or self.found):
            for inputs, outputs in _match(func, args, kwargs, result):
                self._record_outputs(inputs, outputs)
        return result

    def _find_product(self, func: Any, args: Sequence[Any]) -> None:
        """Record a product if both operands are of shards, and one has the shape of its shard.

        Blocks of a shard may be matrices of their own, such as those of attention heads. A product of vectors is a norm of rows.
        """
        operation = func.overloadpacket.__name__
        if operation in _DECOMPOSITIONS:
            operands = args[:1]
        elif operation in _PRODUCTS:
            operands = args[_PRODUCTS[operation] :][:2]
        else:
            return
        shards = [self._find_shard(operand) for operand in operands]
        if any(hasattr(operand, "device_mesh") for operand in operands) or None in shards:
            return
        sizes = {size for operand in operands for size in operand.shape[-2:]}
        if min(sizes) > 1:
            for operand, shard in zip(operands, shards, strict=True):
                if shard and {*operand.shape[-2:]} == {shard.rows, shard.columns}:
                    self.found = shard, call_site(TORCH, _GENERATED)
                    return

    def _record_outputs(self, inputs: Iterable[torch.Tensor], outputs: Iterable[torch.Tensor]) -> None:
        """Record that outputs are of the shard of which an input is."""
        shard = next(filter(None, map(self._find_shard, inputs)), None)
        if shard is not None:
            for output in outputs:
                if hasattr(output, "device_mesh"):
                    self._record_dtensor(output, shard.name)
                elif (key := _storage_of(output)) is not None:
                    self._shards.setdefault(key, shard)

    def _record_dtensor(self, tensor: torch.Tensor, name: str) -> None:
        """Record the shard of a DTensor if it is a part of a matrix; a stack may be divided into whole ones."""
        local = local_tensor(tensor)
        if tensor.dim() > 1 and local.shape[-2:] != tensor.shape[-2:] and (key := _storage_of(tensor)):
            self._shards[key] = _Shard(name, local.shape[-2], local.shape[-1], tuple(tensor.shape))

    def _find_shard(self, tensor: torch.Tensor) -> _Shard | None:
        key = _storage_of(tensor)
        return None if key is None else self._shards.get(key)


def _storage_of(tensor: torch.Tensor) -> StorageWeakRef | None:
    """Return a reference to the memory of a tensor on this process, which keeps its identity from use by another one."""
    local = local_tensor(tensor)
    if type(local) in {torch.Tensor, nn.Parameter} and local.layout is torch.strided:
        return StorageWeakRef(local.untyped_storage())  # type: ignore[no-untyped-call]
    return None


def _match(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Yield inputs of an operation with the outputs that are computed from them: of a loop over lists, those of each item."""
    if func.overloadpacket.__name__.startswith("_foreach_"):
        lists = [each for each in args if isinstance(each, (list, tuple)) and _tensors(each)]
        results = result or lists[0]  # in place
        for *inputs, output in zip(*lists, results, strict=True):
            yield _tensors(inputs), _tensors(output)
        return
    yield _tensors([args, kwargs]), _tensors([result, list_written(func, args, kwargs)])


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
