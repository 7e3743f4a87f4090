"""Measure saving and loading of a training state in S3, beside `aws s3 cp` of the same files."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.bench import SCRIPTS, Bench
from benchmarks.report import Table, format_median, format_ratio

__all__ = ["measure_object_store"]

_TEXT = """\
Seconds of wall time on one process for a state of {gigabytes:.2f} GB, a model with AdamW of {millions} million parameters, in
an S3 server on this machine ({server}, objects in memory). `aws s3 cp --recursive` of awscli {aws} copies the same files, less
the time of `aws s3 ls`. accel hashes every byte of a save, verifies every byte of a load, and waits until each object is confirmed."""
_HEADER = ("", "seconds", "MB/s", "`aws s3 cp` ÷ it")
_MILLIONS = 80
_TESTS = Path(__file__).parents[1] / "tests"


def measure_object_store(bench: Bench) -> Table:
    """Measure seconds of a save and of a load."""
    sys.path.append(str(_TESTS))
    services = importlib.import_module("support.processes.services")
    support = importlib.import_module("support.object_stores.server")

    commands = _make_aws_environment(bench.cwd)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        services.prepare_service("Ceph")
        server = support.CephServer(Path(folder) / "server").start()
        os.environ.update(support.client_variables(server.address))
        # Services without the newer checksums refuse them.
        os.environ["AWS_REQUEST_CHECKSUM_CALCULATION"] = "when_required"
        os.environ["AWS_RESPONSE_CHECKSUM_VALIDATION"] = "when_required"
        try:
            seconds, size = _measure_rounds(bench, commands / "aws", server, Path(folder) / "saved")
        finally:
            server.close()
    version = bench.command(str(commands / "aws"), "--version")().output.split()[0].partition("/")[2]
    text = _TEXT.format(
        gigabytes=size / 1e9,
        millions=_MILLIONS,
        server=type(server).__name__.removesuffix("Server"),
        aws=version,
    )
    return Table("Checkpoints in S3", text, _HEADER, _build_rows(seconds, size))


def _measure_rounds(
    bench: Bench, aws: Path, server: object, folder: Path
) -> tuple[dict[str, list[float]], int]:
    """Return the seconds of each operation, and the bytes of a checkpoint."""
    seconds: dict[str, list[float]] = {}
    size = 0
    for number in range(bench.half + 1):
        bucket = f"s3://{server.create_bucket()}"  # type: ignore[attr-defined]
        script = str(SCRIPTS / "object_store.py")
        run = bench.command(f"{bench.accel}/python", script, str(_MILLIONS), str(folder), f"{bucket}/accel")()
        saved = json.loads(run.output)[f"{bucket}/accel"]
        size = sum(path.stat().st_size for path in (folder / "0").rglob("*") if path.is_file())
        start = _time(aws, "s3", "ls", f"{bucket}/nothing/", check=False)
        copied = {
            "upload": _time(aws, "s3", "cp", "--recursive", "--quiet", str(folder / "0"), f"{bucket}/aws"),
            "download": _time(
                aws, "s3", "cp", "--recursive", "--quiet", f"{bucket}/aws", str(folder / "copy")
            ),
        }
        shutil.rmtree(folder)
        _time(aws, "s3", "rb", "--force", bucket)
        time.sleep(5)  # the server frees the memory of removed objects
        if number:  # the first round does not count
            values = {name: [value - start] for name, value in copied.items()} | saved
            seconds = {name: seconds.get(name, []) + each for name, each in values.items()}
    return seconds, size


def _build_rows(seconds: dict[str, list[float]], size: int) -> Sequence[tuple[str, ...]]:
    rows = (
        ("`aws s3 cp` to S3", "upload", "upload"),
        ("accel saves", "save", "upload"),
        ("`aws s3 cp` from S3", "download", "download"),
        ("accel loads", "load", "download"),
    )
    return [
        (
            label,
            format_median(seconds[name]),
            format_median([size / each / 1e6 for each in seconds[name]]),
            format_ratio(seconds[other], seconds[name]),
        )
        for label, name, other in rows
    ]


def _time(*command: str | Path, check: bool = True) -> float:
    start = time.perf_counter()
    subprocess.run([str(each) for each in command], check=check, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def _make_aws_environment(folder: Path) -> Path:
    """Return the folder of commands of a new environment with awscli, whose requirements exclude those of others."""
    environment = folder / "aws"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet", "awscli"]
    subprocess.run(pip, check=True)
    return environment / "bin"
