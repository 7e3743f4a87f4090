"""Runs that save to S3 are killed at random moments: nothing is torn, nothing is lost, and leftovers are removed.

Ranks are killed at a request or after a time, within saves, retention and replacements of a fixed name. The next run goes on
with what is there.
"""

from __future__ import annotations

import random
import time

import pytest
from support.object_stores.kills import (
    LEFTOVER_AGE_S,
    Attempt,
    Kill,
    check_checkpoints,
    list_leftovers,
    run_until_killed,
)
from support.object_stores.runs import open_objects

pytestmark = pytest.mark.usefixtures("on_the_cpu", "by_value")


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("count", "sizes"),
    [
        pytest.param(10, (1,), id="10 kills of one rank"),
        pytest.param(10, (2,), id="10 kills of two ranks", marks=pytest.mark.slow),
        *(
            pytest.param(
                20, (1, 2, 3, 4), id=f"20 kills of one to four ranks, {part}", marks=pytest.mark.full
            )
            for part in range(10)
        ),
    ],
)
def test_after_each_kill_every_checkpoint_verifies_and_the_newest_saved_one_is_there(
    s3_server, s3_proxy, s3_url, count, sizes
):
    """In CI the kills are the same each time; elsewhere a failure names the seed."""
    seed = sizes[0] if count < 20 else random.SystemRandom().randrange(1 << 32)
    source, newest = random.Random(seed), {}
    with open_objects(s3_server.address) as store:
        for number in range(count):
            kill = Kill.choose(source, sizes)
            before = newest.get(kill.folder, 0)
            loaded, saved = run_until_killed(s3_proxy, s3_url, kill, source)
            note = (
                f"seed {seed}, kill {number}, {kill}, newest before {before}, loaded {loaded}, saved {saved}"
            )
            assert all(step >= before for step in loaded), note
            found = check_checkpoints(store, s3_url, kill.folder)
            assert found >= max([before, *saved]), f"{note}: lost, found {found}"
            newest[kill.folder] = found
    time.sleep(2 * LEFTOVER_AGE_S)
    for folder, step in newest.items():
        s3_proxy.clear()
        kind, _, size = folder.partition("-")
        with Attempt(s3_proxy, f"{s3_url}/{folder}", kind, int(size), count=3) as attempt:
            for process in attempt.processes:
                attempt.wait(process)
        assert attempt.find_steps("loaded") >= [step], attempt.lines
        assert len(attempt.find_steps("saved")) == 3, attempt.lines
        assert list_leftovers(s3_server, s3_url, folder) == []
