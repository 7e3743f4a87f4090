"""The numbers of `docs/which-axis.md` are those of its commands."""

from __future__ import annotations

import json
import re
import shlex
from math import prod
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in (ROOT / "docs" / "which-axis.md").read_text(encoding="utf-8").splitlines()
    if "--devices" in line and line.startswith("|")
]


def read_sizes(layout):
    """Return the size of each axis in a cell; `auto` is not one."""
    return {axis: int(size) for axis, size in re.findall(r"`(\w+): (\d+)`", layout)}


def test_the_axes_of_a_row_multiply_to_its_devices():
    assert len(ROWS) == 10
    for *_, devices, layout, _, command in ROWS:
        count = int(devices.split()[0])
        assert f"--devices {count} --memory {devices.split()[2]}GB" in command
        assert prod(read_sizes(layout).values()) == count


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row[-1].split()[0].strip("`") + row[2], marks=[pytest.mark.full] * (index > 0))
        for index, row in enumerate(ROWS)
    ],
)
def test_a_row_is_what_its_command_prints(accel, row):
    pytest.importorskip("transformers")
    *_, devices, layout, memory, command = row
    model, *options = shlex.split(command.strip("`"))
    done = accel(
        "estimate", ROOT / "docs" / "models" / model, *options, "--mixed-precision", "bf16", "--batch-size", "1", "--json"
    )  # fmt: skip
    result, sizes = json.loads(done.stdout), read_sizes(layout)
    # Ranks of `cp` shard parameters too, and estimates have no axis for it.
    tensor, replicas = sizes.get("tp", 1), sizes.get("dp_replicate", 1)
    split = (replicas, int(devices.split()[0]) // replicas // tensor, tensor)
    found = next(
        other
        for other in result["layouts"]
        if (other["dp_replicate"], other["dp_shard"], other["tp"]) == split
        and other["fits"]
        and other["activation_checkpointing"] == ("checkpointing" in layout)
    )
    assert f"{found['bytes']['total'] / 1e9:.1f}" == memory.split(",")[0]
