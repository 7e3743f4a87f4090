"""`accel estimate`: its table, the recommended layout, written profiles, and errors."""

import json
import os
import subprocess
import sys
from contextlib import redirect_stdout

import pytest
import yaml
from support.processes.commands import call_accel
from support.runs.run_folders import RunWriter

from accel_cli import console
from accel_runtime.extensions.estimate import __main__ as estimating

MODULE = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

class Net(nn.Module):
    tp_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def __init__(self, blocks):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(blocks)), nn.Linear(64, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def make(batch_size=8):
    print("this is said while the model is made")
    return Net(8), torch.zeros(batch_size, 64), torch.optim.AdamW, torch.sum

def alone():
    return nn.Linear(1000, 1000)

def enormous():
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(50_000, 50_000, bias=False) for _ in range(40))
    return model

def unwrapped():
    return nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 1000))

def raises():
    return nn.Linear("a", 2)
"""
WHOLE = (8 * (2 * 64 * 256 + 64 + 256) + 64 * 3 + 3) * 4


@pytest.fixture
def models(script):
    return script(MODULE, "models.py")


@pytest.fixture
def estimate(cwd, capfd, monkeypatch, tmp_path):
    """Call `accel estimate` in this process, including the code of its child process."""

    def child(command, **_):
        assert command[:-1] == [sys.executable, "-m", "accel_runtime.extensions.estimate"]
        stdout = os.dup(1)
        with (tmp_path / "answer").open("w+b") as file:
            os.dup2(file.fileno(), 1)
            try:
                with redirect_stdout(sys.stderr):  # pytest has put its own file there
                    code = estimating._run(command[-1])
            finally:
                os.dup2(stdout, 1)
                os.close(stdout)
            file.seek(0)
            return subprocess.CompletedProcess(command, code, file.read())

    monkeypatch.setattr(subprocess, "run", child)
    monkeypatch.syspath_prepend(cwd)
    yield lambda *args: call_accel(capfd, "estimate", *args)
    sys.modules.pop("models", None)


def rows(result):
    return [line.split("\t") for line in result.stdout.splitlines()[1:]]


@pytest.mark.slow
def test_the_table_lists_every_layout_and_the_notes_recommend_one(accel, models):
    result = accel("estimate", "models:make", "--devices", 4, "--memory", "3.2MB")
    assert result.returncode == 0, result.stderr
    table = rows(result)
    assert [row[:3] for row in table] == [
        ["4", "1", "1"], ["2", "2", "1"], ["1", "4", "1"], ["2", "1", "2"], ["1", "2", "2"], ["1", "1", "4"]
    ]  # fmt: skip
    assert table[0][3:6] == ["1.1 MB", "1.1 MB", "2.1 MB"]
    assert table[2][3:6] == ["265.0 kB", "265.0 kB", "530.1 kB"]
    assert [row[9] for row in table] == ["no", "yes", "yes", "no", "yes", "yes"]
    notes = result.stderr.splitlines()
    assert notes[0] == "this is said while the model is made"
    assert (
        "Net with 264,899 parameters, AdamW, mixed precision no, a batch of [8, 64] on each device"
        in notes[1]
    )
    assert "exact" in notes[2]
    assert (
        notes[-2]
        == "accel: least sharded layout that fits on 4 device(s): dp_replicate 2 x dp_shard 2, reshard"
    )
    assert notes[-1] == "accel: 2 device(s) are enough: dp_shard 2, reshard"


def test_all_lists_layouts_with_resharding_and_checkpointing(estimate, models):
    table = rows(estimate("models.py:make", "--devices", 2, "--all"))
    assert [row[-1] for row in table] == [
        "-", "no reshard", "reshard", "checkpointing, no reshard", "checkpointing, reshard", "-", "checkpointing"
    ]  # fmt: skip


def test_json_has_bytes_and_every_layout(estimate, models):
    result = estimate("models:make", "--devices", 2, "--memory", "80GB", "--json")
    estimate_as_dict = json.loads(result.stdout)
    assert estimate_as_dict["memory"] == 80 * 10**9
    assert estimate_as_dict["usable"] == 72 * 10**9
    best = estimate_as_dict["layouts"][estimate_as_dict["best"]]
    assert (best["dp_replicate"], best["dp_shard"], best["tp"], best["fits"]) == (2, 1, 1, True)
    assert (best["bytes"]["parameters"], best["bytes"]["gradients"]) == (WHOLE, WHOLE)
    assert estimate_as_dict["layouts"][estimate_as_dict["fewest"]]["devices"] == 1
    sizes = best["bytes"]
    assert sizes["total"] == sum(size for name, size in sizes.items() if name != "total")


def test_a_model_of_400_gigabytes_is_estimated_without_allocating_it(estimate, models):
    result = estimate("models:enormous", "--devices", 64, "--memory", "80GB")
    assert result.returncode == 0, result.stderr
    assert "activations are not included: there are no inputs" in result.stderr
    assert "Module with 100,000,000,000 parameters" in result.stderr
    assert "device(s): dp_shard 64, reshard" in result.stderr
    assert result.stderr.count("no layout with tp 2, 4, 8, 16, 32, 64: Module has no tp_plan of its own") == 1


def test_no_fitting_layout_is_exit_code_1_with_advice(estimate, models):
    result = estimate("models:make", "--devices", 2, "--memory", "1MB")
    assert result.returncode == 1
    assert {row[9] for row in rows(result)} == {"no"}
    error = result.stderr.splitlines()[-1]
    assert "No layout fits on 2 device(s): the smallest (" in error
    assert "and 900.0 kB of 1.0 MB may be used" in error
    assert json.loads(estimate("models:make", "--memory", "1MB", "--json").stdout)["best"] is None


def test_a_model_without_module_lists_gets_advice_on_wrapping(estimate, models):
    result = estimate("models:unwrapped", "--devices", 4, "--memory", "18MB")
    assert (
        "The model has no list of layers, so it is gathered as one unit. Use --wrap CLASS to gather its modules"
        in result.stderr
    )
    wrapped_result = estimate(
        "models:unwrapped", "--devices", 4, "--memory", "18MB", "--wrap", "Linear", "--json"
    )
    assert json.loads(wrapped_result.stdout)["wrapped"] == ["0", "1"]


def test_layouts_are_not_judged_without_memory(estimate, models):
    result = estimate("models:alone")
    assert result.returncode == 0
    assert rows(result)[0][:4] == ["1", "1", "1", "4.0 MB"]
    assert rows(result)[0][6] == "-", "there is nothing to measure activations with"
    assert "fits" not in result.stderr


def test_a_smaller_batch_and_another_optimizer_need_less_memory(estimate, models):
    def total(*options):
        result = estimate("models:make", "--json", *options)
        return json.loads(result.stdout)["layouts"][0]["bytes"]

    first = total()
    assert total("--batch-size", 800)["activations"] > 50 * first["activations"]
    assert total("--optimizer", "sgd")["optimizer"] == 0
    assert total("--dtype", "bf16")["parameters"] == WHOLE // 2
    assert total("--no-activations")["activations"] is None
    assert total("--mixed-precision", "bf16")["parameters"] == WHOLE


def test_the_layout_is_written_to_a_profile_with_other_values_kept(estimate, models, home, cwd, capfd):
    call_accel(capfd, "config", "set", "mixed_precision=bf16", "log_level=info", "--profile", "gpu")
    file = home / "profiles" / "gpu.yaml"
    file.write_text(file.read_text() + "# mine\n")
    result = estimate("models:make", "--devices", 2, "--memory", "3.2MB", "--write-profile", "gpu")
    assert result.returncode == 0, result.stderr
    text = file.read_text()
    assert "# mine" in text
    data = yaml.safe_load(text)
    assert (data["mixed_precision"], data["log_level"]) == ("bf16", "info")
    assert data["parallel"] == {"dp_replicate": 1, "dp_shard": 2, "tp": 1}
    assert data["fully_shard"]["reshard_after_forward"] is True
    assert "the estimate is for mixed_precision no, but" in result.stderr
    assert call_accel(capfd, "config", "validate", file).returncode == 0


def test_accel_launch_accepts_the_written_profile(estimate, models, cwd, capfd):
    """It has the processes of the layout and the number format of the estimate; those of a profile stay."""
    (cwd / "train.py").touch()
    written = estimate("models:make", "--devices", 4, "--mixed-precision", "bf16", "--write-profile", "four")
    assert written.returncode == 0, written.stderr
    result = call_accel(capfd, "launch", "--cpu", "--profile", "four", "--dry-run", "train.py")
    assert result.returncode == 0, result.stderr
    assert "start: 4 processes" in result.stdout
    assert "ACCEL_MIXED_PRECISION=bf16" in result.stdout
    call_accel(capfd, "config", "set", "launcher.kind=slurm", "launcher.nnodes=2", "--profile", "job")
    kept = estimate("models:make", "--devices", 4, "--write-profile", "job")
    assert kept.stderr.endswith("accel launch must start 4 process(es) with it, one for each device\n")
    assert call_accel(capfd, "config", "get", "launcher.kind", "--profile", "job").stdout == "slurm\n"


def test_a_replicated_layout_removes_options_of_sharding(estimate, models, cwd, capfd):
    file = cwd / "new.yaml"
    first = estimate("models:make", "--devices", 2, "--memory", "3.2MB", "-o", file)
    assert first.returncode == 0, first.stderr
    assert "fully_shard" in yaml.safe_load(file.read_text())
    second_result = estimate("models:make", "--devices", 2, "--memory", "80GB", "--output", file)
    assert second_result.returncode == 0, second_result.stderr
    data = yaml.safe_load(file.read_text())
    assert data["parallel"] == {"dp_replicate": 2, "dp_shard": 1, "tp": 1}
    assert "fully_shard" not in data
    assert call_accel(capfd, "config", "validate", file).returncode == 0


def test_nothing_is_written_if_no_layout_fits(estimate, models, cwd):
    assert estimate("models:make", "--memory", "1MB", "-o", "new.yaml").returncode == 1
    assert not (cwd / "new.yaml").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("models:mak",), "models has no mak; did you mean make?"),
        (("models:raises",), "models:raises failed: "),
        (
            ("models:make", "--memory", "80Gb"),
            "Invalid --memory '80Gb': expected a number of bytes, at least 1",
        ),
        (("models:make", "--optimizer", "adan"), "Invalid --optimizer 'adan': expected one of adamw"),
        (("models:make", "--wrap", "Blok"), "did you mean Block?"),
        (("models:make", "--seq-length", "9"), "--seq-length is for factories with a parameter seq_length"),
        (("models:make", "--devices", "0"), "Invalid value for '--devices'"),
        (("models:make", "--mixed-precision", "fp8"), "Invalid value for '--mixed-precision'"),
        (("models:make", "-o", "a.yaml", "--write-profile", "b"), "Pass either --write-profile or --output"),
        (("models:make", "--write-profile", "../b"), "Invalid profile name"),
        ((".",), "File not found: config.json"),
        ((), "Missing argument 'MODEL'"),
    ],
)
def test_an_unsupported_request_is_one_message_with_exit_code_2(estimate, models, args, message):
    result = estimate(*args)
    assert result.returncode == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_a_configuration_of_transformers_is_estimated(estimate, cwd):
    pytest.importorskip("transformers")
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
    }  # fmt: skip
    (cwd / "config.json").write_text(json.dumps(config))
    result = estimate(
        ".", "--devices", 4, "--memory", "24GB", "--mixed-precision", "bf16", "--seq-length", 128
    )
    assert result.returncode == 0, result.stderr
    assert "LlamaForCausalLM" in result.stderr
    assert "input_ids [1, 128], labels [1, 128]" in result.stderr
    assert "no layout with tp 4: this does not divide " in result.stderr
    assert [row[:3] for row in rows(result)][-1] == ["1", "2", "2"]


# The memory of a run ----------------------------------------------------------------------


def write_run(home, *, samples=True, **record):
    """Write the folder of a run of two ranks, whose memory was sampled twice."""
    run = RunWriter(home / "runs", **record)
    if samples:
        run.lines(
            "memory.jsonl",
            (
                {
                    "time": at,
                    "attempt": 0,
                    "rss": {"0": 10**8 * at, "1": 2 * 10**8},
                    "gpu": {"0": 10**7, "1": 3 * 10**7},
                }
                for at in (3, 2)
            ),
        )
    return run.path.name


def test_the_estimate_for_the_layout_of_a_run_stands_beside_the_peaks_of_its_ranks(estimate, models, home):
    name = write_run(home, profile={"parallel.dp_shard": "auto", "parallel.tp": 1})
    result = estimate("models:make", "--devices", 2, "--run", "train")
    assert result.returncode == 0, result.stderr
    data = json.loads(estimate("models:make", "--devices", 2, "--run", "train", "--json").stdout)["run"]
    total = console.format_size(data["layout"]["bytes"]["total"])
    assert rows(result)[-2:] == [["0", total, "10.0 MB", "300.0 MB"], ["1", total, "30.0 MB", "200.0 MB"]]
    assert f"accel: {name}, dp_shard 2, reshard: estimate and peak of each rank" in result.stderr
    assert data["ranks"] == {
        "0": {"resident": 3 * 10**8, "gpu": 10**7},
        "1": {"resident": 2 * 10**8, "gpu": 3 * 10**7},
    }
    assert data["layout"]["dp_shard"] == 2


@pytest.mark.parametrize(
    ("options", "devices", "message"),
    [
        (
            {},
            1,
            "it has 2 process(es), and the estimate is for 1 device(s). Pass --devices 2, or another run.",
        ),
        ({"samples": False}, 2, "it has no samples of its memory."),
        (
            {"profile": {"parallel.tp": 7}},
            2,
            "its layout (dp_shard 1, tp 7) is not estimated for this model.",
        ),
    ],
)
@pytest.mark.usefixtures("models")
def test_a_run_that_cannot_be_compared_is_a_usage_error(estimate, home, options, devices, message):
    name = write_run(home, **options)
    result = estimate("models:make", "--devices", devices, "--run", name)
    assert (
        result.returncode,
        f"Cannot compare with {name}: " in result.stderr,
        message in result.stderr,
    ) == (2, True, True), result.stderr
