"""`make proof`: run the parts, and write their records and `docs/proof.md`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import cast

from proof import Options, Part, write_record
from proof.page import NAMES, write_pages


def main() -> None:
    """Run the chosen parts."""
    parser = argparse.ArgumentParser(prog="python -m proof", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"run only these: {', '.join(NAMES)}")
    parser.add_argument(
        "--render", action="store_true", help="write the page from the records, and measure nothing"
    )
    parser.add_argument(
        "--minutes", type=float, default=30, help="time of the kills and of the soak, each (default 30)"
    )
    parser.add_argument("--scripts", type=Path, help="a folder with the repositories of public scripts")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(NAMES):
        parser.error(f"Unknown part: {', '.join(sorted(unknown))}. Choose from {', '.join(NAMES)}.")
    for name in () if args.render else args.parts or NAMES:
        print(f"proof: {name}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix=f"proof-{name}-") as folder:
            write_record(
                name,
                cast("Part", import_module(f"proof.{name}")).run(
                    Options(args.minutes * 60, args.scripts, Path(folder))
                ),
            )
    write_pages()


if __name__ == "__main__":
    main()
