"""Tensor parallelism of models that peft or a script has wrapped: plans apply below wrappers and to the layers of LoRA."""

from __future__ import annotations

import warnings

import pytest
import torch
from support.processes.ranks import preload
from torch import nn

from accel_runtime.parallel.tensor_parallel import plan_tensor_parallel

TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")


def build_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))


def build_lora(**options):
    """Return a model with random adapters."""
    from peft import LoraConfig

    config = {"r": 4, "target_modules": list(TARGETS), "init_lora_weights": False} | options
    return wrap_by_peft(LoraConfig(**config))


def wrap_by_peft(config):
    from peft import get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers warns of calls by peft
        return get_peft_model(build_llama(), config)


class Wrapper(nn.Module):
    """A wrapper that forwards the attributes of its model, as those of peft do."""

    def __init__(self, model):
        super().__init__()
        self.inner = model

    def __getattr__(self, name):
        return super().__getattr__(name) if name == "inner" else getattr(self.inner, name)

    def forward(self, *args, **options):
        return self.inner(*args, **options)


# Plans ---------------------------------------------------------------------------------


def test_the_plan_of_a_model_applies_below_a_wrapper():
    plain = plan_tensor_parallel(build_llama())
    assert set(plan_tensor_parallel(Wrapper(build_llama()))) == {f"inner.{name}" for name in plain}
    assert set(plan_tensor_parallel(Wrapper(Wrapper(build_llama())))) == {
        f"inner.inner.{name}" for name in plain
    }


def test_patterns_of_the_profile_are_those_of_the_wrapped_model():
    patterns = (("model.layers.*.mlp.up_proj", "colwise"), ("model.layers.*.mlp.down_proj", "rowwise"))
    names = set(plan_tensor_parallel(build_llama(), patterns))
    assert set(plan_tensor_parallel(Wrapper(build_llama()), patterns)) == {f"inner.{name}" for name in names}
    with pytest.raises(ValueError, match="matches no module"):
        plan_tensor_parallel(Wrapper(build_llama()), (("layers.*.up_proj", "colwise"),))


def test_lora_is_sharded_on_the_side_of_the_outputs_or_of_the_inputs():
    attention = "base_model.model.model.layers.0.self_attn."
    plan = plan_tensor_parallel(build_lora(modules_to_save=["lm_head"]))
    assert {name.removeprefix(attention) for name in plan if name.startswith(attention)} == {
        "q_proj.base_layer",
        "q_proj.lora_B.default",
        "v_proj.base_layer",
        "v_proj.lora_B.default",
        "o_proj.base_layer",
        "o_proj.lora_A.default",
        "k_proj",
    }
    assert {name for name in plan if "lm_head" in name} == {
        "base_model.model.lm_head.original_module",
        "base_model.model.lm_head.modules_to_save.default",
    }


def test_adapters_that_need_full_weights_are_rejected():
    from peft import IA3Config

    with pytest.raises(ValueError, match="q_proj: a variant of LoRA, such as DoRA"):
        plan_tensor_parallel(build_lora(use_dora=True))
    ia3 = IA3Config(target_modules=["q_proj"], feedforward_modules=[])
    with pytest.raises(ValueError, match=r"q_proj: peft\.tuners\.ia3\.layer\.Linear is an adapter"):
        plan_tensor_parallel(wrap_by_peft(ia3))
    with pytest.raises(ValueError, match="sequence_parallel cannot be applied to a layer with LoRA"):
        plan_tensor_parallel(build_lora(), (("model.layers.*.self_attn.q_proj", "sequence_parallel"),))


# Equal results -------------------------------------------------------------------------

CASES = {
    "LoRA": (build_lora, {}),
    "LoRA with a copy of the head": (build_lora, {"modules_to_save": ["lm_head"], "lora_bias": True}),
    "LoRA of embeddings and head": (
        build_lora,
        {"target_modules": ["embed_tokens", "lm_head", "up_proj", "k_proj"], "use_rslora": True},
    ),
    "a wrapper": (lambda: Wrapper(build_llama()), {}),
}


def train(sizes, case, folder=None):
    """Train for some steps; return losses, the gradients of the first step, and the state of the model."""
    from accel_runtime import Accelerator, ParallelismConfig

    accelerator = Accelerator(parallelism_config=ParallelismConfig(**sizes) if sizes else None)
    build, options = CASES[case]
    model = build(**options)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    generator, losses, gradients = torch.Generator().manual_seed(3), [], {}
    for _ in range(3):
        tokens = torch.randint(32, (2, 8), generator=generator)
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        gradients = gradients or {
            name.removeprefix("module."): getattr(p.grad, "full_tensor", lambda p=p: p.grad)().clone()
            for name, p in model.named_parameters()
            if p.requires_grad
        }
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = accelerator.get_state_dict(model)
    if folder is not None:
        unwrapped = accelerator.unwrap_model(model)
        options = {"is_main_process": accelerator.is_main_process, "save_function": accelerator.save}
        unwrapped.save_pretrained(f"{folder}/pretrained", state_dict=state, **options)
        accelerator.save_model(model, f"{folder}/model")
    return losses, gradients, state


def check_equal(ranks, sizes, case, folder=None):
    losses, gradients, state = train(None, case)
    results = ranks.run(train, sizes, case, folder)
    for result in results:
        torch.testing.assert_close(result[0], losses, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(result[1], gradients, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(dict(results[0][2]), dict(state), rtol=1e-4, atol=1e-5)
    return state


@pytest.fixture(scope="module")
def ranks(clusters):
    """Clusters whose ranks are forked after the import of peft, which takes seconds."""
    preload([clusters[2], clusters[4]], "peft", "transformers.models.llama.modeling_llama")
    return clusters


def test_training_lora_with_tensor_parallelism_equals_one_process(ranks, tmp_path):
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors.torch import load_file

    state = check_equal(ranks[2], {"tp_size": 2}, "LoRA", tmp_path)
    torch.testing.assert_close(load_file(tmp_path / "model" / "model.safetensors"), dict(state))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers warns of calls by peft
        loaded = PeftModel.from_pretrained(build_llama(), tmp_path / "pretrained")
    adapters = {name: value for name, value in state.items() if "lora_" in name}
    assert len(adapters) == 2 * len(TARGETS) * 2
    saved = get_peft_model_state_dict(loaded)
    torch.testing.assert_close(
        saved, {name.replace(".default", ""): value for name, value in adapters.items()}
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("world_size", "sizes"), [(2, {"tp_size": 2}), (4, {"dp_shard_size": 2, "tp_size": 2})]
)
def test_training_below_wrappers_equals_one_process(ranks, world_size, sizes, case):
    check_equal(ranks[world_size], sizes, case)
