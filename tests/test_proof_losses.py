"""Golden losses: two strategies train as the golden file of the CPU says, and a changed loss is noticed."""

from __future__ import annotations

import copy
import math

import pytest
from proof import losses
from support.processes.commands import preload, run_accel
from support.processes.interpreter import TESTS
from support.runs.golden_runs import CELLS, LAYOUTS, PRECISIONS

CHEAP = ["conv/one process/fp64", "lm/one process/fp32", "lm/ddp/fp64", "mlp/dp_shard/fp32"]
GOLDEN = losses.read_golden("cpu")["runs"]


@pytest.fixture
def launch(cwd, monkeypatch):
    """Return a function that launches cells as the part does, in processes that have imported torch already."""
    preload("accel_runtime.accelerator.accelerator")
    monkeypatch.setenv("PYTHONPATH", f"{TESTS}:{TESTS.parent}")

    def launch(processes, cells):
        options = ("-q", "--no-profile", "--cpu", "--nproc-per-node", processes)
        done = run_accel("launch", *options, losses.SCRIPT, *cells, cwd=cwd)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return launch


def test_strategies_train_as_the_golden_file_says(launch):
    runs = losses.measure_runs(CHEAP, launch)
    compared = losses.compare_runs(runs, GOLDEN)
    assert compared.keys() == set(CHEAP)
    assert all(row["matches"] for row in compared.values()), compared
    changed = copy.deepcopy(GOLDEN)
    changed["lm/ddp/fp64"]["losses"][-1] *= 1 + 2e-9
    assert not losses.compare_runs(runs, changed)["lm/ddp/fp64"]["matches"]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("step", [0, -1, "norm"])
def test_a_changed_loss_or_norm_is_noticed(precision, step):
    cell = f"lm/tp/{precision}"
    run = copy.deepcopy(GOLDEN[cell])
    assert losses.compare_runs({cell: run}, GOLDEN)[cell]["matches"]
    for factor in (1 + 1.5 * PRECISIONS[precision], math.nan):
        changed = copy.deepcopy(run)
        if step == "norm":
            changed["norm"] *= factor
        else:
            changed["losses"][step] *= factor
        assert not losses.compare_runs({cell: changed}, GOLDEN)[cell]["matches"]
    assert not losses.compare_runs({cell: run}, {})[cell]["matches"]


def test_a_missing_run_is_an_error():
    with pytest.raises(RuntimeError, match="no result of lm/ddp/fp64"):
        losses.measure_runs(["lm/ddp/fp64"], lambda *_: "")


def test_the_golden_file_of_the_cpu_has_every_cell_and_equals_one_process():
    assert GOLDEN.keys() == set(CELLS)
    for cell, row in losses.compare_runs(GOLDEN, GOLDEN).items():
        if losses.is_exact(cell):
            assert row["one"] <= PRECISIONS["fp64"], cell
        elif "mlp" not in cell:
            assert row["one"] <= PRECISIONS[cell.rpartition("/")[2]], cell


def test_the_section_counts_and_lists_what_does_not_match():
    runs = copy.deepcopy(GOLDEN)
    runs["lm/sp/fp32"]["losses"][3] += 0.1
    device = {"is_new": False, "golden_machine": "a machine", "cells": losses.compare_runs(runs, GOLDEN)}
    results = {"devices": {"cpu": device}}
    section = losses.render(results)
    assert "`cpu`, `lm/sp/fp32`: differs by" in section
    assert losses.headline(results)[0] == f"{len(CELLS) - 1} of {len(CELLS)}"
    assert all(f"| {layout} |" in section for layout in LAYOUTS)
