"""The training of the soak: `accel launch ... soak_training.py FOLDER STEP_S SAVE_STEPS`.

A step sleeps `STEP_S` seconds, each `SAVE_STEPS` steps are saved (0: none), and the step in `FOLDER/last` is the last one.
Everything that a resume must restore takes part in the weights: dropout, a shuffled loader with a worker, random augmentation,
gradient accumulation, and a schedule.
"""

from __future__ import annotations

import itertools
import math
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from accel_runtime import Accelerator, ProjectConfiguration, set_seed

SAMPLES, LENGTH, WORDS, WIDTH = 520, 12, 32, 16


class Sequences(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Sequences whose next word is a function of two words before; a random word is replaced each time one is read."""

    def __init__(self) -> None:
        words = torch.randint(WORDS, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(1))
        for place in range(2, LENGTH + 1):
            words[:, place] = (3 * words[:, place - 1] + words[:, place - 2]) % WORDS
        self._words = words

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        words = self._words[index].clone()
        words[int(torch.randint(LENGTH, ()))] = torch.randint(WORDS, ())
        return words[:-1], words[1:]


class Transformer(nn.Module):
    """A causal transformer of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) / 10)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        return self.head(self.layer(self.words(words) + self.places, src_mask=mask, is_causal=True))


class Count:
    """The number of steps, a part of the checkpoints."""

    value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def main() -> None:
    """Train to the last step, and write the final state of each rank."""
    folder, step_s, save_steps = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    project = ProjectConfiguration(folder / "project", automatic_checkpoint_naming=True, total_limit=3)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, project_config=project)
    rank = accelerator.process_index
    set_seed(7)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.1 + math.cos(step / 300))
    loader = DataLoader(Sequences(), batch_size=8, shuffle=True, num_workers=1)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    count = Count()
    accelerator.register_for_checkpointing(count)
    with replace_file(folder / f"rank-{rank}") as part:
        part.write_text(f"{os.getpid()} {socket.gethostname()}\n")
    accelerator.resume()
    log = os.open(folder / f"steps-{rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for _ in itertools.count():
        for words, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(words).flatten(0, 1), targets.flatten())
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            count.value += 1
            # One write, which the end of the process cannot divide.
            os.write(
                log, f"{count.value} {time.monotonic():.3f} {os.getpid()} {loss.item().hex()}\n".encode()
            )
            if is_last(folder, count.value):
                accelerator.wait_for_checkpoint()
                write_state(accelerator, model, optimizer, folder)
                return
            if save_steps and count.value % save_steps == 0:
                # Every second save is in the background.
                accelerator.save_state(async_save=count.value % (2 * save_steps) == 0)
            time.sleep(step_s)


def is_last(folder: Path, step: int) -> bool:
    """Return whether the training ends with this step; the number is written long before the step."""
    path = folder / "last"
    return path.exists() and step >= int(path.read_text())


def write_state(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path
) -> None:
    """Write all that the next step would depend on."""
    state = {
        "weights": accelerator.unwrap_model(model).state_dict(),
        "moments": optimizer.state_dict(),
        "random": torch.get_rng_state(),
    }
    with replace_file(folder / f"final-{accelerator.process_index}") as part:
        torch.save(state, part)


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield the path of a file that replaces another one after this context, so that no reader finds half of it."""
    part = path.with_suffix(".part")
    yield part
    part.replace(path)


if __name__ == "__main__":
    main()
