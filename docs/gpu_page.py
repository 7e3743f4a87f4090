"""Write docs/gpu.md from docs/gpu-report.json: for each feature, when and on which device its tests last passed.

Run `python docs/gpu_page.py`. To add the report of a run of `make test-gpu`, run
`python docs/gpu_page.py build/gpu-report.json`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "docs" / "gpu-report.json"
PAGE = ROOT / "docs" / "gpu.md"
TITLE = "# Tests on a GPU\n"
TEXT = """\
When each feature was last tested on a GPU, by the tests marked `gpu`; all others run on the CPU, over gloo. A feature works if all of its tests that
could run have passed. To run them on a machine with a GPU, in a source tree, with the installed torch, and to add the report to this page:

```console
$ make test-gpu PYTHON=python3
$ python docs/gpu_page.py build/gpu-report.json
```

The run takes at most 8 minutes and needs no network. It writes into `build/`, or into the directory in `OUT`.
"""


def list_features() -> list[str]:
    """Return the features that tests name, in the order of their files."""
    features = {}
    for path in sorted((ROOT / "tests" / "gpu").glob("test_*.py")):
        text, names = path.read_text(encoding="utf-8"), {}
        for line in text.splitlines():
            left, _, right = line.partition(" = ")
            if right.startswith('"') and left.replace(", ", "").isupper():
                values = [value.strip('"') for value in right.split('", "')]
                names |= dict(zip(left.split(", "), values, strict=True))
        for part in text.split("pytest.mark.feature(")[1:]:
            argument = part.partition(")")[0]
            name = names.get(argument) or argument.strip('"')
            variants = (
                [f"{name}, over gloo", f"{name}, over NCCL"] if path.stem == "test_two_processes" else [name]
            )
            features |= dict.fromkeys(variants, True)
    return list(features)


def merge_report(kept: dict[str, Any], report: dict[str, Any]) -> dict[str, Any]:
    """Return the last success and failure of each feature, after one more report.

    Args:
        kept: By feature, `worked` and `failed`: the device, versions and date of the last run that did, or None.
        report: The report of a run of the tests.
    """
    run = {name: report[name] for name in ("date", "gpu", "gpus", "torch", "cuda", "python", "accel")}
    merged = dict(kept)
    for name, tests in report["features"].items():
        last = dict(merged.get(name, {"worked": None, "failed": None}))
        if tests["failed"]:
            last["failed"] = run | {"tests": sorted(tests["failed"])}
        elif tests["passed"]:
            last["worked"] = run | {"passed": len(tests["passed"]), "skipped": len(tests["skipped"])}
            last["failed"] = None
        if last["worked"] or last["failed"]:
            merged[name] = last
    return merged


def render_page(kept: dict[str, Any]) -> str:
    """Return the page."""
    rows = ["| Feature | Last success | Machine |", "| --- | --- | ---: |"]
    machines: dict[str, int] = {}
    for name in list_features():
        last = kept.get(name, {"worked": None, "failed": None})
        worked, failed = last["worked"], last["failed"]
        when, machine = "not yet run on a GPU", ""
        if worked:
            tests = f"{worked['passed']} tests" + (
                f", {worked['skipped']} skipped" if worked["skipped"] else ""
            )
            when, machine = f"{worked['date']} ({tests})", describe_machine(worked)
        elif failed:
            when = "never"
        if failed:
            when += f"; failed on {failed['date']}: {', '.join(failed['tests'])}"
            machine = machine or describe_machine(failed)
        number = machines.setdefault(machine, len(machines) + 1) if machine else ""
        rows.append(f"| {name} | {when} | {number} |")
    found = [f"\nMachine {number}: {machine}." for machine, number in machines.items()]
    return "\n".join([TITLE, TEXT, *rows, *found, ""])


def describe_machine(run: dict[str, Any]) -> str:
    """Return the devices and versions of a run of the tests."""
    return f"{run['gpus']} × {run['gpu']}, torch {run['torch']}, Python {run['python']}"  # noqa: RUF001


def main(arguments: list[str]) -> None:
    """Add reports, and write the page."""
    kept = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
    for path in arguments:
        report = json.loads(Path(path).read_text(encoding="utf-8"))
        if not report["gpus"]:
            sys.exit(
                f"{path} is the report of a machine without a GPU. Run make test-gpu on a machine with one."
            )
        kept = merge_report(kept, report)
    if arguments:
        KEPT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(render_page(kept), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
