"""`from_pretrained` shards a model while it loads in stage 3, and its weights are those of the file."""

from __future__ import annotations

import pytest
import torch
from support.runs.zero_runs import connect

from accel_runtime.utils import DeepSpeedPlugin

pytest.importorskip(
    "deepspeed.runtime", reason="deepspeed is in an environment of its own: make test-deepspeed"
)


def build_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2, vocab_size=11
        )
    )


def is_sharded(model):
    return [hasattr(parameter, "ds_tensor") for parameter in model.parameters()]


def load(folder, precision):
    """Load sharded, and full in the context that disables it; train a step; return the weights before."""
    from transformers import LlamaForCausalLM

    auto = dict.fromkeys(
        ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"), "auto"
    )
    plugin = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 3, **auto}})
    accelerator = connect("replicated", deepspeed_plugin=plugin, mixed_precision=precision)
    assert plugin.is_zero3_init_enabled()
    sharded = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert all(is_sharded(sharded))
    with plugin.zero3_init_context_manager(enable=False):
        full = LlamaForCausalLM.from_pretrained(folder)
    assert not any(is_sharded(full))
    assert all(is_sharded(LlamaForCausalLM.from_pretrained(folder)))
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.1)
    sharded, optimizer = accelerator.prepare(sharded, optimizer)
    with accelerator.gathered(sharded) as model:
        weights = {name: tensor.detach().float().clone() for name, tensor in model.state_dict().items()}
    tokens = torch.arange(8).reshape(2, 4)
    accelerator.backward(sharded(input_ids=tokens, labels=tokens).loss)
    norm = accelerator.clip_grad_norm_(sharded.parameters(), 1.0)
    optimizer.step()
    with accelerator.gathered(sharded) as model:
        changed = any(
            not torch.equal(weights[name], tensor.float()) for name, tensor in model.state_dict().items()
        )
    return weights, float(norm), changed


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_model_is_sharded_while_it_loads_and_has_the_weights_of_the_file(clusters, precision, tmp_path):
    original = build_llama()
    original.save_pretrained(tmp_path)
    tokens = torch.arange(8).reshape(2, 4)
    original(input_ids=tokens, labels=tokens).loss.backward()
    expected = torch.nn.utils.clip_grad_norm_(original.parameters(), 1.0)
    for weights, norm, changed in clusters[2].run(load, tmp_path, precision):
        rounding = 0 if precision == "no" else 2**-8
        for name, tensor in original.state_dict().items():
            torch.testing.assert_close(weights[name], tensor, rtol=rounding, atol=0)
        assert norm == pytest.approx(float(expected), rel=1e-5 if precision == "no" else 0.05)
        assert changed
