"""Train a tiny language model on functions of very different length, in batches by a budget of tokens.

python examples/token_batches.py
torchrun --nproc-per-node 2 examples/token_batches.py   # the same batches, two a step
python examples/token_batches.py --compare              # padding and waits, beside batches of a fixed size

The texts are the functions of Python's standard library, which comes with Python.
"""

from __future__ import annotations

import argparse
import ast
import re
import sysconfig
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from accel_runtime import Accelerator, DataLoaderConfiguration

VOCABULARY = 1000
LONGEST = 1024  # tokens of a sample; longer functions are truncated
PADDING = -100  # what cross_entropy leaves out


def read_functions(modules: int | None = None) -> list[list[str]]:
    """Return the tokens of each function in the modules of the standard library, or in the first of them."""
    functions = []
    library = Path(sysconfig.get_path("stdlib"))
    for file in islice(sorted(library.glob("*.py")), modules):
        source = file.read_text("utf-8", "replace")
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                text = "\n".join(lines[node.lineno - 1 : node.end_lineno])
                functions.append(re.findall(r"\w+|[^\w\s]", text)[:LONGEST])
    return functions


def to_ids(functions: list[list[str]]) -> list[torch.Tensor]:
    """Return the functions as numbers of the most frequent tokens; 0 is any other."""
    counts = Counter(token for function in functions for token in function)
    numbers = {token: number for number, (token, _) in enumerate(counts.most_common(VOCABULARY - 1), start=1)}
    return [torch.tensor([numbers.get(token, 0) for token in function]) for function in functions]


def pad(samples: list[torch.Tensor]) -> torch.Tensor:
    return pad_sequence(samples, batch_first=True, padding_value=PADDING)


def count_targets(sample: torch.Tensor) -> int:
    """Return the tokens that the loss of a sample is the mean of: all but the first."""
    return len(sample) - 1


class Model(nn.Module):  # noqa: D101
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.remember = nn.GRU(width, width, batch_first=True)
        self.guess = nn.Linear(width, VOCABULARY)

    def forward(self, text: torch.Tensor) -> torch.Tensor:  # noqa: D102
        hidden, _ = self.remember(self.embed(text.clamp(min=0)))
        logits: torch.Tensor = self.guess(hidden)
        return logits


def train(texts: list[torch.Tensor], epochs: int, max_tokens: int) -> None:
    config = DataLoaderConfiguration(max_tokens=max_tokens, length=count_targets)
    accelerator = Accelerator(dataloader_config=config)
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader: DataLoader[Any] = DataLoader(cast("Any", texts), shuffle=True, collate_fn=pad)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.print(accelerator.describe())
    for epoch in range(epochs):
        total = torch.zeros(2, device=accelerator.device)
        for text in loader:
            logits, targets = model(text[:, :-1]), text[:, 1:]
            loss = nn.functional.cross_entropy(logits.transpose(1, 2), targets, ignore_index=PADDING)
            accelerator.backward(loss)  # weighted by the tokens of the batch
            optimizer.step()
            optimizer.zero_grad()
            count = (targets != PADDING).sum()
            total += torch.stack([loss.detach() * count, count])
        mean, tokens = accelerator.reduce(total).tolist()
        accelerator.print(f"epoch {epoch + 1}: loss {mean / tokens:.4f} in {len(loader)} steps")


# Comparison --------------------------------------------------------------------------------


def list_costs(lengths: list[int], budget: int, padded: bool, **options: bool) -> list[tuple[int, int]]:
    """Return the positions and the tokens of each batch: of `max_tokens`, or without options of a fixed size that always fits."""
    indices: Any = range(len(lengths))
    batches: DataLoader[Any]
    if options:
        config = DataLoaderConfiguration(max_tokens=budget, length=lengths, padded=padded, **options)
        batches = Accelerator(dataloader_config=config).prepare(DataLoader(indices, shuffle=True))
    else:
        batches = DataLoader(indices, batch_size=budget // max(lengths), shuffle=True)
    costs = []
    for batch in batches:
        each = [lengths[index] for index in batch.tolist()]
        costs.append((len(each) * max(each) if padded else sum(each), sum(each)))
    return costs


def compare(texts: list[torch.Tensor], budget: int, ranks: int) -> None:
    """Print what is padding, and the time that ranks wait in full steps if that of a batch is proportional to its positions."""
    lengths = sorted(map(len, texts))
    print(
        f"{len(lengths)} functions, {sum(lengths)} tokens; median {lengths[len(lengths) // 2]}, longest {lengths[-1]}; "
        f"at most {budget} positions a batch, {ranks} ranks"
    )
    print(f"{'':35} padding  waiting  steps  positions a step")
    lengths = [len(text) for text in texts]
    rows: list[tuple[str, bool, dict[str, bool]]] = [
        ("padded, fixed size", True, {}),
        ("padded, max_tokens, balance=False", True, {"balance": False}),
        ("padded, max_tokens", True, {"balance": True}),
        ("packed, fixed size", False, {}),
        ("packed, max_tokens, balance=False", False, {"balance": False}),
        ("packed, max_tokens", False, {"balance": True}),
    ]
    for name, padded, options in rows:
        torch.manual_seed(0)
        costs = list_costs(lengths, budget, padded, **options)
        positions = [cost for cost, _ in costs]
        steps = [positions[begin : begin + ranks] for begin in range(0, len(positions), ranks)]
        padding = 1 - sum(tokens for _, tokens in costs) / sum(positions)
        full = steps[:-1]  # in the last step, some ranks may have no batch
        waiting = 1 - sum(map(sum, full)) / sum(ranks * max(step) for step in full)
        print(
            f"{name:35} {padding:7.1%}  {waiting:7.1%}  {len(steps):5}  {sum(positions) / len(steps):16.0f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on the functions of Python's standard library.")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--modules", type=int, default=10, help="of the standard library, by name")
    parser.add_argument("--max-tokens", type=int, default=2048)
    parser.add_argument("--compare", action="store_true", help="print padding and waits, with all modules")
    parser.add_argument("--ranks", type=int, default=8, help="of the comparison")
    args = parser.parse_args()
    texts = to_ids(read_functions(None if args.compare else args.modules))
    if args.compare:
        compare(texts, args.max_tokens, args.ranks)
    else:
        train(texts, args.epochs, args.max_tokens)


if __name__ == "__main__":
    main()
