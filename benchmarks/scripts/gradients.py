"""The gradients of every optimizer step beside those of one process on the same samples: `gradients.py LIBRARY`."""

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
_COUNTS = (16, 13, 21, 33)
"""Lengths of the dataset; all but the first leave a ragged tail on several processes."""
_WINDOWS = (1, 3, 4)
_SEEDS = range(3)
_LONG = 0.2
"""How many of the rows ask for all their tokens."""
_IGNORED = -100
"""What cross_entropy leaves out."""


class Bigram(nn.Module):
    """A tiny language model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(_WORDS, _WIDTH)
        self.mix = nn.Linear(_WIDTH, _WIDTH)
        self.head = nn.Linear(_WIDTH, _WORDS)

    def forward(self, tokens: torch.Tensor) -> Any:
        """Logits of what follows each token."""
        return self.head(torch.tanh(self.mix(self.embed(tokens))))


class Text:
    """Rows of tokens; four in five ask for one or two of them, the fifth for all."""

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
    exact = name == "accel_runtime"
    # Without repeats Accelerate's processes take different numbers of steps, and wait for each other for ever.
    options = {"dataloader_config": library.DataLoaderConfiguration(even_batches=False)} if exact else {}
    accelerator = library.Accelerator(cpu=True, **options)
    errors = {
        str(window): [
            error
            for count in _COUNTS
            for seed in _SEEDS
            for error in _epoch(accelerator, Text(count, seed), window, weigh=exact)
        ]
        for window in _WINDOWS
    }
    if accelerator.is_main_process:
        print(json.dumps(errors))
    if dist.is_initialized():
        # gloo's threads still drop the last tensors; leaving under them would abort.
        time.sleep(0.1)
        dist.destroy_process_group()


def _epoch(accelerator: Any, text: Text, window: int, *, weigh: bool) -> list[float]:
    accelerator.gradient_accumulation_steps = window
    model = Bigram()
    # Parameters stay, so that every step is compared at the same place.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loader: Any = DataLoader(range(len(text.tokens)), batch_size=_SIZE)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    found = []
    for ids in loader:
        with accelerator.accumulate(model):
            loss = text.loss(model, ids)
            accelerator.backward(loss, **({"weight": text.count_tokens(ids)} if weigh else {}))
            if accelerator.sync_gradients:
                found.append(_flat(model))
            optimizer.step()
            optimizer.zero_grad()
    wanted = _alone(text, _SIZE * accelerator.num_processes * window)
    assert len(found) == len(wanted), f"{len(found)} steps where one process takes {len(wanted)}"
    return [float((own - right).norm() / right.norm()) for own, right in zip(found, wanted, strict=True)]


def _alone(text: Text, samples: int) -> list[torch.Tensor]:
    """The gradient of each window of one process, all its samples at once."""
    wanted = []
    for ids in torch.split(torch.arange(len(text.tokens)), samples):
        model = Bigram()
        text.loss(model, ids).backward()  # type: ignore[no-untyped-call]
        wanted.append(_flat(model))
    return wanted


def _flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


main()
