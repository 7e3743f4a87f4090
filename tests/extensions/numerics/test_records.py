"""What a record has of scripts of all kinds, and how far a comparison trusts it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.runs.numerics_runs import INTERPRETER, record_runs

from accel_cli.extensions.numerics.comparison import Run, compare
from accel_cli.extensions.numerics.tensors import TensorFile, compare_values
from accel_runtime.observe.step_records.digests import digest_tensor


@pytest.fixture(scope="module", autouse=True)
def _interpreter():
    yield
    INTERPRETER.close()


LOOP = """
for step in range(int(os.environ.get("STEPS", "3"))):
    optimizer.zero_grad()
    loss(torch.randn(4, 4)).backward()
    optimizer.step()
"""
START = """
import os, torch
from torch import nn
cause = os.environ.get("CAUSE", "")
torch.manual_seed(0)
"""
PARTS = f"""{START}
first, second = nn.Linear(4, 4), nn.Linear(4, 1)
if cause:
    nn.init.zeros_(second.bias)
optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
def loss(x):
    return second(first(x)).square().mean()
{LOOP}"""
FAILING = f"""{START}
class Model(nn.Linear):
    def __repr__(self):
        raise RuntimeError("no text")
model = Model(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def loss(x):
    return model(x).square().mean()
{LOOP}
print("trained", step + 1)
"""
SLOTS = f"""{START}
import dataclasses
@dataclasses.dataclass(slots=True)
class Batch:
    x: torch.Tensor
class Model(nn.Linear):
    def forward(self, batch):
        return Batch(super().forward(batch.x))
model = Model(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def loss(x):
    return model(Batch(x + 1 if cause else x)).x.square().mean()
{LOOP}"""
SHARDED = f"""{START}
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
if os.environ.get("LAYOUT") == "ddp":
    trained = nn.parallel.DistributedDataParallel(model)
else:
    fully_shard(model[0])
    trained = fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
def loss(x):
    y = trained(x).square().mean()
    if cause and dist.get_rank() == 1 and step == 1:
        y = y + 0.5 * (y - y.detach())
    return y
{LOOP}"""
PLAIN = PARTS


def record(folder, text, *variables, world_size=1, selection="all,modules"):
    folder.mkdir(exist_ok=True)
    script = folder / "train.py"
    script.write_text(text)
    return record_runs(folder, *((script, world_size, one) for one in variables), selection=selection)


def test_initial_weights_of_all_parts_of_a_model_are_compared(tmp_path):
    found = compare(*record(tmp_path, PARTS, {}, {"CAUSE": "bias"}))
    assert (found.cause.step, found.cause.stage) == (1, "before")


def test_a_batch_in_a_dataclass_with_slots_is_recorded(tmp_path):
    found = compare(*record(tmp_path, SLOTS, {}, {"CAUSE": "inputs"}))
    assert (found.cause.stage, found.cause.name) == ("inputs", ".0.x")


def test_an_error_of_the_recorder_ends_the_record_and_not_the_training(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(FAILING)
    with pytest.raises(AssertionError, match="has no step"):
        _require_steps(record_runs(tmp_path, (script, 1, {}))[0])
    log = (tmp_path / "run_0" / "rank_0" / "log").read_text()
    assert "trained 3" in log
    assert "the record of numbers ends in step 1: RuntimeError: no text" in log


def _require_steps(run):
    assert run.first.steps, f"{run.first.end}: has no step"


def test_another_number_of_steps_is_a_difference_only_of_complete_records(tmp_path):
    long, short = record(tmp_path, PLAIN, {}, {"STEPS": "2"})
    found = compare(long, short)
    assert (found.verdict, found.cause.stage, found.cause.step) == ("different", "steps", 3)
    cut = replace(short, ranks={0: replace(short.first, end=None)})
    found = compare(long, cut)
    assert (found.verdict, found.is_partial) == ("equal", True)
    assert any("has no end, after step 2" in note for note in found.notes)
    failed = compare(long, replace(short, remark="the run ended with exit code 1"))
    assert failed.verdict == "equal"
    assert any("exit code 1" in note for note in failed.notes)


def test_records_of_other_steps_are_compared_in_what_both_have(tmp_path):
    (long,) = record(tmp_path / "long", PLAIN, {})
    (short,) = record(tmp_path / "short", PLAIN, {}, selection="steps:1-2")
    found = compare(long, short)
    assert (found.verdict, found.steps) == ("equal", [1, 2])
    (later,) = record(tmp_path / "later", PLAIN, {}, selection="steps:3-3")
    with pytest.raises(ValueError, match="no step is recorded in both"):
        compare(short, later)


def test_tensors_that_could_not_be_read_are_named(tmp_path):
    first, second = record(tmp_path, PLAIN, {}, {})
    steps = {**second.first.steps, 1: replace(second.first.steps[1], skipped=("0.weight",))}
    found = compare(first, replace(second, ranks={0: replace(second.first, steps=steps)}))
    assert found.is_partial
    assert "b: not recorded, and not compared: 0.weight" in found.notes


def test_ranks_of_two_machines_are_not_compared_with_each_other(tmp_path):
    (run,) = record(tmp_path, SHARDED, {"LAYOUT": "ddp"}, world_size=2)
    halves = [Run(name, {rank: run.ranks[rank]}) for rank, name in enumerate("ab")]
    with pytest.raises(ValueError, match="no rank has a record of both"):
        compare(*halves)


def test_gradients_of_one_rank_are_recorded_of_sharded_models(tmp_path):
    found = compare(*record(tmp_path, SHARDED, {}, {"CAUSE": "scale"}, world_size=2))
    assert (found.cause.step, found.cause.rank, found.cause.stage) == (2, 1, "gradients")
    assert found.cause.name == "2.bias"
    assert not any("before the exchange" in note for note in found.notes)


def test_gradients_of_one_rank_are_compared_between_a_sharded_and_a_replicated_model(tmp_path):
    same = compare(*record(tmp_path / "same", SHARDED, {"LAYOUT": "ddp"}, {}, world_size=2))
    assert same.verdict != "different"
    found = compare(*record(tmp_path / "other", SHARDED, {"LAYOUT": "ddp"}, {"CAUSE": "scale"}, world_size=2))
    assert (found.effect.step, found.effect.rank, found.effect.stage) == (2, 1, "gradients")


def test_tensors_of_a_step_name_the_elements_that_differ(tmp_path):
    runs = record(
        tmp_path, SHARDED, {}, {"CAUSE": "scale"}, world_size=2, selection="steps:2-2,modules,tensors"
    )
    found = compare(*runs)
    assert (found.cause.step, found.cause.rank, found.cause.stage, found.cause.name) == (
        2,
        1,
        "gradients",
        "2.bias",
    )
    assert found.cause.detail.startswith("norms ")
    assert "1 of 1 elements differ, most at [0]: " in found.cause.detail
    assert found.cause.size == pytest.approx(1 / 3, rel=1e-6)
    sketched = compare(
        runs[0], replace(runs[1], ranks={k: replace(v, path=None) for k, v in runs[1].ranks.items()})
    )
    assert "elements differ" not in sketched.cause.detail


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_kept_tensors_are_read_as_they_were(tmp_path, dtype):
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    save_file({"read/x": tensor}, tmp_path / "file")
    file = TensorFile(tmp_path / "file")
    assert np.array_equal(file.read("read/x", digest_tensor(tensor)), tensor.double().numpy())
    assert file.read("read/x", digest_tensor(tensor + 1)) is None
    assert file.read("read/y", digest_tensor(tensor)) is None
    assert TensorFile(tmp_path / "none").read("read/x", "") is None


def test_elements_that_differ_are_counted_with_those_that_are_not_finite():
    first, second = np.array([[1.0, 2.0], [np.nan, 4.0]]), np.array([[1.0, 2.5], [np.nan, np.inf]])
    size, text = compare_values(first, second)
    assert size == np.inf
    assert text == "2 of 4 elements differ, most at [1, 1]: 4 and inf"
    assert compare_values(first[:, :1], second[:, :1])[0] == 0
