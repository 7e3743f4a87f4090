"""Summarize the pages of the benchmarks in one table and one sentence."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.report import NONE, format_table

__all__ = ["DOCS", "headline_speed", "summarize"]

DOCS = Path(__file__).resolve().parents[1] / "docs"
_SUMMARY = """\
On {machine}, on {date}, beside Accelerate {accelerate} ([all benchmarks](benchmarks.md)). A small step is one of `Linear(4, 4)`
with SGD and a schedule. It is CPU time of the training thread, and `+` is what a library or its launcher adds; on 2
processes, a library is compared with DDP in the same processes.

{table}

On one {gpu} with torch {gpu_torch}, on {gpu_date} ([all benchmarks](benchmarks-gpu.md)): a step under bf16 takes {resnet} of
the time with bare torch for a ResNet, and {transformer} for a transformer of a billion parameters. Launching a small step
takes {added} µs more CPU time than with bare torch, and {other} µs with Accelerate.
"""
_INTRODUCTION = re.compile(
    r"Accelerate (?P<accelerate>\S+)\. .*This run\nwas on (?P<date>\S+), on (?P<machine>[^\n]+)\.\n",
    re.DOTALL,
)
_GPU_INTRODUCTION = re.compile(
    r"^(?P<gpu_date>[\d-]+), (?P<gpu>.+), torch (?P<gpu_torch>\S+), ", re.MULTILINE
)


def summarize() -> str:
    """Return the table and the sentence, for a page of the documentation."""
    text, gpu = ((DOCS / name).read_text(encoding="utf-8") for name in ("benchmarks.md", "benchmarks-gpu.md"))
    medians = _read_medians(gpu)
    return _SUMMARY.format(
        table=format_table(("", "no library", "accel", "Accelerate"), _build_rows(_read_medians(text))),
        resnet=medians["ResNet, bf16: accel"][1],
        transformer=medians["transformer of a billion, bf16: accel"][1],
        added=medians["small step: accel"][2],
        other=medians["small step: Accelerate"][2],
        **next(_INTRODUCTION.finditer(text)).groupdict(),
        **next(_GPU_INTRODUCTION.finditer(gpu)).groupdict(),
    )


def headline_speed() -> tuple[str, str]:
    """Return the time that accel adds to a step, and a sentence with that of Accelerate."""
    medians = _read_medians((DOCS / "benchmarks.md").read_text(encoding="utf-8"))
    bare, _, accelerate, _, accel = medians["1 process, step"]
    return (
        f"{accel} µs",
        f"of CPU time added to a step of {bare} µs under `accel launch`, on one process; Accelerate adds {accelerate} µs",
    )


def _read_medians(page: str) -> dict[str, list[str]]:
    """Return the cells of the rows of a page's tables by their label."""
    rows = (line[2:-2].split(" | ") for line in page.splitlines() if line.startswith("| "))
    return {label: [cell.strip("*") for cell in cells] for label, *cells in rows}


def _build_rows(medians: dict[str, list[str]]) -> list[tuple[str, ...]]:
    def format_added(added: str) -> str:
        return f"{added} µs" if added.startswith("-") else f"+{added} µs"

    rows = []
    for title, setting, launcher in (
        ("small step, 1 process", "1 process, step", "python"),
        ("small step with a batch of a loader, 1 process", "1 process, step with a loader", "python"),
        ("small step of DDP, 2 processes", "2 processes, step", "torchrun"),
    ):
        bare, *added = medians[setting]
        accel, other, plain, launched = map(format_added, added)
        rows.append((f"{title}, `{launcher}`", f"{bare} µs", accel, other))
        rows.append((f"{title}, `accel launch`", plain, launched, NONE))
    tensors, stream = medians["2 processes, 20 tensors"], medians["stream"]
    memory, _, torchruns_memory = medians["memory of 8 ranks and their launcher, MiB"]
    return [
        *rows,
        (
            "`gather` of 20 small tensors, 2 processes, `torchrun`",
            *(f"{time} ms" for time in tensors[:3]),
        ),
        (
            "resume after 100 000 batches of a stream, 1 process, `python`",
            NONE,
            *(f"{time} ms" for time in (stream[0], stream[2])),
        ),
        (
            "memory of 8 processes of DDP, no library, `torchrun` and `accel launch`",
            f"{torchruns_memory} MiB",
            f"{memory} MiB",
            NONE,
        ),
    ]
