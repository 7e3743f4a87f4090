"""The store of checkpoints in an object store: the commit is a conditional write of the manifest. Imports no torch.

    KEY/checkpoint.json               the manifest: its conditional write is the commit
    KEY/parts/SAVE/NAME               a part of the save SAVE
    KEY/parts/SAVE/NAME/00000         a piece of a large part
    KEY/.drafts/SAVE                  says that SAVE is being written to a key that the script has chosen
    PARENT/.drafts/checkpoint_3/SAVE  the same for a new key

No object but the manifest is ever changed, and a manifest names the parts of one save: what is read is of one save. A commit
replaces the manifest object of the beginning, on the condition that it is unchanged, so that of two writers one gets an error. The
first save under a key writes an object in its place, which reserves it. docs/design/object-stores.md has the reasons.
"""

from __future__ import annotations

import builtins
import json
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from accel_runtime.environment.text import parse_json
from accel_runtime.extensions.object_stores.client import ConditionError, Level, ObjectClient
from accel_runtime.extensions.object_stores.drafts import (
    DRAFTS,
    HOOKS,
    PARTS,
    PIECE_BYTES,
    Committed,
    ObjectDraft,
    ObjectSnapshot,
    fence_manifest,
    find_missing_part,
    find_pieces,
    list_save,
    read_manifest,
    release_key,
    reserve_key,
)
from accel_runtime.storage.errors import AbsentError, CheckpointError, StoreError
from accel_runtime.storage.manifest import NAME, Checkpoint, parse_number
from accel_runtime.storage.store import (
    DraftAddress,
    KeyExistsError,
    Store,
    child_key,
    parallel_map,
    split_key,
)

__all__ = ["LEFTOVER_AGE_S", "ObjectStore"]

LEFTOVER_AGE_S = 3600.0
"""Seconds since the last write of an unfinished save after which it is taken for a crashed one."""
_CHANGES = 100
"""Number of changes by other processes after which a reader gives up: each is a save or a removal."""
_PROBE = "probe"


class ObjectStore(Store):
    """Checkpoints as objects; a key is a URL such as `s3://bucket/run/checkpoint_3`.

    Args:
        client: The calls to the services.
        run: Identity of this run. Unfinished saves of an earlier attempt of it are removed at once.
        leftover_age_s: Seconds since its last write after which another unfinished save is removed.
        piece_bytes: Most bytes of an object.
        now: The clock.
    """

    def __init__(
        self,
        client: ObjectClient,
        run: Mapping[str, str] | None = None,
        leftover_age_s: float = LEFTOVER_AGE_S,
        piece_bytes: int = PIECE_BYTES,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.client, self._piece_bytes = client, piece_bytes
        self._run, self._leftover_age_s, self._now = dict(run or {}), leftover_age_s, now

    def begin(self, key: str, save: str, *, new: bool = False) -> ObjectDraft:
        """Reserve a new key, or remember the manifest that the commit replaces; `Store.begin` has the arguments."""
        parent, name = split_key(key)
        marker = f"{parent}/{DRAFTS}/{name}/{save}" if new else f"{key}/{DRAFTS}/{save}"
        if not new:
            self._remove_old_saves(key)
        self.client.put(marker, self._describe_draft())
        try:
            replaces = self._reserve_new(key, save) if new else self._find_replaced(key, save)
        except (OSError, CheckpointError):
            with suppress(OSError):
                release_key(self.client, key, save)
                self.client.delete([marker])
            raise
        address = DraftAddress(key, save, f"{key}/{PARTS}/{save}")
        return ObjectDraft(self.client, address, self._piece_bytes, marker, replaces)

    def _reserve_new(self, key: str, save: str) -> str:
        etag = reserve_key(self.client, key, save)
        level = self.client.list_level(f"{key}/")
        if etag is not None and not level.folders and level.objects == (NAME,):
            return etag
        raise KeyExistsError(f"{key} was just created by another process. Save again.")

    def _find_replaced(self, key: str, save: str) -> str:
        for _ in range(_CHANGES):
            committed = read_manifest(self.client, key)
            etag = reserve_key(self.client, key, save) if committed is None else committed.etag
            if etag is not None:
                return etag
        raise CheckpointError(f"{key} was changed while it was read. Try again.")

    def attach(self, address: DraftAddress) -> ObjectDraft:
        """Return the draft on another process; nothing is read or written."""
        return ObjectDraft(self.client, address, self._piece_bytes, None, "")

    def open(self, key: str) -> ObjectSnapshot:
        """Read the manifest, and compare the sizes of all objects with it."""
        error: CheckpointError | None = None
        for _ in range(_CHANGES):
            committed = read_manifest(self.client, key)
            if committed is None or committed.is_reserved:
                raise AbsentError(f"{key} is not a checkpoint: it has no {NAME}")
            manifest = committed.parse(f"{key}/{NAME}")
            # A directory that a tool has uploaded has its files beside the manifest.
            for location in (f"{key}/{PARTS}/{manifest.save}", key):
                pieces = find_pieces(self.client, location, manifest.files)
                missing = find_missing_part(key, manifest, pieces)
                if missing is None:
                    return ObjectSnapshot(self.client, Checkpoint(key, manifest), pieces)
                error = missing if pieces or error is None else error
            current = read_manifest(self.client, key)
            if current is not None and current.etag == committed.etag:
                break
        assert error is not None
        raise error

    def find_each(self, keys: Sequence[str]) -> builtins.list[Checkpoint | CheckpointError]:
        """Read several manifests at the same time."""
        return parallel_map(self._try_find, keys, waits_for_network=True)

    def list(self, parent: str) -> list[str]:
        """Return the keys below a parent; those that were only reserved too."""
        level = self.client.list_level(f"{parent}/")
        names = {name for name in level.folders if parse_number(name) is not None}
        others = [name for name in level.folders if name not in {DRAFTS, *names}]
        levels = self._list_levels(*(f"{parent}/{name}/" for name in others))
        names |= {name for name, other in zip(others, levels, strict=True) if NAME in other.objects}
        if DRAFTS in level.folders:
            names |= set(self.client.list_level(f"{parent}/{DRAFTS}/").folders)
        return [child_key(parent, name) for name in sorted(names)]

    def exists(self, key: str) -> bool:
        """Return whether a key has objects, or is reserved."""
        parent, name = split_key(key)
        level, drafts = self._list_levels(f"{key}/", f"{parent}/{DRAFTS}/{name}/")
        return NAME in level.objects or bool({PARTS, DRAFTS} & set(level.folders)) or bool(drafts.objects)

    def delete(self, key: str) -> bool:
        """Remove the manifest and then its parts; a crash in between is recovered by `remove_leftovers`."""
        parent, name = split_key(key)
        drafts = f"{parent}/{DRAFTS}/{name}/"
        stored, new = parallel_map(self._list_names, (f"{key}/", drafts), waits_for_network=True)
        own, saves = _group_by_save(stored)
        # Read last: a save that has no draft any more was committed, or given up.
        committed = read_manifest(self.client, key)
        current = None if committed is None else committed.save
        markers, parts = [], [f"{key}/{each}" for each in _list_uploaded_files(committed, stored)]
        if current is not None:
            markers = [f"{drafts}{current}"]
            self.client.put(markers[0], self._describe_draft())
        self.client.delete([f"{key}/{NAME}"])
        for save, names in saves.items():
            if save == current or save not in {*own, *new}:
                parts += [f"{key}/{each}" for each in names]
        self.client.delete(parts)
        self.client.delete(markers)
        return True

    def _list_names(self, prefix: str) -> builtins.list[str]:
        return [each.key.removeprefix(prefix) for each in self.client.list(prefix)]

    def _list_levels(self, *prefixes: str) -> builtins.list[Level]:
        return parallel_map(self.client.list_level, prefixes, waits_for_network=True)

    def _describe_draft(self) -> bytes:
        return json.dumps({"run": self._run}).encode()

    def check_access(self, parent: str) -> None:
        """Write, read, list and remove an object below a parent."""
        probe = f"{parent}/{DRAFTS}/{_PROBE}/{uuid.uuid4().hex}"
        try:
            with suppress(ConditionError):  # the answer to the first attempt was lost
                self.client.put(probe, b"probe", if_absent=True)
            self.client.get(probe)
            self.client.list_level(f"{parent}/")
            self.client.delete([probe])
        except StoreError as error:
            reason = f"checkpoints cannot be saved there: {error.strerror}"
            raise StoreError(parent, reason, error.cure) from None

    def remove_leftovers(self, parent: str, below: int) -> None:
        """Remove what is left of new keys that were never committed, or removed by a process that has crashed."""
        names: dict[str, set[str]] = {}
        drafts, probes = f"{parent}/{DRAFTS}/", []
        for stored in self.client.list(drafts):
            name, _, save = stored.key.removeprefix(drafts).partition("/")
            names.setdefault(name, set()).add(save)
            if name == _PROBE and self._now() - stored.modified > self._leftover_age_s:
                probes.append(stored.key)
        self.client.delete(probes)
        for name, saves in names.items():
            number = parse_number(name)
            if number is not None and number < below:
                self._recover(f"{parent}/{name}", f"{drafts}{name}", saves)

    def _recover(self, key: str, drafts: str, saves: set[str]) -> None:
        """Remove the unfinished saves of a new key, and then its reservation."""
        committed = read_manifest(self.client, key)
        for save in saves - {committed.save if committed is not None else None}:
            if not self._is_crashed(key, f"{drafts}/{save}", save):
                return
            # A process that was only slow must not commit a save whose parts are removed.
            if committed is not None:
                committed = fence_manifest(self.client, key, committed)
                if committed is None:
                    return
            self._delete_parts(key, save)
        if committed is not None and committed.is_reserved:
            self.client.delete([f"{key}/{NAME}"])
        self.client.delete([f"{drafts}/{save}" for save in saves])

    def _remove_old_saves(self, key: str) -> None:
        """Remove saves under a chosen key that crashed, and those that were replaced before the current one."""
        parts, own = self._list_levels(f"{key}/{PARTS}/", f"{key}/{DRAFTS}/")
        saves, drafts = set(parts.folders), set(own.objects)
        if not saves | drafts:
            return
        # Read last: a save that has no draft any more was committed, or given up.
        committed = read_manifest(self.client, key)
        current = None if committed is None else committed.save
        for save in sorted((saves | drafts) - {current}):
            marker = f"{key}/{DRAFTS}/{save}"
            # Of a reserved key, the draft may be that of a new one.
            if save in drafts or committed is None or committed.is_reserved:
                if not self._is_crashed(key, marker, save):
                    continue
                if committed is not None:
                    committed = fence_manifest(self.client, key, committed)
                    if committed is None:
                        return
            self._delete_parts(key, save)
            if save in drafts:
                self.client.delete([marker])
        if current in drafts:
            self.client.delete([f"{key}/{DRAFTS}/{current}"])

    def _is_crashed(self, key: str, marker: str, save: str) -> bool:
        """Return whether the process that writes a save has certainly or probably ended."""
        with suppress(
            FileNotFoundError, ValueError, AttributeError
        ):  # of a marker that accel has not written
            run = parse_json(self.client.get(marker)[0]).get("run")
            if run and run == self._run:
                return True  # an earlier attempt of this run, whose processes have ended
        return self._is_old(marker) and self._is_old(f"{key}/{PARTS}/{save}/")

    def _is_old(self, prefix: str) -> bool:
        folder = prefix if prefix.endswith("/") else f"{split_key(prefix)[0]}/"
        written = [each.modified for each in self.client.list(folder) if each.key.startswith(prefix)]
        return self._now() - max(written, default=0.0) > self._leftover_age_s

    def _delete_parts(self, key: str, save: str) -> None:
        self.client.delete(list_save(self.client, key, save))


def _group_by_save(stored: Iterable[str]) -> tuple[set[str], dict[str, list[str]]]:
    """Return the saves under a key that are running, and the names of objects of each save: parts, and claims of hooks."""
    drafts, saves = set(), dict[str, list[str]]()
    for each in stored:
        folder, _, rest = each.partition("/")
        name, _, inner = rest.partition("/")
        if folder == PARTS or (folder == DRAFTS and inner):
            saves.setdefault(name.removesuffix(HOOKS), []).append(each)
        elif folder == DRAFTS:
            drafts.add(name)
    return drafts, saves


def _list_uploaded_files(committed: Committed | None, stored: Iterable[str]) -> Iterable[str]:
    """Return the files of a manifest that are beside it, as in a directory that a tool has uploaded."""
    if committed is None or committed.save is None:
        return ()
    return committed.parse("").files.keys() & set(stored)
