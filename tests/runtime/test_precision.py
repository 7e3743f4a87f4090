"""The dtype of the forward pass, and the scale of the loss."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from accel_runtime import Accelerator
from accel_runtime.foundation.options import GradScalerKwargs
from accel_runtime.foundation.precision import FORMATS
from accel_runtime.training.loss_scaler import LossScaler
from accel_runtime.training.precision import AutocastForward, Precision

CPU = torch.device("cpu")
COMPUTES_IN = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def build_precision(mixed_precision="no", autocast=None, scaler=None):
    scaler = LossScaler("cpu", **scaler or {}) if mixed_precision == "fp16" else None
    return Precision(mixed_precision, CPU, autocast or {}, scaler)


class Nested(nn.Module):
    """Remembers the dtype of its computation, and returns nested outputs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen = None

    def forward(self, x):
        y = self.linear(x)
        self.seen = y.dtype
        return {"logits": y, "class": y.argmax(-1), "hidden": [y, "text"]}


@pytest.mark.parametrize("mixed_precision", FORMATS)
def test_a_model_computes_in_mixed_precision_and_returns_float32(mixed_precision):
    model = Nested()
    build_precision(mixed_precision).wrap(model)
    outputs = model(torch.randn(2, 4))
    assert model.seen == COMPUTES_IN[mixed_precision]
    assert outputs["logits"].dtype == outputs["hidden"][0].dtype == torch.float32
    assert outputs["class"].dtype == torch.int64
    assert model.linear.weight.dtype == torch.float32


@pytest.mark.parametrize("mixed_precision", FORMATS)
def test_operations_inside_autocast_compute_in_mixed_precision(mixed_precision):
    x = torch.randn(4, 4)
    with build_precision(mixed_precision).autocast():
        assert (x @ x).dtype == COMPUTES_IN[mixed_precision]
    assert (x @ x).dtype == torch.float32


def test_the_forward_method_is_unchanged_without_mixed_precision():
    model = nn.Linear(2, 2)
    build_precision("no").wrap(model)
    assert "forward" not in vars(model)


def test_wrapping_a_model_again_replaces_its_precision():
    model = Nested()
    for mixed_precision in ("bf16", "bf16", "fp16"):
        build_precision(mixed_precision).wrap(model)
    assert not isinstance(model.forward.forward, AutocastForward)
    model(torch.randn(2, 4))
    assert model.seen == torch.float16
    build_precision("no").wrap(model)
    model(torch.randn(2, 4))
    assert model.seen == torch.float32


def test_a_copy_of_a_wrapped_model_is_independent():
    model = Nested()
    build_precision("fp16").wrap(model)
    twin = copy.deepcopy(model)
    nn.init.zeros_(twin.linear.weight)
    nn.init.zeros_(twin.linear.bias)
    assert twin(torch.ones(1, 4))["logits"].abs().sum() == 0
    assert twin.seen == torch.float16
    assert model(torch.ones(1, 4))["logits"].abs().sum() > 0


def test_options_of_autocast_take_effect():
    x = torch.randn(4, 4)
    with build_precision("bf16", autocast={"enabled": False}).autocast():
        assert (x @ x).dtype == torch.float32


def test_only_fp16_scales_the_loss_and_by_the_configured_scale():
    assert [build_precision(name).scaler is not None for name in ("no", "bf16", "fp16")] == [
        False,
        False,
        True,
    ]
    weight = torch.ones(1, requires_grad=True)
    build_precision("fp16", scaler={"init_scale": 8.0}).scale(weight * 3).backward()
    build_precision("bf16").scale(weight * 3).backward()
    assert weight.grad.item() == 8 * 3 + 3


def test_options_of_backward_are_passed_to_torch():
    weight = torch.ones(1, requires_grad=True)
    loss = weight * weight
    for _ in range(2):
        Accelerator().backward(loss, retain_graph=True)
    assert weight.grad.item() == 4


def test_outputs_stay_in_the_computation_dtype_without_fp32_outputs():
    model = Nested()
    build_precision("bf16", autocast={"fp32_outputs": False}).wrap(model)
    assert model(torch.randn(2, 4))["logits"].dtype == torch.bfloat16


def test_an_autocast_context_can_have_its_own_options():
    x = torch.randn(4, 4)
    with build_precision("bf16").autocast({"enabled": False}):
        assert (x @ x).dtype == torch.float32


@pytest.mark.parametrize(
    ("mixed_precision", "dtype", "scaler", "refused"),
    [
        ("fp16", torch.float16, {}, True),
        ("fp16", torch.float32, {}, False),
        ("fp16", torch.bfloat16, {}, False),
        ("fp16", torch.float16, {"enabled": False}, False),
        ("bf16", torch.float16, {}, False),
    ],
)
def test_float16_parameters_are_rejected_with_a_loss_scaler(mixed_precision, dtype, scaler, refused):
    model, check = nn.Linear(2, 2).to(dtype), build_precision(mixed_precision, scaler=scaler).check
    check(p.detach() for p in model.parameters())
    if refused:
        with pytest.raises(ValueError, match=r"float16 parameters.* float32 \(model\.float\(\)"):
            check(model.parameters())
    else:
        check(model.parameters())


def test_a_model_can_be_copied_between_clipping_and_the_step():
    handlers = [GradScalerKwargs(init_scale=8.0)]
    accelerator = Accelerator(mixed_precision="fp16", cpu=True, kwargs_handlers=handlers)
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    average = copy.deepcopy(model)
    optimizer.step()
    assert not torch.equal(average.weight, model.weight)
    assert average(torch.ones(1, 2)).dtype == torch.float32
