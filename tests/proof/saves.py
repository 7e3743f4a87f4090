"""Kills during saves: ranks get SIGKILL at random moments, and the newest complete checkpoint must be whole and loadable.

Half of the time is for a disk, half for an object store. Every tensor of a checkpoint contains the number of its step, so that a
mixture of two saves is noticed.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from proof import Options
from support.object_stores import killed_saves as store_kills
from support.object_stores.fault_proxy import FaultProxy
from support.object_stores.runs import open_objects
from support.object_stores.server import SERVERS, S3Server
from support.processes.ranks import INTERPRETER, Cluster, preload
from support.runs.file_system import Run
from support.runs.killed_saves import KilledRun, run_until_killed

from accel_runtime.storage.errors import AbsentError, CheckpointError
from accel_runtime.storage.file_store import FileStore
from accel_runtime.storage.manifest import Checkpoint
from accel_runtime.storage.store import list_numbered
from accel_runtime.storage.verification import verify_files

__all__ = ["KINDS", "TITLE", "Observation", "headline", "judge", "render", "run"]

TITLE = "Kills during saves"
KINDS = {
    "numbered": "numbered, two are kept",
    "named": "a fixed name, replaced",
    "in the background": "in the background, two are kept",
}
PLACES = {"disk": "disk", "store": "object store"}
SIZES = (1, 2)
"""World sizes, one after the other."""
MAX_DELAY_S = 0.15
"""Longest time from the beginning of a save on a disk to the kill, for each rank."""


class Place(Protocol):
    """Saves of one kind, with one number of ranks, to one place."""

    @property
    def kind(self) -> str:
        """A key of `KINDS`."""

    def verify(self) -> int:
        """Verify every byte of the checkpoints that are listed as complete, and return the newest step; 0 without one."""

    def count_leftovers(self) -> int:
        """Count the files or objects that belong to no checkpoint."""

    def save_again(self, cluster: Cluster) -> list[tuple[int, int]]:
        """Load and save in a new run, and return the steps that each rank has loaded and saved."""


@dataclass(frozen=True)
class DiskPlace:
    """Saves to a folder."""

    kind: str
    project: Path

    @property
    def target(self) -> Path | None:
        return self.project / "mine" if self.kind == "named" else None

    @contextmanager
    def start(self) -> Iterator[tuple[Run, Path | None, bool]]:
        """Return a run on this rank, the target of its saves, and if they are in the background."""
        limit = None if self.target else store_kills.KEPT
        run = Run(self.project, automatic=self.target is None, total_limit=limit)
        yield run, self.target, self.kind == "in the background"

    def verify(self) -> int:
        return verify_listed(FileStore(), self.target, f"{self.project}/checkpoints")

    def count_leftovers(self) -> int:
        return len([*self.project.rglob(".*")])

    def save_again(self, cluster: Cluster) -> list[tuple[int, int]]:
        return cluster.run(self.load_and_save)

    def load_and_save(self) -> tuple[int, int]:
        """Load and save on this rank; return both steps."""
        with self.start() as (run, target, in_background):
            loaded = run.load(target)
            assert run.save(loaded + 1, target, in_background=in_background) is None
            return loaded, loaded + 1


@dataclass(frozen=True)
class StorePlace:
    """Saves to an S3 server behind a proxy."""

    of_ranks: store_kills.Place
    store: Any
    server: S3Server
    proxy: FaultProxy

    @property
    def kind(self) -> str:
        return self.of_ranks.kind

    def verify(self) -> int:
        return verify_listed(self.store, self.of_ranks.target, f"{self.of_ranks.url}/checkpoints")

    def count_leftovers(self) -> int:
        return len(store_kills.list_leftovers(self.server, self.of_ranks.url, self.kind))

    def save_again(self, cluster: Cluster) -> list[tuple[int, int]]:
        self.proxy.clear()
        time.sleep(2 * store_kills.LEFTOVER_AGE_S)
        return [(loaded, loaded + 3) for loaded in cluster.run(self.of_ranks.save_three_times)]


class Observation(NamedTuple):
    """What was found after a kill.

    Attributes:
        place: "disk" or "store".
        kind: A key of `KINDS`.
        number: The number of the kill in its place, which with the seed determines it.
        size: The number of ranks.
        is_within_save: If a killed rank was within a save.
        steps: Pairs of a step whose save had returned, 0 without one, and of the newest step that was found or loaded after it.
        problem: The error of a checkpoint that is listed and damaged, or of the load, or "".
        leftovers: Files or objects of unfinished saves after the kill.
        remaining: The same after the next save.
    """

    place: str
    kind: str
    number: int
    size: int
    is_within_save: bool
    steps: Sequence[tuple[int, int]]
    problem: str
    leftovers: int
    remaining: int


def judge(observations: Iterable[Observation]) -> dict[str, Any]:
    """Return the counts for each place and kind, and a line for each kill after which something was wrong."""
    counts = {place: {kind: Counter() for kind in KINDS} for place in PLACES}
    wrong = []
    for each in observations:
        lost = [f"{saved} was saved, and {newest} found" for saved, newest in each.steps if newest < saved]
        counts[each.place][each.kind].update(
            kills=1,
            within_save=int(each.is_within_save),
            torn=int(bool(each.problem)),
            lost=int(bool(lost)),
            leftovers=each.leftovers,
            remaining=each.remaining,
        )
        problems = [*([each.problem] if each.problem else ()), *(f"step {line}" for line in lost[:1])]
        problems += [f"{each.remaining} leftovers remained"] if each.remaining else []
        if problems:
            about = f"{each.place}, {each.kind}, {each.size} ranks, kill {each.number}"
            wrong.append(f"{about}: {'; '.join(problems)}")
    return {"counts": {place: {k: dict(c) for k, c in kinds.items()} for place, kinds in counts.items()},
            "wrong": wrong}  # fmt: skip


def run(options: Options, seed: int | None = None) -> dict[str, Any]:
    """Kill ranks for a time, on a disk and on an object store.

    Args:
        options: The time and the folder.
        seed: The seed of kills that are repeated, or None for other ones.
    """
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    with ExitStack() as stack:
        stack.callback(INTERPRETER.close)
        clusters = {size: Cluster(size) for size in SIZES}
        for cluster in clusters.values():
            stack.callback(cluster.close)
        preload(clusters.values(), *store_kills.PRELOADED, "support.runs.killed_saves", "proof.saves")
        observations = []
        for kill in (
            kill_on_disk(clusters, options.folder, seed),
            kill_on_store(clusters, options.folder, seed),
        ):
            observations += repeat(kill, options.seconds / 2)
    return {"seed": seed, **judge(observations)}


def repeat(kills: Iterator[Observation], seconds: float) -> list[Observation]:
    """Return observations of a time, and print the count each minute."""
    observations: list[Observation] = []
    started = reported = time.monotonic()
    while time.monotonic() < started + seconds:
        observations.append(next(kills))
        if time.monotonic() > reported + 60:
            reported = time.monotonic()
            wrong = len(judge(observations)["wrong"])
            print(f"saves: {observations[-1].place}: {len(observations)} kills, {wrong} wrong",
                  file=sys.stderr, flush=True)  # fmt: skip
    kills.close()
    return observations


def kill_on_disk(clusters: Mapping[int, Cluster], folder: Path, seed: int) -> Iterator[Observation]:
    """Kill runs that save to a disk, one after the other."""
    newest: Counter[tuple[str, int]] = Counter()
    for number in itertools.count():
        chance = random.Random(f"disk {seed} {number}")
        kind, size = chance.choice([*KINDS]), SIZES[number % len(SIZES)]
        place = DiskPlace(kind, folder / f"{kind} {size}".replace(" ", "-"))
        killed = chance.choice([[rank] for rank in range(size)] + [[*range(size)]])
        together = chance.uniform(0, MAX_DELAY_S * size)
        delays = [together + chance.choice((0, chance.uniform(0, 0.02))) if rank in killed else None
                  for rank in range(size)]  # fmt: skip
        when = {"first": chance.randrange(3), "delays": delays}
        kill = partial(run_until_killed, clusters[size], place.start, folder / "ranks", **when)
        yield observe(("disk", kind, number, size), place, (kill, killed), (newest, clusters[size]))


def kill_on_store(clusters: Mapping[int, Cluster], folder: Path, seed: int) -> Iterator[Observation]:
    """Kill runs that save to an S3 server, at a request or after a time, one after the other."""
    newest: Counter[tuple[str, int]] = Counter()
    with ExitStack() as stack:
        server = SERVERS["moto"](folder / "server").start()
        stack.callback(server.close)
        proxy = stack.enter_context(FaultProxy(server))
        store = stack.enter_context(open_objects(server.address))
        url = f"s3://{server.create_bucket()}/run"
        for number in itertools.count():
            chance = random.Random(f"store {seed} {number}")
            kind, size = chance.choice([*KINDS]), SIZES[number % len(SIZES)]
            addresses = [proxy.address(f"rank {rank}") for rank in range(size)]
            project = f"{url}/{kind}-{size}".replace(" ", "-")
            of_ranks = store_kills.Place(kind, project, addresses, folder / "ranks")
            place = StorePlace(of_ranks, store, server, proxy)
            when, killed = store_kills.inject_kill(proxy, of_ranks, chance)
            kill = partial(run_until_killed, clusters[size], of_ranks.start, of_ranks.folder, **when)
            yield observe(("store", kind, number, size), place, (kill, killed), (newest, clusters[size]))


def observe(
    about: tuple[str, str, int, int],
    place: Place,
    kill: tuple[Callable[[], KilledRun], Sequence[int]],
    history: tuple[Counter[tuple[str, int]], Cluster],
) -> Observation:
    """Kill a run, look at what it has left, load it, save once more, and look again.

    Args:
        about: The place, the kind, the number and the size of the kill.
        place: The place.
        kill: The function that runs until the kill, and the ranks that it kills.
        history: The newest step that was saved, by kind and size, and the ranks of the next run.
    """
    (_, kind, _, size), (newest, cluster) = about, history
    before, steps, problem, leftovers, is_within_save = newest[kind, size], [], "", 0, False
    try:
        killed = kill[0]()
        is_within_save = any(killed.within_save[rank] for rank in kill[1])
        steps += [] if killed.loaded is None else [(before, killed.loaded)]
        saved = max([before, *killed.saved])
        leftovers = place.count_leftovers()
        steps.append((saved, place.verify()))
        again = place.save_again(cluster)
        steps += [(saved, loaded) for loaded, _ in again]
        newest[kind, size] = max(step for _, step in again)
    except Exception as error:  # noqa: BLE001 - any error is a result
        problem = f"{type(error).__name__}: {error}"
        newest[kind, size] = 0  # it is counted once
    return Observation(*about, is_within_save, steps, problem, leftovers, place.count_leftovers())


def verify_listed(store: Any, target: Any, parent: str) -> int:
    """Verify every byte of the checkpoints that are listed as complete, and return the newest step; 0 without one."""
    if target:
        found, errors = find_named(store, str(target))
    else:
        found, errors = list_numbered(store, parent)
    # Unfinished ones are listed, and never loaded.
    assert all(isinstance(error, AbsentError) for error in errors.values()), errors
    for checkpoint in found:
        verify_files(store, lambda key=checkpoint.key: key)
    return max((checkpoint.manifest.step for checkpoint in found), default=0)


def find_named(store: Any, key: str) -> tuple[list[Checkpoint], dict[str, CheckpointError]]:
    """Return the checkpoint of a name, or the reason why there is none."""
    try:
        return [store.find(key)], {}
    except CheckpointError as error:
        return [], {key: error}


def render(results: Mapping[str, Any]) -> str:
    """Return the section of the page."""
    rows = [
        f"| {place} | {title} | {count['kills']} | {count['within_save']} | {count['torn']} | {count['lost']} | {count['leftovers']} "
        f"| {count['remaining']} |"
        for name, place in PLACES.items()
        for kind, title in KINDS.items()
        if (count := results["counts"][name][kind])
    ]
    lines = [
        (
            "One or two ranks that save one checkpoint after the other get SIGKILL, one of them or both, after a random time, and on the "
            "object store (moto's S3) also at a random request: before it, after its answer, or instead of it. "
            "After each kill all bytes of all listed checkpoints are compared with their checksums, and the next run loads the newest one, "
            "of which every tensor must contain the number of the same step, and saves again."
        ),
        "",
        "| Place | Save | Kills | Within a save | Torn | Lost | Leftovers | After the next save |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        *rows,
        "",
        (
            "Torn is a checkpoint that is listed as complete, and is damaged, a mixture, or does not load; lost one whose save had returned, "
            "and that no newer one has replaced. Leftovers are files or objects of unfinished saves. On an object store, a run that no "
            f"launcher has named removes them when they are old enough: here after {store_kills.LEFTOVER_AGE_S} s instead of an hour."
        ),
        "",
        f"**{len(results['wrong'])} wrong**:\n\n" + "\n".join(f"- {line}" for line in results["wrong"])
        if results["wrong"]
        else "Nothing was torn, lost or left over.",
        "",
        f"The seed was {results['seed']}.",
    ]
    return "\n".join(lines)


def headline(results: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the number of kills within saves that tore or lost a checkpoint."""
    counts = [count for kinds in results["counts"].values() for count in kinds.values() if count]
    bad = sum(count["torn"] + count["lost"] for count in counts)
    within_save = sum(count["within_save"] for count in counts)
    return f"{bad} of {within_save}", "kills during saves that tore or lost a checkpoint"
