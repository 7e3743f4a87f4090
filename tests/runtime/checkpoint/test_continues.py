"""A run that is saved and loaded is the run that was not interrupted, bit for bit."""

from __future__ import annotations

import pytest
import torch
from played import COUNT, Samples, Script, continues, learn, point
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from accel_runtime import DataLoaderConfiguration


class Backwards(Sampler):
    """A sampler of the script's own that draws, too."""

    def __iter__(self):
        yield from reversed(torch.randperm(COUNT).tolist())

    def __len__(self):
        return COUNT


class Uneven(BatchSampler):
    """Batches of the script's own."""

    def __init__(self):
        self.batches = [[0, 1, 2], [3, 4], [5, 6, 7], [8], [9, 10, 11], [12, 13]]

    def __iter__(self):
        yield from (self.batches[at] for at in torch.randperm(len(self.batches)).tolist())

    def __len__(self):
        return len(self.batches)


class Stream(IterableDataset):
    """So many points in order."""

    def __iter__(self):
        return (point(index) for index in range(COUNT))


class Stateful(IterableDataset):
    """A stream that says where it stands."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < COUNT:
            self.at += 1
            yield point(self.at - 1)
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def with_loader(**options):
    return {"loader": lambda data: DataLoader(data, **({"batch_size": 2} | options))}


def configured(**options):
    return {"options": lambda: {"dataloader_config": DataLoaderConfiguration(**options)}}


LOADERS = {
    "in order": lambda: with_loader(),
    "shuffled": lambda: {},
    "a generator": lambda: {
        "loader": lambda data: DataLoader(
            data, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(torch.initial_seed())
        )
    },
    "drop_last": lambda: with_loader(batch_size=4, drop_last=True, shuffle=True),
    "a sampler": lambda: with_loader(sampler=Backwards()),
    "a batch sampler": lambda: {"loader": lambda data: DataLoader(data, batch_sampler=Uneven())},
    "seedable": lambda: configured(use_seedable_sampler=True),
    "seedable with a seed": lambda: configured(use_seedable_sampler=True, data_seed=4),
    "split": lambda: configured(split_batches=True) | with_loader(batch_size=6, shuffle=True),
    "uneven": lambda: configured(even_batches=False),
    "dispatched": lambda: configured(dispatch_batches=True),
    "workers": lambda: with_loader(shuffle=True, num_workers=2),
    "persistent workers": lambda: with_loader(shuffle=True, num_workers=1, persistent_workers=True),
    "a stream": lambda: {"dataset": Stream} | with_loader(),
    "a stream dispatched": lambda: {"dataset": Stream} | with_loader() | configured(dispatch_batches=True),
    "a stream with state": lambda: {"dataset": Stateful} | with_loader(),
    "a stream with state and a worker": lambda: {"dataset": Stateful} | with_loader(num_workers=1),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_data_continue(ranks, kind, tmp_path):
    continues(ranks, Script(**LOADERS[kind]()), tmp_path, None if kind == "shuffled" else (1, 4))
