"""A sharded model's weights go to files one file at a time, and come back part by part, on any mesh."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from divided import Net, accelerator, net, state_of, warm
from safetensors.torch import load_file, load_model, save_file
from torch import nn

from accel_runtime import init_empty_weights
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
        assert "does not fit the model, which is as it was" in said
        assert "it has no more" in said
        assert "gain has shape [1] in it, and [2] in the model" in said


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
        assert "cut short" in said


def test_tied_weights_that_differ_in_the_file_are_refused(pair, tmp_path):
    own = dict(net().state_dict())
    own["head.weight"] = own["head.weight"] + 1
    save_file(own, tmp_path / "model.safetensors")
    for said, unchanged in pair.run(tried, tmp_path, {"dp_shard": 2}, Net, False):
        assert unchanged
        assert "head.weight and embedding.weight are one tensor in the model, and differ in it" in said


def test_a_file_of_another_export_does_not_pass(pair, tmp_path):
    pair.run(saved, tmp_path, {"dp_shard": 2}, 250)
    path = max(tmp_path.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    for said, unchanged in pair.run(tried, tmp_path, {"dp_shard": 2}, Net, False):
        assert unchanged
        assert f"{path} is not the file that" in said


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
    from accel_runtime.checkpoint import datafile

    run = accelerator(sizes)
    model = run.prepare(net())
    write, calls = datafile.write, []

    def full(path, parts, about, disk):
        calls.append(path)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return write(path, parts, about, disk)

    datafile.write = full
    try:
        run.save_model(model, folder, max_shard_size=250)
    except CheckpointError as error:
        return str(error), len(calls)
    finally:
        datafile.write = write
    return "", 0


def test_a_disk_that_is_full_is_told_to_all_and_nothing_is_left(pair, tmp_path):
    (said, calls), (same, none) = pair.run(failing, tmp_path / "export", {"dp_shard": 2})
    assert said == same
    assert "save_model failed on rank 0: the model could not be written" in said
    assert (calls, none) == (2, 0)
    assert list((tmp_path / "export").iterdir()) == []


# How much memory it takes ------------------------------------------------------------------

LIMITED = """
import json, os, resource, sys
import torch
from torch import nn
from accel_runtime import Accelerator, init_empty_weights

def anonymous():
    return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("RssAnon"))) << 10

folder, room = sys.argv[1], int(sys.argv[2])
run = Accelerator()
with init_empty_weights(include_buffers=True):
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(24)))
model = run.prepare(model)
def warmed():
    tiny = run.prepare(nn.Linear(4, 4))
    run.save_model(tiny, folder + "-tiny")
    run.load_model(tiny, folder + "-tiny")
warmed()
before = anonymous()
data = int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmData"))) << 10
resource.setrlimit(resource.RLIMIT_DATA, (data + room, resource.RLIM_INFINITY))
try:
    bytearray(room + (1 << 20))
    raise SystemExit("the limit does not hold")
except MemoryError:
    pass
run.load_model(model, folder)
loaded = anonymous() - before
total = sum(p.to_local().double().sum().item() for p in model.parameters())
print(json.dumps({"loaded": loaded, "total": total}), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["10GB", "20MB"], ids=["one file", "several"])
def test_a_file_twice_the_memory_of_a_rank_is_loaded(tmp_path, limit):
    """96 MiB of weights over four ranks of which each may take 48 MiB: half the file, and a part of its own of 24."""
    from accel_runtime import Accelerator

    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(24)))
    Accelerator().save_model(model, tmp_path / "weights", max_shard_size=limit)
    (tmp_path / "script.py").write_text(LIMITED)
    size = sum(path.stat().st_size for path in (tmp_path / "weights").glob("*.safetensors"))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--standalone"]
    root = str(Path(__file__).parents[3])
    done = subprocess.run(
        [*command, str(tmp_path / "script.py"), str(tmp_path / "weights"), str(size // 2)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": root,
            "ACCEL_PARALLEL_DP_SHARD": "4",
            "ACCEL_DEVICE": "cpu",
            "OMP_NUM_THREADS": "1",
            "HOME": str(tmp_path),
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = [json.loads(line) for line in re.findall(r"\{.*?\}", done.stdout)]
    assert len(told) == 4
    assert all(one["loaded"] < size / 2 for one in told)
    want = sum(p.double().sum().item() for p in model.parameters())
    assert sum(one["total"] for one in told) == pytest.approx(want)
