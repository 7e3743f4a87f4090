"""A sharded model's weights go to files one file at a time, and come back part by part, on any mesh."""

from __future__ import annotations

import resource
from pathlib import Path

import cluster
import pytest
import torch
from safetensors.torch import load_file, load_model, save_file
from sharded_runs import Net, accelerator, net, state_of, warm
from torch import nn

from accel_runtime import Accelerator, init_empty_weights
from accel_runtime.checkpoint.errors import CheckpointError


def saved(folder, sizes, limit):
    run = accelerator(sizes)
    model = run.prepare(net())
    run.save_model(model, folder, max_shard_size=limit)
    there = sorted(path.name for path in folder.iterdir())
    other = run.prepare(net(2))
    run.load_model(other, folder)
    return there, state_of(other)


def of_files(folder):
    return {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}


@pytest.mark.parametrize("limit", ["10GB", 250], ids=["one file", "several"])
def test_a_sharded_model_is_written_whole_and_read_part_by_part(pair, tmp_path, limit):
    folder = tmp_path / "export"
    told = pair.run(saved, folder, {"dp_shard": 2}, limit)
    want = {name: value.tolist() for name, value in net().state_dict().items()}
    assert [state for _, state in told] == [want] * 2
    several = len(list(folder.glob("*.safetensors")))
    assert (several == 1) == (limit == "10GB")
    assert told[0][0] == sorted(path.name for path in folder.iterdir()), "all files are there when it returns"
    found = of_files(folder)
    assert "head.weight" in found or "embedding.weight" in found
    assert len(found) == len(want) - 1, "tied weights are there once"
    plain = Net()
    if several == 1:
        load_model(plain, str(folder / "model.safetensors"))
    else:
        plain.load_state_dict(found, strict=False)
    plain.head.weight = plain.embedding.weight
    assert {name: value.tolist() for name, value in plain.state_dict().items()} == want


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"dp_shard": 4}, {"dp_shard": 2, "dp_replicate": 2}], ids=str)
def test_on_four(four, tmp_path, sizes):
    four.run(warm)
    want = {name: value.tolist() for name, value in net().state_dict().items()}
    for _, state in four.run(saved, tmp_path / "export", sizes, 500):
        assert state == want


def tried(folder, sizes, kind, meta):
    run = accelerator(sizes)
    with init_empty_weights() if meta else torch.device("cpu"):
        model = kind()
    model = run.prepare(model)
    before = None if meta else state_of(model)
    try:
        run.load_model(model, folder / str(run.process_index) if (folder / "0").exists() else folder)
    except CheckpointError as error:
        same = all(p.is_meta for p in model.parameters()) if meta else state_of(model) == before
        return str(error), same
    return "", False


class Other(Net):
    """The same with another shape in one place."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(2))
        self.more = nn.Parameter(torch.ones(2))


@pytest.mark.parametrize("meta", [False, True], ids=["with values", "without"])
def test_weights_that_do_not_fit_are_named_and_change_nothing_on_any_rank(pair, tmp_path, meta):
    own = {name: value for name, value in net().state_dict().items() if name != "head.weight"}
    save_file(own, tmp_path / "model.safetensors")
    for said, unchanged in pair.run(tried, tmp_path, {"dp_shard": 2}, Other, meta):
        assert unchanged
        assert "does not fit the model, which was not changed" in said
        assert "missing: more" in said
        assert "gain has shape [1] in the file and [2] in the model" in said


def test_what_one_rank_cannot_read_changes_nothing_on_the_others(pair, tmp_path):
    own = {name: value for name, value in net().state_dict().items() if name != "head.weight"}
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        save_file(own, tmp_path / str(rank) / "model.safetensors")
    path = tmp_path / "1" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    for said, unchanged in pair.run(tried, tmp_path, {"dp_shard": 2}, Net, False):
        assert unchanged
        assert "rank 1: " in said
        assert "truncated" in said


def test_tied_weights_that_differ_in_the_file_are_refused(pair, tmp_path):
    own = dict(net().state_dict())
    own["head.weight"] = own["head.weight"] + 1
    save_file(own, tmp_path / "model.safetensors")
    for said, unchanged in pair.run(tried, tmp_path, {"dp_shard": 2}, Net, False):
        assert unchanged
        assert "head.weight and embedding.weight are one tensor in the model and differ in the file" in said


def test_a_file_of_another_export_does_not_pass(pair, tmp_path):
    pair.run(saved, tmp_path, {"dp_shard": 2}, 250)
    path = max(tmp_path.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    for said, unchanged in pair.run(tried, tmp_path, {"dp_shard": 2}, Net, False):
        assert unchanged
        assert f"{path} does not match" in said


def converted(folder):
    run = accelerator({"dp_shard": 2})
    model = run.prepare(net(2).to(torch.bfloat16))
    run.load_model(model, folder / "model.safetensors")
    return state_of(model)


def test_numbers_become_those_of_the_model(pair, tmp_path):
    own = {name: value for name, value in net().state_dict().items() if name != "head.weight"}
    own["frozen"] = own["frozen"].double()
    save_file(own, tmp_path / "model.safetensors")
    want = {name: value.tolist() for name, value in net().to(torch.bfloat16).state_dict().items()}
    assert pair.run(converted, tmp_path) == [want] * 2


def failing(folder, sizes):
    """The writer's disk is full at the second file."""
    from accel_runtime.export import save_model

    run = accelerator(sizes)
    model = run.prepare(net())
    write, calls = save_model.write_safetensors, []

    def full(path, parts, about, disk):
        calls.append(path)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return write(path, parts, about, disk)

    save_model.write_safetensors = full
    try:
        run.save_model(model, folder, max_shard_size=250)
    except CheckpointError as error:
        return str(error), len(calls)
    finally:
        save_model.write_safetensors = write
    return "", 0


def test_a_disk_that_is_full_is_told_to_all_and_nothing_is_left(pair, tmp_path):
    (said, calls), (same, none) = pair.run(failing, tmp_path / "export", {"dp_shard": 2})
    assert said == same
    assert "save_model failed on rank 0: Cannot write the model" in said
    assert (calls, none) == (2, 0)
    assert list((tmp_path / "export").iterdir()) == []


# How much memory it takes ------------------------------------------------------------------

WEIGHTS = 24, 1024
"""How many layers, and how wide they are: 96 MiB."""


def layers():
    count, width = WEIGHTS
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))


def in_status(name):
    """A number of bytes in /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(name))) << 10


def loaded_within(folder, room):
    """Load the weights while this rank may take `room` bytes more than it has; what it took, and the sum of its shards."""
    run = accelerator({"dp_shard": 4})
    with init_empty_weights(include_buffers=True):
        model = layers()
    model = run.prepare(model)
    tiny = run.prepare(nn.Linear(4, 4))  # what is imported and allocated at the first use does not count
    run.save_model(tiny, f"{folder}-tiny")
    run.load_model(tiny, f"{folder}-tiny")
    before = in_status("RssAnon")
    resource.setrlimit(resource.RLIMIT_DATA, (in_status("VmData") + room, resource.RLIM_INFINITY))
    try:
        with pytest.raises(MemoryError):
            bytearray(room + (1 << 20))
        run.load_model(model, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    taken = in_status("RssAnon") - before
    return taken, sum(p.to_local().double().sum().item() for p in model.parameters())


@pytest.fixture
def four_fresh():
    """Four processes of this test's own: memory that earlier tests have freed would not be counted."""
    ranks = cluster.Cluster(4)
    yield ranks
    ranks.close()


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["10GB", "20MB"], ids=["one file", "several"])
def test_a_file_twice_the_memory_of_a_rank_is_loaded(four_fresh, tmp_path, limit):
    """96 MiB of weights over four ranks of which each may take 48 MiB: half the file, and a part of its own of 24."""
    model, folder = layers(), tmp_path / "weights"
    Accelerator().save_model(model, folder, max_shard_size=limit)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    taken, sums = zip(*four_fresh.run(loaded_within, str(folder), size // 2), strict=True)
    assert all(bytes_ < size / 2 for bytes_ in taken)
    assert sum(sums) == pytest.approx(sum(p.double().sum().item() for p in model.parameters()))
