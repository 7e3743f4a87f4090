"""The contract of a store: what saves and loads rely on, for directories and for a store with the operations of an object store.

`FileCase` and `ObjectCase` make a store of their kind, let it fail, and list what is left in it.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import signal
import tracemalloc
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.object_store import PIECE_BYTES, Bucket, Outage
from support.processes import fork, wait_for_exit
from support.runs.file_system import Fault, FaultyFileSystem, RecordingFileSystem, Run
from torch import nn

from accel_runtime import Accelerator, ProjectConfiguration
from accel_runtime.checkpoint import save as save_module
from accel_runtime.extensions.object_stores import drafts as objects_drafts
from accel_runtime.extensions.object_stores import store as objects_store
from accel_runtime.extensions.object_stores.store import ObjectStore
from accel_runtime.storage import file_store
from accel_runtime.storage import store as store_module
from accel_runtime.storage.any_store import AnyStore
from accel_runtime.storage.errors import AbsentError, CheckpointError
from accel_runtime.storage.file_store import FileStore
from accel_runtime.storage.manifest import FileEntry, Manifest, hash_bytes
from accel_runtime.storage.store import KeyExistsError, Store, list_numbered, next_number
from accel_runtime.storage.verification import verify_files

OLD = {"model.safetensors": b"old" * 100, "extra/note.txt": b"old"}
NEW = {"model.safetensors": b"new" * 200, "optimizer.safetensors": b"new" * 50}


class FileCase:
    """Stores in a directory."""

    hows = ("fails", "fails forever")

    def __init__(self, folder):
        self.parent = f"{folder}/checkpoints"

    def build(self, call=0, how="fails", before_call=None):
        """Return a store whose call of this number fails, and the list of its calls; `before_call` runs before each."""
        error = None if how == "ends" else errno.EIO
        disk = FaultyFileSystem(Fault(call, error, forever=how == "fails forever"))
        if before_call is not None:
            disk = RecordingFileSystem()
            disk.before_call = lambda *_: before_call()
        return FileStore(disk), disk.calls

    def let_time_pass(self):
        """Let leftovers become old enough to be removed: a lock ends with its process."""

    def list_files(self):
        """Return the keys and names of everything in the store."""
        paths = (path for path in Path(self.parent).rglob("*") if path.is_file())
        return sorted(path.relative_to(self.parent).as_posix() for path in paths)

    def expect(self, key_name, parts, save, replaced):  # noqa: ARG002 - names of objects
        """Return what `list_files` returns if the store has one checkpoint, which has replaced an equal one."""
        return sorted(f"{key_name}/{name}" for name in ("checkpoint.json", *parts))

    def damage(self, key, save, name):  # noqa: ARG002
        """Replace a part."""
        Path(key, name).write_bytes(b"123")


class ObjectCase:
    """Stores in a bucket."""

    hows = ("fails", "fails forever", "answer lost", "answer lost twice")

    def __init__(self, folder):
        self.parent, self._folder, self._seconds = "runs/1/checkpoints", folder, 0

    def build(self, call=0, how="fails", before_call=None):
        count = {"fails forever": 1000, "answer lost twice": 2}.get(how, 1)
        outage = Outage(call, how.removesuffix(" forever").removesuffix(" twice"), count)
        bucket = Bucket(self._folder, outage)
        bucket.seconds = self._seconds
        if before_call is not None:
            bucket.before_call = before_call
        return ObjectStore(bucket, piece_bytes=PIECE_BYTES, now=bucket.now), bucket.calls

    def let_time_pass(self):
        self._seconds += 7200

    def list_files(self):
        stored = Bucket(self._folder).list(f"{self.parent}/")
        return sorted(each.key.removeprefix(f"{self.parent}/") for each in stored)

    def expect(self, key_name, parts, save, replaced):
        names = [f"parts/{each}/{name}" for name in parts for each in (save, replaced)]
        return sorted(f"{key_name}/{name}" for name in ("checkpoint.json", *names))

    def damage(self, key, save, name):
        Bucket(self._folder).put(f"{key}/parts/{save}/{name}", b"123")


CASES = {"directory": FileCase, "object store": ObjectCase}


@pytest.fixture(params=CASES)
def case(request, memory):
    return CASES[request.param](memory)


@pytest.fixture
def store(case):
    return case.build()[0]


def build_manifest(save, parts, step=1):
    files = {name: FileEntry(len(data), hash_bytes(data)) for name, data in parts.items()}
    return Manifest(save, "2026-11-27T15:00:00Z", 1, step, {}, {}, files=files)


def write(store, key, save, parts, *, new=False):
    """Save a checkpoint as `save_state` does."""
    draft = store.begin(key, save, new=new)
    try:
        for name, data in parts.items():
            draft.put(name, [memoryview(data)], len(data))
        draft.commit(build_manifest(save, parts))
    except BaseException:
        draft.discard()
        raise
    finally:
        draft.close()


def read(store, key):
    """Return the save and the parts of a checkpoint, once their checksums are verified."""
    verify_files(store, lambda: key)
    with store.open(key) as snapshot:
        return snapshot.checkpoint.manifest.save, read_parts(snapshot)


def read_parts(snapshot):
    parts = {}
    for name, file in snapshot.checkpoint.manifest.files.items():
        data = bytearray(file.bytes)
        assert snapshot.get_range(name, 0, memoryview(data)) == file.bytes
        parts[name] = bytes(data)
    return parts


def test_the_interface_is_complete_for_both_stores(store):
    assert isinstance(store, Store)


def test_parts_are_read_as_they_were_put_in_any_range(store, case):
    key, data = f"{case.parent}/mine", random.Random(5).randbytes(3 * PIECE_BYTES + 7)
    write(store, key, "a1", {"large": data, "empty": b"", "deep/er/small": b"x"})
    assert read(store, key) == ("a1", {"large": data, "empty": b"", "deep/er/small": b"x"})
    with store.open(key) as snapshot:
        for start, length in ((0, 10), (PIECE_BYTES - 3, 9), (len(data) - 4, 10), (len(data) + 5, 3)):
            buffer = bytearray(length)
            count = snapshot.get_range("large", start, memoryview(buffer))
            assert bytes(buffer[:count]) == data[start : start + length]
        with pytest.raises(OSError, match="No such file") as raised:
            snapshot.get_range("absent", 0, memoryview(bytearray(1)))
    assert str(raised.value.filename).endswith("absent")


def test_a_part_of_any_size_takes_bounded_memory_and_pieces_that_are_reused(store, case):
    piece, count = bytearray(1 << 20), 48
    write(store, f"{case.parent}/other", "a1", {"large": b""})  # modules are imported
    draft = store.begin(f"{case.parent}/mine", "a1")

    def generate():
        for number in range(count):
            piece[:] = bytes([number]) * len(piece)
            yield memoryview(piece)

    tracemalloc.start()
    try:
        draft.put("large", generate(), count * len(piece))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20
    parts = {"large": b"".join(bytes([number]) * len(piece) for number in range(count))}
    draft.commit(build_manifest("a1", parts))
    draft.close()
    assert read(store, f"{case.parent}/mine")[1] == parts


def test_a_draft_is_not_visible_before_the_commit_and_nothing_stays_of_a_discarded_one(store, case):
    key = f"{case.parent}/checkpoint_0"
    draft = store.begin(key, "a1", new=True)
    draft.put("data", [memoryview(b"1")], len(b"1"))
    with pytest.raises(AbsentError):
        store.open(key)
    assert (store.list(case.parent), next_number(store, case.parent)) == ([key], 1)
    draft.discard()
    draft.close()
    assert (store.list(case.parent), store.exists(key), case.list_files()) == ([], False, [])


def test_other_processes_put_parts_into_a_draft_that_one_has_begun(store, case):
    first = store.begin(f"{case.parent}/mine", "a1")
    second = case.build()[0].attach(first.address)
    assert second.is_shared
    second.put("of-1", [memoryview(b"1")], len(b"1"))
    first.put("of-0", [memoryview(b"0")], len(b"0"))
    first.commit(build_manifest("a1", {"of-0": b"0", "of-1": b"1"}))
    for draft in (first, second):
        draft.close()
    assert read(store, first.address.key) == ("a1", {"of-0": b"0", "of-1": b"1"})


def test_files_of_hooks_become_parts_and_load_hooks_find_them(store, case):
    key, draft = f"{case.parent}/mine", store.begin(f"{case.parent}/mine", "a1")
    draft.put("model.safetensors", [memoryview(b"1")], len(b"1"))
    (draft.directory() / "extra").mkdir()
    (draft.directory() / "extra" / "note.txt").write_text("kept")
    files = draft.put_hook_files({"model.safetensors"})
    assert files == {"extra/note.txt": FileEntry(4, hash_bytes(b"kept"))}
    draft.commit(build_manifest("a1", {"model.safetensors": b"1", "extra/note.txt": b"kept"}))
    draft.close()
    with store.open(key) as snapshot:
        folder = snapshot.directory()
        assert (folder / "extra" / "note.txt").read_text() == "kept"
    assert folder.is_dir() == (str(folder) == key)


def test_an_equal_file_that_hooks_of_two_processes_have_written_is_one_part(store, case):
    first = store.begin(f"{case.parent}/mine", "a1")
    drafts, files = [first, store.attach(first.address)], {}
    for draft in drafts:
        (draft.directory() / "note.txt").write_text("kept")
    for draft in drafts:
        files |= draft.put_hook_files(())
    assert files == {"note.txt": FileEntry(4, hash_bytes(b"kept"))}
    first.commit(build_manifest("a1", {"note.txt": b"kept"}))
    for draft in drafts:
        draft.close()
    assert read(store, first.address.key)[1] == {"note.txt": b"kept"}


def test_a_directory_that_a_tool_has_uploaded_is_read_and_removed_as_a_checkpoint(memory):
    directory, bucket = FileCase(memory / "files"), Bucket(memory / "objects")
    write(directory.build()[0], f"{directory.parent}/checkpoint_0", "a1", OLD)
    for name in directory.list_files():
        bucket.put(f"runs/{name}", Path(directory.parent, name).read_bytes())
    store = ObjectStore(bucket)
    assert store.list("runs") == ["runs/checkpoint_0"]
    assert read(store, "runs/checkpoint_0") == ("a1", OLD)
    assert store.delete("runs/checkpoint_0")
    assert bucket.list("runs/") == []


def test_different_files_of_one_name_are_an_error_if_hooks_do_not_share_a_directory(memory):
    store = ObjectCase(memory).build()[0]
    first = store.begin("mine", "a1")
    second = store.attach(first.address)
    for number, draft in enumerate((first, second)):
        (draft.directory() / "note.txt").write_text(f"{number}")
    first.put_hook_files(())
    with pytest.raises(
        CheckpointError, match=r"different files of this name on two processes\. Write it on one\."
    ):
        second.put_hook_files(())
    for draft in (first, second):
        draft.discard()
        draft.close()
    assert store.client.list("mine/") == []


def test_a_link_that_a_hook_has_made_is_refused(store, case):
    draft = store.begin(f"{case.parent}/mine", "a1")
    (draft.directory() / "link").symlink_to("/dev/null")
    with pytest.raises(CheckpointError, match="it is a link that a hook has made"):
        draft.put_hook_files(())
    draft.discard()
    draft.close()
    assert case.list_files() == []


def save_with_failure(case, before, call, how):
    """Save with a failing call; return the error, and whether the call was reached."""
    store, calls = case.build(call, how)
    try:
        write(store, f"{case.parent}/checkpoint_3", "b2", NEW, new=not before)
    except (OSError, CheckpointError) as error:
        return error, True
    return None, len(calls) >= call


def check_complete_or_absent(case, before, saves):
    """Require that the key has one of these saves (None: no checkpoint), and that the next one leaves nothing of others."""
    store, _ = case.build()
    key = f"{case.parent}/checkpoint_3"
    try:
        found, parts = read(store, key)
    except AbsentError:
        found = None
    else:
        assert parts == (OLD if found == "a1" else NEW)
    assert found in saves, found
    case.let_time_pass()
    store, _ = case.build()
    store.remove_leftovers(case.parent, 4)
    assert store.exists(key) == (found is not None)
    write(store, key, "c3", OLD, new=found is None)
    case.let_time_pass()
    store, _ = case.build()
    store.remove_leftovers(case.parent, 4)
    write(store, key, "d4", OLD)
    assert read(store, key) == ("d4", OLD)
    assert case.list_files() == case.expect("checkpoint_3", OLD, "d4", "c3")
    assert store.delete(key)
    assert case.list_files() == []


@pytest.mark.parametrize("before", [False, True], ids=["a new key", "a replacement"])
def test_a_save_with_a_failure_at_any_step_is_complete_or_absent(case, before):
    for how in case.hows:
        for call in itertools.count(1):
            if before:
                write(case.build()[0], f"{case.parent}/checkpoint_3", "a1", OLD, new=True)
            error, reached = save_with_failure(case, before, call, how)
            old = "a1" if before else None
            # If the store fails again, the error may come after the commit.
            fails_again = how in {"fails forever", "answer lost twice"}
            saves = {"b2"} if error is None else {old, "b2"} if fails_again else {old}
            check_complete_or_absent(case, before, saves)
            if not reached:
                break
        assert call > 8, how


@pytest.mark.parametrize("before", [False, True], ids=["a new key", "a replacement"])
def test_a_save_whose_process_is_killed_at_any_step_is_complete_or_absent(case, before):
    for call in itertools.count(1, 2):
        if before:
            write(case.build()[0], f"{case.parent}/checkpoint_3", "a1", OLD, new=True)
        code = wait_for_exit(fork(lambda call=call: save_with_failure(case, before, call, "ends")))
        check_complete_or_absent(case, before, {"a1" if before else None, "b2"} if code else {"b2"})
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert call > 8


def test_a_read_at_any_step_of_a_replacement_is_of_one_save(case, store, monkeypatch):
    monkeypatch.setattr(file_store, "_LOCK_S", 0)  # the writer, in this thread, cannot continue meanwhile
    key, seen, waits = f"{case.parent}/mine", [], []

    def read_beside():
        try:
            seen.append(read(store, key))
        except CheckpointError as error:
            waits.append(str(error))

    write(store, key, "a1", OLD)
    writer, _ = case.build(before_call=read_beside)
    write(writer, key, "b2", NEW)
    seen.append(read(store, key))
    assert len(waits) <= 2
    assert all("another process has locked it" in wait for wait in waits)
    assert [save for save, _ in seen] == sorted(save for save, _ in seen)
    assert dict(seen) == {"a1": OLD, "b2": NEW}
    assert len(seen) > 8


def test_an_open_checkpoint_is_read_to_its_end_while_it_is_replaced(case, store):
    key = f"{case.parent}/checkpoint_0"
    write(store, key, "a1", OLD)
    with store.open(key) as snapshot:
        assert snapshot.is_current()
        write(store, key, "b2", NEW)
        assert not snapshot.is_current()
        assert read_parts(snapshot) == OLD
    write(store, key, "c3", NEW)
    assert not [name for name in case.list_files() if "a1" in name]


def test_an_open_checkpoint_that_is_removed_is_read_to_its_end_or_not_current(case, store):
    key = f"{case.parent}/checkpoint_0"
    write(store, key, "a1", OLD)
    with store.open(key) as snapshot:
        is_removed = store.delete(key)
        assert snapshot.is_current() == (not is_removed)
        try:
            assert read_parts(snapshot) == OLD
        except FileNotFoundError:
            assert is_removed
    assert store.delete(key)
    assert (store.list(case.parent), case.list_files()) == ([], [])


def test_one_of_two_processes_takes_a_new_key(store, case):
    key = f"{case.parent}/checkpoint_0"
    first = store.begin(key, "a1", new=True)
    with pytest.raises(KeyExistsError):
        case.build()[0].begin(key, "b2", new=True)
    first.commit(build_manifest("a1", {}))
    first.close()
    with pytest.raises(KeyExistsError):
        store.begin(key, "c3", new=True)
    assert read(store, key) == ("a1", {})


def test_of_two_saves_to_one_key_that_overlap_one_is_complete_and_the_other_an_error(store, case):
    key, errors, drafts = f"{case.parent}/mine", [], []
    write(store, key, "a1", OLD)
    for save, parts in (("b2", NEW), ("c3", OLD)):
        try:
            drafts.append((store.begin(key, save), parts))
            for name, data in parts.items():
                drafts[-1][0].put(name, [memoryview(data)], len(data))
        except CheckpointError as error:
            errors.append(error)
    for draft, parts in drafts:
        try:
            draft.commit(build_manifest(draft.address.save, parts))
        except CheckpointError as error:
            errors.append(error)
            draft.discard()
        draft.close()
    assert ["another process" in str(error) for error in errors] == [True]
    assert read(store, key) == ("b2", NEW)


def test_processes_that_save_to_one_key_at_the_same_time_leave_one_complete_checkpoint(case):
    key = f"{case.parent}/mine"

    def save_repeatedly(number):
        for iteration in range(8):
            # A scratch directory looks like a leftover before it is locked.
            with suppress(CheckpointError, FileNotFoundError):
                write(case.build()[0], key, f"{number:x}{iteration}", OLD if number else NEW)

    pids = [fork(save_repeatedly, number) for number in range(2)]
    assert [wait_for_exit(pid) for pid in pids] == [0, 0]
    save, parts = read(case.build()[0], key)
    assert parts == (OLD if save.startswith("1") else NEW)


@settings(max_examples=10, deadline=None)
@given(numbers=st.sets(st.integers(0, 120), min_size=1, max_size=5))
def test_keys_are_listed_in_their_order_and_checkpoints_by_their_numbers(numbers, tmp_path_factory):
    for kind in CASES.values():
        case = kind(tmp_path_factory.mktemp("store"))
        store, keys = case.build()[0], [f"{case.parent}/checkpoint_{number}" for number in numbers]
        for key in keys:
            write(store, key, "a1", {}, new=True)
        write(store, f"{case.parent}/best", "a1", {})
        write(store, f"{case.parent}/logs/deeper", "a1", {})
        assert store.list(case.parent) == sorted([*keys, f"{case.parent}/best"])
        assert store.list(f"{case.parent}/logs") == [f"{case.parent}/logs/deeper"]
        assert store.list(f"{case.parent}/nothing") == []
        complete, errors = list_numbered(store, case.parent)
        assert ([checkpoint.number for checkpoint in complete], errors) == (sorted(numbers), {})
        assert next_number(store, case.parent) == max(numbers) + 1


def test_a_removed_checkpoint_is_absent_at_once_and_its_name_is_free(store, case):
    key = f"{case.parent}/checkpoint_0"
    write(store, key, "a1", OLD, new=True)
    assert store.delete(key)
    assert (store.list(case.parent), store.exists(key)) == ([], False)
    with pytest.raises(AbsentError):
        store.open(key)
    assert store.delete(key)
    write(store, key, "b2", NEW, new=True)
    assert read(store, key) == ("b2", NEW)


def test_leftovers_of_crashed_saves_are_removed_and_running_saves_are_kept(store, case):
    def crash():
        draft = case.build()[0].begin(f"{case.parent}/checkpoint_0", "a1", new=True)
        draft.put("data", [memoryview(b"1")], len(b"1"))
        os.kill(os.getpid(), signal.SIGKILL)

    assert wait_for_exit(fork(crash)) == -signal.SIGKILL
    store.remove_leftovers(case.parent, 0)
    assert case.list_files()
    case.let_time_pass()
    store = case.build()[0]
    running = store.begin(f"{case.parent}/checkpoint_1", "b2", new=True)
    running.put("data", [memoryview(b"1")], len(b"1"))
    store.remove_leftovers(case.parent, 9)
    assert store.list(case.parent) == [f"{case.parent}/checkpoint_1"]
    running.commit(build_manifest("b2", {"data": b"1"}))
    running.close()
    assert read(store, running.address.key) == ("b2", {"data": b"1"})


def test_a_removal_of_leftovers_that_fails_at_any_step_is_completed_by_the_next_one(case):
    def crash():
        draft = case.build()[0].begin(f"{case.parent}/checkpoint_0", "a1", new=True)
        draft.put("data", [memoryview(b"1")], len(b"1"))
        os.kill(os.getpid(), signal.SIGKILL)

    for how in case.hows:
        for call in itertools.count(1):
            assert wait_for_exit(fork(crash)) == -signal.SIGKILL
            case.let_time_pass()
            store, calls = case.build(call, how)
            with suppress(OSError):
                store.remove_leftovers(case.parent, 9)
            case.let_time_pass()
            case.build()[0].remove_leftovers(case.parent, 9)
            assert case.list_files() == [], (how, call)
            if len(calls) < call:
                break


def test_a_missing_or_damaged_part_is_an_error_that_names_it(store, case):
    key = f"{case.parent}/mine"
    write(store, key, "a1", {"data": b"12"})
    case.damage(key, "a1", "data")
    with pytest.raises(CheckpointError, match=f"{key}/data "):
        store.open(key)
    assert store.exists(key)


# Runs ------------------------------------------------------------------------------------------


def start_project(folder):
    """Return a prepared Accelerator whose project is in a bucket."""
    project = ProjectConfiguration("s3://bucket/run", automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    accelerator._checkpoints._store = AnyStore(FileStore(), lambda _: ObjectStore(Bucket(folder)))
    accelerator.prepare(nn.Linear(2, 2))
    return accelerator


def test_the_location_of_a_checkpoint_has_a_name_and_a_parent_in_every_store(memory):
    accelerator = start_project(memory)
    saved = accelerator.save_state()
    found = [
        accelerator.resume(saved),
        accelerator.load_state(),
        accelerator.checkpoints.newest(),
        accelerator.checkpoints.verify(),
        *accelerator.checkpoints.list(),
    ]
    assert {each.path for each in found} == {saved} == {"s3://bucket/run/checkpoints/checkpoint_0"}
    assert {each.path.name for each in found} == {"checkpoint_0"}
    assert {each.path.parent for each in found} == {accelerator.checkpoints.directory}
    assert accelerator.checkpoints.directory / "checkpoint_0" == saved


def test_a_store_that_fails_is_a_checkpoint_error_with_a_cure(memory):
    accelerator = start_project(memory)
    accelerator.save_state()
    failing = ObjectStore(Bucket(memory, Outage(1, "fails", 1000)))
    accelerator._checkpoints._store = AnyStore(FileStore(), lambda _: failing)
    checkpoints = accelerator.checkpoints
    for call in (checkpoints.list, checkpoints.any, checkpoints.newest, checkpoints.verify):
        with pytest.raises(CheckpointError, match=r"^s3://bucket/run\S*: Input/output error\. Check the "):
            call()


class CountingBucket(Bucket):
    """A bucket that counts the requests of a save that wait for each other; several keys are removed by one request."""

    depth = 0

    def before_call(self):
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
    bucket = CountingBucket(memory)
    for module in (store_module, objects_store, objects_drafts, save_module):
        monkeypatch.setattr(module, "parallel_map", bucket.call_in_parallel)
    numbered, named = Run(Path("/runs/1"), total_limit=4), Run(Path("/runs/2"), automatic=False)
    depths = []
    for step in range(5):
        bucket.depth = 0
        numbered.acc._checkpoints._store = named.acc._checkpoints._store = ObjectStore(bucket)
        assert numbered.save(step) is None
        depths.append(bucket.depth)
    assert depths == [12, 12, 12, 12, 18]  # the last one removes a checkpoint
    for step in range(3):
        bucket.depth = 0
        assert named.save(step, "/runs/2/best") is None
    assert bucket.depth == 10


# A run of two processes -----------------------------------------------------------------------


def save_and_load_objects(folder):
    """Save and load checkpoints of a run in a bucket, with hooks, retention and a failure on one rank; return what is found."""
    run = Run(Path("/runs/1"), total_limit=2)

    def use_bucket(outage=None):
        run.acc._checkpoints._store = ObjectStore(Bucket(folder, outage), piece_bytes=PIECE_BYTES)

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
    use_bucket(Outage(2, "fails") if run.rank == 1 else None)
    errors.append(run.save(4))
    use_bucket()
    steps += [run.load(), run.load("/runs/1/checkpoints/checkpoint_1")]
    errors.append(run.save(5))
    run.acc.wait_for_everyone()  # rank 0 removes old checkpoints
    keys = [(checkpoint.key, checkpoint.manifest.step) for checkpoint in run.acc.checkpoints.list()]
    return errors, [*steps, run.load()], notes, keys


def test_two_processes_save_and_load_in_a_store_that_is_not_a_directory(pair, memory):
    results = pair.run(save_and_load_objects, memory)
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
    assert not Path("/runs").exists()
