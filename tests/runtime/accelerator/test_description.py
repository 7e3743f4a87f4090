"""`describe()` describes a run as data, as lines and as a panel, and changes with the run."""

from __future__ import annotations

import dataclasses
import io
import json
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from support.training.data_sets import RangeStream
from torch import nn
from torch.optim.lr_scheduler import ConstantLR
from torch.utils.data import DataLoader

from accel_runtime import (
    Accelerator,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    Description,
    DistributedDataParallelKwargs,
)
from accel_runtime.accelerator.description import sequence_facts
from accel_runtime.environment.settings import Compile, FullyShard, Parallel, flatten_settings
from accel_runtime.extensions.deepspeed.settings import DeepSpeed


def describe_run(  # noqa: PLR0913
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
    """Prepare a small run, and return its description."""
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


def describe_as_dict(*args, **options):
    return describe_run(*args, **options).as_dict()


def test_a_run_is_described_as_plain_data(ranks):
    def describe_without_options():
        description = describe_as_dict({"gradient_accumulation_steps": 4})
        description.pop("options")
        assert description.pop("device") == {}
        assert description.pop("strategy") == {}
        assert description.pop("sequences") == ()
        return json.loads(json.dumps(description))

    for rank, description in enumerate(ranks.run(describe_without_options)):
        several = ranks.size > 1
        assert description == {
            "processes": {
                "world_size": ranks.size,
                "rank": rank,
                "local_world_size": ranks.size,
                "device": "cpu",
                "process_group": "gloo" if several else "",
            },
            "precision": description["precision"],
            "accumulation_steps": 4,
            "gradients": description["gradients"],
            "depends_on_division": "",
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
                    "script_batch_size": 2,
                    "batch_size": 2,
                    "parts": ranks.size,
                    "ranks_a_part": 1,
                    "global_batch": 2 * ranks.size,
                    "micro_batches": 4,
                    "samples_a_step": 8 * ranks.size,
                    "counts_samples": False,
                    "end": description["loaders"][0]["end"],
                }
            ],
        }


def test_padding_of_an_epoch_is_described_beforehand_and_equals_the_real_one(ranks):
    def read_description():
        accelerator = Accelerator()
        loader = accelerator.prepare(DataLoader(range(17), 4))
        for _ in loader:
            pass
        return accelerator.describe().loaders[0].end, loader.repeats

    repeats = -(-17 // (4 * ranks.size)) * 4 * ranks.size - 17
    end = f"the last batch is padded from the start: {repeats} samples an epoch"
    assert (
        ranks.run(read_description) == [("no padding", 0) if ranks.size == 1 else (end, repeats)] * ranks.size
    )


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
def test_gradients_are_described_as_means_over_the_processes(pair, options, end):
    def compute_gradient(options):
        accelerator = Accelerator(**options)
        loader = accelerator.prepare(DataLoader(torch.ones(4, 1), batch_size=2))
        model = accelerator.prepare(nn.Linear(1, 1))
        accelerator.backward(model(next(iter(loader))).sum())
        return accelerator.describe().gradients, model.weight.grad.item()

    for text, summed in pair.run(compute_gradient, options):
        assert text.endswith(end)
        assert summed == (1 if options else 2)  # one process: 2


def test_the_panel_and_the_lines_have_the_same_content(ranks):
    def render():
        description = describe_run({"gradient_accumulation_steps": 4, "mixed_precision": "bf16"})
        output = io.StringIO()
        Console(file=output, width=300).print(description)
        return str(description), output.getvalue()

    for rank, (lines, panel) in enumerate(ranks.run(render)):
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


def test_all_ranks_have_the_same_description_except_for_processes(several):
    def read_description():
        return dataclasses.replace(describe_run(), processes=None).as_dict()

    descriptions = several.run(read_description)
    assert descriptions == [descriptions[0]] * several.size


# Where options come from -----------------------------------------------------------------


def test_the_origin_of_an_option_is_an_argument_a_variable_or_the_default(monkeypatch):
    monkeypatch.setenv("ACCEL_LOG_LEVEL", "warning")
    options = Accelerator(mixed_precision="bf16").describe().options
    divided = {f"parallel_{name}": value for name, value in flatten_settings(Parallel())}
    divided |= {f"fully_shard_{name}": value for name, value in flatten_settings(FullyShard())}
    divided |= {f"deepspeed_{name}": value for name, value in flatten_settings(DeepSpeed())}
    divided |= {f"compile_{name}": value for name, value in flatten_settings(Compile())}
    assert {name: (option.value, option.origin) for name, option in options.items()} == {
        **{name: (value, "default") for name, value in divided.items()},
        "device": ("cpu", "ACCEL_DEVICE"),
        "mixed_precision": ("bf16", "argument"),
        "process_group_backend": ("auto", "default"),
        "process_group_timeout": (1800, "default"),
        "log_level": ("warning", "ACCEL_LOG_LEVEL"),
        "gradient_accumulation_steps": (1, "default"),
        "global_batch_size": ("none", "default"),
        "resume": (False, "default"),
        "measure_flops": (False, "default"),
        "check_replay": ("never", "default"),
        "shared_files": (True, "default"),
        "node_dir": ("", "default"),
        "store_every": (10, "default"),
        "store_timeout": (180, "default"),
        "spmd": (False, "default"),
    }


def test_an_argument_overrides_a_variable_and_is_the_origin(monkeypatch):
    monkeypatch.setenv("ACCEL_MIXED_PRECISION", "bf16")
    assert Accelerator().describe().options["mixed_precision"].origin == "ACCEL_MIXED_PRECISION"
    options = Accelerator(mixed_precision="no", cpu=True).describe().options
    assert (options["mixed_precision"].value, options["mixed_precision"].origin) == ("no", "argument")
    assert options["device"].origin == "argument"


def test_lines_contain_only_options_that_are_not_defaults(monkeypatch):
    monkeypatch.delenv("ACCEL_DEVICE")
    titles = [title for title, _ in Accelerator(cpu=True).describe().lines()]
    assert titles.count("option") == 1
    assert "option" not in [title for title, _ in Accelerator().describe().lines()]


# Fields change with the run --------------------------------------------------------------

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
    "loaders.dataset": {"data": RangeStream(5)},
    "loaders.samples": {"data": range(12)},
    "loaders.steps": {"data": range(22)},
    "loaders.batch_size": {"batch": 4},
    "loaders.global_batch": {"batch": 4},
    "loaders.samples_a_step": {"options": {"gradient_accumulation_steps": 3}},
    "loaders.micro_batches": {"options": {"gradient_accumulation_steps": 3}},
    "loaders.counts_samples": {"options": {"global_batch_size": 6}},
    "loaders.end": {"options": {"dataloader_config": DataLoaderConfiguration(even_batches=False)}},
}
OTHER_FIELDS = {"processes", "device", "strategy", "depends_on_division", "sequences"}
"""Fields that depend on the number of processes or the device: tested above, and in tests/extensions/xla/device; or on the layers of
a model with global batches: tested in tests/runtime/data/test_global_batches.py; or on the heads of a model: tested below."""


def read_path(data, path):
    """Return the value at a path of a description, from the first item of each list."""
    for name in path.split("."):
        data = data[0][name] if isinstance(data, (list, tuple)) else data[name]
    return data


@pytest.mark.parametrize("path", CHANGES)
def test_a_field_changes_when_the_run_changes(pair, path):
    def describe_change(change):
        return describe_as_dict(), describe_as_dict(), describe_as_dict(**change)

    for before, unchanged, after in pair.run(describe_change, CHANGES[path]):
        assert unchanged == before
        assert read_path(after, path) != read_path(before, path)


@pytest.mark.parametrize(
    ("form", "parts", "tp", "text"),
    [
        (
            "cp",
            8,
            1,
            "sp sends 0.625 times the bytes of cp and holds 0.125 of its keys and values: prefer sp",
        ),
        (
            "sp",
            4,
            1,
            "sp sends 1.25 times the bytes of cp and holds 0.25 of its keys and values: prefer cp, and sp for causal sequences",
        ),
        (
            "sp",
            16,
            1,
            "sp sends 0.375 times the bytes of cp and holds 0.125 of its keys and values: prefer sp",
        ),
        ("sp", 4, 1, "prefer cp, and sp for causal sequences from 16,384 positions"),
        ("sp", 4, 2, "16 heads, 4 of keys a layer; sp 4; sp sends 1.25 times the bytes"),
        ("cp", 3, 1, "32 heads, 8 of keys a layer; cp 3; sp does not divide the heads, use cp"),
    ],
)
def test_a_form_of_splitting_sequences_is_recommended_by_heads_and_length(form, parts, tp, text):
    model = nn.Linear(1, 1)
    model.config = SimpleNamespace(num_attention_heads=32, num_key_value_heads=8, head_dim=128)
    grid = Parallel(**{form: parts, "tp": tp}).build_grid(parts * tp)
    description = dataclasses.replace(
        describe_run(prepared=False), sequences=(sequence_facts(model, grid, torch.bfloat16),)
    )
    assert text in str(description)
    assert sequence_facts(model, Parallel().build_grid(1), None) is None
    assert sequence_facts(nn.Linear(1, 1), grid, None) is None


def test_every_field_of_the_description_is_tested():
    read_description = {f.name for f in dataclasses.fields(Description)}
    assert read_description == {path for path in CHANGES if "." not in path} | OTHER_FIELDS


@pytest.mark.parametrize(
    ("loader", "end"),
    [
        (lambda: DataLoader(range(10), 2, drop_last=True), "an incomplete global batch is left out"),
        (
            lambda: DataLoader(range(9), batch_sampler=[[0, 1, 2], [3, 4], [5, 6, 7, 8]]),
            "batches keep their sizes; a missing one at the end is padding without weight",
        ),
        (lambda: DataLoader(RangeStream(5), 2), "padded from the start"),
    ],
)
def test_the_end_of_an_epoch_is_described_for_every_kind_of_loader(pair, loader, end):
    def read_description(loader):
        accelerator = Accelerator()
        loaders = [accelerator.prepare(loader())]
        return loaders and str(accelerator.describe())

    assert all(end in lines for lines in pair.run(read_description, loader))


def test_unknown_lengths_and_batch_sizes_are_described_as_unknown(ranks):
    def read_description():
        accelerator = Accelerator()
        loaders = accelerator.prepare(
            DataLoader(RangeStream(5), 2), DataLoader(range(3), batch_sampler=[[0], [1, 2]])
        )
        return loaders and accelerator.describe()

    for description in ranks.run(read_description):
        assert (description.loaders[0].samples, description.loaders[0].steps) == (None, None)
        assert (description.loaders[1].batch_size, description.loaders[1].samples_a_step) == (None, None)
        assert "unknown samples in an unknown number of steps" in str(description)
        assert "batches of different sizes" in str(description)


def test_a_deleted_loader_is_not_described():
    accelerator = Accelerator()
    for _ in range(3):
        loaders = accelerator.prepare(DataLoader(range(5)))
    assert len(accelerator.describe().loaders) == 1
    del loaders
    assert accelerator.describe().loaders == ()
