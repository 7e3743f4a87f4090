"""Execution on XLA devices: operations are recorded, and executed when the graph is cut."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from typing_extensions import override

from accel_runtime.backends.batch_copies import prefetch_batches
from accel_runtime.backends.device_runtime import DeviceRuntime
from accel_runtime.extensions.xla.host import (
    CompileCounts,
    DevicePrefetcher,
    RecompilationMonitor,
    build_step_hook,
)
from accel_runtime.extensions.xla.library import ParallelLoader, met, torch_xla, xm, xr
from accel_runtime.extensions.xla.spmd import DeviceSharding
from accel_runtime.foundation import nested
from accel_runtime.foundation.epoch_progress import EpochProgress

__all__ = ["LazyRuntime", "SPMDRuntime", "execute_graph", "seed_generator"]

_VARIABLE_PREFIXES = ("PJRT_", "XLA_", "TPU_", "LIBTPU_", "CPU_NUM_DEVICES")
"""Prefixes of environment variables that torch_xla and its devices read."""


def seed_generator(seed: int) -> None:
    """Seed the generator of this replica's device."""
    xm.set_rng_state(seed)


class _DeviceRandom:
    """The random state of a device with the functions of torch's device modules; the state is a seed."""

    manual_seed = staticmethod(seed_generator)

    @staticmethod
    def get_rng_state(_device: torch.device) -> torch.Tensor:
        """Return the seed as eight bytes."""
        return torch.frombuffer(bytearray(xm.get_rng_state().to_bytes(8, "little")), dtype=torch.uint8)

    @staticmethod
    def set_rng_state(state: torch.Tensor, _device: torch.device) -> None:
        """Set the seed from eight bytes."""
        seed_generator(int.from_bytes(bytes(state.tolist()), "little"))


class LazyRuntime(DeviceRuntime):
    """Execution on one XLA device of a replica.

    Args:
        device: The device of this replica.
        is_first: True for the first replica, which monitors recompilation for all.
    """

    static_shapes = True

    def __init__(self, device: torch.device, *, is_first: bool = True) -> None:
        super().__init__(device)
        self._is_first = is_first
        self._num_batches = 0

    @override
    def build_step_hook(self) -> Callable[[], None]:
        return build_step_hook(lambda: self._num_batches, execute_graph)

    @property
    @override
    def copy_stream(self) -> None:
        return None  # torch_xla's loader copies

    @property
    @override
    def rng(self) -> Any:
        return _DeviceRandom

    @override
    def synchronize(self) -> None:
        execute_graph(wait=True)

    @override
    def state_to_host(self, state: Any) -> Any:
        identity = torch_xla._XLAC._xla_get_tensor_id  # noqa: SLF001 - equal for tensors that share an XLA tensor
        fetch = torch_xla._XLAC._xla_get_cpu_tensors  # noqa: SLF001

        def is_lazy(leaf: Any) -> bool:
            return isinstance(leaf, torch.Tensor) and leaf.device.type == "xla"

        by_identity = {identity(leaf): leaf.detach() for leaf in nested.leaves(state) if is_lazy(leaf)}
        on_host = dict(zip(by_identity, fetch(list(by_identity.values())), strict=True))
        return nested.map_leaves(lambda leaf: on_host[identity(leaf)] if is_lazy(leaf) else leaf, state)

    @override
    def iterate_batches(
        self,
        batches_of: Callable[[EpochProgress], Iterator[Any]],
        epoch: EpochProgress,
        *,
        to_device: bool,
        loaded_by_workers: bool,
    ) -> Iterator[Any]:
        if to_device and loaded_by_workers:
            return self._monitor_batches(
                _with_seed_kept(prefetch_batches(batches_of, epoch, self._build_prefetcher))
            )
        return self._monitor_batches(_execute_each(batches_of(epoch)))

    def _monitor_batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Count the batches; the first replica monitors recompilation for all."""
        first = self._is_first
        if first:
            self._recompilation.begin()
        try:
            for batch in batches:
                self._num_batches += 1
                if first:
                    self._recompilation.start_step(batch)
                yield batch
        finally:
            if first:
                self._recompilation.end()

    @cached_property
    def _recompilation(self) -> RecompilationMonitor:
        return RecompilationMonitor(_read_counters, self.device)

    @override
    def describe(self) -> dict[str, str]:
        counts = _read_counters()
        variables = {
            name: os.environ[name] for name in sorted(os.environ) if name.startswith(_VARIABLE_PREFIXES)
        }
        return {
            "torch_xla": f"{torch_xla.__version__} with torch {torch.__version__}, {xr.device_type()} device",
            "variables": " ".join(f"{name}={value}" for name, value in variables.items()),
            "graphs": f"{counts.compiled} compiled, {counts.fetched} values fetched by this process so far",
        }

    @property
    def _loader_options(self) -> dict[str, Any]:
        """Return arguments for torch_xla's parallel loader."""
        return {}

    def _build_prefetcher(self) -> DevicePrefetcher:
        """Return the prefetcher of batches through torch_xla's parallel loader, one batch ahead."""
        options = {"loader_prefetch_size": 1, "device_prefetch_size": 1, **self._loader_options}
        return DevicePrefetcher(
            lambda batches: ParallelLoader(batches, [self.device], **options), self.device
        )


class SPMDRuntime(LazyRuntime):
    """Execution on all devices of a machine as one.

    Args:
        sharding: Shards tensors over the devices.
    """

    def __init__(self, sharding: DeviceSharding) -> None:
        super().__init__(sharding.device)
        self.sharding = sharding
        """Shards tensors over the devices."""
        self.num_batch_shards = sharding.num_devices

    @override
    def describe(self) -> dict[str, str]:
        return {"mesh": f"{self.num_batch_shards} devices compute as one (SPMD)"} | super().describe()

    @property
    @override
    def _loader_options(self) -> dict[str, Any]:
        return {"input_sharding": self.sharding.rows}

    @override
    def iterate_batches(
        self,
        batches_of: Callable[[EpochProgress], Iterator[Any]],
        epoch: EpochProgress,
        *,
        to_device: bool,
        loaded_by_workers: bool,
    ) -> Iterator[Any]:
        def send_batches(epoch: EpochProgress) -> Iterator[Any]:
            return (nested.map_tensors(self.sharding.send_tensor, batch) for batch in batches_of(epoch))

        sends = to_device and not loaded_by_workers
        return super().iterate_batches(
            send_batches if sends else batches_of,
            epoch,
            to_device=to_device,
            loaded_by_workers=loaded_by_workers,
        )

    @override
    def state_to_host(self, state: Any) -> Any:
        # torch_xla would first gather every tensor on every device, where it may not fit.
        self.synchronize()
        sharding, assembled = self.sharding, dict[int, torch.Tensor]()

        def to_host(leaf: Any) -> Any:
            if not sharding.is_sharded(leaf):
                return leaf
            key = sharding.identify(leaf)
            if key not in assembled:
                assembled[key] = sharding.assemble(leaf.detach())
            return assembled[key]

        return super().state_to_host(nested.map_leaves(to_host, state))


def _read_counters() -> CompileCounts:
    """Return the counters of torch_xla in this process."""
    fetches = met.metric_data("TransferFromDeviceTime")
    return CompileCounts(met.counter_value("UncachedCompile") or 0, fetches[0] if fetches else 0)


def _execute_each(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the batches, and execute the graph of each before the next is loaded."""
    for batch in batches:
        yield batch
        execute_graph()


def execute_graph(*, wait: bool = False) -> None:
    """Execute the recorded graph, so that numbers that differ between replicas are inputs of the next graph.

    A recorded scalar of 0 or 1 is a constant, and replicas with different constants do not run the same program. The seed is
    restored, since torch_xla would change it, and a run that resumes or gathers more often would draw other numbers.
    """
    with _keep_seed():
        torch_xla.sync(wait=wait)


@contextmanager
def _keep_seed() -> Iterator[None]:
    seed = xm.get_rng_state()
    yield
    xm.set_rng_state(seed)


def _with_seed_kept(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the batches of torch_xla's loader without its changes of the seed."""
    end = object()
    while True:
        with _keep_seed():
            batch = next(batches, end)
        if batch is end:
            return
        yield batch
