"""Runs that save to S3 are killed at random moments: nothing is torn, nothing is lost, and leftovers are removed.

Ranks are killed at a request or after a time, within saves, retention and replacements of a fixed name. The next run goes on
with what is there.
"""

from __future__ import annotations

import random
import time
from contextlib import closing

import pytest
from support.object_stores.killed_saves import (
    LEFTOVER_AGE_S,
    PRELOADED,
    Place,
    check_checkpoints,
    inject_kill,
    list_leftovers,
)
from support.object_stores.runs import open_objects
from support.processes.ranks import Cluster, preload
from support.runs.killed_saves import run_until_killed

pytestmark = pytest.mark.usefixtures("on_the_cpu")


@pytest.fixture
def cluster(clusters, size):
    """Return ranks in processes of their own, one too: a fork of this process would have the threads of the proxy."""
    preload([clusters[size]] if size > 1 else [], *PRELOADED)
    if size > 1:
        yield clusters[size]
        return
    with closing(Cluster(1)) as own:
        yield own


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("count", "size"),
    [
        pytest.param(10, 1, id="10 kills of one rank"),
        pytest.param(10, 2, id="10 kills of two ranks", marks=pytest.mark.slow),
        *(
            pytest.param(50, size, id=f"50 kills of {size} ranks", marks=pytest.mark.full)
            for size in (1, 2, 3, 4)
        ),
    ],
)
def test_after_each_kill_every_checkpoint_verifies_and_the_newest_saved_one_is_there(  # noqa: PLR0913, PLR0917
    cluster, s3_server, s3_proxy, s3_url, tmp_path, count, size
):
    """In CI the kills are the same each time; elsewhere a failure names the seed."""
    seed = size if count == 10 else random.SystemRandom().randrange(1 << 32)
    chance, newest = random.Random(seed), {}
    addresses = [s3_proxy.address(f"rank {rank}") for rank in range(size)]
    with open_objects(s3_server.address) as store:
        for number in range(count):
            kind = chance.choice(["numbered", "named", "in the background"])
            folder = "named" if kind == "named" else "numbered"
            place = Place(kind, f"{s3_url}/{folder}", addresses, tmp_path / "ranks")
            options, _ = inject_kill(s3_proxy, place, chance)
            before, note = newest.get(folder, 0), f"seed {seed}, kill {number}, {kind}, {options}"
            killed = run_until_killed(cluster, place.start, place.folder, **options)
            assert killed.loaded is None or killed.loaded >= before, f"{note}: lost, loaded {killed.loaded}"
            found = check_checkpoints(store, place)
            assert found >= max([before, *killed.saved]), f"{note}: lost, found {found}"
            newest[folder] = found
    s3_proxy.clear()
    time.sleep(2 * LEFTOVER_AGE_S)
    for folder, step in newest.items():
        place = Place(folder, f"{s3_url}/{folder}", addresses, tmp_path / "ranks")
        assert all(loaded >= step for loaded in cluster.run(place.save_three_times))
        assert list_leftovers(s3_server, place.url, folder) == []
