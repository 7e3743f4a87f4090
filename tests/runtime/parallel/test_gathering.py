"""Gathering of sharded models: full state dicts, `gathered()`, and sharding again afterwards."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.runs.sharded_runs import (
    build_accelerator,
    build_model,
    gather_model_state,
    import_sharding,
    to_full,
)
from support.training.models import UnevenTiedNet
from torch import nn

from accel_runtime.foundation.torch_internals import fsdp_parameter_groups

MESHES = [{"dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 1}]


def gather_state(sizes, everywhere):
    run = build_accelerator(sizes)
    model = run.prepare(build_model())
    model(torch.arange(3))  # the outermost parameters stay gathered after it
    state = run.get_state_dict(model, everywhere=everywhere)
    plain = all(type(value) is torch.Tensor and value.device.type == "cpu" for value in state.values())
    tied = not state or state["head.weight"] is state["embedding.weight"]
    before = {name: value.clone() for name, value in state.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    same = all(before[name].equal(value) for name, value in state.items())
    return {name: value.tolist() for name, value in state.items()}, plain and tied and same


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_state_dict_is_full_on_the_first_process_or_on_all(pair, everywhere):
    expected = {name: value.tolist() for name, value in build_model().state_dict().items()}
    first, second = pair.run(gather_state, {"dp_shard": 2}, everywhere)
    assert first == (expected, True)
    assert second == (expected if everywhere else {}, True)


def read_unsharded_state():
    run = build_accelerator({})
    model = run.prepare(nn.Linear(2, 2))
    state = run.get_state_dict(model)
    return state["weight"].data_ptr() == run.unwrap_model(model).weight.data_ptr()


def test_the_state_dict_of_a_replicated_model_shares_its_tensors(pair):
    assert pair.run(read_unsharded_state) == [True, True]


def run_inside_gathered(sizes, options, raises):
    """Call the model a different number of times on each rank in gathered(); then train a step."""
    run = build_accelerator(sizes, options)
    model = run.prepare(build_model())
    optimizer = run.prepare(torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
    numbers = torch.arange(5)
    with torch.no_grad():
        outside = model(numbers)
    shards = [id(parameter) for parameter in optimizer.param_groups[0]["params"]]
    calls, kinds, state = [], [], {}
    try:
        with run.gathered(model) as same, torch.no_grad():
            assert same is model
            for _ in range(1 + 2 * run.process_index):
                calls.append(model(numbers))
                kinds += [type(parameter) for parameter in model.parameters()]
                state = model.state_dict()
                kinds += [type(value) for value in state.values()]
            shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
            if raises:
                {}["on purpose"]
    except KeyError:
        assert raises
    run.wait_for_everyone()
    num_elements = sum(getattr(p, "_local_tensor", p).numel() for p in model.parameters())
    run.backward(model(numbers + run.process_index).square().mean())
    optimizer.step()
    parameter_ids = [id(parameter) for parameter in optimizer.param_groups[0]["params"]]
    assert parameter_ids == shards
    assert [id(p) for p in model.parameters() if p.requires_grad] == shards
    return (
        all(outside.equal(output) for output in calls),
        {kind.__name__ for kind in kinds} <= {"Parameter", "Tensor"},
        shapes == {name: list(parameter.shape) for name, parameter in build_model().named_parameters()},
        num_elements,
        gather_model_state(model),
    )


def train_step(sizes, options):
    run = build_accelerator(sizes, options)
    model = run.prepare(build_model())
    optimizer = run.prepare(torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
    numbers = torch.arange(5)
    run.backward(model(numbers + run.process_index).square().mean())
    optimizer.step()
    return gather_model_state(model)


@pytest.mark.parametrize("raises", [False, True], ids=["to its end", "by an exception"])
@pytest.mark.parametrize("wrap", ["auto", "none", "ResidualBlock,Embedding"])
def test_each_rank_can_call_the_model_any_number_of_times_inside_gathered(pair, wrap, raises):
    sizes, options = {"dp_shard": 2}, {"wrap": wrap}
    trained = pair.run(train_step, sizes, options)[0]
    total = sum(parameter.numel() for parameter in build_model().parameters())
    num_elements = 0
    for same, plain, full_state, local_state, after in pair.run(run_inside_gathered, sizes, options, raises):
        assert (same, plain, full_state) == (True, True, True)
        assert after == trained
        num_elements += local_state
    assert num_elements == total


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}], ids=str)
def test_gathered_works_on_four_ranks(four, sizes):
    four.run(import_sharding)
    for same, plain, full_state, local_state, _ in four.run(run_inside_gathered, sizes, {}, False):
        assert (same, plain, full_state) == (True, True, True)
        assert local_state < sum(parameter.numel() for parameter in build_model().parameters())


def compute_inside_gathered(options):
    """Compute in bf16 inside gathered()."""
    run = build_accelerator({"dp_shard": 2}, options, mixed_precision="bf16")
    model = run.prepare(build_model())
    with torch.no_grad():
        outside = model(torch.arange(5))
        with run.gathered(model):
            same = outside.equal(model(torch.arange(5)))
            dtypes = {str(parameter.dtype) for parameter in model.parameters()}
    return same, dtypes, {str(parameter.dtype) for parameter in model.parameters()}


def test_gathered_parameters_have_the_computation_dtype(pair):
    assert pair.run(compute_inside_gathered, {}) == [(True, {"torch.bfloat16"}, {"torch.float32"})] * 2


def step_inside_gathered():
    run = build_accelerator({"dp_shard": 2})
    model = run.prepare(build_model())
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    message = ""
    optimizer.step()
    with run.gathered(model):
        try:
            optimizer.step()
        except RuntimeError as error:
            message = str(error)
    optimizer.step()
    return message


def test_a_step_inside_gathered_is_rejected_and_allowed_afterwards(pair):
    for message in pair.run(step_inside_gathered):
        assert message.startswith("optimizer.step() inside gathered(model) would")


def test_gathered_returns_a_replicated_model_unchanged():
    run = build_accelerator({})
    model = run.prepare(nn.Linear(2, 2))
    with run.gathered(model) as same:
        assert same is model


def call_first_inside_gathered():
    """Run the first forward passes inside gathered(), with none on the first rank; then one on all ranks."""
    run = build_accelerator({"dp_shard": 2})
    model = run.prepare(build_model())
    with run.gathered(model):
        outputs = [model(torch.arange(3)) for _ in range(2 * run.process_index)]
        messages = []
        for call in (run.get_state_dict, lambda model: run.save_model(model, "nowhere"), run.gathered):
            try:
                with call(model):
                    pass
            except RuntimeError as error:
                messages.append(str(error))
    assert len(outputs) == 2 * run.process_index
    return messages, model(torch.arange(3)).sum().item()


def test_the_first_forward_passes_can_be_inside_gathered_and_saving_cannot(pair):
    first, second = pair.run(call_first_inside_gathered)
    assert first == second
    assert len(first[0]) == 3
    assert all(message.endswith("Exit the context first.") for message in first[0])


def unwrap():
    run = build_accelerator({"dp_shard": 2})
    model = build_model()
    prepared = run.prepare(model)
    module = run.unwrap_model(prepared)
    return module is model, sorted(module.state_dict()) == sorted(build_model().state_dict())


def test_unwrap_model_returns_the_sharded_module_with_its_names(pair):
    assert pair.run(unwrap) == [(True, True)] * 2


class Pretrained(UnevenTiedNet):
    """A model that saves itself as models of the transformers library do."""

    def save_pretrained(self, save_directory, is_main_process=True, state_dict=None):
        weights = self.state_dict() if state_dict is None else state_dict
        return sorted(weights) if is_main_process else save_directory


def save_pretrained(sizes):
    run = build_accelerator(sizes)
    model = run.prepare(build_model(kind=Pretrained))
    module, first = run.unwrap_model(model), run.is_main_process
    try:
        module.save_pretrained("here", is_main_process=first)
        refusal = ""
    except RuntimeError as error:
        refusal = str(error)
    with run.gathered(model):
        inside = module.save_pretrained("here", is_main_process=first)
    return refusal, inside, module.save_pretrained("here", first, run.get_state_dict(model))


def test_save_pretrained_of_a_sharded_model_needs_the_gathered_state_dict(pair):
    names = sorted(build_model().state_dict())
    (refusal, *first), (same, *second) = pair.run(save_pretrained, {"dp_shard": 2})
    assert refusal == same
    assert "state_dict=accelerator.get_state_dict(model)" in refusal
    assert (first, second) == ([names, names], ["here", "here"])


def test_save_pretrained_of_a_replicated_model_works_unchanged(pair):
    names = sorted(build_model().state_dict())
    assert pair.run(save_pretrained, {})[0] == ("", names, names)


def save_transformers_model(folder):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    run = build_accelerator({"dp_shard": 2})
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    model = run.prepare(model)
    run.unwrap_model(model).save_pretrained(
        folder, is_main_process=run.is_main_process, state_dict=run.get_state_dict(model)
    )
    run.wait_for_everyone()
    saved_state = LlamaForCausalLM.from_pretrained(folder).state_dict()
    return set(saved_state) == set(expected) and all(
        saved_state[name].equal(expected[name]) for name in expected
    )


@pytest.mark.slow
def test_a_sharded_transformers_model_is_saved_by_the_line_of_the_error(pair, tmp_path):
    pytest.importorskip("transformers")
    assert pair.run(save_transformers_model, str(tmp_path / "model")) == [True, True]


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({"_fsdp_param_groups": ["a", "b"]}, ["a", "b"]),
        ({"_fsdp_param_group": "a"}, ["a"]),
        ({"_fsdp_param_group": None}, []),
    ],
    ids=["torch 2.13", "torch 2.9", "torch 2.9, no parameters"],
)
def test_parameter_groups_of_fsdp_are_found_in_every_version_of_torch(state, expected):
    unit = SimpleNamespace(_get_fsdp_state=lambda: SimpleNamespace(**state))
    assert fsdp_parameter_groups(unit) == expected


def train_with_average(sizes):
    """Evaluate a model and its moving average before the average is updated, as at the end of an epoch."""
    run = build_accelerator(sizes)
    model = build_model()
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    model, average = run.prepare(model, average)
    optimizer = run.prepare(torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
    numbers = torch.arange(5)
    for _ in range(2):
        run.backward(model(numbers).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(numbers)
            average(numbers)
        run.unwrap_model(average).update_parameters(run.unwrap_model(model))
    return gather_model_state(run.unwrap_model(average))


def test_a_moving_average_of_an_evaluated_model_equals_that_of_one_process(alone, pair):
    (expected,) = alone.run(train_with_average, {})
    for actual in pair.run(train_with_average, {"dp_shard": 2}):
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(torch.tensor(actual[name]), torch.tensor(value))


class Scaled(nn.Module):
    """A model whose evaluation returns a slice of a parameter of its outermost module."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))
        self.scale = nn.Parameter(torch.arange(1.0, 5.0))

    def forward(self, inputs):
        scale = None if torch.is_grad_enabled() else self.scale[1:]
        return {"out": self.layers[1](self.layers[0](inputs)) * self.scale, "scale": scale}


def evaluate_within_a_step(sizes):
    """Return the gradients of a step that also evaluates the model, and the parameter of the evaluation."""
    run = build_accelerator(sizes)
    model = run.prepare(Scaled())
    inputs = torch.ones(2, 4)
    loss = model(inputs)["out"].square().mean()
    with torch.no_grad():
        reference = model(inputs)
    run.backward(loss * reference["scale"][0])
    gradients = {name: to_full(parameter.grad).tolist() for name, parameter in model.named_parameters()}
    return reference["scale"].tolist(), gradients


def test_a_model_evaluated_before_backward_has_the_gradients_of_one_process(alone, pair):
    (expected,) = alone.run(evaluate_within_a_step, {})
    for scale, gradients in pair.run(evaluate_within_a_step, {"dp_shard": 2}):
        assert scale == expected[0] == [2, 3, 4]
        for name, gradient in expected[1].items():
            key = next(key for key in gradients if key.endswith(name))
            torch.testing.assert_close(torch.tensor(gradients[key]), torch.tensor(gradient))
