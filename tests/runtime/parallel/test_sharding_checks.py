"""Sharded models train as on one process, or are rejected before the first step with the way out."""

from __future__ import annotations

import copy

import pytest
import torch
from support.training.models import ResidualNet
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from accel_runtime import Accelerator, ParallelismConfig
from accel_runtime.foundation import torch_internals

TOKENS = torch.arange(14).remainder(7)
TARGETS = torch.linspace(-1, 1, 42).view(14, 3)
X = torch.linspace(-1, 1, 36).view(6, 6)


class Net(nn.Module):
    """An embedding and two layers, changed by a function."""

    def __init__(self, change=lambda _: None):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layer, self.head = nn.Embedding(7, 6), nn.Linear(6, 5), nn.Linear(5, 3)
        self.extra = nn.ParameterDict()
        change(self)

    def forward(self, tokens):
        x = self.embed(tokens if isinstance(self.embed, nn.Embedding) else tokens[:, None])
        for parameter in self.extra.values():
            x = x * (1 + parameter.sum())
        self.change_weights()
        return self.head(torch.tanh(self.layer(x)))

    def change_weights(self):
        pass


class Clamped(Net):
    def change_weights(self):
        with torch.no_grad():
            self.layer.weight.clamp_(-0.2, 0.2)


class DataClamped(Net):
    def change_weights(self):
        self.layer.weight.data.clamp_(-0.2, 0.2)


class Renormalized(Net):
    def change_weights(self):
        nn.functional.embedding(TOKENS, self.embed.weight, max_norm=0.5)


class Normed(nn.Module):
    def forward(self, weight):
        return weight / weight.norm()


def shard():
    return Accelerator(parallelism_config=ParallelismConfig(dp_shard_size=2))


def train(accelerator, build, build_optimizer, steps=3):
    """Return the full weights after some steps on the tokens of this process, without an accelerator on all of them."""
    model = build()
    optimizer = build_optimizer(model.parameters())
    tokens, targets, backward = TOKENS, TARGETS, torch.Tensor.backward
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
        rank = accelerator.process_index
        tokens, targets = tokens.chunk(2)[rank], targets.chunk(2)[rank]
        backward = accelerator.backward
    for _ in range(steps):
        backward((model(tokens) - targets).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict() if accelerator is None else accelerator.get_state_dict(model, everywhere=True)


def compare(build, build_optimizer):
    """Return the largest difference between the weights of sharded training and those of one process."""
    found = train(shard(), build, build_optimizer)
    expected = train(None, build, build_optimizer)
    differences = [(found[name] - value).abs() for name, value in expected.items()]
    return max(difference.max().item() for difference in differences if difference.numel())


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


OPTIMIZERS = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and kind is not torch.optim.Optimizer
}
REJECTED = {"Adafactor", "LBFGS", "Rprop", "SparseAdam"}
ROUNDED = {"Muon": 1e-3}
"""Optimizers that compute in bfloat16."""


def compare_optimizers():
    results = {}
    for name, kind in OPTIMIZERS.items():
        change = drop_biases if name == "Muon" else lambda _: None
        try:
            results[name] = compare(lambda change=change: Net(change), kind)
        except ValueError as error:
            results[name] = str(error)
    return results


def drop_biases(net):
    net.layer.bias = net.head.bias = None


def test_every_optimizer_of_torch_steps_as_on_one_process_or_is_rejected(pair):
    for results in pair.run(compare_optimizers):
        assert results.keys() == OPTIMIZERS.keys()
        for name, result in results.items():
            if name in REJECTED:
                assert result.startswith(f"{name} cannot train a sharded model: "), name
                assert "Use another optimizer" in result
            else:
                assert result <= ROUNDED.get(name, 1e-5), name


class ScriptMuon(torch.optim.Optimizer):
    """Muon as scripts copy it: Newton-Schulz of each matrix, here in float32; experts in a stack `[E, M, N]` one by one."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.02, "momentum": 0.95})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                momentum = state.setdefault("momentum_buffer", torch.zeros_like(p))
                momentum.lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(momentum, group["momentum"])
                update = update / (update.norm(dim=(-2, -1), keepdim=True) + 1e-7)
                for _ in range(5):
                    gram = update @ update.mT
                    update = 3.4445 * update + (-4.7750 * gram + 2.0315 * gram @ gram) @ update
                p.add_(update, alpha=-group["lr"])


class Experts(nn.Module):
    """Layers, and a stack of matrices as of a mixture of experts."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layer = nn.Embedding(7, 6), nn.Linear(6, 5, bias=False)
        self.experts = nn.Parameter(torch.randn(3, 5, 3) / 4)

    def forward(self, tokens):
        x = torch.tanh(self.layer(self.embed(tokens)))
        return (x @ self.experts).sum(dim=0)


def compare_script_muon():
    return compare(Experts, ScriptMuon)


def test_muon_of_a_script_steps_whole_matrices_and_stacked_experts_as_on_one_process(pair):
    for difference in pair.run(compare_script_muon):
        assert difference < 1e-5


def reject_optimizers():
    messages = []
    for build_optimizer in (
        lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
        lambda p: torch.optim.Adagrad(p, fused=True),
        torch.optim.Rprop,
    ):
        accelerator, net = shard(), Net()
        optimizer = accelerator.prepare(build_optimizer(net.parameters()))
        try:
            accelerator.prepare(net)
        except ValueError as error:
            messages.append(str(error))
        assert optimizer.steps == 0
    return messages


def reject_other_adafactor():
    transformers = pytest.importorskip("transformers")
    accelerator, net = shard(), Net()
    try:
        accelerator.prepare(net, transformers.Adafactor(net.parameters()))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_adafactor_of_transformers_is_rejected_too(pair):
    pytest.importorskip("transformers")
    assert all("Adafactor cannot train a sharded model" in m for m in pair.run(reject_other_adafactor))


def test_an_optimizer_that_is_prepared_before_its_model_is_rejected_too(pair):
    for messages in pair.run(reject_optimizers):
        assert [message.split(":")[0] for message in messages] == [
            "SGD(fused=True) cannot train a sharded model",
            "Adagrad(fused=True) cannot train a sharded model",
            "Rprop cannot train a sharded model",
        ]


def add_extra(value):
    def change(net):
        net.extra["extra"] = nn.Parameter(value.clone())

    return change


def transpose(net):
    net.layer.weight = nn.Parameter(torch.randn(6, 5).t())


CHANGES = {
    "empty": add_extra(torch.empty(0, 3)),
    "scalar": add_extra(torch.tensor(0.5)),
    "transposed": transpose,
    "spectral_norm": lambda net: parametrizations.spectral_norm(net.layer),
    "weight_norm": lambda net: parametrizations.weight_norm(net.layer),
    "orthogonal": lambda net: parametrizations.orthogonal(net.layer),
    "own parametrization": lambda net: parametrize.register_parametrization(net.layer, "weight", Normed()),
}


def compare_changes():
    return {name: compare(lambda change=change: Net(change), sgd) for name, change in CHANGES.items()}


def test_unusual_parameters_and_parametrizations_train_as_on_one_process(pair):
    for results in pair.run(compare_changes):
        for name, difference in results.items():
            assert difference < 1e-6, name


def set_embedding(**options):
    def change(net):
        net.embed = nn.Embedding(7, 6, **options)

    return change


def set_bag(net):
    net.embed = nn.EmbeddingBag(7, 6, max_norm=0.5)


REFUSED = {
    "max_norm": (lambda: Net(set_embedding(max_norm=0.5)), "embed of Net .*: max_norm changes .*after each"),
    "bag": (lambda: Net(set_bag), "embed of Net .*: max_norm changes .* after each optimizer step"),
    "sparse": (lambda: Net(set_embedding(sparse=True)), "embed of Net: .*sparse gradients.*Set sparse=False"),
    "clamp": (Clamped, r"changes layer\.weight, which is lost.*after the optimizer step"),
    "data": (DataClamped, r"changes layer\.weight, which is lost.*after the optimizer step"),
    "function": (Renormalized, r"changes embed\.weight, which is lost.*after the optimizer step"),
}


def refuse_changes():
    messages = {}
    for name, (build, _) in REFUSED.items():
        try:
            train(shard(), build, sgd, steps=1)
        except (RuntimeError, ValueError) as error:
            messages[name] = str(error)
    return messages


def test_modules_that_change_their_weights_in_the_forward_pass_are_rejected(pair):
    for messages in pair.run(refuse_changes):
        for name, (_, pattern) in REFUSED.items():
            with pytest.raises(ValueError, match=pattern):
                raise ValueError(messages[name])


def normalize_rows():
    """Return the difference from the cure for max_norm on one process."""
    accelerator = shard()
    expected = Net().embed.weight.detach().renorm(2, 0, 0.5)
    weight = accelerator.prepare(Net()).embed.weight
    with torch.no_grad():
        weight.mul_((0.5 / weight.norm(dim=1, keepdim=True)).clamp(max=1))
    return (weight.full_tensor() - expected).abs().max().item()


def refuse_max_norm_in_ddp():
    try:
        Accelerator().prepare(Net(set_embedding(max_norm=0.5)))
    except ValueError as error:
        return str(error)
    return ""


def test_the_cure_for_max_norm_works_and_ddp_rejects_it_too(pair):
    assert max(pair.run(normalize_rows)) < 1e-6
    assert all("max_norm changes the rows" in message for message in pair.run(refuse_max_norm_in_ddp))


class Viewed(nn.Module):
    """A model whose modules return views of what they compute."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        # With a bias and inputs of three dimensions, torch returns a view.
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        for layer in self.layers:
            y = layer(torch.tanh(x))
            y += x
            x = y
        return self.head(x)


def add_to_views():
    """Return losses and gradients of sharded models and of the same models on one process."""
    results = []
    for accelerator in (shard(), None):
        model = Viewed()
        prepared = accelerator.prepare(model) if accelerator else model
        out = prepared(X.view(2, 3, 6))
        assert torch_internals.is_view(out) is (accelerator is None)
        out *= 2
        loss = out.square().mean()
        loss.backward()
        gradients = (parameter.grad for parameter in model.parameters())
        results.append([loss.detach(), *(getattr(g, "full_tensor", lambda g=g: g)() for g in gradients)])
    return results


class ReturnsInput(nn.Linear):
    def forward(self, x):
        return super().forward(x), x[:1]


def return_view_of_input():
    model = shard().prepare(ReturnsInput(6, 3))
    with pytest.warns(UserWarning, match="returned a view tensor"):
        _, kept = model(X.clone().requires_grad_() * 1)
    return torch_internals.is_view(kept)


def test_operations_in_place_on_outputs_that_are_views_train_as_on_one_process(pair):
    """`fully_shard` alone loses the hook that gathers parameters, and fails with "setStorage"."""
    for sharded, expected in pair.run(add_to_views):
        torch.testing.assert_close(sharded, expected)


def test_a_view_of_an_input_stays_one_and_is_warned_of(pair):
    assert pair.run(return_view_of_input) == [True, True]


def build_blocks():
    torch.manual_seed(0)
    return ResidualNet(6, inputs=6, outputs=3)


def average_weights():
    """Return the differences of an average that is prepared with its model, and the error of a later copy."""
    accelerator, results = shard(), []
    for options in ({}, {"multi_avg_fn": get_ema_multi_avg_fn(0.5)}, {"use_buffers": True}):
        plain, net = build_blocks(), build_blocks()
        expected, average = AveragedModel(plain, **options), AveragedModel(net, **options)
        model, average, optimizer = accelerator.prepare(net, average, sgd(net.parameters()))
        plain_optimizer = sgd(plain.parameters())
        for _ in range(3):
            accelerator.backward(model(X.chunk(2)[accelerator.process_index]).square().mean())
            plain(X).square().mean().backward()
            for each in (optimizer, plain_optimizer):
                each.step()
                each.zero_grad()
            average.update_parameters(model)
            expected.update_parameters(plain)
        with torch.no_grad():
            results.append((average(X) - expected(X)).abs().max().item())
    messages = []
    for copy_model in (AveragedModel, copy.deepcopy, lambda model: copy.deepcopy(model.blocks[0])):
        try:
            copy_model(model)
        except RuntimeError as error:
            messages.append(str(error))
    return results, messages


def test_an_average_of_weights_is_prepared_with_its_model_and_cannot_be_copied_from_it(pair):
    for differences, messages in pair.run(average_weights):
        assert max(differences) < 1e-6
        assert [message.split(":")[0] for message in messages] == [
            "Cannot copy ResidualNet",
            "Cannot copy ResidualNet",
            "Cannot copy ResidualBlock",
        ]
        assert "accelerator.prepare(model, average)" in messages[0]


def penalize_inputs(accelerator, model, x):
    x = x.clone().requires_grad_()
    loss = model(x).square().mean()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    accelerator.backward(loss + gradient.square().sum())


def penalize_weights(accelerator, model, x):
    loss = model(x).square().mean() + sum(p.square().sum() for p in model.parameters())
    accelerator.backward(loss)


def replace_weights(accelerator, model, x):
    accelerator.backward(model(x).square().mean())
    doubled = {name: 2 * parameter for name, parameter in model.named_parameters()}
    torch.func.functional_call(model, doubled, (x,))


def differentiate_functionally(_, model, x):
    def compute(parameters):
        return torch.func.functional_call(model, parameters, (x,)).square().mean()

    torch.func.grad(compute)({name: p.detach() for name, p in model.named_parameters()})


STEPS = {
    "create_graph": (
        lambda accelerator, model, x: accelerator.backward(model(x).square().mean(), create_graph=True),
        "create_graph=True.*fully_shard.wrap: none",
    ),
    "penalty of inputs": (penalize_inputs, "create_graph=True.*fully_shard.wrap: none"),
    "penalty of weights": (penalize_weights, r"backward\(\) failed: the loss has parameters.*weight_decay"),
    "inputs": (
        lambda accelerator, model, x: accelerator.backward(
            model(x).square().mean(), inputs=list(model.parameters())
        ),
        "Invalid inputs: .*zero_grad",
    ),
    "replaced weights": (replace_weights, r"first.weight.*were replaced.*gathered\(model\)"),
    "functional gradient": (differentiate_functionally, r"first.weight.*were replaced.*gathered\(model\)"),
}


def refuse_steps():
    messages = {}
    for name, (step, _) in STEPS.items():
        accelerator = shard()
        model = accelerator.prepare(build_blocks())
        try:
            step(accelerator, model, X.chunk(2)[accelerator.process_index])
        except (RuntimeError, ValueError) as error:
            messages[name] = str(error)
    return messages


def test_steps_that_need_the_parameters_again_are_rejected(pair):
    for messages in pair.run(refuse_steps):
        for name, (_, pattern) in STEPS.items():
            with pytest.raises(ValueError, match=pattern):
                raise ValueError(messages[name])


class Forces(nn.Module):
    """A model whose outputs are gradients of its inputs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(self.inner(x).square().sum(), x, create_graph=True)[0]


def train_forces():
    """Return the difference from one process of second derivatives in the forward pass, and of functional transforms."""
    accelerator = shard()
    plain, model = Forces(), accelerator.prepare(Forces())
    accelerator.backward(model(X.chunk(2)[accelerator.process_index]).square().mean())
    plain(X).square().mean().backward()
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    differences = [
        (ours.grad.full_tensor() - p.grad).abs().max().item() for p, ours in pairs if p.grad is not None
    ]
    plain, model = build_blocks(), accelerator.prepare(build_blocks())
    differences += [
        (transform(model)(X) - transform(plain)(X)).abs().max().item()
        for transform in (torch.func.vmap, torch.func.jacrev)
    ]

    def differentiate(model):
        def compute(parameters):
            return torch.func.functional_call(model, parameters, (X,)).square().mean()

        return torch.func.grad(compute)({name: 2 * p.detach() for name, p in model.named_parameters()})

    with accelerator.gathered(model):
        ours = differentiate(model)
    differences += [(ours[name] - value).abs().max().item() for name, value in differentiate(plain).items()]
    return max(differences)


def test_second_derivatives_in_the_forward_pass_and_functional_transforms_are_those_of_one_process(pair):
    assert max(pair.run(train_forces)) < 1e-6
