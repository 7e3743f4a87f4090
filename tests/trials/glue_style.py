"""A text classification loop in the style of the scripts for GLUE: epochs or steps are saved, and resumed by name.

Only the import of `Accelerator` and `set_seed` is accel's. `--checkpointing_steps` is a number or `epoch`;
`--die_at_step` ends the process without a word, as a machine that is taken away does.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_scheduler

from accel_runtime import Accelerator
from accel_runtime.logging import get_logger
from accel_runtime.utils import set_seed

logger = get_logger(__name__)


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--per_device_train_batch_size", type=int, default=4)
    parser.add_argument("--per_device_eval_batch_size", type=int, default=5)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--weight_decay", type=float, default=0.01)
    parser.add_argument("--num_train_epochs", type=int, default=2)
    parser.add_argument("--max_train_steps", type=int)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--num_warmup_steps", type=int, default=2)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--checkpointing_steps")
    parser.add_argument("--resume_from_checkpoint")
    parser.add_argument("--die_at_step", type=int)
    return parser.parse_args()


def load_examples(count, seed):
    """Return sentences of random tokens with different lengths; the label is a function of the tokens."""
    generator = torch.Generator().manual_seed(seed)
    examples = []
    for _ in range(count):
        length = int(torch.randint(3, 9, (), generator=generator))
        tokens = torch.randint(1, 40, (length,), generator=generator).tolist()
        examples.append({"input_ids": tokens, "labels": int(sum(tokens) % 3 == 0)})
    return examples


def collate(examples):
    """Pad each batch to its longest sentence."""
    longest = max(len(example["input_ids"]) for example in examples)
    padded = [example["input_ids"] + [0] * (longest - len(example["input_ids"])) for example in examples]
    input_ids = torch.tensor(padded)
    labels = torch.tensor([example["labels"] for example in examples])
    return {"input_ids": input_ids, "attention_mask": (input_ids > 0).long(), "labels": labels}


def main():
    args = parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    logger.info(accelerator.state)
    set_seed(11)
    if accelerator.is_main_process:
        args.output_dir.mkdir(parents=True, exist_ok=True)
    accelerator.wait_for_everyone()

    with accelerator.main_process_first():
        train_dataset, eval_dataset = load_examples(46, 1), load_examples(21, 2)
    config = BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
        num_labels=2,
    )
    model = BertForSequenceClassification(config)
    train_dataloader = DataLoader(
        train_dataset, shuffle=True, collate_fn=collate, batch_size=args.per_device_train_batch_size
    )
    eval_dataloader = DataLoader(eval_dataset, collate_fn=collate, batch_size=args.per_device_eval_batch_size)
    no_decay = ["bias", "LayerNorm.weight"]
    named = list(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {
                "params": [p for n, p in named if not any(part in n for part in no_decay)],
                "weight_decay": args.weight_decay,
            },
            {"params": [p for n, p in named if any(part in n for part in no_decay)], "weight_decay": 0.0},
        ],
        lr=args.learning_rate,
    )
    updates_per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    max_train_steps = args.max_train_steps or args.num_train_epochs * updates_per_epoch
    lr_scheduler = get_scheduler(
        name="linear",
        optimizer=optimizer,
        num_warmup_steps=args.num_warmup_steps,
        num_training_steps=max_train_steps,
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    updates_per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    max_train_steps = args.max_train_steps or args.num_train_epochs * updates_per_epoch
    num_train_epochs = math.ceil(max_train_steps / updates_per_epoch)
    checkpointing_steps = args.checkpointing_steps
    if checkpointing_steps is not None and checkpointing_steps.isdigit():
        checkpointing_steps = int(checkpointing_steps)

    completed_steps, starting_epoch, resume_step = 0, 0, None
    if args.resume_from_checkpoint:
        accelerator.print(f"Resumed from checkpoint: {args.resume_from_checkpoint}")
        accelerator.load_state(args.resume_from_checkpoint)
        training_difference = Path(args.resume_from_checkpoint).stem
        if "epoch" in training_difference:
            starting_epoch = int(training_difference.replace("epoch_", "")) + 1
            completed_steps = starting_epoch * updates_per_epoch
        else:
            # The steps of checkpoints are optimizer steps, and those of the loader micro-batches.
            resume_step = int(training_difference.replace("step_", "")) * args.gradient_accumulation_steps
            starting_epoch = resume_step // len(train_dataloader)
            completed_steps = resume_step // args.gradient_accumulation_steps
            resume_step -= starting_epoch * len(train_dataloader)

    for epoch in range(starting_epoch, num_train_epochs):
        model.train()
        total_loss = 0.0
        if args.resume_from_checkpoint and epoch == starting_epoch and resume_step is not None:
            active_dataloader = accelerator.skip_first_batches(train_dataloader, resume_step)
        else:
            active_dataloader = train_dataloader
        for batch in active_dataloader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                total_loss += loss.detach().float()
                accelerator.backward(loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                completed_steps += 1
                print(
                    f"rank {accelerator.process_index} step {completed_steps} loss {loss.item()!r}",
                    flush=True,
                )
                if isinstance(checkpointing_steps, int) and completed_steps % checkpointing_steps == 0:
                    accelerator.save_state(args.output_dir / f"step_{completed_steps}")
                if completed_steps == args.die_at_step:
                    os._exit(9)
            if completed_steps >= max_train_steps:
                break

        model.eval()
        correct = total = 0
        for batch in eval_dataloader:
            with torch.no_grad():
                predictions = model(**batch).logits.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            correct += int((predictions == references).sum())
            total += len(references)
        logger.info("epoch %d: loss %f", epoch, total_loss / len(train_dataloader))
        accelerator.print(f"epoch {epoch}: accuracy {correct}/{total}")
        if checkpointing_steps == "epoch":
            accelerator.save_state(args.output_dir / f"epoch_{epoch}")

    digest = hashlib.sha256()
    for tensor in accelerator.unwrap_model(model).state_dict().values():
        digest.update(tensor.cpu().numpy().tobytes())
    accelerator.print(f"{completed_steps} steps, weights {digest.hexdigest()[:16]}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
