"""Merging the weights of a checkpoint: the file contains the full tensors, or no file is written."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from support.training.models import TokenNet

from accel_runtime.storage.errors import CheckpointError, RequestError
from accel_runtime.storage.file_store import FileStore
from accel_runtime.storage.tensor_file import MergeRequest, list_item_contents, merge_tensors


def merge(source, target, request):
    with FileStore().open(source.key) as snapshot:
        return merge_tensors(snapshot, target, request)


@pytest.fixture
def checkpoint(handmade):
    return handmade.write


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(5)


CUTS = {
    "rows": (3,),
    "columns": (1, 4),
    "both": (2, 3),
    "the middle": (1, 2),
    "all three": (2, 3, 2),
}


def tensors(generator):
    return {
        "rows": torch.randn(7, 5, generator=generator),
        "columns": torch.randn(6, 9, generator=generator).to(torch.bfloat16),
        "both": torch.randn(8, 7, generator=generator).double(),
        "the middle": torch.randn(3, 4, 5, generator=generator).half(),
        "all three": torch.randn(4, 6, 5, generator=generator),
        "number": torch.tensor(3),
        "flags": torch.tensor([True, False, True]),
        "nothing": torch.empty(0, 4),
        "a#b": torch.randn(2, 2, generator=generator).to(torch.complex64),
    }


def test_chunks_of_any_shape_merge_into_bitwise_equal_tensors(checkpoint, tmp_path, generator):
    model = tensors(generator)
    cuts = {f"model/{name}": cut for name, cut in CUTS.items()}
    source = checkpoint(tmp_path / "c", {"model": model}, cuts=cuts)
    assert sum(len(stored.chunks) for stored in source.manifest.tensors.values()) == 30
    merged = merge(source, tmp_path / "m.safetensors", MergeRequest())
    loaded = load_file(tmp_path / "m.safetensors")
    assert set(loaded) == set(model)
    for name, tensor in model.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor), name
    assert merged.tensors == len(model)
    assert merged.bytes == sum(tensor.nbytes for tensor in model.values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "m.safetensors"]


def test_chunks_larger_than_the_read_block_are_merged(checkpoint, tmp_path, generator, monkeypatch):
    monkeypatch.setattr("accel_runtime.storage.tensor_file.BLOCK", 256)
    model = {"wide": torch.randn(9, 31, generator=generator), "long": torch.randn(200, generator=generator)}
    source = checkpoint(tmp_path / "c", {"model": model}, cuts={"model/wide": (2, 3)})
    for dtype in (None, "float16"):
        merge(source, tmp_path / "m.safetensors", MergeRequest(dtype=dtype))
        loaded = load_file(tmp_path / "m.safetensors")
        for name, tensor in model.items():
            assert torch.equal(loaded[name], tensor if dtype is None else tensor.half())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_floating_point_tensors_are_converted_and_others_keep_their_dtype(
    checkpoint, tmp_path, generator, dtype
):
    model = tensors(generator)
    source = checkpoint(
        tmp_path / "c", {"model": model}, cuts={f"model/{name}": cut for name, cut in CUTS.items()}
    )
    merge(source, tmp_path / "m.safetensors", MergeRequest(dtype=dtype))
    loaded = load_file(tmp_path / "m.safetensors")
    for name, tensor in model.items():
        expected = tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor
        assert loaded[name].dtype == expected.dtype
        assert torch.equal(loaded[name], expected), name


def test_tied_weights_are_written_once_and_the_file_loads_into_the_model(checkpoint, tmp_path):
    model, other = TokenNet(6, 4, tied=True), TokenNet(6, 4, tied=True)
    source = checkpoint(tmp_path / "c", {"model": model.state_dict()})
    merged = merge(source, tmp_path / "m.safetensors", MergeRequest())
    assert merged.ties == {"head.weight": "embed.weight"}
    with safe_open(tmp_path / "m.safetensors", "pt") as file:
        assert sorted(file.keys()) == ["embed.weight", "inner.bias", "inner.weight"]
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    assert load_model(other, tmp_path / "m.safetensors") == (set(), [])
    assert torch.equal(other.head.weight, model.head.weight)
    loaded_model = TokenNet(6, 4, tied=True)
    loaded_model.load_state_dict(load_file(tmp_path / "m.safetensors"), strict=False)
    assert torch.equal(loaded_model.head.weight, model.head.weight)


def test_several_files_have_an_index_in_the_format_of_hugging_face(checkpoint, tmp_path, generator):
    model = {f"layer{number}": torch.randn(10, generator=generator) for number in range(5)}
    source = checkpoint(tmp_path / "c", {"model": model})
    merge(source, tmp_path / "model.safetensors", MergeRequest(max_shard_bytes=80))
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    written = sorted(path.name for path in tmp_path.iterdir())
    assert written == ["c", *names, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 200
    assert {name: names.index(file) for name, file in index["weight_map"].items()} == {
        "layer0": 0, "layer1": 0, "layer2": 1, "layer3": 1, "layer4": 2,
    }  # fmt: skip
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], model[name])


def test_shards_are_rejected_next_to_a_file_that_would_be_read_instead(checkpoint, tmp_path):
    source = checkpoint(tmp_path / "c", {"model": {"a": torch.zeros(10), "b": torch.zeros(10)}})
    (tmp_path / "model.safetensors").write_text("mine")
    with pytest.raises(RequestError, match="would be read in place of the shards"):
        merge(source, tmp_path / "model.safetensors", MergeRequest(max_shard_bytes=40))
    assert (tmp_path / "model.safetensors").read_text() == "mine"


def test_merging_selects_the_rank_specific_tensors_of_a_rank(checkpoint, tmp_path):
    tensors = [torch.full((3,), float(rank)) for rank in range(2)]
    source = checkpoint(
        tmp_path / "c",
        {"model": {"w": torch.ones(2), "mean": tensors[0]}},
        tensors_by_rank={"model/mean": tensors},
        world_size=2,
    )
    for rank in range(2):
        merge(source, tmp_path / "m.safetensors", MergeRequest(rank=rank))
        loaded = load_file(tmp_path / "m.safetensors")
        assert set(loaded) == {"w", "mean"}
        assert torch.equal(loaded["mean"], tensors[rank])
    with pytest.raises(RequestError, match="has no rank 2: 2 process"):
        list_item_contents(source, "model", 2)


def test_the_tensors_of_an_optimizer_are_named_by_their_paths(checkpoint, tmp_path):
    state = {
        "state": {"model.w": {"exp_avg": torch.ones(2), "step": torch.tensor(3.0)}},
        "groups": [{"lr": 0.1}],
    }
    source = checkpoint(tmp_path / "c", {"model": {"w": torch.ones(2)}, "optimizer": state})
    merged = merge(source, tmp_path / "o.safetensors", MergeRequest(item="optimizer"))
    assert set(load_file(tmp_path / "o.safetensors")) == {"state.model.w.exp_avg", "state.model.w.step"}
    assert merged.others == []


def test_values_of_a_model_that_are_not_tensors_are_listed(checkpoint, tmp_path):
    source = checkpoint(tmp_path / "c", {"model": {"w": torch.ones(2), "_extra_state": {"scale": 2.0}}})
    assert merge(source, tmp_path / "m.safetensors", MergeRequest()).others == ["_extra_state.scale"]


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_damaged_tensor_is_named_and_no_file_is_written(checkpoint, tmp_path, handmade, dtype):
    model = {"fine": torch.ones(50), "hurt": torch.ones(50)}
    source = checkpoint(tmp_path / "c", {"model": model}, cuts={"model/hurt": (2,)})
    handmade.flip(tmp_path / "c" / source.manifest.tensors["model/hurt"].chunks[1].file, -5)
    (tmp_path / "m.safetensors").write_text("of before")
    with pytest.raises(CheckpointError, match=r"model-\d\.safetensors is damaged: hurt does not have"):
        merge(source, tmp_path / "m.safetensors", MergeRequest(dtype=dtype))
    assert (tmp_path / "m.safetensors").read_text() == "of before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "m.safetensors"]


@pytest.mark.parametrize(
    ("target", "merge_request", "message"),
    [
        ("m.safetensors", MergeRequest(item="model_1"), "has no model_1; it has model"),
        ("nowhere/m.safetensors", MergeRequest(), "Not a directory: .*nowhere"),
        ("c", MergeRequest(), "is a directory. Name a file"),
        ("c/m.safetensors", MergeRequest(), "is a checkpoint: an added file would not be part of it"),
    ],
)
def test_an_impossible_request_is_rejected_without_changes(
    checkpoint, tmp_path, target, merge_request, message
):
    source = checkpoint(tmp_path / "c", {"model": {"w": torch.ones(2)}})
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RequestError, match=message):
        merge(source, tmp_path / target, merge_request)
    assert sorted(tmp_path.rglob("*")) == before


def test_memory_does_not_grow_with_the_size_of_the_tensors(checkpoint, tmp_path):
    model = {"whole": torch.zeros(256, 1 << 18), "cut": torch.zeros(1 << 8, 1 << 16)}
    checkpoint(tmp_path / "c", {"model": model}, cuts={"model/cut": (1, 8)})
    size = sum(tensor.nbytes for tensor in model.values())
    del model
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from accel_runtime.storage.file_store import FileStore\n"
        "from accel_runtime.storage.tensor_file import MergeRequest, merge_tensors\n"
        "def peak():\n"
        "    lines = open('/proc/self/status').read().splitlines()\n"
        "    return int(next(line for line in lines if line.startswith('VmHWM')).split()[1]) * 1024\n"
        "before = peak()\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "with FileStore().open(f'{folder}/c') as snapshot:\n"
        "    merge_tensors(snapshot, folder / 'm.safetensors', MergeRequest())\n"
        "assert 'torch' not in sys.modules\n"
        "print(peak() - before)\n"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    grown = int(process.stdout.splitlines()[-1])
    assert size > 3e8
    assert grown < 4e7, grown
