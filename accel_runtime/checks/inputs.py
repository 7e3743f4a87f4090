"""Check that the first two processes do not train on the same batch."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from accel_runtime.backends.base import Backend
from accel_runtime.foundation import nested
from accel_runtime.foundation.torch_internals import TORCH
from accel_runtime.observe.call_sites import call_site

__all__ = ["FirstInput"]

_LOG = logging.getLogger("accel_runtime.checks.inputs")
_KEY = "accel/first input"
_MAX_ELEMENTS = 1 << 16
"""Maximum number of elements of a tensor that are compared."""


class FirstInput:
    """Compare the first training batch of a model in DDP between the first two ranks, unless a loader in use shards the data.

    Rank 1 stores a fingerprint at its first forward pass, and rank 0 reads it at its second: by then DDP has
    synchronized with rank 1, and no rank has to wait.
    """

    def __init__(self, backend: Backend, divides_data: Callable[[], bool]) -> None:
        self._backend = backend
        self._divides_data = divides_data
        self._recorded: tuple[str, str, str] | None = None
        self._handle: RemovableHandle | None = None

    def watch(self, model: nn.Module) -> None:
        """Check the forward passes of a model in DDP until its input is compared."""
        self.stop()
        if self._backend.topology.rank in {0, 1}:
            self._handle = model.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, model: Any, args: Any, kwargs: Any) -> None:
        """Record or compare the input of a forward pass."""
        # torch.compile cannot trace this hook.
        if torch.compiler.is_compiling() or not (
            torch.is_grad_enabled() and model.require_backward_grad_sync
        ):
            return
        if self._recorded is not None:
            if not self._divides_data():  # the first pass may have been a trial before the loop
                self._compare(*self._recorded)
        elif not self._divides_data() and (fingerprint := _fingerprint((args, kwargs))):
            key = f"{_KEY}/{self._backend.increment_store_key(_KEY)}"
            if self._backend.topology.rank == 0:
                self._recorded = (key, fingerprint, str(call_site(TORCH)))
                return
            self._backend.set_store_key(key, fingerprint)
        self.stop()

    def stop(self) -> None:
        """Remove the hook."""
        self._recorded = None
        if self._handle is not None:
            self._handle.remove()

    def _compare(self, key: str, fingerprint: str, site: str) -> None:
        if self._backend.get_store_key(key) != fingerprint:
            return
        _LOG.warning(
            "Ranks 0 and 1 train on the same batch, at %s: no prepared DataLoader is in use, and the inputs of the model are equal. "
            "Give the DataLoader to prepare() and use the one that it returns, or let each process take data of its own, by accelerator.process_index, "
            "split_between_processes() or a generator with another seed on each process.",
            site,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the model belongs to no run.
        return partial, (_do_nothing,)


def _fingerprint(data: Any) -> str:
    """Return a checksum of the tensors of a batch; empty without tensors."""
    tensors = [
        leaf
        for leaf in nested.leaves(data)
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
    ]
    checksum = 0
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, -(-len(flat) // _MAX_ELEMENTS))].cpu().contiguous()
        checksum = zlib.crc32(sample.view(torch.uint8).numpy().tobytes(), checksum)
    return f"{[list(tensor.shape) for tensor in tensors]} {checksum}" if tensors else ""


def _do_nothing(*_: Any) -> None:
    return None
