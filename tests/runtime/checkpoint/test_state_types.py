"""Models, optimizers and schedulers of every kind are after a resume what they were, bit for bit."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from recorded_runs import Script, continues, learn
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim import lr_scheduler as schedules

from accel_runtime import (
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    LocalSGD,
)


class Odd(nn.Module):
    """A model with what models rarely have."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 1)
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.wide = nn.Parameter(torch.randn(5, 3).t())
        self.turned = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.bool))
        self.register_buffer("low", torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("unsaved", torch.zeros(1), persistent=False)
        self.note = {"calls": 0, "names": ["a"], "shift": torch.zeros(3)}

    def forward(self, inputs):
        self.calls += 1
        self.seen[int(self.calls) % 2] = True
        self.low += inputs.detach().mean(0)
        self.note["calls"] += 1
        self.note["shift"] = self.note["shift"] + self.low.float()
        turned = torch.view_as_real(inputs * self.turned).sum((1, 2))[:, None]
        scale = 1 + self.note["calls"] / 100 + self.note["shift"].sum() / 100
        return (
            self.inner(inputs) * self.gain * scale.tanh()
            + (inputs @ self.wide).sum(1, keepdim=True)
            + turned / 3
            + self.nothing.sum()
        )

    def get_extra_state(self):
        return self.note

    def set_extra_state(self, state):
        self.note = state


class Tied(nn.Module):
    """One weight under two names."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, inputs):
        return self.second(self.first(inputs)).sum(1, keepdim=True)


class Hooked(nn.Module):
    """Its state has other names than its parameters, and a number more."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 1)
        self.times = 0
        self.register_state_dict_post_hook(Hooked.rename)
        self.register_load_state_dict_pre_hook(Hooked.back)

    def forward(self, inputs):
        self.times += 1
        return self.inner(inputs) + self.times / 50

    @staticmethod
    def rename(module, state, prefix, _):
        state[f"{prefix}outer.weight"] = (
            state.pop(f"{prefix}inner.weight") * 1.0
        )  # a copy, as converters make
        state[f"{prefix}times"] = torch.tensor(module.times)

    @staticmethod
    def back(module, state, prefix, *_):
        state[f"{prefix}inner.weight"] = state.pop(f"{prefix}outer.weight")
        module.times = int(state.pop(f"{prefix}times"))


class Images(nn.Module):
    """A convolution, channels last."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Conv2d(3, 4, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, inputs):
        return self.inner(inputs[:, :, None, None].expand(-1, -1, 4, 4)).mean((2, 3)).sum(1, keepdim=True)


class Free(torch.optim.Optimizer):
    """As optimizers without a schedule are: state of its own beside that of parameters, and numbers in groups."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "k": 0, "weight_sum": 0.0, "train_mode": True})

    def step(self, closure=None):  # noqa: ARG002 - what optimizers take
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


class Average:
    """A moving average as an object of the script."""

    def __init__(self, model):
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.count = 0

    def update(self, model):
        self.count += 1
        for name, p in model.named_parameters():
            self.shadow[name].lerp_(p.detach(), 1 / (self.count + 1))

    def state_dict(self):
        return {"shadow": self.shadow, "count": self.count}

    def load_state_dict(self, state):
        self.shadow, self.count = state["shadow"], state["count"]


def layers(*between):
    return nn.Sequential(nn.Linear(3, 4), *between, nn.Linear(4, 1))


def normed():
    return layers(nn.BatchNorm1d(4), nn.Tanh())


def parametrized():
    model = layers(nn.Tanh())
    parametrizations.weight_norm(model[0])
    parametrizations.spectral_norm(model[2])
    return model


def frozen():
    model = layers(nn.Tanh())
    model[0].requires_grad_(requires_grad=False)
    return model


MODELS = {
    "odd": Odd,
    "tied": Tied,
    "hooks": Hooked,
    "channels last": Images,
    "batch norm": normed,
    "dropout": lambda: layers(nn.Dropout(0.3)),
    "parametrized": parametrized,
    "frozen": frozen,
    "compiled by the script": lambda: torch.compile(layers(nn.Tanh()), backend="eager"),
}


ON_TWO = ("odd", "tied", "hooks", "batch norm")
"""The models that are wrapped on two processes in `make test`."""


@pytest.mark.parametrize("kind", MODELS)
def test_models_continue(alone, kind, tmp_path):
    continues(alone, Script(model=MODELS[kind], optimizer=partial(torch.optim.SGD, lr=0.01)), tmp_path, [4])


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in ON_TWO else pytest.mark.slow) for kind in MODELS]
)
def test_models_continue_on_two_processes(pair, kind, tmp_path):
    continues(pair, Script(model=MODELS[kind], optimizer=partial(torch.optim.SGD, lr=0.01)), tmp_path, [4])


@pytest.mark.parametrize("backend", ["eager"])
def test_models_compiled_in_place_continue(some, backend, tmp_path):
    script = Script(options=lambda: {"dynamo_backend": backend}, model=normed)
    continues(some, script, tmp_path, [4])


def both(first, second):
    return lambda p: first([{"params": p[:1], "lr": 0.02}, {"params": p[1:], "lr": 0.03}], **second)


def lr_tensor(p):
    return torch.optim.AdamW(p, lr=torch.tensor(0.02), foreach=False, capturable=False)


OPTIMIZERS = {
    "momentum": partial(torch.optim.SGD, lr=0.02, momentum=0.9, nesterov=True),
    "adamw": partial(torch.optim.AdamW, lr=0.02),
    "amsgrad": partial(torch.optim.Adam, lr=0.02, amsgrad=True, foreach=False),
    "fused": partial(torch.optim.AdamW, lr=0.02, fused=True),
    "foreach": partial(torch.optim.AdamW, lr=0.02, foreach=True),
    "groups": both(torch.optim.AdamW, {"weight_decay": 0.1}),
    "lr as a tensor": lr_tensor,
    "adagrad": partial(torch.optim.Adagrad, lr=0.05),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "adafactor": partial(torch.optim.Adafactor, lr=0.05),
    "rprop": partial(torch.optim.Rprop, lr=0.01),
    "asgd": partial(torch.optim.ASGD, lr=0.01),
    "radam": partial(torch.optim.RAdam, lr=0.02),
    "without a schedule": Free,
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers_continue(alone, kind, tmp_path):
    continues(alone, Script(model=layers, optimizer=OPTIMIZERS[kind], scheduler=None), tmp_path, [4])


def closure_step(run, batch):
    _, inputs, targets = batch

    def closure():
        run.optimizer.zero_grad()
        loss = nn.functional.mse_loss(run.model(inputs), targets)
        run.accelerator.backward(loss)
        return loss

    return run.optimizer.step(closure).item()


def test_lbfgs_continues(some, tmp_path):
    script = Script(
        model=layers,
        optimizer=partial(torch.optim.LBFGS, lr=0.05, max_iter=3, history_size=4),
        scheduler=None,
        step=closure_step,
    )
    continues(some, script, tmp_path, [4])


def grown(run):
    """The script adds a group as its epoch says; after a resume, before it loads."""
    extra = nn.Parameter(torch.ones(1))
    run.kept["extra"] = extra
    run.optimizer.add_param_group({"params": [extra], "lr": 0.5})


def with_extra(run, batch):
    _, inputs, targets = batch
    loss = nn.functional.mse_loss(run.model(inputs) * run.kept["extra"], targets)
    run.accelerator.backward(loss)
    run.optimizer.step()
    run.optimizer.zero_grad()
    return loss.item()


def test_a_parameter_of_no_model_continues(some, tmp_path):
    script = Script(more=grown, step=with_extra, optimizer=partial(torch.optim.AdamW, lr=0.1), scheduler=None)
    continues(some, script, tmp_path, [4])


def judged(run, batch):
    loss = learn(run, batch)
    run.kept["schedule"].step(loss)
    return loss


def judging(make):
    def more(run):
        run.kept["schedule"] = run.accelerator.prepare(make(run.optimizer))

    return more


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
def test_schedules_continue(alone, kind, tmp_path):
    continues(alone, Script(scheduler=SCHEDULES[kind]), tmp_path, [4])


def test_a_plateau_continues(some, tmp_path):
    make = judging(partial(schedules.ReduceLROnPlateau, patience=1, factor=0.7))
    continues(some, Script(more=make, step=judged, scheduler=None), tmp_path, [4])


def test_a_schedule_prepared_without_its_optimizer_continues(some, tmp_path):
    continues(some, Script(scheduler=lambda o: schedules.StepLR(o.optimizer, 2, 0.9)), tmp_path, [4])


# Precision -------------------------------------------------------------------------------


def in_format(name):
    handlers = [GradScalerKwargs(init_scale=2.0**15, growth_interval=3)] if name == "fp16" else None
    return lambda: {"mixed_precision": name, "kwargs_handlers": handlers}


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_formats_continue(some, name, tmp_path):
    def seen(run, batch):
        loss = learn(run, batch)
        scaler = run.accelerator.scaler
        return loss, scaler and (scaler.get_scale(), scaler.state_dict())

    continues(some, Script(options=in_format(name), model=normed, step=seen), tmp_path, [2, 5])


def master(p):
    """State in float32 beside bfloat16 parameters."""
    optimizer = torch.optim.SGD(p, lr=0.05, momentum=0.9)
    for parameter in p:
        optimizer.state[parameter]["master"] = parameter.detach().float() + 1e-4
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def from_master(run, batch):
    loss = learn(run, batch)
    for parameter, state in run.optimizer.state.items():
        state["master"] = state["master"] * 0.999
        parameter.data.copy_(state["master"])
    return loss


def halves(run, batch):
    index, inputs, targets = batch
    return from_master(run, (index, inputs.bfloat16(), targets.bfloat16()))


def test_bfloat16_parameters_with_float32_state_continue(some, tmp_path):
    script = Script(model=lambda: layers().bfloat16(), optimizer=master, step=halves)
    continues(some, script, tmp_path, [4])


# Windows ---------------------------------------------------------------------------------


def accumulating(**more):
    plugin = {"num_steps": 3} | more
    return lambda: {"gradient_accumulation_plugin": GradientAccumulationPlugin(**plugin)}


def clipped(run, batch):
    _, inputs, targets = batch
    with run.accelerator.accumulate(run.model):
        loss = nn.functional.mse_loss(run.model(inputs), targets)
        run.accelerator.backward(loss)
        norm = run.accelerator.clip_grad_norm_(run.model.parameters(), 0.1)
        run.optimizer.step()
        run.scheduler.step()
        run.optimizer.zero_grad()
    return loss.item(), float(norm)


def weighted(run, batch):
    index, inputs, targets = batch
    with run.accelerator.accumulate(run.model):
        loss = nn.functional.mse_loss(run.model(inputs), targets)
        run.accelerator.backward(loss, weight=float(index.sum() % 7))
        run.optimizer.step()
        run.optimizer.zero_grad()
    return loss.item()


WINDOWS = {
    "accumulation": {"options": accumulating()},
    "not with the epoch": {"options": accumulating(sync_with_dataloader=False)},
    "each batch": {"options": accumulating(sync_each_batch=True)},
    "clipped": {"options": accumulating(), "step": clipped},
    "weights": {"options": accumulating(), "step": weighted},
    "weights and fp16": {
        "options": lambda: {"mixed_precision": "fp16"} | accumulating()(),
        "step": weighted,
    },
}


@pytest.mark.parametrize("kind", WINDOWS)
def test_windows_continue(alone, kind, tmp_path):
    continues(alone, Script(model=layers, **WINDOWS[kind]), tmp_path, [1, 3, 10, 11])


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind in {"clipped", "weights and fp16"} else pytest.mark.slow)
        for kind in WINDOWS
    ],
)
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.full), 3])
def test_windows_continue_on_several_processes(clusters, size, kind, tmp_path):
    points = {2: [1, 5, 6], 3: [2, 4]}
    continues(clusters[size], Script(model=layers, **WINDOWS[kind]), tmp_path, points[size])


def as_views(**more):
    handlers = [DistributedDataParallelKwargs(gradient_as_bucket_view=True, **more)]
    return lambda: {"kwargs_handlers": handlers, "gradient_accumulation_steps": 3}


@pytest.mark.parametrize(
    "more",
    [
        {},
        pytest.param({"find_unused_parameters": True}, marks=pytest.mark.slow),
        pytest.param({"comm_hook": "bf16"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_gradients_that_are_views_of_buckets_continue(clusters, more, tmp_path):
    continues(clusters[3], Script(model=normed, options=as_views(**more)), tmp_path, [1, 2, 4])


class Words(nn.Module):
    """A model whose gradients are sparse in one layer."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1)

    def forward(self, inputs):
        return self.head(self.embedding((inputs[:, 0] * 10).long() % 5))


def test_sparse_gradients_continue_on_several_processes(pair, tmp_path):
    optimizer = partial(torch.optim.SGD, lr=0.1)
    continues(pair, Script(model=Words, optimizer=optimizer, options=accumulating()), tmp_path, [1, 2])


# Several, and beside -----------------------------------------------------------------------


def adversary(run):
    torch.manual_seed(3)
    critic = nn.Linear(1, 1)
    judge = torch.optim.Adam(critic.parameters(), lr=0.02)
    schedule = schedules.StepLR(judge, 3, 0.5)
    run.kept["critic"], run.kept["judge"], run.kept["schedule"] = run.accelerator.prepare(
        critic, judge, schedule
    )


def against(run, batch):
    _, inputs, targets = batch
    critic, judge, accelerator = run.kept["critic"], run.kept["judge"], run.accelerator
    made = run.model(inputs)
    lost = critic(made.detach()).mean() - critic(targets).mean()
    accelerator.backward(lost)
    judge.step()
    judge.zero_grad()
    loss = (made - targets).square().mean() - critic(made).mean()
    accelerator.backward(loss)
    run.optimizer.step()
    run.optimizer.zero_grad()
    judge.zero_grad()
    run.scheduler.step()
    run.kept["schedule"].step()
    run.kept["sum"] = sum(p.detach().sum() for p in critic.parameters())
    return loss.item(), lost.item(), run.kept["schedule"].get_last_lr()


def test_two_models_and_optimizers_continue(some, tmp_path):
    continues(some, Script(more=adversary, step=against, model=layers), tmp_path, [4])


def averaged(run):
    plain = run.accelerator.unwrap_model(run.model)
    run.kept["object"] = Average(plain)
    run.kept["module"] = copy.deepcopy(plain)
    run.kept["swa"] = torch.optim.swa_utils.AveragedModel(plain)
    run.accelerator.register_for_checkpointing(*(run.kept[name] for name in ("object", "module", "swa")))


def with_average(run, batch):
    loss = learn(run, batch)
    plain = run.accelerator.unwrap_model(run.model)
    run.kept["object"].update(plain)
    run.kept["swa"].update_parameters(plain)
    with torch.no_grad():
        for own, other in zip(run.kept["module"].parameters(), plain.parameters(), strict=True):
            own.lerp_(other, 0.1)
    shadow = sum(float(value.sum()) for value in run.kept["object"].shadow.values())
    module = sum(float(p.detach().sum()) for p in run.kept["module"].parameters())
    swa = sum(float(p.detach().sum()) for p in run.kept["swa"].parameters())
    return loss, shadow, module, swa, run.kept["object"].count


def test_registered_averages_continue(some, tmp_path):
    continues(some, Script(more=averaged, step=with_average, model=normed), tmp_path, [4])


def locally(run):
    run.kept["local"] = LocalSGD(run.accelerator, run.model, 3)
    run.kept["local"].__enter__()
    run.accelerator.register_for_checkpointing(_Steps(run.kept["local"]))


class _Steps:
    """What of LocalSGD a script keeps."""

    def __init__(self, local):
        self.local = local

    def state_dict(self):
        return {"steps": self.local.num_steps}

    def load_state_dict(self, state):
        self.local.num_steps = state["steps"]


def local_step(run, batch):
    loss = learn(run, batch)
    run.kept["local"].step()
    return loss


def test_local_sgd_goes_on_between_two_averages(some, tmp_path):
    continues(some, Script(more=locally, step=local_step, model=normed), tmp_path, [4, 5])
