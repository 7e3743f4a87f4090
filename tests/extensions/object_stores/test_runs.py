"""Runs with checkpoints in objects, with a client that keeps them in a folder: locations, requests, bytes that each rank reads."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest
from support.object_stores.folder_client import PIECE_BYTES, Bucket
from support.object_stores.runs import build_script
from support.runs.file_system import FOREVER, Fault, Run
from support.runs.recorded_runs import Script, start_training, train_batch
from support.runs.sharded_runs import set_settings
from torch import nn

from accel_runtime import Accelerator, ProjectConfiguration
from accel_runtime.checkpoint import load
from accel_runtime.checkpoint import save as save_module
from accel_runtime.extensions.object_stores import drafts as objects_drafts
from accel_runtime.extensions.object_stores import store as objects_store
from accel_runtime.extensions.object_stores.store import ObjectStore
from accel_runtime.storage import store as store_module
from accel_runtime.storage.any_store import AnyStore
from accel_runtime.storage.errors import CheckpointError
from accel_runtime.storage.file_store import FileStore

pytestmark = pytest.mark.usefixtures("on_the_cpu", "by_value")


def test_the_location_of_a_checkpoint_has_a_name_and_a_parent_and_a_service_that_fails_is_an_error_with_a_cure(
    memory,
):
    project = ProjectConfiguration("s3://bucket/run", automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    accelerator._checkpoints._store = AnyStore(FileStore(), lambda _: ObjectStore(Bucket(memory)))
    accelerator.prepare(nn.Linear(2, 2))
    saved, checkpoints = accelerator.save_state(), accelerator.checkpoints
    found = [
        accelerator.resume(saved),
        accelerator.load_state(),
        checkpoints.newest(),
        checkpoints.verify(),
        *checkpoints.list(),
    ]
    assert {each.path for each in found} == {saved} == {"s3://bucket/run/checkpoints/checkpoint_0"}
    assert {each.path.name for each in found} == {"checkpoint_0"}
    assert {each.path.parent for each in found} == {checkpoints.directory}
    assert checkpoints.directory / "checkpoint_0" == saved
    failing = ObjectStore(Bucket(memory, Fault(1, errno.EIO, FOREVER)))
    accelerator._checkpoints._store = AnyStore(FileStore(), lambda _: failing)
    checkpoints = accelerator.checkpoints
    for call in (checkpoints.list, checkpoints.any, checkpoints.newest, checkpoints.verify):
        with pytest.raises(CheckpointError, match=r"^s3://bucket/run\S*: Input/output error\. Check the "):
            call()


class DeepBucket(Bucket):
    """A bucket that counts the requests of a save that wait for each other; several keys are removed by one request."""

    depth = 0

    def before_call(self, _):
        self.depth += 1

    def delete(self, keys):
        keys, depth = list(keys), self.depth
        super().delete(keys)
        self.depth = depth + bool(keys)

    def call_in_parallel(self, function, items, **_):
        """Count as `parallel_map` would with a thread for each item."""
        start, ends, results = self.depth, [self.depth], []
        for item in items:
            self.depth = start
            results.append(function(item))
            ends.append(self.depth)
        self.depth = max(ends)
        return results


def test_a_save_waits_for_as_many_round_trips_whatever_the_number_of_checkpoints_that_are_kept(
    memory, monkeypatch
):
    bucket = DeepBucket(memory)
    for module in (store_module, objects_store, objects_drafts, save_module):
        monkeypatch.setattr(module, "parallel_map", bucket.call_in_parallel)
    numbered, named = Run(Path("/runs/1"), total_limit=4), Run(Path("/runs/2"), automatic=False)
    depths = []
    for step in range(5):
        bucket.depth = 0
        numbered.acc._checkpoints._store = named.acc._checkpoints._store = ObjectStore(bucket)
        assert numbered.save(step) is None
        depths.append(bucket.depth)
    # The first one looks for checkpoints of an earlier run, the last one removes a checkpoint.
    assert depths == [13, 12, 12, 12, 18]
    for step in range(3):
        bucket.depth = 0
        assert named.save(step, "/runs/2/best") is None
    assert bucket.depth == 10


def test_without_memory_for_a_copy_damage_is_reported_as_a_partial_load(memory, monkeypatch):
    run, bucket = Run(Path("/runs/1")), Bucket(memory)
    run.acc._checkpoints._store = ObjectStore(bucket)
    assert run.save(1) is None
    run.set_step(5)
    monkeypatch.setattr(load, "read_available_memory", lambda: 10)
    assert run.load() == 1
    (key,) = (each.key for each in bucket.list("/runs/1/") if each.key.endswith("/model.safetensors"))
    bucket.put(key, bucket.get(key)[0][:-1] + b"x")
    with pytest.raises(CheckpointError, match="training state is now inconsistent"):
        run.acc.load_state()


# On the ranks ------------------------------------------------------------------------------------


class CountingBucket(Bucket):
    """Counts the bytes that are read of each object, and the bytes that are written."""

    def __init__(self, folder):
        super().__init__(folder)
        self.read, self.written = {}, 0

    def read_ranges(self, requests):
        for request in requests:
            self.read[request.key] = self.read.get(request.key, 0) + len(request.buffer)
        super().read_ranges(requests)

    def put(self, key, data, **condition):
        self.written += len(data)
        return super().put(key, data, **condition)


WIDTH = 256
PARAMETERS = 4 * WIDTH * WIDTH
STATE_BYTES = 3 * 4 * PARAMETERS
"""Weights and two moments, of 32 bits."""
OTHER_BYTES = 150_000
"""The first and the last layer, manifests, headers and random states of all ranks."""


def build_model():
    layers = [nn.Linear(3, WIDTH, bias=False), *(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1, bias=False))


def call_in_run(folder, sharded, call):
    """Call a function of a run; return the bytes that were read and written, and the files that were created."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    bucket, script = CountingBucket(folder), Script(**{**vars(build_script()), "model": build_model})
    # Other processes of this machine write into the folder that all share.
    tempfile.tempdir = tempfile.mkdtemp()
    try:
        with set_settings({"parallel_dp_shard": size} if sharded and size > 1 else {}):
            run = start_training(script, 5)
            run.accelerator._checkpoints._store = ObjectStore(bucket, piece_bytes=PIECE_BYTES)
            call(run)
        files = [each.name for each in Path(tempfile.tempdir).iterdir()]
    finally:
        tempfile.tempdir = None
    return sum(bucket.read.values()), bucket.written, files


def save(run):
    train_batch(run, next(iter(run.loader)))
    run.accelerator.save_state("/runs/1/saved")


def load_saved(run):
    run.accelerator.load_state("/runs/1/saved")


CASES = [(1, 2, False), (2, 1, False), (2, 2, True), (1, 2, True)]
"""The number of ranks before and after, and if models are sharded."""


@pytest.mark.smoke
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_a_rank_writes_its_share_reads_its_state_once_and_creates_no_file(clusters, memory, case):
    """A sharded rank reads its shards if they were saved as such, otherwise the tensors that contain them, which have checksums."""
    before, after, sharded = case
    for _, written, _ in clusters[before].run(call_in_run, memory, sharded, save):
        assert written <= STATE_BYTES / before + OTHER_BYTES
    needed = STATE_BYTES / after if sharded and before == after else STATE_BYTES
    for read, _, files in clusters[after].run(call_in_run, memory, sharded, load_saved):
        assert needed <= read <= needed + OTHER_BYTES
        assert files == []
    assert not Path("/runs").exists()


def save_and_load(folder):
    """Save and load checkpoints, with hooks, retention and a failure on one rank; return what is found."""
    run = Run(Path("/runs/1"), total_limit=2)

    def use_bucket(fault=None):
        run.acc._checkpoints._store = ObjectStore(Bucket(folder, fault), piece_bytes=PIECE_BYTES)

    use_bucket()
    notes = []
    run.acc.register_save_state_pre_hook(
        lambda *args: (Path(args[2]) / f"note-{run.rank}.txt").write_text(f"{run.rank}")
    )
    handle = run.acc.register_load_state_pre_hook(
        lambda _, path: notes.extend(sorted(file.name for file in Path(path).iterdir()))
    )
    errors = [run.save(step, in_background=step == 2) for step in (1, 2, 3)]
    steps = [run.load()]
    handle.remove()
    use_bucket(Fault(2, errno.EIO) if run.rank == 1 else None)
    errors.append(run.save(4))
    use_bucket()
    steps += [run.load(), run.load("/runs/1/checkpoints/checkpoint_1")]
    errors.append(run.save(5))
    run.acc.wait_for_everyone()  # rank 0 removes old checkpoints
    keys = [(checkpoint.key, checkpoint.manifest.step) for checkpoint in run.acc.checkpoints.list()]
    return errors, [*steps, run.load()], notes, keys


def test_two_processes_save_and_load_and_an_error_on_one_is_one_on_both(pair, memory):
    results = pair.run(save_and_load, memory)
    assert results[0] == results[1]
    errors, steps, notes, keys = results[0]
    assert errors[:3] == [None] * 3
    assert "Input/output error" in errors[3]
    assert errors[4] is None
    assert steps == [3, 3, 2, 5]
    assert notes == ["note-0.txt", "note-1.txt"]
    assert [(key.rpartition("/")[2], step) for key, step in keys] == [
        ("checkpoint_2", 3),
        ("checkpoint_3", 5),
    ]
