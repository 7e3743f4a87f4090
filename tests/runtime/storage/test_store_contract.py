"""The contract of a store: what saves and loads rely on, after each fault and beside other processes.

Every store runs it. A store contributes a driver like `FileCase` below, which builds stores that fail, lists what is left in
them and changes their bytes, in a module that imports these tests and has fixtures `case` and `each_case` of its own.
"""

from __future__ import annotations

import errno
import itertools
import random
import signal
import tracemalloc
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.processes.children import fork, wait_for_exit
from support.runs.file_system import (
    FOREVER,
    Fault,
    FaultyFileSystem,
    RecordingFileSystem,
    Run,
    act_before_reads,
)

from accel_runtime.storage import file_store
from accel_runtime.storage.any_store import AnyStore
from accel_runtime.storage.errors import AbsentError, CheckpointError
from accel_runtime.storage.file_store import FileStore
from accel_runtime.storage.manifest import NAME, FileEntry, Manifest, hash_bytes
from accel_runtime.storage.store import KeyExistsError, list_numbered, next_number
from accel_runtime.storage.verification import verify_files

OLD = {"model.safetensors": b"old" * 100, "extra/note.txt": b"old"}
NEW = {"model.safetensors": b"new" * 200, "optimizer.safetensors": b"new" * 50}
FAULTS = {
    "fails": Fault(error=errno.EIO),
    "fails from then on": Fault(error=errno.EIO, count=FOREVER),
    "is killed": Fault(),
    "loses the answer": Fault(error=errno.EIO, is_late=True),
    "loses two answers": Fault(error=errno.EIO, is_late=True, count=2),
}
"""The faults of a call."""
DAMAGES: dict[str, Callable[[bytes, bytes, int], bytes | None]] = {
    "a flipped bit": lambda data, _, number: flip(data, number % (8 * len(data))),
    "a flipped bit at the end": lambda data, _, number: flip(data, 8 * len(data) - 1 - number % 32),
    "a truncated file": lambda data, _, number: data[: number % len(data)],
    "a longer file": lambda data, _, number: data + bytes(1 + number % 9),
    "a missing file": lambda *_: None,
    "the file of another checkpoint": lambda _, other, __: other,
}
"""The bytes of a damaged file, for its bytes, those of the same file of another checkpoint, and a random number; None: no file."""


def flip(data, bit):
    """Return bytes with another bit."""
    return data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]


def at(number, action):
    """Return a function that acts at the call of a number, for `build`."""
    return lambda call: action() if call == number else None


class FileCase:
    """Stores in a directory.

    Args:
        folder: An empty folder.
        exchanges: Whether the file system can exchange two directories.
    """

    faults = ("fails", "fails from then on", "is killed")
    keeps_what_is_read = True
    """Whether a checkpoint that is read is not removed; otherwise the reader is not current any more."""
    reads_whole_files = True
    """Whether a load verifies every byte, and not only those that it needs."""

    def __init__(self, folder, *, exchanges=True):
        self.project, self.parent, self._exchanges = folder, f"{folder}/checkpoints", exchanges

    def build(self, fault=Fault(), before_call=None, *, impatient=False):  # noqa: ARG002, B008
        """Return a store with a fault, and the list of its calls.

        Args:
            fault: The fault of a save or a removal.
            before_call: Called before each call of these, with its number.
            impatient: Take every unfinished save for a crashed one, as far as the store cannot know.
        """
        disk = FaultyFileSystem(fault, exchanges=self._exchanges)
        if before_call is not None:
            disk = RecordingFileSystem(exchanges=self._exchanges)
            disk.before_call = lambda number, _: before_call(number)
        return FileStore(disk), disk.calls

    @contextmanager
    def build_reader(self, number, action):
        """Return a store that acts before the call of a number when it reads, and the list of its calls."""
        with act_before_reads({number: action}) as calls:
            yield FileStore(), calls

    def start_run(self, **options):
        """Return a run with its checkpoints in the store."""
        return Run(self.project, disk=self.build()[0].disk, **options)

    def let_time_pass(self):
        """Let leftovers become old enough to be removed: a lock ends with its process."""

    def list_files(self):
        """Return the keys and names of everything in the store."""
        paths = (path for path in Path(self.parent).rglob("*") if path.is_file())
        return sorted(path.relative_to(self.parent).as_posix() for path in paths)

    def expect(self, key_name, parts, save, replaced):  # noqa: ARG002 - names of objects
        """Return what `list_files` returns if the store has one checkpoint, which has replaced an equal one."""
        return sorted(f"{key_name}/{name}" for name in ("checkpoint.json", *parts))

    def read_file(self, key, name):
        """Return the bytes of a part, or of the manifest; None if it is missing."""
        path = Path(key, name)
        return path.read_bytes() if path.exists() else None

    def write_file(self, key, name, data):
        """Change the bytes of a part, or of the manifest; None removes it."""
        path = Path(key, name)
        path.unlink(missing_ok=True) if data is None else path.write_bytes(data)


@pytest.fixture
def case(memory):
    return FileCase(memory)


@pytest.fixture(params=[True, False], ids=["exchange", "two renames"])
def each_case(request, memory):
    """Return the drivers of all ways in which the store replaces a checkpoint."""
    return FileCase(memory, exchanges=request.param)


@pytest.fixture
def store(case):
    return case.build()[0]


def few(count):
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    # A failure is named at once: each example saves and loads, and a smaller one says no more.
    phases = (Phase.explicit, Phase.reuse, Phase.generate)
    return settings(max_examples=count, suppress_health_check=checks, phases=phases)


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


def crash(store, key, save, *, new=False):
    """Leave what a process leaves that is killed within a save."""
    draft = store.begin(key, save, new=new)
    draft.put("data", [memoryview(b"1")], 1)
    draft.close()  # the lock ends with the process


def read(store, key):
    """Return the save and the parts of a checkpoint, once their checksums are verified; None if there is no checkpoint."""
    try:
        verify_files(store, lambda: key)
        with store.open(key) as snapshot:
            return snapshot.checkpoint.manifest.save, read_parts(snapshot)
    except AbsentError:
        return None


def read_parts(snapshot):
    parts = {}
    for name, file in snapshot.checkpoint.manifest.files.items():
        data = bytearray(file.bytes)
        assert snapshot.get_range(name, 0, memoryview(data)) == file.bytes
        parts[name] = bytes(data)
    return parts


def test_parts_are_read_as_they_were_put_in_any_range(store, case):
    key, data = f"{case.parent}/mine", random.Random(5).randbytes(200_007)
    write(store, key, "a1", {"large": data, "empty": b"", "deep/er/small": b"x"})
    assert read(store, key) == ("a1", {"large": data, "empty": b"", "deep/er/small": b"x"})
    with store.open(key) as snapshot:
        for start, length in ((0, 10), (65_533, 9), (len(data) - 4, 10), (len(data) + 5, 3)):
            buffer = bytearray(length)
            count = snapshot.get_range("large", start, memoryview(buffer))
            assert bytes(buffer[:count]) == data[start : start + length]
        with pytest.raises(OSError, match="No such file") as raised:
            snapshot.get_range("absent", 0, memoryview(bytearray(1)))
    assert str(raised.value.filename).endswith("absent")


def test_a_part_of_any_size_takes_bounded_memory_and_pieces_that_are_reused(store, case):
    piece, count = bytearray(1 << 20), 16
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


def test_other_processes_put_parts_and_files_of_hooks_into_a_draft_that_one_has_begun(store, case):
    """Of an equal file that hooks of two processes have written there is one part."""
    key, files = f"{case.parent}/mine", {}
    first = store.begin(key, "a1")
    second = case.build()[0].attach(first.address)
    assert second.is_shared
    drafts = {"of-0": first, "of-1": second}
    for name, draft in drafts.items():
        draft.put(name, [memoryview(name.encode())], len(name))
        (draft.directory() / "extra").mkdir(exist_ok=True)
        (draft.directory() / "extra" / "note.txt").write_text("kept")
    for draft in drafts.values():
        files |= draft.put_hook_files({*drafts})
    assert files == {"extra/note.txt": FileEntry(4, hash_bytes(b"kept"))}
    parts = {"of-0": b"of-0", "of-1": b"of-1", "extra/note.txt": b"kept"}
    first.commit(build_manifest("a1", parts))
    for draft in drafts.values():
        draft.close()
    assert read(store, key) == ("a1", parts)
    with store.open(key) as snapshot:
        folder = snapshot.directory()
        assert (folder / "extra" / "note.txt").read_text() == "kept"
    assert folder.is_dir() == (str(folder) == key)


def test_a_link_that_a_hook_has_made_is_refused(store, case):
    draft = store.begin(f"{case.parent}/mine", "a1")
    (draft.directory() / "link").symlink_to("/dev/null")
    with pytest.raises(CheckpointError, match="it is a link that a hook has made"):
        draft.put_hook_files(())
    draft.discard()
    draft.close()
    assert case.list_files() == []


@few(5)
@given(numbers=st.sets(st.integers(0, 120), min_size=1, max_size=5))
def test_keys_are_listed_in_their_order_and_checkpoints_by_their_numbers(case, numbers):
    store, parent = case.build()[0], f"{case.parent}/{'-'.join(map(str, numbers))}"
    keys = [f"{parent}/checkpoint_{number}" for number in numbers]
    for key in keys:
        write(store, key, "a1", {}, new=True)
    write(store, f"{parent}/best", "a1", {})
    write(store, f"{parent}/logs/deeper", "a1", {})
    assert store.list(parent) == sorted([*keys, f"{parent}/best"])
    assert store.list(f"{parent}/logs") == [f"{parent}/logs/deeper"]
    assert store.list(f"{parent}/nothing") == []
    complete, errors = list_numbered(store, parent)
    assert ([checkpoint.number for checkpoint in complete], errors) == (sorted(numbers), {})
    assert next_number(store, parent) == max(numbers) + 1


def test_a_removed_checkpoint_is_absent_at_once_and_its_name_is_free(store, case):
    key = f"{case.parent}/checkpoint_0"
    write(store, key, "a1", OLD, new=True)
    assert store.delete(key)
    assert (store.list(case.parent), store.exists(key), read(store, key)) == ([], False, None)
    assert store.delete(key)
    write(store, key, "b2", NEW, new=True)
    assert read(store, key) == ("b2", NEW)


# Faults ----------------------------------------------------------------------------------------


def save_with_fault(case, fault, *, new):
    """Save with a fault; return the error, "killed" or None, and whether the call was reached."""
    store, calls = case.build(fault)

    def save():
        write(store, f"{case.parent}/checkpoint_3", "b2", NEW, new=new)

    if fault.error is None:
        code = wait_for_exit(fork(save))
        assert code in {0, -signal.SIGKILL}
        return ("killed" if code else None), bool(code)
    try:
        save()
    except (OSError, CheckpointError) as error:
        return error, True
    return None, len(calls) >= fault.call


def check_complete_or_absent(case, saves):
    """Require that the key has one of these saves (None: no checkpoint), and that the next one leaves nothing of others."""
    store, key = case.build()[0], f"{case.parent}/checkpoint_3"
    found, parts = read(store, key) or (None, None)
    assert found in saves, found
    assert parts == {"a1": OLD, "b2": NEW, None: None}[found]
    case.let_time_pass()
    store = case.build()[0]
    store.remove_leftovers(case.parent, 4)
    assert store.exists(key) == (found is not None)
    write(store, key, "c3", OLD, new=found is None)
    case.let_time_pass()
    store = case.build()[0]
    store.remove_leftovers(case.parent, 4)
    write(store, key, "d4", OLD)
    assert read(store, key) == ("d4", OLD)
    assert case.list_files() == case.expect("checkpoint_3", OLD, "d4", "c3")
    assert store.delete(key)
    assert case.list_files() == []


@pytest.mark.smoke
@pytest.mark.parametrize("new", [True, False], ids=["a new key", "a replacement"])
def test_a_save_with_a_fault_at_any_step_is_complete_or_absent(each_case, new):
    for name in each_case.faults:
        # A store that fails twice may fail where it undoes the commit, or looks if there was one.
        is_single = name in {"fails", "loses the answer"}
        for call in itertools.count(1, 1 if is_single else 2):
            if not new:
                write(each_case.build()[0], f"{each_case.parent}/checkpoint_3", "a1", OLD, new=True)
            error, is_reached = save_with_fault(each_case, replace(FAULTS[name], call=call), new=new)
            old = None if new else "a1"
            check_complete_or_absent(
                each_case, {"b2"} if error is None else {old} if is_single else {old, "b2"}
            )
            if not is_reached:
                break
        assert call > 8, name


def test_leftovers_of_crashed_saves_are_removed_and_running_saves_are_kept(store, case):
    crash(store, f"{case.parent}/checkpoint_0", "a1", new=True)
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
    for name in set(case.faults) - {"is killed"}:
        for call in itertools.count(1):
            crash(case.build()[0], f"{case.parent}/checkpoint_0", "a1", new=True)
            case.let_time_pass()
            store, calls = case.build(replace(FAULTS[name], call=call))
            with suppress(OSError):
                store.remove_leftovers(case.parent, 9)
            case.let_time_pass()
            case.build()[0].remove_leftovers(case.parent, 9)
            assert case.list_files() == [], (name, call)
            if len(calls) < call:
                break


@pytest.mark.parametrize("damage", DAMAGES)
@given(number=st.integers(0, 2**32))
@few(2)
def test_a_damaged_part_is_an_error_that_names_it(case, damage, number):
    store, key, other = case.build()[0], f"{case.parent}/mine", random.Random(number).randbytes(40)
    write(store, key, "a1", {"data": b"12" * 20, "other": b""})
    data = DAMAGES[damage](case.read_file(key, "data"), other, number)
    case.write_file(key, "data", data)
    with pytest.raises(CheckpointError, match=f"{key}/data ") as raised:
        verify_files(store, lambda: key)
    if data is None or len(data) != 40:  # sizes are compared first
        with pytest.raises(CheckpointError) as opened:
            store.open(key)
        assert str(opened.value) == str(raised.value)
    assert store.exists(key)


# Other processes ---------------------------------------------------------------------------------


def test_a_read_at_any_step_of_a_replacement_is_of_one_save(each_case, monkeypatch):
    """It does not wait, except for the renames, also while the replaced checkpoint is removed."""
    monkeypatch.setattr(file_store, "_LOCK_S", 0)  # the writer, in this thread, cannot continue meanwhile
    store, key = each_case.build()[0], f"{each_case.parent}/mine"
    seen, waits = [], []

    def read_beside(_):
        try:
            seen.append(read(store, key))
        except CheckpointError as error:
            waits.append(str(error))

    write(store, key, "a1", OLD)
    writer, _ = each_case.build(before_call=read_beside)
    write(writer, key, "b2", NEW)
    seen.append(read(store, key))
    assert len(waits) <= 4
    assert all("another process has locked it" in wait for wait in waits)
    assert [save for save, _ in seen] == sorted(save for save, _ in seen)
    assert dict(seen) == {"a1": OLD, "b2": NEW}
    assert len(seen) > 8


@pytest.mark.parametrize("numbered", [False, True], ids=["a replacement", "retention"])
def test_a_save_at_any_step_of_a_read_is_read_or_the_one_before(each_case, numbered):
    """With retention, the save has a new number, and the one before is removed."""
    store, steps, found = each_case.build()[0], itertools.count(1), set()

    def save():
        nonlocal current
        current = next(steps)
        key = f"{each_case.parent}/checkpoint_{current if numbered else 0}"
        write(store, key, f"{current:x}", {"data": str(current).encode()}, new=numbered)
        for old in store.list(each_case.parent):
            if old != key:
                store.delete(old)

    def find(reader):
        return list_numbered(reader, each_case.parent)[0][-1].key

    current = 0
    save()
    for number in itertools.count(1):
        old = current
        with each_case.build_reader(number, save) as (reader, calls):
            read_save = verify_files(reader, lambda reader=reader: find(reader)).manifest.save
        assert int(read_save, 16) in {old, old + 1}, number
        found.add(int(read_save, 16) - old)
        if len(calls) < number:
            break
    assert number > 4
    assert found == {0, 1}


def test_an_open_checkpoint_is_read_to_its_end_while_it_is_replaced(case, store):
    key = f"{case.parent}/checkpoint_0"
    write(store, key, "a1", OLD)
    with store.open(key) as snapshot:
        assert snapshot.is_current()
        write(store, key, "b2", NEW)
        if case.keeps_what_is_read:
            write(store, key, "b3", NEW)
        assert not snapshot.is_current()
        assert read_parts(snapshot) == OLD
    write(store, key, "c3", NEW)
    assert not [name for name in case.list_files() if "a1" in name or name.startswith(".")]


def test_an_open_checkpoint_that_is_removed_is_read_to_its_end_or_not_current(case, store):
    key = f"{case.parent}/checkpoint_0"
    write(store, key, "a1", OLD)
    with store.open(key) as snapshot, store.open(key):
        assert store.delete(key) == (not case.keeps_what_is_read)
        assert snapshot.is_current() == case.keeps_what_is_read
        with suppress(*[] if case.keeps_what_is_read else [FileNotFoundError]):
            assert read_parts(snapshot) == OLD
    assert store.delete(key)
    assert (store.list(case.parent), case.list_files()) == ([], [])


def test_of_two_processes_that_take_a_new_key_at_any_step_of_each_other_at_most_one_gets_it(case):
    """If both get an error, the key is free."""
    for number in itertools.count(1):
        key, drafts = f"{case.parent}/checkpoint_{number}", []

        def take(store, save, key=key, drafts=drafts):
            with suppress(KeyExistsError):
                drafts.append(store.begin(key, save, new=True))

        first, calls = case.build(before_call=at(number, lambda take=take: take(case.build()[0], "b2")))
        take(first, "a1")
        is_last = len(calls) < number
        store = case.build()[0]
        take(store, "c3")
        (draft,) = drafts
        draft.commit(build_manifest(draft.address.save, {}))
        draft.close()
        take(store, "d4")
        assert len(drafts) == 1
        assert read(store, key) == (draft.address.save, {})
        if is_last:
            break
    assert number > 3


OTHERS = {
    "saves": lambda store, key: write(store, key, "b2", NEW),
    "begins and gives up": lambda store, key: store.begin(key, "b2").discard(),
    "removes leftovers": lambda store, key: store.remove_leftovers(key.rpartition("/")[0], 999),
    "removes the checkpoint": lambda store, key: store.delete(key),
}


@pytest.mark.parametrize("new", [True, False], ids=["a new key", "a replacement"])
@pytest.mark.parametrize("other", OTHERS)
def test_a_save_is_complete_or_an_error_whatever_another_process_does_at_any_step_of_it(
    each_case, other, new
):
    """The other process takes every save for a crashed one, where the store cannot know."""
    for number in itertools.count(1):
        key, saves, has_acted = f"{each_case.parent}/checkpoint_{number}", {None}, False
        if not new:
            write(each_case.build()[0], key, "a1", OLD)
            saves = {"a1"}

        def act(key=key):
            nonlocal has_acted
            with suppress(CheckpointError):
                OTHERS[other](each_case.build(impatient=True)[0], key)
                has_acted = True

        store, calls = each_case.build(before_call=at(number, act))
        try:
            write(store, key, "c3", NEW, new=new)
            saves = {"c3"}
        except CheckpointError as error:
            assert "another process" in str(error), error
            assert has_acted
        is_last = len(calls) < number
        if has_acted:
            saves |= {"saves": {"b2"}, "removes the checkpoint": {None}}.get(other, set())
        found, parts = read(each_case.build()[0], key) or (None, None)
        assert found in saves, (number, found)
        assert parts == {"a1": OLD, "b2": NEW, "c3": NEW, None: None}[found]
        for save in ("d4", "e5", "f6"):  # leftovers of the other process are removed
            each_case.let_time_pass()
            write(each_case.build()[0], key, save, OLD)
        assert each_case.list_files() == each_case.expect(f"checkpoint_{number}", OLD, "f6", "e5")
        each_case.build()[0].delete(key)
        if is_last:
            break
    assert number > 8


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


def call_in_two_processes(function):
    """Call a function with 0 and 1 in two processes at the same time."""
    pids = [fork(function, number) for number in range(2)]
    assert [wait_for_exit(pid) for pid in pids] == [0, 0]


def test_processes_that_save_to_one_key_at_the_same_time_leave_one_complete_checkpoint(each_case):
    key = f"{each_case.parent}/mine"

    def save_repeatedly(number):
        for iteration in range(8):
            try:
                write(each_case.build()[0], key, f"{number:x}{iteration}", OLD if number else NEW)
            except (CheckpointError, FileNotFoundError) as error:
                # A scratch directory looks like a leftover before it is locked.
                words = "another process", "No such file or directory", "This node does not see"
                assert any(each in str(error) for each in words)

    call_in_two_processes(save_repeatedly)
    save, parts = read(each_case.build()[0], key)
    assert parts == (OLD if save.startswith("1") else NEW)
    write(each_case.build()[0], key, "c3", OLD)
    assert not [name for name in each_case.list_files() if name.startswith(".")]


# Runs ------------------------------------------------------------------------------------------


def test_runs_in_one_project_share_the_numbering_and_a_save_skips_a_number_that_another_one_takes(case):
    first, second = case.start_run(), case.start_run()
    for step, run in enumerate([first, second, second, first], 1):
        assert run.save(step) is None
    found = [(each.number, each.manifest.step) for each in first.acc.checkpoints.list()]
    assert found == [(0, 1), (1, 2), (2, 3), (3, 4)]
    store, _ = case.build()

    class Racing(AnyStore):
        """Another run takes the number once it is chosen."""

        def begin(self, key, save, *, new=False):
            if key.endswith("checkpoint_4"):
                store.begin(key, "abc", new=True)
            return super().begin(key, save, new=new)

    first.acc._checkpoints._store = Racing(store, None)
    assert first.save(5) is None
    assert first.acc.checkpoints.newest().number == 5


def test_runs_that_save_at_the_same_time_lose_no_checkpoint_and_remove_old_ones_without_warnings(
    case, tmp_path, caplog
):
    def save(number):
        run = case.start_run(total_limit=3)
        for iteration in range(8):
            run.set_step(100 * (1 + number) + iteration)
            with (tmp_path / f"{number}").open("a") as file:
                file.write(f"{run.acc.save_state()}\n")
        assert caplog.messages == []

    call_in_two_processes(save)
    paths = [path for number in range(2) for path in (tmp_path / f"{number}").read_text().split()]
    assert len({path.rpartition("checkpoint_")[2] for path in paths}) == len(paths) == 16
    run = case.start_run()
    # A number that both runs tried may remain unused.
    assert run.acc.checkpoints.newest().number >= 15
    assert run.load() % 100 == 7


def test_a_checkpoint_that_retention_removes_within_a_load_is_kept_or_the_load_starts_again(case):
    reader, writer = case.start_run(), case.start_run(total_limit=1)
    assert writer.save(1) is None
    steps = itertools.count(2)

    def save(*_):
        if (step := next(steps)) == 2:
            assert writer.save(step) is None

    reader.acc.register_load_state_pre_hook(save)
    loaded = reader.load()
    assert loaded in ({1} if case.keeps_what_is_read else {1, 2})
    assert len(writer.acc.checkpoints.list()) == (2 if case.keeps_what_is_read else 1)
    assert writer.save(3) is None
    assert len(writer.acc.checkpoints.list()) == 1


def write_note(models, weights, output_dir):
    (Path(output_dir) / "note.txt").write_text("kept")


@given(number=st.integers(0, 2**32))
@few(2)
def test_damage_to_any_file_is_named_and_changes_nothing(case, number):
    """Verification finds it. A load does too before it changes anything or calls a hook, unless it does not read those bytes."""
    another_step = {"another step": lambda data, *_: data.replace(b'"step":4', b'"step":5')}
    check_damage(case, DAMAGES | another_step, number)


@pytest.mark.full
@given(number=st.integers(0, 2**32))
@few(100)
def test_much_damage_to_any_file_is_named_and_changes_nothing(case, number):
    check_damage(case, DAMAGES, number)


def check_damage(case, damages, number):
    """Damage each file of the newest of two checkpoints in turn."""
    run, called = case.start_run(), []
    handle = run.acc.register_save_state_pre_hook(write_note)
    assert run.save(3) is run.save(4) is None
    handle.remove()
    run.set_step(9)
    before, newest = run.acc.checkpoints.list()[-2:]
    run.acc.register_load_state_pre_hook(lambda *_: called.append(1))
    for damage, name in itertools.product(damages, (NAME, *newest.manifest.files)):
        data, other = (case.read_file(each.key, name) for each in (newest, before))
        if (damaged := damages[damage](data, other, number)) == data:
            continue  # both checkpoints have the same file of the hook
        case.write_file(newest.key, name, damaged)
        with pytest.raises(CheckpointError) as raised:
            run.acc.checkpoints.verify(newest.key)
        location = newest.key if name == NAME else f"{newest.key}/{name}"
        assert location in str(raised.value), damage
        if damaged is other is not None and name.endswith(".safetensors"):
            assert "the file is of another save" in str(raised.value)
        try:
            message = run.fail_to_load(newest.key)
        except AssertionError:
            assert not case.reads_whole_files, (damage, name)
            assert run.step() == 4
            run.set_step(9)
        else:
            assert location in message, damage
            assert f"The checkpoint before it is {before.key}, of step 3." in message
            assert called == []
        case.write_file(newest.key, name, data)
        called.clear()
    assert run.acc.checkpoints.verify(newest.key).manifest.step == run.load(newest.key) == 4
    assert called == [1]
