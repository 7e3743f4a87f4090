"""Train a tiny language model on lines of very different length, so that every character counts the same.

python examples/token_weights.py
torchrun --nproc-per-node 2 examples/token_weights.py   # the same losses

Lines are padded to the longest of their batch, so batches have very different numbers of characters. `weight=` says
how many, and the gradient is the mean over all characters of all micro-batches on all processes.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import importlib
import io

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from accel_runtime import Accelerator

PADDING = -100  # what cross_entropy leaves out


def lines_of_text() -> list[torch.Tensor]:
    """Return the Zen of Python, which comes with Python: each line as numbers of characters, short lines first."""
    with contextlib.redirect_stdout(io.StringIO()):
        zen = importlib.import_module("this").s
    lines = sorted(filter(None, codecs.decode(zen, "rot13").splitlines()), key=len)
    letters = sorted(set("".join(lines)))
    return [torch.tensor([letters.index(letter) for letter in line]) for line in lines]


class Letters(nn.Module):  # noqa: D101
    def __init__(self, letters: int, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(letters, width)
        self.remember = nn.GRU(width, width, batch_first=True)
        self.guess = nn.Linear(width, letters)

    def forward(self, text: torch.Tensor) -> torch.Tensor:  # noqa: D102
        hidden, _ = self.remember(self.embed(text.clamp(min=0)))
        logits: torch.Tensor = self.guess(hidden)
        return logits


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a language model on the Zen of Python.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--micro-batches", type=int, default=4, help="of one step, over all processes")
    parser.add_argument("--lines", type=int, default=2, help="of one micro-batch")
    args = parser.parse_args()

    torch.manual_seed(0)
    accelerator = Accelerator()
    world, rank = accelerator.num_processes, accelerator.process_index
    accelerator.gradient_accumulation_steps = args.micro_batches // world
    lines = lines_of_text()
    model = Letters(1 + max(int(line.max()) for line in lines))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)

    step = args.lines * args.micro_batches
    whole = lines[: len(lines) // step * step]
    batches = [whole[start : start + args.lines] for start in range(0, len(whole), args.lines)]
    for epoch in range(args.epochs):
        total = torch.zeros(2, device=accelerator.device)
        for batch in batches[rank::world]:
            text = pad_sequence(batch, batch_first=True, padding_value=PADDING).to(accelerator.device)
            with accelerator.accumulate(model):
                logits, targets = model(text[:, :-1]), text[:, 1:]
                loss = nn.functional.cross_entropy(logits.transpose(1, 2), targets, ignore_index=PADDING)
                count = (targets != PADDING).sum()
                accelerator.backward(loss, weight=count)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            total += torch.stack([loss.detach() * count, count])
        mean, characters = accelerator.reduce(total).tolist()
        accelerator.print(
            f"epoch {epoch + 1:2}: loss {mean / characters:.4f} over {characters:.0f} characters"
        )


if __name__ == "__main__":
    main()
