"""Keyword objects under their known names."""

from __future__ import annotations

import inspect
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from accel_runtime.options import (
    AutocastKwargs,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    chosen,
)


def test_only_what_differs_from_the_defaults_is_passed_on():
    assert GradScalerKwargs().to_kwargs() == {}
    assert GradScalerKwargs(init_scale=2.0, growth_factor=2.0).to_kwargs() == {"init_scale": 2.0}


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        (AutocastKwargs, torch.autocast),
        (DistributedDataParallelKwargs, DistributedDataParallel),
        (GradScalerKwargs, torch.amp.GradScaler),
        (InitProcessGroupKwargs, dist.init_process_group),
    ],
    ids=lambda value: value.__name__,
)
def test_every_option_is_one_of_torch_with_the_default_of_torch(kind, target):
    theirs = inspect.signature(target).parameters
    own = {"fp32_outputs", "comm_hook", "comm_wrapper", "comm_state_option"}
    for name, ours in inspect.signature(kind).parameters.items():
        if name in own:
            continue
        assert theirs[name].default in {ours.default, None}, name  # None is "torch decides", on what we say


def test_the_one_of_a_kind_is_chosen_and_none_is_no_arguments():
    handlers = [AutocastKwargs(enabled=False), InitProcessGroupKwargs(timeout=timedelta(seconds=5))]
    assert chosen(handlers, AutocastKwargs) == {"enabled": False}
    assert chosen(handlers, GradScalerKwargs) == {}
    assert chosen(None, GradScalerKwargs) == {}


def test_two_of_a_kind_are_refused():
    with pytest.raises(ValueError, match="2 GradScalerKwargs"):
        chosen([GradScalerKwargs(), GradScalerKwargs(init_scale=1.0)], GradScalerKwargs)


def test_an_object_of_another_kind_is_refused_with_the_known_ones():
    with pytest.raises(TypeError, match=r"AutocastKwargs, DistributedDataParallelKwargs, .* it holds 'fast'"):
        chosen(["fast"], GradScalerKwargs)


def test_options_in_a_dict_are_passed_on_only_if_there_are_any():
    assert DistributedDataParallelKwargs().to_kwargs() == {}
    kwargs = DistributedDataParallelKwargs(comm_hook="power_sgd", comm_state_option={"warm_start": False})
    assert kwargs.to_kwargs()["comm_state_option"] == {"warm_start": False}


@pytest.mark.parametrize("kind", list(DDPCommunicationHookType)[:4])
def test_a_hook_may_be_given_by_its_text(kind):
    assert DistributedDataParallelKwargs(comm_hook=kind.value).comm_hook is kind
    assert DistributedDataParallelKwargs(comm_hook=kind).comm_hook is kind


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"comm_hook": "int8"}, "one of no, fp16, bf16, power_sgd, batched_power_sgd; it is 'int8'"),
        ({"comm_hook": "fp16", "comm_wrapper": "power_sgd"}, "no, fp16 or bf16; it is power_sgd"),
        ({"comm_wrapper": "fp16"}, "no hook to wrap: set comm_hook='fp16'"),
        ({"comm_hook": "fp16", "comm_state_option": {"warm_start": True}}, "is for comm_hook power_sgd"),
        ({"check_reduction": True}, "leave it out"),
    ],
)
def test_options_of_ddp_that_would_do_nothing_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        DistributedDataParallelKwargs(**arguments)
