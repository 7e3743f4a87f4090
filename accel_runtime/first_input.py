"""A warning where processes compute the same batch, since nothing divides the data among them."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from accel_runtime import tree
from accel_runtime.backends.base import Backend
from accel_runtime.exchange.callsite import TORCH, call_site

__all__ = ["FirstInput"]

_LOG = logging.getLogger("accel_runtime.data")
_KEY = "accel/first input"
_ELEMENTS = 1 << 16
"""How many elements of a tensor are compared."""


class FirstInput:
    """Compare the first batch that a model in DDP is trained on between the first two ranks, unless a loader divides the data.

    Rank 1 leaves a fingerprint in the store at its first forward pass, and rank 0 looks for it at its second: by then DDP has
    waited for rank 1, and no rank waits in between.

    Args:
        backend: Carries the fingerprint.
        divides_data: Returns whether a loader is prepared.
    """

    def __init__(self, backend: Backend, divides_data: Callable[[], bool]) -> None:
        self._backend = backend
        self._divides_data = divides_data
        self._own: tuple[str, str, str] | None = None
        self._handle: RemovableHandle | None = None

    def watch(self, model: nn.Module) -> None:
        """Look at the forward passes of a model in DDP until its input is compared."""
        if self._backend.topology.rank in {0, 1}:
            self._handle = model.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, model: Any, args: Any, kwargs: Any) -> None:
        """Look at a forward pass."""
        # The compiler of a script that compiles what `prepare` returned cannot follow what is done here.
        if torch.compiler.is_compiling() or not (
            torch.is_grad_enabled() and model.require_backward_grad_sync
        ):
            return
        if self._own is not None:
            self._compare(*self._own)
        elif not self._divides_data() and (fingerprint := _fingerprint((args, kwargs))):
            key = f"{_KEY}/{self._backend.turn(_KEY)}"
            if self._backend.topology.rank == 0:
                self._own = (key, fingerprint, str(call_site(TORCH)))
                return
            self._backend.post(key, fingerprint)
        if self._handle is not None:
            self._handle.remove()

    def _compare(self, key: str, fingerprint: str, site: str) -> None:
        if self._backend.posted(key) != fingerprint:
            return
        _LOG.warning(
            "Ranks 0 and 1 train on the same batch, at %s: no DataLoader is prepared, and the inputs of the model are equal. Give "
            "the DataLoader to prepare(), or let each process take data of its own, by accelerator.process_index, "
            "split_between_processes() or a generator with another seed on each process.",
            site,
        )

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        # A copy of the model belongs to no run.
        return _no_hook, ()


def _fingerprint(data: Any) -> str:
    """Return a checksum of the tensors of a batch; nothing if there are none."""
    tensors = [
        leaf for leaf in tree.leaves(data) if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
    ]
    checksum = 0
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, -(-len(flat) // _ELEMENTS))].cpu().contiguous()
        checksum = zlib.crc32(sample.view(torch.uint8).numpy().tobytes(), checksum)
    return f"{[list(tensor.shape) for tensor in tensors]} {checksum}" if tensors else ""


def _no_hook() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_: Any) -> None:
    return None
