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
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_runtime import Accelerator, FullyShardedDataParallelPlugin, ProjectConfiguration
from benchmarks.gpu_models import ResNet, Transformer
from benchmarks.report import NONE, Table, format_median, format_number

__all__ = ["Bench", "main"]

ROOT = Path(__file__).resolve().parents[1]
INTRODUCTION = """\
# Benchmarks on a GPU

This page compares accel with bare torch{accelerate}. `make bench-gpu` generates it. Blocks of steps alternate within one
process; numbers are medians over blocks. Goals: accel ÷ bare at most 1.01; an asynchronous save blocks the script for at most a
tenth of Accelerate's save.

{date}, {gpu}, torch {torch}, CUDA {cuda}, Python {python}.
"""


@dataclass(frozen=True)
class Bench:
    """One run of the benchmarks.

    Args:
        device: Device of models and batches.
        tiny: Use sizes that only test the code.
        folder: Folder for checkpoints, which are removed again.
        deadline: Time on the clock of `time.monotonic` after which no measurement starts.
    """

    device: torch.device
    tiny: bool
    folder: Path
    deadline: float

    def is_out_of_time(self) -> bool:
        """Return True if no further measurement may start."""
        return time.monotonic() > self.deadline

    def choose_size(self, real: int, tiny: int) -> int:
        """Return the first size, or with `tiny` the second."""
        return tiny if self.tiny else real

    def synchronize(self) -> None:
        """Wait until the device has finished."""
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
            0,
            self.choose_size(32000, 50),
            (self.choose_size(4, 2), self.choose_size(1024, 8)),
            device=self.device,
        )


Step = Callable[[], Any]
Training = tuple[nn.Module, torch.optim.Optimizer, Any]
"""Model, optimizer, and the Accelerator; None for bare torch."""


def import_accelerate() -> Any | None:
    """Return the module `accelerate`, or None if it is not installed."""
    return importlib.import_module("accelerate") if importlib.util.find_spec("accelerate") else None


def build_trainings(
    model: Callable[[], nn.Module], bench: Bench, precision: str, compiler: str | None = None
) -> dict[str, Training]:
    """Return the same training with bare torch, with accel and, if it is installed, with Accelerate."""
    results: dict[str, Training] = {}
    makers: dict[str, Any] = {"bare": None, "accel": Accelerator}
    if other := import_accelerate():
        makers["Accelerate"] = other.Accelerator
    for name, maker in makers.items():
        torch.manual_seed(0)
        own: Any = model().to(bench.device)
        optimizer: Any = torch.optim.AdamW(own.parameters(), lr=1e-4, fused=True)
        accelerator = None
        if name == "Accelerate":
            _reset_accelerate(other)
        if maker is None:
            own = torch.compile(own, backend=compiler) if compiler else own
        else:
            options = {"dynamo_backend": compiler} if compiler else {}
            accelerator = maker(mixed_precision=precision, cpu=bench.device.type == "cpu", **options)
            own, optimizer = accelerator.prepare(own, optimizer)
        results[name] = (own, optimizer, accelerator)
    return results


def _reset_accelerate(library: Any) -> None:
    """Reset the state of Accelerate, so that it accepts other options in the same process, as its own tests do."""
    library.state.AcceleratorState._reset_state(reset_partial_state=True)  # noqa: SLF001
    library.state.GradientState._reset_state()  # noqa: SLF001


def build_step(training: Training, batch: torch.Tensor, precision: str) -> Step:
    """Return a training step on a batch that is on the device."""
    model, optimizer, accelerator = training
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
    """Milliseconds per step, by name and block."""

    wall: dict[str, list[float]]
    """Until the steps are computed."""
    cpu: dict[str, list[float]]
    """CPU time of the training thread until the steps are launched."""


def measure_blocks(steps: Mapping[str, Step], bench: Bench, *, blocks: int, count: int) -> Times:
    """Measure steps in alternating blocks.

    Args:
        steps: The steps by name.
        bench: The run, which synchronizes the device and limits the time.
        blocks: Number of blocks of each step; fewer if the time is used up.
        count: Number of steps in a block.
    """
    for step in steps.values():
        for _ in range(3):
            step()
    bench.synchronize()
    times = Times({name: [] for name in steps}, {name: [] for name in steps})
    for block in range(blocks):
        if block and bench.is_out_of_time():
            break
        names = list(steps) if block % 2 else list(steps)[::-1]
        for name in names:
            gc.collect()
            gc.disable()
            begin, cpu_begin = time.perf_counter(), time.thread_time()
            for _ in range(count):
                steps[name]()
            launched = time.thread_time()
            bench.synchronize()
            end = time.perf_counter()
            gc.enable()
            times.wall[name].append((end - begin) * 1000 / count)
            times.cpu[name].append((launched - cpu_begin) * 1000 / count)
    return times


def measure_memory(steps: Mapping[str, Step], bench: Bench) -> dict[str, str]:
    """Return the MiB that each step allocates at its peak, by name."""
    if bench.device.type != "cuda":
        return dict.fromkeys(steps, NONE)
    results = {}
    for name, step in steps.items():
        bench.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        bench.synchronize()
        results[name] = format_number((torch.cuda.max_memory_allocated() - before) / 2**20)
    return results


def format_rows(label: str, times: Times, memory: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Return a row for each measured step."""
    bare = next(iter(times.wall))

    def added(own: Mapping[str, list[float]], name: str) -> str:
        pairs = zip(own[name], own[bare], strict=True)
        return NONE if name == bare else format_number(median(a - b for a, b in pairs) * 1000)

    def ratio(name: str) -> str:
        pairs = zip(times.wall[name], times.wall[bare], strict=True)
        return NONE if name == bare else f"{median(a / b for a, b in pairs):.3f}"

    return [
        (
            f"{label}: {name}",
            format_median(own),
            ratio(name),
            added(times.wall, name),
            added(times.cpu, name),
            memory.get(name, NONE),
        )
        for name, own in times.wall.items()
    ]


NOT_MEASURED = "not measured: the time of this run was used up"
ACCELERATE_SAVE = "Accelerate, save_state"
HEADER = ("", "ms a step", "÷ bare", "added, µs", "added CPU, µs", "memory of a step, MiB")


def measure_steps(bench: Bench) -> Table:
    """Measure steps of a ResNet and a transformer."""
    rows: list[tuple[str, ...]] = []
    size = bench.choose_size(224, 16)
    images = torch.randn(bench.choose_size(64, 2), 3, size, size, device=bench.device)
    cases: list[tuple[str, Callable[[], nn.Module], torch.Tensor, str]] = [
        ("ResNet, float32", bench.resnet, images, "no"),
        ("ResNet, bf16", bench.resnet, images, "bf16"),
        ("transformer of a billion, bf16", bench.transformer, bench.tokens(), "bf16"),
    ]
    for label, model, batch, precision in cases:
        if bench.is_out_of_time():
            rows.append((f"{label}: {NOT_MEASURED}", *[NONE] * (len(HEADER) - 1)))
            continue
        trainings = build_trainings(model, bench, precision)
        steps = {name: build_step(own, batch, precision) for name, own in trainings.items()}
        times = measure_blocks(steps, bench, blocks=bench.choose_size(8, 2), count=bench.choose_size(5, 1))
        rows += format_rows(label, times, measure_memory(steps, bench))
        del trainings, steps
        free_memory(bench)
    text = "Forward and backward pass, AdamW (fused), `zero_grad()`. CPU time is the time of the training thread until all kernels are launched."
    return Table("A training step", text, HEADER, rows)


def measure_cpu(bench: Bench) -> Table:
    """Measure the CPU time of launching a small step."""
    trainings = build_trainings(lambda: nn.Linear(64, 64), bench, "bf16")
    batch = torch.randn(8, 64, device=bench.device)
    steps = {name: build_step(own, batch, "bf16") for name, own in trainings.items()}
    times = measure_blocks(steps, bench, blocks=bench.choose_size(20, 2), count=bench.choose_size(20, 2))
    text = "CPU time of the training thread to launch a step of `Linear(64, 64)` under bf16, so small that the GPU waits."
    rows = [own[:4] for own in format_rows("small step", Times(times.cpu, times.cpu), {})]
    return Table("CPU time a step", text, ("", "ms of CPU a step", *HEADER[2:4]), rows)


def measure_copies(bench: Bench) -> Table:
    """Measure how much of the copies of batches overlaps with the computation."""
    size, count, batch = bench.choose_size(224, 16), bench.choose_size(20, 3), bench.choose_size(64, 2)
    data = TensorDataset(torch.randn(count * batch, 3, size, size))
    pinned = bench.device.type == "cuda"
    trainings = build_trainings(bench.resnet, bench, "bf16")
    on_device = torch.randn(batch, 3, size, size, device=bench.device)
    steps: dict[str, Step] = {"no copies": _build_repeated_step(trainings["bare"], on_device, count)}
    for name, own in trainings.items():
        loader: Any = DataLoader(data, batch_size=batch, pin_memory=pinned)
        loader = loader if own[2] is None else own[2].prepare(loader)
        steps[name] = _build_epoch(own, loader, bench)
    times = measure_blocks(steps, bench, blocks=bench.choose_size(5, 2), count=1)
    per_step = Times(*({name: [one / count for one in own] for name, own in part.items()} for part in times))
    text = (
        "An epoch of the ResNet under bf16 over a loader with pinned memory and without workers, which also collates the "
        "batches, compared with the same step on a batch that is on the GPU."
    )
    return Table(
        "Batches and copies",
        text,
        (HEADER[0], HEADER[1], "÷ no copies", *HEADER[3:]),
        format_rows("ResNet", per_step, {}),
    )


def _build_repeated_step(training: Training, batch: torch.Tensor, count: int) -> Step:
    step = build_step(training, batch, "bf16")

    def epoch() -> None:
        for _ in range(count):
            step()

    return epoch


def _build_epoch(training: Training, loader: Any, bench: Bench) -> Step:
    def epoch() -> None:
        for (batch,) in loader:
            # Batches of a prepared loader are on the device already.
            build_step(training, batch.to(bench.device, non_blocking=True), "bf16")()

    return epoch


def measure_compiled(bench: Bench) -> Table:
    """Measure compiled steps."""
    compiler = "aot_eager" if bench.tiny else "inductor"

    def model() -> nn.Module:
        return Transformer(bench.choose_size(1024, 16), bench.choose_size(4, 2), bench.choose_size(8000, 50))

    trainings = build_trainings(model, bench, "bf16", compiler)
    batch = bench.tokens() % bench.choose_size(8000, 50)
    steps = {name: build_step(own, batch, "bf16") for name, own in trainings.items()}
    times = measure_blocks(steps, bench, blocks=bench.choose_size(8, 2), count=bench.choose_size(10, 1))
    text = f"As above, a transformer of 4 layers of 1024, `torch.compile` with {compiler}, bf16."
    return Table(
        "A compiled step", text, HEADER, format_rows("transformer", times, measure_memory(steps, bench))
    )


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
        hand: Training = (by_hand, torch.optim.AdamW(by_hand.parameters(), lr=1e-4, fused=True), None)
        batch = bench.tokens()
        steps = {
            "by hand": build_step(hand, batch, "no"),
            "accel": build_step((model, optimizer, accelerator), batch, "bf16"),
        }
        times = measure_blocks(steps, bench, blocks=bench.choose_size(8, 2), count=bench.choose_size(5, 1))
        rows = format_rows("transformer of a billion", times, measure_memory(steps, bench))
    finally:
        dist.destroy_process_group()
    text = "The transformer of a billion parameters on a mesh of one GPU, every block wrapped, bf16, reduction in float32."
    return Table("fully_shard", text, (*HEADER[:2], "÷ by hand", *HEADER[3:]), rows)


def measure_checkpoints(bench: Bench) -> Table:
    """Measure how long saves block the script: a transformer of a billion parameters with AdamW, about 11 GB."""
    times = _measure_accel_saves(bench)
    free_memory(bench)
    if other := import_accelerate():
        times[ACCELERATE_SAVE] = _measure_accelerate_saves(other, bench)
    best = {
        name: (median(a for a, _ in own), median(b for _, b in own)) for name, own in times.items() if own
    }
    versus = ACCELERATE_SAVE if ACCELERATE_SAVE in best or "torch.save" not in best else "torch.save"
    rows: list[tuple[str, ...]] = []
    for name in times:
        if name not in best:
            rows.append((f"{name}: {NOT_MEASURED}", *[NONE] * 3))
            continue
        blocked, complete = best[name]
        relative = f"{blocked / best[versus][0]:.3f}" if versus in best else NONE
        rows.append((name, format_number(blocked), format_number(complete), relative))
    size = 3 * sum(parameter.nbytes for parameter in bench.transformer().parameters())
    text = (
        f"A state of {size / 1e9:.1f} GB, written to {_file_system_of(bench.folder)}. Blocked: seconds until the call returns. "
        "Complete: seconds until the checkpoint is complete, with a step meanwhile, and without the delay of the file "
        "system's writes to disk."
    )
    return Table("Saving", text, ("", "blocked, s", "complete, s", f"blocked ÷ {versus}"), rows)


def _file_system_of(folder: Path) -> str:
    """Return the type of the file system of a folder."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    held = [(len(point), kind) for point, kind in mounts if folder.resolve().is_relative_to(point)]
    return max(held)[1]


def _measure_accel_saves(bench: Bench) -> dict[str, list[tuple[float, float]]]:
    project = ProjectConfiguration(project_dir=str(bench.folder / "accel"), async_save=True)
    accelerator: Any = Accelerator(cpu=bench.device.type == "cpu", project_config=project)
    model, optimizer = accelerator.prepare(*_create_training(bench))
    step = build_step((model, optimizer, accelerator), bench.tokens(), "no")
    step()
    target = bench.folder / "saved"
    state = {"model": model, "optimizer": optimizer}
    saves: dict[str, tuple[Callable[[], Any], Callable[[], Any] | None]] = {
        "accel, async_save=True": (
            lambda: accelerator.save_state(target, async_save=True),
            accelerator.wait_for_checkpoint,
        ),
        "accel, async_save=False": (lambda: accelerator.save_state(target, async_save=False), None),
        "torch.save": (lambda: torch.save({k: v.state_dict() for k, v in state.items()}, target), None),
    }
    # The first save may wait for its host memory, which is allocated in the background once a model is prepared.
    first = f"{next(iter(saves))}, first save"
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in (first, *saves)}
    times[first].append(_measure_save(*next(iter(saves.values())), bench, step))
    _remove(target)
    for _ in range(2):
        for name, (save, finish) in saves.items():
            if bench.is_out_of_time():
                break
            times[name].append(_measure_save(save, finish, bench, step))
            _remove(target)
    return times


def _measure_accelerate_saves(other: Any, bench: Bench) -> list[tuple[float, float]]:
    if bench.is_out_of_time():
        return []
    _reset_accelerate(other)
    accelerator = other.Accelerator(cpu=bench.device.type == "cpu")
    model, optimizer = accelerator.prepare(*_create_training(bench))
    step = build_step((model, optimizer, accelerator), bench.tokens(), "no")
    step()
    target, results = bench.folder / "saved", []
    for turn in range(2):
        if turn and bench.is_out_of_time():
            break
        results.append(_measure_save(lambda: accelerator.save_state(str(target)), None, bench, step))
        _remove(target)
    return results


def _create_training(bench: Bench) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = bench.transformer().to(bench.device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def _measure_save(
    save: Callable[[], Any], finish: Callable[[], Any] | None, bench: Bench, step: Step
) -> tuple[float, float]:
    bench.synchronize()
    begin = time.perf_counter()
    save()
    blocked = time.perf_counter() - begin
    if finish is not None:
        step()
        finish()
    return blocked, time.perf_counter() - begin


def _remove(target: Path) -> None:
    if target.is_dir():
        shutil.rmtree(target)
    else:
        target.unlink(missing_ok=True)


def free_memory(bench: Bench) -> None:
    """Free unused memory."""
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
    "checkpoints": measure_checkpoints,  # last, since a slow disk makes it the longest
}


def main(arguments: list[str] | None = None) -> int:
    """Measure and write the page; return 1 if a subject could not be measured, 2 if there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="test the code with tiny models, also on the CPU")
    parser.add_argument(
        "--only", action="append", choices=SUBJECTS, help="measure only this subject; can be repeated"
    )
    parser.add_argument("--seconds", type=float, default=390.0, help="start no measurement after this time")
    parser.add_argument("--limit", type=float, default=460.0, help="end after this time")
    parser.add_argument(
        "--checkpoints", type=Path, help="write checkpoints below this folder (default: that of the page)"
    )
    parser.add_argument(
        "--output", type=Path, help="write the page to this file (default $OUT/benchmarks-gpu.md, else docs/)"
    )
    options = parser.parse_args(arguments)
    cuda = torch.cuda.is_available()
    if not cuda and not options.tiny:
        print(
            "bench-gpu: no GPU that torch can use. Test the code on the CPU with --tiny.",
            file=sys.stderr,
        )
        return 2
    page: Path = options.output or Path(os.environ.get("OUT") or ROOT / "docs") / "benchmarks-gpu.md"
    begin, failed = time.monotonic(), False
    names: list[str] = options.only or list(SUBJECTS)
    sections = {name: f"## {name}\n\n{NOT_MEASURED.capitalize()}.\n" for name in names}

    def write() -> None:
        page.write_text("\n".join([_format_introduction(), *sections.values()]), encoding="utf-8")

    with (
        tempfile.TemporaryDirectory(dir=options.checkpoints or page.parent) as folder,
        _limit_time(options.limit, folder, write),
    ):
        device = torch.device("cuda" if cuda else "cpu")
        bench = Bench(device, options.tiny, Path(folder), begin + options.seconds)
        for name in names:
            if bench.is_out_of_time():
                print(f"bench-gpu: {name}: {NOT_MEASURED}", file=sys.stderr, flush=True)
                continue
            print(f"bench-gpu: {name}", file=sys.stderr, flush=True)
            try:
                sections[name] = SUBJECTS[name](bench).to_markdown()
            except Exception as error:  # noqa: BLE001 - the other subjects are still measured
                failed = True
                first = str(error).partition("\n")[0]
                sections[name] = f"## {name}\n\nCould not be measured: {type(error).__name__}: {first}\n"
            free_memory(bench)
            write()
        write()
    print(page.read_text(encoding="utf-8"))
    return int(failed)


@contextmanager
def _limit_time(seconds: float, folder: str, write: Callable[[], None]) -> Iterator[None]:
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


def _format_introduction() -> str:
    other = import_accelerate()
    return INTRODUCTION.format(
        accelerate=f" and Accelerate {other.__version__}" if other else " (Accelerate is not installed)",
        gpu=torch.cuda.get_device_name(0)
        if torch.cuda.is_available()
        else "CPU, with tiny sizes: no measurement",
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        python=platform.python_version(),
    )


if __name__ == "__main__":
    sys.exit(main())
