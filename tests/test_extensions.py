"""Each extension can be deleted: what remains imports, and the core trains without any of them."""

import json
import subprocess

import pytest
from support.processes.children import ForkedProcess
from support.processes.commands import INTERPRETER as COMMANDS
from support.processes.interpreter import Interpreter
from support.processes.waits import limit
from support.sources.fence import (
    EXTENSIONS,
    ROOT,
    copy_sources,
    find_extensions,
    list_rows,
    list_tables,
    remove_extensions,
    restore_extensions,
)

INTERPRETER = Interpreter("support.sources.fence", parent=COMMANDS)
"""The interpreter that has imported packages of others; what it has of accel is forgotten."""

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from accel_runtime import Accelerator, ProjectConfiguration, set_seed

accelerator = Accelerator(project_config=ProjectConfiguration("project", automatic_checkpoint_naming=True))
set_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.arange(64.0).reshape(16, 4)), batch_size=2, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.resume()
accelerator.print("begins at", optimizer.steps)
for epoch in range(loader.epoch, 2):
    for (batch,) in loader:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.steps == 3:
            accelerator.save_state()
accelerator.print("ends with", [p.tolist() for p in accelerator.unwrap_model(model).parameters()])
"""


@pytest.fixture(scope="module", autouse=True)
def _interpreter():
    yield
    INTERPRETER.close()


@pytest.fixture
def delete(tmp_path):
    """Return a function that deletes some extensions from a copy of the sources, which has all others."""
    tree, deleted = tmp_path / "tree", []
    copy_sources(tree)

    def delete_extensions(*names):
        restore_extensions(tree, deleted)
        deleted[:] = names
        remove_extensions(tree, names)
        return tree

    return delete_extensions


def read(function, tree, *arguments):
    """Return what a function of `support/sources/fence.py` prints about a copy of the sources."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with ForkedProcess(
        INTERPRETER, f"support.sources.fence:{function}", [str(tree), *arguments], **options
    ) as process:
        out, err = process.communicate(timeout=limit(60))
    assert process.returncode == 0, err
    return json.loads(out)


def test_without_extensions_every_module_imports(delete):
    assert read("print_import_errors", delete(*EXTENSIONS)) == {}


def test_without_extensions_a_launch_trains_saves_and_resumes(delete, accel, script, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(delete(*EXTENSIONS)))
    for command in (["--help"], ["config", "default"]):
        process = accel(*command)
        assert process.returncode == 0, process.stderr
        assert "migrate" not in process.stdout, "this is not the copy"
    train = script(SCRIPT)
    lines = []
    for options in ([], ["--resume"]):
        process = accel("launch", "--cpu", "--nproc-per-node", 2, *options, train)
        assert process.returncode == 0, process.stderr
        lines += process.stdout.splitlines()
    begins, ends, begins_again, ends_again = lines
    assert (begins, begins_again) == ("begins at 0", "begins at 3")
    assert ends == ends_again


BITS = len(EXTENSIONS).bit_length()
SETS = [[name for number, name in enumerate(EXTENSIONS, 1) if number >> bit & 1] for bit in range(BITS)]
"""Sets with every extension; for any two extensions, one set has one of them only."""


@pytest.mark.parametrize(
    "sets",
    [SETS, pytest.param([[name] for name in EXTENSIONS], marks=pytest.mark.full)],
    ids=["sets", "each"],
)
def test_without_some_extensions_their_tables_have_all_other_rows(delete, sets):
    for names in sets:
        tables = sorted({table for name in names for table in list_tables(name)})
        remaining = {row: at for row, at in list_rows(tables).items() if not {*names} & find_extensions(at)}
        assert read("print_rows", delete(*names), *tables) == remaining, names


@pytest.mark.full
def test_without_one_extension_all_modules_import_that_did(delete):
    """`test_architecture.py` finds an extension that imports another, which this test shows by running it."""
    INTERPRETER.preload(
        "transformers.trainer_callback", "torch.distributed.elastic.agent.server.api", "libcst"
    )
    errors = read("print_import_errors", delete())
    for name in EXTENSIONS:
        assert read("print_import_errors", delete(name)).keys() <= errors.keys(), name


def test_make_test_runs_a_test_of_each_extension():
    """An extension without a backend or a package of its own here has one that needs neither."""
    tests = ROOT / "tests" / "extensions"
    marked = {
        file.relative_to(tests).parts[0]
        for file in tests.rglob("test_*.py")
        if "pytest.mark.smoke" in file.read_text(encoding="utf-8")
    }
    assert marked == {*EXTENSIONS}
