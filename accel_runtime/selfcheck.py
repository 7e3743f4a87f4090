"""Checks that `accel test` runs in every process, to verify accel's guarantees on this machine."""

from __future__ import annotations

import copy
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_runtime.accelerator.accelerator import Accelerator
from accel_runtime.environment.registry import Registry
from accel_runtime.environment.settings import __version__, is_placed_by_device

__all__ = ["EARLY_CHECKS", "EarlyResult", "main"]

_TOLERANCE = 1e-5


class EarlyResult(Protocol):
    """The result of a check that needs no process group, the same on all ranks."""

    @property
    def has_passed(self) -> bool:
        """True if nothing is wrong."""

    @property
    def is_connected(self) -> bool:
        """True if a process group of all ranks can be created."""

    def format(self) -> str:
        """Return the lines that the first rank prints."""


EARLY_CHECKS: Registry[Callable[[Mapping[str, str]], EarlyResult]] = Registry(
    {
        "nodes": "accel_runtime.extensions.node_check.check:check_nodes",
    },
)
"""Functions of the environment of a rank, which check the machines before the ranks connect."""


def processes(accelerator: Accelerator) -> str:
    """Check that every rank answers once."""
    ranks = accelerator.gather(torch.tensor([accelerator.process_index], device=accelerator.device))
    expected = list(range(accelerator.num_processes))
    _require(ranks.tolist() == expected, f"ranks {ranks.tolist()} instead of {expected}")
    return f"{accelerator.num_processes} of {accelerator.num_processes} ranks answer, on {accelerator.device.type}"


def collectives(accelerator: Accelerator) -> str:
    """Check the values of gathered and reduced nested tensors."""
    rank, world = accelerator.process_index, accelerator.num_processes
    local = torch.full((2, 3), float(rank), device=accelerator.device)
    data: dict[str, Any] = {"x": local, "y": [local[0]]}
    gathered = accelerator.gather(data)
    if world > 1:
        expected = torch.arange(world, device=accelerator.device).repeat_interleave(2).float()
        _require(torch.equal(gathered["x"][:, 0], expected), "gather returned other values than were sent")
    for name, total in (
        ("sum", sum(range(world))),
        ("mean", (world - 1) / 2),
        ("max", world - 1),
        ("min", 0),
    ):
        reduced = accelerator.reduce(local, name)  # type: ignore[arg-type]
        _require(
            bool((reduced == total).all()),
            f"reduce {name} gave {reduced.flatten()[0].item()} instead of {total}",
        )
    return "gather, and reduce by sum, mean, max and min"


def gradients(accelerator: Accelerator) -> str:
    """Check that a step on all processes has the gradients of one process on the whole batch."""
    # Replicas that are threads of one process share torch's default generator.
    generator = torch.Generator().manual_seed(0)
    reference = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.uniform_(-0.3, 0.3, generator=generator)
    reference.to(accelerator.device)
    prepared = accelerator.prepare(copy.deepcopy(reference))
    batch = torch.randn(4 * accelerator.data_parallel_size, 8, generator=generator)
    # Cut on the host: on a device that compiles graphs, every replica has to record the same.
    local_batch = batch[4 * accelerator.data_parallel_rank :][:4].to(accelerator.device)
    reference(batch.to(accelerator.device)).square().mean().backward()
    accelerator.backward(prepared(local_batch).square().mean())
    # On devices that record operations, this executes the collective on all replicas before one reads its result.
    accelerator.wait_for_everyone()
    pairs = zip(reference.parameters(), prepared.parameters(), strict=True)
    error = max(_max_difference(expected.grad, actual.grad) for expected, actual in pairs)
    _require(error < _TOLERANCE, f"gradients differ by {error:.1e}")
    return f"one step equals one process on the whole batch (largest difference {error:.0e})"


def evaluation(accelerator: Accelerator) -> str:
    """Check that every sample of a dataset with an incomplete last batch is gathered once, in order."""
    count = 4 * accelerator.data_parallel_size + 3
    size = 2 * accelerator._backend.runtime.num_batch_shards  # noqa: SLF001 - one process may compute on several devices
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(count)), batch_size=size))
    seen = torch.cat([accelerator.gather_for_metrics(batch) for (batch,) in loader])
    _require(seen.tolist() == list(range(count)), f"{seen.tolist()} instead of 0 to {count - 1}")
    return f"{count} samples gathered once each, in order"


def precision(accelerator: Accelerator) -> str:
    """Check that the forward pass computes in the dtype of the profile, and that a step changes the weights."""
    seen: list[torch.dtype] = []
    layer = nn.Linear(8, 8)
    model = nn.Sequential(layer)
    layer.register_forward_hook(lambda _module, _inputs, output: seen.append(output.dtype))
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = layer.weight.detach().clone()
    # Inputs up to 1 keep gradients below the fp16 maximum at the initial scale, so that no step is skipped.
    loss = prepared(torch.randn(4, 8, device=accelerator.device).clamp(-1, 1)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    accelerator.wait_for_everyone()
    expected = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[
        accelerator.mixed_precision
    ]
    _require(seen == [expected], f"computes in {seen} instead of {expected}")
    _require(bool(loss.isfinite()), f"the loss is {loss.item()}")
    _require(not torch.equal(before, layer.weight), "a step left the weights as they were")
    return f"computes in {str(expected).removeprefix('torch.')}, loss finite, weights move"


EXACT_CHECKS: tuple[Callable[[Accelerator], str], ...] = (processes, collectives, gradients, evaluation)


def main() -> int:
    """Run the early checks, then all others, and print a line for each; return 0 if all pass on all ranks, otherwise 1."""
    early = []
    # Replicas of torch_xla do not have one process each.
    for check in () if is_placed_by_device(os.environ) else EARLY_CHECKS.values():
        early.append(result := check(os.environ))
        if int(os.environ.get("RANK", "0")) == 0:
            print(result.format(), flush=True)
        if not result.is_connected:
            return 1
    results = _run_exact_checks()
    accelerator = Accelerator()
    results.append(_run_check(precision, accelerator))
    passed = all(result.has_passed for result in early) and all(result.passed for result in results)
    if device_info := accelerator.describe().device:
        accelerator.print(_format_report(device_info, accelerator, results))
    accelerator.print("everything works here" if passed else "something does not work here: see above")
    return 0 if passed else 1


def _run_exact_checks() -> list[_CheckResult]:
    """Run the checks that compare numbers, whatever the number format of the profile is."""
    accelerator = Accelerator(mixed_precision="no")
    return [_run_check(check, accelerator) for check in EXACT_CHECKS]


@dataclass(frozen=True)
class _CheckResult:
    """Result of a check."""

    name: str
    passed: bool
    seconds: float


def _format_report(
    device_info: Mapping[str, str], accelerator: Accelerator, results: Sequence[_CheckResult]
) -> str:
    """Return a table for an issue, for devices that accel's own tests do not cover."""
    rows = {
        "accel": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        **device_info,
        "replicas": str(accelerator.num_processes),
        "mixed precision": accelerator.mixed_precision,
        **{
            f"check {result.name}": f"{'passed' if result.passed else 'FAILED'} in {result.seconds:.1f} s"
            for result in results
        },
    }
    lines = (f"| {title} | {' '.join(text.split())} |" for title, text in rows.items())
    return "\n".join(
        ["\nTo report how it works on this device:\n", "| what | here |", "|---|---|", *lines, ""]
    )


def _run_check(check: Callable[[Accelerator], str], accelerator: Accelerator) -> _CheckResult:
    begin = time.perf_counter()
    try:
        text, passed = check(accelerator), True
    except Exception as error:  # noqa: BLE001 - any failure is the result of the check
        text, passed = f"{type(error).__name__}: {error}", False
        print(f"rank {accelerator.process_index}: {check.__name__}: {text}", file=sys.stderr)
    flag = torch.tensor(float(passed), device=accelerator.device)
    passed_everywhere = bool(accelerator.reduce(flag, "min"))
    accelerator.print(f"{'ok    ' if passed_everywhere else 'FAILED'} {check.__name__}: {text}")
    return _CheckResult(check.__name__, passed_everywhere, time.perf_counter() - begin)


def _max_difference(expected: torch.Tensor | None, actual: torch.Tensor | None) -> float:
    _require(expected is not None and actual is not None, "a parameter has no gradient")
    assert expected is not None
    assert actual is not None
    return (expected - actual).abs().max().item()


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


if __name__ == "__main__":
    sys.exit(main())
