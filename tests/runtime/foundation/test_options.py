"""Keyword handlers with the names of Accelerate."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass, field
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel_runtime import (
    Accelerator,
    DeepSpeedPlugin,
    PartialState,
    ProjectConfiguration,
    notebook_launcher,
    set_seed,
)
from accel_runtime.foundation.options import (
    AutocastKwargs,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    changed_fields,
    find_handlers,
)

KINDS = (AutocastKwargs, GradScalerKwargs, InitProcessGroupKwargs)


def test_to_kwargs_returns_only_fields_that_differ_from_the_defaults():
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
def test_every_field_is_a_parameter_of_torch_with_the_same_default(kind, target):
    torch_parameters = inspect.signature(target).parameters
    fields_of_accel = {"fp32_outputs", "comm_hook", "comm_wrapper", "comm_state_option"}
    for name, parameter in inspect.signature(kind).parameters.items():
        if name in fields_of_accel:
            continue
        assert torch_parameters[name].default in {parameter.default, None}, (
            name
        )  # None is "torch decides", on what we say


@pytest.mark.parametrize(
    ("call", "cure"),
    [
        (lambda: Accelerator(gradient_accumulation=4), "Did you mean gradient_accumulation_steps?"),
        (lambda: Accelerator(unrelated=4), "Its arguments are cpu, dataloader_config, "),
        (lambda: ProjectConfiguration(total_limits=2), "Did you mean total_limit?"),
        (lambda: DeepSpeedPlugin(zero_stages=2), "Did you mean zero_stage?"),
        (lambda: InitProcessGroupKwargs(time_out=3), "Did you mean timeout?"),
        (lambda: PartialState(time_out=3), "Did you mean timeout?"),
        (lambda: Accelerator().prepare(device_placements=[True]), "Did you mean device_placement?"),
        (
            lambda: Accelerator().prepare_model(nn.Linear(2, 1), evaluation=True),
            "Did you mean evaluation_mode?",
        ),
        (lambda: Accelerator().save_state(outputdir="x"), "Did you mean output_dir?"),
        (lambda: notebook_launcher(print, num_process=1), "Did you mean num_processes?"),
        (lambda: set_seed(1, device_specifics=True), "Did you mean device_specific?"),
    ],
)
def test_an_unknown_keyword_leads_to_the_argument_that_was_meant(call, cure):
    with pytest.raises(TypeError, match=r"Cannot call \w+\(\) with \w+=: it has no such argument") as error:
        call()
    assert cure in str(error.value)


def test_a_class_of_a_script_that_derives_from_a_configuration_has_its_own_arguments():
    class Plugin(ProjectConfiguration):
        def __init__(self, root):
            super().__init__(project_dir=root)

    class Anything(ProjectConfiguration):
        def __init__(self, **options):
            super().__init__(project_dir=options["root"])

    assert copy.copy(Plugin(root="a")).project_dir == "a"
    assert Anything(root="b", unknown=1).project_dir == "b"


def test_find_handlers_returns_handlers_by_class():
    handlers = [AutocastKwargs(enabled=False), InitProcessGroupKwargs(timeout=timedelta(seconds=5))]
    assert find_handlers(handlers, KINDS) == dict(zip(KINDS[::2], handlers, strict=True))
    assert find_handlers(None, KINDS) == {}


def test_two_handlers_of_one_class_are_rejected():
    with pytest.raises(ValueError, match="contains several GradScalerKwargs"):
        find_handlers([GradScalerKwargs(), GradScalerKwargs(init_scale=1.0)], KINDS)


@dataclass
class OwnHandler(KwargsHandler):
    """A handler class of a script."""

    rate: float = 0.5
    names: list[str] = field(default_factory=list)


@pytest.mark.parametrize("other", ["fast", OwnHandler()], ids=["text", "an own handler"])
def test_an_unknown_handler_is_rejected_with_the_known_classes(other):
    with pytest.raises(
        TypeError, match=r"entry .*(fast|OwnHandler).*: expected one of AutocastKwargs, GradScalerKwargs"
    ):
        find_handlers([other], KINDS)


def test_a_handler_class_of_a_script_can_be_a_plain_dataclass():
    handler = OwnHandler(rate=0.25)
    assert handler.to_kwargs() == {"rate": 0.25}
    handler.rate, handler.names = 0.5, ["a"]
    handler.calls = 1  # no field; it is the script's own class
    assert handler.to_kwargs() == {"names": ["a"], "calls": 1}
    assert handler.to_dict() == {"rate": 0.5, "names": ["a"], "calls": 1}
    assert handler.to_dict()["names"] is not handler.names


def test_fields_of_the_communication_hook_are_not_passed_to_ddp():
    handler = DistributedDataParallelKwargs(comm_hook="fp16", static_graph=True)
    assert handler.to_kwargs() == {"static_graph": True}
    assert not {"comm_hook", "comm_wrapper", "comm_state_option"} & set(handler.to_dict())


def test_communication_state_options_are_passed_only_if_set():
    assert DistributedDataParallelKwargs().to_kwargs() == {}
    kwargs = DistributedDataParallelKwargs(comm_hook="power_sgd", comm_state_option={"warm_start": False})
    assert changed_fields(kwargs)["comm_state_option"] == {"warm_start": False}


@pytest.mark.parametrize("kind", list(DDPCommunicationHookType)[:4])
def test_a_communication_hook_can_be_given_as_a_string(kind):
    assert DistributedDataParallelKwargs(comm_hook=kind.value).comm_hook is kind
    assert DistributedDataParallelKwargs(comm_hook=kind).comm_hook is kind


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"comm_hook": "int8"},
            "Invalid comm_hook .int8.: expected one of no, fp16, bf16, power_sgd, batched_power_sgd",
        ),
        (
            {"comm_hook": "fp16", "comm_wrapper": "power_sgd"},
            "Invalid comm_wrapper .power_sgd.: expected no, fp16 or bf16",
        ),
        ({"comm_wrapper": "fp16"}, "needs a hook to wrap. Set comm_hook=.fp16."),
        ({"comm_hook": "fp16", "comm_state_option": {"warm_start": True}}, "needs comm_hook='power_sgd'"),
        ({"check_reduction": True}, "Leave it out"),
    ],
)
def test_ddp_options_without_effect_are_rejected(arguments, message):
    with pytest.raises(ValueError, match=message):
        DistributedDataParallelKwargs(**arguments)
