"""ZeRO on GPUs: the stages train as one process, with offload, fp16 and a local disk; skipped without deepspeed."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from support.cases.gpu_rehearsal import REHEARSAL
from torch import nn

from accel_runtime import Accelerator
from accel_runtime.utils import DeepSpeedPlugin

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.feature("ZeRO of DeepSpeed"),
    pytest.mark.skipif(
        getattr(importlib.util.find_spec("deepspeed"), "origin", None) is None,
        reason="deepspeed is not installed",
    ),
]
ROWS, STEPS = 8, 4


def build():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 4))


def list_batches():
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(ROWS, 8, generator=generator) for _ in range(STEPS)]


def loss_of(model, rows, factor=1.0):
    return model(rows).float().square().mean() * factor


def train_plain(precision):
    """Return the weights of one process without DeepSpeed, on the CPU in fp32 or bf16."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for rows in list_batches():
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss_of(model, rows).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def train(options, precision, factors=(1.0,) * STEPS):
    """Return the weights, and which steps were skipped."""
    zero = {"stage3_param_persistence_threshold": 1, **options}
    accelerator = Accelerator(
        mixed_precision=precision,
        deepspeed_plugin=DeepSpeedPlugin(
            hf_ds_config={"zero_optimization": zero, "fp16": {"initial_scale_power": 8, "hysteresis": 1}}
        ),
    )
    model = build()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    skipped = []
    for rows, factor in zip(list_batches(), factors, strict=True):
        part = rows.chunk(accelerator.num_processes)[accelerator.process_index].to(accelerator.device)
        accelerator.backward(loss_of(model, part, factor))
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)
    with accelerator.gathered(model) as full:
        weights = {name: tensor.detach().float().cpu().clone() for name, tensor in full.state_dict().items()}
    return weights, skipped


def assert_near(weights, expected, precision):
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-5 if precision == "no" else 2e-2)


CPU = {"device": "cpu"}
CASES = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 1, offload": {"stage": 1, "offload_optimizer": CPU},
    "stage 2, offload": {"stage": 2, "offload_optimizer": CPU},
    "stage 3, offload": {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU},
}


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_a_stage_on_one_gpu_trains_as_one_process(case, precision, cuda):
    weights, skipped = train(CASES[case], precision)
    assert_near(weights, train_plain(precision), precision)
    assert not any(skipped)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("case", CASES)
def test_a_stage_on_two_gpus_trains_as_one_process(case, ranks):
    for weights, _ in ranks.run(train, CASES[case], "no"):
        assert_near(weights, train_plain("no"), "no")


@pytest.mark.skipif(REHEARSAL, reason="fp16 needs a GPU")
@pytest.mark.parametrize("case", ["stage 1", "stage 2", "stage 3", "stage 2, offload"])
def test_an_overflow_in_fp16_skips_a_step_and_the_others_train(case, cuda):
    weights, skipped = train(CASES[case], "fp16", (1.0, 1e30, 1.0, 1.0))
    assert skipped == [False, True, False, False]
    assert all(tensor.isfinite().all() for tensor in weights.values())
    assert any(
        not torch.equal(weights[name], tensor.half().float()) for name, tensor in build().state_dict().items()
    )


@pytest.mark.skipif(REHEARSAL or not os.path.exists("/usr/include/libaio.h"), reason="nvme needs libaio")  # noqa: PTH110
def test_state_on_a_local_disk_trains_as_in_memory(cuda, tmp_path):
    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    weights, _ = train({"stage": 3, "offload_optimizer": disk}, "no")
    assert_near(weights, train_plain("no"), "no")
