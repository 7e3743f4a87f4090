"""Checks of what sharded parameters do not support: before the first step, with the way out, instead of wrong weights.

A forward pass sees gathered copies of the parameters, which are freed after it. In-place changes of them are lost, and a graph
through them cannot be used again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from accel_runtime.foundation import nested
from accel_runtime.foundation.module_names import script_names
from accel_runtime.foundation.torch_internals import (
    gathered_parameters,
    is_functorch_active,
    list_owners,
    local_tensor,
    override_method,
    share_gradient_hooks,
    storage_id,
    version_of,
    without_compilation,
)
from accel_runtime.parallel.averaging import refuse_max_norm
from accel_runtime.parallel.dtensor import class_of
from accel_runtime.parallel.replicated import check_hidden_gradients
from accel_runtime.storage.errors import format_names

__all__ = [
    "ForwardChecks",
    "check_modules",
    "find_unshardable",
    "name_owners",
    "refuse_copies",
    "unpack_outputs",
]


def find_unshardable(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that `fully_shard` cannot divide: scalars, and those without elements."""
    return {parameter for parameter in model.parameters() if not parameter.dim() or not parameter.numel()}


def check_modules(model: nn.Module, ignored: Collection[nn.Parameter]) -> None:
    """Check the modules of a model before it is sharded, and make its parameters contiguous.

    Raises ValueError for embeddings that change their weights in the forward pass, or have sparse gradients.
    """
    refuse_max_norm(model, ignored)
    for parameter in set(model.parameters()) - set(ignored):
        # fully_shard refuses other layouts, such as channels_last. Tensor parallelism has made its own contiguous.
        if not hasattr(parameter, "device_mesh"):
            parameter.data = parameter.data.contiguous()
    names = script_names(model, [name for name, _ in model.named_modules()])
    for path, module in model.named_modules():
        if (
            isinstance(module, (nn.Embedding, nn.EmbeddingBag))
            and module.sparse
            and module.weight.requires_grad
        ):
            raise ValueError(
                f"Cannot shard {names[path] or 'the model'} of {type(model).__name__}: torch cannot reduce sparse gradients of "
                "sharded models. Set sparse=False."
            )


_UNCHANGED = (
    "Compute the changed weight in the forward pass without storing it, or change the parameter after the optimizer step: "
    "with torch.no_grad(): parameter.clamp_(-1, 1). Parameters in fully_shard.ignore are not gathered."
)


class ForwardChecks:
    """Hooks of a module around those of `fully_shard`, which run while its parameters are gathered.

    `check_parameters` must run before the hook that gathers, `before` after it, and `pack` before the one that frees.
    """

    def __init__(self, names: Mapping[tuple[nn.Module, str], str]) -> None:
        self._names = names
        """Names of parameters in the script, by module and attribute."""
        self._versions: list[int | None] = []
        self._samples: list[torch.Tensor] = []
        self._is_first = True

    @without_compilation
    def check_parameters(self, module: nn.Module, _: Any) -> None:
        """Raise RuntimeError if parameters were replaced, since the forward pass would gather the old ones."""
        if replaced := list_owners(module, replaced=True):
            names = [self._names.get(owner, owner[1]) for owner in replaced]
            raise RuntimeError(
                f"Cannot run the forward pass: {format_names(names)} were replaced after prepare(), by torch.func.functional_call() or an "
                "assignment, and fully_shard would use the parameters before. Call it inside of accelerator.gathered(model), with "
                "parameters of there, or change values in place: with torch.no_grad(): parameter.copy_(value)."
            )

    @without_compilation
    def before(self, module: nn.Module, _: Any) -> None:
        """Record the gathered parameters."""
        if is_functorch_active():
            return
        parameters = gathered_parameters(module)
        self._versions = [_read_version(parameter) for parameter in parameters]
        # `parameter.data` has a version of its own, so that some values are compared too, once.
        self._samples = [_take_sample(parameter) for parameter in parameters] if self._is_first else []

    @without_compilation
    def pack(self, module: nn.Module, _args: Any, outputs: Any) -> Any:
        """Check the forward pass, and return its outputs so that torch finds the tensors in them."""
        if is_functorch_active():
            return nested.pack_tensors(outputs)
        self._check_unchanged(module)
        outputs = _copy_parameters(module, outputs)
        if torch.is_grad_enabled():
            check_hidden_gradients(outputs, "parameters are not gathered for their backward pass")
            for leaf in nested.leaves(outputs):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(partial(_begin_backward, module))  # type: ignore[no-untyped-call]
        return nested.pack_tensors(outputs)

    def _check_unchanged(self, module: nn.Module) -> None:
        parameters = gathered_parameters(module)
        versions = [_read_version(parameter) for parameter in parameters]
        changed = [index for index, version in enumerate(versions) if version != self._versions[index]]
        if not changed:
            changed = [
                index
                for index, sample in enumerate(self._samples)
                if not torch.equal(sample, _take_sample(parameters[index]))
            ]
        self._is_first = self._is_first and not torch.is_grad_enabled()
        self._samples = []
        if changed:
            owners = list_owners(module)
            names = [self._names.get(owners[index], owners[index][1]) for index in changed]
            raise RuntimeError(
                f"The forward pass changes {format_names(names)}, which is lost: fully_shard gathers a copy of each parameter for a "
                f"forward pass and frees it afterwards. {_UNCHANGED}"
            )


_SAMPLE = 4096
"""Number of elements of a parameter that are compared."""


def _take_sample(parameter: torch.Tensor) -> torch.Tensor:
    """Return the bytes of some elements, since nan is not equal to nan."""
    flat = local_tensor(parameter).detach().flatten()
    return flat[:: max(1, len(flat) // _SAMPLE)].clone().view(torch.uint8)


def _read_version(tensor: torch.Tensor) -> int | None:
    is_inference = tensor.is_inference() or local_tensor(tensor).is_inference()
    return None if is_inference else version_of(tensor)


def _begin_backward(module: nn.Module, _: torch.Tensor) -> None:
    """Run hooks of the script in the backward pass of a module, which begins; raise RuntimeError if it builds a graph."""
    # Here and not in the forward pass, since a script may register a hook between both.
    share_gradient_hooks(module)
    # Gradients are enabled in a backward pass with create_graph=True.
    if torch.is_grad_enabled():
        raise RuntimeError(
            "Cannot build a graph of the gradients of a sharded model (create_graph=True): parameters are gathered for one backward "
            "pass and freed afterwards, so second derivatives would lack them. Compute them in the forward pass of the prepared model "
            "with fully_shard.wrap: none, or train without sharding (remove dp_shard)."
        )


def _copy_parameters(module: nn.Module, outputs: Any) -> Any:
    """Return outputs with copies of the module's parameters in them, whose memory torch frees after the forward pass."""
    storages = {storage_id(parameter) for parameter in gathered_parameters(module)}

    def is_parameter(tensor: torch.Tensor) -> bool:
        return local_tensor(tensor).layout is torch.strided and storage_id(tensor) in storages

    def copy(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.clone() if is_parameter(leaf) else leaf
        if leaf is not None and any(map(is_parameter, nested.iterate_hidden_tensors(leaf))):
            raise RuntimeError(
                f"Cannot use the outputs of the model: a parameter is in an object of {type(leaf).__name__}, which has more than "
                "data (a module, other state, or a reference to itself), and its memory is freed after the forward pass. Return a "
                "copy of the parameter (clone())."
            )
        return leaf

    return nested.map_leaves(copy, outputs)


@without_compilation
def unpack_outputs(_module: nn.Module, _args: Any, outputs: Any) -> Any:
    """Return the outputs of the forward pass as they were before `ForwardChecks.pack`."""
    return nested.unpack_tensors(outputs)


def name_owners(model: nn.Module) -> dict[tuple[nn.Module, str], str]:
    """Return the names of parameters in the script, by module and attribute."""
    owners = {
        f"{path}.{name}" if path else name: (module, name)
        for path, module in model.named_modules()
        for name in dict(module.named_parameters(recurse=False))
    }
    return {owners[name]: own for name, own in script_names(model, owners).items()}


def refuse_copies(module: nn.Module) -> None:
    """Make `copy.deepcopy` of a sharded module raise an error that names the way out."""
    override_method(module, "__deepcopy__", _refuse_copy)


def _refuse_copy(module: nn.Module, _: Any) -> Any:
    raise RuntimeError(
        f"Cannot copy {class_of(module)}: it is sharded. Copy it before prepare(), and prepare both. An average of weights: "
        "average = AveragedModel(model); model, average = accelerator.prepare(model, average); average.update_parameters(model)."
    )
