"""Runs that save to S3 and are killed at a request or after a time, and what is in the bucket afterwards."""

from __future__ import annotations

import os
import re
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.object_stores.fault_proxy import Hook, Reset
from support.object_stores.runs import connect, set_client
from support.runs.file_system import Run
from support.runs.killed_saves import kill_ranks

from accel_runtime.storage.errors import AbsentError
from accel_runtime.storage.manifest import NAME
from accel_runtime.storage.store import list_numbered
from accel_runtime.storage.verification import verify_files

__all__ = [
    "KEPT",
    "LEFTOVER_AGE_S",
    "PRELOADED",
    "Place",
    "check_checkpoints",
    "inject_kill",
    "list_leftovers",
]

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
        folder: The folder of `run_until_killed`.
    """

    kind: str
    url: str
    addresses: list[str]
    folder: Path

    @property
    def target(self):
        return f"{self.url}/mine" if self.kind == "named" else None

    @contextmanager
    def start(self):
        """Return a run on this rank, the target of its saves, and if they are in the background."""
        rank = int(os.environ.get("RANK", "0"))
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


def inject_kill(proxy, place, chance):
    """Kill ranks at a request, or return the options of `run_until_killed` for a kill after a time; and the ranks."""
    proxy.clear()
    size = len(place.addresses)
    chosen = [chance.randrange(size)] if chance.random() < 0.5 else [*range(size)]
    if chance.random() < 0.2:
        delays = [0.001 + chance.random() * 0.3 if rank in chosen else None for rank in range(size)]
        return {"first": 1, "delays": delays}, chosen
    # Before the request is forwarded, which happens all the same, after the server has answered, or it does not reach the server.
    when = chance.choice(["before", "after", "instead"])
    options = {"first": chance.randrange(1, MAX_REQUESTS), "count": 1}
    hook = Hook(lambda _: kill_ranks(place.folder, chosen), "before" if when == "instead" else when)
    proxy.inject(hook, **options)
    if when == "instead":
        proxy.inject(Reset("before"), **options)
    return {}, chosen


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
