"""Runs that end by SIGKILL in the midst of a save, and what the next ones find; a script, run by test_killed_saves.py.

Each line of its input is a request in JSON, and is answered by a line of its output. torch is imported once: every run
is a fork of this process, which never touches it itself.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

from failing_disk import Probe, Run
from ports import free_port

from accel_runtime.checkpoint.errors import CheckpointError

PATIENCE_S = 60


class Dying(Probe):
    """A disk on which a call is the last thing its process does."""

    def __init__(self, at, *, exchanges):
        super().__init__(exchanges=exchanges)
        self._at = at

    def before(self, number, path):  # noqa: ARG002 - whatever the call
        if number == self._at:
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(PATIENCE_S)  # another thread may be faster than the signal


def forked(world, function, *args):
    """Start a run of so many processes; their ids by rank."""
    with free_port() as port:  # which the processes hold too, once they are forked
        return [_forked(rank, world, port, function, *args) for rank in range(world)]


def _forked(rank, world, port, function, *args):
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no run outlives this script
        if world > 1:
            place = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in place.items()})
        function(*args)
        code = 0
    except BaseException:  # noqa: BLE001 - whatever it is, it is printed
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def kill(pids):
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def finish(pids):
    """Wait for a run: the codes by rank, negative for a signal; once one was killed the others are."""
    codes, deadline = {}, time.monotonic() + PATIENCE_S
    while len(codes) < len(pids):
        for rank, pid in enumerate(pids):
            if rank in codes:
                continue
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[rank] = os.waitstatus_to_exitcode(status)
        if any(code < 0 for code in codes.values()) or time.monotonic() > deadline:
            kill(pid for rank, pid in enumerate(pids) if rank not in codes)
        time.sleep(0.001)
    return [codes[rank] for rank in range(len(pids))]


def target_of(case, folder):
    return folder / "mine" if case["same"] else None


def run_in(case, folder, disk=None):
    run = Run(
        folder,
        total_limit=None if case["same"] else case["limit"],
        automatic=not case["same"],
        disk=disk or Probe(exchanges=case["exchanges"]),
    )
    logging.getLogger("accel_runtime.checkpoint").setLevel(logging.ERROR)
    return run


def save(case, folder, step, at=0, which=None):
    """Save once; the process dies at call `at`, if it is rank `which`, or any for None."""
    disk = Dying(at if which in {None, int(os.environ.get("RANK", "0"))} else 0, exchanges=case["exchanges"])
    run = run_in(case, folder, disk)
    run.put(step)
    run.acc.save_state(target_of(case, folder))
    if run.rank == (which or 0):
        (folder / "calls").write_text(str(len(disk.calls)))


def go_on(case, folder, before, answer):
    """What the next run does: load, save, load."""
    run = run_in(case, folder)
    run.put(99)
    try:
        step = run.acc.load_state(target_of(case, folder)).manifest.step
        assert run.step() == step
    except CheckpointError:
        step = 0
        assert run.step() == 99
    assert step in {before, 7}, step
    run.put(8)
    run.acc.save_state(target_of(case, folder))
    run.put(99)
    run.acc.load_state(target_of(case, folder))
    assert run.step() == 8
    if run.rank == 0:
        found = list(folder.rglob(".*"))
        assert not found, found
        if case["same"]:
            assert (folder / "mine" / "notes.txt").read_text() == "of the user"
        answer.write_text(str(step))


def every_call(case, folder, *, world, which, stride):
    """Die at every call in turn; what the next run loaded, by call."""
    start = folder / "start"
    start.mkdir()
    for step in range(1, case["before"] + 1):
        assert finish(forked(world, save, case, start, step)) == [0] * world
    if case["same"]:
        (start / "mine").mkdir(exist_ok=True)
        (start / "mine" / "notes.txt").write_text("of the user")
    found, at, calls = {}, 1, None
    while calls is None:
        there = folder / "there"
        shutil.copytree(start, there, symlinks=True)
        codes = finish(forked(world, save, case, there, 7, at, which))
        if codes == [0] * world:
            calls = (there / "calls").read_text()
        else:
            assert any(code == -signal.SIGKILL for code in codes), codes
            answer = folder / "answer"
            assert finish(forked(world, go_on, case, there, case["before"], answer)) == [0] * world, at
            found[at] = int(answer.read_text())
        shutil.rmtree(there)
        at += stride
    return found


def train(case, folder, in_background, pipe):
    """Save as fast as it can, from where the run before was; says what it loaded and what is saved."""
    run = run_in(case, folder)
    step = 0
    try:
        step = run.acc.load_state(target_of(case, folder)).manifest.step
        assert run.step() == step, f"{run.step()} is loaded from a checkpoint of {step}"
    except CheckpointError as error:
        assert "No complete checkpoint" in str(error) or "is not a checkpoint" in str(error), error
    told = [0, step]
    while True:
        if run.rank == 0:
            os.write(pipe, json.dumps(told).encode() + b"\n")
        step += 1
        run.put(step)
        run.acc.save_state(target_of(case, folder), async_save=in_background)
        # One in the background is whole when the next begins.
        told = [1, step - 1 if in_background else step]


def at_random(case, folder, *, world, in_background, kills, seed):  # noqa: PLR0913
    """Kill runs at random moments; how many saves were made, and which steps were loaded."""
    chance = random.Random(seed)
    # Two take longer to begin, and most moments are to be within a save.
    span = 0.15 if world == 1 else 0.8 if in_background else 0.3
    known, loaded, saves = 0, [], 0
    for _ in range(kills):
        ours, theirs = os.pipe()
        pids = forked(world, train, case, folder, in_background, theirs)
        os.close(theirs)
        with os.fdopen(ours) as told:
            first = told.readline()
            if not first:
                raise AssertionError(f"a run did not load: {finish(pids)}; {known} had been saved")
            step = json.loads(first)[1]
            assert step >= known, f"{step} was loaded, and {known} had been saved"
            loaded.append(step)
            # Whole saves first, in half of them: a busy machine makes few in any span of time.
            waited = [told.readline() for _ in range(chance.choice((0, 4)))]
            time.sleep(chance.uniform(0, span))
            order = chance.sample(pids, len(pids))
            os.kill(order[0], signal.SIGKILL)
            if chance.random() < 0.5:
                time.sleep(chance.uniform(0, 0.02))  # the others live on for a while, without it
            kill(order[1:])
            for pid in pids:
                os.waitpid(pid, 0)
            lines = [line for line in "".join([*waited, told.read()]).splitlines() if line.endswith("]")]
        known = max([known, step, *(json.loads(line)[1] for line in lines)])
        saves += len(lines)
    return {"kills": kills, "saves": saves, "loaded": loaded}


def warm():
    """Import what a run imports on its way, so that every fork need not."""
    ours, theirs = os.pipe()
    pids = forked(1, visit, theirs)
    os.close(theirs)
    with os.fdopen(ours) as told:
        names = told.read().split()
    assert finish(pids) == [0]
    for name in names:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what was imported is not copied by the garbage collections of each fork


def visit(pipe):
    with tempfile.TemporaryDirectory() as folder:
        run = Run(folder)
        run.put(1)
        run.acc.save_state()
        run.acc.load_state()
    with os.fdopen(pipe, "w") as told:
        told.write(" ".join(name for name in sys.modules if name != "__main__"))


def main():
    warm()
    for line in sys.stdin:
        request = json.loads(line)
        folder = Path(request.pop("folder"))
        function = {"every call": every_call, "at random": at_random}[request.pop("what")]
        print(json.dumps(function(folder=folder, **request)), flush=True)


if __name__ == "__main__":
    main()
