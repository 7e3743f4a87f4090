"""Train on a stream, and continue after an interruption with the next sample of the stream.

accel launch --nproc-per-node 2 examples/streaming.py
accel launch --nproc-per-node 2 examples/streaming.py --stop-after 33
accel launch --nproc-per-node 2 --resume examples/streaming.py
"""

from __future__ import annotations

import argparse
import hashlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from accel_runtime import Accelerator, ProjectConfiguration, set_seed

# torchdata 0.11 calls a function that torch 2.13 deprecates.
warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)

VOCABULARY, LENGTH = 32, 16


class Documents(IterableDataset[torch.Tensor]):
    """Windows of tokens from documents of different lengths, which have no index.

    The state is the current document and the offset in it. A resumed stream reads nothing again.
    """

    def __init__(self, documents: int) -> None:
        self.documents = documents
        self.document = self.offset = 0

    def read(self, document: int) -> torch.Tensor:
        """Return the tokens of a document, as a file or an object store would."""
        generator = torch.Generator().manual_seed(document)
        length = int(torch.randint(100, 400, (), generator=generator))
        steps = torch.randint(1, 4, (length,), generator=generator)
        return steps.cumsum(0) % VOCABULARY

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.document < self.documents:
            tokens = self.read(self.document)
            while self.offset + LENGTH < len(tokens):
                window = tokens[self.offset : self.offset + LENGTH + 1]
                self.offset += LENGTH
                yield window
            self.document, self.offset = self.document + 1, 0
        self.document = 0  # the next epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the stream."""
        return {"document": self.document, "offset": self.offset}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position."""
        self.document, self.offset = state["document"], state["offset"]


class LanguageModel(nn.Module):
    """A recurrent network that predicts the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.recurrent = nn.GRU(32, 64, batch_first=True)
        self.output = nn.Linear(64, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of the token after each token."""
        hidden, _ = self.recurrent(self.embedding(tokens))
        logits: torch.Tensor = self.output(hidden)
        return logits


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small language model on a stream.")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--documents", type=int, default=100)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--every", type=int, default=20, help="steps from one checkpoint to the next")
    parser.add_argument("--stop-after", type=int, help="exit after this step, as if the machine were lost")
    parser.add_argument("--project-dir", default="streaming")
    args = parser.parse_args()

    project = ProjectConfiguration(args.project_dir, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(split_batches=True, project_config=project)
    set_seed(0)
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = StatefulDataLoader(Documents(args.documents), batch_size=32, num_workers=args.workers)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    accelerator.resume()  # with --resume, after a restart, or if Slurm runs the job again
    for epoch in range(loader.epoch, args.epochs):
        for tokens in loader:  # the rest of the epoch
            loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if optimizer.steps % args.every == 0:
                accelerator.save_state()
                mean = accelerator.reduce(loss.detach(), "mean")
                accelerator.print(f"epoch {epoch}, step {optimizer.steps}: loss {mean:.4f}")
            if optimizer.steps == args.stop_after:
                accelerator.print(f"stopped at step {optimizer.steps}")
                return

    weights = hashlib.sha256()
    for tensor in accelerator.unwrap_model(model).state_dict().values():
        weights.update(tensor.cpu().numpy().tobytes())
    accelerator.print(f"{optimizer.steps} steps, weights {weights.hexdigest()[:16]}")


if __name__ == "__main__":
    main()
