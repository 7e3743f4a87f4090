"""What `accel test` runs in every process: does what accel promises hold on this machine?"""

from __future__ import annotations

import copy
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_runtime.accelerator import Accelerator

__all__ = ["main"]

_TOLERANCE = 1e-5


def processes(accelerator: Accelerator) -> str:
    """Every rank is there once, and knows its place."""
    ranks = accelerator.gather(torch.tensor([accelerator.process_index], device=accelerator.device))
    expected = list(range(accelerator.num_processes))
    _expect(ranks.tolist() == expected, f"ranks {ranks.tolist()} instead of {expected}")
    return f"{accelerator.num_processes} of {accelerator.num_processes} ranks answer, on {accelerator.device.type}"


def collectives(accelerator: Accelerator) -> str:
    """Gathering and reducing nested tensors give the values they should."""
    rank, world = accelerator.process_index, accelerator.num_processes
    mine = torch.full((2, 3), float(rank), device=accelerator.device)
    everyone = accelerator.gather({"x": mine, "y": [mine[0]]})
    if world > 1:
        expected = torch.arange(world, device=accelerator.device).repeat_interleave(2).float()
        _expect(torch.equal(everyone["x"][:, 0], expected), "gather returned other values than were sent")
    for name, total in (
        ("sum", sum(range(world))),
        ("mean", (world - 1) / 2),
        ("max", world - 1),
        ("min", 0),
    ):
        got = accelerator.reduce(mine, name)  # type: ignore[arg-type]
        _expect(
            bool((got == total).all()), f"reduce {name} gave {got.flatten()[0].item()} instead of {total}"
        )
    return "gather, and reduce by sum, mean, max and min"


def gradients(accelerator: Accelerator) -> str:
    """One step on all processes has the gradients of one process on the whole batch."""
    # torch's own generator is shared by replicas that are threads of one process.
    draws = torch.Generator().manual_seed(0)
    alone = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    with torch.no_grad():
        for parameter in alone.parameters():
            parameter.uniform_(-0.3, 0.3, generator=draws)
    alone.to(accelerator.device)
    together = accelerator.prepare(copy.deepcopy(alone))
    batch = torch.randn(4 * accelerator.data_parallel_size, 8, generator=draws)
    # Cut on the host: on a device that compiles graphs, every replica has to record the same.
    own = batch[4 * accelerator.data_parallel_rank :][:4].to(accelerator.device)
    alone(batch.to(accelerator.device)).square().mean().backward()
    accelerator.backward(together(own).square().mean())
    # On devices that record operations, the collective among them runs on all before any of them looks.
    accelerator.wait_for_everyone()
    pairs = zip(alone.parameters(), together.parameters(), strict=True)
    error = max(_difference(expected.grad, got.grad) for expected, got in pairs)
    _expect(error < _TOLERANCE, f"gradients differ by {error:.1e}")
    return f"one step equals one process on the whole batch (largest difference {error:.0e})"


def evaluation(accelerator: Accelerator) -> str:
    """Every sample of a dataset that does not divide comes back once, in order."""
    count = 4 * accelerator.data_parallel_size + 3
    size = 2 * accelerator._backend.parts  # noqa: SLF001 - one process may compute on several devices
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(count)), batch_size=size))
    seen = torch.cat([accelerator.gather_for_metrics(batch) for (batch,) in loader])
    _expect(seen.tolist() == list(range(count)), f"{seen.tolist()} instead of 0 to {count - 1}")
    return f"{count} samples gathered once each, in order"


def precision(accelerator: Accelerator) -> str:
    """The forward pass computes in the format of the profile, and a step changes the weights."""
    seen: list[torch.dtype] = []
    layer = nn.Linear(8, 8)
    model = nn.Sequential(layer)
    layer.register_forward_hook(lambda _module, _inputs, output: seen.append(output.dtype))
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = layer.weight.detach().clone()
    # Inputs up to 1 keep gradients below what fp16 holds at the scale it begins with: no step may be left out.
    loss = prepared(torch.randn(4, 8, device=accelerator.device).clamp(-1, 1)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    accelerator.wait_for_everyone()
    wanted = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[accelerator.mixed_precision]
    _expect(seen == [wanted], f"computes in {seen} instead of {wanted}")
    _expect(bool(loss.isfinite()), f"the loss is {loss.item()}")
    _expect(not torch.equal(before, layer.weight), "a step left the weights as they were")
    return f"computes in {str(wanted).removeprefix('torch.')}, loss finite, weights move"


CHECKS: tuple[Callable[[Accelerator], str], ...] = (processes, collectives, gradients, evaluation, precision)


def main() -> int:
    """Run all checks and print a line each; 0 if all hold on all ranks, else 1."""
    exact = Accelerator(mixed_precision="no")
    asked = Accelerator()
    done = [_check(check, asked if check is precision else exact) for check in CHECKS]
    held = all(one.held for one in done)
    if facts := exact.describe().device:
        exact.print(_report(facts, asked, done))
    exact.print("everything works here" if held else "something does not work here: see above")
    return 0 if held else 1


@dataclass(frozen=True)
class _Done:
    """A check that was made."""

    name: str
    held: bool
    seconds: float


def _report(facts: Mapping[str, str], accelerator: Accelerator, done: Sequence[_Done]) -> str:
    """A table to paste into an issue, for devices that accel's own tests do not have."""
    rows = {
        "accel": _version("accel"),
        "python": platform.python_version(),
        "system": platform.platform(),
        **facts,
        "replicas": str(accelerator.num_processes),
        "mixed precision": accelerator.mixed_precision,
        **{
            f"check {one.name}": f"{'passed' if one.held else 'FAILED'} in {one.seconds:.1f} s"
            for one in done
        },
    }
    lines = (f"| {title} | {' '.join(said.split())} |" for title, said in rows.items())
    return "\n".join(
        ["\nTo report how it works on this device:\n", "| what | here |", "|---|---|", *lines, ""]
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed as a package"


def _check(check: Callable[[Accelerator], str], accelerator: Accelerator) -> _Done:
    begin = time.perf_counter()
    try:
        said, fine = check(accelerator), True
    except Exception as error:  # noqa: BLE001 - whatever goes wrong is what the check has to say
        said, fine = f"{type(error).__name__}: {error}", False
        print(f"rank {accelerator.process_index}: {check.__name__}: {said}", file=sys.stderr)
    verdict = torch.tensor(float(fine), device=accelerator.device)
    everywhere = bool(accelerator.reduce(verdict, "min"))
    accelerator.print(f"{'ok    ' if everywhere else 'FAILED'} {check.__name__}: {said}")
    return _Done(check.__name__, everywhere, time.perf_counter() - begin)


def _difference(one: torch.Tensor | None, other: torch.Tensor | None) -> float:
    _expect(one is not None and other is not None, "a parameter has no gradient")
    assert one is not None
    assert other is not None
    return (one - other).abs().max().item()


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


if __name__ == "__main__":
    sys.exit(main())
