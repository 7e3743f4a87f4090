"""Fine-tune a causal language model with LoRA, replicated or sharded, and reload the adapter.

accel launch --nproc-per-node 2 examples/lora.py
ACCEL_PARALLEL_DP_SHARD=auto accel launch --nproc-per-node 2 examples/lora.py
"""

from __future__ import annotations

import argparse
import random
import warnings
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from accel_runtime import Accelerator, DataLoaderConfiguration, set_seed

# peft 0.21 uses a name that transformers 5 has renamed.
warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)

WORDS = ["<pad>", "mon", "tue", "wed", "thu", "fri", "sat", "sun", "<end>"]


def weeks(count: int, seed: int) -> Dataset:
    """Return lines such as `sat sun mon tue <end>`, of different length, as tokens."""
    draw = random.Random(seed)
    starts = [(draw.randrange(7), draw.randint(1, 12)) for _ in range(count)]
    lines = [[WORDS[1 + (start + day) % 7] for day in range(days)] for start, days in starts]
    texts = Dataset.from_dict({"text": [" ".join([*line, "<end>"]) for line in lines]})
    return texts.map(
        lambda line: {"input_ids": [WORDS.index(word) for word in line["text"].split()]},
        remove_columns=["text"],
    )


def pad(lines: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Pad the lines of a batch to the longest, and ignore the padding in the loss."""
    tokens = [torch.tensor(line["input_ids"]) for line in lines]
    ids = nn.utils.rnn.pad_sequence(tokens, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(line) for line in tokens], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask == 1, -100)}


def base_model() -> PreTrainedModel:
    """Return a tiny random model; for your own, `AutoModelForCausalLM.from_pretrained(NAME)`."""
    torch.manual_seed(0)
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), pad_token_id=0, initializer_range=0.1, **size))


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: Any) -> tuple[float, int]:
    """Return the mean loss of a token over the dataset, and the number of tokens."""
    model.eval()
    loss = tokens = 0.0
    for batch in loader:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        labels = batch["labels"][:, 1:]
        losses = nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels, reduction="none")
        lines = accelerator.gather_for_metrics(torch.stack([losses.sum(1), (labels != -100).sum(1)], dim=1))
        loss, tokens = loss + lines[:, 0].sum().item(), tokens + lines[:, 1].sum().item()
    return loss / tokens, int(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune a language model with LoRA.")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--output", default="adapter")
    args = parser.parse_args()

    # The global batches, and with weighted losses the gradients, are equal on any number of processes.
    exact = DataLoaderConfiguration(split_batches=True, even_batches=False)
    accelerator = Accelerator(dataloader_config=exact)
    set_seed(0)
    adapter = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base_model(), adapter)
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=3e-3)
    train = DataLoader(weeks(args.samples, seed=1), batch_size=32, shuffle=True, collate_fn=pad)
    test = DataLoader(weeks(101, seed=2), batch_size=32, collate_fn=pad)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)

    for epoch in range(args.epochs):
        model.train()
        for batch in train:
            loss = model(**batch).loss
            accelerator.backward(loss, weight=(batch["labels"][:, 1:] != -100).sum())
            accelerator.clip_grad_norm_(learned, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        loss, tokens = evaluate(accelerator, model, test)
        accelerator.print(f"epoch {epoch + 1}: loss {loss:.4f} over {tokens} tokens")

    unwrapped: Any = accelerator.unwrap_model(model)
    weights = accelerator.get_state_dict(model)  # on every process: a sharded model is gathered
    unwrapped.save_pretrained(args.output, is_main_process=accelerator.is_main_process, state_dict=weights)
    accelerator.wait_for_everyone()

    reloaded = PeftModel.from_pretrained(base_model(), args.output)
    reloaded, test = accelerator.prepare(
        reloaded, DataLoader(weeks(101, seed=2), batch_size=32, collate_fn=pad)
    )
    assert evaluate(accelerator, reloaded, test) == (loss, tokens)
    accelerator.print(f"the adapter in {args.output} gives the same loss")


if __name__ == "__main__":
    main()
