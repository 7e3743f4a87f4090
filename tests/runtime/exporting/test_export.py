"""Exported weights: tensors load bitwise equal, and earlier files stay until the new ones are complete."""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from safetensors.torch import load_model as load_as_safetensors_does
from support.training.models import TokenNet
from torch import nn

from accel_runtime.export.load_model import find_weights
from accel_runtime.export.save_model import INDEX, SINGLE, ExportPlan, export_model
from accel_runtime.storage.errors import CheckpointError
from accel_runtime.storage.file_system import FileSystem, parse_size

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.complex64,
]


def export_state(state, folder, limit=10**9, **options):
    export_model(ExportPlan.from_state(state, limit), folder, **options)
    return folder


def is_bitwise_equal(actual, expected):
    """Return whether shape, dtype and every byte are equal."""
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        return False
    return torch.stack([actual, expected]).view(2, -1).view(torch.uint8).diff(dim=0).count_nonzero() == 0


def list_files(folder):
    return sorted(path.name for path in folder.iterdir())


# Sizes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (1, 1),
        ("10", 10),
        ("10GB", 10**10),
        ("500MB", 5 * 10**8),
        ("2GiB", 2**31),
        ("1.5KB", 1500),
        (" 3 B", 3),
        ("1TiB", 2**40),
    ],
)
def test_parse_size_accepts_bytes_or_a_number_with_a_unit(text, size):
    assert parse_size(text, "max_shard_size") == size


@pytest.mark.parametrize("text", ["", "GB", "10Gb", "10gb", "-1GB", "1e3MB", "0GB", 0, -5, True, 1.5, None])
def test_parse_size_rejects_other_sizes_with_an_example(text):
    with pytest.raises(
        ValueError, match=r"Invalid max_shard_size .*: expected a number of bytes.*'10GB'"
    ) as refused:
        parse_size(text, "max_shard_size")
    assert ("small b" in str(refused.value)) == (text in {"10Gb", "10gb"})


# Round trips -----------------------------------------------------------------------------


@st.composite
def tensors(draw):
    """A tensor of any dtype and shape, also empty, without dimensions, transposed or cut out of another."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    count = torch.Size(shape).numel() * dtype.itemsize
    data = torch.tensor(
        draw(st.lists(st.integers(0, 255), min_size=count, max_size=count)), dtype=torch.uint8
    )
    if dtype is torch.bool:
        data %= 2
    tensor = data.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    if draw(st.booleans()) and tensor.dim() > 1:
        tensor = tensor.transpose(0, -1)
    if draw(st.booleans()) and tensor.dim():
        tensor = tensor[::2]
    return tensor


@st.composite
def states(draw):
    """Tensors by name, some of them tied."""
    # Among them the words that a header has for itself.
    names = st.sampled_from(["format", "pt"]) | st.text(st.characters(codec="utf-8"), min_size=1, max_size=5)
    state = draw(st.dictionaries(names, tensors(), max_size=6))
    for name in draw(st.lists(names, max_size=2, unique=True)):
        if state:
            state.setdefault(name, state[draw(st.sampled_from(sorted(state)))])
    return state


@given(state=states(), limit=st.integers(1, 400))
def test_every_exported_tensor_loads_bitwise_equal(tmp_path_factory, state, limit):
    folder = export_state(state, tmp_path_factory.mktemp("export"), limit)
    weights = find_weights(folder)
    assert weights.slices.keys() | weights.ties.keys() == state.keys()
    assert all(is_bitwise_equal(tensor, state[name]) for name, tensor in weights.read().items())
    assert all(state[name].data_ptr() == state[alias].data_ptr() for name, alias in weights.ties.items())
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            tensors = [file.get_tensor(name) for name in list(file.keys())]
            assert file.metadata()["format"] == "pt"
        assert len(tensors) <= 1 or sum(tensor.nbytes for tensor in tensors) <= limit


def build_tied_model():
    """Return a small model with tied weights, a scalar, an empty buffer and one in half precision."""
    model = TokenNet(5, 3, tied=True)
    model.register_buffer("count", torch.tensor(7))
    model.register_buffer("none", torch.empty(0, 2))
    model.register_buffer("short", torch.randn(3).to(torch.bfloat16))
    return model


@pytest.mark.parametrize("limit", [10**9, 40], ids=["one file", "shards"])
def test_torch_and_safetensors_load_an_exported_tied_model(tmp_path, limit):
    """Once in the file, and found again: by torch, by safetensors, and by an untied reader from the header."""
    model = build_tied_model()
    export_state(model.state_dict(), tmp_path, limit)
    tensors = {
        name: tensor for path in tmp_path.glob("*.safetensors") for name, tensor in load_file(path).items()
    }
    assert "embed.weight" in tensors
    assert "head.weight" not in tensors
    loaded_model = build_tied_model()
    missing, unexpected = loaded_model.load_state_dict(tensors, strict=False)
    assert (missing, unexpected) == (["head.weight"], [])
    assert all(map(is_bitwise_equal, loaded_model.state_dict().values(), model.state_dict().values()))
    if limit > 40:
        third = build_tied_model()
        assert load_as_safetensors_does(third, tmp_path / SINGLE) == (set(), [])
        assert is_bitwise_equal(third.head.weight.data, model.head.weight.data)
    assert find_weights(tmp_path).ties == {"head.weight": "embed.weight"}


def test_the_expected_name_of_tied_weights_is_left_out(tmp_path):
    export_model(ExportPlan.from_state(build_tied_model().state_dict(), 10**9, ["embed.weight"]), tmp_path)
    assert find_weights(tmp_path).ties == {"embed.weight": "head.weight"}


def test_shards_have_the_layout_of_the_hub(tmp_path):
    state = {"a": torch.zeros(2), "large": torch.zeros(100), "b": torch.zeros(2), "c": torch.zeros(3)}
    export_state(state, tmp_path, 16)
    first, second, third = (f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3))
    assert list_files(tmp_path) == [first, second, third, INDEX]
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["weight_map"] == {"a": first, "b": first, "c": second, "large": third}
    assert index["metadata"]["total_size"] == 4 * (2 + 100 + 2 + 3)


def test_an_exported_file_has_default_permissions(tmp_path):
    export_state({"x": torch.ones(1)}, tmp_path)
    (tmp_path / "plain").touch()
    assert len({stat.S_IMODE((tmp_path / name).stat().st_mode) for name in (SINGLE, "plain")}) == 1


def test_all_unsupported_values_are_rejected_by_name(tmp_path):
    unsupported = {
        "wide": torch.zeros(2, dtype=torch.complex128),
        "sparse": torch.eye(2).to_sparse(),
        "meta": torch.empty(2, device="meta"),
        "extra": {"a": 1},
        "lazy": nn.LazyLinear(2).weight,
        "__metadata__": torch.zeros(1),
    }
    with pytest.raises(CheckpointError, match="cannot be written as safetensors") as refused:
        export_state({"fine": torch.zeros(2), **unsupported}, tmp_path)
    assert all(f"\n  {name}: a " in str(refused.value) for name in unsupported)
    assert "fine" not in str(refused.value)
    assert not list_files(tmp_path)


# Errors ----------------------------------------------------------------------------------


class Faulty(FileSystem):
    """A file system that counts its calls, and on which the call with one number fails."""

    def __init__(self, number=None):
        self.number, self.calls = number, 0

    def _count(self):
        self.calls += 1
        if self.calls == self.number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def make(self, folder):
        self._count()
        super().make(folder)

    def create(self, path):
        self._count()
        return super().create(path)

    def write(self, file, data):
        self._count()
        super().write(file, data)

    def sync(self, file):
        self._count()
        super().sync(file)

    def rename(self, old, new):
        self._count()
        super().rename(old, new)

    def remove(self, path):
        if path.exists():
            self._count()
        super().remove(path)

    def sync_directory(self, folder):
        self._count()
        super().sync_directory(folder)


LIMITS = {"one file": 10**9, "two shards": 32, "three shards": 16}


FEWEST = {
    ("one file", "one file"),
    ("one file", "two shards"),
    ("two shards", "one file"),
    ("two shards", "two shards"),
}
"""One file or several, before and after: `make test-full` also has other numbers of shards."""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(*each, marks=[] if each in FEWEST else pytest.mark.full)
        for each in itertools.product(LIMITS, repeat=2)
    ],
)
def test_a_disk_error_at_any_call_leaves_one_export_or_a_clear_error(tmp_path, before, after):
    """Weights of two exports are never mixed, and the next export works."""
    old, new = ({name: torch.full((4,), value) for name in "abc"} for value in (1.0, 2.0))
    counted = Faulty()
    export_state(old, tmp_path / "counted", LIMITS[before])
    export_state(new, tmp_path / "counted", LIMITS[after], disk=counted)
    assert counted.calls > 6
    outcomes = []
    for number in range(1, counted.calls + 1):
        folder = export_state(old, tmp_path / str(number), LIMITS[before])
        with pytest.raises(CheckpointError, match=r"Cannot write the model to .*No space left"):
            export_state(new, folder, LIMITS[after], disk=Faulty(number))
        assert not list(folder.glob(".*"))
        try:
            exported = find_weights(folder).read()
        except CheckpointError as error:
            outcomes.append("none")
            assert before == after != "one file"
            assert "from another export" in str(error)
        else:
            outcomes.append("old" if is_bitwise_equal(exported["a"], old["a"]) else "new")
            assert all(
                is_bitwise_equal(exported[name], {"old": old, "new": new}[outcomes[-1]][name])
                for name in "abc"
            )
        export_state(new, folder, LIMITS[after])
        assert all(
            is_bitwise_equal(tensor, new[name]) for name, tensor in find_weights(folder).read().items()
        )
    assert outcomes.index("old") == 0
    assert outcomes == sorted(outcomes, key=["old", "none", "new"].index)


def test_nan_and_negative_zero_are_preserved(tmp_path):
    state = {"x": torch.tensor([float("nan"), -0.0, 0.0, float("inf")])}
    assert is_bitwise_equal(find_weights(export_state(state, tmp_path)).read()["x"], state["x"])


def test_only_files_of_the_earlier_export_are_removed_and_after_the_new_ones_exist(tmp_path):
    class Watching(FileSystem):
        def remove(self, path):
            if not path.name.startswith("."):
                assert (tmp_path / SINGLE).exists()
                gone.append(path.name)
            super().remove(path)

    gone = []
    state = {name: torch.zeros(4) for name in "abc"}
    export_state(state, tmp_path, 16)
    others = [
        "config.json",
        "model-notes.safetensors",
        "pytorch_model.bin",
        "other-00001-of-00002.safetensors",
    ]
    for name in others:
        (tmp_path / name).touch()
    old = [name for name in list_files(tmp_path) if name.startswith("model-0000")] + [INDEX]
    export_state(state, tmp_path, disk=Watching())
    assert gone == old
    assert list_files(tmp_path) == sorted([*others, SINGLE])


def test_an_export_removes_files_of_killed_exports_and_keeps_those_of_running_ones(tmp_path):
    state, node = {name: torch.zeros(4) for name in "abc"}, socket.gethostname()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    stays = [f".{SINGLE}.{node}-{os.getppid()}.unfinished", f".{SINGLE}.other-{ended.pid}.unfinished"]
    killed = [
        f".{name}.{node}-{ended.pid}.unfinished" for name in (SINGLE, "model-00001-of-00009.safetensors")
    ]
    for name in stays + killed:
        (tmp_path / name).touch()
    export_state(state, tmp_path)
    assert list_files(tmp_path) == sorted([*stays, SINGLE])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_files_of_an_export_killed_by_a_signal_are_removed_by_the_next(tmp_path, number):
    script = (
        "import os, sys, torch\n"
        "from pathlib import Path\n"
        "from accel_runtime.storage.file_system import FileSystem\n"
        "from accel_runtime.export.save_model import ExportPlan, export_model\n"
        "class Ending(FileSystem):\n"
        "    def sync(self, file):\n"
        "        os.kill(os.getpid(), int(sys.argv[2]))\n"
        "export_model(ExportPlan.from_state({'a': torch.ones(4)}, 100), Path(sys.argv[1]), Ending())\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", script, tmp_path, str(int(number))], capture_output=True, check=False
    )
    assert process.returncode
    assert not (tmp_path / SINGLE).exists()
    export_state({"a": torch.zeros(4)}, tmp_path)
    assert list_files(tmp_path) == [SINGLE]


def test_shards_of_two_exports_are_rejected(tmp_path):
    first, second = (
        export_state({"a": torch.full((4,), v), "b": torch.full((4,), v)}, tmp_path / str(v), 16)
        for v in (1.0, 2.0)
    )
    name = "model-00002-of-00002.safetensors"
    (first / name).write_bytes((second / name).read_bytes())
    with pytest.raises(CheckpointError, match=rf"{name} does not match .*{INDEX}"):
        find_weights(first).read()


def test_an_index_of_another_writer_is_read_without_checksums(tmp_path):
    export_state({"a": torch.zeros(4), "b": torch.ones(4)}, tmp_path, 16)
    index = json.loads((tmp_path / INDEX).read_text())
    (tmp_path / INDEX).write_text(
        json.dumps({"metadata": {"total_size": 32}, "weight_map": index["weight_map"]})
    )
    assert is_bitwise_equal(find_weights(tmp_path).read()["b"], torch.ones(4))


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "is not an index of weights"),
        ("[]", "is not an index of weights"),
        ('{"weight_map": {"a": "../away.safetensors"}}', "the name of a file in its directory"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "gone.safetensors is missing"),
        ('{"weight_map": {"a": "here.safetensors"}}', "here.safetensors cannot be read"),
        ('{"weight_map": {"b": "fine.safetensors"}}', "lists b, but no file contains it"),
    ],
)
def test_a_damaged_index_is_named(tmp_path, index, message):
    (tmp_path / "here.safetensors").write_text("text")
    export_state({"a": torch.zeros(1)}, tmp_path / "own")
    (tmp_path / "own" / SINGLE).rename(tmp_path / "fine.safetensors")
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(CheckpointError, match=message):
        find_weights(tmp_path)


def test_a_directory_without_weights_is_named(tmp_path):
    with pytest.raises(
        CheckpointError, match=rf"No weights found in {tmp_path}: neither {SINGLE} nor {INDEX} exists"
    ):
        find_weights(tmp_path)


# Mismatches ------------------------------------------------------------------------------


def test_every_mismatch_with_the_model_is_listed(tmp_path):
    model = build_tied_model()
    state = dict(model.state_dict())
    del state["inner.bias"]
    state |= {"beyond": torch.zeros(1), "inner.weight": torch.zeros(2, 3), "count": torch.tensor(1.5)}
    state["head.weight"] = state["embed.weight"] + 1
    with pytest.raises(CheckpointError, match="does not fit the model, which was not changed") as refused:
        find_weights(export_state(state, tmp_path)).match(model.state_dict())
    for line in (
        "missing: inner.bias",
        "unexpected: beyond",
        "inner.weight has shape [2, 3] in the file and [3, 3] in the model",
        "count is torch.float32 in the file, which cannot be cast to torch.int64",
        "head.weight and embed.weight are one tensor in the model and differ in the file",
    ):
        assert f"\n  {line}" in str(refused.value)


def test_a_model_without_ties_loads_tied_weights(tmp_path):
    model, loose = build_tied_model(), build_tied_model()
    loose.head.weight = nn.Parameter(torch.zeros(5, 3))
    weights = find_weights(export_state(model.state_dict(), tmp_path))
    loose.load_state_dict(weights.read(weights.match(loose.state_dict())))
    assert is_bitwise_equal(loose.head.weight.data, model.embed.weight.data)


def test_weights_are_cast_to_the_dtype_of_the_model(tmp_path):
    model = nn.Linear(2, 2)
    export_state(model.state_dict(), tmp_path)
    half = nn.Linear(2, 2).to(torch.bfloat16)
    weights = find_weights(tmp_path)
    half.load_state_dict(weights.read(weights.match(half.state_dict())))
    assert half.weight.dtype is torch.bfloat16
    assert half.weight.equal(model.weight.to(torch.bfloat16))


def test_an_export_to_a_relative_directory_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    export_state({"a": torch.ones(2)}, Path("deep/down"))
    assert list_files(tmp_path / "deep" / "down") == [SINGLE]
