"""Measurements of a rank: matrix multiplications on its device, and collectives over the ranks of two nodes or of all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from accel_runtime.extensions.node_check.facts import CheckLimits, DeviceFacts, LinkFacts
from accel_runtime.extensions.node_check.machine import read_gpu_errors

__all__ = ["LinkRank", "build_rounds", "measure_device", "measure_link"]

_CPU_SIZE, _GPU_SIZE = 512, 4096
_WARM_UP = 3
_PROBE_BYTES = 1 << 18
_LATENCY_REPEATS = 20
_MAX_REPEATS = 10
_LARGE_S = 1.0
"""Seconds for all large collectives of one link, whose size is chosen so that a slow link needs no more."""
_VALUES, _SUMMANDS = 4, 28
"""Sums of so many products of whole numbers below this value are exact in every format, also in bfloat16 (up to 256)."""


def measure_device(rank: int, node: int, device: torch.device, limits: CheckLimits) -> DeviceFacts:
    """Multiply matrices on a device, and compare a product with the same on the CPU."""
    if device.type != "cuda":
        facts = DeviceFacts(rank, node, "CPU", is_gpu=False)
    else:
        properties: Any = torch.cuda.get_device_properties(device)
        count, problem = read_gpu_errors(f"GPU-{properties.uuid}" if hasattr(properties, "uuid") else "")
        facts = DeviceFacts(
            rank, node, properties.name, is_gpu=True, uncorrected_errors=count, row_problem=problem
        )
    try:
        if error := _compare_product(device):
            return replace(facts, error=error)
        return replace(facts, tflops=_measure_rate(device, limits.matmul_s))
    except RuntimeError as failure:  # out of memory, or an error of the device
        return replace(facts, error=f"a matrix multiplication failed: {str(failure).splitlines()[0]}")


def _compare_product(device: torch.device) -> str:
    """Return which elements of a product are wrong; empty if it is exact."""
    generator = torch.Generator().manual_seed(0)
    size = 256 if device.type == "cpu" else 1024
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    left, right = torch.randint(0, _VALUES, (2, size, size), generator=generator).to(torch.float32)
    left[:, _SUMMANDS:] = 0
    expected = left.to(torch.float64) @ right.to(torch.float64)
    actual = (left.to(device, dtype) @ right.to(device, dtype)).cpu()
    wrong = int((actual != expected.to(dtype)).sum())
    return f"a matrix multiplication gave {wrong} wrong elements of {expected.numel()}" if wrong else ""


def _measure_rate(device: torch.device, seconds: float) -> float:
    """Return the rate of matrix multiplications in TFLOP/s: the median on a GPU, the best of one thread on a CPU.

    Other processes use the CPU too: several threads that wait for each other would measure them.
    """
    is_gpu = device.type != "cpu"
    if not is_gpu:
        torch.set_num_threads(1)
    size, dtype = (_GPU_SIZE, torch.bfloat16) if is_gpu else (_CPU_SIZE, torch.float32)
    # Not zeros or ones, with which a GPU needs less power, and no lower clock.
    left, right = torch.randn(2, size, size, device=device, dtype=dtype)
    for _ in range(_WARM_UP):
        left @ right
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        _synchronize(device)
        begin = time.perf_counter()
        left @ right
        _synchronize(device)
        times.append(time.perf_counter() - begin)
    return 2 * size**3 / (median(times) if is_gpu else min(times)) / 1e12


def build_rounds(nodes: list[int], rounds: int) -> list[list[tuple[int, int]]]:
    """Return disjoint pairs of nodes for each round, such that no pair occurs twice.

    With an odd number of nodes, one has no partner in each round: with one more round, each node has at least two partners.
    """
    if len(nodes) == 1:
        return []
    places: list[int | None] = [*nodes, None] if len(nodes) % 2 else [*nodes]
    count = min(rounds + len(nodes) % 2, len(places) - 1)
    result = []
    for _ in range(count):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        result.append([(a, b) for a, b in pairs if a is not None and b is not None])
        # The first stays and the others move on by one: after as many rounds as others, each has met each.
        places = [places[0], places[-1], *places[1:-1]]
    return result


@dataclass(frozen=True)
class LinkRank:
    """This rank in a process group that does not depend on the ranks that are not in it."""

    store: Any
    ranks: tuple[int, ...]
    rank: int
    device: torch.device
    backend: str

    @contextmanager
    def create_group(self, timeout_s: float) -> Iterator[None]:
        """Create the group as the default one, inside a `with` block."""
        dist.init_process_group(
            self.backend,
            store=self.store,
            rank=self.ranks.index(self.rank),
            world_size=len(self.ranks),
            timeout=timedelta(seconds=timeout_s),
            device_id=self.device if self.backend == "nccl" else None,
        )
        try:
            yield
        finally:
            dist.destroy_process_group()


def measure_link(nodes: tuple[int, ...], own: LinkRank, limits: CheckLimits) -> LinkFacts:
    """Measure collectives over the ranks of some nodes."""
    is_gpu = own.device.type == "cuda"
    try:
        with own.create_group(limits.collective_s):
            latency, bandwidth = _time_collectives(own.device, len(own.ranks), limits)
    except (RuntimeError, ValueError) as failure:
        return LinkFacts(nodes, is_gpu, error=str(failure).strip().splitlines()[0])
    return LinkFacts(nodes, is_gpu, latency, bandwidth)


def _time_collectives(device: torch.device, size: int, limits: CheckLimits) -> tuple[float, float]:
    """Return the seconds of a collective of one number, and the bytes a second of one of a large tensor."""
    ones = torch.ones(1, device=device)
    dist.all_reduce(ones)
    if ones.item() != size:
        raise ValueError(f"an all_reduce of ones over {size} ranks gave {ones.item()}")
    one = torch.zeros(1, device=device)
    latency = min(_time(lambda: dist.all_reduce(one), device) for _ in range(_LATENCY_REPEATS))
    probe = torch.zeros(_PROBE_BYTES // 4, device=device)
    dist.all_reduce(probe)
    # The same on all ranks, so that they make the same collectives.
    slowest = torch.tensor(_time(lambda: dist.all_reduce(probe), device), device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    probe_s = max(slowest.item(), 1e-6)
    target = limits.message_mb * 10**6 * (limits.gpu_factor if device.type == "cuda" else 1)
    num_bytes = min(target, max(_PROBE_BYTES, int(_PROBE_BYTES * _LARGE_S / 2 / probe_s)))
    repeats = max(1, min(_MAX_REPEATS, int(_LARGE_S / (probe_s * num_bytes / _PROBE_BYTES))))
    large = torch.zeros(num_bytes // 4, device=device)
    seconds = min(_time(lambda: dist.all_reduce(large), device) for _ in range(repeats))
    # The bus bandwidth of nccl-tests: each rank sends and receives this part of the tensor.
    return latency, num_bytes * 2 * (size - 1) / size / seconds


def _time(function: Callable[[], object], device: torch.device) -> float:
    _synchronize(device)
    begin = time.perf_counter()
    function()
    _synchronize(device)
    return time.perf_counter() - begin


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
