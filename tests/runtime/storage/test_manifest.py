"""Manifests: a round trip returns an equal manifest, and any change of the text is rejected."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from accel_runtime.storage.errors import CheckpointError
from accel_runtime.storage.manifest import Chunk, FileEntry, Manifest, TensorEntry, hash_bytes
from accel_runtime.storage.state_tree import KEY

PATH = Path("somewhere") / "checkpoint.json"
keys = st.text().filter(lambda key: key != KEY)  # a node with it has a schema
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
checksums = st.binary().map(hash_bytes)


@st.composite
def manifests(draw):
    """Generate manifests with tensors that are split along their first dimension, several per file."""
    files, tensors = {}, {}
    for number in range(draw(st.integers(0, 3))):
        file, start = f"item-{number}.safetensors", draw(st.integers(8, 64))
        header = start
        for index in range(draw(st.integers(1, 3))):
            rows = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
            columns, chunks, begin = draw(st.integers(1, 3)), [], 0
            for count in rows:
                size = 4 * count * columns
                chunks.append(Chunk(file, start, size, draw(checksums), (begin, 0), (count, columns)))
                start, begin = start + size, begin + count
            tensors[f"item/{number}.{index}"] = TensorEntry("float32", (begin, columns), tuple(chunks))
        files[file] = FileEntry(start, draw(checksums), header, draw(checksums))
    files |= {
        name: FileEntry(draw(st.integers(0, 9)), draw(checksums))
        for name in draw(st.sets(st.sampled_from("ab")))
    }
    world_size = draw(st.integers(1, 4))
    states = st.lists(json_values, min_size=world_size, max_size=world_size)
    values = draw(st.dictionaries(st.text(), json_values, max_size=3))
    own_names = st.text().filter(lambda name: name not in values)
    return Manifest(
        save=draw(st.text()),
        saved_at="2026-11-21T15:00:00Z",
        world_size=world_size,
        step=draw(st.integers(0, 2**60)),
        versions={"accel": "1"},
        values=values,
        values_by_rank=draw(st.dictionaries(own_names, states, max_size=2)),
        tensors=tensors,
        files=files,
        class_names=draw(st.dictionaries(st.text(), st.text(), max_size=2)),
    )


@given(manifests())
@settings(max_examples=40)
def test_parsing_the_text_of_a_manifest_returns_an_equal_manifest(manifest):
    assert Manifest.parse(manifest.text(), PATH) == manifest


@given(manifests(), st.data())
@settings(max_examples=60)
def test_a_changed_inserted_or_missing_character_is_detected(manifest, data):
    text = manifest.text()
    at = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.characters(codec="ascii").filter(lambda c: c != text[at]))
    rest = data.draw(st.sampled_from([text[at + 1 :], text[at:], ""]))
    with pytest.raises(CheckpointError, match="is damaged"):
        Manifest.parse(text[:at] + other * bool(rest) + rest, PATH)


@given(manifests())
@settings(max_examples=25)
def test_the_verified_parts_cover_every_byte_of_the_files_once(manifest):
    parts = list(manifest.parts(["item"]))
    for name, file in manifest.files.items():
        ranges = sorted(
            (chunk.start, chunk.bytes) for _, chunk in parts if chunk.file == name and chunk.bytes
        )
        end = 0
        for start, length in ranges:
            assert start == end
            end += length
        assert end == file.bytes


@example("{}")
@example("null")
@example('{"checksum":1}')
@given(st.text())
def test_any_other_text_is_not_a_manifest(text):
    with pytest.raises(CheckpointError, match="it is not a checkpoint manifest"):
        Manifest.parse(text, PATH)


def make_part(manifest, ranks, chunks=slice(1, None)):
    """Return a manifest of 8 ranks that has the states of some ranks, and some chunks of each tensor."""
    tensors = {name: replace(entry, chunks=entry.chunks[chunks]) for name, entry in manifest.tensors.items()}
    states = {
        item: [states[0] if rank in ranks else None for rank in range(8)]
        for item, states in manifest.values_by_rank.items()
    }
    return replace(manifest, world_size=8, ranks=ranks, tensors=tensors, values_by_rank=states)


@given(manifests(), st.sampled_from([(0,), (2, 3), (1, 4, 7)]))
@settings(max_examples=40)
def test_the_part_of_a_node_has_the_states_of_its_ranks_and_tensors_without_some_elements(manifest, ranks):
    part = Manifest.parse(make_part(manifest, ranks).text(), PATH)
    assert part == make_part(manifest, ranks)
    assert part.is_node_part
    for name, entry in part.tensors.items():
        assert part.find_incomplete("item") is not None
        assert math.prod(entry.shape) * 4 > entry.bytes, name


@given(manifests().filter(lambda manifest: manifest.tensors))
@settings(max_examples=25)
def test_a_manifest_that_names_no_ranks_has_every_element(manifest):
    with pytest.raises(CheckpointError, match="do not cover the tensor exactly once"):
        Manifest.parse(make_part(manifest, ()).text(), PATH)


@pytest.mark.parametrize("ranks", [(3, 1), (2, 2), (8,), tuple(range(8))])
def test_ranks_of_a_part_that_cannot_be_are_refused(ranks):
    manifest = Manifest("s", "2026-11-21T15:00:00Z", 8, 0, {}, {}, ranks=ranks)
    with pytest.raises(CheckpointError, match="should be some ranks in order"):
        Manifest.parse(manifest.text(), PATH)


def test_chunks_of_a_part_do_not_overlap():
    chunks = tuple(
        Chunk("f", 8 + 16 * number, 16, hash_bytes(b""), (start, 0), (2, 2))
        for number, start in enumerate((0, 1))
    )
    tensors = {"item/x": TensorEntry("float32", (9, 2), chunks)}
    files = {"f": FileEntry(40, hash_bytes(b""), 8, hash_bytes(b""))}
    manifest = Manifest("s", "2026-11-21T15:00:00Z", 8, 0, {}, {}, {}, tensors, files, ranks=(1,))
    with pytest.raises(CheckpointError, match="cover elements twice"):
        Manifest.parse(manifest.text(), PATH)
    apart = replace(chunks[1], offsets=(2, 0))
    tensors["item/x"] = replace(tensors["item/x"], chunks=(chunks[0], apart))
    assert Manifest.parse(manifest.text(), PATH).tensors == tensors
