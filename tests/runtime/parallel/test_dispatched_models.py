"""Models that `device_map` or hooks of Accelerate have put on several devices stay there, or are refused with a cure."""

from __future__ import annotations

import pytest
import torch

from accel_runtime import Accelerator, FullyShardedDataParallelPlugin
from accel_runtime.storage.errors import CheckpointError

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

MAP = {
    "model.embed_tokens": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "cpu",
}
INPUTS = torch.arange(16).reshape(2, 8)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """The folder of a tiny model."""
    folder = tmp_path_factory.mktemp("pretrained")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def load(folder, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


def load_offloaded(folder):
    return load(folder, device_map=MAP, offload_folder=folder / "offloaded")


def compute_loss(model):
    return model(input_ids=INPUTS, labels=INPUTS).loss


def train(folder, device_map=None):
    """Return the losses of a prepared model."""
    accelerator = Accelerator()
    model = load(folder, device_map=device_map)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for _ in range(3):
        loss = compute_loss(model)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_a_model_with_an_automatic_device_map_trains_as_one_without(pretrained, ranks):
    assert ranks.run(train, pretrained, "auto") == [pytest.approx(train(pretrained))] * ranks.size


def test_an_offloaded_model_stays_where_it_is_and_computes_the_same(pretrained):
    accelerator, expected = Accelerator(), compute_loss(load(pretrained))
    model = load_offloaded(pretrained)
    assert accelerator.verify_device_map(model)
    assert not accelerator.verify_device_map(load(pretrained))
    prepared = accelerator.prepare_model(model, evaluation_mode=True)
    assert torch.equal(compute_loss(prepared), expected)
    assert model.model.layers[1].mlp.up_proj.weight.is_meta


def test_weights_without_offloading_train_in_an_offloaded_model(pretrained):
    accelerator, model = Accelerator(), load_offloaded(pretrained)
    model.requires_grad_(False)
    model.lm_head.weight.requires_grad_()
    before = model.lm_head.weight.detach().clone()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD([model.lm_head.weight], lr=0.1))
    accelerator.backward(compute_loss(model))
    optimizer.step()
    assert not torch.equal(model.lm_head.weight, before)


def test_offloaded_weights_are_not_trained_without_a_word(pretrained):
    with pytest.raises(ValueError, match=r"Cannot train model\.layers\.1\..*offloaded.*Freeze them"):
        Accelerator().prepare(load_offloaded(pretrained))


def test_a_model_that_is_offloaded_by_hooks_alone_stays_where_it_is(pretrained):
    from accel_runtime import cpu_offload

    model = cpu_offload(load(pretrained), execution_device=torch.device("cpu"))
    prepared = Accelerator().prepare_model(model, evaluation_mode=True)
    assert torch.equal(compute_loss(prepared), compute_loss(load(pretrained)))


def refuse(folder, sharded):
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if sharded else None
    with pytest.raises(
        ValueError, match=r"several devices \(cpu, disk\).*device_map=\{'': accelerator\.device"
    ):
        Accelerator(fsdp_plugin=plugin).prepare_model(load_offloaded(folder), evaluation_mode=True)


@pytest.mark.slow
def test_a_model_on_several_devices_is_refused_on_several_processes(pretrained, pair):
    pair.run(refuse, pretrained, False)


def test_a_model_on_several_devices_is_not_sharded(pretrained, pair):
    pair.run(refuse, pretrained, True)


def test_an_export_of_offloaded_weights_names_the_way_out(pretrained, tmp_path):
    accelerator = Accelerator()
    model = accelerator.prepare_model(load_offloaded(pretrained), evaluation_mode=True)
    with pytest.raises(CheckpointError, match=r"meta device[\s\S]*its own save_pretrained\(\)"):
        accelerator.save_model(model, tmp_path / "exported")
