"""Two writers in S3: at one key, in one project, and one that was slow. Their checkpoints are never mixed."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest
from support.runs.file_system import Run
from support.s3.fault_proxy import Hook
from support.s3.runs import connect, open_objects, set_client

from accel_runtime.storage.errors import AbsentError, CheckpointError
from accel_runtime.storage.manifest import NAME, FileEntry, Manifest, hash_bytes
from accel_runtime.storage.verification import verify_files

pytestmark = pytest.mark.usefixtures("on_the_cpu", "by_value")

OLD, NEW = {"a": b"old", "b": b"old" * 1000}, {"a": b"new", "b": b"new" * 1000}


def write(store, key, save, parts, *, new=False):
    """Save parts under a key."""
    draft = store.begin(key, save, new=new)
    try:
        for name, data in parts.items():
            draft.put(name, [memoryview(data)], len(data))
        files = {name: FileEntry(len(data), hash_bytes(data)) for name, data in parts.items()}
        draft.commit(Manifest(save, "2026-11-27T15:00:00Z", 1, 1, {}, {}, files=files))
    except BaseException:
        draft.discard()
        raise
    finally:
        draft.close()


def read(store, key):
    """Return the parts of a checkpoint, all verified; None if there is none."""
    try:
        with store.open(key) as snapshot:
            files, parts = snapshot.checkpoint.manifest.files, {}
            for name, file in files.items():
                buffer = bytearray(file.bytes)
                snapshot.get_range(name, 0, memoryview(buffer))
                parts[name] = bytes(buffer)
            return parts
    except AbsentError:
        return None


@pytest.fixture
def writers(s3_proxy):
    """Return a slow writer and a fast one, for which every unfinished save is an old one."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(open_objects(s3_proxy.address(name), leftover_age_s=-3600))
            for name in ("slow", "fast")
        ]


def test_of_two_writers_at_one_key_the_slower_one_gets_an_error(s3_proxy, s3_url, writers):
    slow, fast = writers
    key = f"{s3_url}/mine"
    write(slow, key, "a1", OLD)
    commit = {"method": "PUT", "key": f"/{NAME}$", "client": "slow", "count": 1}
    s3_proxy.inject(Hook(lambda _: write(fast, key, "b2", NEW)), **commit)
    with pytest.raises(CheckpointError, match="another process has saved it meanwhile"):
        write(slow, key, "c3", OLD)
    assert read(slow, key) == NEW


@pytest.mark.parametrize("new", [True, False], ids=["a new key", "a chosen key"])
@pytest.mark.parametrize("when", ["parts", "commit"])
def test_a_save_that_was_taken_for_a_crashed_one_is_complete_or_an_error(
    s3_proxy, s3_url, writers, new, when
):
    """Another process removes the parts of a slow save, between two parts or just before its commit."""
    slow, fast = writers
    key = f"{s3_url}/checkpoint_3"

    def clean(_request):
        if new:
            fast.remove_leftovers(s3_url, 4)
        else:
            fast.begin(key, "b2").discard()

    # The first write of the manifest reserves the key.
    pattern, first = (f"/{NAME}$", 2) if when == "commit" else ("/b$", 1)
    s3_proxy.inject(Hook(clean), method="PUT", key=pattern, client="slow", first=first, count=1)
    with pytest.raises(CheckpointError, match="another process"):
        write(slow, key, "a1", OLD, new=new)
    assert read(slow, key) is None
    write(slow, key, "c3", NEW, new=new)
    assert read(slow, key) == NEW


def test_a_name_is_replaced_without_the_proxy_which_removes_the_quotes_of_etags(s3_server, s3_url):
    key = f"{s3_url}/mine"
    with open_objects(s3_server.address) as store:
        write(store, key, "a1", OLD)
        draft = store.begin(key, "b2")
        write(store, key, "c3", NEW)
        with pytest.raises(CheckpointError, match="another process has saved it meanwhile"):
            draft.commit(Manifest("b2", "2026-11-27T15:00:00Z", 1, 1, {}, {}, files={}))
        draft.discard()
        draft.close()
        assert read(store, key) == NEW


# Runs ------------------------------------------------------------------------------------------


def save_steps(url, addresses, first, automatic):
    """Save five steps; return the paths of those that were saved, and the errors."""
    with set_client(addresses[0]):
        run = Run(url, automatic=automatic)
    paths, errors = [], []
    with connect(run.acc, addresses):
        for step in range(first, first + 5):
            run.set_step(step)
            try:
                paths.append((run.acc.save_state(None if automatic else f"{url}/mine"), step))
            except CheckpointError as error:
                errors.append(str(error))
    return paths, errors


def load_steps(url, addresses, paths):
    """Return the steps of checkpoints, each of which has the state of one step."""
    with set_client(addresses[0]):
        run = Run(url)
    with connect(run.acc, addresses):
        return [run.load(path) for path in paths]


def save_in_two_runs(clusters, url, addresses, *, automatic):
    """Save in a run of one rank and in one of two ranks at the same time; return what each has saved, and the errors."""
    results = {}

    def save(size):
        results[size] = clusters[size].run(save_steps, url, addresses, 100 * size, automatic)[0]

    thread = threading.Thread(target=save, args=(2,))
    thread.start()
    save(1)
    thread.join()
    return {size: paths for size, (paths, _) in results.items()}, [
        error for _, errors in results.values() for error in errors
    ]


@pytest.mark.slow
def test_two_runs_in_one_project_get_numbers_of_their_own(clusters, s3_proxy, s3_url):
    addresses = [s3_proxy.address()]
    saved, errors = save_in_two_runs(clusters, s3_url, addresses, automatic=True)
    assert errors == []
    paths = [path for each in saved.values() for path, _ in each]
    assert sorted(int(path.rpartition("_")[2]) for path in paths) == list(range(10))
    for size, each in saved.items():
        steps = [step for _, step in each]
        assert clusters[size].run(load_steps, s3_url, addresses, [path for path, _ in each]) == [steps] * size


def test_two_runs_that_save_to_one_key_leave_the_checkpoint_of_one(clusters, s3_proxy, s3_server, s3_url):
    addresses = [s3_proxy.address()]
    saved, errors = save_in_two_runs(clusters, s3_url, addresses, automatic=False)
    assert all("another process has saved it meanwhile" in error for error in errors)
    steps = [step for each in saved.values() for _, step in each]
    assert len(steps) + len(errors) == 10
    with open_objects(s3_server.address) as store:
        step = verify_files(store, lambda: f"{s3_url}/mine").manifest.step
    assert step in steps
    size = step // 100
    assert clusters[size].run(load_steps, s3_url, addresses, [f"{s3_url}/mine"]) == [[step]] * size
