"""Models of transformers from a configuration file, without downloads and without custom code."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from accel_runtime.extensions.estimate.memory import EstimateError
from accel_runtime.extensions.estimate.pretrained import build_from_configuration, is_configuration

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50,
    "max_position_embeddings": 64,
}  # fmt: skip
BERT = {
    "model_type": "bert", "architectures": ["BertForSequenceClassification"], "hidden_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 50,
}  # fmt: skip
VIT = {
    "model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 4, "intermediate_size": 64, "image_size": 32, "patch_size": 8,
}  # fmt: skip

WAV2VEC = {
    "model_type": "wav2vec2", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
    "intermediate_size": 64, "vocab_size": 50, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    def write(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return write


@pytest.fixture
def transformers():
    return pytest.importorskip("transformers")


def list_shapes(spec):
    return {name: list(value.shape) for name, value in spec.inputs.items()}


@pytest.mark.parametrize(
    ("config", "name", "inputs"),
    [
        (LLAMA, "LlamaForCausalLM", {"input_ids": [1, 64], "labels": [1, 64]}),
        (BERT, "BertForSequenceClassification", {"input_ids": [1, 512], "labels": [1]}),
        (VIT, "ViTForImageClassification", {"pixel_values": [1, 3, 32, 32], "labels": [1]}),
        ({**LLAMA, "architectures": None}, "LlamaForCausalLM", {"input_ids": [1, 64], "labels": [1, 64]}),
        (
            {**LLAMA, "max_position_embeddings": 9000},
            "LlamaForCausalLM",
            {"input_ids": [1, 2048], "labels": [1, 2048]},
        ),
    ],
)
def test_the_configuration_determines_the_model_class_and_a_batch(folder, transformers, config, name, inputs):
    spec = build_from_configuration(str(folder(config)), {})
    assert type(spec.model).__name__ == name
    assert all(p.is_meta for p in spec.model.parameters())
    assert list_shapes(spec) == inputs


def test_given_sizes_override_the_configuration_file(folder, transformers):
    file = folder(LLAMA) / "config.json"
    assert list_shapes(build_from_configuration(str(file), {"batch_size": 3, "seq_length": 7})) == {
        "input_ids": [3, 7],
        "labels": [3, 7],
    }


@pytest.mark.parametrize(
    ("config", "sizes", "message"),
    [
        (
            VIT,
            {"seq_length": 7},
            "--seq-length has no effect on ViTForImageClassification: its input pixel_values",
        ),
        (
            {**WAV2VEC, "architectures": ["Wav2Vec2ForCTC"]},
            {"batch_size": 2},
            "--batch-size has no effect on Wav2Vec2ForCTC: no batch is known for its input input_values",
        ),
    ],
)
def test_a_size_without_an_effect_on_the_model_is_rejected(folder, transformers, config, sizes, message):
    with pytest.raises(EstimateError, match=message):
        build_from_configuration(str(folder(config)), sizes)


def test_custom_code_of_a_model_is_not_executed(folder, transformers):
    path = folder({"model_type": "mine", "auto_map": {"AutoConfig": "evil.Config"}})
    (path / "evil.py").write_text("raise SystemExit('run')")
    with pytest.raises(EstimateError, match="transformers could not build the model"):
        build_from_configuration(str(path), {})


def test_missing_transformers_is_reported_with_the_install_command(folder, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "transformers" else find(name)
    )
    with pytest.raises(EstimateError, match=r"-m pip install .transformers>=5"):
        build_from_configuration(str(folder(LLAMA)), {})


def test_a_folder_without_a_configuration_is_rejected(tmp_path):
    with pytest.raises(EstimateError, match=r"File not found: .*config\.json"):
        build_from_configuration(str(tmp_path), {})


@pytest.mark.parametrize(
    ("target", "expected"), [(".", True), ("a/config.json", True), ("a.py:f", False), ("a:f", False)]
)
def test_folders_and_json_files_are_configurations(target, expected):
    assert is_configuration(target) is expected


@pytest.mark.slow
def test_a_model_of_the_hub_is_built_from_its_configuration_in_the_cache(tmp_path, cwd):
    pytest.importorskip("transformers")
    model = tmp_path / "hub" / "models--tiny--llama"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("abc")
    (model / "snapshots" / "abc").mkdir(parents=True)
    (model / "snapshots" / "abc" / "config.json").write_text(json.dumps(LLAMA))
    code = (
        "from accel_runtime.extensions.estimate.pretrained import *\n"
        "assert is_configuration('tiny/llama')\n"
        "print(type(build_from_configuration('tiny/llama', {}).model).__name__)\n"
        "build_from_configuration('tiny/other', {})\n"
    )
    environ = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert result.stdout == "LlamaForCausalLM\n"
    assert "EstimateError: Cannot read the configuration of tiny/other from the Hub: " in result.stderr


@pytest.mark.parametrize(
    ("target", "is_id"),
    [
        ("gpt2", True),
        ("Qwen/Qwen3-8B", True),
        ("script", False),
        ("script.py", False),
        ("package.module", False),
        ("script:make", False),
        ("folder/script.py:make", False),
    ],
)
def test_a_model_id_differs_from_a_factory(cwd, monkeypatch, target, is_id):
    monkeypatch.syspath_prepend(str(cwd))
    (cwd / "script.py").touch()
    assert is_configuration(target) is is_id
