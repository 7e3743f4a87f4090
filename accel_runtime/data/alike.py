"""That all who read a stream read the same: the ranks, and the workers of each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from accel_runtime.backends.base import Backend
from accel_runtime.data.prints import mixed
from accel_runtime.data.workers import Made

__all__ = ["StreamsDifferError", "among_ranks", "among_workers"]


class StreamsDifferError(RuntimeError):
    """The ranks, or the workers of one, do not read the same stream. Raised on every rank."""


def among_workers(walk: Iterator[tuple[Made, list[Any]]]) -> Iterator[tuple[Made, list[Any]]]:
    """See that workers which read the same stream read the same.

    Raises:
        StreamsDifferError: They do not.
    """
    running: int | None = None
    for made, batches in walk:
        if made.worker is None:
            if running not in {None, made.before}:
                raise StreamsDifferError(
                    "the workers of this loader do not read the same stream, so samples would be lost and "
                    "repeated. Split the dataset by torch.utils.data.get_worker_info() in its __iter__, or let "
                    "every worker read alike: seed its shuffling from the epoch, not from the worker."
                )
            running = made.after
        yield made, batches


def among_ranks(
    walk: Iterator[tuple[Made, list[Any], bool]], backend: Backend
) -> Iterator[tuple[Made, list[Any], bool]]:
    """Have the ranks compare what they read: before the first batch, ever more seldom, and at the end."""
    try:
        ahead = next(walk, None)
    except StreamsDifferError:
        raise  # the same everywhere
    except Exception:
        _compare(0, 0, backend, failed=True)
        raise
    if ahead is None:
        _compare(0, 0, backend)
    running, samples, step = 0, 0, 0
    while ahead is not None:
        made, batches, last = ahead
        running, samples, step = mixed(running, made.after), samples + made.size, step + 1
        if last or step & (step - 1) == 0:
            _compare(running, samples, backend)
        yield made, batches, last
        ahead = next(walk, None)


def _compare(running: int, samples: int, backend: Backend, *, failed: bool = False) -> None:
    if backend.topology.world_size == 1:
        return
    mine = torch.tensor([samples, running, int(failed)], device=backend.device)
    everyone = backend.all_gather(mine).cpu()
    lost = everyone[:, 2].nonzero().flatten().tolist()
    if lost and not failed:
        raise RuntimeError(f"rank {', '.join(map(str, lost))} could not read the stream: see its own error")
    if lost or bool((everyone == everyone[0]).all()):
        return
    raise StreamsDifferError(
        "the ranks do not read the same stream (samples read up to here, by rank: "
        f"{everyone[:, 0].tolist()}). Every rank reads the whole stream and keeps its slices of it, so all have to "
        "read the same in the same order. If the dataset gives each rank a part of its own, say so: "
        'prepare_data_loader(loader, data="sharded"). If each process shuffles on its own, seed it alike, or '
        "have the first rank read for all: dispatch_batches=True."
    )
