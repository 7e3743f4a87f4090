"""`python -m benchmarks.gpu`: compare accel with bare torch and Accelerate on one GPU, and write docs/benchmarks-gpu.md."""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import os
import platform
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_runtime import Accelerator, FullyShardedDataParallelPlugin, ProjectConfiguration
from benchmarks.gpu_models import ResNet, Transformer
from benchmarks.report import NONE, Table, format_spread, number

__all__ = ["Bench", "main"]

ROOT = Path(__file__).resolve().parents[1]
INTRODUCTION = """\
# Benchmarks on a GPU

This page compares accel with bare torch{accelerate} on one {gpu}. `make bench-gpu` generates it. Blocks of steps
alternate within one process. Every number is the median over blocks, with the minimum in brackets, and ratios are
medians of ratios of neighbouring blocks. Goals: accel ÷ bare at most 1.01; an asynchronous save blocks the script for
at most a tenth of Accelerate's save.

{date}, {gpu}, torch {torch}, CUDA {cuda}, Python {python}.
"""


@dataclass(frozen=True)
class Bench:
    """One run of the benchmarks.

    Args:
        device: What is measured.
        tiny: Whether sizes are so small that only the code is tried.
        folder: Where checkpoints are written and removed again.
        deadline: When nothing more is begun, on the clock of `time.monotonic`.
    """

    device: torch.device
    tiny: bool
    folder: Path
    deadline: float

    def is_late(self) -> bool:
        """Return True if nothing more is to be begun."""
        return time.monotonic() > self.deadline

    def sized(self, real: int, tiny: int) -> int:
        """Return a size."""
        return tiny if self.tiny else real

    def wait(self) -> None:
        """Wait until everything is computed."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def resnet(self) -> nn.Module:
        """Return a model of the size of ResNet-50."""
        return ResNet((3, 4, 6, 3), 64) if not self.tiny else ResNet((1, 1), 4)

    def transformer(self) -> Transformer:
        """Return a transformer of about a billion parameters."""
        return Transformer(width=2048, layers=16, words=32000) if not self.tiny else Transformer(16, 2, 50)

    def tokens(self) -> torch.Tensor:
        """Return a batch for `transformer`."""
        return torch.randint(
            0, self.sized(32000, 50), (self.sized(4, 2), self.sized(1024, 8)), device=self.device
        )


Step = Callable[[], Any]
Made = tuple[nn.Module, torch.optim.Optimizer, Any]
"""A model, its optimizer, and what `backward` is called on; None is the loss itself."""


def accelerate() -> Any | None:
    """Return the module `accelerate`, or None if it is not installed."""
    return importlib.import_module("accelerate") if importlib.util.find_spec("accelerate") else None


def prepared(
    model: Callable[[], nn.Module], bench: Bench, precision: str, compiler: str | None = None
) -> dict[str, Made]:
    """Return the same training bare, with accel and, if it is installed, with Accelerate."""
    found: dict[str, Made] = {}
    makers: dict[str, Any] = {"bare": None, "accel": Accelerator}
    if other := accelerate():
        makers["Accelerate"] = other.Accelerator
    for name, maker in makers.items():
        torch.manual_seed(0)
        own: Any = model().to(bench.device)
        optimizer: Any = torch.optim.AdamW(own.parameters(), lr=1e-4, fused=True)
        accelerator = None
        if name == "Accelerate":
            _forget(other)
        if maker is None:
            own = torch.compile(own, backend=compiler) if compiler else own
        else:
            options = {"dynamo_backend": compiler} if compiler else {}
            accelerator = maker(mixed_precision=precision, cpu=bench.device.type == "cpu", **options)
            own, optimizer = accelerator.prepare(own, optimizer)
        found[name] = (own, optimizer, accelerator)
    return found


def _forget(other: Any) -> None:
    """Let Accelerate take other options in the same process, as its own tests do."""
    other.state.AcceleratorState._reset_state(reset_partial_state=True)  # noqa: SLF001
    other.state.GradientState._reset_state()  # noqa: SLF001


def step_of(made: Made, batch: torch.Tensor, precision: str) -> Step:
    """Return a training step on a batch that is on the device."""
    model, optimizer, accelerator = made
    dtype = {"no": None, "bf16": torch.bfloat16}[precision]

    def bare() -> None:
        with torch.autocast(batch.device.type, dtype=dtype, enabled=dtype is not None):
            out = model(batch)
        out.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def library() -> None:
        accelerator.backward(model(batch).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()

    return bare if accelerator is None else library


class Times(NamedTuple):
    """Milliseconds a step by name, block by block."""

    wall: dict[str, list[float]]
    """Until the steps are computed."""
    cpu: dict[str, list[float]]
    """CPU time of the training thread until the steps are launched."""


def in_turns(steps: Mapping[str, Step], bench: Bench, *, blocks: int, count: int) -> Times:
    """Measure steps, block by block.

    Args:
        steps: What takes turns.
        bench: Waits.
        blocks: How many of each; fewer if the time is used up.
        count: Steps of a block.
    """
    for step in steps.values():
        for _ in range(3):
            step()
    bench.wait()
    times = Times({name: [] for name in steps}, {name: [] for name in steps})
    for block in range(blocks):
        if block and bench.is_late():
            break
        names = list(steps) if block % 2 else list(steps)[::-1]
        for name in names:
            gc.collect()
            gc.disable()
            begin, cpu_begin = time.perf_counter(), time.thread_time()
            for _ in range(count):
                steps[name]()
            launched = time.thread_time()
            bench.wait()
            end = time.perf_counter()
            gc.enable()
            times.wall[name].append((end - begin) * 1000 / count)
            times.cpu[name].append((launched - cpu_begin) * 1000 / count)
    return times


def peaks(steps: Mapping[str, Step], bench: Bench) -> dict[str, str]:
    """Return by name the memory that a step takes beyond what is there before it."""
    if bench.device.type != "cuda":
        return dict.fromkeys(steps, NONE)
    found = {}
    for name, step in steps.items():
        bench.wait()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        bench.wait()
        found[name] = number((torch.cuda.max_memory_allocated() - before) / 2**20)
    return found


def row(label: str, times: Times, memory: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Return a row for each of those measured."""
    bare = next(iter(times.wall))

    def added(own: Mapping[str, list[float]], name: str) -> str:
        pairs = zip(own[name], own[bare], strict=True)
        return NONE if name == bare else number(median(a - b for a, b in pairs) * 1000)

    def ratio(name: str) -> str:
        pairs = zip(times.wall[name], times.wall[bare], strict=True)
        return NONE if name == bare else f"{median(a / b for a, b in pairs):.3f}"

    return [
        (
            f"{label}: {name}",
            format_spread(own),
            ratio(name),
            added(times.wall, name),
            added(times.cpu, name),
            memory.get(name, NONE),
        )
        for name, own in times.wall.items()
    ]


LEFT_OUT = "not measured, the time of this run was used up"
THEIRS = "Accelerate, save_state"
HEADER = ("", "ms a step", "÷ bare", "added, µs", "added CPU, µs", "memory of a step, MiB")


def measure_steps(bench: Bench) -> Table:
    """Measure steps of a ResNet and a transformer."""
    rows: list[tuple[str, ...]] = []
    size = bench.sized(224, 16)
    images = torch.randn(bench.sized(64, 2), 3, size, size, device=bench.device)
    cases: list[tuple[str, Callable[[], nn.Module], torch.Tensor, str]] = [
        ("ResNet, float32", bench.resnet, images, "no"),
        ("ResNet, bf16", bench.resnet, images, "bf16"),
        ("transformer of a billion, bf16", bench.transformer, bench.tokens(), "bf16"),
    ]
    for label, model, batch, precision in cases:
        if bench.is_late():
            rows.append((f"{label}: {LEFT_OUT}", *[NONE] * (len(HEADER) - 1)))
            continue
        made = prepared(model, bench, precision)
        steps = {name: step_of(own, batch, precision) for name, own in made.items()}
        times = in_turns(steps, bench, blocks=bench.sized(8, 2), count=bench.sized(5, 1))
        rows += row(label, times, peaks(steps, bench))
        del made, steps
        free(bench)
    text = "Forward and backward pass, AdamW (fused), `zero_grad()`. CPU time is the time of the training thread until all kernels are launched."
    return Table("A training step", text, HEADER, rows)


def measure_cpu(bench: Bench) -> Table:
    """Measure the CPU time of launching a small step."""
    made = prepared(lambda: nn.Linear(64, 64), bench, "bf16")
    batch = torch.randn(8, 64, device=bench.device)
    steps = {name: step_of(own, batch, "bf16") for name, own in made.items()}
    times = in_turns(steps, bench, blocks=bench.sized(20, 2), count=bench.sized(20, 2))
    text = "CPU time of the training thread to launch a step of `Linear(64, 64)` under bf16, so small that the GPU waits."
    rows = [own[:4] for own in row("small step", Times(times.cpu, times.cpu), {})]
    return Table("CPU time a step", text, ("", "ms of CPU a step", *HEADER[2:4]), rows)


def measure_copies(bench: Bench) -> Table:
    """Measure how much of copying batches is hidden behind the computation."""
    size, count, batch = bench.sized(224, 16), bench.sized(20, 3), bench.sized(64, 2)
    data = TensorDataset(torch.randn(count * batch, 3, size, size))
    pinned = bench.device.type == "cuda"
    made = prepared(bench.resnet, bench, "bf16")
    there = torch.randn(batch, 3, size, size, device=bench.device)
    steps: dict[str, Step] = {"no copies": _repeated(made["bare"], there, count)}
    for name, own in made.items():
        loader: Any = DataLoader(data, batch_size=batch, pin_memory=pinned)
        loader = loader if own[2] is None else own[2].prepare(loader)
        steps[name] = _epoch(own, loader, bench)
    times = in_turns(steps, bench, blocks=bench.sized(5, 2), count=1)
    per_step = Times(*({name: [one / count for one in own] for name, own in part.items()} for part in times))
    text = (
        "An epoch of the ResNet under bf16 over a loader with pinned memory and without workers, which also collates the "
        "batches, compared with the same step on a batch that is on the GPU."
    )
    return Table(
        "Batches and copies",
        text,
        (HEADER[0], HEADER[1], "÷ no copies", *HEADER[3:]),
        row("ResNet", per_step, {}),
    )


def _repeated(made: Made, batch: torch.Tensor, count: int) -> Step:
    one = step_of(made, batch, "bf16")

    def epoch() -> None:
        for _ in range(count):
            one()

    return epoch


def _epoch(made: Made, loader: Any, bench: Bench) -> Step:
    def epoch() -> None:
        for (batch,) in loader:
            # A prepared loader has moved it already; then this does nothing.
            step_of(made, batch.to(bench.device, non_blocking=True), "bf16")()

    return epoch


def measure_compiled(bench: Bench) -> Table:
    """Measure compiled steps."""
    compiler = "aot_eager" if bench.tiny else "inductor"

    def model() -> nn.Module:
        return Transformer(bench.sized(1024, 16), bench.sized(4, 2), bench.sized(8000, 50))

    made = prepared(model, bench, "bf16", compiler)
    batch = bench.tokens() % bench.sized(8000, 50)
    steps = {name: step_of(own, batch, "bf16") for name, own in made.items()}
    times = in_turns(steps, bench, blocks=bench.sized(8, 2), count=bench.sized(10, 1))
    text = f"As above, a transformer of 4 layers of 1024, `torch.compile` with {compiler}, bf16."
    return Table("A compiled step", text, HEADER, row("transformer", times, peaks(steps, bench)))


def measure_sharded(bench: Bench) -> Table:
    """Measure `fully_shard` called by hand and by accel, on a mesh of one."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    backend = "gloo" if bench.device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh(bench.device.type, (1,), mesh_dim_names=("dp_shard",))
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        torch.manual_seed(0)
        by_hand = bench.transformer().to(bench.device)
        for block in by_hand.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(by_hand, mesh=mesh, mp_policy=policy)
        plugin = FullyShardedDataParallelPlugin(
            auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
        )
        accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin, cpu=bench.device.type == "cpu")
        torch.manual_seed(0)
        model: Any = bench.transformer()
        model, optimizer = accelerator.prepare(
            model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        )
        hand: Made = (by_hand, torch.optim.AdamW(by_hand.parameters(), lr=1e-4, fused=True), None)
        batch = bench.tokens()
        steps = {
            "by hand": step_of(hand, batch, "no"),
            "accel": step_of((model, optimizer, accelerator), batch, "bf16"),
        }
        times = in_turns(steps, bench, blocks=bench.sized(8, 2), count=bench.sized(5, 1))
        rows = row("transformer of a billion", times, peaks(steps, bench))
    finally:
        dist.destroy_process_group()
    text = "The transformer of a billion parameters on a mesh of one GPU, every block wrapped, bf16, reduction in float32."
    return Table("fully_shard", text, (*HEADER[:2], "÷ by hand", *HEADER[3:]), rows)


def measure_checkpoints(bench: Bench) -> Table:
    """Measure how long saves hold the script up: a transformer of a billion with AdamW's state, about 11 GB."""
    times = _saves_of_accel(bench)
    free(bench)
    if other := accelerate():
        times[THEIRS] = _saves_of(other, bench)
    best = {
        name: (median(a for a, _ in own), median(b for _, b in own)) for name, own in times.items() if own
    }
    versus = THEIRS if THEIRS in best or "torch.save" not in best else "torch.save"
    rows: list[tuple[str, ...]] = []
    for name in times:
        if name not in best:
            rows.append((f"{name}: {LEFT_OUT}", *[NONE] * 3))
            continue
        held, whole = best[name]
        beside = f"{held / best[versus][0]:.3f}" if versus in best else NONE
        rows.append((name, number(held), number(whole), beside))
    size = 3 * sum(parameter.nbytes for parameter in bench.transformer().parameters())
    text = (
        f"A state of {size / 1e9:.1f} GB. Blocked: seconds until the call returns. Complete: seconds until the checkpoint is "
        "complete, with a step meanwhile, and without the delay of the file system's writes to disk."
    )
    return Table("Saving", text, ("", "blocked, s", "complete, s", f"blocked ÷ {versus}"), rows)


def _saves_of_accel(bench: Bench) -> dict[str, list[tuple[float, float]]]:
    project = ProjectConfiguration(project_dir=str(bench.folder / "accel"), async_save=True)
    ours: Any = Accelerator(cpu=bench.device.type == "cpu", project_config=project)
    model, optimizer = ours.prepare(*_with_states(bench))
    one = step_of((model, optimizer, ours), bench.tokens(), "no")
    one()
    target = bench.folder / "saved"
    state = {"model": model, "optimizer": optimizer}
    saves: dict[str, tuple[Callable[[], Any], Callable[[], Any] | None]] = {
        "accel, async_save=True": (
            lambda: ours.save_state(target, async_save=True),
            ours.wait_for_checkpoint,
        ),
        "accel, async_save=False": (lambda: ours.save_state(target, async_save=False), None),
        "torch.save": (lambda: torch.save({k: v.state_dict() for k, v in state.items()}, target), None),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in saves}
    for _ in range(2):
        for name, (save, finish) in saves.items():
            if bench.is_late():
                break
            times[name].append(_held(save, finish, bench, one))
            _remove(target)
    return times


def _saves_of(other: Any, bench: Bench) -> list[tuple[float, float]]:
    if bench.is_late():
        return []
    _forget(other)
    theirs = other.Accelerator(cpu=bench.device.type == "cpu")
    model, optimizer = theirs.prepare(*_with_states(bench))
    one = step_of((model, optimizer, theirs), bench.tokens(), "no")
    one()
    target, found = bench.folder / "saved", []
    for turn in range(2):
        if turn and bench.is_late():
            break
        found.append(_held(lambda: theirs.save_state(str(target)), None, bench, one))
        _remove(target)
    return found


def _with_states(bench: Bench) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = bench.transformer().to(bench.device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def _held(
    save: Callable[[], Any], finish: Callable[[], Any] | None, bench: Bench, step: Step
) -> tuple[float, float]:
    bench.wait()
    begin = time.perf_counter()
    save()
    held = time.perf_counter() - begin
    if finish is not None:
        step()
        finish()
    return held, time.perf_counter() - begin


def _remove(target: Path) -> None:
    if target.is_dir():
        shutil.rmtree(target)
    else:
        target.unlink(missing_ok=True)


def free(bench: Bench) -> None:
    """Give back the memory of what is not used any more."""
    gc.collect()
    torch.compiler.reset()
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()


SUBJECTS: dict[str, Callable[[Bench], Table]] = {
    "cpu": measure_cpu,
    "steps": measure_steps,
    "copies": measure_copies,
    "sharded": measure_sharded,
    "compiled": measure_compiled,
    "checkpoints": measure_checkpoints,  # a slow disk makes it the longest
}


def main(arguments: list[str] | None = None) -> int:
    """Measure and write the page; return 1 if a subject could not be measured, 2 if there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="try the code with tiny models, on the CPU too")
    parser.add_argument("--only", action="append", choices=SUBJECTS, help="measure this; can be repeated")
    parser.add_argument("--seconds", type=float, default=390.0, help="begin nothing after so long")
    parser.add_argument("--limit", type=float, default=460.0, help="end after so long, whatever is measured")
    parser.add_argument("--output", type=Path, help="the page; without it $OUT/benchmarks-gpu.md, else docs/")
    options = parser.parse_args(arguments)
    cuda = torch.cuda.is_available()
    if not cuda and not options.tiny:
        print(
            "bench-gpu: this machine has no GPU that torch can use; --tiny tries the code on the CPU",
            file=sys.stderr,
        )
        return 2
    page: Path = options.output or Path(os.environ.get("OUT") or ROOT / "docs") / "benchmarks-gpu.md"
    begin, failed = time.monotonic(), False
    names: list[str] = options.only or list(SUBJECTS)
    sections = {name: f"## {name}\n\n{LEFT_OUT.capitalize()}.\n" for name in names}

    def write() -> None:
        page.write_text("\n".join([_introduction(), *sections.values()]), encoding="utf-8")

    with tempfile.TemporaryDirectory(dir=page.parent) as folder, _limited(options.limit, folder, write):
        device = torch.device("cuda" if cuda else "cpu")
        bench = Bench(device, options.tiny, Path(folder), begin + options.seconds)
        for name in names:
            if bench.is_late():
                print(f"bench-gpu: {name}: {LEFT_OUT}", file=sys.stderr, flush=True)
                continue
            print(f"bench-gpu: {name}", file=sys.stderr, flush=True)
            try:
                sections[name] = SUBJECTS[name](bench).markdown()
            except Exception as error:  # noqa: BLE001 - the others are measured all the same
                failed = True
                first = str(error).partition("\n")[0]
                sections[name] = f"## {name}\n\nCould not be measured: {type(error).__name__}: {first}\n"
            free(bench)
            write()
        write()
    print(page.read_text(encoding="utf-8"))
    return int(failed)


@contextmanager
def _limited(seconds: float, folder: str, write: Callable[[], None]) -> Iterator[None]:
    """End the process after a number of seconds: remove the folder, and write the page with the results so far.

    It runs in a thread of its own, since a call of torch that does not return delays signals.
    """

    def stop() -> None:
        print(f"bench-gpu: stopped after {seconds:.0f} s", file=sys.stderr, flush=True)
        write()
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    timer = threading.Timer(seconds, stop)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _introduction() -> str:
    other = accelerate()
    return INTRODUCTION.format(
        accelerate=f" and Accelerate {other.__version__}" if other else " (Accelerate is not installed)",
        gpu=torch.cuda.get_device_name(0)
        if torch.cuda.is_available()
        else "CPU, with tiny sizes: no measurement",
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        python=platform.python_version(),
    )


if __name__ == "__main__":
    sys.exit(main())
