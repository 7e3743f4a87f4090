"""`accel launch --record-numerics` and `accel diff`, with real launches."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.processes.commands import run_accel

SCRIPT = """
import os
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=float(os.environ.get("LR", "0.1")))
x = torch.randn(16, 4)
for _ in range(3):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""


@pytest.fixture
def train(script):
    return script(SCRIPT)


def test_two_scripts_are_recorded_and_compared(cwd, train):
    other = train.with_name("other.py")
    other.write_text(SCRIPT.replace('"0.1"', '"0.2"'))
    page = cwd / "page.html"
    process = run_accel("diff", "--cpu", "--json", "--html", page, train, other, cwd=cwd)
    assert process.returncode == 1, process.stderr
    found = json.loads(process.stdout)
    assert (found["verdict"], found["cause"]["stage"], found["cause"]["step"]) == ("different", "rates", 1)
    text = page.read_text()
    assert "the learning rate" in text
    assert "<script" not in text
    names = [line.split("\t")[0] for line in run_accel("runs", cwd=cwd).stdout.splitlines()[1:]]
    equal = run_accel("diff", names[0], names[0], cwd=cwd)
    assert equal.returncode == 0, equal.stderr
    assert "equal bit by bit" in equal.stdout
    shown = run_accel("diff", names[1], names[0], cwd=cwd)
    assert shown.returncode == 1
    assert "step 1, rank 0: the learning rate" in shown.stdout


ACCELERATOR = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from accel_runtime import Accelerator, set_seed

accelerator = Accelerator()
set_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(48, 8, generator=generator), torch.randn(48, 1, generator=generator))
loader = DataLoader(data, batch_size=8 // accelerator.num_processes, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    accelerator.backward(nn.functional.mse_loss(model(x), y))
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.parametrize("vary", ["nproc=1,2", "strategy=ddp,fully_shard"])
def test_an_accelerator_trains_the_same_in_two_layouts(cwd, script, vary):
    count = [] if "nproc" in vary else ["--nproc-per-node", 2]
    process = run_accel("diff", script(ACCELERATOR), "--vary", vary, "--cpu", "--json", *count, cwd=cwd)
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout)
    assert found["verdict"] in {"equal", "rounding"}
    assert found["steps"] == [1, 2, 3, 4, 5, 6]


def test_tensors_of_chosen_steps_are_kept(cwd, train):
    options = ("--record-numerics", "steps:2-2,tensors")
    assert run_accel("launch", "--cpu", *options, train, cwd=cwd).returncode == 0
    folder = run_accel("runs", "--json", cwd=cwd)
    assert folder.returncode == 0, folder.stderr
    (file,) = Path(json.loads(folder.stdout)[0]["path"]).rglob("*.safetensors")
    assert file.name == "step-2.safetensors"
    names = load_file(file)
    assert {"before/0.weight", "gradients.0/0.weight", "read/0.weight", "parameters/0.weight"} <= set(names)
    assert torch.equal(names["parameters/0.weight"], names["before/0.weight"] - 0.1 * names["read/0.weight"])


def test_nothing_is_recorded_without_the_option(cwd, train):
    assert run_accel("launch", "--cpu", train, cwd=cwd).returncode == 0
    name = run_accel("runs", cwd=cwd).stdout.splitlines()[1].split("\t")[0]
    process = run_accel("diff", name, name, cwd=cwd)
    assert process.returncode == 2
    assert "it has no recorded step, since it was launched without a record" in process.stderr


def test_a_choice_of_steps_that_is_invalid_is_refused(cwd, train):
    process = run_accel("launch", "--dry-run", "--record-numerics", "sometimes", train, cwd=cwd)
    assert process.returncode == 2
    assert "expected all, every:N or steps:A-B" in process.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("--record-numerics", "SCRIPT"),
        ("--record-numerics", "--cpu", "SCRIPT"),
        ("--cpu", "--record-numerics=all", "SCRIPT"),
        ("--nproc-per-node", "2", "--record-numerics", "all", "SCRIPT"),
    ],
)
def test_all_steps_are_recorded_without_a_value(cwd, train, words):
    names = [str(train) if word == "SCRIPT" else word for word in words]
    process = run_accel("launch", "--dry-run", *names, "--record-numerics", cwd=cwd)
    assert process.returncode == 0, process.stderr
    assert "ACCEL_RECORD_NUMERICS=all" in process.stdout
    assert "--record-numerics" in process.stdout.rpartition(str(train))[2]


def test_nothing_is_launched_before_the_arguments_are_valid(cwd, train):
    for words, message in (
        ((train, "missing.py"), "Cannot run 'missing.py': no such file."),
        ((train, train, "--html", cwd / "no" / "page.html"), "is no folder. Name another file."),
        ((train, train, "--record-numerics", "sometimes"), "expected all, every:N or steps:A-B"),
        ((train, "--vary", "strategy=ddp,other"), "expected ddp or fully_shard"),
        ((train, "nothing-of-this-name"), "No runs found"),
    ):
        process = run_accel("diff", *words, cwd=cwd)
        assert (process.returncode, message in process.stderr) == (2, True), process.stderr
        assert "recording" not in process.stderr


def test_scripts_that_fail_or_never_step_are_not_compared(cwd, script):
    fails = script("raise SystemExit(3)", "fails.py")
    process = run_accel("diff", "--cpu", fails, fails, "--log-dir", cwd / "logs", cwd=cwd)
    assert process.returncode == 2
    assert "fails.py ended with code 3. Run it alone" in process.stderr
    still = script("import torch\ntorch.nn.Linear(2, 1)(torch.ones(2)).backward()\n", "still.py")
    process = run_accel("diff", "--cpu", still, still, "--log-dir", cwd / "logs", cwd=cwd)
    assert process.returncode == 2
    assert "no optimizer of torch has stepped" in process.stderr


def test_a_program_is_not_recorded(cwd):
    process = run_accel("launch", "--dry-run", "--record-numerics", "all", "--no-python", "true", cwd=cwd)
    assert process.returncode == 2
    assert "true is a program (--no-python), and a recorder needs Python. Leave it out." in process.stderr


def test_a_variable_and_an_option_that_differ_are_refused(cwd, train, monkeypatch):
    monkeypatch.setenv("ACCEL_RECORD_NUMERICS", "all")
    process = run_accel("launch", "--dry-run", "--record-numerics", "every:2", train, cwd=cwd)
    assert process.returncode == 2
    assert "ACCEL_RECORD_NUMERICS is set to 'all'. Unset it." in process.stderr


@pytest.mark.parametrize("vary", ["nproc", "nproc=1", "=1,2"])
def test_an_invalid_variation_is_refused(cwd, train, vary):
    process = run_accel("diff", train, "--vary", vary, cwd=cwd)
    assert process.returncode == 2
    assert "expected a name and two values" in process.stderr
