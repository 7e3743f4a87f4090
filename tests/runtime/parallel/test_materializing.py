"""Models on the meta device are sharded, loaded shard by shard, and trained; missing values are reported."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file, save_model
from support.runs.sharded_runs import build_accelerator, build_model, gather_model_state, import_sharding
from support.training.models import UnevenTiedNet
from torch import nn

from accel_runtime import Accelerator, init_empty_weights
from accel_runtime.storage.errors import CheckpointError

MESHES = [{"dp_shard": 2}, {"dp_shard": 1, "dp_replicate": 2}]
FOUR = [{"dp_shard": 4}, {"dp_shard": 2, "dp_replicate": 2}]


def run_step(run, model, optimizer):
    """Train one step on the data of all ranks, and return the state."""
    loss = model(torch.arange(6) + run.process_index).square().mean()
    run.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return gather_model_state(model)


def load_and_train(folder, sizes, when, include_buffers):
    """Load a model created on meta and train a step; do the same with a model created on the CPU."""
    run = build_accelerator(sizes)
    with init_empty_weights(include_buffers=include_buffers):
        model = UnevenTiedNet()
    early = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model = run.prepare(model)
    if when == "after":
        early = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    optimizer = run.prepare(early)
    run.load_model(model, folder)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    loaded = gather_model_state(model)
    other = run.prepare(build_model())
    others = run.prepare(torch.optim.AdamW([p for p in other.parameters() if p.requires_grad], lr=0.1))
    return loaded, run_step(run, model, optimizer), run_step(run, other, others)


def load_with_ignored(folder):
    """Do the same with parameters that are not sharded."""
    options = {"ignore": "gain,blocks.*.norm"}
    run = build_accelerator({"dp_shard": 2}, options)
    with init_empty_weights():
        model = UnevenTiedNet()
    early = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model, optimizer = run.prepare(model, early)
    run.load_model(model, folder)
    loaded = gather_model_state(model)
    other = run.prepare(build_model())
    others = run.prepare(torch.optim.SGD([p for p in other.parameters() if p.requires_grad], lr=0.1))
    return loaded, run_step(run, model, optimizer), run_step(run, other, others)


def test_ignored_parameters_are_loaded(pair, tmp_path):
    expected = write_weights(tmp_path / "weights")
    for loaded, trained, other in pair.run(load_with_ignored, tmp_path / "weights"):
        assert loaded == expected
        # Averaged tensors may have another memory layout, which changes the order of additions.
        for name, value in trained.items():
            assert torch.tensor(value).allclose(torch.tensor(other[name]), atol=1e-6), name
        assert trained["gain"] != expected["gain"]


def write_weights(folder):
    """Write a file of weights, and return its contents."""
    model = build_model()
    folder.mkdir()
    save_model(model, str(folder / "model.safetensors"))
    return {name: value.tolist() for name, value in model.state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("include_buffers", "when"),
    [
        (None, "before"),
        (True, "after"),
        pytest.param(None, "after", marks=pytest.mark.full),
        pytest.param(True, "before", marks=pytest.mark.full),
    ],
)
def test_each_rank_loads_only_its_shards_of_a_meta_model(pair, tmp_path, when, include_buffers):
    expected = write_weights(tmp_path / "weights")
    for loaded, trained, other in pair.run(
        load_and_train, tmp_path / "weights", {"dp_shard": 2}, when, include_buffers
    ):
        assert loaded == expected
        assert trained == other
        assert trained["embedding.weight"] != expected["embedding.weight"]
        assert trained["frozen"] == expected["frozen"]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", FOUR, ids=str)
def test_meta_models_are_loaded_on_four_ranks(four, tmp_path, sizes):
    four.run(import_sharding)
    expected = write_weights(tmp_path / "weights")
    for loaded, trained, other in four.run(load_and_train, tmp_path / "weights", sizes, "before", True):
        assert loaded == expected
        assert trained == other


def test_a_meta_model_is_loaded_on_one_process(tmp_path):
    expected = write_weights(tmp_path / "weights")
    run = build_accelerator({"dp_shard": "auto"})
    with init_empty_weights():
        model = UnevenTiedNet()
    model = run.prepare(model)
    run.load_model(model, tmp_path / "weights" / "model.safetensors")
    assert gather_model_state(model) == expected


def run_without_values(sizes):
    run = build_accelerator(sizes)
    with torch.device("meta"):
        model = UnevenTiedNet()
    model = run.prepare(model)
    message = []
    for _ in range(2):
        try:
            model(torch.arange(3))
        except RuntimeError as error:
            message.append(str(error))
    model.to_empty(device=run.device)
    with torch.no_grad():
        for tensor in (*model.parameters(), model.scale):
            tensor.fill_(0.5)
    return message, model(torch.arange(3)).sum().item()


def test_a_forward_pass_on_meta_reports_the_missing_values(pair):
    for message, values in pair.run(run_without_values, {"dp_shard": 2}):
        assert len(message) == 2
        assert message[0].startswith("Cannot run the model: gain, frozen, embedding.weight and ")
        assert "are on the meta device. Load values with accelerator.load_model(model, path)" in message[0]
        assert values != 0


def test_a_meta_model_without_sharding_is_rejected():
    with init_empty_weights():
        model = nn.Linear(2, 2)
    with pytest.raises(
        ValueError, match=r"meta device .weight, bias. without sharding.*dp_shard: auto in the pro"
    ):
        Accelerator().prepare(model)


class ModelWithUncomputedBuffer(nn.Module):
    """A model with a buffer that no module computes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("table", torch.ones(3), persistent=False)


class Rotary(nn.Module):
    """A module that computes its buffer in place when it is reset."""

    def __init__(self):
        super().__init__()
        self.register_buffer("angles", torch.zeros(3), persistent=False)

    def init_weights(self):
        self.angles.copy_(torch.arange(3.0))


class Transformer(nn.Module):
    """A model that initializes its submodules, as models of transformers do."""

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


def load_with_buffers(folder, kind):
    run = build_accelerator({"dp_shard": 2})
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
    return {name: buffer.tolist() for name, buffer in model.named_buffers()}, gather_model_state(model)[
        "layer.bias"
    ]


def test_buffers_in_no_file_are_computed_by_their_modules(pair, tmp_path):
    layer = nn.Linear(4, 4)
    save_file(
        {f"layer.{name}": value.detach() for name, value in layer.named_parameters()},
        tmp_path / "a.safetensors",
    )
    for buffers, bias in pair.run(load_with_buffers, tmp_path / "a.safetensors", Transformer):
        assert buffers == {"rotary.angles": [0, 1, 2], "other.table": [7, 7]}
        assert bias == layer.bias.tolist()


def test_a_buffer_that_no_module_computes_is_named_and_nothing_is_changed(pair, tmp_path):
    layer = nn.Linear(4, 4)
    save_file(
        {f"layer.{name}": value.detach() for name, value in layer.named_parameters()},
        tmp_path / "a.safetensors",
    )
    for message, untouched in pair.run(
        load_with_buffers, tmp_path / "a.safetensors", ModelWithUncomputedBuffer
    ):
        assert message.startswith(
            "Cannot compute table: on the meta device and in no file (persistent=False)"
        )
        assert "reset_buffers()" in message
        assert untouched
