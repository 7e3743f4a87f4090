"""`make test-gpu`: run the tests marked `gpu` with the installed torch, from a source tree.

Files are written below `$OUT`, or `build/`. A JSON report lists the results by feature; `docs/gpu_page.py` reads it.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("torch", "numpy", "pytest", "cloudpickle", "safetensors", "xxhash", "typing_extensions")
FOR_COMMANDS = ("platformdirs", "pydantic", "questionary", "rich", "typer", "yaml")
OLDEST_TORCH = (2, 9)
SECONDS = 480
"""Time limit of the run; a test is skipped if its own limit exceeds the time left, less half a minute."""


def find_missing(names):
    """Return the names that cannot be imported."""
    return [name for name in names if find_spec(name) is None]


def is_old(version):
    """Return whether a version of torch is older than accel supports."""
    return tuple(int(part) for part in version.split(".")[:2]) < OLDEST_TORCH


def main(arguments):
    """Run the tests, print a summary; return pytest's exit code, or 2 if they cannot run."""
    if absent := find_missing(NEEDED):
        print(f"test-gpu: Cannot run: not installed: {', '.join(absent)}. Install them for {sys.executable}.")
        return 2
    if is_old(version := importlib.metadata.version("torch")):
        print(
            f"test-gpu: Cannot run: torch is {version}. Install torch {'.'.join(map(str, OLDEST_TORCH))} or newer."
        )
        return 2
    if absent := find_missing(FOR_COMMANDS):
        print(f"test-gpu: tests of commands are skipped: not installed: {', '.join(absent)}")
    out = Path(os.environ.get("OUT") or ROOT / "build").resolve()
    scratch, report = out / "gpu-scratch", out / "gpu-report.json"
    scratch.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    environ = os.environ | {
        "GPU_TESTS_REPORT": str(report),
        "GPU_TESTS_S": str(SECONDS - 30),
        # Outside of the source tree; without a cache, each of the many processes compiles torch's sources again.
        "PYTHONPYCACHEPREFIX": str(scratch / "bytecode"),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
        "TRITON_CACHE_DIR": str(scratch / "triton"),
    }
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/gpu",
        "-m",
        "gpu",
        "-W",
        "default",
        "-p",
        "no:cacheprovider",
    ]
    command += [f"--basetemp={scratch / 'pytest'}", "-q", "--durations=10", *arguments]
    # In a new session, so that the processes of tests can be killed with it.
    process = subprocess.Popen(command, cwd=ROOT, env=environ, start_new_session=True)
    try:
        code = process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        print(f"test-gpu: stopped after {SECONDS} s")
        code = 1
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    shutil.rmtree(scratch, ignore_errors=True)
    if report.exists():
        print(format_summary(json.loads(report.read_text(encoding="utf-8"))))
        print(f"The report is {report}. Run python docs/gpu_page.py {report} to update docs/gpu.md.")
    return code


def format_summary(report):
    """Return a line for each feature, and the failures."""
    lines = [f"\n{report['gpus']} x {report['gpu']}, torch {report['torch']}, Python {report['python']}"]
    for name, results in report["features"].items():
        counts = ", ".join(
            f"{len(results[kind])} {kind}" for kind in ("passed", "failed", "skipped") if results[kind]
        )
        lines.append(f"{name:45} {counts}")
    failed = [pair for results in report["features"].values() for pair in results["failed"].items()]
    lines += [f"FAILED {name}: {message.splitlines()[0][:300]}" for name, message in failed]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
