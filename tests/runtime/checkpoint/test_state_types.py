"""Models, optimizers and schedulers of every kind are bitwise equal after a resume."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from support.runs.recorded_runs import Script, assert_resumes_are_exact, train_batch
from support.training.models import TiedNet
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim import lr_scheduler as schedules

from accel_runtime import (
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    LocalSGD,
)


class UnusualModel(nn.Module):
    """A model with unusual parameters, buffers and extra state."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 1)
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.transposed = nn.Parameter(torch.randn(5, 3).t())
        self.complex = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.bool))
        self.register_buffer("sums", torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("unsaved", torch.zeros(1), persistent=False)
        self.extra = {"calls": 0, "names": ["a"], "shift": torch.zeros(3)}

    def forward(self, inputs):
        self.calls += 1
        self.seen[int(self.calls) % 2] = True
        self.sums += inputs.detach().mean(0)
        self.extra["calls"] += 1
        self.extra["shift"] = self.extra["shift"] + self.sums.float()
        complex_part = torch.view_as_real(inputs * self.complex).sum((1, 2))[:, None]
        scale = 1 + self.extra["calls"] / 100 + self.extra["shift"].sum() / 100
        return (
            self.inner(inputs) * self.gain * scale.tanh()
            + (inputs @ self.transposed).sum(1, keepdim=True)
            + complex_part / 3
            + self.empty.sum()
        )

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


class ModelWithHooks(nn.Module):
    """A model whose hooks rename entries of its state and add one."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 1)
        self.calls = 0
        self.register_state_dict_post_hook(ModelWithHooks.rename_weights)
        self.register_load_state_dict_pre_hook(ModelWithHooks.restore_weights)

    def forward(self, inputs):
        self.calls += 1
        return self.inner(inputs) + self.calls / 50

    @staticmethod
    def rename_weights(module, state, prefix, _):
        state[f"{prefix}outer.weight"] = (
            state.pop(f"{prefix}inner.weight") * 1.0
        )  # a copy, as functions that convert weights return
        state[f"{prefix}times"] = torch.tensor(module.calls)

    @staticmethod
    def restore_weights(module, state, prefix, *_):
        state[f"{prefix}inner.weight"] = state.pop(f"{prefix}outer.weight")
        module.calls = int(state.pop(f"{prefix}times"))


class ChannelsLastModel(nn.Module):
    """A convolution in the channels-last format."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Conv2d(3, 4, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, inputs):
        return self.inner(inputs[:, :, None, None].expand(-1, -1, 4, 4)).mean((2, 3)).sum(1, keepdim=True)


class ScheduleFreeOptimizer(torch.optim.Optimizer):
    """A schedule-free optimizer, with numbers in parameter groups and state of several types."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "k": 0, "weight_sum": 0.0, "train_mode": True})

    def step(self, closure=None):  # noqa: ARG002 - the signature of optimizers
        for group in self.param_groups:
            group["k"] += 1
            group["weight_sum"] += 1 / group["k"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state |= {
                        "z": parameter.detach().clone(),
                        "history": [],
                        "mode": "fast",
                        "last": (0, 0.0),
                    }
                state["z"].sub_(parameter.grad, alpha=group["lr"])
                state["history"] = [*state["history"][-2:], float(parameter.grad.sum())]
                state["last"] = (group["k"], sum(state["history"]))
                parameter.data.lerp_(state["z"], 1 / group["k"] + state["last"][1] * 1e-4)


class MovingAverage:
    """A moving average of the weights, registered by the script."""

    def __init__(self, model):
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.num_updates = 0

    def update(self, model):
        self.num_updates += 1
        for name, p in model.named_parameters():
            self.shadow[name].lerp_(p.detach(), 1 / (self.num_updates + 1))

    def state_dict(self):
        return {"shadow": self.shadow, "count": self.num_updates}

    def load_state_dict(self, state):
        self.shadow, self.num_updates = state["shadow"], state["count"]


def build_layers(*inner):
    return nn.Sequential(nn.Linear(3, 4), *inner, nn.Linear(4, 1))


def build_batch_norm_model():
    return build_layers(nn.BatchNorm1d(4), nn.Tanh())


def build_parametrized_model():
    model = build_layers(nn.Tanh())
    parametrizations.weight_norm(model[0])
    parametrizations.spectral_norm(model[2])
    return model


def build_frozen_model():
    model = build_layers(nn.Tanh())
    model[0].requires_grad_(requires_grad=False)
    return model


MODELS = {
    "odd": UnusualModel,
    "tied": lambda: nn.Sequential(TiedNet(3), nn.Linear(3, 1)),
    "hooks": ModelWithHooks,
    "channels last": ChannelsLastModel,
    "batch norm": build_batch_norm_model,
    "dropout": lambda: build_layers(nn.Dropout(0.3)),
    "parametrized": build_parametrized_model,
    "frozen": build_frozen_model,
    "compiled by the script": lambda: torch.compile(build_layers(nn.Tanh()), backend="eager"),
}


MODELS_ON_TWO = ("odd", "tied", "hooks", "batch norm")
"""The models that `make test` trains on two ranks."""


@pytest.mark.parametrize("kind", MODELS)
def test_every_kind_of_model_resumes_exactly(alone, kind, tmp_path):
    assert_resumes_are_exact(
        alone, Script(model=MODELS[kind], optimizer=partial(torch.optim.SGD, lr=0.01)), tmp_path, [4]
    )


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in MODELS_ON_TWO else pytest.mark.full) for kind in MODELS]
)
def test_every_kind_of_model_resumes_exactly_on_two_ranks(pair, kind, tmp_path):
    assert_resumes_are_exact(
        pair, Script(model=MODELS[kind], optimizer=partial(torch.optim.SGD, lr=0.01)), tmp_path, [4]
    )


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager"])
def test_a_model_compiled_by_prepare_resumes_exactly(some, backend, tmp_path):
    script = Script(options=lambda: {"dynamo_backend": backend}, model=build_batch_norm_model)
    assert_resumes_are_exact(some, script, tmp_path, [4])


def build_with_two_groups(optimizer, options):
    return lambda p: optimizer([{"params": p[:1], "lr": 0.02}, {"params": p[1:], "lr": 0.03}], **options)


def build_with_tensor_lr(p):
    return torch.optim.AdamW(p, lr=torch.tensor(0.02), foreach=False, capturable=False)


OPTIMIZERS = {
    "momentum": partial(torch.optim.SGD, lr=0.02, momentum=0.9, nesterov=True),
    "adamw": partial(torch.optim.AdamW, lr=0.02),
    "amsgrad": partial(torch.optim.Adam, lr=0.02, amsgrad=True, foreach=False),
    "fused": partial(torch.optim.AdamW, lr=0.02, fused=True),
    "foreach": partial(torch.optim.AdamW, lr=0.02, foreach=True),
    "groups": build_with_two_groups(torch.optim.AdamW, {"weight_decay": 0.1}),
    "lr as a tensor": build_with_tensor_lr,
    "adagrad": partial(torch.optim.Adagrad, lr=0.05),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "adafactor": partial(torch.optim.Adafactor, lr=0.05),
    "rprop": partial(torch.optim.Rprop, lr=0.01),
    "asgd": partial(torch.optim.ASGD, lr=0.01),
    "radam": partial(torch.optim.RAdam, lr=0.02),
    "without a schedule": ScheduleFreeOptimizer,
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_kind_of_optimizer_resumes_exactly(alone, kind, tmp_path):
    assert_resumes_are_exact(
        alone, Script(model=build_layers, optimizer=OPTIMIZERS[kind], scheduler=None), tmp_path, [4]
    )


def train_with_closure(run, batch):
    _, inputs, targets = batch

    def closure():
        run.optimizer.zero_grad()
        loss = nn.functional.mse_loss(run.model(inputs), targets)
        run.accelerator.backward(loss)
        return loss

    return run.optimizer.step(closure).item()


def test_lbfgs_resumes_exactly(some, tmp_path):
    script = Script(
        model=build_layers,
        optimizer=partial(torch.optim.LBFGS, lr=0.05, max_iter=3, history_size=4),
        scheduler=None,
        step=train_with_closure,
    )
    assert_resumes_are_exact(some, script, tmp_path, [4])


def add_parameter_group(run):
    """Add a parameter group after `prepare`, and before a checkpoint is loaded."""
    extra = nn.Parameter(torch.ones(1))
    run.objects["extra"] = extra
    run.optimizer.add_param_group({"params": [extra], "lr": 0.5})


def train_with_extra_parameter(run, batch):
    _, inputs, targets = batch
    loss = nn.functional.mse_loss(run.model(inputs) * run.objects["extra"], targets)
    run.accelerator.backward(loss)
    run.optimizer.step()
    run.optimizer.zero_grad()
    return loss.item()


def test_a_parameter_group_added_after_prepare_resumes_exactly(some, tmp_path):
    script = Script(
        setup=add_parameter_group,
        step=train_with_extra_parameter,
        optimizer=partial(torch.optim.AdamW, lr=0.1),
        scheduler=None,
    )
    assert_resumes_are_exact(some, script, tmp_path, [4])


def train_with_plateau(run, batch):
    loss = train_batch(run, batch)
    run.objects["schedule"].step(loss)
    return loss


def prepare_schedule(make):
    def setup(run):
        run.objects["schedule"] = run.accelerator.prepare(make(run.optimizer))

    return setup


SCHEDULES = {
    "lambda": lambda o: schedules.LambdaLR(o, lambda step: 0.9**step),
    "one cycle": lambda o: schedules.OneCycleLR(o, 0.1, total_steps=40),
    "multi-step": lambda o: schedules.MultiStepLR(o, [2, 5, 5, 9], 0.5),
    "cosine": lambda o: schedules.CosineAnnealingLR(o, 20),
    "restarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 3, 2),
    "cyclic": lambda o: schedules.CyclicLR(o, 0.01, 0.05, 3),
    "sequential": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, total_iters=3), schedules.ExponentialLR(o, 0.9)], [3]
    ),
    "chained": lambda o: schedules.ChainedScheduler(
        [schedules.LinearLR(o, 0.1, total_iters=3), schedules.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_every_kind_of_scheduler_resumes_exactly(alone, kind, tmp_path):
    assert_resumes_are_exact(alone, Script(scheduler=SCHEDULES[kind]), tmp_path, [4])


def test_reduce_lr_on_plateau_resumes_exactly(some, tmp_path):
    make = prepare_schedule(partial(schedules.ReduceLROnPlateau, patience=1, factor=0.7))
    assert_resumes_are_exact(some, Script(setup=make, step=train_with_plateau, scheduler=None), tmp_path, [4])


def test_a_scheduler_of_the_unprepared_optimizer_resumes_exactly(some, tmp_path):
    assert_resumes_are_exact(
        some, Script(scheduler=lambda o: schedules.StepLR(o.optimizer, 2, 0.9)), tmp_path, [4]
    )


# Precision -------------------------------------------------------------------------------


def build_precision_options(name):
    handlers = [GradScalerKwargs(init_scale=2.0**15, growth_interval=3)] if name == "fp16" else None
    return lambda: {"mixed_precision": name, "kwargs_handlers": handlers}


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_mixed_precision_resumes_exactly(some, name, tmp_path):
    def train_and_record_scale(run, batch):
        loss = train_batch(run, batch)
        scaler = run.accelerator.scaler
        return loss, scaler and (scaler.get_scale(), scaler.state_dict())

    assert_resumes_are_exact(
        some,
        Script(
            options=build_precision_options(name), model=build_batch_norm_model, step=train_and_record_scale
        ),
        tmp_path,
        [2, 5],
    )


def build_master_weight_optimizer(p):
    """Return an optimizer with float32 state for bfloat16 parameters."""
    optimizer = torch.optim.SGD(p, lr=0.05, momentum=0.9)
    for parameter in p:
        optimizer.state[parameter]["master"] = parameter.detach().float() + 1e-4
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def train_master_weights(run, batch):
    loss = train_batch(run, batch)
    for parameter, state in run.optimizer.state.items():
        state["master"] = state["master"] * 0.999
        parameter.data.copy_(state["master"])
    return loss


def train_bfloat16(run, batch):
    index, inputs, targets = batch
    return train_master_weights(run, (index, inputs.bfloat16(), targets.bfloat16()))


def test_bfloat16_parameters_with_float32_optimizer_state_resume_exactly(some, tmp_path):
    script = Script(
        model=lambda: build_layers().bfloat16(), optimizer=build_master_weight_optimizer, step=train_bfloat16
    )
    assert_resumes_are_exact(some, script, tmp_path, [4])


# Accumulation cycles ---------------------------------------------------------------------


def build_accumulation_options(**options):
    plugin = {"num_steps": 3} | options
    return lambda: {"gradient_accumulation_plugin": GradientAccumulationPlugin(**plugin)}


def train_with_clipping(run, batch):
    _, inputs, targets = batch
    with run.accelerator.accumulate(run.model):
        loss = nn.functional.mse_loss(run.model(inputs), targets)
        run.accelerator.backward(loss)
        norm = run.accelerator.clip_grad_norm_(run.model.parameters(), 0.1)
        run.optimizer.step()
        run.scheduler.step()
        run.optimizer.zero_grad()
    return loss.item(), float(norm)


def train_with_weights(run, batch):
    index, inputs, targets = batch
    with run.accelerator.accumulate(run.model):
        loss = nn.functional.mse_loss(run.model(inputs), targets)
        run.accelerator.backward(loss, weight=float(index.sum() % 7))
        run.optimizer.step()
        run.optimizer.zero_grad()
    return loss.item()


ACCUMULATION = {
    "accumulation": {"options": build_accumulation_options()},
    "not with the epoch": {"options": build_accumulation_options(sync_with_dataloader=False)},
    "each batch": {"options": build_accumulation_options(sync_each_batch=True)},
    "clipped": {"options": build_accumulation_options(), "step": train_with_clipping},
    "weights": {"options": build_accumulation_options(), "step": train_with_weights},
    "weights and fp16": {
        "options": lambda: {"mixed_precision": "fp16"} | build_accumulation_options()(),
        "step": train_with_weights,
    },
}


@pytest.mark.parametrize(
    "kind",
    [
        # The same without clipping, and without fp16.
        pytest.param(kind, marks=[pytest.mark.full] * (kind in {"accumulation", "weights"}))
        for kind in ACCUMULATION
    ],
)
def test_an_accumulation_cycle_resumes_exactly(alone, kind, tmp_path):
    assert_resumes_are_exact(
        alone, Script(model=build_layers, **ACCUMULATION[kind]), tmp_path, [1, 3, 10, 11]
    )


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind in {"clipped", "weights and fp16"} else pytest.mark.full)
        for kind in ACCUMULATION
    ],
)
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.full), 3])
def test_an_accumulation_cycle_resumes_exactly_on_several_ranks(clusters, size, kind, tmp_path):
    points = {2: [1, 5, 6], 3: [2, 4]}
    assert_resumes_are_exact(
        clusters[size], Script(model=build_layers, **ACCUMULATION[kind]), tmp_path, points[size]
    )


def build_ddp_options(**options):
    handlers = [DistributedDataParallelKwargs(gradient_as_bucket_view=True, **options)]
    return lambda: {"kwargs_handlers": handlers, "gradient_accumulation_steps": 3}


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"find_unused_parameters": True}, marks=pytest.mark.slow),
        pytest.param({"comm_hook": "bf16"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_gradients_that_are_views_of_ddp_buckets_resume_exactly(clusters, options, tmp_path):
    assert_resumes_are_exact(
        clusters[3],
        Script(model=build_batch_norm_model, options=build_ddp_options(**options)),
        tmp_path,
        [1, 2, 4],
    )


class EmbeddingModel(nn.Module):
    """A model with sparse gradients in one layer."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1)

    def forward(self, inputs):
        return self.head(self.embedding((inputs[:, 0] * 10).long() % 5))


def test_sparse_gradients_resume_exactly_on_two_ranks(pair, tmp_path):
    optimizer = partial(torch.optim.SGD, lr=0.1)
    assert_resumes_are_exact(
        pair,
        Script(model=EmbeddingModel, optimizer=optimizer, options=build_accumulation_options()),
        tmp_path,
        [1, 2],
    )


# Several models, averages ------------------------------------------------------------------


def add_critic(run):
    torch.manual_seed(3)
    critic = nn.Linear(1, 1)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=0.02)
    schedule = schedules.StepLR(critic_optimizer, 3, 0.5)
    run.objects["critic"], run.objects["critic optimizer"], run.objects["schedule"] = run.accelerator.prepare(
        critic, critic_optimizer, schedule
    )


def train_with_critic(run, batch):
    _, inputs, targets = batch
    critic, critic_optimizer, accelerator = (
        run.objects["critic"],
        run.objects["critic optimizer"],
        run.accelerator,
    )
    output = run.model(inputs)
    critic_loss = critic(output.detach()).mean() - critic(targets).mean()
    accelerator.backward(critic_loss)
    critic_optimizer.step()
    critic_optimizer.zero_grad()
    loss = (output - targets).square().mean() - critic(output).mean()
    accelerator.backward(loss)
    run.optimizer.step()
    run.optimizer.zero_grad()
    critic_optimizer.zero_grad()
    run.scheduler.step()
    run.objects["schedule"].step()
    run.objects["sum"] = sum(p.detach().sum() for p in critic.parameters())
    return loss.item(), critic_loss.item(), run.objects["schedule"].get_last_lr()


def test_two_models_and_optimizers_resume_exactly(some, tmp_path):
    assert_resumes_are_exact(
        some, Script(setup=add_critic, step=train_with_critic, model=build_layers), tmp_path, [4]
    )


def add_averages(run):
    plain = run.accelerator.unwrap_model(run.model)
    run.objects["object"] = MovingAverage(plain)
    run.objects["module"] = copy.deepcopy(plain)
    run.objects["swa"] = torch.optim.swa_utils.AveragedModel(plain)
    run.accelerator.register_for_checkpointing(*(run.objects[name] for name in ("object", "module", "swa")))


def train_with_averages(run, batch):
    loss = train_batch(run, batch)
    plain = run.accelerator.unwrap_model(run.model)
    run.objects["object"].update(plain)
    run.objects["swa"].update_parameters(plain)
    with torch.no_grad():
        for average, parameter in zip(run.objects["module"].parameters(), plain.parameters(), strict=True):
            average.lerp_(parameter, 0.1)
    shadow = sum(float(value.sum()) for value in run.objects["object"].shadow.values())
    module = sum(float(p.detach().sum()) for p in run.objects["module"].parameters())
    swa = sum(float(p.detach().sum()) for p in run.objects["swa"].parameters())
    return loss, shadow, module, swa, run.objects["object"].num_updates


def test_registered_moving_averages_resume_exactly(some, tmp_path):
    assert_resumes_are_exact(
        some,
        Script(setup=add_averages, step=train_with_averages, model=build_batch_norm_model),
        tmp_path,
        [4],
    )


def enter_local_sgd(run):
    run.objects["local"] = LocalSGD(run.accelerator, run.model, 3)
    run.objects["local"].__enter__()
    run.accelerator.register_for_checkpointing(LocalSGDSteps(run.objects["local"]))


class LocalSGDSteps:
    """The number of steps of LocalSGD, which the script saves."""

    def __init__(self, local):
        self.local = local

    def state_dict(self):
        return {"steps": self.local.num_steps}

    def load_state_dict(self, state):
        self.local.num_steps = state["steps"]


def train_with_local_sgd(run, batch):
    loss = train_batch(run, batch)
    run.objects["local"].step()
    return loss


def test_local_sgd_resumes_exactly_between_two_averages(some, tmp_path):
    assert_resumes_are_exact(
        some,
        Script(setup=enter_local_sgd, step=train_with_local_sgd, model=build_batch_norm_model),
        tmp_path,
        [4, 5],
    )
