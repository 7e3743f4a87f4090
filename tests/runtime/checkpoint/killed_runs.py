"""Kill runs with SIGKILL during a save and load in the next run; a script that test_killed_saves.py starts.

Each line of stdin is a request in JSON, and each line of stdout is the result. torch is imported once: every run is a
fork of this process, which does not use torch itself.
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
from contextlib import suppress
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

from support.file_system import RecordingFileSystem, Run
from support.processes import fork, free_port

from accel_runtime.checkpoint.errors import CheckpointError

PATIENCE_S = 60


class KillingFileSystem(RecordingFileSystem):
    """A file system that kills its process before the call with a given number."""

    def __init__(self, at, *, exchanges):
        super().__init__(exchanges=exchanges)
        self._at = at

    def before_call(self, number, path):  # noqa: ARG002 - whatever the call
        if number == self._at:
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(PATIENCE_S)  # another thread may be faster than the signal


def fork_ranks(world, function, *args):
    """Fork the ranks of a run; return their process ids."""
    with free_port() as port:  # the forked processes inherit the socket that reserves it
        return [fork(_run_rank, rank, world, port, function, *args) for rank in range(world)]


def _run_rank(rank, world, port, function, *args):
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no run outlives this script
    if world > 1:
        variables = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in variables.items()})
    function(*args)


def kill_processes(pids):
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def wait_for_exit(pids):
    """Return the exit codes by rank, negative for a signal; kill the other ranks once one was killed."""
    codes, deadline = {}, time.monotonic() + PATIENCE_S
    while len(codes) < len(pids):
        for rank, pid in enumerate(pids):
            if rank in codes:
                continue
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[rank] = os.waitstatus_to_exitcode(status)
        if any(code < 0 for code in codes.values()) or time.monotonic() > deadline:
            kill_processes(pid for rank, pid in enumerate(pids) if rank not in codes)
        time.sleep(0.001)
    return [codes[rank] for rank in range(len(pids))]


def get_target(case, folder):
    return folder / "mine" if case["same"] else None


def build_run(case, folder, disk=None):
    run = Run(
        folder,
        total_limit=None if case["same"] else case["limit"],
        automatic=not case["same"],
        disk=disk or RecordingFileSystem(exchanges=case["exchanges"]),
    )
    logging.getLogger("accel_runtime.checkpoint").setLevel(logging.ERROR)
    return run


def save(case, folder, step, at=0, which=None):
    """Save once; the process is killed at call `at` if it is rank `which` (None: every rank)."""
    disk = KillingFileSystem(
        at if which in {None, int(os.environ.get("RANK", "0"))} else 0, exchanges=case["exchanges"]
    )
    run = build_run(case, folder, disk)
    run.set_step(step)
    run.acc.save_state(get_target(case, folder))
    if run.rank == (which or 0):
        (folder / "calls").write_text(str(len(disk.calls)))


def load_and_save_again(case, folder, before, answer):
    """Load, save and load again, as the next run does."""
    run = build_run(case, folder)
    run.set_step(99)
    try:
        step = run.acc.load_state(get_target(case, folder)).manifest.step
        assert run.step() == step
    except CheckpointError:
        step = 0
        assert run.step() == 99
    assert step in {before, 7}, step
    run.set_step(8)
    run.acc.save_state(get_target(case, folder))
    run.set_step(99)
    run.acc.load_state(get_target(case, folder))
    assert run.step() == 8
    if run.rank == 0:
        leftovers = list(folder.rglob(".*"))
        assert not leftovers, leftovers
        if case["same"]:
            assert (folder / "mine" / "notes.txt").read_text() == "of the user"
        answer.write_text(str(step))


def kill_at_every_call(case, folder, *, world, which, stride):
    """Kill a run at each call in turn; return the step that the next run loaded, by call."""
    start = folder / "start"
    start.mkdir()
    for step in range(1, case["before"] + 1):
        assert wait_for_exit(fork_ranks(world, save, case, start, step)) == [0] * world
    if case["same"]:
        (start / "mine").mkdir(exist_ok=True)
        (start / "mine" / "notes.txt").write_text("of the user")
    loaded_steps, at, calls = {}, 1, None
    while calls is None:
        workspace = folder / "there"
        shutil.copytree(start, workspace, symlinks=True)
        codes = wait_for_exit(fork_ranks(world, save, case, workspace, 7, at, which))
        if codes == [0] * world:
            calls = (workspace / "calls").read_text()
        else:
            assert any(code == -signal.SIGKILL for code in codes), codes
            answer = folder / "answer"
            assert (
                wait_for_exit(fork_ranks(world, load_and_save_again, case, workspace, case["before"], answer))
                == [0] * world
            ), at
            loaded_steps[at] = int(answer.read_text())
        shutil.rmtree(workspace)
        at += stride
    return loaded_steps


def save_in_loop(case, folder, in_background, pipe):
    """Resume and save in a loop; write to the pipe which step was loaded, and each step that is saved."""
    run = build_run(case, folder)
    step = 0
    try:
        step = run.acc.load_state(get_target(case, folder)).manifest.step
        assert run.step() == step, f"{run.step()} is loaded from a checkpoint of {step}"
    except CheckpointError as error:
        assert "No complete checkpoint" in str(error) or "is not a checkpoint" in str(error), error
    message = [0, step]
    while True:
        if run.rank == 0:
            os.write(pipe, json.dumps(message).encode() + b"\n")
        step += 1
        run.set_step(step)
        run.acc.save_state(get_target(case, folder), async_save=in_background)
        # An asynchronous save is complete when the next one starts.
        message = [1, step - 1 if in_background else step]


def kill_at_random(case, folder, *, world, in_background, kills, seed):  # noqa: PLR0913
    """Kill runs at random times; return the number of saves and the loaded steps."""
    chance = random.Random(seed)
    # Two ranks start more slowly, and most kills should happen during a save.
    span = 0.15 if world == 1 else 0.8 if in_background else 0.3
    last_saved, loaded, saves = 0, [], 0
    for _ in range(kills):
        read_end, write_end = os.pipe()
        pids = fork_ranks(world, save_in_loop, case, folder, in_background, write_end)
        os.close(write_end)
        with os.fdopen(read_end) as reader:
            first = reader.readline()
            if not first:
                raise AssertionError(
                    f"a run did not load: {wait_for_exit(pids)}; {last_saved} had been saved"
                )
            step = json.loads(first)[1]
            assert step >= last_saved, f"{step} was loaded, and {last_saved} had been saved"
            loaded.append(step)
            # Half of the runs complete some saves first: a busy machine completes few in a fixed time.
            first_lines = [reader.readline() for _ in range(chance.choice((0, 4)))]
            time.sleep(chance.uniform(0, span))
            order = chance.sample(pids, len(pids))
            os.kill(order[0], signal.SIGKILL)
            if chance.random() < 0.5:
                time.sleep(chance.uniform(0, 0.02))  # the other ranks run for a while without the first
            kill_processes(order[1:])
            for pid in pids:
                os.waitpid(pid, 0)
            lines = [
                line for line in "".join([*first_lines, reader.read()]).splitlines() if line.endswith("]")
            ]
        last_saved = max([last_saved, step, *(json.loads(line)[1] for line in lines)])
        saves += len(lines)
    return {"kills": kills, "saves": saves, "loaded": loaded}


def preload_modules():
    """Import the modules that a run imports, so that forks do not have to."""
    read_end, write_end = os.pipe()
    pids = fork_ranks(1, list_imported_modules, write_end)
    os.close(write_end)
    with os.fdopen(read_end) as reader:
        names = reader.read().split()
    assert wait_for_exit(pids) == [0]
    for name in names:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the garbage collections of forks must not copy the pages of imported modules


def list_imported_modules(pipe):
    with tempfile.TemporaryDirectory() as folder:
        run = Run(folder)
        run.set_step(1)
        run.acc.save_state()
        run.acc.load_state()
    with os.fdopen(pipe, "w") as writer:
        writer.write(" ".join(name for name in sys.modules if name != "__main__"))


def main():
    preload_modules()
    for line in sys.stdin:
        request = json.loads(line)
        folder = Path(request.pop("folder"))
        function = {"every call": kill_at_every_call, "at random": kill_at_random}[request.pop("what")]
        print(json.dumps(function(folder=folder, **request)), flush=True)


if __name__ == "__main__":
    main()
