"""The host side of XLA replicas: checks, gloo group, prefetching, and warnings about recompilation; without torch_xla."""

from __future__ import annotations

import logging
import queue
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from types import BuiltinFunctionType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from accel_runtime.backends.distributed import REDUCE_OPS
from accel_runtime.collectives.handshake import Handshake, ObjectGroup
from accel_runtime.collectives.transport import Transport, connect_transport
from accel_runtime.environment.settings import MixedPrecision, Settings
from accel_runtime.environment.topology import Topology
from accel_runtime.extensions.xla import ROUNDING
from accel_runtime.foundation import nested
from accel_runtime.foundation.nested import is_strided_tensor
from accel_runtime.foundation.options import DDPCommunicationHookType
from accel_runtime.foundation.torch_internals import TORCH, PrefixStore, TCPStore
from accel_runtime.observe.call_sites import CallSite, call_site

__all__ = [
    "CompileCounts",
    "DevicePrefetcher",
    "HostGroup",
    "RecompilationMonitor",
    "build_step_hook",
    "check_cpu_world",
    "check_ddp_options",
    "check_environment",
    "check_format",
    "check_spmd",
    "check_world",
    "read_timeout",
]


def read_timeout(settings: Settings, options: dict[str, Any]) -> timedelta:
    """Return the timeout of replicas; raise ValueError for other options of a process group."""
    if settings.process_group_backend not in {"auto", "gloo"}:
        raise ValueError(
            f"process_group_backend {settings.process_group_backend} needs CUDA, but the device is xla. Set it to auto."
        )
    for name in ("backend", "init_method"):
        if options.get(name) not in {None, "xla", "xla://"}:
            raise ValueError(
                f"{name}={options[name]!r} is not supported on XLA devices: torch_xla connects its replicas without a process "
                "group. Remove it from InitProcessGroupKwargs."
            )
    return options.get("timeout") or timedelta(seconds=settings.process_group_timeout)


def check_format(mixed_precision: MixedPrecision) -> None:
    """Raise ValueError for fp16, which needs a loss scaler."""
    if mixed_precision == "fp16":
        raise ValueError(
            "mixed_precision fp16 is not supported on XLA devices: torch_xla has no loss scaler. Use bf16."
        )


def check_environment(environ: Mapping[str, str]) -> None:
    """Raise ValueError if a variable makes torch_xla compute in bfloat16 whatever the script says."""
    for name in ROUNDING:
        if environ.get(name, "0") not in {"", "0"}:
            raise ValueError(
                f"{name}={environ[name]} silently turns every float32 into bfloat16, also in the optimizer. Unset it, and use "
                "mixed_precision: bf16."
            )


def check_ddp_options(ddp_options: Mapping[str, Any]) -> None:
    """Raise ValueError for a communication hook; other fields of `DistributedDataParallelKwargs` change no result."""
    hook = ddp_options.get("comm_hook", DDPCommunicationHookType.NO)
    if hook is not DDPCommunicationHookType.NO:
        raise ValueError(
            f"comm_hook={hook.value!r} is not supported on XLA devices: gradients are averaged in the compiled program and not "
            "by DDP. Remove comm_hook from DistributedDataParallelKwargs."
        )


def check_world(topology: Topology, num_replicas: int) -> None:
    """Raise RuntimeError if the environment and torch_xla have different numbers of replicas."""
    if topology.world_size not in {1, num_replicas}:
        raise RuntimeError(
            f"WORLD_SIZE={topology.world_size}, but torch_xla finds {num_replicas} replica(s), so every process would be rank 0. "
            "Start the script with accel launch and launcher.kind: xla."
        )


def check_cpu_world(device_type: str, world_size: int, step_marker: object) -> None:
    """Raise RuntimeError for several replicas on the CPU device, which would crash at their first collective.

    Args:
        device_type: The device type of torch_xla.
        world_size: The number of replicas.
        step_marker: torch_xla's function that executes graphs; tests with collectives replace it.
    """
    if device_type == "CPU" and world_size > 1 and isinstance(step_marker, BuiltinFunctionType):
        raise RuntimeError(
            f"torch_xla's CPU device has no collectives between its {world_size} replicas (CPU_NUM_DEVICES): the first one would "
            "end the process after ten seconds (pytorch/xla issue 5005). Use one replica, or launcher.spmd: true for all "
            "devices."
        )


def check_spmd(enabled: bool) -> None:
    """Raise RuntimeError if SPMD is enabled without `launcher.spmd`."""
    if enabled:
        raise RuntimeError(
            "SPMD is enabled in torch_xla (by XLA_USE_SPMD=1 or use_spmd()), but not in accel. Set launcher.spmd: true "
            "(ACCEL_SPMD=1), or disable it in torch_xla."
        )


_DAY = timedelta(days=1)


class HostGroup:
    """The host side of one replica: a store, and a gloo group that torch.distributed does not know.

    `torch.distributed` has one default group per process, and replicas may be threads of a process.

    Args:
        topology: Rank and world size of this replica.
        broadcast_text: Broadcasts the text of the first replica over the device, to find the store.
        address: The address of the first replica.
        timeout: How long to wait for other replicas.
    """

    def __init__(
        self, topology: Topology, broadcast_text: Callable[[str], str], address: str, timeout: timedelta
    ) -> None:
        self._topology, self._timeout = topology, timeout
        self._server = None
        if topology.rank == 0:
            self._server = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        host, _, port = broadcast_text(f"{address}:{self._server.port}" if self._server else "").rpartition(
            ":"
        )
        self.store = TCPStore(host, int(port), is_master=False, timeout=timeout)
        """The store of all replicas."""
        self._group = self._new_group("control")
        self._one_machine = topology.local_world_size == topology.world_size
        self.transport: Transport = self._connect(self._group, "transport", timeout)
        """Moves bytes between the replicas."""
        self._num_channels = 0

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Stack the CPU tensors of all replicas."""
        gathered = tensor.new_empty((self._topology.world_size, *tensor.shape))
        self._group.allgather([list(gathered.unbind())], [tensor.contiguous()]).wait()
        return gathered

    def all_reduce(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        """Reduce CPU tensors over the replicas in place."""
        self._group.allreduce([tensor], REDUCE_OPS[reduction]).wait()
        return tensor.div_(self._topology.world_size) if reduction == "mean" else tensor

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Copy the CPU tensor of one replica into those of the others."""
        self._group.broadcast(tensor, source).wait()
        return tensor

    def open_object_channel(self) -> ObjectGroup:
        """Connect the replicas for another thread; see `Backend.open_object_channel`."""
        self._num_channels += 1
        name = f"channel {self._num_channels}"
        transport = self._connect(self._new_group(name, _DAY), f"transport of {name}", _DAY)
        handshake = Handshake(transport, self._topology.rank, self._topology.world_size, is_counted=False)
        return ObjectGroup(name, handshake)

    def _connect(self, group: Any, name: str, timeout: timedelta) -> Transport:
        return connect_transport(group, self._prefix_store(name), timeout, one_machine=self._one_machine)

    def _new_group(self, name: str, timeout: timedelta | None = None) -> Any:
        rank, size = self._topology.rank, self._topology.world_size
        return dist.ProcessGroupGloo(self._prefix_store(name), rank, size, timeout or self._timeout)

    def _prefix_store(self, name: str) -> Any:
        return PrefixStore(name, self.store)


class DevicePrefetcher:
    """Copy batches to a device through torch_xla's parallel loader."""

    def __init__(self, build_loader: Callable[[Any], Any], device: torch.device) -> None:
        self._queue: queue.SimpleQueue[list[torch.Tensor] | None] = queue.SimpleQueue()
        self._loader = build_loader(self)
        self._arrivals = self._loader.per_device_loader(device)

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        """Yield the tensors for the loader until the prefetcher is closed."""
        return iter(self._queue.get, None)

    def put(self, batch: Any) -> None:
        """Start to copy the tensors of a batch."""
        self._queue.put([leaf for leaf in nested.leaves(batch) if is_strided_tensor(leaf)])

    def take(self, batch: Any) -> Any:
        """Return the oldest batch on the device; pending computations are executed first."""
        tensors = next(self._arrivals, None)
        if tensors is None:
            raise RuntimeError(
                "A batch did not arrive on the device: torch_xla's parallel loader reported no reason."
            )
        on_device = iter(tensors)
        return nested.map_tensors(lambda leaf: next(on_device) if is_strided_tensor(leaf) else leaf, batch)

    def close(self) -> None:
        """Stop copying."""
        self._queue.put(None)
        self._loader.close()


def build_step_hook(num_batches: Callable[[], int], execute: Callable[[], object]) -> Callable[[], None]:
    """Return a function for an optimizer to call after each step, which limits the size of the recorded graph.

    Prepared loaders execute the graph; the hook does it for steps without a new batch.
    """
    last_count = -1

    def after_step() -> None:
        nonlocal last_count
        count = num_batches()
        if count in {0, last_count}:
            execute()
        last_count = count

    return after_step


_LOG = logging.getLogger("accel_runtime.xla")
_STEPS = 10
"""The number of steps that are evaluated together."""
_MIN_STEPS = 8
"""The number of them with a recompilation or a transfer from which on to warn."""
_FETCHING_FUNCTIONS = frozenset(
    (
        "item",
        "cpu",
        "numpy",
        "tolist",
        "to",
        "__bool__",
        "__float__",
        "__int__",
        "__index__",
        "__format__",
        "__repr__",
    )
)


class CompileCounts(NamedTuple):
    """Counters of torch_xla."""

    compiled: int
    """The number of compiled graphs."""
    fetched: int
    """The number of transfers of values to the host."""


class _StepCounts(NamedTuple):
    compiled: int
    fetched: int
    shapes: tuple[tuple[int, ...], ...]
    """The shapes of the batch."""


class RecompilationMonitor:
    """Warn once about loops that compile a graph or fetch a value at every step."""

    def __init__(self, counts: Callable[[], CompileCounts], device: torch.device) -> None:
        self._counts, self._device = counts, device
        self._steps: deque[_StepCounts] = deque(maxlen=_STEPS)
        self._last_counts: CompileCounts | None = None
        self._shapes: tuple[tuple[int, ...], ...] = ()
        self._recorder: _FetchRecorder | None = None
        self._reported: set[str] = set()

    def begin(self) -> None:
        """Start a loop; earlier counts belong to no step."""
        self._last_counts = None

    def start_step(self, batch: Any) -> None:
        """Start a step with its batch, after the graph of the previous one was executed."""
        self._stop_recording()
        if len(self._reported) == len(CompileCounts._fields):
            return
        counts = self._counts()
        if self._last_counts is not None:
            difference = (
                counts.compiled - self._last_counts.compiled,
                counts.fetched - self._last_counts.fetched,
            )
            self._steps.append(_StepCounts(*difference, self._shapes))
            self._evaluate()
        self._last_counts = counts
        self._shapes = tuple(
            tuple(leaf.shape) for leaf in nested.leaves(batch) if isinstance(leaf, torch.Tensor)
        )

    def end(self) -> None:
        """End a loop."""
        self._stop_recording()

    def _evaluate(self) -> None:
        if len(self._steps) < _STEPS:
            return
        if self._is_frequent("compiled"):
            self._reported.add("compiled")
            self._warn_about_compiling()
        if self._is_frequent("fetched"):
            # Record the calls of the next step, since the counters have no lines.
            self._recorder = _FetchRecorder(self._device)
            self._recorder.__enter__()  # type: ignore[no-untyped-call]

    def _is_frequent(self, counter: str) -> bool:
        return (
            counter not in self._reported
            and sum(getattr(step, counter) > 0 for step in self._steps) >= _MIN_STEPS
        )

    def _warn_about_compiling(self) -> None:
        graphs = sum(step.compiled for step in self._steps)
        shapes = list(dict.fromkeys(step.shapes for step in self._steps))
        if len(shapes) > 1:
            examples = ", then ".join(", ".join(str(list(shape)) for shape in batch) for batch in shapes[:2])
            advice = f"the shapes of the batches change ({examples}). Pad them to a few lengths"
        else:
            advice = (
                "the batches have one shape, so a size, an index or a slice in the loop changes. Keep sizes the same, and "
                "store numbers that change in a tensor on the device"
            )
        _LOG.warning(
            "%s: the last %d steps compiled %d graphs, which takes longer than running them: %s.",
            call_site(),
            _STEPS,
            graphs,
            advice,
        )

    def _stop_recording(self) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        for site, call in list(recorder.calls.items())[:1]:
            self._reported.add("fetched")
            _LOG.warning(
                "%s: %s fetches a value from the device at every step, and waits for all computation before it. Sum values on "
                "the device (total += loss.detach()), and fetch the sum every few steps.",
                site,
                call,
            )


class _FetchRecorder(TorchFunctionMode):
    """Record the lines that fetch values."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._type = device.type
        self.calls: dict[CallSite, str] = {}

    @override
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        if name in _FETCHING_FUNCTIONS and self._is_on_device(args[0]) and not self._is_on_device(result):
            self.calls.setdefault(call_site(TORCH), f"{name}()")
        return result

    def _is_on_device(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.device.type == self._type
