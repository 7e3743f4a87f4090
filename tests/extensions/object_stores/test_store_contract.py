"""The contract of a store, for the store of objects with a client that keeps them in a folder."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

import pytest
from runtime.storage.test_store_contract import *  # noqa: F403 - the contract of every store
from runtime.storage.test_store_contract import FAULTS, OLD, FileCase, at, read, write
from support.object_stores.folder_client import PIECE_BYTES, Bucket
from support.runs.file_system import Fault, Run

from accel_runtime.extensions.object_stores.store import LEFTOVER_AGE_S, ObjectStore
from accel_runtime.storage.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("by_value")


class ObjectCase:
    """Stores in a bucket; `FileCase` describes the functions."""

    faults = tuple(FAULTS)
    keeps_what_is_read = False
    reads_whole_files = False

    def __init__(self, folder):
        self.parent, self._folder, self._seconds = "/runs/1/checkpoints", folder, 0

    def build(self, fault=None, before_call=None, *, impatient=False):
        bucket = Bucket(self._folder, fault or Fault())
        bucket.seconds = self._seconds
        if before_call is not None:
            bucket.before_call = before_call
        age = -LEFTOVER_AGE_S if impatient else LEFTOVER_AGE_S
        return ObjectStore(bucket, None, age, PIECE_BYTES, bucket.now), bucket.calls

    @contextmanager
    def build_reader(self, number, action):
        yield self.build(before_call=at(number, action))

    def start_run(self, **options):
        run = Run(Path("/runs/1"), **options)
        run.acc._checkpoints._store = self.build()[0]
        return run

    def let_time_pass(self):
        self._seconds += 7200

    def list_files(self):
        stored = Bucket(self._folder).list(f"{self.parent}/")
        return sorted(each.key.removeprefix(f"{self.parent}/") for each in stored)

    def expect(self, key_name, parts, save, replaced):
        names = [f"parts/{each}/{name}" for name in parts for each in (save, replaced)]
        return sorted(f"{key_name}/{name}" for name in ("checkpoint.json", *names))

    def _locate(self, key, name):
        bucket = Bucket(self._folder)
        (found,) = {
            each.key for each in bucket.list(f"{key}/") if each.key.removesuffix(f"/{name}") != each.key
        } or {f"{key}/{name}"}
        return bucket, found

    def read_file(self, key, name):
        bucket, found = self._locate(key, name)
        return bucket.get(found)[0]

    def write_file(self, key, name, data):
        bucket, found = self._locate(key, name)
        bucket.delete([found]) if data is None else bucket.put(found, data)


@pytest.fixture
def case(memory):
    return ObjectCase(memory)


@pytest.fixture
def each_case(case):
    return case


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


def test_different_files_of_one_name_are_an_error_since_hooks_do_not_share_a_directory(case, store):
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
