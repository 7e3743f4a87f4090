"""Public scripts: one as it is and one raw run through the code of the part, and what fails is counted as failed."""

from __future__ import annotations

import re
import subprocess

import pytest
from proof import Options, scripts
from proof.scripts import Bench, FailedError, Script

STEP = {"losses": [1.5], "weights": 2.0}
UNCHANGED = """
import os
import torch
from torch import nn
torch.distributed.init_process_group("gloo")
torch.manual_seed(torch.distributed.get_rank())
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    x = torch.randn(4, 4)
    (model(x).square().mean() * (SCALE if "ACCEL_LAUNCH" in os.environ else 1)).backward()
    optimizer.step()
    optimizer.zero_grad()
torch.distributed.destroy_process_group()
"""
RAW = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
COUNT = 1600
x = torch.randn(COUNT, 4)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for inputs, targets in loader:
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def clone(tmp_path):
    """Return a function that commits files to a repository, and returns the folder of repositories and the commit."""

    def commit(**files):
        folder = tmp_path / "clones" / "someone" / "examples"
        folder.mkdir(parents=True)
        for name, text in files.items():
            (folder / f"{name}.py").write_text(text, encoding="utf-8")
        git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.com", "-C", str(folder)]
        for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
            subprocess.run([*git, *command], check=True)
        done = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
        return tmp_path / "clones", done.stdout.strip()

    return commit


@pytest.mark.slow
def test_scripts_pass_as_they_are_and_converted_and_fail_with_a_reason(clone, tmp_path):
    files = {
        "unchanged": UNCHANGED.replace("SCALE", "1"),
        "scaled": UNCHANGED.replace("SCALE", "2"),
        "raw": RAW,
        "broken": "raise ValueError('no such option')",
    }
    folder, pin = clone(**files)
    (tmp_path / "run").mkdir()
    bench = Bench(Options(0, folder, tmp_path / "run"))
    rows = [
        scripts.run_script(
            Script(
                "test",
                "someone/examples",
                pin,
                f"{name}.py",
                is_raw=name == "raw",
                edits=(("COUNT = 1600", "COUNT = 16"),) if name == "raw" else (),
            ),
            bench,
        )
        for name in files
    ]
    unchanged, scaled, raw, broken = rows
    assert (unchanged["why"], unchanged["passed"], unchanged["steps"]) == ("", True, [3, 3])
    assert (raw["why"], raw["passed"], raw["steps"]) == ("", True, [2, 2])
    assert not scaled["passed"]
    assert "losses or weights differ from torchrun's" in scaled["why"]
    assert not broken["passed"]
    assert broken["why"].endswith("ValueError: no such option")
    section = scripts.render({"scripts": rows, "processes": 2})
    assert "2 of 4 public scripts" in section
    assert section.count("| **failed** |") == 2
    assert re.search(r"^- `\S*broken\.py`[^:]*: torchrun: exit code 1: ", section, re.MULTILINE)
    assert scripts.headline({"scripts": rows})[0] == "2 of 4"


WRONG = {
    "no step": ([[STEP]], [[STEP], [STEP]]),
    "fewer steps": ([[STEP], [STEP]], [[STEP, STEP], [STEP, STEP]]),
    "another loss": ([[STEP | {"losses": [1.6]}], [STEP]], [[STEP], [STEP]]),
    "other weights": ([[STEP], [STEP | {"weights": 2.1}]], [[STEP], [STEP]]),
    "another number of losses": ([[STEP | {"losses": [1.5, 1.5]}], [STEP]], [[STEP], [STEP]]),
    "a loss that is not finite": ([[STEP | {"losses": [float("nan")]}], [STEP]], [[STEP], [STEP]]),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_run_that_differs_from_torchrun_fails(name):
    same = [[STEP], [STEP]]
    assert scripts.compare_as_is(same, same) == {"steps": [1, 1], "difference": 0.0}
    ranks, expected = WRONG[name]
    with pytest.raises(FailedError):
        scripts.compare_as_is(ranks, expected)


@pytest.mark.parametrize(
    ("one", "ranks"),
    [
        ([[STEP | {"losses": [1.6]}]], [[STEP], [STEP]]),
        ([[STEP]], [[STEP], [STEP | {"weights": 2.1}]]),
        ([[STEP]], [[STEP]]),
        ([], [[STEP], [STEP]]),
    ],
)
def test_a_converted_script_that_differs_fails(one, ranks):
    assert scripts.compare_migrated([[STEP]], [[STEP], [STEP]], [STEP])["difference"] == 0
    with pytest.raises(FailedError):
        scripts.compare_migrated(one, ranks, [STEP])


def test_a_script_without_its_source_is_skipped_and_not_counted(tmp_path):
    bench = Bench(Options(0, None, tmp_path))
    row = scripts.run_script(Script("test", "someone/examples", "0" * 40, "train.py"), bench)
    assert row["skipped"]
    assert row["why"] == "no clone of someone/examples was given"
    assert scripts.headline({"scripts": [row]})[0] == "0 of 0"
    assert "no clone of someone/examples" in scripts.render({"scripts": [row], "processes": 2})


def test_the_table_has_twenty_scripts_of_eight_sources():
    assert len(scripts.SCRIPTS) >= 20
    assert len({script.library for script in scripts.SCRIPTS}) == 8
    assert all(len(script.pin) == 40 for script in scripts.SCRIPTS if not script.is_installed)
