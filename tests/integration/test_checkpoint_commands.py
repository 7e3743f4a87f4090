"""Commands of `accel checkpoint`: output, formats and exit codes."""

import json
import subprocess
import sys
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from support.processes.commands import call_accel


@pytest.fixture
def project(handmade, cwd):
    for number in range(3):
        path = cwd / "run" / "checkpoints" / f"checkpoint_{number}"
        handmade.write(path, {"model": {"w": torch.full((8,), float(number))}}, step=number)
    return cwd / "run" / "checkpoints"


@pytest.fixture
def checkpoint(cwd, capfd):
    """Call `accel checkpoint` in this process."""
    return partial(call_accel, capfd, "checkpoint")


def test_list_prints_one_line_for_each_checkpoint(accel, checkpoint, project):
    result = accel("checkpoint", "list", "run")
    assert (result.returncode, result.stderr) == (0, "")
    _, *rows = [line.split("\t") for line in result.stdout.splitlines()]
    assert [row[:2] for row in rows] == [[f"run/checkpoints/checkpoint_{n}", str(n)] for n in range(3)]
    assert {row[-1] for row in rows} == {"complete"}
    checkpoints = json.loads(checkpoint("list", "run", "--json").stdout)
    assert [entry["step"] for entry in checkpoints["checkpoints"]] == [0, 1, 2]


def test_verify_exits_with_1_for_a_damaged_file_and_names_an_undamaged_checkpoint(
    checkpoint, project, handmade
):
    result = checkpoint("verify", "run")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("run/checkpoints/checkpoint_2 is complete: step 2")
    handmade.flip(project / "checkpoint_2" / "model-0.safetensors", -1)
    result = checkpoint("verify", "run")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.splitlines() == [
        "accel: error: run/checkpoints/checkpoint_2/model-0.safetensors is damaged: model/w does not have its checksum",
        "accel: the newest undamaged checkpoint before it is run/checkpoints/checkpoint_1, of step 1",
    ]
    result = checkpoint("verify", "run", "--json")
    assert result.returncode == 1
    assert json.loads(result.stdout)["earlier"]["step"] == 1


def test_show_and_export_output_the_saved_tensors(checkpoint, project, cwd):
    shown = checkpoint("show", "run", "--tensors").stdout
    assert "step\t2\n" in shown
    assert "model/w\t[8]\tfloat32\t32 B\tmodel-0.safetensors at" in shown
    result = checkpoint("export", project / "checkpoint_1", "-o", "m.safetensors", "--dtype", "bf16")
    assert (result.returncode, result.stderr) == (0, "")
    assert torch.equal(load_file(cwd / "m.safetensors")["w"], torch.ones(8, dtype=torch.bfloat16))


def test_prune_removes_nothing_without_confirmation(checkpoint, project):
    result = checkpoint("prune", "run", "--keep", 1)
    assert result.returncode == 2
    assert "Cannot ask before removing checkpoints: no terminal. Use --yes to remove them." in result.stderr
    assert len(list(project.iterdir())) == 3
    result = checkpoint("prune", "run", "--keep", 1, "--yes")
    assert result.returncode == 0
    assert "removed 2 checkpoints, kept 1" in result.stderr
    assert [path.name for path in project.iterdir()] == ["checkpoint_2"]
    assert "nothing to remove" in checkpoint("prune", "run", "--keep", 1).stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("list", "nowhere"), "Directory not found: nowhere"),
        (("show", "run/../empty"), "No checkpoint found in"),
        (("export", "run", "-o", "m", "--item", "model_1"), "has no model_1; it has model"),
        (
            ("export", "run", "-o", "m", "--dtype", "int8"),
            "'int8' is not one of 'bf16'",
        ),
        (
            ("export", "run", "-o", "m", "--max-shard-size", "5gb"),
            "Invalid --max-shard-size '5gb': expected a number of bytes",
        ),
        (("export", "run", "-o", "run/checkpoints/checkpoint_0/m"), "is a checkpoint: an added file"),
        (("export", "run"), "Missing option"),
        (("prune", "run"), "Missing option '--keep'"),
        (
            ("prune", "run", "--keep", "0"),
            "Invalid value for '--keep': expected at least 1, got '0'. See accel",
        ),
    ],
)
def test_an_unsupported_request_is_one_message_with_exit_code_2(checkpoint, project, cwd, args, message):
    (cwd / "empty").mkdir()
    result = checkpoint(*args)
    assert (result.returncode, result.stdout) == (2, "")
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert "Traceback" not in result.stderr


def test_checkpoint_commands_do_not_import_torch(project, cwd):
    code = (
        "import sys\nfrom accel_cli.main import accel\n"
        "for command in ('list', 'verify', 'show', 'export -o m.safetensors', 'prune --keep 1 --yes'):\n"
        "    accel(['checkpoint', *command.split(), 'run'], standalone_mode=False)\n"
        "assert not {'torch', 'numpy', 'safetensors'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=cwd, check=True, stdout=subprocess.DEVNULL)
