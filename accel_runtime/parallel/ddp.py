"""DDP with the interface of the script's module, gradient averaging without DDP, and broadcast of buffers."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from accel_runtime.collectives.handshake import Handshake, build_writer, call_at_site
from accel_runtime.foundation import nested
from accel_runtime.foundation.heartbeat import TORCH
from accel_runtime.foundation.module_names import load_state_dict, named_parameters, script_names
from accel_runtime.foundation.options import DDPCommunicationHookType
from accel_runtime.foundation.torch_internals import graph_task_id, on_backward_end

__all__ = [
    "BufferAveraging",
    "GradientAveraging",
    "ReplicatedModel",
    "check_hidden_gradients",
    "operate_flat",
    "refuse_max_norm",
    "split_by_size",
    "sync_in_backward",
    "wrap_in_ddp",
]

_GROUP_BYTES = 64 * 1024 * 1024
"""Bytes of tensors in one collective."""


class GradientAveraging:
    """Average the gradients of parameters over the ranks without DDP.

    All gradients are averaged at once after the last: if programs are compiled, collectives of one graph are merged and
    overlapped anyway, so buckets gain nothing.

    Args:
        named_parameters: The parameters; trainable ones are averaged.
        average: Averages gradients over the replicas, in place.
        handshake: Compares which gradients each replica has, since all must run the same program.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        average: Callable[[Sequence[torch.Tensor]], None],
        handshake: Handshake,
    ) -> None:
        trainable = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
        self._names = [name for name, _ in trainable]
        self._parameters = [parameter for _, parameter in trainable]
        self._average, self._handshake = average, handshake
        self._compared: Sequence[bool] = ()
        self.is_active = True
        """True if the current backward passes average gradients."""
        self._last_pass = -1
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]

    @contextmanager
    def set_sync(self, *, wanted: bool) -> Iterator[None]:
        """Return a context in which gradients are averaged, or not."""
        before, self.is_active = self.is_active, wanted
        try:
            yield
        finally:
            self.is_active = before

    def _on_gradient(self, _: torch.Tensor) -> None:
        # The id of the pass and no flag, since a pass that fails never ends.
        number = graph_task_id()
        if not self.is_active or self._last_pass == number:
            return
        self._last_pass = number
        on_backward_end(self._average_all)

    @torch.no_grad()
    def _average_all(self) -> None:
        present = [parameter.grad is not None for parameter in self._parameters]
        if present != self._compared:
            self._compare(present)
            self._compared = present
        self._average([parameter.grad for parameter in self._parameters if parameter.grad is not None])

    def _compare(self, present: Sequence[bool]) -> None:
        """Raise RuntimeError if replicas have gradients of different parameters."""
        # Compared in the first pass, and in those that leave other gradients.
        call = call_at_site("backward()", anywhere=True, libraries=(TORCH,))
        result = self._handshake.exchange(call, len(present), build_writer(bytes(present)))
        present_by_rank = zip(*map(result.view, range(self._handshake.size)), strict=True)
        for name, presence in zip(self._names, present_by_rank, strict=True):
            if any(presence) and not all(presence):
                without = ", ".join(str(rank) for rank, is_present in enumerate(presence) if not is_present)
                raise RuntimeError(
                    f"Gradients cannot be averaged: the backward pass left no gradient of {name!r} on rank {without}, but left one on "
                    "others. Replicas run one program, so each must use the same parameters in a step, also with "
                    "find_unused_parameters=True. Add the unused outputs times zero to the loss."
                )


class BufferAveraging:
    """Forward hooks that broadcast the buffers of the first rank when DDP would.

    This is before the first forward pass and after each one whose gradients are averaged.

    Args:
        averages: Returns whether gradients are averaged; None on a copy of the model.
        broadcast: Broadcasts tensors from the first rank, in place.
    """

    def __init__(
        self,
        averages: Callable[[], bool] | None = None,
        broadcast: Callable[[Sequence[torch.Tensor]], None] | None = None,
    ) -> None:
        self._averages, self._broadcast = averages, broadcast
        self._is_due = True

    def before(self, model: nn.Module, _: Any) -> None:
        """Broadcast buffers before a forward pass, if due."""
        buffers = list(model.buffers()) if self._is_due and self._broadcast else []
        if self._broadcast and buffers:
            self._broadcast(buffers)

    def after(self, _model: nn.Module, _args: Any, _output: Any) -> None:
        """Record after a forward pass whether the next one broadcasts."""
        self._is_due = self._averages is not None and torch.is_grad_enabled() and self._averages()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Return a context without broadcasts; restores the state afterwards."""
        broadcast, due = self._broadcast, self._is_due
        self._broadcast = None
        try:
            yield
        finally:
            self._broadcast, self._is_due = broadcast, due

    def __reduce__(self) -> tuple[type[BufferAveraging], tuple[()]]:
        return type(self), ()


def split_by_size(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield tensors of one dtype in groups of `_GROUP_BYTES` at most, unless one is larger."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        group: list[torch.Tensor] = []
        for tensor in (other for other in tensors if other.dtype == dtype):
            if group and sum(other.nbytes for other in group) + tensor.nbytes > _GROUP_BYTES:
                yield group
                group = []
            group.append(tensor)
        yield group


@torch.no_grad()
def operate_flat(tensors: Sequence[torch.Tensor], operate: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change tensors in place by an elementwise operation on flat groups of them, such as a collective."""
    for group in split_by_size(tensors):
        flat = operate(torch.cat([tensor.reshape(-1) for tensor in group]))
        for tensor, values in zip(group, torch.split(flat, [t.numel() for t in group]), strict=True):
            tensor.copy_(values.view_as(tensor))


_Future = torch.futures.Future[torch.Tensor]
_Hook = Callable[[Any, Any], _Future]

_HOOKS: dict[DDPCommunicationHookType, _Hook] = {
    DDPCommunicationHookType.FP16: default_hooks.fp16_compress_hook,
    DDPCommunicationHookType.BF16: default_hooks.bf16_compress_hook,
    DDPCommunicationHookType.POWER_SGD: powerSGD_hook.powerSGD_hook,
}
_WRAPPERS: dict[DDPCommunicationHookType, Callable[[_Hook], _Hook]] = {
    DDPCommunicationHookType.FP16: default_hooks.fp16_compress_wrapper,
    DDPCommunicationHookType.BF16: default_hooks.bf16_compress_wrapper,
}


_PREFIX = "module."
"""DDP's prefix of parameter and buffer names."""
_TORCH_CHECKPOINT = "torch.distributed.checkpoint.state_dict"
"""The torch module that removes the prefix itself, and fails if it is missing."""
_UNUSED_PARAMETERS = "Expected to have finished reduction in the prior iteration"
"""The beginning of DDP's message on parameters without a gradient (torch 2.13)."""


class ReplicatedModel(DistributedDataParallel):
    """DDP with the attributes, the indexing and the state dict of the script's module.

    A name that neither `nn.Module` nor DDP has is read from the script's module, and set there. `state_dict` has the
    names of the script's module; `load_state_dict` accepts them with and without DDP's prefix.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        if hasattr(module, "dim"):
            # DDP uses its own `dim` in `scatter` and `gather` only, which nothing calls; models often have a `dim`.
            del self.dim
        self.register_load_state_dict_pre_hook(_add_prefix)  # type: ignore[no-untyped-call]
        # Some may be frozen later: DDP keeps the indices of now.
        self._averaged_names = [
            name for name, parameter in named_parameters(module) if parameter.requires_grad
        ]
        self._own_names = frozenset(vars(self)) | {"_own_names"}

    explain_error: Callable[[RuntimeError, str], RuntimeError] = staticmethod(lambda error, _: error)
    """`Backend.explain_error` of the backend that prepared the model."""

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        state.pop("explain_error", None)  # it belongs to the process
        return state

    def __getattr__(self, name: str) -> Any:
        try:
            module = self.__dict__["_modules"]["module"]
        except KeyError:  # before DDP is initialized, and while it is unpickled
            raise AttributeError(name) from None
        if name == "module":
            return module
        if name.startswith("__"):  # `copy` looks for methods of this object
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(module, name)

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_own_names", ()):
            # DDP sets some in each forward pass; nn.Module would search its parameters first.
            object.__setattr__(self, name, value)
        elif self._has_own(name):
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)

    @override
    def __delattr__(self, name: str) -> None:
        if self._has_own(name):
            super().__delattr__(name)
        else:
            delattr(self.module, name)

    def _has_own(self, name: str) -> bool:
        """Return whether the attribute `name` belongs to DDP, or DDP is not initialized yet."""
        own = self.__dict__.get("_own_names")
        return own is None or name in own or name == "module" or hasattr(type(self), name)

    def __getitem__(self, index: Any) -> Any:
        return self.module[index]

    @override
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        try:
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if _UNUSED_PARAMETERS in str(error):
                raise RuntimeError(self._explain_unused(str(error))) from error
            # Buffers are broadcast here: a rank that has ended is noticed before any backward pass.
            if (explained := self.explain_error(error, "the forward pass")) is not error:
                raise explained from error
            raise

    def _explain_unused(self, message: str) -> str:
        """Return DDP's message with names of the parameters without a gradient instead of indices."""
        names = self._averaged_names
        match = re.search(r"did not receive grad for rank (\d+): ([\d ]+)", message)
        indices = [int(index) for index in match[2].split()] if match else []
        parameters = ", ".join(names[index] for index in indices if index < len(names)) or "some parameters"
        location = f" on rank {match[1]}" if match else ""
        return (
            f"Gradients of {type(self.module).__name__} cannot be averaged over the processes: the backward pass before "
            f"left no gradient of {parameters}{location}. Use every trainable parameter in the loss, freeze the others before "
            "prepare(), or pass Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])."
        )

    @override
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state under the names of the script's module."""
        if sys._getframe(1).f_globals.get("__name__") == _TORCH_CHECKPOINT:  # noqa: SLF001
            return super().state_dict(*args, **kwargs)
        return self.module.state_dict(*args, **kwargs)

    @override
    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state with the names of the script's module, or with those of wrappers, such as DDP's prefix."""
        return load_state_dict(self.module, state_dict, strict=strict, assign=assign)


class _SearchedModel(ReplicatedModel):
    """DDP that searches outputs for the parameters they depend on, also in types in which torch finds no tensors.

    A class of its own, as torch.compile traces these methods.
    """

    @override
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return nested.unpack_tensors(super().forward(*inputs, **kwargs))

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        output = super()._run_ddp_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        if torch.is_grad_enabled():
            check_hidden_gradients(output, "DDP does not find the parameters that they depend on")
        return nested.pack_tensors(output)


def _add_prefix(module: ReplicatedModel, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Add DDP's prefix to the names if another module that contains this one loads its state."""
    names = {f"{prefix}{name}" for name in module.module.state_dict()}
    for name in [name for name in state_dict if name in names]:
        state_dict[f"{prefix}{_PREFIX}{name.removeprefix(prefix)}"] = state_dict.pop(name)


def _find_sparse(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the trainable parameters of embeddings that make sparse gradients."""
    for module in model.modules():
        weight = getattr(module, "weight", None) if getattr(module, "sparse", False) is True else None
        if isinstance(weight, nn.Parameter) and weight.requires_grad:
            yield weight


def _copy_gradient(gradient: torch.Tensor) -> torch.Tensor:
    """Return a copy of a gradient.

    The values of a sparse gradient are the gradient of the embedding's output itself, which DDP divides in place (torch
    2.13): the gradients of other layers that are computed from it later would be divided too.
    """
    return gradient.clone()


_copy_gradient.__torch_unserializable__ = True  # type: ignore[attr-defined]  # torch.save does not warn of it


_LOG = logging.getLogger("accel_runtime.training.gradients")
_reported_types: set[type] = set()
"""Types of which a warning was written."""


def check_hidden_gradients(outputs: Any, consequence: str) -> None:
    """Check that torch finds the tensors that need gradients in the outputs of a forward pass.

    Raises RuntimeError if it finds none of them; warns once for each type if it finds some, as the others may be unused.
    """
    leaves = nested.leaves(outputs)
    hidden = [
        leaf
        for leaf in leaves
        if not (leaf is None or isinstance(leaf, torch.Tensor))
        and any(tensor.requires_grad for tensor in nested.iterate_hidden_tensors(leaf))
    ]
    if not hidden:
        return
    message = (
        f"tensors that need gradients are in an object of {type(hidden[0]).__name__}, which has more than data (a module, other "
        f"state, or a reference to itself), so {consequence}. Return tensors in a dict, list, tuple or dataclass."
    )
    if not any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
        raise RuntimeError(f"Cannot use the outputs of the model: {message}")
    if type(hidden[0]) not in _reported_types:
        _reported_types.add(type(hidden[0]))
        _LOG.warning("In the outputs of a model, %s", message)


def refuse_max_norm(model: nn.Module, replicated: Collection[nn.Parameter]) -> None:
    """Raise ValueError for embeddings that change their weights in the forward pass; `replicated` ones may be frozen.

    The change is lost in the gathered copy of a sharded weight. Each replica changes the rows of its own batches only.
    """
    for path, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or module.max_norm is None:
            continue
        if module.weight.requires_grad or module.weight not in replicated:
            name = script_names(model, [path])[path] or "the model"
            raise ValueError(
                f"Cannot train {name} of {type(model).__name__} on several processes: max_norm changes the rows of its weight that a "
                "forward pass reads, and each process reads other rows. Leave out max_norm, and after each optimizer step write: "
                "with torch.no_grad(): weight.mul_((max_norm / weight.norm(dim=1, keepdim=True)).clamp(max=1))."
            )


def wrap_in_ddp(model: nn.Module, device_ids: list[int] | None, options: dict[str, Any]) -> ReplicatedModel:
    """Wrap a model with at least one trainable parameter in DDP."""
    refuse_max_norm(model, set(model.parameters()))
    sparse = [name for name, buffer in model.named_buffers() if buffer.layout is not torch.strided]
    if sparse and options.get("broadcast_buffers", True):
        raise ValueError(
            f"Buffer {script_names(model, sparse)[sparse[0]]!r} of {type(model).__name__} cannot be broadcast to the other processes: it is sparse. Make it "
            "dense, or pass Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)])."
        )
    ddp_options = {name: value for name, value in options.items() if not name.startswith("comm_")}
    for parameter in _find_sparse(model):
        parameter.register_hook(_copy_gradient)  # type: ignore[no-untyped-call]
    is_searched = ddp_options.get("find_unused_parameters") or ddp_options.get("static_graph")
    kind_of_model = _SearchedModel if is_searched else ReplicatedModel
    prepared = kind_of_model(model, device_ids=device_ids, **ddp_options)
    kind = options.get("comm_hook", DDPCommunicationHookType.NO)
    if kind in _HOOKS:
        state = None
        if kind is DDPCommunicationHookType.POWER_SGD:
            state = powerSGD_hook.PowerSGDState(None, **options.get("comm_state_option", {}))
        hook = _HOOKS[kind]
        if (wrapper := options.get("comm_wrapper")) in _WRAPPERS:
            hook = _WRAPPERS[wrapper](hook)
        # A lambda, since DDP refuses torch's bf16 hooks without NCCL by name; gloo reduces bfloat16 too.
        prepared.register_comm_hook(state, lambda state, bucket: hook(state, bucket))  # noqa: PLW0108
    return prepared


@contextmanager
def sync_in_backward(model: DistributedDataParallel) -> Iterator[None]:
    """Return a context in which the next backward pass averages gradients, even after a forward pass in `no_sync`."""
    before = model.require_backward_grad_sync, model.require_forward_param_sync
    model.require_backward_grad_sync = model.require_forward_param_sync = True
    model.reducer.prepare_for_backward([])
    try:
        yield
    finally:
        model.require_backward_grad_sync, model.require_forward_param_sync = before
