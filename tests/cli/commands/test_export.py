"""`accel checkpoint export`: the table of formats, and `--format hf`."""

from __future__ import annotations

import json

import pytest
import torch
from support.processes.commands import call_accel
from torch import nn

from accel_cli.commands import checkpoint
from accel_runtime import Accelerator
from accel_runtime.environment.registry import Registry


class Tied(nn.Module):
    """A model whose head is its embedding."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.LayerNorm(3)


@pytest.fixture
def tied(cwd):
    """Return a saved model, whose checkpoint is `checkpoint`."""
    accelerator, model = Accelerator(), Tied()
    accelerator.prepare(model)
    accelerator.save_state("checkpoint")
    return model


def export(capfd, *arguments):
    return call_accel(capfd, "checkpoint", "export", "checkpoint", "-o", "out", *arguments)


def test_a_small_model_is_one_file_without_tied_weights_for_format_hf(capfd, cwd, tied):
    from safetensors import safe_open

    result = export(capfd, "--format", "hf")
    assert result.returncode == 0, result.stderr
    assert "head.weight is tied to embedding.weight" in result.stderr
    assert [path.name for path in (cwd / "out").iterdir()] == ["model.safetensors"]
    with safe_open(cwd / "out" / "model.safetensors", "pt") as file:
        assert set(file.keys()) == {"embedding.weight", "norm.weight", "norm.bias"}
        assert file.metadata() == {"format": "pt"}
        assert torch.equal(file.get_tensor("embedding.weight"), tied.embedding.weight)


def test_accel_loads_shards_of_format_hf_with_their_index(capfd, cwd, tied):
    result = export(capfd, "--format", "hf", "--max-shard-size", "60B", "--json")
    assert len(json.loads(result.stdout)["files"]) == 3
    names = sorted(path.name for path in (cwd / "out").iterdir())
    assert names == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    other = Tied()
    Accelerator().load_model(other, cwd / "out")
    assert all(torch.equal(value, tied.state_dict()[name]) for name, value in other.state_dict().items())


def test_weights_are_added_to_a_folder_with_a_configuration_once(capfd, cwd, tied):
    (cwd / "out").mkdir()
    (cwd / "out" / "config.json").write_text("{}")
    assert export(capfd, "--format", "hf", "--dtype", "bf16").returncode == 0
    assert sorted(path.name for path in (cwd / "out").iterdir()) == ["config.json", "model.safetensors"]
    again = export(capfd, "--format", "hf")
    assert again.returncode == 2
    assert "out has model.safetensors already. Remove it, or choose another folder." in again.stderr


def test_a_failed_export_leaves_no_folder(capfd, cwd, tied, handmade):
    handmade.flip(cwd / "checkpoint" / "model.safetensors", -1)
    result = export(capfd, "--format", "hf")
    assert result.returncode == 1
    assert "does not have its checksum" in result.stderr
    assert [path.name for path in cwd.iterdir() if "out" in path.name] == []


@pytest.mark.parametrize("shard_size", ["50GB", "4KB"])
def test_from_pretrained_gives_the_outputs_of_the_trained_model(capfd, cwd, shard_size):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    accelerator, model = Accelerator(), transformers.LlamaForCausalLM(config)
    model = accelerator.prepare(model)
    accelerator.save_state("checkpoint")
    assert export(capfd, "--format", "hf", "--max-shard-size", shard_size).returncode == 0
    config.save_pretrained("out")
    model.save_pretrained("expected", max_shard_size=shard_size)
    names = {path.name for path in (cwd / "out").iterdir()}
    assert names == {path.name for path in (cwd / "expected").iterdir()} - {"generation_config.json"}
    loaded = transformers.AutoModelForCausalLM.from_pretrained("out").eval()
    inputs = torch.arange(6).view(1, 6)
    assert torch.equal(loaded(inputs).logits, model.eval()(inputs).logits)


def test_an_option_that_no_installed_format_takes_is_refused(capfd, cwd, tied, monkeypatch):
    formats = Registry({"safetensors": "accel_cli.commands.checkpoint_operations:SAFETENSORS"}, "accel.none")
    monkeypatch.setattr(checkpoint, "EXPORTS", formats)
    result = export(capfd, "--layout", "nested")
    assert result.returncode == 2
    assert "--layout has no effect with --format safetensors. Leave it out." in result.stderr
    assert export(capfd).returncode == 0
