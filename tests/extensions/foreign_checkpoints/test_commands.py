"""`accel checkpoint export --format dcp` and `import`: what the commands accept, refuse and print."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from support.processes.commands import call_accel

from accel_cli.commands import checkpoint_operations
from accel_runtime.storage.tensor_file import MergeRequest

KEPT = Path(__file__).parents[2] / "data" / "checkpoint"


def export(capfd, *arguments):
    return call_accel(capfd, "checkpoint", "export", "checkpoint", "-o", "out", *arguments)


@pytest.mark.slow
def test_a_checkpoint_is_exported_for_torch_and_imported_again(capfd, cwd):
    shutil.copytree(KEPT, cwd / "checkpoint")
    result = export(capfd, "--format", "dcp")
    assert result.returncode == 0, result.stderr
    assert "not exported, because torch's format does not have them: loader" in result.stderr
    assert (cwd / "out" / ".metadata").is_file()
    assert call_accel(capfd, "checkpoint", "import", "out", "-o", "again").returncode == 0
    assert call_accel(capfd, "checkpoint", "verify", "again").returncode == 0
    shown = json.loads(call_accel(capfd, "checkpoint", "show", "again", "--json").stdout)
    assert shown["versions"]["torch.distributed.checkpoint"] == "1.0.0"
    existing = call_accel(capfd, "checkpoint", "import", "out", "-o", "again")
    assert existing.returncode == 2
    assert "again exists. Remove it, or choose another name." in existing.stderr
    for arguments in (["-o", "out", "--format", "dcp"], ["-o", "nowhere/out", "--format", "dcp"]):
        assert call_accel(capfd, "checkpoint", "export", "again", *arguments).returncode == 2


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--format", "dcp", "--item", "model"], "--item has no effect with --format dcp"),
        (["--format", "dcp", "--dtype", "bf16"], "use --format safetensors or hf"),
        (["--format", "dcp", "--max-shard-size", "1GB"], "--max-shard-size has no effect"),
        (
            ["--format", "hf", "--layout", "nested"],
            "--layout has no effect with --format hf. Leave it out, or use --format dcp",
        ),
        (["--layout", "nested"], "--layout has no effect with --format safetensors"),
        (["--format", "hf", "--item", "optimizer"], "it has models only"),
    ],
)
def test_an_option_that_a_format_does_not_take_is_refused(capfd, cwd, arguments, problem):
    shutil.copytree(KEPT, cwd / "checkpoint")
    result = export(capfd, *arguments)
    assert result.returncode == 2
    assert problem in result.stderr
    assert not (cwd / "out").exists()


def test_without_torch_an_export_in_its_format_names_the_cure(capfd, cwd, monkeypatch):
    shutil.copytree(KEPT, cwd / "checkpoint")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find(name))
    result = export(capfd, "--format", "dcp")
    assert result.returncode == 1
    assert (
        "torch is not installed in this environment. Install torch, or use --format safetensors."
        in result.stderr
    )


def test_a_folder_of_another_kind_is_not_imported(capfd, cwd):
    shutil.copytree(KEPT, cwd / "checkpoint")
    result = call_accel(capfd, "checkpoint", "import", "checkpoint", "-o", "out")
    assert result.returncode == 2
    assert "checkpoint is a checkpoint of accel, which load_state() and resume() load" in result.stderr
    result = call_accel(capfd, "checkpoint", "import", str(cwd), "-o", "out")
    assert result.returncode == 2
    assert "it has no .metadata. Give the folder that dcp.save wrote." in result.stderr


def test_a_missing_folder_is_reported_before_torch_is_imported(cwd):
    text = (
        "import sys\n"
        "from accel_cli.extensions.foreign_checkpoints.command import import_\n"
        "try:\n"
        "    import_('missing', 'out')\n"
        "except Exception as error:\n"
        "    assert 'Directory not found: missing' in str(error), error\n"
        "    sys.exit('torch' in sys.modules)\n"
        "sys.exit(2)"
    )
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", text]) == 0


def test_an_export_that_is_interrupted_leaves_no_folder(cwd, monkeypatch):
    from accel_cli.extensions.foreign_checkpoints import dcp

    shutil.copytree(KEPT, cwd / "checkpoint")

    def interrupt(*_):
        assert list(cwd.glob(".out.*"))
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint_operations, "_PROGRESS_S", 0)
    with pytest.raises(KeyboardInterrupt):
        dcp.export_dcp("checkpoint", "out", MergeRequest(), interrupt)
    assert not [path.name for path in cwd.iterdir() if "out" in path.name]
