"""`fully_shard` on a mesh of one GPU, compared with the model without sharding."""

from __future__ import annotations

import pytest
import torch
from support.cases.gpu_rehearsal import REHEARSAL
from torch import nn

from accel_runtime import Accelerator, FullyShardedDataParallelPlugin

pytestmark = pytest.mark.gpu

PLAIN, OFFLOAD = "fully_shard", "fully_shard with cpu_offload"


class Block(nn.Module):
    """A module whose parameters are gathered together."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )
        self.seen = set()

    def forward(self, x):
        self.seen.add((self.up.weight.dtype, x.dtype))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Blocks between two layers of the outermost module."""

    def __init__(self, width=64, blocks=3):
        super().__init__()
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.last = nn.Linear(width, 4)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def plugin(**options):
    """Shard every block."""
    return FullyShardedDataParallelPlugin(
        auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"], **options
    )


def trained(sharding=None, precision="no", steps=5):
    """Return losses, gradient norms and the trained model."""
    torch.manual_seed(13)
    accelerator = Accelerator(mixed_precision=precision, fsdp_plugin=sharding)
    model = Model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    draws = torch.Generator().manual_seed(14)
    losses, norms = [], []
    for _ in range(steps):
        x = torch.randn(16, 8, generator=draws).to(accelerator.device)
        loss = model(x).float().square().mean()
        accelerator.backward(loss)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        assert not accelerator.optimizer_step_was_skipped
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, model, optimizer, accelerator


def state(accelerator, model):
    return accelerator.get_state_dict(model)


def off(expected, actual):
    return max(abs(a - b) / abs(a) for a, b in zip(expected, actual, strict=True))


@pytest.mark.parametrize(
    ("options", "bound"),
    [
        pytest.param({}, 1e-5, marks=pytest.mark.feature(PLAIN), id="plain"),
        pytest.param(
            {"reshard_after_forward": False}, 1e-5, marks=pytest.mark.feature(PLAIN), id="not-resharded"
        ),
        pytest.param({"cpu_offload": True}, 1e-4, marks=pytest.mark.feature(OFFLOAD), id="offloaded"),
        pytest.param(
            {"activation_checkpointing": True},
            1e-5,
            marks=pytest.mark.feature("fully_shard with activation checkpointing"),
            id="checkpointing",
        ),
    ],
)
def test_a_sharded_model_trains_like_an_unsharded_one(device, options, bound):
    losses, norms, unsharded_model, _, unsharded_optimizer = trained()
    actual, got_norms, model, _, other = trained(plugin(**options))
    assert off(losses, actual) < bound
    assert off(norms, got_norms) < bound
    expected, actual_state = state(unsharded_optimizer, unsharded_model), state(other, model)
    assert list(expected) == list(actual_state)
    worst = max((expected[name].cpu() - actual_state[name].cpu()).abs().max().item() for name in expected)
    assert worst < 1e-4, f"a parameter is {worst:.1e} off after 5 steps of 1e-3"


@pytest.mark.feature("fully_shard with bf16")
def test_blocks_compute_in_bf16_with_parameters_in_float32(device):
    losses, _, _, _, _ = trained()
    actual, _, model, _, _ = trained(plugin(), "bf16")
    assert off(losses, actual) < 5e-2
    assert {pair for block in model.blocks for pair in block.seen} == {(torch.bfloat16, torch.bfloat16)}
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.feature(OFFLOAD)
def test_offloaded_parameters_and_states_are_on_the_cpu_between_steps(device):
    _, _, model, optimizer, _ = trained(plugin(cpu_offload=True))
    local = [p.to_local() for p in model.parameters()]
    assert {p.device.type for p in local} == {"cpu"}
    tensors = [
        value
        for parameter_state in optimizer.state.values()
        for value in parameter_state.values()
        if isinstance(value, torch.Tensor)
    ]
    assert {value.device.type for value in tensors} == {"cpu"}
    if not REHEARSAL:
        assert all(p.is_pinned() for p in local), "copies to the GPU do not wait only from pinned memory"


@pytest.mark.feature("fully_shard with fp16")
@pytest.mark.parametrize("offload", [False, True], ids=["on-device", "offloaded"])
def test_overflows_are_detected_and_gradients_unscaled_with_offloading(device, busy, offload):
    """The scale and the overflow flag must be copied to the device of the gradients before their use."""
    accelerator = Accelerator(mixed_precision="fp16", fsdp_plugin=plugin(cpu_offload=offload))
    torch.manual_seed(15)
    model = Model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    x = torch.ones(4, 8, device=device)
    norms = []
    for number in range(20):
        factor = float("inf") if number % 4 == 1 else 1e-3
        busy(0.02)
        accelerator.backward(model(x).float().square().mean() * factor)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1e9)))
        optimizer.step()
        optimizer.zero_grad()
        expected = number % 4 == 1
        assert accelerator.optimizer_step_was_skipped == expected, f"step {number}: skipped is {not expected}"
    finite = [norm for number, norm in enumerate(norms) if number % 4 != 1]
    assert max(finite) / min(finite) < 1.5, f"norms of nearly equal gradients differ: {finite}"


@pytest.mark.feature("fully_shard with activation checkpointing")
def test_activation_checkpointing_lowers_the_peak_memory(cuda):
    peaks = {}
    for is_checkpointed in (False, True):
        accelerator = Accelerator(fsdp_plugin=plugin(activation_checkpointing=is_checkpointed))
        model = accelerator.prepare(Model(width=256, blocks=8))
        x = torch.ones(16384, 8, device="cuda")
        accelerator.backward(model(x).square().mean())
        cuda.reset_peak_memory_stats()
        accelerator.backward(model(x).square().mean())
        peaks[is_checkpointed] = cuda.max_memory_allocated() >> 20
        del model
    # A block keeps its input, the norm and two tensors of four times the width; checkpointed, its input.
    assert peaks[True] < 0.5 * peaks[False], f"MiB with and without: {peaks[True]}, {peaks[False]}"


@pytest.mark.feature("Checkpoints of sharded models")
@pytest.mark.parametrize("offload", [False, True], ids=["on-device", "offloaded"])
def test_a_sharded_checkpoint_can_be_loaded_by_models_of_every_layout(device, tmp_path, offload):
    _, _, model, _, accelerator = trained(plugin(cpu_offload=offload), "bf16")
    expected = {name: value.cpu().clone() for name, value in state(accelerator, model).items()}
    accelerator.save_state(tmp_path / "saved")
    for sharding in (plugin(), plugin(cpu_offload=True), None):
        _, _, other, _, loading = trained(sharding, "bf16", steps=1)
        loading.load_state(tmp_path / "saved")
        actual = state(loading, other)
        assert [name for name in expected if not torch.equal(expected[name], actual[name].cpu())] == []
