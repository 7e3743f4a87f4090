"""bf16 and fp16 compared with float32, and steps that an overflow skips."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel_runtime import Accelerator, GradScalerKwargs

pytestmark = pytest.mark.gpu

BF16, FP16 = "bf16 autocast", "fp16 autocast and loss scaling"
DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BOUNDS = {"bf16": 5e-2, "fp16": 1e-2}
"""How far, relative to float32, losses and the sum of all updates may be: about ten roundings of the format."""


def trained(precision, steps=10, kind=torch.optim.SGD, **options):
    """Return losses, parameters before and after, and the dtypes of the first layer."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
    dtypes = set()
    model[0].register_forward_hook(lambda _module, _inputs, output: dtypes.add(output.dtype))
    accelerator = Accelerator(mixed_precision=precision)
    model, optimizer = accelerator.prepare(model, kind(model.parameters(), lr=0.05, **options))
    before = [p.detach().clone() for p in model.parameters()]
    draws = torch.Generator().manual_seed(2)
    losses = []
    for _ in range(steps):
        x, y = torch.randn(16, 32, generator=draws), torch.randn(16, 8, generator=draws)
        out = model(x.to(accelerator.device))
        assert out.dtype == torch.float32
        loss = nn.functional.mse_loss(out, y.to(accelerator.device))
        accelerator.backward(loss)
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
        optimizer.step()
        assert not accelerator.optimizer_step_was_skipped
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, before, [p.detach().clone() for p in model.parameters()], dtypes


@pytest.mark.parametrize(
    "precision",
    [
        pytest.param("bf16", marks=pytest.mark.feature(BF16)),
        pytest.param("fp16", marks=pytest.mark.feature(FP16)),
    ],
)
def test_mixed_precision_training_is_within_rounding_of_float32(precision):
    exact, before, expected, plain = trained("no")
    losses, same, actual, dtypes = trained(precision)
    assert (plain, dtypes) == ({torch.float32}, {DTYPES[precision]})
    assert all(torch.equal(a, b) for a, b in zip(before, same, strict=True))
    bound = BOUNDS[precision]
    worst = max(abs(a - b) / a for a, b in zip(exact, losses, strict=True))
    assert worst < bound, f"a loss is {worst:.1%} off; the bound is {bound:.0%}"
    update = torch.cat([(a - b).flatten() for a, b in zip(expected, before, strict=True)])
    error = torch.cat([(a - b).flatten() for a, b in zip(actual, expected, strict=True)])
    off = (error.norm() / update.norm()).item()
    assert off < bound, f"the updates are {off:.1%} off; the bound is {bound:.0%}"


def overflowing(device, fused):
    """Return an fp16 training, and a function that runs a step with a factor on the loss."""
    accelerator = Accelerator(mixed_precision="fp16")
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **({"fused": True} if fused else {}))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    def step(factor):
        before = [p.detach().clone() for p in model.parameters()]
        loss = model(torch.ones(2, 4, device=device)).square().mean()
        accelerator.backward(loss * factor)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return all(torch.equal(a, p) for a, p in zip(before, model.parameters(), strict=True))

    return accelerator, optimizer, scheduler, step


@pytest.mark.feature(FP16)
@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_an_overflow_skips_the_step_halves_the_scale_and_stops_the_scheduler(device, fused):
    accelerator, optimizer, scheduler, step = overflowing(device, fused)
    scaler = accelerator.scaler
    assert scaler.get_scale() == 65536.0
    assert step(float("inf")), "the parameters have changed though gradients had overflowed"
    assert accelerator.optimizer_step_was_skipped
    assert optimizer.step_was_skipped
    assert (scaler.get_scale(), scheduler.get_last_lr()) == (32768.0, [0.1])
    assert not step(1.0), "a step without overflow has changed nothing"
    assert not accelerator.optimizer_step_was_skipped
    assert (scaler.get_scale(), scheduler.get_last_lr()) == (32768.0, [0.05])


@pytest.mark.feature(FP16)
def test_the_scale_decreases_until_large_gradients_fit(device):
    accelerator, _, _, step = overflowing(device, fused=False)
    skipped = []
    for _ in range(30):
        step(1e5)
        skipped.append(accelerator.optimizer_step_was_skipped)
        if not skipped[-1]:
            break
    assert skipped[0], "a loss of 1e5 times 65536 overflows in fp16"
    assert not skipped[-1], (
        f"after {len(skipped)} steps the scale is {accelerator.scaler.get_scale()}, and none was made"
    )
    assert accelerator.scaler.get_scale() == 65536.0 / 2 ** (len(skipped) - 1)


@pytest.mark.feature(FP16)
def test_clipping_uses_unscaled_gradients(device):
    norms = {}
    for precision in ("no", "fp16"):
        torch.manual_seed(4)
        accelerator = Accelerator(
            mixed_precision=precision, kwargs_handlers=[GradScalerKwargs(init_scale=128.0)]
        )
        model = nn.Linear(16, 4)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        accelerator.backward(model(torch.ones(8, 16, device=device)).square().mean() * 10)
        norms[precision] = float(accelerator.clip_grad_norm_(model.parameters(), 0.5))
        after = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
        assert after == pytest.approx(0.5, rel=1e-3), f"after clipping the norm is {after} ({precision})"
        optimizer.step()
        assert not accelerator.optimizer_step_was_skipped
    assert norms["fp16"] == pytest.approx(norms["no"], rel=1e-2)


@pytest.mark.feature(BF16)
def test_autocast_applies_only_inside_its_context(device):
    accelerator = Accelerator(mixed_precision="bf16")
    x = torch.ones(4, 4, device=device)
    with accelerator.autocast():
        assert (x @ x).dtype == torch.bfloat16
    assert (x @ x).dtype == torch.float32


@pytest.mark.feature(BF16)
def test_bf16_availability_is_that_of_the_gpu(cuda):
    from accel_runtime.utils import is_bf16_available

    assert is_bf16_available() == cuda.is_bf16_supported()
