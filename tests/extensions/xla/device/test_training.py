"""Training on replicas of torch_xla equals training on one CPU process, or on processes over gloo."""

from __future__ import annotations

import pytest
import torch
from support.training.models import TiedNet
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from accel_runtime import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs, LocalSGD

pytest.importorskip("torch_xla", reason="torch_xla is in an environment of its own: make test-xla")

BATCH = 8
CLOSE = 1e-5


@pytest.fixture(autouse=True)
def _here_on_the_cpu(monkeypatch):
    monkeypatch.setenv("ACCEL_DEVICE", "cpu")


def filled(model, seed=0):
    """Fill a model with weights from a separate generator, since threads share that of torch."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return model


def network(seed=0):
    return filled(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), seed)


def sgd(model, rate=0.1):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=rate, momentum=0.9)


def parts(accelerator, steps=4):
    """Yield the local part of each global batch, on the device."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        batch = torch.randn(BATCH, 4, generator=generator)
        yield batch.chunk(accelerator.num_processes)[accelerator.process_index].to(accelerator.device)


def loss_of(model, batch):
    return (model(batch) - batch.sum(1, keepdim=True)).square().mean()


def step(accelerator, optimizer, loss):
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()


def own_factor(accelerator):
    """Return the rank plus one as data: a constant would compile another program on every replica."""
    return torch.tensor([accelerator.process_index + 1.0]).to(accelerator.device)


def plainly(accelerator):
    model = network()
    optimizer = sgd(model)  # made before the model goes anywhere
    model, optimizer = accelerator.prepare(model, optimizer)
    for batch in parts(accelerator):
        step(accelerator, optimizer, loss_of(model, batch))
    return model


def with_every_option_of_ddp_that_changes_no_number(accelerator):
    return plainly(accelerator)


def with_state_of_the_optimizer_from_before(accelerator):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    loss_of(model, torch.ones(2, 4)).backward()
    optimizer.step()
    optimizer.zero_grad()
    model, optimizer = accelerator.prepare(model, optimizer)
    for batch in parts(accelerator):
        step(accelerator, optimizer, loss_of(model, batch))
    return [model, [state["exp_avg_sq"] for state in optimizer.state.values()]]


def with_parameters_that_are_frozen_or_unused(accelerator):
    model = network()
    model[0].weight.requires_grad_(requires_grad=False)
    model.unused = nn.Linear(2, 2)
    filled(model)
    model.forward = lambda batch: model[2](torch.tanh(model[0](batch)))
    optimizer = sgd(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    for batch in parts(accelerator):
        step(accelerator, optimizer, loss_of(model, batch))
    return model


def with_two_models_and_two_optimizers(accelerator):
    models = [network(), network(1)]
    first, second, first_optimizer, second_optimizer = accelerator.prepare(
        *models, sgd(models[0]), sgd(models[1], 0.01)
    )
    for batch in parts(accelerator):
        step(accelerator, first_optimizer, loss_of(first, batch) + second(batch).mean())
        step(accelerator, second_optimizer, loss_of(second, batch))
    return models


def with_a_teacher_that_does_not_learn(accelerator):
    teacher = accelerator.prepare_model(network(1), evaluation_mode=True)
    model = network()
    model, optimizer = accelerator.prepare(model, sgd(model))
    for batch in parts(accelerator):
        with torch.no_grad():
            expected = teacher(batch)
        step(accelerator, optimizer, (model(batch) - expected).square().mean())
    return [model, teacher]


def with_tied_weights(accelerator):
    model = filled(TiedNet(4, bias=False))
    model, optimizer = accelerator.prepare(model, sgd(model))
    assert model.first.weight is model.second.weight
    for batch in parts(accelerator):
        step(accelerator, optimizer, loss_of(model, batch))
    return model


def with_hooks_of_the_script(accelerator):
    model = network()
    model[0].weight.register_hook(lambda grad: grad * 2)
    model, optimizer = accelerator.prepare(model, sgd(model))
    model[2].weight.register_hook(lambda grad: grad * 3)
    for batch in parts(accelerator):
        step(accelerator, optimizer, loss_of(model, batch))
    return model


def accumulating(accelerator):
    model = network()
    model, optimizer = accelerator.prepare(model, sgd(model))
    for batch in parts(accelerator, 6):
        with accelerator.accumulate(model):
            step(accelerator, optimizer, loss_of(model, batch))
    return model


def with_a_pass_in_no_sync(accelerator):
    model = network()
    model, optimizer = accelerator.prepare(model, sgd(model))
    for batch in parts(accelerator):
        with accelerator.no_sync(model):
            accelerator.backward(loss_of(model, batch[:1]))
        step(accelerator, optimizer, loss_of(model, batch))
    return model


def with_sync_in_the_backward_pass_only(accelerator):
    model = network()
    model, optimizer = accelerator.prepare(model, sgd(model))
    for batch in parts(accelerator):
        with accelerator.no_sync(model):
            loss = loss_of(model, batch)
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return model


def with_weights(accelerator):
    model = network()
    model, optimizer = accelerator.prepare(model, sgd(model))
    for index, batch in enumerate(parts(accelerator, 6)):
        # Another number of rows on every rank, and none; masked out, since shapes have to be the same.
        mask = (batch[:, :1] > -0.5) if index else torch.zeros_like(batch[:, :1], dtype=torch.bool)
        count = mask.sum()
        with accelerator.accumulate(model):
            errors = (model(batch) - batch.sum(1, keepdim=True)).square()
            accelerator.backward((errors * mask).sum() / count, weight=int(count) if index % 2 else count)
            optimizer.step()
            optimizer.zero_grad()
    return model


def clipping(accelerator):
    model = network()
    model, optimizer = accelerator.prepare(model, sgd(model))
    norms = []
    for batch in parts(accelerator):
        accelerator.backward(loss_of(model, batch))
        norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.1))
        accelerator.clip_grad_value_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return [model, norms]


CASES = {
    case.__name__: case
    for case in (
        plainly,
        with_every_option_of_ddp_that_changes_no_number,
        with_state_of_the_optimizer_from_before,
        with_parameters_that_are_frozen_or_unused,
        with_two_models_and_two_optimizers,
        with_a_teacher_that_does_not_learn,
        with_tied_weights,
        with_hooks_of_the_script,
        accumulating,
        with_sync_in_the_backward_pass_only,
        with_weights,
        clipping,
    )
}


def local_sgd(accelerator):
    model = network()
    model, optimizer = accelerator.prepare(model, sgd(model))
    with LocalSGD(accelerator, model, local_sgd_steps=2) as local:
        for batch in parts(accelerator, 5):
            step(accelerator, optimizer, loss_of(model, batch))
            local.step()
    return accelerator.unwrap_model(model)


class Centred(nn.Module):
    """A simplified batch norm: that of torch_xla has another running variance (over n, not n - 1)."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, batch):
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(batch.mean(0), alpha=0.1)
                self.seen += 1
        return batch - self.mean


def with_buffers(accelerator):
    """Train with statistics that differ on each rank, and are broadcast at each averaging pass."""
    model = filled(nn.Sequential(nn.Linear(4, 8), Centred(), nn.Linear(8, 1)))
    model, optimizer = accelerator.prepare(model, sgd(model))
    values_seen = []
    for index, batch in enumerate(parts(accelerator, 6)):
        if index == 3:
            model.eval()
            with torch.no_grad():
                values_seen.append(accelerator.gather(model(batch)))
            model.train()
        with accelerator.accumulate(model):
            step(accelerator, optimizer, loss_of(model, batch))
        accelerator.wait_for_everyone()
    plain = accelerator.unwrap_model(model)
    return [plain, [buffer.clone() for buffer in plain.buffers()], values_seen]


RANKED = {case.__name__: case for case in (local_sgd, with_buffers, with_a_pass_in_no_sync)}
OPTIONS = {
    "accumulating": {"gradient_accumulation_steps": 2},
    "with_weights": {"gradient_accumulation_steps": 2},
    "with_buffers": {"gradient_accumulation_steps": 2},
    "with_buffers_left_alone": {"gradient_accumulation_steps": 2},
}
DDP = {
    "with_every_option_of_ddp_that_changes_no_number": {
        "bucket_cap_mb": 1,
        "find_unused_parameters": True,
        "gradient_as_bucket_view": True,
        "static_graph": True,
    },
    "with_parameters_that_are_frozen_or_unused": {"find_unused_parameters": True},
    "with_buffers_left_alone": {"broadcast_buffers": False},
}


def numbers(value):
    """Return all numbers of models and tensors, on the CPU."""
    if isinstance(value, (list, tuple)):
        return [number for item in value for number in numbers(item)]
    if isinstance(value, nn.Module):
        return [parameter.detach().cpu() for parameter in value.parameters()]
    return [value.detach().cpu()]


def trained(case, name):
    accelerator = Accelerator(
        kwargs_handlers=[DistributedDataParallelKwargs(**DDP.get(name, {}))], **OPTIONS.get(name, {})
    )
    result = case(accelerator)
    accelerator.wait_for_everyone()
    return numbers(result)


def agree(actual, expected, tolerance=CLOSE):
    assert len(actual) == len(expected)
    for actual_item, expected_item in zip(actual, expected, strict=True):
        torch.testing.assert_close(actual_item, expected_item, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_two_replicas_train_as_one_process(replicas, gloo, name):
    expected = gloo[1].run(trained, CASES[name], name)[0]
    for actual in replicas[2].run(trained, CASES[name], name):
        agree(actual, expected)


@pytest.mark.parametrize(
    "name",
    # Steps with weights accumulate too.
    ["plainly", pytest.param("accumulating", marks=pytest.mark.full), "with_weights"],
)
def test_one_and_four_replicas_train_as_one_process(replicas, gloo, name):
    expected = gloo[1].run(trained, CASES[name], name)[0]
    for size in (1, 4):
        for actual in replicas[size].run(trained, CASES[name], name):
            agree(actual, expected)


@pytest.mark.parametrize("name", [*RANKED, "with_buffers_left_alone"])
def test_two_replicas_train_as_two_processes_with_rank_dependent_data(replicas, gloo, name):
    case = RANKED.get(name, with_buffers)
    expected = gloo[2].run(trained, case, name)
    for actual, other in zip(replicas[2].run(trained, case, name), expected, strict=True):
        agree(actual, other)


@pytest.mark.parametrize("size", [1, 2])
def test_ten_losses_equal_those_of_plain_torch(replicas, size):
    data = [(row, row.sum()) for row in torch.randn(80, 4, generator=torch.Generator().manual_seed(2))]

    def losses(data):
        accelerator = Accelerator(split_batches=True)
        model = network()
        model, optimizer, loader = accelerator.prepare(model, sgd(model, 0.05), DataLoader(data, BATCH))
        actual_losses = []
        for rows, sums in loader:
            loss = functional.mse_loss(model(rows).flatten(), sums)
            step(accelerator, optimizer, loss)
            actual_losses.append(accelerator.reduce(loss.detach(), "mean").cpu())
        return torch.stack(actual_losses)

    model = network()
    optimizer = sgd(model, 0.05)
    expected = []
    for rows, sums in DataLoader(data, BATCH):
        loss = functional.mse_loss(model(rows).flatten(), sums)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.detach())
    for actual in replicas[size].run(losses, data):
        torch.testing.assert_close(actual, torch.stack(expected), atol=1e-4, rtol=1e-4)


def test_gradients_in_bfloat16_are_averaged(replicas):
    def gradients():
        accelerator = Accelerator()
        model = accelerator.prepare(filled(nn.Linear(4, 1)).bfloat16())
        accelerator.backward((model.weight * own_factor(accelerator).to(model.weight.dtype)).sum())
        accelerator.wait_for_everyone()
        return model.weight.grad.cpu()

    for actual in replicas[2].run(gradients):
        assert torch.equal(actual, torch.full((1, 4), 1.5, dtype=torch.bfloat16))


def test_autocast_computes_in_bfloat16_and_returns_float32(replicas, gloo):
    def computed():
        accelerator = Accelerator(mixed_precision="bf16")
        model = accelerator.prepare(network())
        output = model(torch.linspace(-1, 1, 8, device=accelerator.device).view(2, 4))
        accelerator.backward(output.square().mean())
        accelerator.wait_for_everyone()
        return output.detach().cpu(), model[0].weight.grad.cpu(), model[0].weight.dtype

    expected, gradient, _ = gloo[1].run(computed)[0]
    for actual, own_output, dtype in replicas[2].run(computed):
        assert actual.dtype == own_output.dtype == dtype == torch.float32
        torch.testing.assert_close(actual, expected, atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(own_output, gradient, atol=1e-2, rtol=1e-2)
        assert not torch.equal(actual, network()(torch.linspace(-1, 1, 8).view(2, 4)))


def test_a_loop_without_a_prepared_loader_executes_each_step(replicas):
    def recorded():
        import torch_xla

        accelerator = Accelerator()
        model = network()
        model, optimizer = accelerator.prepare(model, sgd(model))
        lengths = []
        for batch in parts(accelerator, 6):
            step(accelerator, optimizer, loss_of(model, batch))
            lengths.append(len(torch_xla._XLAC._get_xla_tensors_text([model[0].weight])))
        return lengths

    for lengths in replicas[2].run(recorded):
        assert len(set(lengths)) == 1


def test_a_loop_with_a_prepared_loader_is_executed_by_the_loader(replicas):
    def recorded():
        import torch_xla

        accelerator = Accelerator()
        model = network()
        data = [torch.ones(4)] * 24
        model, optimizer, loader = accelerator.prepare(model, sgd(model), DataLoader(data, 4))
        lengths = []
        for batch in loader:
            step(accelerator, optimizer, loss_of(model, batch))
            lengths.append(len(torch_xla._XLAC._get_xla_tensors_text([model[0].weight])))
        accelerator.wait_for_everyone()
        return lengths, len(torch_xla._XLAC._get_xla_tensors_text([model[0].weight]))

    for lengths, settled in replicas[2].run(recorded):
        assert len(lengths) == 3
        assert min(lengths) > 2 * settled
        assert max(lengths) < 2 * min(lengths)


def test_a_gradient_missing_on_some_replicas_is_an_error_with_its_name(replicas):
    def catch_error():
        accelerator = Accelerator()
        model = accelerator.prepare(network())
        rank = accelerator.process_index
        loss = model[0].weight.sum() if rank else model(torch.ones(2, 4, device=accelerator.device)).sum()
        try:
            accelerator.backward(loss)
        except RuntimeError as error:
            return str(error)

    for text in replicas[2].run(catch_error):
        assert "no gradient of '0.bias' on rank 1" in text
        assert "run one program" in text


def test_gradients_are_averaged_after_a_failed_backward_pass(replicas):
    def gradients():
        accelerator = Accelerator()
        model = accelerator.prepare(filled(nn.Linear(4, 4, bias=False)))
        failing = (model.weight * 1).clone()
        failing.register_hook(lambda _: 1 / 0)
        output = model(torch.ones(1, 4, device=accelerator.device))
        try:
            accelerator.backward(model.weight.sum() + failing.sum() + output.sum())
        except ZeroDivisionError:
            model.zero_grad()
        accelerator.backward((model.weight * own_factor(accelerator).to(model.weight.dtype)).sum())
        accelerator.wait_for_everyone()
        return model.weight.grad.cpu()

    for actual in replicas[2].run(gradients):
        assert torch.equal(actual, torch.full((4, 4), 1.5))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixed_precision": "fp16"}, "torch_xla has no loss scaler. Use bf16"),
        ({"kwargs_handlers": [DistributedDataParallelKwargs(comm_hook="fp16")]}, "Remove comm_hook"),
        ({"kwargs_handlers": [InitProcessGroupKwargs(init_method="file:///x")]}, "init_method='file:///x'"),
    ],
)
def test_unsupported_options_are_rejected_by_the_accelerator(replicas, size, options, message):
    def refused(options):
        try:
            Accelerator(**options)
        except ValueError as error:
            return str(error)

    assert all(message in text for text in replicas[size].run(refused, options))


def test_join_uneven_inputs_warns_only_if_it_would_have_an_effect(replicas):
    def warned():
        accelerator = Accelerator()
        model = accelerator.prepare(network())
        messages = []
        # Replicas are threads that share the logger, so the warning of each is looked for by its own strategy.
        accelerator._run.strategy._has_warned_of_join = False
        with accelerator.join_uneven_inputs([model], even_batches=True):
            messages.append(accelerator._run.strategy._has_warned_of_join)
        with accelerator.join_uneven_inputs([model]):
            messages.append(accelerator._run.strategy._has_warned_of_join)
        return messages

    assert replicas[2].run(warned) == [[False, True]] * 2


def test_a_copied_replica_runs_without_the_other_replicas(replicas):
    def copied():
        import copy

        accelerator = Accelerator()
        model = accelerator.prepare(nn.Sequential(nn.Linear(4, 8), Centred()))
        twin = copy.deepcopy(model)
        if accelerator.is_main_process:  # not a collective, so nobody else has to come
            twin(torch.ones(2, 4, device=accelerator.device))
        accelerator.wait_for_everyone()
        return True

    assert all(replicas[2].run(copied))


def test_device_generators_are_synchronized_with_rng_types_xla(replicas):
    def numbers_drawn():
        import torch_xla.core.xla_model as xm

        accelerator = Accelerator(rng_types=["xla"])
        xm.set_rng_state(7 + accelerator.process_index)
        loader = accelerator.prepare(DataLoader([torch.ones(1)] * 4, 1))
        for _ in loader:
            random_numbers = torch.rand(3, device=accelerator.device).cpu()
        return random_numbers

    first, second = replicas[2].run(numbers_drawn)
    assert torch.equal(first, second)


def test_global_batches_of_a_fixed_number_of_samples_train_as_one_process(replicas):
    def train(batch_size, *, drop_last=True):
        accelerator = Accelerator(global_batch_size=8)
        model = network()
        optimizer = sgd(model)
        rows = torch.randn(26, 4, generator=torch.Generator().manual_seed(1))
        loader = DataLoader(rows, batch_size=batch_size, drop_last=drop_last)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for batch in loader:
            with accelerator.accumulate(model):
                step(accelerator, optimizer, loss_of(model, batch))
        assert optimizer.steps == 3
        return torch.cat([parameter.detach().cpu().flatten() for parameter in model.parameters()])

    def refuse():
        with pytest.raises(ValueError, match="on this device all ranks must run the same program"):
            train(2, drop_last=False)
        with pytest.raises(
            ValueError, match="Use drop_last=True, and a multiple of batch_size times 2 ranks"
        ):
            train(3)
        return train(2)

    expected = replicas[1].run(train, 8)[0]
    for result in replicas[2].run(refuse):
        torch.testing.assert_close(result, expected, atol=CLOSE, rtol=CLOSE)
