"""Several processes over `torch.distributed`: gloo, nccl, or what the device's vendor brings."""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import get_worker_info
from typing_extensions import override

from accel_runtime.backends import buckets
from accel_runtime.backends.attendance import Absence, attendance_of
from accel_runtime.backends.base import Reduction
from accel_runtime.backends.ddp import replicated, synced
from accel_runtime.backends.detached import build_refusal
from accel_runtime.backends.settling import forks_wait, wait_for_threads
from accel_runtime.backends.status import explained
from accel_runtime.backends.wire import control_group, side_wire, wire_of
from accel_runtime.backends.words import OPERATIONS, InStore
from accel_runtime.env import Settings
from accel_runtime.exchange.agreement import Agreement
from accel_runtime.exchange.objects import share_objects
from accel_runtime.heartbeat import heartbeat
from accel_runtime.kinds import DistributedType
from accel_runtime.topology import Topology

__all__ = ["Distributed"]


_KINDS = {"cuda": DistributedType.MULTI_GPU, "xla": DistributedType.XLA}

_GRACE_S, _PATIENCE_S = 0.05, 0.5
_SMDDP = "smddp"
_SMDDP_MODULE = "smdistributed.dataparallel.torch.torch_smddp"

# torch has one default process group in a process, so who uses the one we made is known to the process too:
# without it, the first of two Accelerators to end would take the group from the other.
_USERS: WeakSet[Distributed] = WeakSet()


class Distributed(InStore):
    """The backend of a process that a launcher started beside others.

    Args:
        topology: Where this process stands.
        device: What it computes on.
        settings: Name and timeout of the process group.
        options: Arguments for `init_process_group`; they win over `settings`.

    A process group the script has made itself is used as it is, and left alone at the end. What lies on the CPU
    travels on a group of our own in any case, so that it never meets a collective of DDP or of the script.
    """

    def __init__(
        self, topology: Topology, device: torch.device, settings: Settings, options: dict[str, Any]
    ) -> None:
        timeout = timedelta(seconds=settings.process_group_timeout)
        wanted: dict[str, Any] = {"backend": _name(settings, device), "timeout": timeout} | options
        if not topology.launched:
            # A process by itself, which divides a model as many do.
            wanted |= {"store": HashStore(), "rank": 0, "world_size": 1}
        if not dist.is_initialized():
            _check_is_rank(topology)
            if wanted["backend"] == _SMDDP:
                _register_smddp(device)
            dist.init_process_group(**wanted)
            atexit.register(_leave)
            _USERS.clear()
            _USERS.add(self)
        elif _USERS:
            _USERS.add(self)
        forks_wait()
        patience = wanted["timeout"] or timeout
        self._control = control_group(dist.group.WORLD, patience)
        self._one_machine = topology.local_world_size == topology.world_size
        super().__init__(topology, device, wire_of(self._control, patience, one_machine=self._one_machine))
        self._device_ids = [device.index] if device.index is not None else None
        self._progress = heartbeat()
        self._attendance = attendance_of(
            dist.group.WORLD, self._store, topology.rank, topology.world_size, patience
        )

    @override
    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        self._count()
        everyone = tensor.new_empty((self.topology.world_size, *tensor.shape))
        dist.all_gather(list(everyone.unbind()), tensor.contiguous(), group=self._group(tensor))
        return everyone

    @override
    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction) -> torch.Tensor:
        self._count()
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, op=OPERATIONS[reduction], group=self._group(tensor))
        return total / self.topology.world_size if reduction == "mean" else total

    @override
    def begin_sum(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        self._count()
        work = dist.all_reduce(tensor, async_op=True)

        def arrived() -> torch.Tensor:
            work.wait()
            return tensor

        return arrived

    @override
    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        self._count()
        dist.broadcast(tensor, src=source, group=self._group(tensor))
        return tensor

    @override
    def apart(self) -> Callable[[Any], list[Any]]:
        wire = side_wire(dist.group.WORLD, one_machine=self._one_machine)
        agreement = Agreement(wire, self.topology.rank, self.topology.world_size)
        return lambda item: share_objects("background exchange", item, agreement)

    @override
    def barrier(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        super().barrier()

    @override
    def wait_for_ranks(self, operation: str) -> Absence | None:
        if self._attendance is None:
            return None
        try:
            return self._attendance.wait(operation)
        except dist.DistError:  # the store is gone: the collective that follows tells which rank is lost
            return None

    @override
    def finish_without(self, absence: Absence, outcome: str) -> None:
        assert self._attendance is not None
        with suppress(dist.DistError):
            self._attendance.finish(absence, outcome)

    @override
    def outcome_without(self, absence: Absence) -> str:
        assert self._attendance is not None
        return self._attendance.outcome(absence)

    @override
    def explain(self, error: RuntimeError, operation: str) -> RuntimeError:
        return error if self._attendance is None else explained(error, operation, self._attendance.service)

    def _count(self) -> None:
        """Count a collective, for ranks that wait for this one elsewhere."""
        if self._progress is not None:
            self._progress.collective()

    def _group(self, tensor: torch.Tensor) -> dist.ProcessGroup | None:
        return self._control if tensor.device.type == "cpu" else None

    @property
    @override
    def kind(self) -> DistributedType:
        return _KINDS.get(self.device.type) or DistributedType(f"MULTI_{self.device.type.upper()}")

    @property
    @override
    def name(self) -> str | None:
        # "cpu:gloo,cuda:nccl": one carrier a device.
        carriers = dict(part.split(":") for part in dist.get_backend_config().split(","))
        return carriers.get(self.device.type)

    @property
    @override
    def _store(self) -> Any:
        # Through which the ranks of the default group met; nothing public names it (torch 2.13).
        return dist.distributed_c10d._get_default_store()  # noqa: SLF001

    @override
    def replicate(self, model: nn.Module, options: dict[str, Any]) -> nn.Module:
        # DDP refuses a model that learns nothing, and one that learns nothing needs no averaging.
        learns = any(parameter.requires_grad for parameter in model.parameters())
        if isinstance(model, DistributedDataParallel) or not learns:
            return model
        prepared = replicated(model, self._device_ids, options)
        prepared.explain = self.explain
        return prepared

    @override
    def original(self, model: nn.Module) -> nn.Module:
        return model.module if isinstance(model, DistributedDataParallel) else model

    @override
    def wrapping(self, model: nn.Module) -> str:
        return "none" if self.original(model) is model else DistributedDataParallel.__name__

    @override
    def joined(self, models: list[Any]) -> AbstractContextManager[Any]:
        return Join(models)

    @override
    def replica(self, model: nn.Module) -> dict[str, Any]:
        return buckets.captured(model) if isinstance(model, DistributedDataParallel) else {}

    @override
    def restore_replica(self, model: nn.Module, state: dict[str, Any]) -> None:
        if state and isinstance(model, DistributedDataParallel):
            buckets.restored(model, state)

    @override
    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()

    @override
    def leave(self) -> None:
        if self in _USERS:
            _USERS.remove(self)
            if not _USERS:
                _leave()

    @override
    def sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        return synced(model) if isinstance(model, DistributedDataParallel) else nullcontext()


def _check_is_rank(topology: Topology) -> None:
    """Raise if this process is a spawned child that has the variables of its rank, and would wait for the others for ever.

    Raises:
        RuntimeError: It runs the script again to import it, or is a worker of a DataLoader.
    """
    if not topology.launched:
        return
    # multiprocessing refuses to start processes by this attribute too (Python 3.11).
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            f"Cannot connect to the other processes: this one was spawned by rank {topology.rank}, such as a worker of a "
            "DataLoader, and imports the script, which makes an Accelerator or a PartialState outside of functions. Guard "
            "the script with if __name__ == '__main__': main()."
        )
    if get_worker_info() is not None:
        raise build_refusal(f"this process was spawned by rank {topology.rank}")


def _name(settings: Settings, device: torch.device) -> str:
    """The group's backend; tensors on the CPU go over gloo whatever the device."""
    name: str = settings.process_group_backend
    if name == "auto":
        name = dist.get_default_backend_for_device(device)
    # SageMaker's library is asked for alone, as its documentation has it.
    return name if device.index is None or name in {"gloo", _SMDDP} else f"cpu:gloo,{device.type}:{name}"


def _register_smddp(device: torch.device) -> None:
    """Have torch know SageMaker's library, which registers itself.

    Raises:
        RuntimeError: It is not there, or the device is none of its own.
    """
    if device.type != "cuda":
        raise RuntimeError(
            f"process_group_backend smddp is for NVIDIA GPUs, and the device is {device.type}: set it to auto"
        )
    try:
        importlib.import_module(_SMDDP_MODULE)
    except ImportError as error:
        raise RuntimeError(
            f"process_group_backend smddp needs {_SMDDP_MODULE}, which cannot be imported here ({error}). Images of "
            "SageMaker bring it for some releases of PyTorch, and it runs on ml.p4d.24xlarge and ml.p4de.24xlarge: choose "
            "such an image (launcher.image_uri), or set process_group_backend to auto, which is nccl."
        ) from error


def _leave() -> None:
    # gloo's own threads drop the last collective's tensors a moment after it returned, and need the
    # interpreter's lock for it. If they ask for it while the interpreter shuts down, the process aborts
    # ("terminate called without an active exception"): docs/design/leaving-gloo.md has the numbers.
    wait_for_threads(_GRACE_S, _PATIENCE_S)
    attendance_of.cache_clear()
    control_group.cache_clear()
    side_wire.cache_clear()
    wire_of.cache_clear()
    if dist.is_initialized():
        dist.destroy_process_group()
