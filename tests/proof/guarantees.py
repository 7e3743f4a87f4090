"""Break what each promise is about, and see the tests of `make test` fail: the mutations of `tests/promises.py`."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mutations import MUTATIONS, check, copy_repository
from promises import GUARANTEES, PROMISES
from proof import Options, format_table

TITLE = "Each promise, its test and the mutation that breaks it"


def run(options: Options) -> dict[str, Any]:
    """Apply the mutation of each promise in a copy of the repository, run its tests, and record what they noticed."""
    by_name = {mutation.name: mutation for mutation in MUTATIONS}
    documented = {promise.name for promise in GUARANTEES}
    rows = []
    with tempfile.TemporaryDirectory(dir=options.folder) as copy:
        copy_repository(Path(copy))
        for promise in PROMISES:
            start = time.monotonic()
            problem = check(by_name[promise.mutation], Path(copy))
            rows.append(
                {
                    "promise": promise.name,
                    "documented": promise.name in documented,
                    "tests": len(promise.tests),
                    "test": by_name[promise.mutation].tests[0],
                    "mutation": promise.mutation,
                    "target": by_name[promise.mutation].target,
                    "seconds": round(time.monotonic() - start, 1),
                    "problem": problem,
                }
            )
    return {"promises": rows}


def render(results: Mapping[str, Any]) -> str:
    """Return the method and a row for each promise."""
    rows = results["promises"]
    table = format_table(
        ("promise", "test that notices it", "mutation"),
        [
            (
                f"**{row['promise']}**" if row["documented"] else row["promise"],
                f"`{row['test'].rpartition('/')[2].partition('[')[0].partition('::')[2]}`",
                f"`{row['target'].rpartition(':')[2]}`: {row['mutation']}",
            )
            for row in rows
        ],
    )
    failed = "".join(f"- {row['problem']}\n" for row in rows if row["problem"])
    noticed, number = _count(results)
    return (
        "A mutation breaks the function that it names, in a copy of the repository. The tests of the promise, which `make test` "
        f"runs, pass before and must fail after it: {noticed} of {number} mutations were noticed. Promises in bold are those of "
        f"[the guarantees](guarantees.md#guarantees).\n\n{table}\n\n{failed}"
    )


def headline(results: Mapping[str, Any]) -> tuple[str, str]:
    """Return how many promises have tests that notice when the code is broken."""
    noticed, number = _count(results)
    return f"{noticed} of {number}", "promises have a test that fails when the code is broken"


def _count(results: Mapping[str, Any]) -> tuple[int, int]:
    rows = results["promises"]
    return sum(not row["problem"] for row in rows), len(rows)
