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
This page lists when each feature was last tested on a GPU. `docs/gpu_page.py` generates it from the reports of
`make test-gpu`, which runs the tests marked `gpu`. A feature works if all of its tests that could run have passed. All other
tests run on the CPU, over gloo.

To run the tests on a machine with a GPU, in a source tree, with the installed torch:

```console
$ make test-gpu PYTHON=python3
$ python docs/gpu_page.py build/gpu-report.json
```

The run takes at most 8 minutes and needs no network. Its first line names missing packages. It writes into `build/`, or into
the directory in `OUT`.
"""


def features() -> list[str]:
    """Return the features that tests name, in the order of their files."""
    found = {}
    for path in sorted((ROOT / "tests" / "gpu").glob("test_*.py")):
        text, names = path.read_text(encoding="utf-8"), {}
        for line in text.splitlines():
            left, _, right = line.partition(" = ")
            if right.startswith('"') and left.replace(", ", "").isupper():
                values = [one.strip('"') for one in right.split('", "')]
                names |= dict(zip(left.split(", "), values, strict=True))
        for part in text.split("pytest.mark.feature(")[1:]:
            said = part.partition(")")[0]
            name = names.get(said) or said.strip('"')
            over = (
                [f"{name}, over gloo", f"{name}, over NCCL"] if path.stem == "test_two_processes" else [name]
            )
            found |= dict.fromkeys(over, True)
    return list(found)


def merged(kept: dict[str, Any], report: dict[str, Any]) -> dict[str, Any]:
    """Return what is kept of each feature, after one more report.

    Args:
        kept: By feature, `worked` and `failed`: where and when it was last seen to, or None.
        report: What a run of the tests has left.
    """
    where = {name: report[name] for name in ("date", "gpu", "gpus", "torch", "cuda", "python", "accel")}
    found = dict(kept)
    for name, own in report["features"].items():
        last = dict(found.get(name, {"worked": None, "failed": None}))
        if own["failed"]:
            last["failed"] = where | {"tests": sorted(own["failed"])}
        elif own["passed"]:
            last["worked"] = where | {"passed": len(own["passed"]), "skipped": len(own["skipped"])}
            last["failed"] = None
        if last["worked"] or last["failed"]:
            found[name] = last
    return found


def page(kept: dict[str, Any]) -> str:
    """Return the page."""
    rows = ["| Feature | Last success | Device |", "| --- | --- | --- |"]
    for name in features():
        own = kept.get(name, {"worked": None, "failed": None})
        worked, failed = own["worked"], own["failed"]
        when, on = "not yet run on a GPU", ""
        if worked:
            tests = f"{worked['passed']} tests" + (
                f", {worked['skipped']} skipped" if worked["skipped"] else ""
            )
            when, on = f"{worked['date']} ({tests})", place(worked)
        elif failed:
            when = "never"
        if failed:
            when += f"; failed on {failed['date']}: {', '.join(failed['tests'])}"
            on = on or place(failed)
        rows.append(f"| {name} | {when} | {on} |")
    return "\n".join([TITLE, TEXT, *rows, ""])


def place(own: dict[str, Any]) -> str:
    """Return on what a report was made."""
    return f"{own['gpus']} × {own['gpu']}, torch {own['torch']}, Python {own['python']}"  # noqa: RUF001


def main(arguments: list[str]) -> None:
    """Add reports, and write the page."""
    kept = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
    for path in arguments:
        report = json.loads(Path(path).read_text(encoding="utf-8"))
        if not report["gpus"]:
            sys.exit(
                f"{path} is the report of a machine without a GPU. Run make test-gpu on a machine with one."
            )
        kept = merged(kept, report)
    if arguments:
        KEPT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(kept), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
