"""The picture of docs/elastic.md: the losses of one training on changing numbers of processes, which lie on each other.

python docs/elastic_picture.py [FILE]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from accel_runtime.environment.settings import HOME

__all__ = ["main"]

FILE = Path(__file__).parent / "img" / "elastic.svg"
EXAMPLE = Path(__file__).parent.parent / "examples" / "elastic.py"
RUNS = {"1": (1,), "4, 3, 1": (4, 3, 1), "2, 4, 3": (2, 4, 3)}
"""Numbers of processes of each training; they change after every `STEPS` optimizer steps."""
STEPS = 18
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 720, 320, 48, 36, 16
COLOURS, WIDTHS, DASHES = ("#9ec5fe", "#e8590c", "#212529"), (9, 4, 1.5), ("", "", "4 4")


def train(folder: Path, name: str, numbers: tuple[int, ...]) -> list[dict[str, float]]:
    """Train on each number of processes in turn, and return the records of the optimizer steps."""
    losses = folder / f"{name}.jsonl"
    environ = {**os.environ, HOME: str(folder / "home"), "CUDA_VISIBLE_DEVICES": ""}
    for part, number in enumerate(numbers, 1):
        stop = [] if part == len(numbers) else ["--stop-after", str(part * STEPS)]
        options = ["--cpu", "--nproc-per-node", str(number), "--resume"]
        script = [str(EXAMPLE), "--losses", str(losses), "--project-dir", str(folder / name), *stop]
        subprocess.run(
            [sys.executable, "-m", "accel_cli", "launch", *options, *script],
            cwd=folder,
            env=environ,
            check=True,
        )
    return [json.loads(line) for line in losses.read_text(encoding="utf-8").splitlines()]


def draw(runs: dict[str, list[dict[str, float]]]) -> str:
    """Return the picture of the losses of some trainings, as SVG."""
    highest = max(each["loss"] for records in runs.values() for each in records)
    last = max(each["step"] for records in runs.values() for each in records)

    def place(step: float, loss: float) -> str:
        x = LEFT + (WIDTH - LEFT - 12) * step / last
        y = TOP + (HEIGHT - TOP - BOTTOM) * (1 - loss / highest)
        return f"{x:.1f},{y:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-family="sans-serif" font-size="13">',
        "<title>Losses of three trainings on different numbers of processes</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for step in range(0, int(last) + 1, STEPS):
        at = place(step, 0).split(",")[0]
        parts += [
            f'<line x1="{at}" x2="{at}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#dee2e6"/>',
            f'<text x="{at}" y="{HEIGHT - 14}" text-anchor="middle" fill="#495057">{step}</text>',
        ]
    for loss in range(int(highest) + 1):
        y = place(0, loss).split(",")[1]
        parts.append(f'<text x="{LEFT - 10}" y="{y}" text-anchor="end" fill="#495057">{loss}</text>')
    for number, (name, records) in enumerate(runs.items()):
        points = " ".join(place(each["step"], each["loss"]) for each in records)
        style = (
            f'stroke="{COLOURS[number]}" stroke-width="{WIDTHS[number]}" stroke-dasharray="{DASHES[number]}"'
        )
        y = TOP + 20 + 22 * number
        parts += [
            f'<polyline points="{points}" fill="none" {style}/>',
            f'<line x1="{WIDTH - 236}" x2="{WIDTH - 196}" y1="{y - 4}" y2="{y - 4}" {style}/>',
            f'<text x="{WIDTH - 186}" y="{y}" fill="#212529">processes: {name}</text>',
        ]
    parts.append(
        f'<text x="{WIDTH - 12}" y="{HEIGHT - 2}" text-anchor="end" fill="#495057">optimizer step</text></svg>'
    )
    return "\n".join(parts) + "\n"


def main(arguments: list[str]) -> None:
    """Write the picture to the file named, or where the docs have it."""
    target = Path(arguments[0]) if arguments else FILE
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            name: train(Path(folder), f"run_{number}", sizes)
            for number, (name, sizes) in enumerate(RUNS.items())
        }
    first, *others = runs.values()
    for records in others:
        differences = [abs(a["loss"] / b["loss"] - 1) for a, b in zip(records, first, strict=True)]
        print(f"largest relative difference of {len(first)} losses: {max(differences):.1e}")
    target.write_text(draw(runs), encoding="utf-8")
    print(f"{target} is written")


if __name__ == "__main__":
    main(sys.argv[1:])
