"""QLoRA by bitsandbytes and peft on several processes trains as on one."""

from __future__ import annotations

import warnings

import pytest
import torch

from accel_runtime import Accelerator, ParallelismConfig

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")
pytestmark = pytest.mark.slow

IDS = torch.arange(4 * 12).mul(7).remainder(32).view(4, 12)
STORAGES = ("uint8", "bfloat16", "float16", "float32")


def build(storage):
    """Return a small Llama with 4-bit weights and an adapter."""
    import bitsandbytes
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
    for layer in model.model.layers:
        for owner, name in ((layer.self_attn, "q_proj"), (layer.self_attn, "v_proj"), (layer.mlp, "up_proj")):
            plain = getattr(owner, name)
            options = {"bias": False, "quant_type": "nf4", "quant_storage": getattr(torch, storage)}
            packed = bitsandbytes.nn.Linear4bit(*plain.weight.shape[::-1], **options)
            packed.load_state_dict(plain.state_dict())
            setattr(owner, name, packed.to("cpu"))  # which quantizes it
    torch.manual_seed(1)
    adapter = LoraConfig(r=2, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of transformers on peft
        return get_peft_model(model, adapter).train()


def train(config, storage, mixed_precision):
    accelerator = Accelerator(parallelism_config=config, mixed_precision=mixed_precision)
    model = build(storage)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    ids = IDS.chunk(accelerator.num_processes)[accelerator.process_index]
    losses = []
    for _ in range(4):
        if config is not None:  # bitsandbytes itself does not train after an evaluation on a CPU
            model.eval()
            with torch.no_grad():
                model(input_ids=ids)
            model.train()
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach().float(), "mean").item())
    state = accelerator.get_state_dict(model, everywhere=True)
    return losses, {name: value.tolist() for name, value in state.items() if "lora_" in name}


def compare(config, mixed_precision, storages):
    return {storage: train(config, storage, mixed_precision) for storage in storages}


@pytest.mark.parametrize("kind", ["ddp", "shard"])
def test_qlora_in_any_storage_trains_as_on_one_process(pair, kind):
    config = ParallelismConfig(dp_shard_size=2) if kind == "shard" else None
    expected_losses, expected = _train_plainly()
    for results in pair.run(compare, config, "no", STORAGES):
        for storage, (losses, adapters) in results.items():
            assert losses == pytest.approx(expected_losses, abs=1e-4), storage
            for name, values in expected.items():
                torch.testing.assert_close(torch.tensor(adapters[name]), values, atol=1e-3, rtol=0)


def _train_plainly():
    model = build("uint8")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(4):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters() if "lora_" in name}


def test_mixed_precision_does_not_convert_packed_weights(pair):
    for results in pair.run(compare, ParallelismConfig(dp_shard_size=2), "bf16", STORAGES):
        for losses, adapters in results.values():
            assert losses == results["uint8"][0]
            assert adapters == results["uint8"][1]
