"""Loading from S3: each rank reads what it needs, counted by the proxy, and no rank writes a local file."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from support.runs.recorded_runs import Script, train_batch
from support.s3.runs import build_script, start_run
from torch import nn

pytestmark = pytest.mark.usefixtures("on_the_cpu", "by_value")

WIDTH = 512
PARAMETERS = 4 * WIDTH * WIDTH
STATE_BYTES = 3 * 4 * PARAMETERS
"""Weights and two moments, of 32 bits."""
OTHER_BYTES = 150_000
"""Biases, the first and the last layer, manifests, headers and random states of all ranks."""


def build_model():
    layers = [nn.Linear(3, WIDTH, bias=False), *(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1, bias=False))


def build_wide_script():
    script = build_script()
    return Script(**{**vars(script), "model": build_model})


def save(url, addresses, sharded):
    with start_run(addresses, 5, sharded=sharded, script=build_wide_script()) as run:
        train_batch(run, next(iter(run.loader)))
        run.accelerator.save_state(url)
        return sum(parameter.sum().item() for parameter in run.model.parameters()) if not sharded else None


def load(url, addresses, sharded):
    """Load, and return the files that were created meanwhile in the temporary and in the working directory."""

    def list_files():
        return {
            each.name
            for folder in (temporary, Path.cwd())
            for each in folder.iterdir()
            if "accel" in each.name
        }

    # Other processes of this machine write into the one that all share.
    temporary = Path(tempfile.mkdtemp())
    tempfile.tempdir = str(temporary)
    with start_run(addresses, 77, sharded=sharded, script=build_wide_script()) as run:
        before = list_files()
        run.accelerator.load_state(url)
        tempfile.tempdir = None
        return list_files() - before


CASES = [(1, 2, False), (2, 1, False), (2, 2, True), (1, 2, True)]
"""The number of ranks before and after, and if models are sharded."""


@pytest.mark.smoke
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_a_rank_reads_its_state_once_and_writes_no_file(clusters, s3_proxy, s3_url, case):
    """A sharded rank reads its shards if they were saved as such, otherwise the tensors that contain them, which have checksums."""
    before, after, sharded = case
    addresses = [s3_proxy.address(f"rank {rank}") for rank in range(2)]
    clusters[before].run(save, f"{s3_url}/saved", addresses, sharded)
    for rank in range(before):  # each writes its share
        assert s3_proxy.bytes_written(f"rank {rank}") <= STATE_BYTES / before + OTHER_BYTES
    s3_proxy.forget()
    assert clusters[after].run(load, f"{s3_url}/saved", addresses, sharded) == [set()] * after
    needed = STATE_BYTES / after if sharded and before == after else STATE_BYTES
    for rank in range(after):
        assert needed <= s3_proxy.bytes_read(f"rank {rank}") <= needed + OTHER_BYTES
