"""Errors of the gradients of all optimizer steps, compared with one process on the same samples: `gradients.py LIBRARY`."""

from __future__ import annotations

import importlib
import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

_WORDS, _WIDTH, _LENGTH = 11, 6, 24
_SIZE = 2
_LENGTHS = (16, 13, 21, 33)
"""Lengths of the dataset; all but the first have an incomplete last batch on several processes."""
_ACCUMULATION = (1, 3, 4)
_SEEDS = range(3)
_LONG = 0.2
"""Fraction of rows with targets for all tokens."""
_IGNORED = -100
"""Target that cross_entropy leaves out."""


class Bigram(nn.Module):
    """A tiny language model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(_WORDS, _WIDTH)
        self.mix = nn.Linear(_WIDTH, _WIDTH)
        self.head = nn.Linear(_WIDTH, _WORDS)

    def forward(self, tokens: torch.Tensor) -> Any:
        """Return the logits of the next tokens."""
        return self.head(torch.tanh(self.mix(self.embed(tokens))))


class Text:
    """Rows of tokens; four in five have one or two targets, the fifth has targets for all tokens."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randint(_WORDS, (count, _LENGTH + 1), generator=generator)
        lengths = torch.randint(1, 3, (count,), generator=generator)
        lengths[torch.rand(count, generator=generator) < _LONG] = _LENGTH
        self.tokens, self.targets = rows[:, :-1], rows[:, 1:].clone()
        self.targets[torch.arange(_LENGTH) >= lengths[:, None]] = _IGNORED

    def loss(self, model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        """Return the mean loss over the tokens of the targets."""
        return nn.functional.cross_entropy(model(self.tokens[ids]).flatten(0, 1), self.targets[ids].flatten())

    def count_tokens(self, ids: torch.Tensor) -> int:
        """Return the number of tokens of the targets."""
        return int((self.targets[ids] != _IGNORED).sum())


def main() -> None:
    """Print the relative errors by micro-batches per accumulation cycle: `{accumulation: [...]}`."""
    name = sys.argv[1]
    library = importlib.import_module(name)
    is_accel = name == "accel_runtime"
    # Without padding, processes of Accelerate take different numbers of steps, and hang.
    options = {"dataloader_config": library.DataLoaderConfiguration(even_batches=False)} if is_accel else {}
    accelerator = library.Accelerator(cpu=True, **options)
    errors = {
        str(steps): [
            error
            for length in _LENGTHS
            for seed in _SEEDS
            for error in _compute_errors(accelerator, Text(length, seed), steps, is_weighted=is_accel)
        ]
        for steps in _ACCUMULATION
    }
    if accelerator.is_main_process:
        print(json.dumps(errors))
    if dist.is_initialized():
        # The exit would abort while threads of gloo release the last tensors.
        time.sleep(0.1)
        dist.destroy_process_group()


def _compute_errors(accelerator: Any, text: Text, steps: int, *, is_weighted: bool) -> list[float]:
    accelerator.gradient_accumulation_steps = steps
    model = Bigram()
    # Parameters do not change, so that all steps are compared at the same point.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loader: Any = DataLoader(range(len(text.tokens)), batch_size=_SIZE)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    gradients = []
    for ids in loader:
        with accelerator.accumulate(model):
            loss = text.loss(model, ids)
            accelerator.backward(loss, **({"weight": text.count_tokens(ids)} if is_weighted else {}))
            if accelerator.sync_gradients:
                gradients.append(_flatten_gradients(model))
            optimizer.step()
            optimizer.zero_grad()
    exact = _compute_exact_gradients(text, _SIZE * accelerator.num_processes * steps)
    assert len(gradients) == len(exact), f"{len(gradients)} steps, but one process takes {len(exact)}"
    return [float((a - b).norm() / b.norm()) for a, b in zip(gradients, exact, strict=True)]


def _compute_exact_gradients(text: Text, samples: int) -> list[torch.Tensor]:
    """Return the gradient of each accumulation cycle on one process, computed from all samples at once."""
    gradients = []
    for ids in torch.split(torch.arange(len(text.tokens)), samples):
        model = Bigram()
        text.loss(model, ids).backward()  # type: ignore[no-untyped-call]
        gradients.append(_flatten_gradients(model))
    return gradients


def _flatten_gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


main()
