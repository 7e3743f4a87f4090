"""Models made without memory are divided, filled from files part by part, and train; what cannot be is said before."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file, save_model
from sharded_runs import Net, accelerator, net, state_of, warm
from torch import nn

from accel_runtime import Accelerator, init_empty_weights
from accel_runtime.checkpoint.errors import CheckpointError

MESHES = [{"dp_shard": 2}, {"dp_shard": 1, "dp_replicate": 2}]
FOUR = [{"dp_shard": 4}, {"dp_shard": 2, "dp_replicate": 2}]


def step(run, model, optimizer):
    """One step on all ranks' data, and what came of it."""
    loss = model(torch.arange(6) + run.process_index).square().mean()
    run.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return state_of(model)


def filled(folder, sizes, when, include_buffers):
    """A model that never was whole, loaded and trained a step; and the same made whole."""
    run = accelerator(sizes)
    with init_empty_weights(include_buffers=include_buffers):
        model = Net()
    early = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model = run.prepare(model)
    if when == "after":
        early = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    optimizer = run.prepare(early)
    run.load_model(model, folder)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    loaded = state_of(model)
    other = run.prepare(net())
    others = run.prepare(torch.optim.AdamW([p for p in other.parameters() if p.requires_grad], lr=0.1))
    return loaded, step(run, model, optimizer), step(run, other, others)


def ignoring(folder):
    """Some parameters stay whole."""
    options = {"ignore": "gain,blocks.*.norm"}
    run = accelerator({"dp_shard": 2}, options)
    with init_empty_weights():
        model = Net()
    early = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model, optimizer = run.prepare(model, early)
    run.load_model(model, folder)
    loaded = state_of(model)
    other = run.prepare(net())
    others = run.prepare(torch.optim.SGD([p for p in other.parameters() if p.requires_grad], lr=0.1))
    return loaded, step(run, model, optimizer), step(run, other, others)


def test_what_stays_whole_is_filled_too(pair, tmp_path):
    want = written(tmp_path / "weights")
    for loaded, trained, other in pair.run(ignoring, tmp_path / "weights"):
        assert loaded == want
        # What is averaged may lie elsewhere in memory, and is added up by other instructions there.
        for name, value in trained.items():
            assert torch.tensor(value).allclose(torch.tensor(other[name]), atol=1e-6), name
        assert trained["gain"] != want["gain"]


def written(folder):
    """The file, and what is in it."""
    model = net()
    folder.mkdir()
    save_model(model, str(folder / "model.safetensors"))
    return {name: value.tolist() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("include_buffers", [None, True])
def test_a_model_without_memory_is_filled_by_each_rank_with_its_own_parts(
    pair, tmp_path, when, include_buffers
):
    want = written(tmp_path / "weights")
    for loaded, trained, other in pair.run(
        filled, tmp_path / "weights", {"dp_shard": 2}, when, include_buffers
    ):
        assert loaded == want
        assert trained == other
        assert trained["embedding.weight"] != want["embedding.weight"]
        assert trained["frozen"] == want["frozen"]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", FOUR, ids=str)
def test_on_four(four, tmp_path, sizes):
    four.run(warm)
    want = written(tmp_path / "weights")
    for loaded, trained, other in four.run(filled, tmp_path / "weights", sizes, "before", True):
        assert loaded == want
        assert trained == other


def test_on_one_process_too(tmp_path):
    want = written(tmp_path / "weights")
    run = accelerator({"dp_shard": "auto"})
    with init_empty_weights():
        model = Net()
    model = run.prepare(model)
    run.load_model(model, tmp_path / "weights" / "model.safetensors")
    assert state_of(model) == want


def without_values(sizes):
    run = accelerator(sizes)
    with torch.device("meta"):
        model = Net()
    model = run.prepare(model)
    said = []
    for _ in range(2):
        try:
            model(torch.arange(3))
        except RuntimeError as error:
            said.append(str(error))
    model.to_empty(device=run.device)
    with torch.no_grad():
        for tensor in (*model.parameters(), model.scale):
            tensor.fill_(0.5)
    return said, model(torch.arange(3)).sum().item()


def test_a_forward_pass_before_that_says_what_is_missing_and_what_to_do(pair):
    for said, found in pair.run(without_values, {"dp_shard": 2}):
        assert len(said) == 2
        assert said[0].startswith("Cannot run the model: gain, frozen, embedding.weight and ")
        assert "are on the meta device. Load values with accelerator.load_model(model, path)" in said[0]
        assert found != 0


def test_only_a_model_that_is_divided_can_be_prepared_without_memory():
    with init_empty_weights():
        model = nn.Linear(2, 2)
    with pytest.raises(
        ValueError, match=r"meta device .weight, bias. without sharding.*dp_shard: auto in the pro"
    ):
        Accelerator().prepare(model)


class Stubborn(nn.Module):
    """Has a buffer that nobody can compute."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("table", torch.ones(3), persistent=False)


class Rotary(nn.Module):
    """Computes its buffer when it is reset, in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("angles", torch.zeros(3), persistent=False)

    def init_weights(self):
        self.angles.copy_(torch.arange(3.0))


class Transformer(nn.Module):
    """Computes for those inside of it, as models of transformers do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.rotary = Rotary()
        self.other = nn.Module()
        self.other.register_buffer("table", torch.ones(2), persistent=False)

    def _init_weights(self, module):
        if module is self.other:
            module.table = torch.full((2,), 7.0)
        if isinstance(module, nn.Linear):
            nn.init.ones_(module.weight)


def computed(folder, kind):
    run = accelerator({"dp_shard": 2})
    with torch.device("meta"):
        model = kind()
    model = run.prepare(model)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    try:
        run.load_model(model, folder)
    except CheckpointError as error:
        return str(error), all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert torch.get_rng_state().equal(before)
    return {name: buffer.tolist() for name, buffer in model.named_buffers()}, state_of(model)["layer.bias"]


def test_buffers_that_are_in_no_file_are_computed_by_the_modules_that_can(pair, tmp_path):
    layer = nn.Linear(4, 4)
    save_file(
        {f"layer.{name}": value.detach() for name, value in layer.named_parameters()},
        tmp_path / "a.safetensors",
    )
    for buffers, bias in pair.run(computed, tmp_path / "a.safetensors", Transformer):
        assert buffers == {"rotary.angles": [0, 1, 2], "other.table": [7, 7]}
        assert bias == layer.bias.tolist()


def test_a_buffer_that_nobody_computes_is_named_and_nothing_is_changed(pair, tmp_path):
    layer = nn.Linear(4, 4)
    save_file(
        {f"layer.{name}": value.detach() for name, value in layer.named_parameters()},
        tmp_path / "a.safetensors",
    )
    for said, untouched in pair.run(computed, tmp_path / "a.safetensors", Stubborn):
        assert said.startswith("Cannot compute table: on the meta device and in no file (persistent=False)")
        assert "reset_buffers()" in said
        assert untouched
