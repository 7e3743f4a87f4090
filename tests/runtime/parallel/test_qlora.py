"""QLoRA by bitsandbytes and peft on several processes trains as on one, and its checkpoints and exports load with any layout."""

from __future__ import annotations

import warnings

import pytest
import torch

from accel_runtime import Accelerator, ParallelismConfig
from accel_runtime.storage.errors import CheckpointError

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")
pytestmark = pytest.mark.slow

IDS = torch.arange(4 * 12).mul(7).remainder(32).view(4, 12)
STORAGES = ("uint8", "bfloat16", "float16", "float32")


def build(storage, seed=0, quant_type="nf4", dtype=torch.float32):
    """Return a small Llama with 4-bit weights and an adapter."""
    import bitsandbytes
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
    for layer in model.model.layers:
        for owner, name in ((layer.self_attn, "q_proj"), (layer.self_attn, "v_proj"), (layer.mlp, "up_proj")):
            plain = getattr(owner, name)
            options = {"bias": False, "quant_type": quant_type, "quant_storage": getattr(torch, storage)}
            packed = bitsandbytes.nn.Linear4bit(*plain.weight.shape[::-1], **options)
            packed.weight.data = plain.weight.data.to(dtype)
            setattr(owner, name, packed.to("cpu"))  # which quantizes it
    torch.manual_seed(seed + 1)
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


# Checkpoints and exports -----------------------------------------------------------------

LAYOUTS = ["one", "ddp", "shard"]


def start(layout, seed=0, storage="uint8", **more):
    accelerator = Accelerator(
        parallelism_config=ParallelismConfig(dp_shard_size=2) if layout == "shard" else None
    )
    model = build(storage, seed, **more)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return accelerator, *accelerator.prepare(model, optimizer)


def train_on(accelerator, model, optimizer, steps=2):
    ids = IDS.chunk(accelerator.num_processes)[accelerator.process_index]
    losses = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach().float(), "mean").item())
    return losses


def read_state(accelerator, model):
    """Return the bytes of all weights, scales and adapters."""
    state = accelerator.get_state_dict(model, everywhere=True)
    return {name: read_bytes(value) for name, value in state.items()}


def read_bytes(tensor):
    return str(tensor.dtype), list(tensor.shape), tensor.contiguous().flatten().view(torch.uint8).tolist()


def save(layout, folder):
    """Save in mid-training; return the state then, and the losses and the state after it."""
    accelerator, model, optimizer = start(layout)
    train_on(accelerator, model, optimizer)
    accelerator.save_state(f"{folder}/state")
    accelerator.save_model(model, f"{folder}/export")
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(f"{folder}/adapter", state_dict=state)
    saved = read_state(accelerator, model)
    return saved, train_on(accelerator, model, optimizer), read_state(accelerator, model)


def load(layout, folder):
    """Resume from other weights; return what `save` does, and the state after the export is loaded."""
    accelerator, model, optimizer = start(layout, seed=7)
    other = read_state(accelerator, model)
    accelerator.resume(f"{folder}/state")
    loaded = read_state(accelerator, model)
    scales = [name for name in loaded if name.endswith(("absmax", "__nf4"))]
    assert all(loaded[name] != other[name] for name in scales)
    assert len(scales) == 18  # scales of two levels, and a text, of six layers
    losses, state = train_on(accelerator, model, optimizer), read_state(accelerator, model)
    accelerator, model, optimizer = start(layout, seed=7)
    accelerator.load_model(model, f"{folder}/export")
    return loaded, losses, state, read_state(accelerator, model)


def run_layout(clusters, layout, function, *args):
    return clusters[1 if layout == "one" else 2].run(function, layout, *args)


@pytest.fixture(scope="module", params=LAYOUTS)
def saved(request, clusters, by_value, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp(request.param))
    return request.param, folder, run_layout(clusters, request.param, save, folder)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_qlora_resumes_bit_for_bit_and_with_any_other_layout(saved, layout, clusters):
    saved_by, folder, results = saved
    at_save, losses, state = results[0]
    for loaded, losses_here, state_here, exported in run_layout(clusters, layout, load, folder):
        assert loaded == at_save
        assert exported == at_save
        assert losses_here == pytest.approx(losses, abs=1e-4)
        if layout == saved_by:
            assert losses_here == losses
            assert state_here == state


def test_the_exported_adapter_is_that_of_the_run(saved):
    from safetensors.torch import load_file

    _, folder, results = saved
    for name, value in load_file(f"{folder}/adapter/adapter_model.safetensors").items():
        assert read_bytes(value) == results[0][0][name.replace(".weight", ".default.weight")]


def load_other(layout, folder, more, strict):
    accelerator, model, _ = start(layout, seed=7, **more)
    before = read_state(accelerator, model)
    try:
        accelerator.load_state(f"{folder}/state", strict=strict)
    except CheckpointError as error:
        return str(error), before == read_state(accelerator, model)
    after = read_state(accelerator, model)
    return [name for name in after if after[name] != before[name]], False


@pytest.mark.parametrize("saved", ["one"], indirect=True)
def test_weights_of_another_format_are_refused_or_left_out_as_a_whole(saved, clusters):
    folder = saved[1]
    ((text, unchanged),) = clusters[1].run(load_other, "one", folder, {"quant_type": "fp4"}, True)
    assert "missing in the checkpoint" in text
    assert "bitsandbytes__fp4" in text
    assert unchanged
    ((changed, _),) = clusters[1].run(load_other, "one", folder, {"quant_type": "fp4"}, False)
    assert not [name for name in changed if "base_layer" in name]
    assert [name for name in changed if "lora_" in name]
    ((text, _),) = clusters[1].run(load_other, "one", folder, {"dtype": torch.bfloat16}, True)
    assert "packed in another format (dtype is 'float32' as saved and 'bfloat16' here" in text
    ((text, unchanged),) = clusters[1].run(load_other, "one", folder, {"storage": "bfloat16"}, True)
    assert "uint8 as saved and [1024, 1] bfloat16 here, and packed weights are not converted" in text
    assert unchanged
