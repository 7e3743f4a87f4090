"""The dtypes in which a sharded model computes, reduces and returns."""

from __future__ import annotations

import pytest
import torch
from support.training.models import ResidualNet
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from accel_runtime import Accelerator, FullyShardedDataParallelPlugin
from accel_runtime.environment.settings import FullyShard
from accel_runtime.parallel.fsdp_units import (
    build_policy,
    find_batch_norms,
    find_units,
    parameters_of_unit,
    refuse_mixed_dtypes,
)

FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


@pytest.mark.parametrize(
    ("options", "computes_in", "parameter_dtype", "expected"),
    [
        ({}, None, FP32, (None, None, None)),
        ({}, BF16, FP32, (BF16, FP32, None)),
        ({}, FP16, FP32, (FP16, FP32, None)),
        ({}, None, BF16, (None, FP32, None)),
        ({}, BF16, BF16, (BF16, FP32, None)),
        ({}, None, FP64, (None, None, None)),
        ({"reduce_dtype": "bf16"}, BF16, FP32, (BF16, BF16, None)),
        ({"param_dtype": "fp32"}, BF16, FP32, (FP32, FP32, None)),
        ({"param_dtype": "bf16", "output_dtype": "fp32"}, None, FP32, (BF16, FP32, FP32)),
    ],
)
def test_unset_dtypes_keep_full_precision(options, computes_in, parameter_dtype, expected):
    policy = build_policy(
        FullyShard(**options), computes_in, nn.Linear(1, 1, dtype=parameter_dtype).parameters()
    )
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == expected
    assert policy.cast_forward_inputs


def test_batch_norms_keep_the_dtype_of_their_statistics():
    model = ResidualNet(norm=nn.BatchNorm1d)
    units = find_units(model, "ResidualBlock")
    norms, own_parameters = find_batch_norms(model, MixedPrecisionPolicy(BF16, FP32), units)
    assert [name for name, _ in norms] == ["blocks.0.norm", "blocks.1.norm"]
    assert own_parameters == MixedPrecisionPolicy(None, FP32, cast_forward_inputs=False)
    assert find_batch_norms(model, MixedPrecisionPolicy(), units)[0] == []
    assert find_batch_norms(model.bfloat16(), MixedPrecisionPolicy(BF16), units)[0] == []
    assert find_batch_norms(ResidualNet(norm=nn.LayerNorm), MixedPrecisionPolicy(BF16), units)[0] == []


def test_parameters_of_mixed_dtypes_are_rejected_by_name():
    model = ResidualNet(norm=nn.LayerNorm).bfloat16()
    for layer in model.blocks:
        layer.norm.float()
    with pytest.raises(
        ValueError, match=r"blocks.0 of ResidualNet .*bfloat16: blocks.0.up.weight.*float32: blocks.0.norm"
    ):
        refuse_mixed_dtypes(model, find_units(model, "ResidualBlock"))
    with pytest.raises(ValueError, match=r"outside of the modules in fully_shard.wrap .* and 7 more"):
        refuse_mixed_dtypes(model, [])
    refuse_mixed_dtypes(model, find_units(model, "ResidualBlock,LayerNorm"))
    refuse_mixed_dtypes(
        model, find_units(model, "ResidualBlock"), {p for la in model.blocks for p in la.norm.parameters()}
    )
    for layer in model.blocks:
        layer.norm.requires_grad_(requires_grad=False)
    refuse_mixed_dtypes(model, find_units(model, "ResidualBlock"))


def test_parameters_of_nested_units_belong_only_to_the_inner_unit():
    model = ResidualNet(norm=nn.LayerNorm)
    units = find_units(model, "ResidualBlock")
    assert [name for name, _ in parameters_of_unit(model, units)] == ["head.weight", "head.bias"]
    assert len(parameters_of_unit(model.blocks[0], units)) == 6


def train_step(mixed_precision, policy, norm, dtype):
    """Train one step, and return the dtypes of blocks, outputs, parameters and gradients."""
    plugin = FullyShardedDataParallelPlugin(
        mixed_precision_policy=policy, transformer_cls_names_to_wrap=["ResidualBlock"]
    )
    accelerator = Accelerator(mixed_precision=mixed_precision, fsdp_plugin=plugin)
    torch.manual_seed(1)
    model = accelerator.prepare(ResidualNet(norm=norm).to(dtype))
    block_dtypes = []
    for block in model.blocks:  # these hooks run after those of FSDP, like the forward pass
        block.register_forward_pre_hook(
            lambda block, args: block_dtypes.append(
                (args[0].dtype, block.up.weight.dtype, block.norm.weight.dtype)
            )
        )
    out = model(torch.linspace(-1, 1, 32, dtype=dtype).view(8, 4))
    accelerator.backward(out.float().square().mean())
    norm_seen = accelerator.clip_grad_norm_(model.parameters(), 10.0)
    return {
        "blocks": block_dtypes,
        "out": out.dtype,
        "parameters": {p.dtype for p in model.parameters()},
        "gradients": {p.grad.dtype for p in model.parameters()},
        "norm": norm_seen,
    }


CASES = {
    "bf16": (("bf16", None, nn.LayerNorm, FP32), [(BF16, BF16, BF16)] * 2, FP32, FP32),
    "no": (("no", None, nn.LayerNorm, FP32), [(FP32, FP32, FP32)] * 2, FP32, FP32),
    "a half model": (("no", None, nn.LayerNorm, BF16), [(BF16, BF16, BF16)] * 2, BF16, BF16),
    "a half model under bf16": (("bf16", None, nn.LayerNorm, BF16), [(BF16, BF16, BF16)] * 2, FP32, BF16),
    "outputs stay": (("bf16", "bf16", nn.LayerNorm, FP32), [(BF16, BF16, BF16)] * 2, BF16, FP32),
    "gathered whole": (
        ("bf16", {"param_dtype": "fp32"}, nn.LayerNorm, FP32),
        [(FP32, FP32, FP32)] * 2,
        FP32,
        FP32,
    ),
    "outputs wide inside halves": (
        ("no", {"param_dtype": "bf16", "output_dtype": "fp32"}, nn.LayerNorm, FP32),
        [(BF16, BF16, BF16)] * 2,
        FP32,
        FP32,
    ),
    "batch normalisation": (("bf16", None, nn.BatchNorm1d, FP32), [(BF16, BF16, FP32)] * 2, FP32, FP32),
}


@pytest.mark.parametrize("case", CASES)
def test_a_model_computes_in_the_configured_dtype(case, pair):
    options, blocks, out, parameter_dtype = CASES[case]
    for dtypes in pair.run(train_step, *options):
        assert dtypes["blocks"] == blocks
        assert dtypes["out"] == out
        assert dtypes["parameters"] == dtypes["gradients"] == {parameter_dtype}
        assert dtypes["norm"].isfinite()
