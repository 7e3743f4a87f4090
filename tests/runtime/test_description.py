"""`describe()` says what a run does, as data, as lines and as a panel, and changes with the run."""

from __future__ import annotations

import dataclasses
import io
import json

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.optim.lr_scheduler import ConstantLR
from torch.utils.data import DataLoader, IterableDataset

from accel_runtime import (
    Accelerator,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    Description,
    DistributedDataParallelKwargs,
)
from accel_runtime.env import FullyShard, Parallel, flatten_settings


class Stream(IterableDataset):
    """Five samples of unknown number."""

    def __iter__(self):
        return iter(range(5))


def described(  # noqa: PLR0913
    options=None,
    *,
    data=range(10),
    batch=2,
    loader=None,
    dtype=None,
    frozen=False,
    weighted=False,
    prepared=True,
):
    """What a small run says of itself."""
    accelerator = Accelerator(**(options or {}))
    model = nn.Linear(3, 2, dtype=dtype).requires_grad_(not frozen)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = ConstantLR(optimizer)
    if prepared:
        model, _, _ = accelerator.prepare(model, optimizer, schedule)
        loader = accelerator.prepare(loader if loader is not None else DataLoader(data, batch))
    if weighted:
        accelerator.backward(model(torch.ones(1, 3)).sum(), weight=1)
    return accelerator.describe()


def plain(*args, **options):
    return described(*args, **options).as_dict()


def test_a_run_is_described_as_plain_data(ranks):
    def data():
        found = plain({"gradient_accumulation_steps": 4})
        found.pop("options")
        assert found.pop("device") == {}
        return json.loads(json.dumps(found))

    for rank, found in enumerate(ranks.run(data)):
        several = ranks.size > 1
        assert found == {
            "processes": {
                "world_size": ranks.size,
                "rank": rank,
                "local_world_size": ranks.size,
                "device": "cpu",
                "process_group": "gloo" if several else "",
            },
            "precision": found["precision"],
            "accumulation_steps": 4,
            "gradients": found["gradients"],
            "models": [
                {
                    "name": "Linear",
                    "parameters": 8,
                    "trainable": 8,
                    "dtypes": ["float32"],
                    "computes_in": "float32",
                    "reduces_in": "float32" if several else "",
                    "wrapping": "DistributedDataParallel" if several else "none",
                    "groups": [],
                }
            ],
            "optimizers": ["SGD"],
            "schedulers": [
                {"name": "ConstantLR", "advances": f"{ranks.size} step(s) of the schedule a call of step()"}
            ],
            "loaders": [
                {
                    "dataset": "range",
                    "samples": 10,
                    "steps": -(-10 // (2 * ranks.size)),
                    "batch_size": 2,
                    "parts": ranks.size,
                    "ranks_a_part": 1,
                    "global_batch": 2 * ranks.size,
                    "samples_a_step": 8 * ranks.size,
                    "end": found["loaders"][0]["end"],
                }
            ],
        }


def test_the_repeats_of_an_epoch_are_told_beforehand_and_are_those_there_are(ranks):
    def told():
        accelerator = Accelerator()
        loader = accelerator.prepare(DataLoader(range(17), 4))
        for _ in loader:
            pass
        return accelerator.describe().loaders[0].end, loader.repeats

    repeats = -(-17 // (4 * ranks.size)) * 4 * ranks.size - 17
    end = f"the last batch is padded from the start: {repeats} samples an epoch"
    assert ranks.run(told) == [("no padding", 0) if ranks.size == 1 else (end, repeats)] * ranks.size


@pytest.mark.parametrize(
    ("options", "end"),
    [
        ({}, "; averaged over 2 processes"),
        (
            {"split_batches": True},
            "; averaged over 2 processes: a loss that is a sum over the batch gives 1/2 of the gradient of one process",
        ),
    ],
)
def test_gradients_are_told_to_be_means_over_the_processes(pair, options, end):
    def gradient(options):
        accelerator = Accelerator(**options)
        loader = accelerator.prepare(DataLoader(torch.ones(4, 1), batch_size=2))
        model = accelerator.prepare(nn.Linear(1, 1))
        accelerator.backward(model(next(iter(loader))).sum())
        return accelerator.describe().gradients, model.weight.grad.item()

    for text, summed in pair.run(gradient, options):
        assert text.endswith(end)
        assert summed == (1 if options else 2)  # one process: 2


def test_the_panel_and_the_lines_say_the_same(ranks):
    def shown():
        description = described({"gradient_accumulation_steps": 4, "mixed_precision": "bf16"})
        told = io.StringIO()
        Console(file=told, width=300).print(description)
        return str(description), told.getvalue()

    for rank, (lines, panel) in enumerate(ranks.run(shown)):
        assert "this run" in panel
        for line in lines.splitlines():
            title, text = line[:10].strip(), line[11:]
            assert title in panel
            assert text in panel
        assert f"this is rank {rank}" in lines
        assert (
            f"2 x {ranks.size} rank{'s' * (ranks.size > 1)} x 4 accumulation = {8 * ranks.size} samples an optimizer step"
            in lines
        )
        assert "mixed_precision = bf16 (argument)" in lines


def test_every_rank_says_the_same_but_for_who_it_is(several):
    def told():
        return dataclasses.replace(described(), processes=None).as_dict()

    found = several.run(told)
    assert found == [found[0]] * several.size


# Where options come from -----------------------------------------------------------------


def test_an_option_comes_from_an_argument_a_variable_or_nowhere(monkeypatch):
    monkeypatch.setenv("ACCEL_LOG_LEVEL", "warning")
    options = Accelerator(mixed_precision="bf16").describe().options
    divided = {f"parallel_{name}": value for name, value in flatten_settings(Parallel())}
    divided |= {f"fully_shard_{name}": value for name, value in flatten_settings(FullyShard())}
    assert {name: (option.value, option.origin) for name, option in options.items()} == {
        **{name: (value, "default") for name, value in divided.items()},
        "device": ("cpu", "ACCEL_DEVICE"),
        "mixed_precision": ("bf16", "argument"),
        "process_group_backend": ("auto", "default"),
        "process_group_timeout": (1800, "default"),
        "log_level": ("warning", "ACCEL_LOG_LEVEL"),
        "resume": (False, "default"),
        "shared_files": (True, "default"),
        "spmd": (False, "default"),
    }


def test_an_argument_wins_over_a_variable_and_says_so(monkeypatch):
    monkeypatch.setenv("ACCEL_MIXED_PRECISION", "bf16")
    assert Accelerator().describe().options["mixed_precision"].origin == "ACCEL_MIXED_PRECISION"
    told = Accelerator(mixed_precision="no", cpu=True).describe().options
    assert (told["mixed_precision"].value, told["mixed_precision"].origin) == ("no", "argument")
    assert told["device"].origin == "argument"


def test_only_what_was_chosen_is_among_the_lines(monkeypatch):
    monkeypatch.delenv("ACCEL_DEVICE")
    titles = [title for title, _ in Accelerator(cpu=True).describe().lines()]
    assert titles.count("option") == 1
    assert "option" not in [title for title, _ in Accelerator().describe().lines()]


# Every field changes with the run --------------------------------------------------------

HALF = [DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)]
CHANGES = {
    "precision": {"options": {"mixed_precision": "bf16"}},
    "accumulation_steps": {"options": {"gradient_accumulation_steps": 3}},
    "gradients": {"weighted": True},
    "models": {"prepared": False},
    "optimizers": {"prepared": False},
    "schedulers": {"prepared": False},
    "loaders": {"prepared": False},
    "options": {"options": {"cpu": True}},
    "models.dtypes": {"dtype": torch.float64},
    "models.trainable": {"frozen": True},
    "models.computes_in": {"options": {"mixed_precision": "bf16"}},
    "models.reduces_in": {"options": {"kwargs_handlers": HALF}},
    "models.wrapping": {"frozen": True},
    "schedulers.advances": {"options": {"step_scheduler_with_optimizer": False}},
    "loaders.dataset": {"data": Stream()},
    "loaders.samples": {"data": range(12)},
    "loaders.steps": {"data": range(22)},
    "loaders.batch_size": {"batch": 4},
    "loaders.global_batch": {"batch": 4},
    "loaders.samples_a_step": {"options": {"gradient_accumulation_steps": 3}},
    "loaders.end": {"options": {"dataloader_config": DataLoaderConfiguration(even_batches=False)}},
}
OF_THE_PLACE = {"processes", "device"}
"""What another number of processes, or another device, changes: told above, and in tests/xla."""


def at(data, path):
    """A value of a description, of the first of several."""
    for name in path.split("."):
        data = data[0][name] if isinstance(data, (list, tuple)) else data[name]
    return data


@pytest.mark.parametrize("path", CHANGES)
def test_a_field_changes_when_the_run_does(pair, path):
    def both(change):
        return plain(), plain(), plain(**change)

    for before, again, after in pair.run(both, CHANGES[path]):
        assert again == before
        assert at(after, path) != at(before, path)


def test_every_field_is_among_those_that_change():
    told = {f.name for f in dataclasses.fields(Description)}
    assert told == {path for path in CHANGES if "." not in path} | OF_THE_PLACE


@pytest.mark.parametrize(
    ("loader", "end"),
    [
        (lambda: DataLoader(range(10), 2, drop_last=True), "an incomplete global batch is left out"),
        (
            lambda: DataLoader(range(9), batch_sampler=[[0, 1, 2], [3, 4], [5, 6, 7, 8]]),
            "batches keep their sizes; a missing one at the end is padding without weight",
        ),
        (lambda: DataLoader(Stream(), 2), "padded from the start"),
    ],
)
def test_the_end_of_an_epoch_is_told_for_loaders_of_every_kind(pair, loader, end):
    def told(loader):
        accelerator = Accelerator()
        kept = [accelerator.prepare(loader())]
        return kept and str(accelerator.describe())

    assert all(end in lines for lines in pair.run(told, loader))


def test_what_has_no_length_or_no_size_says_so(ranks):
    def told():
        accelerator = Accelerator()
        kept = accelerator.prepare(DataLoader(Stream(), 2), DataLoader(range(3), batch_sampler=[[0], [1, 2]]))
        return kept and accelerator.describe()

    for found in ranks.run(told):
        assert (found.loaders[0].samples, found.loaders[0].steps) == (None, None)
        assert (found.loaders[1].batch_size, found.loaders[1].samples_a_step) == (None, None)
        assert "unknown samples in an unknown number of steps" in str(found)
        assert "batches of different sizes" in str(found)


def test_a_loader_that_is_gone_is_not_told_of():
    accelerator = Accelerator()
    for _ in range(3):
        kept = accelerator.prepare(DataLoader(range(5)))
    assert len(accelerator.describe().loaders) == 1
    del kept
    assert accelerator.describe().loaders == ()
