"""Scripts in the usual styles are converted as their golden files show, and compute the same numbers afterwards."""

from __future__ import annotations

import contextlib
import difflib
import functools
import io
import os
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from support import golden
from support.commands import Accel
from support.processes import free_port

from accel_cli.extensions.migrate import conversion
from accel_runtime.backends import set_current_backend

CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.py"))
UNCHANGED = {"loaders_in_a_dict"}
"""Scripts that are left as they are, with findings."""
OPEN = {"own_batches"}
"""Scripts that are converted, and have findings."""
NEEDS_A_GPU = {"grad_scaler"}
RANDOM = {"functions", "gan", "own_batches"}
"""Scripts with dropout or noise, which is drawn for each process."""
ROUNDED = {"mixed_precision"}
"""Scripts that compute in bfloat16, whose sums over two processes differ by more than 1e-5."""
TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
"""The environment of a script that connects its processes, which only the script before the conversion needs."""


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path):
    monkeypatch.setenv("ACCEL_DEVICE", "cpu")
    monkeypatch.chdir(tmp_path)
    set_current_backend(None)
    yield
    set_current_backend(None)


@functools.cache
def migrate_script(text):
    return conversion.migrate_script(text)


QUICK = {"ddp", "dict_batches", "fabric_loop", "flat", "functions", "training_metrics"}
"""The scripts that `make test` runs before and after their conversion; `make test-full` runs the others too."""


def named(stems, quick=None):
    """Return the scripts without some; those that are not quick are marked as full."""
    return [
        pytest.param(
            path, id=path.stem, marks=() if quick is None or path.stem in quick else pytest.mark.full
        )
        for path in CORPUS
        if path.stem not in stems
    ]


def run_before(path, folder):
    """Return what a script prints before its conversion."""
    text = path.read_text()
    if path.stem.startswith("fabric_"):
        pytest.importorskip("lightning_fabric")
        warnings.simplefilter("ignore")  # about srun and the CPU
        text = text.replace("import lightning as", "import lightning_fabric as").replace(
            "lightning.fabric", "lightning_fabric"
        )
    if path.stem == "spawn":
        with free_port() as port:
            return run_alone(text, folder, {"PORT": str(port)})
    if path.stem == "ddp":
        with free_port() as port:
            return run(text, folder, TORCHRUN | {"MASTER_PORT": str(port)})
    return run(text, folder)


def run_alone(text, folder, environ):
    """Return what a script prints that starts processes, which import it as a file."""
    folder.mkdir()
    (folder / "train.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=folder,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def run(text, folder, environ=()):
    """Return what a script prints when it is run in this process, in a folder of its own."""
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(text)
    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
        patch.setattr(sys, "argv", ["train.py"])
        patch.chdir(folder)
        for name, value in dict(environ).items():
            patch.setenv(name, value)
        runpy.run_path(str(script), run_name="__main__")
    return output.getvalue()


@pytest.mark.smoke
@pytest.mark.parametrize("path", named(set()))
def test_a_script_is_converted_as_in_its_golden_file(path):
    before = path.read_text()
    result = migrate_script(before)
    diff = difflib.unified_diff(
        before.splitlines(), result.text.splitlines(), path.name, path.name, lineterm=""
    )
    findings = [f"{path.name}:{one.line}: {one.text}" for one in result.findings]
    notes = [f"{path.name}:{one.line}: note: {one.text}" for one in result.notes]
    golden.check(f"migrate/{path.stem}.txt", "\n".join([*diff, *findings, *notes, ""]))
    assert (path.stem in UNCHANGED) == (before == result.text)
    assert bool(result.findings) == (path.stem in UNCHANGED | OPEN)


@pytest.mark.parametrize("path", named(UNCHANGED))
def test_a_converted_script_is_not_converted_again(path):
    once = migrate_script(path.read_text())
    again = migrate_script(once.text)
    assert (again.text, again.findings, again.notes) == (once.text, (), ())


@pytest.mark.slow
@pytest.mark.parametrize("path", named(UNCHANGED | NEEDS_A_GPU, QUICK))
def test_a_converted_script_prints_the_same_numbers_on_one_process(path, tmp_path):
    expected = run_before(path, tmp_path / "before")
    assert re.search(r"\d\.\d{6}", expected)
    assert run(migrate_script(path.read_text()).text, tmp_path / "after") == expected


@pytest.mark.parametrize("path", named(set()))
def test_comments_stay(path):
    result = migrate_script(path.read_text())
    comments = {line.strip() for line in path.read_text().splitlines() if line.strip().startswith("#")}
    assert comments <= {line.strip() for line in result.text.splitlines()}


@pytest.mark.full
@pytest.mark.parametrize("path", named(UNCHANGED | NEEDS_A_GPU | RANDOM | ROUNDED))
def test_a_converted_script_prints_the_same_numbers_on_two_processes(path, tmp_path):
    before = path.read_text()
    after = migrate_script(before).text
    if path.stem == "ddp":  # its batches are those of one process
        expected = run(after, tmp_path / "before")
    else:
        after = after.replace("Accelerator(", "Accelerator(split_batches=True, ")
        expected = run_before(path, tmp_path / "before")
    folder = tmp_path / "after"
    folder.mkdir()
    (folder / "train.py").write_text(after)
    words = ["launch", "-q", "--cpu", "--nproc-per-node", "2", "train.py"]
    with Accel(*words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    numbers = [
        torch.tensor([float(one) for one in re.findall(r"-?\d+(?:\.\d+)?(?:e-?\d+)?", text)])
        for text in (expected, output)
    ]
    assert numbers[0].shape == numbers[1].shape, (expected, output)
    torch.testing.assert_close(numbers[1], numbers[0], rtol=1e-5, atol=1e-5)
