"""Classify texts with transformers: padded batches, a learning rate schedule, exact counts, checkpoints.

accel launch --nproc-per-node 2 examples/text_classification.py
accel launch --nproc-per-node 2 --resume examples/text_classification.py
"""

from __future__ import annotations

import argparse
import random
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    get_linear_schedule_with_warmup,
)

from accel_runtime import Accelerator, DataLoaderConfiguration, ProjectConfiguration, set_seed

NOUNS = ["film", "book", "meal", "room", "song", "game", "coat", "lamp"]
GOOD, BAD = ["good", "great", "lovely", "fine"], ["bad", "poor", "dull", "awful"]
FILLERS = ["really", "quite", "the", "this", "we", "found", "it", "and", "then"]


def reviews(count: int, seed: int) -> Dataset:
    """Return reviews of 2 to 10 words with label 1 if they praise; `not` turns the next word around."""
    draw = random.Random(seed)
    texts, labels = [], []
    for _ in range(count):
        praise, negated = draw.random() < 0.5, draw.random() < 0.3
        words = [*draw.choices(FILLERS, k=draw.randint(0, 7)), draw.choice(NOUNS)]
        verdict = ["not"] * negated + [draw.choice(GOOD if praise != negated else BAD)]
        texts.append(" ".join(words + verdict))
        labels.append(int(praise))
    return Dataset.from_dict({"text": texts, "labels": labels})


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of whole words; for your own model, `AutoTokenizer.from_pretrained(NAME)`."""
    words = ["[PAD]", "[UNK]", "not", *NOUNS, *GOOD, *BAD, *FILLERS]
    tokenizer = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")


def build_model(tokenizer: PreTrainedTokenizerFast) -> BertForSequenceClassification:
    """Return a tiny random model; for your own, `AutoModelForSequenceClassification.from_pretrained(NAME)`."""
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    # Dropout draws other masks on two processes than on one; without it, both train the same.
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(
        vocab_size=len(tokenizer), max_position_embeddings=16, num_labels=2, **size, **dropout
    )
    return BertForSequenceClassification(config)


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: Any) -> tuple[int, int]:
    """Return how many reviews are classified correctly, and how many there are."""
    model.eval()
    correct = count = 0
    for batch in loader:
        labels = batch.pop("labels")
        guesses, labels = accelerator.gather_for_metrics((model(**batch).logits.argmax(-1), labels))
        correct, count = correct + int((guesses == labels).sum()), count + len(labels)
    return correct, count


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a classifier of texts.")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--save-every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument(
        "--stop-after", type=int, help="leave after this step, as if the machine were taken away"
    )
    parser.add_argument("--project-dir", default="text-classification")
    args = parser.parse_args()

    accelerator = Accelerator(
        dataloader_config=DataLoaderConfiguration(split_batches=True, even_batches=False),
        project_config=ProjectConfiguration(
            args.project_dir, automatic_checkpoint_naming=True, total_limit=2
        ),
    )
    set_seed(0)
    tokenizer = build_tokenizer()
    with accelerator.main_process_first():  # the others read the cache of the first, if the data are on disk
        train_set, test_set = (
            split.map(lambda rows: tokenizer(rows["text"]), batched=True, remove_columns=["text"])
            for split in (reviews(500, seed=1), reviews(203, seed=2))
        )
    collate = DataCollatorWithPadding(tokenizer)
    model = build_model(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    train = DataLoader(train_set, batch_size=32, shuffle=True, collate_fn=collate)
    test = DataLoader(test_set, batch_size=64, collate_fn=collate)
    # The schedule counts global batches, since split_batches makes 32 the size of these.
    scheduler = get_linear_schedule_with_warmup(optimizer, 10, args.epochs * len(train))
    model, optimizer, train, test, scheduler = accelerator.prepare(model, optimizer, train, test, scheduler)

    accelerator.resume()  # with --resume, or after a restart: the newest checkpoint
    for epoch in range(train.epoch, args.epochs):
        model.train()
        for batch in train:  # after resume(), the remaining batches of the epoch
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if accelerator.preempted() or optimizer.steps == args.stop_after:
                accelerator.save_state()
                accelerator.print(f"saved at step {optimizer.steps}")
                return
            if optimizer.steps % args.save_every == 0:
                accelerator.save_state(async_save=True)
        correct, count = evaluate(accelerator, model, test)
        rate = scheduler.get_last_lr()[0]
        accelerator.print(f"epoch {epoch + 1}: {correct} of {count} are correct, learning rate {rate:.5f}")


if __name__ == "__main__":
    main()
