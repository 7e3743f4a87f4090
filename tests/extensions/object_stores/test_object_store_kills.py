"""Runs that save to S3 are killed at random moments: nothing is torn, nothing is lost, and leftovers are removed.

Ranks are killed at a request or after a time, within saves, retention and replacements of a fixed name. The next run goes on
with what is there.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import cloudpickle
import pytest
from runtime.checkpoint import test_faults
from runtime.checkpoint.test_faults import run_until_killed
from support.object_stores.fault_proxy import Hook, Reset
from support.object_stores.runs import connect, open_objects, set_client
from support.processes.ranks import Cluster, preload
from support.runs.file_system import Run

from accel_runtime.storage.errors import AbsentError
from accel_runtime.storage.manifest import NAME
from accel_runtime.storage.store import list_numbered
from accel_runtime.storage.verification import verify_files

pytestmark = pytest.mark.usefixtures("on_the_cpu", "by_value")
cloudpickle.register_pickle_by_value(test_faults)

KEPT = 2
"""Numbered checkpoints that are kept."""
LEFTOVER_AGE_S = 0.2
MAX_REQUESTS = 70
"""Requests until a kill, of all ranks: a start with two saves or more."""
PRELOADED = ("support.runs.file_system", "accel_runtime.extensions.object_stores.client_process")
"""What every rank would import again after a kill."""


@dataclass(frozen=True)
class Place:
    """Saves of one kind to S3.

    Attributes:
        kind: "numbered", "named", or "in the background" (numbered too).
        url: The project, of one world size, since checkpoints contain state of each rank.
        addresses: The address of the proxy for each rank.
        pids: A folder for the process ids of the ranks.
    """

    kind: str
    url: str
    addresses: list[str]
    pids: Path

    @property
    def target(self):
        return f"{self.url}/mine" if self.kind == "named" else None

    @contextmanager
    def start(self):
        """Return a run on this rank, the target of its saves, and if they are in the background."""
        rank = int(os.environ.get("RANK", "0"))
        (self.pids / str(rank)).write_text(str(os.getpid()))
        # With two ranks, of a launcher that names runs: saves of killed processes are removed at once.
        name = {"launch": "tests"} if len(self.addresses) == 2 else None
        with set_client(self.addresses[rank]):
            run = Run(self.url, automatic=self.target is None, total_limit=None if self.target else KEPT)
        with connect(run.acc, self.addresses, leftover_age_s=LEFTOVER_AGE_S, run=name):
            yield run, self.target, self.kind == "in the background"

    def save_three_times(self):
        """Load and save; return the step that was loaded."""
        with self.start() as (run, target, in_background):
            loaded = run.load(target)
            for step in range(3):
                assert run.save(loaded + 1 + step, target, in_background=in_background) is None
            return loaded

    def kill(self, chosen):
        """Kill ranks; None: all."""
        for path in self.pids.iterdir():
            if chosen in {None, int(path.name)}:
                with suppress(ProcessLookupError, ValueError):
                    os.kill(int(path.read_text()), signal.SIGKILL)


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
    (tmp_path / "pids").mkdir()
    with open_objects(s3_server.address) as store:
        for number in range(count):
            kind = chance.choice(["numbered", "named", "in the background"])
            folder = "named" if kind == "named" else "numbered"
            place = Place(kind, f"{s3_url}/{folder}", addresses, tmp_path / "pids")
            options = inject_kill(s3_proxy, place, chance)
            before, note = newest.get(folder, 0), f"seed {seed}, kill {number}, {kind}, {options}"
            steps = run_until_killed(cluster, place.start, tmp_path / "log", before, **options)
            found = check_checkpoints(store, place)
            assert found >= max([before, *steps]), f"{note}: lost, found {found}"
            newest[folder] = found
    s3_proxy.clear()
    time.sleep(2 * LEFTOVER_AGE_S)
    for folder, step in newest.items():
        place = Place(folder, f"{s3_url}/{folder}", addresses, tmp_path / "pids")
        assert all(loaded >= step for loaded in cluster.run(place.save_three_times))
        assert list_leftovers(s3_server, place.url, folder) == []


def inject_kill(proxy, place, chance):
    """Kill ranks at a request, or return the time at which they end."""
    proxy.clear()
    size = len(place.addresses)
    chosen = chance.randrange(size) if chance.random() < 0.5 else None
    if chance.random() < 0.2:
        delays = [0.001 + chance.random() * 0.3 if chosen in {None, rank} else 60 for rank in range(size)]
        return {"first": 1, "delays": delays}
    # Before the request is forwarded, which happens all the same, after the server has answered, or it does not reach the server.
    when = chance.choice(["before", "after", "instead"])
    options = {"first": chance.randrange(1, MAX_REQUESTS), "count": 1}
    hook = Hook(lambda _: place.kill(chosen), "before" if when == "instead" else when)
    proxy.inject(hook, **options)
    if when == "instead":
        proxy.inject(Reset("before"), **options)
    return {}


def check_checkpoints(store, place):
    """Verify every checkpoint that is listed, and return the step of the newest one; 0 without one."""
    if place.target:
        found = [store.find(place.target)] if store.exists(place.target) else []
    else:
        found, errors = list_numbered(store, f"{place.url}/checkpoints")
        # Of unfinished ones, which are not loaded.
        assert all(isinstance(error, AbsentError) for error in errors.values()), errors
    for checkpoint in found:
        verify_files(store, lambda key=checkpoint.key: key)
    return max((checkpoint.manifest.step for checkpoint in found), default=0)


def list_leftovers(server, url, kind):
    """Return the objects that belong to no checkpoint; the parts of the one that was replaced last may stay."""
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    keys = server.list_sizes(bucket, f"{prefix}/")
    manifests = {str(Path(key).parent) for key in keys if Path(key).name == NAME}
    saves = {tuple(re.match(r"(.*)/parts/([^/]+)/", key).groups()) for key in keys if "/parts/" in key}
    allowed, kept = (2, 1) if kind == "named" else (1, KEPT)
    leftovers = [key for key in keys if "/.drafts/" in key]
    for parent in {parent for parent, _ in saves} | manifests:
        own = [save for each, save in saves if each == parent]
        if parent not in manifests or len(own) > allowed:
            leftovers += [f"{parent}/parts/{save}" for save in own]
    return leftovers + [f"{each} of {keys}" for each in sorted(manifests)[kept:]]
