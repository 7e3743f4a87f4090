"""What the forward pass computes in, and whether the loss is scaled."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from accel_runtime.training.forward import FORMATS, AutocastForward, Precision

CPU = torch.device("cpu")
COMPUTES_IN = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def precision(mixed_precision="no", autocast=None, scaler=None):
    return Precision(mixed_precision, CPU, autocast or {}, scaler or {})


class Nested(nn.Module):
    """Remembers the type it computed in, and returns more than a tensor."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen = None

    def forward(self, x):
        y = self.linear(x)
        self.seen = y.dtype
        return {"logits": y, "class": y.argmax(-1), "hidden": [y, "text"]}


@pytest.mark.parametrize("mixed_precision", FORMATS)
def test_a_model_computes_in_the_format_and_its_floating_outputs_are_float32(mixed_precision):
    model = Nested()
    precision(mixed_precision).wrap(model)
    outputs = model(torch.randn(2, 4))
    assert model.seen == COMPUTES_IN[mixed_precision]
    assert outputs["logits"].dtype == outputs["hidden"][0].dtype == torch.float32
    assert outputs["class"].dtype == torch.int64
    assert model.linear.weight.dtype == torch.float32


@pytest.mark.parametrize("mixed_precision", FORMATS)
def test_operations_outside_a_model_compute_in_the_format_inside_the_context(mixed_precision):
    x = torch.randn(4, 4)
    with precision(mixed_precision).autocast():
        assert (x @ x).dtype == COMPUTES_IN[mixed_precision]
    assert (x @ x).dtype == torch.float32


def test_without_mixed_precision_the_forward_pass_is_left_alone():
    model = nn.Linear(2, 2)
    precision("no").wrap(model)
    assert "forward" not in vars(model)


def test_a_model_wrapped_again_is_wrapped_once_and_in_the_newest_format():
    model = Nested()
    for mixed_precision in ("bf16", "bf16", "fp16"):
        precision(mixed_precision).wrap(model)
    assert not isinstance(model.forward.forward, AutocastForward)
    model(torch.randn(2, 4))
    assert model.seen == torch.float16
    precision("no").wrap(model)
    model(torch.randn(2, 4))
    assert model.seen == torch.float32


def test_a_copy_of_a_wrapped_model_is_a_model_of_its_own():
    model = Nested()
    precision("fp16").wrap(model)
    twin = copy.deepcopy(model)
    nn.init.zeros_(twin.linear.weight)
    nn.init.zeros_(twin.linear.bias)
    assert twin(torch.ones(1, 4))["logits"].abs().sum() == 0
    assert twin.seen == torch.float16
    assert model(torch.ones(1, 4))["logits"].abs().sum() > 0


def test_options_of_autocast_take_effect():
    x = torch.randn(4, 4)
    with precision("bf16", autocast={"enabled": False}).autocast():
        assert (x @ x).dtype == torch.float32


def test_only_fp16_scales_and_by_the_scale_asked_for():
    assert [precision(name).scaler is not None for name in ("no", "bf16", "fp16")] == [False, False, True]
    weight = torch.ones(1, requires_grad=True)
    precision("fp16", scaler={"init_scale": 8.0}).backward(weight * 3)
    precision("bf16").backward(weight * 3)
    assert weight.grad.item() == 8 * 3 + 3


def test_options_of_backward_are_passed_on():
    weight = torch.ones(1, requires_grad=True)
    loss = weight * weight
    for mixed_precision in ("no", "no"):
        precision(mixed_precision).backward(loss, {"retain_graph": True})
    assert weight.grad.item() == 4


def test_outputs_can_be_left_in_the_format():
    model = Nested()
    precision("bf16", autocast={"fp32_outputs": False}).wrap(model)
    assert model(torch.randn(2, 4))["logits"].dtype == torch.bfloat16


def test_a_context_may_have_options_of_its_own():
    x = torch.randn(4, 4)
    with precision("bf16").autocast({"enabled": False}):
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
def test_float16_parameters_under_the_scaler_are_refused_with_what_to_do(
    mixed_precision, dtype, scaler, refused
):
    model, check = nn.Linear(2, 2).to(dtype), precision(mixed_precision, scaler=scaler).check
    check(p.detach() for p in model.parameters())
    if refused:
        with pytest.raises(ValueError, match=r"float16 parameters.* float32 \(model\.float\(\)"):
            check(model.parameters())
    else:
        check(model.parameters())
