"""Runs that save to S3 without end and are killed at random, and the check of what is there after each kill.

This file is both sides: `Attempt` is the test's, `save_without_end` runs on the ranks.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from support.object_stores.fault_proxy import Hook, Reset
from support.object_stores.server import client_variables
from support.processes.children import ForkedProcess, free_port
from support.processes.ranks import INTERPRETER
from support.processes.waits import limit, wait_until

from accel_runtime.extensions.object_stores import store as object_store
from accel_runtime.storage.errors import AbsentError, CheckpointError
from accel_runtime.storage.manifest import NAME
from accel_runtime.storage.store import list_numbered
from accel_runtime.storage.verification import verify_files

KEPT = 2
"""Numbered checkpoints that are kept."""
LEFTOVER_AGE_S = 0.2
MAX_REQUESTS = 70
"""Requests until a kill, of all ranks: a start with two saves or more."""
INTERPRETER.preload(
    "support.runs.file_system",
    "accel_runtime.extensions.object_stores.client_process",
    "support.object_stores.kills",
)


@dataclass(frozen=True)
class Kill:
    """A kill of a run.

    Attributes:
        kind: Kind of the saves: "numbered", "named", or "in the background" (numbered too).
        size: The world size.
        one_rank: Kill one rank and the others a little later, not all at once.
        requests: Kill at this request; 0: after a time.
        when: For a kill at a request: "before" it is forwarded, which happens all the same, "after" the server has answered, or
            "instead": it does not reach the server.
        seconds: The time, counted from the first save.
    """

    kind: str
    size: int
    one_rank: bool
    requests: int
    when: str
    seconds: float

    @classmethod
    def choose(cls, source, sizes):
        """Return a random kill."""
        return cls(
            source.choice(["numbered", "named", "in the background"]),
            source.choice(sizes),
            source.random() < 0.5,
            source.randrange(1, MAX_REQUESTS) if source.random() < 0.8 else 0,
            source.choice(["before", "after", "instead"]),
            source.random() * 0.3,
        )

    @property
    def folder(self):
        """Name of the folder of checkpoints, of one world size, since they contain state of each rank."""
        return f"{'named' if self.kind == 'named' else 'numbered'}-{self.size}"


# On the ranks ----------------------------------------------------------------------------------


def save_without_end(url, kind, count):
    """Load the newest checkpoint, print its step, and save; print the step of each save that has returned."""
    from support.runs.file_system import Run

    # This process runs nothing else.
    object_store.ObjectStore = partial(object_store.ObjectStore, leftover_age_s=LEFTOVER_AGE_S)
    is_named = kind == "named"
    run = Run(url, automatic=not is_named, total_limit=None if is_named else KEPT)
    path = f"{url}/mine" if is_named else None
    step = run.load(path)
    if run.rank == 0:
        print(f"loaded {step}", flush=True)
    while count:
        step, count = step + 1, count - 1
        error = run.save(step, path, in_background=kind == "in the background")
        if run.rank == 0:
            print(f"failed {error}" if error else f"saved {step}", flush=True)
    # Without the teardown of the interpreter, which a rank of a test does not need.
    os._exit(0)


# In the test -----------------------------------------------------------------------------------


class Attempt:
    """The ranks of a run, which end with this context."""

    def __init__(self, proxy, url, kind, size, count=-1):
        self._stack, self.lines = ExitStack(), []
        port = self._stack.enter_context(free_port())
        shared = {
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        shared |= {"ACCEL_DEVICE": "cpu", "ACCEL_PROCESS_GROUP_TIMEOUT": 600, "OMP_NUM_THREADS": 1}
        if size % 2 == 0:  # a launcher that names runs: saves of killed processes are removed at once
            shared |= {"ACCEL_LAUNCH": "tests"}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("ACCEL_")}
        self.processes = [
            self._stack.enter_context(
                ForkedProcess(
                    INTERPRETER,
                    "support.object_stores.kills:save_without_end",
                    (url, kind, count),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    env=inherited | shared | self._describe_rank(proxy, rank),
                )
            )
            for rank in range(size)
        ]
        self._readers = [threading.Thread(target=self._read, args=(each,)) for each in self.processes]
        for reader in self._readers:
            reader.start()

    @staticmethod
    def _describe_rank(proxy, rank):
        return client_variables(proxy.address(f"rank {rank}")) | {"RANK": rank, "LOCAL_RANK": rank}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            self.kill(process)
        for process in self.processes:
            process.wait()
        for reader in self._readers:
            reader.join()
        self._stack.close()

    def _read(self, process):
        for line in process.stdout:
            self.lines.append(line)

    @staticmethod
    def kill(process):
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)

    def wait_until(self, condition):
        """Wait until a condition holds; the run must not end before."""

        def has_ended():
            return all(process.poll() is not None for process in self.processes)

        wait_until(lambda: condition() or has_ended(), 60, lambda: "".join(self.lines))
        assert condition(), f"the run has ended: {''.join(self.lines)}"

    def wait(self, process):
        """Wait until a process has ended."""
        try:
            process.wait(limit(120))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the process did not end: {''.join(self.lines)}") from None

    def find_steps(self, word):
        """Return the steps that were loaded or saved."""
        return [int(step) for step in re.findall(rf"^{word} (\d+)$", "".join(self.lines), re.MULTILINE)]


def run_until_killed(proxy, url, kill, source):
    """Start a run, kill it, and return the steps that it has loaded and saved."""
    proxy.clear()
    ready = threading.Event()
    with Attempt(proxy, f"{url}/{kill.folder}", kill.kind, kill.size) as attempt:
        chosen = [source.choice(attempt.processes)] if kill.one_rank else list(attempt.processes)

        def end(_request=None):
            ready.set()
            for process in chosen:
                attempt.kill(process)

        if kill.requests:
            options = {"first": kill.requests, "count": 1}
            proxy.inject(Hook(end, "before" if kill.when == "instead" else kill.when), **options)
            if kill.when == "instead":
                proxy.inject(Reset("before"), **options)
        else:
            attempt.wait_until(lambda: attempt.find_steps("saved"))
            time.sleep(kill.seconds)
            end()
        attempt.wait_until(ready.is_set)
        attempt.wait(chosen[0])
        time.sleep(source.random() * 0.1 if kill.one_rank else 0)
    output = "".join(attempt.lines)
    if kill.size == 1:
        assert "Traceback" not in output, output
    return attempt.find_steps("loaded"), attempt.find_steps("saved")


def check_checkpoints(store, url, folder):
    """Verify every checkpoint that is listed, and return the step of the newest one; 0 without one."""
    if folder.startswith("named"):
        try:
            checkpoints = [store.find(f"{url}/{folder}/mine")]
        except AbsentError:
            return 0
    else:
        checkpoints, errors = list_numbered(store, f"{url}/{folder}/checkpoints")
        for error in errors.values():  # unfinished ones, which are not loaded
            assert isinstance(error, AbsentError), error
    for checkpoint in checkpoints:
        try:
            verify_files(store, lambda key=checkpoint.key: key)
        except CheckpointError as error:
            raise AssertionError(f"torn: {error}") from error
    return max((checkpoint.manifest.step for checkpoint in checkpoints), default=0)


def list_leftovers(server, url, folder):
    """Return the objects that belong to no checkpoint; the parts of the one that was replaced last may stay."""
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    keys = server.list_sizes(bucket, f"{prefix}/{folder}/")
    manifests = {str(Path(key).parent) for key in keys if Path(key).name == NAME}
    saves = {tuple(re.match(r"(.*)/parts/([^/]+)/", key).groups()) for key in keys if "/parts/" in key}
    allowed = 2 if folder.startswith("named") else 1
    leftovers = [key for key in keys if "/.drafts/" in key]
    for parent in {parent for parent, _ in saves} | manifests:
        own = [save for each, save in saves if each == parent]
        if parent not in manifests or len(own) > allowed:
            leftovers += [f"{parent}/parts/{save}" for save in own]
    kept = 1 if folder.startswith("named") else KEPT
    return leftovers + [f"{each} of {keys}" for each in sorted(manifests)[kept:]]
