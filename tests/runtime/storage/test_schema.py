"""Every field of a manifest is checked: a forged one is refused with the file and the field, in bounded time and memory."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.runs.file_system import Run, write_manifest

from accel_cli.commands import checkpoint_operations
from accel_cli.errors import AccelError
from accel_runtime.checkpoint.serialization import serialize
from accel_runtime.storage.directory import read_checkpoint
from accel_runtime.storage.errors import CheckpointError
from accel_runtime.storage.manifest import (
    NAME,
    Chunk,
    FileEntry,
    Manifest,
    TensorEntry,
    _is_covered,
    hash_bytes,
)
from accel_runtime.storage.schema import FieldError
from accel_runtime.storage.tensor_file import MergeRequest

DELETED = object()
VALUES = [
    None,
    True,
    -1,
    0,
    3,
    2**63,
    10**400,
    1.5,
    "text",
    "",
    [],
    {},
    [[1]],
    {"$": "tensor"},
    {"$": []},
    "\ud800",
    DELETED,
]
KEPT = Path(__file__).parents[2] / "data" / "checkpoint"


def list_places(node, place=()):
    """Return the keys that lead to every value of JSON."""
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    inside = [deeper for key, child in children for deeper in list_places(child, (*place, key))]
    return [*([place] if place else []), *inside]


def change(body, place, value):
    parent = body
    for key in place[:-1]:
        parent = parent[key]
    if value is DELETED:
        del parent[place[-1]]
    else:
        parent[place[-1]] = value


def read_body(path):
    return json.loads((path / NAME).read_text())["checkpoint"]


@pytest.fixture(scope="module")
def kept(module_memory):
    """Return a copy of the kept checkpoint and a checkpoint of a sharded tensor, with the text of each manifest."""
    shutil.copytree(KEPT, module_memory / "kept" / "checkpoint_0")
    write_tensor(
        module_memory / "sharded" / "checkpoint_0",
        (4, 2),
        [([0, 0], (2, 2)), ([2, 0], (2, 1)), ([2, 1], (2, 1))],
    )
    paths = [module_memory / name / "checkpoint_0" for name in ("kept", "sharded")]
    return {path: json.dumps(read_body(path)) for path in paths}


@pytest.fixture(scope="module")
def run(module_memory):
    run = Run(module_memory / "project")
    assert run.save(3) is None
    return run


def call_commands(path, item):
    """Call what reads a checkpoint; each call may raise errors of accel only."""
    root = str(path)
    for call in (
        lambda: checkpoint_operations.list_checkpoints(root),
        lambda: checkpoint_operations.show_checkpoint(root, tensors=True),
        lambda: checkpoint_operations.verify_checkpoint(root, lambda *_: None),
        lambda: checkpoint_operations.export_checkpoint(
            root, str(path.parent / "out"), MergeRequest(item), lambda *_: None
        ),
        lambda: checkpoint_operations.prune_checkpoints(str(path.parent), 1, lambda *_: None),
    ):
        try:
            call()
        except AccelError as error:
            assert root in str(error) or error.exit_code == 2


@given(st.data())
@settings(max_examples=120)
def test_a_changed_field_of_a_manifest_ends_in_an_error_of_accel(kept, run, data):
    """Of a command, and of a load for a checkpoint of this run."""
    saved = run.acc.checkpoints.directory / "checkpoint_0"
    texts = kept | {saved: json.dumps(read_body(saved))}
    path = data.draw(st.sampled_from(sorted(texts)))
    body = json.loads(texts[path])
    place = data.draw(st.sampled_from(list_places(body)))
    change(body, place, data.draw(st.sampled_from(VALUES)))
    original = (path / NAME).read_text()
    write_manifest(path, json.dumps(body))
    is_item = len(place) > 1 and place[0] in {"values", "values_by_rank", "tensors"}
    try:
        call_commands(path, place[1].split("/")[0] if is_item else "model")
        if path == saved:
            run.set_step(9)
            run.acc.load_state(path)
    except CheckpointError as error:
        assert str(path) in str(error)
    finally:
        (path / NAME).write_text(original)


WRONG_FIELDS = {
    "step": "text",
    "step ": -1,
    "world_size": 2**40,
    "world_size ": 0,
    "saved_at": 1,
    "save": [],
    "versions": {"accel": 1},
    "run": {"launch": None},
    "class_names": {"model": {}},
    "files/model.safetensors/header": "8",
    "files/model.safetensors/header ": 10**9,
    "files/model.safetensors/checksum": "x",
    "tensors/model.0.bias/dtype": 1,
    "tensors/model.0.bias/shape": [-8],
    "tensors/model.0.bias/chunks/0/start": 1.5,
    "values/step_counts": {"steps": "text"},
    "values/accumulation": {"cycle": {}},
    "values/random": {"process": {"states": {"python": [1]}}},
    "values/loader": {"loader": {"epoch": 1, "next_epoch": {"kind": "map_style", "offset": -1}}},
    "values/optimizer": {"groups": [{}], "state": {}, "other": {}, "extra": {}},
    "values/replicas": 3,
    "values/model": [],
}


@pytest.mark.parametrize("field", WRONG_FIELDS)
def test_a_wrong_field_is_named_and_nothing_changes(run, memory, field):
    path = Path(shutil.copytree(run.acc.checkpoints.directory / "checkpoint_0", memory / "checkpoint_0"))
    body = read_body(path)
    place = [
        int(key) if key.isdecimal() else key.replace("model.0", "model/0") for key in field.strip().split("/")
    ]
    change(body, place, WRONG_FIELDS[field])
    write_manifest(path, json.dumps(body))
    run.set_step(9)
    message = run.fail_to_load(path)
    assert str(path) in message
    assert str(place[1] if place[0] == "values" else place[-1]) in message


UNUSUAL_TEXTS = {
    "a repeated key": lambda text: text.replace('"step":', '"step":1,"step":', 1),
    "nan": lambda text: text.replace('"step":', '"more":NaN,"step":', 1),
    "an infinite number": lambda text: text.replace('"step":', '"more":1e999,"step":', 1),
    "a number of 100,000 digits": lambda text: text.replace('"step":', f'"more":{"9" * 100_000},"step":', 1),
    "nested lists": lambda text: text.replace('"step":', f'"more":{"[" * 100_000}{"]" * 100_000},"step":', 1),
    "nested objects": lambda text: text.replace(
        '"replicas":', f'"more":{chr(123)}"a":' * 400 + "1" + "}" * 400 + ',"replicas":', 1
    ),
}


@pytest.mark.parametrize("name", UNUSUAL_TEXTS)
def test_json_that_accel_does_not_write_is_refused(run, memory, name):
    path = Path(shutil.copytree(run.acc.checkpoints.directory / "checkpoint_0", memory / "checkpoint_0"))
    text = UNUSUAL_TEXTS[name](json.dumps(read_body(path), separators=(",", ":")))
    write_manifest(path, text)
    with pytest.raises(CheckpointError, match=r"is damaged|cannot be used"):
        read_checkpoint(path)


def test_a_state_that_is_nested_too_deep_is_not_saved():
    state = []
    for _ in range(200):
        state = [state]
    with pytest.raises(CheckpointError, match="inside each other"):
        serialize(state, "registered")


def test_the_deepest_state_that_is_saved_can_be_read(memory):
    run = Run(memory)
    run.set_step(1)
    deep = {}
    for number in range(90):
        deep = {number: deep}
    run.log.state["deep"] = deep
    path = run.acc.save_state()
    run.log.state = {}
    run.acc.load_state(path)
    assert run.log.state["deep"] == deep
    call_commands(Path(path), "registered")


def write_tensor(path, shape, regions):
    """Write a checkpoint of one float32 tensor that is split into regions."""
    path.mkdir(parents=True)
    header = (8).to_bytes(8, "little") + b"{}      "
    data, chunks = bytearray(header), []
    for offsets, sizes in regions:
        part = bytes(4 * int(torch.tensor(sizes).prod()))
        chunks.append(
            Chunk("model.safetensors", len(data), len(part), hash_bytes(part), tuple(offsets), tuple(sizes))
        )
        data += part
    (path / "model.safetensors").write_bytes(data)
    manifest = Manifest(
        "handmade",
        "2026-11-21T15:00:00Z",
        1,
        1,
        {},
        {"model": {"w": {"$": "tensor", "name": "model/w"}}},
        tensors={"model/w": TensorEntry("float32", tuple(shape), tuple(chunks))},
        files={
            "model.safetensors": FileEntry(
                len(data), hash_bytes(bytes(data)), len(header), hash_bytes(header)
            )
        },
    )
    (path / NAME).write_text(manifest.text())


@pytest.mark.parametrize("dimension", [0, 1])
def test_a_tensor_of_many_chunks_is_read_in_linear_time(memory, dimension):
    count = 2000
    shape = (count, 2) if dimension == 0 else (2, count)
    sizes = (1, 2) if dimension == 0 else (2, 1)
    regions = [([number, 0] if dimension == 0 else [0, number], sizes) for number in range(count)]
    write_tensor(memory / "checkpoint_0", shape, regions)
    call_commands(memory / "checkpoint_0", "model")
    assert len(read_checkpoint(memory / "checkpoint_0").manifest.tensors["model/w"].chunks) == count


@st.composite
def regions_in_a_shape(draw):
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    edges = [draw(st.lists(st.integers(0, size), max_size=2)) for size in shape]
    cuts = [sorted({0, size, *edge}) for size, edge in zip(shape, edges, strict=True)]
    spans = [list(itertools.pairwise(cut)) or [(0, 0)] for cut in cuts]
    regions = [
        (tuple(start for start, _ in region), tuple(end - start for start, end in region))
        for region in itertools.product(*spans)
    ]
    for _ in range(draw(st.integers(0, 2))):  # forged
        offsets = tuple(draw(st.integers(0, size)) for size in shape)
        sizes = tuple(draw(st.integers(0, size - start)) for start, size in zip(offsets, shape, strict=True))
        regions[draw(st.integers(0, len(regions) - 1))] = offsets, sizes
    return shape, regions


@given(regions_in_a_shape())
@settings(max_examples=300)
def test_chunks_cover_a_tensor_if_every_element_is_in_exactly_one(case):
    shape, regions = case
    counts = torch.zeros(shape, dtype=torch.int64)
    for offsets, sizes in regions:
        counts[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))] += 1
    assert _is_covered(shape, regions) == bool((counts == 1).all())
    chunks = (
        Chunk("f", 0, 4 * math.prod(sizes), hash_bytes(b""), offsets, sizes) for offsets, sizes in regions
    )
    part = TensorEntry("float32", shape, tuple(chunks))
    if (counts > 1).any():
        with pytest.raises(FieldError, match="cover elements twice"):
            part.check_coverage(is_node_part=True)
    else:
        part.check_coverage(is_node_part=True)


def build_text(shapes, ranks=()):
    """Return the text of a manifest with tensors of some shapes, each row a chunk."""
    tensors, start = {}, 0
    for number, (rows, *row) in enumerate(shapes):
        chunks = []
        for index in range(rows):
            size, offsets = 4 * math.prod(row), (index, *(0 for _ in row))
            chunks.append(Chunk("f", start, size, hash_bytes(b""), offsets, (1, *row)))
            start += size
        tensors[f"model/{number}"] = TensorEntry("float32", (rows, *row), tuple(chunks))
    states = {"model": [{"$": "tensor", "name": name} for name in tensors]}
    files = {"f": FileEntry(start, hash_bytes(b""))}
    return Manifest("s", "2026-11-21T15:00:00Z", 4, 0, {}, states, {}, tensors, files, ranks=ranks).text()


def count_calls(function, *arguments):
    """Return the number of Python's calls inside a function."""
    count = 0

    def observe(_frame, event, _argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(observe)
    try:
        function(*arguments)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("ranks", [(), (0, 1)], ids=["complete", "part"])
@pytest.mark.parametrize("shapes", [lambda n: [(1, 3)] * n, lambda n: [(n, 3)], lambda n: [(n, *[1] * 60)]])
def test_the_work_for_a_manifest_grows_as_its_text(shapes, ranks):
    once, twice = (build_text(shapes(count), ranks) for count in (200, 400))
    assert count_calls(Manifest.parse, twice, "x") < 2.2 * count_calls(Manifest.parse, once, "x")


def test_chunks_of_a_part_that_would_all_be_compared_are_refused():
    # Rows to the right of the diagonal and columns below it, which no layout has.
    size = 600
    rows = [((each, each), (1, size - each)) for each in range(size)]
    columns = [((each + 1, each), (size - each - 1, 1)) for each in range(size - 1)]
    regions = [*rows, *columns]
    chunks = tuple(
        Chunk("f", 0, 4 * math.prod(sizes), hash_bytes(b""), offsets, sizes) for offsets, sizes in regions
    )
    assert TensorEntry("float32", (size, size), chunks).is_complete
    with pytest.raises(FieldError, match="others beside them"):
        TensorEntry("float32", (size, size), chunks).check_coverage(is_node_part=True)
