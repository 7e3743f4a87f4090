"""Optimizers and schedulers of a JSON file are those that DeepSpeed's own loop would step; mistakes are errors."""

from __future__ import annotations

import warnings

import pytest
import torch
from support.runs.zero_runs import connect
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_runtime import DataLoaderConfiguration
from accel_runtime.extensions.deepspeed.settings import DeepSpeedConfig
from accel_runtime.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler

pytest.importorskip(
    "deepspeed.runtime", reason="deepspeed is in an environment of its own: make test-deepspeed"
)

from accel_runtime.extensions.deepspeed.configured_optimizers import build_optimizer, build_scheduler
from accel_runtime.extensions.deepspeed.library import SCHEDULERS, hide_warnings

RATE = 0.1
SCHEDULES = {
    "WarmupLR": {"warmup_min_lr": 0.0, "warmup_max_lr": RATE, "warmup_num_steps": 3, "warmup_type": "linear"},
    "WarmupDecayLR": {"warmup_max_lr": RATE, "warmup_num_steps": 2, "total_num_steps": 7},
    "WarmupCosineLR": {"warmup_num_steps": 2, "total_num_steps": 7, "cos_min_ratio": 0.1},
    "LRRangeTest": {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 2},
    "OneCycle": {
        "cycle_min_lr": 0.01,
        "cycle_max_lr": RATE,
        "cycle_first_step_size": 3,
        "cycle_momentum": False,
    },
}


def read(values, source="ds.json"):
    """Return a configuration that stands in one file."""
    paths = ("optimizer.type", "scheduler.type")
    return DeepSpeedConfig(values, dict.fromkeys(paths, source))


def train(plugin, *, num_steps, make, accumulate=1, split=False):
    """Train on all ranks; return the learning rate of each optimizer step, and the weights."""
    accelerator = connect(
        "replicated",
        deepspeed_plugin=plugin,
        gradient_accumulation_steps=accumulate,
        dataloader_config=DataLoaderConfiguration(split_batches=split),
    )
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    rows = torch.randn(num_steps * accumulate * 4, 3)
    model, loader, *made = accelerator.prepare(
        model,
        DataLoader(TensorDataset(rows), batch_size=4 if split else 4 // accelerator.num_processes),
        *make(model),
    )
    optimizer, schedulers = made[0], made[1:]
    rates = []
    for (batch,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            if accelerator.sync_gradients:
                rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            for scheduler in schedulers:
                scheduler.step()
            optimizer.zero_grad()
    with accelerator.gathered(model) as full:
        weights = {name: tensor.detach().clone() for name, tensor in full.state_dict().items()}
    return rates, weights


def list_rates(name, params, num_steps):
    """Return the learning rates of DeepSpeed's own loop, which steps the scheduler after the optimizer."""
    optimizer = torch.optim.AdamW(nn.Linear(1, 1).parameters(), lr=RATE)
    with hide_warnings(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheduler = SCHEDULERS[name](optimizer, **params)
        rates = []
        for _ in range(num_steps):
            rates.append(optimizer.param_groups[0]["lr"])
            scheduler.step()
    return rates


def train_with_each_schedule():
    results = {}
    for name, params in SCHEDULES.items():
        config = {
            "zero_optimization": {"stage": 2},
            "optimizer": {"type": "AdamW", "params": {"lr": RATE}},
            "scheduler": {"type": name, "params": params},
        }

        def make(model):
            optimizer = DummyOptim(model.parameters())
            return optimizer, DummyScheduler(optimizer)

        plugin = DeepSpeedPlugin(hf_ds_config=config)
        results[name] = train(plugin, num_steps=6, make=make, accumulate=2)[0]
    return results


def test_each_schedule_has_the_rates_of_deepspeeds_own_loop(clusters):
    for rates in clusters[2].run(train_with_each_schedule):
        assert rates.keys() == SCHEDULES.keys()
        for name, params in SCHEDULES.items():
            assert rates[name] == pytest.approx(list_rates(name, params, 6)), name


def train_with_auto(split, stage):
    auto = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto")
    config = {
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": auto},
    }

    def make(model):
        optimizer = DummyOptim(model.parameters(), lr=RATE, weight_decay=0.5)
        return optimizer, DummyScheduler(optimizer, total_num_steps=12, warmup_num_steps=2)

    return train(DeepSpeedPlugin(hf_ds_config=config), num_steps=6, make=make, split=split)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("split", [False, True])
def test_steps_that_are_auto_are_counted_in_batches_of_the_script(clusters, split, stage):
    params = {"warmup_max_lr": RATE, "warmup_num_steps": 2, "total_num_steps": 12 if split else 6}
    for rates, _ in clusters[2].run(train_with_auto, split, stage):
        assert rates == pytest.approx(list_rates("WarmupDecayLR", params, 6))


def train_with_a_callable():
    config = {"zero_optimization": {"stage": 1}, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}}

    def make(model):
        optimizer = DummyOptim(model.parameters())
        return optimizer, DummyScheduler(
            optimizer, lr_scheduler_callable=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5)
        )

    return train(DeepSpeedPlugin(hf_ds_config=config), num_steps=3, make=make)[0]


def test_a_scheduler_of_a_callable_counts_optimizer_steps(clusters):
    assert clusters[2].run(train_with_a_callable) == [[1.0, 0.5, 0.25]] * 2


# Optimizers ------------------------------------------------------------------------------

OPTIMIZERS = {
    "AdamW": (
        {"lr": RATE, "betas": [0.8, 0.9]},
        lambda p: torch.optim.AdamW(p, RATE, (0.8, 0.9), weight_decay=0),
    ),
    "Adam": (
        {"lr": RATE, "weight_decay": 0.3, "torch_adam": True},
        lambda p: torch.optim.AdamW(p, RATE, weight_decay=0.3),
    ),
    "adam": (
        {"lr": RATE, "weight_decay": 0.3, "adam_w_mode": False},
        lambda p: torch.optim.Adam(p, RATE, weight_decay=0.3),
    ),
    "SGD": ({"lr": RATE, "momentum": 0.9}, lambda p: torch.optim.SGD(p, RATE, momentum=0.9)),
    "Adamax": ({"lr": RATE}, lambda p: torch.optim.Adamax(p, RATE)),
    "NAdam": ({"lr": RATE}, lambda p: torch.optim.NAdam(p, RATE)),
    "RAdam": ({"lr": RATE}, lambda p: torch.optim.RAdam(p, RATE)),
    "RMSprop": ({"lr": RATE}, lambda p: torch.optim.RMSprop(p, RATE)),
}


def train_with_each_optimizer():
    results = {}
    for name, (params, build) in OPTIMIZERS.items():
        zero = {"zero_optimization": {"stage": 2}}
        config = {**zero, "optimizer": {"type": name, "params": params}}
        results[name] = [
            train(
                DeepSpeedPlugin(hf_ds_config=values),
                num_steps=3,
                make=lambda model, make=make: [make(model.parameters())],
            )[1]
            for values, make in ((config, DummyOptim), (zero, build))
        ]
    return results


def test_each_optimizer_trains_as_the_same_one_of_the_script(clusters):
    for results in clusters[2].run(train_with_each_optimizer):
        assert results.keys() == OPTIMIZERS.keys()
        for configured, created in results.values():
            torch.testing.assert_close(configured, created, rtol=0, atol=0)


def test_values_of_a_dummy_fill_what_is_auto_or_missing_and_are_recorded():
    model, filled = nn.Linear(1, 1), {}
    config = read(
        {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "eps": "auto", "weight_decay": 0.5}}}
    )
    groups = [{"params": model.weight, "lr": 3.0}, {"params": model.bias}]
    optimizer = build_optimizer(
        DummyOptim(groups, lr=2.0, weight_decay=9.0, betas=(0.1, 0.2)), config, filled
    )
    assert [group["lr"] for group in optimizer.param_groups] == [3.0, 2.0]
    assert optimizer.defaults["weight_decay"] == 0.5
    assert optimizer.defaults["betas"] == (0.1, 0.2)
    assert filled["optimizer.params.lr"] == 2.0


def test_offloaded_optimizers_are_the_fused_ones_of_torch():
    config = read(
        {
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            "optimizer": {"type": "Adam"},
        }
    )
    optimizer = build_optimizer(DummyOptim(nn.Linear(1, 1).parameters()), config, {})
    assert optimizer.defaults["fused"]


# Mistakes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "no section optimizer"),
        (
            {"optimizer": {"type": "OneBitAdam"}},
            "OneBitAdam in ds.json is not supported: expected one of Adam",
        ),
        ({"optimizer": {"type": "Lamb"}}, "Lamb in ds.json is not supported"),
        ({"optimizer": {"type": "AdamW", "params": {"freeze_step": 3}}}, "freeze_step.*Remove the argument"),
    ],
)
def test_an_optimizer_that_cannot_be_built_is_an_error(values, message):
    with pytest.raises(ValueError, match=message):
        build_optimizer(DummyOptim(nn.Linear(1, 1).parameters()), read(values), {})


@pytest.mark.parametrize(
    ("values", "arguments", "message"),
    [
        ({}, {}, "no section scheduler"),
        ({"type": "CosineLR"}, {}, "CosineLR in ds.json is not supported: expected one of LRRangeTest"),
        (
            {"type": "WarmupLR", "params": {"warmup": 3}},
            {},
            "scheduler.params in ds.json cannot be used.*warmup",
        ),
        (
            {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
            {},
            "total_num_steps is auto in ds.json, and DummyScheduler has no value",
        ),
        (
            {"type": "WarmupLR"},
            {"lr_scheduler_callable": print},
            "WarmupLR in ds.json, and DummyScheduler has",
        ),
    ],
)
def test_a_scheduler_that_cannot_be_built_is_an_error(values, arguments, message):
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    config = read({"scheduler": values} if values else {})
    with pytest.raises(ValueError, match=message):
        build_scheduler(DummyScheduler(optimizer, **arguments), optimizer, config, 1, {})


def prepare_both(stage):
    """Return the messages of a script that creates what the configuration describes."""
    messages = []
    section = {"type": "AdamW", "params": {"lr": RATE}}
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}
    for extra in ({"optimizer": section}, {"scheduler": schedule}):
        config = {"zero_optimization": {"stage": stage}, **extra}
        accelerator = connect("replicated", deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
        with pytest.raises(ValueError, match="and the script creates") as caught:
            accelerator.prepare(model, optimizer, scheduler)
        messages.append(str(caught.value))
    return messages


@pytest.mark.parametrize("stage", [0, 2])
def test_an_optimizer_or_scheduler_in_both_places_is_an_error_that_names_both(clusters, stage):
    for first, second in clusters[2].run(prepare_both, stage):
        assert first.startswith(
            "The optimizer is AdamW in DeepSpeedPlugin.hf_ds_config, and the script creates SGD."
        )
        assert second.startswith(
            "The scheduler is WarmupLR in DeepSpeedPlugin.hf_ds_config, and the script creates Const"
        )
