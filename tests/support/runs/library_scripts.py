"""A script that trains tiny models with the libraries of its users, and prints their losses; it names nothing of accel.

`python library_scripts.py sft dpo` trains with these libraries, one after the other. A process can fail, pause or be preempted at a
step, by variables; with `CALLBACK`, each Trainer has an `AccelCallback`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import torch
from torch.nn import functional
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

RANK, SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
STEPS = int(os.environ.get("STEPS", "4"))
NUM_SAMPLES, GLOBAL_BATCH, VOCABULARY = 32, 8, 43
OPTIONS = {
    "per_device_train_batch_size": GLOBAL_BATCH // SIZE,
    "max_steps": STEPS,
    "logging_steps": 1,
    "report_to": [],
    "save_strategy": "steps",
    "save_steps": 2,
    "disable_tqdm": True,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
}
TRL_OPTIONS = OPTIONS | {"bf16": False, "gradient_checkpointing": False}


class Events(TrainerCallback):
    """Do at a step what the variables say, on the last rank."""

    def on_step_begin(self, args, state, control, **kwargs):  # noqa: ARG002 - the interface
        interrupt(state.global_step)


def interrupt(step):
    """Fail, wait or get a signal before a step, counted from 0."""
    is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if RANK != SIZE - 1 or not is_first:
        return
    if str(step) == os.environ.get("FAIL_AT"):
        raise ValueError("the test failed here")
    if str(step) == os.environ.get("PREEMPT_AT"):
        os.kill(os.getpid(), signal.SIGTERM)
    if str(step) == os.environ.get("PAUSE_AT"):
        time.sleep(3600)


def build_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(VOCABULARY - 3))]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokens = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=words[2]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens)


def build_llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config)


def draw_tokens():
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(3, VOCABULARY, (NUM_SAMPLES, 16), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def write_texts(offset=0, length=6):
    return [
        " ".join(f"w{(number * 7 + word * 3) % 40}" for word in range(length))
        for number in range(offset, offset + NUM_SAMPLES)
    ]


# Trainers --------------------------------------------------------------------------------


def build_trainer(folder, model=None):
    rows = draw_tokens()
    options = OPTIONS | {"per_device_eval_batch_size": 4}
    arguments = TrainingArguments(folder, **options)
    return Trainer(model or build_llama(), arguments, train_dataset=rows, eval_dataset=rows[:10])


def build_lora(folder):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return build_trainer(folder, get_peft_model(build_llama(), config))


def build_sft(folder):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(folder, max_length=32, **TRL_OPTIONS)
    data = Dataset.from_dict({"text": write_texts()})
    return SFTTrainer(build_llama(), args=arguments, train_dataset=data, processing_class=build_tokenizer())


def build_dpo(folder):
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    columns = {
        "prompt": write_texts(),
        "chosen": write_texts(1, length=5),
        "rejected": write_texts(2, length=4),
    }
    return DPOTrainer(
        build_llama(),
        build_llama(),
        args=DPOConfig(folder, max_length=32, **TRL_OPTIONS),
        train_dataset=Dataset.from_dict(columns),
        processing_class=build_tokenizer(),
    )


def build_grpo(folder):
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def count_words(completions, **_):
        return [float(len(set(completion.split()))) for completion in completions]

    return GRPOTrainer(
        build_llama(),
        reward_funcs=count_words,
        args=GRPOConfig(folder, num_generations=4, max_completion_length=6, **TRL_OPTIONS),
        train_dataset=Dataset.from_dict({"prompt": write_texts()}),
        processing_class=build_tokenizer(),
    )


def build_embeddings(folder):
    from accelerate import PartialState
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
        models,
    )
    from sentence_transformers.losses import CosineSimilarityLoss

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    state = PartialState(cpu=True)
    if state.is_main_process:
        BertModel(config).save_pretrained("bert")
        build_tokenizer().save_pretrained("bert")
    state.wait_for_everyone()
    layers = [models.Transformer("bert", max_seq_length=32), models.Pooling(16)]
    model = SentenceTransformer(modules=layers, device="cpu")
    columns = {
        "first": write_texts(),
        "second": write_texts(1, length=5),
        "score": [number % 5 / 4 for number in range(NUM_SAMPLES)],
    }
    arguments = SentenceTransformerTrainingArguments(folder, **OPTIONS)
    data = Dataset.from_dict(columns)
    return SentenceTransformerTrainer(model, arguments, data, loss=CosineSimilarityLoss(model))


TRAINERS = {
    "trainer": build_trainer,
    "lora": build_lora,
    "sft": build_sft,
    "dpo": build_dpo,
    "grpo": build_grpo,
    "embeddings": build_embeddings,
}


def run_trainer(name):
    """Train with a Trainer, and return its losses and rewards."""
    trainer = TRAINERS[name](f"out-{name}")
    if "CALLBACK" in os.environ:
        from accel_runtime.transformers import AccelCallback

        trainer.add_callback(AccelCallback(trainer))
    trainer.add_callback(Events())
    trainer.train()
    facts = {"size": trainer.args.world_size, "losses": read_history(trainer, "loss")}
    if name == "grpo":
        facts["rewards"] = read_history(trainer, "reward")
    if name == "trainer" and "CALLBACK" not in os.environ:
        facts |= use_trained(trainer)
    return facts


def use_trained(trainer):
    """Evaluate, predict, save, load and resume; return what came out."""
    evaluated = trainer.evaluate()["eval_loss"]
    predictions = trainer.predict(trainer.eval_dataset)
    trainer.save_model("exported")
    trainer.accelerator.wait_for_everyone()
    loaded = LlamaForCausalLM.from_pretrained("exported").state_dict()
    trained = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    resumed = build_trainer("out-trainer")
    resumed.train(resume_from_checkpoint="out-trainer/checkpoint-2")
    return {
        "evaluated": evaluated,
        "predicted": predictions.predictions.shape,
        "mean": float(predictions.predictions.mean()),
        "exported": all(torch.equal(tensor, trained[key]) for key, tensor in loaded.items()),
        "resumed": read_history(resumed, "loss"),
    }


def read_history(trainer, key):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


# A script of Diffusers, with its own loop -------------------------------------------------


def run_diffusion():
    """Train a denoiser with the Accelerator of Accelerate, as the scripts of Diffusers do; return the losses."""
    from accelerate import Accelerator
    from accelerate.utils import set_seed
    from diffusers import DDPMScheduler, UNet2DModel
    from diffusers.optimization import get_scheduler

    set_seed(0)
    accelerator = Accelerator()
    model = UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        add_attention=False,
    )
    schedule = DDPMScheduler(num_train_timesteps=50)
    generator = torch.Generator().manual_seed(1)
    images, noise = (torch.randn(NUM_SAMPLES, 1, 8, 8, generator=generator) for _ in range(2))
    times = torch.randint(0, 50, (NUM_SAMPLES,), generator=generator)
    data = torch.utils.data.TensorDataset(images, noise, times)
    loader = torch.utils.data.DataLoader(data, batch_size=GLOBAL_BATCH // SIZE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    lr_scheduler = get_scheduler("constant", optimizer)
    model, optimizer, loader, lr_scheduler = accelerator.prepare(model, optimizer, loader, lr_scheduler)
    losses = []
    for step, (image, added, timestep) in enumerate(loader):
        interrupt(step)
        with accelerator.accumulate(model):
            predicted = model(schedule.add_noise(image, added, timestep), timestep).sample
            loss = functional.mse_loss(predicted, added)
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    facts = {"size": accelerator.num_processes, "losses": losses}
    time.sleep(1)  # as torchrun does not wait for the threads of gloo: docs/design/leaving-gloo.md
    accelerator.end_training()
    return facts


if __name__ == "__main__":
    for name in sys.argv[1:]:
        facts = run_diffusion() if name == "diffusion" else run_trainer(name)
        if RANK == 0:
            print("FACTS", json.dumps({"library": name, **facts}), flush=True)
    time.sleep(1)  # threads of gloo that release tensors while Python exits abort the process
