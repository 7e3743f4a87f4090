"""Checkpoints in S3, through a proxy of faults: bit-equal to those of a directory whatever the network does, or an error.

The server is a real one (`support/object_stores/server.py`). Each rank has its own port of the proxy, so that a test can count what each
rank has read and written.
"""

from __future__ import annotations

import os

import pytest
import torch
from support.cases.pairs import pairwise_params
from support.object_stores.fault_proxy import Answer
from support.object_stores.faults import LASTING, PASSING
from support.object_stores.runs import connect, resume_and_train, start_run, train_and_save
from support.runs.recorded_runs import train_batch

from accel_runtime.storage.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("on_the_cpu", "by_value")

CASES = [(1, 2, False, True), (2, 1, True, False), (2, 4, True, True), (4, 2, False, False)]
"""The number of ranks before and after, if models are sharded, and if saves are in the background."""
EVERY = 13
"""With all faults at the same time, each has fewer requests than alone."""


def build_cases():
    """Return the cases above, and as `full` those that have each pair of all values."""
    sizes, both = [1, 2, 4], [False, True]
    factors = {"before": sizes, "after": sizes, "sharded": both, "background": both}
    pairs = [param.values for param in pairwise_params(factors) if not param.marks]
    return [
        pytest.param(
            case,
            id="-".join(map(str, case)),
            marks=[pytest.mark.slow] * (4 in case[:2]) + [pytest.mark.full] * (case not in CASES),
        )
        for case in dict.fromkeys([*CASES, *pairs])
    ]


def list_addresses(proxy, size):
    return [proxy.address(f"rank {rank}") for rank in range(size)]


@pytest.fixture(scope="module")
def in_directory(clusters, tmp_path_factory):
    """Return functions that return the results of the same runs with checkpoints in a directory."""
    results = {}

    def train(before, sharded):
        if (before, sharded) not in results:
            folder = str(tmp_path_factory.mktemp("saved") / "checkpoint")
            results[before, sharded] = (folder, clusters[before].run(train_and_save, folder, [], sharded))
        return results[before, sharded]

    def resume(before, after, sharded):
        key = (before, after, sharded)
        if key not in results:
            results[key] = clusters[after].run(resume_and_train, train(before, sharded)[0], [], sharded)
        return results[key]

    return lambda *key: train(*key)[1], resume


@pytest.mark.parametrize("case", build_cases())
def test_a_run_in_s3_equals_one_in_a_directory_with_all_faults_that_pass(
    clusters, s3_proxy, s3_url, in_directory, case
):
    before, after, sharded, in_background = case
    train, resume = in_directory
    expected_training, expected_rest = train(before, sharded), resume(before, after, sharded)
    url, addresses = f"{s3_url}/saved", list_addresses(s3_proxy, 4)
    for first, (kind, options) in enumerate(PASSING.values(), 1):
        s3_proxy.inject(kind, **{"first": first} | options | {"every": EVERY})
    assert (
        clusters[before].run(train_and_save, url, addresses, sharded, 2, in_background) == expected_training
    )
    faults = s3_proxy.count_faults()
    assert faults > 3
    assert clusters[after].run(resume_and_train, url, addresses, sharded) == expected_rest
    assert s3_proxy.count_faults() > faults


def save_with_failure(url, addresses, failing_ranks, on_error, in_background):
    """Save, save without success under the same name and a new one, and load the first; return the errors.

    Only the ranks whose requests fail have a short limit: another one must have the time to remove what it has written.
    """
    rank = int(os.environ.get("RANK", "0"))
    limits = {"retry_s": 0.5} if rank in failing_ranks else {}
    with start_run(addresses[0], 5, sharded=False) as run:
        run.accelerator.save_state(f"{url}/mine")
        saved = [each.detach().tolist() for each in run.model.parameters()]
        train_batch(run, next(iter(run.loader)))
        errors, paths = [], []
        with connect(run.accelerator, addresses[1], **limits):
            for name in ("mine", "new"):
                try:
                    paths.append(
                        run.accelerator.save_state(
                            f"{url}/{name}", async_save=in_background, on_error=on_error
                        )
                    )
                    run.accelerator.wait_for_checkpoint()
                except CheckpointError as error:
                    errors.append(str(error))
        with connect(run.accelerator, addresses[0]):
            run.accelerator.load_state(f"{url}/mine")
            names = run.accelerator._checkpoints._store.list(url) if rank == 0 else None
        assert [each.detach().tolist() for each in run.model.parameters()] == saved
        run.accelerator.backward(run.model(torch.ones(4, 3)).sum())  # training goes on
        run.optimizer.step()
        return errors, paths, names


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        ("503", "all", False),
        ("no answer", "one", True),
        ("expired", "one", False),
        ("denied", "all", True),
        pytest.param(("no answer", "all", False), marks=pytest.mark.full),
        pytest.param(("no bucket", "one", False), marks=pytest.mark.full),
    ],
    ids=lambda case: "-".join(map(str, case)),
)
def test_a_fault_that_lasts_is_one_error_with_a_cure_on_all_ranks_and_the_previous_checkpoint_is_kept(
    clusters, s3_proxy, s3_url, case
):
    """The fault is on all ranks, or on the second one."""
    fault, failing, in_background = case
    kind, cure = LASTING[fault]
    good, bad = ([s3_proxy.address(f"{name} {rank}") for rank in range(2)] for name in ("good", "bad"))
    failing_ranks = {"all": [0, 1], "one": [1]}[failing]
    for rank in failing_ranks:
        s3_proxy.inject(kind, client=f"bad {rank}")
    results = clusters[2].run(save_with_failure, s3_url, (good, bad), failing_ranks, "raise", in_background)
    errors = results[0][0]
    assert len(errors) == 2
    assert results[1][0] == errors
    for error in errors:
        assert cure in error, error
        assert s3_url in error
        assert len(error) < 900
    assert results[0][2] == [f"{s3_url}/mine"]


@pytest.mark.slow
@pytest.mark.parametrize("in_background", [False, True])
def test_a_failed_save_with_on_error_warn_is_a_warning_and_training_goes_on(
    clusters, s3_proxy, s3_url, in_background
):
    good, bad = ([s3_proxy.address(f"{name} {rank}") for rank in range(2)] for name in ("good", "bad"))
    s3_proxy.inject(Answer(), client="bad 1")
    for errors, paths, names in clusters[2].run(
        save_with_failure, s3_url, (good, bad), [1], "warn", in_background
    ):
        assert errors == []
        assert paths == ([f"{s3_url}/mine", f"{s3_url}/new"] if in_background else ["", ""])
        assert names in ([f"{s3_url}/mine"], None)
