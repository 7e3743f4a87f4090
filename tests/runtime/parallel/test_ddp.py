"""DDP: how gradients are sent, and how the prepared model exposes the module of the script."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch
from support.cases.log_messages import collect_messages
from support.processes.ranks import Cluster
from support.training.numerics import relative_error
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

from accel_runtime import Accelerator, DistributedDataParallelKwargs, FullyShardedDataParallelPlugin
from accel_runtime.parallel.ddp import DDPModel

HALF = {"fp16": 2**-10, "bf16": 2**-7}


def build_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))


def build_batch(rank):
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(rank))


def compute_gradient(options, weighted=False):
    """Return the gradient after four backward passes on the same data; PowerSGD compresses from the third."""
    accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(**options)])
    model = accelerator.prepare(build_network())
    x = build_batch(accelerator.process_index)
    for _ in range(4):
        model.zero_grad()
        accelerator.backward(model(x).square().mean(), **({"weight": 8} if weighted else {}))
    return torch.cat([p.grad.flatten() for p in model.parameters()])


class Encoding(nn.Module):
    """A positional encoding whose buffer is contiguous, with a stride of its own for a dimension of size 1."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("positions", torch.arange(8.0 * 16).view(8, 16).unsqueeze(0).transpose(0, 1))

    def forward(self, x):
        return self.linear(x + self.positions[: x.size(0)])


def compute_with_positions():
    model = Accelerator().prepare(Encoding())
    for _ in range(2):
        outputs = model(torch.zeros(8, 2, 16))
        outputs.sum().backward()
    return model.positions.flatten()


@pytest.mark.parametrize("size", [1, 2])
def test_a_buffer_with_a_dimension_of_size_one_is_broadcast(size):
    cluster = Cluster(size)
    try:
        for positions in cluster.run(compute_with_positions):
            assert torch.equal(positions, torch.arange(8.0 * 16))
    finally:
        cluster.close()


def compute_reference(size):
    model = build_network()
    model(torch.cat([build_batch(rank) for rank in range(size)])).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "weighted"),
    [
        ("fp16", False),
        ("bf16", True),
        pytest.param("fp16", True, marks=pytest.mark.full),
        pytest.param("bf16", False, marks=pytest.mark.full),
    ],
)
def test_gradients_sent_in_half_precision_are_correct_within_rounding(several, kind, weighted):
    results = several.run(compute_gradient, {"comm_hook": kind}, weighted)
    assert all(torch.equal(actual, results[0]) for actual in results)
    assert 1e-7 < relative_error(results[0], compute_reference(several.size)) < HALF[kind]


@pytest.mark.parametrize("wrapper", ["no", "fp16", "bf16"])
def test_power_sgd_compresses_and_all_ranks_get_equal_gradients(pair, wrapper):
    state = {"matrix_approximation_rank": 4, "start_powerSGD_iter": 2}
    results = pair.run(
        compute_gradient, {"comm_hook": "power_sgd", "comm_wrapper": wrapper, "comm_state_option": state}
    )
    assert torch.equal(*results)
    assert 1e-4 < relative_error(results[0], compute_reference(2)) < 0.9


def test_power_sgd_of_full_rank_is_nearly_exact(pair):
    state = {"matrix_approximation_rank": 32, "start_powerSGD_iter": 2, "min_compression_rate": 0.01}
    results = pair.run(compute_gradient, {"comm_hook": "power_sgd", "comm_state_option": state})
    assert relative_error(results[0], compute_reference(2)) < 1e-4


@pytest.mark.parametrize("wrapper", ["no", "fp16"])
def test_a_wrapped_half_precision_hook_is_correct_within_rounding(pair, wrapper):
    results = pair.run(compute_gradient, {"comm_hook": "fp16", "comm_wrapper": wrapper})
    assert 1e-7 < relative_error(results[0], compute_reference(2)) < 2 * HALF["fp16"]


def test_gradients_without_a_hook_are_exact(several):
    assert all(
        relative_error(actual, compute_reference(several.size)) < 1e-6
        for actual in several.run(compute_gradient, {"comm_hook": "no"})
    )


def test_the_broken_batched_power_sgd_hook_of_torch_is_rejected(pair):
    """If this fails, torch has repaired its hook, and accel can offer it."""
    with pytest.raises(ValueError, match="batched_powerSGD_hook fails"):
        DistributedDataParallelKwargs(comm_hook="batched_power_sgd")

    def torchs_own():
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        model = nn.parallel.DistributedDataParallel(build_network())
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.batched_powerSGD_hook)
        for _ in range(2):
            model(build_batch(0)).sum().backward()
        with pytest.raises(AssertionError):
            model(build_batch(0)).sum().backward()

    pair.run(torchs_own)


# The script's module, seen through DDP ---------------------------------------------------------


class Decoder(nn.Module):
    """A model with attributes and methods of its own, of which DDP also has `dim`."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.dim = 7
        self.hidden = None

    def forward(self, x):
        return self.norm(self.layer(x)) if self.hidden is None else self.hidden

    def decode(self, x):
        return self.layer(x) * self.dim

    @property
    def size(self):
        return self.layer.weight.numel()


def test_attributes_are_read_from_and_set_on_the_module_of_the_script(ranks):
    def use():
        accelerator, module = Accelerator(), Decoder()
        model = accelerator.prepare(module)
        x = torch.ones(2, 2)
        assert torch.equal(model.decode(x), module.decode(x))
        assert (model.dim, model.size, model.layer) == (7, 4, module.layer)
        model.hidden, model.fresh, model.dim = x, 3, 8
        assert (module.hidden is x, module.fresh, module.dim) == (True, 3, 8)
        assert torch.equal(model(x), x)
        del model.fresh
        assert not hasattr(module, "fresh")
        with pytest.raises(AttributeError, match="'Decoder' object has no attribute 'nothing'"):
            _ = model.nothing
        model.eval()
        assert (model.training, module.training) == (False, False)
        return accelerator.unwrap_model(model) is module

    assert all(ranks.run(use))


def test_a_prepared_model_can_be_indexed(ranks):
    def index():
        module = build_network()
        model = Accelerator().prepare(module)
        return model[0] is module[0], model[-1] is module[-1], bool(model)

    assert ranks.run(index) == [(True, True, True)] * ranks.size


def test_a_state_dict_has_the_names_of_the_script_and_loads_those_of_ddp(pair):
    def load():
        module = Decoder()
        model = Accelerator().prepare(module)
        zeros = {name: torch.zeros_like(value) for name, value in module.state_dict().items()}
        assert list(model.state_dict()) == list(zeros)
        for prefix in ("", "module."):
            module.layer.weight.data.fill_(1)
            model.load_state_dict({f"{prefix}{name}": value for name, value in zeros.items()})
            assert not module.layer.weight.any()
        module.layer.weight.data.fill_(1)
        state = DistributedDataParallel.state_dict(model)  # with versions of modules
        module.layer.weight.data.fill_(2)
        model.load_state_dict(state)
        with pytest.raises(RuntimeError, match='"other"'):
            model.load_state_dict(zeros | {"other": torch.zeros(1)})
        return list(
            model.load_state_dict({"module.layer.weight": torch.ones(2, 2)}, strict=False).missing_keys
        )

    alone = Decoder().load_state_dict({"layer.weight": torch.ones(2, 2)}, strict=False)
    assert pair.run(load) == [alone.missing_keys] * 2


def test_a_module_that_contains_a_prepared_model_keeps_the_names_of_the_script(ranks):
    def hold():
        holder = nn.ModuleDict({"inner": Accelerator().prepare(Decoder()), "other": nn.Linear(1, 1)})
        state = holder.state_dict()
        holder.load_state_dict(state)
        if isinstance(holder["inner"], DistributedDataParallel):
            holder.load_state_dict(
                {name.replace("inner.", "inner.module."): value for name, value in state.items()}
            )
        return list(state)

    plain = nn.ModuleDict({"inner": Decoder(), "other": nn.Linear(1, 1)})
    assert ranks.run(hold) == [list(plain.state_dict())] * ranks.size


def test_a_module_with_a_child_named_module_keeps_its_names(pair):
    def load():
        module = nn.ModuleDict({"module": nn.Linear(1, 1)})
        module.forward = module["module"].forward
        model = Accelerator().prepare(module)
        for state in (model.state_dict(), DistributedDataParallel.state_dict(model)):
            model.load_state_dict(state)
        return list(model.state_dict())

    assert pair.run(load) == [["module.weight", "module.bias"]] * 2


def test_a_prepared_model_works_with_distributed_checkpoints_of_torch(pair):
    def through():
        accelerator, module = Accelerator(), Decoder()
        model, optimizer = accelerator.prepare(module, torch.optim.AdamW(module.parameters()))
        accelerator.backward(model(torch.randn(4, 2)).sum())
        optimizer.step()
        state, optimizer_state = get_state_dict(model, optimizer.optimizer)
        names, trained = set(state), set(optimizer_state["state"])
        set_state_dict(model, optimizer.optimizer, model_state_dict=state, optim_state_dict=optimizer_state)
        return names == set(module.state_dict()), trained == {name for name, _ in module.named_parameters()}

    assert pair.run(through) == [(True, True)] * 2


def test_copied_and_loaded_models_average_gradients_like_the_prepared_one(pair):
    def copied():
        accelerator = Accelerator()
        model = accelerator.prepare(build_network())
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        gradients_of_models = []
        for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            assert isinstance(other, DDPModel)
            other.note = 3
            assert other.module.note == 3
            assert "reducer" not in vars(other.module)
            other(build_batch(accelerator.process_index)).square().mean().backward()
            gradients_of_models.append(torch.cat([p.grad.flatten() for p in other.module.parameters()]))
        return gradients_of_models

    assert all(
        relative_error(actual, compute_reference(2)) < 1e-6 for grads in pair.run(copied) for actual in grads
    )


@pytest.mark.parametrize("by_the_script", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_compiled_model_averages_gradients_and_keeps_its_parameter_names(pair, by_the_script):
    def compiled():
        accelerator = Accelerator(dynamo_backend="no" if by_the_script else "eager")
        model = accelerator.prepare(build_network())
        called = torch.compile(model, backend="eager") if by_the_script else model
        accelerator.backward(called(build_batch(accelerator.process_index)).square().mean())
        assert list(model.state_dict()) == list(build_network().state_dict())
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    assert all(relative_error(actual, compute_reference(2)) < 1e-6 for actual in pair.run(compiled))


@pytest.mark.parametrize("freezes", [False, True])
def test_parameters_without_a_gradient_are_named_with_the_option_to_allow_them(pair, freezes):
    def train(**options):
        accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(**options)])
        module = build_network()
        if not freezes:
            module.forward = module[2].forward
        model = accelerator.prepare(module)
        module[0].requires_grad_(not freezes)
        for _ in range(2):
            accelerator.backward(model(build_batch(0)).sum())

    def fail():
        with pytest.raises(RuntimeError, match="Gradients of Sequential cannot be averaged") as failure:
            train()
        train(find_unused_parameters=True)
        return str(failure.value)

    for rank, message in enumerate(pair.run(fail)):
        assert f"no gradient of 0.weight, 0.bias on rank {rank}." in message
        assert "DistributedDataParallelKwargs(find_unused_parameters=True)" in message


class SumOfEmbedding(nn.Module):
    """A model whose embedding and layer get the gradient of one sum."""

    def __init__(self, kind):
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.embedding = getattr(nn, kind)(8, 4, sparse=True)

    def forward(self, x, indices):
        return self.layer(x) + self.embedding(indices)


@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag"])
def test_a_sparse_gradient_does_not_change_those_of_other_layers(pair, kind):
    """torch's DDP divides the values of the sparse gradient in place, which is the gradient of the sum."""

    def compute(kind, ranks):
        accelerator = Accelerator()
        torch.manual_seed(0)
        model = SumOfEmbedding(kind)
        prepared = accelerator.prepare(copy.deepcopy(model)) if ranks is None else model
        for rank in [accelerator.process_index] if ranks is None else ranks:
            draws = torch.Generator().manual_seed(rank)
            indices = torch.randint(8, (6, 2) if kind == "EmbeddingBag" else (6,), generator=draws)
            loss = prepared(torch.randn(6, 3, generator=draws), indices).square().mean()
            accelerator.backward(loss / len(ranks or [0]))
        torch.save(list(prepared.parameters()), io.BytesIO())  # does not warn of hooks
        return {
            name: parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            for name, parameter in accelerator.unwrap_model(prepared).named_parameters()
        }

    expected = compute(kind, [0, 1])
    for gradients in pair.run(compute, kind, None):
        for name, gradient in gradients.items():
            assert relative_error(gradient, expected[name]) < 1e-5, name


class Positions(nn.Module):
    """Buffers and parameters with strides, of which torch cannot broadcast some."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("table", torch.randn(5, 4).unsqueeze(0).transpose(0, 1))
        self.register_buffer("repeated", torch.arange(4.0).expand(3, -1))
        self.register_buffer("image", torch.ones(1, 2, 3, 3).to(memory_format=torch.channels_last))
        self.learned = nn.Parameter(torch.randn(5, 4).unsqueeze(0).transpose(0, 1))

    def forward(self, x):
        return (x + self.table + self.learned + self.repeated[0]).square().mean()


@pytest.mark.parametrize(
    "options", [{}, {"fsdp_plugin": FullyShardedDataParallelPlugin()}], ids=["replicated", "sharded"]
)
def test_buffers_of_any_strides_are_broadcast(pair, options):
    def train():
        accelerator, module = Accelerator(**options), Positions()
        repeated, expected = module.repeated, [buffer.clone() for buffer in module.buffers()]
        model = accelerator.prepare(module)
        for _ in range(2):
            accelerator.backward(model(torch.ones(5, 2, 4)))
        assert module.repeated is repeated
        return (
            module.image.is_contiguous(memory_format=torch.channels_last),
            expected,
            list(module.buffers()),
        )

    for image, expected, actual in pair.run(train):
        assert image
        assert all(torch.equal(g, w) for g, w in zip(actual, expected, strict=True))


def test_a_sparse_buffer_is_rejected_unless_buffers_are_not_broadcast(pair):
    def prepare():
        model = nn.Linear(2, 2)
        model.register_buffer("graph", torch.eye(2).to_sparse())
        with pytest.raises(ValueError, match="Buffer 'graph' of Linear cannot be broadcast"):
            Accelerator().prepare(model)
        handler = DistributedDataParallelKwargs(broadcast_buffers=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch 2.13 deprecates the option without an alternative
            return Accelerator(kwargs_handlers=[handler]).prepare(model)(torch.ones(1, 2)).shape

    assert pair.run(prepare) == [torch.Size([1, 2])] * 2


def test_saving_a_prepared_model_as_an_object_is_reported_once_for_a_line(pair):
    def save():
        model = Accelerator().prepare(nn.Linear(1, 1))
        with collect_messages("accel_runtime.export") as messages:
            copy.deepcopy(model)
            pickle.dumps(model)
            torch.save(model.state_dict(), io.BytesIO())
            assert not messages
            for _ in range(2):
                torch.save({"model": model}, io.BytesIO())
        return messages

    for messages in pair.run(save):
        assert len(messages) == 1
        assert "test_ddp.py" in messages[0]
        assert "accelerator.save_model(model, folder)" in messages[0]


def test_saving_a_model_with_autocast_as_an_object_is_reported(alone):
    def save():
        model = Accelerator(mixed_precision="bf16").prepare(nn.Linear(1, 1))
        with collect_messages("accel_runtime.export") as messages:
            torch.save(model, io.BytesIO())
        return len(messages)

    assert alone.run(save) == [1]


def train_with_evaluation(evaluates_alone):
    torch.manual_seed(0)
    accelerator, model = Accelerator(), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inputs = torch.arange(48.0).sin().view(2, 3, 4, 2)[accelerator.process_index]
    for step, batch in enumerate(inputs):
        accelerator.backward(model(batch).square().sum())
        optimizer.step()
        optimizer.zero_grad()
        if evaluates_alone and accelerator.is_main_process and step < len(inputs) - 1:
            model.eval()
            with torch.no_grad():
                model(batch)
            model.train()
    return {name: value.tolist() for name, value in model.state_dict().items()}


def test_an_evaluation_on_the_first_rank_alone_between_steps_changes_no_training(pair):
    # In the first one, DDP has yet to sort its buckets.
    assert pair.run(train_with_evaluation, True) == pair.run(train_with_evaluation, False)
