"""Scripts that use Accelerate or a Trainer themselves train with what the profile says, on several processes.

The reference is the same script with the variables of torchrun and those that Accelerate reads, set by hand, in two ranks that
are forked from an interpreter with its packages: each process of torchrun takes ten seconds to import them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes.commands import preload, run_accel, run_ranks
from support.processes.waits import limit

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

PLAIN = """
import json, os, torch
from accelerate import Accelerator
from accelerate.utils import set_seed

set_seed(0)
accelerator = Accelerator()
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
rows = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
data = torch.utils.data.TensorDataset(rows, rows.sum(1, keepdim=True))
loader = torch.utils.data.DataLoader(data, batch_size=8 // accelerator.num_processes)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses, dtypes = [], set()
for x, y in loader:
    with accelerator.accumulate(model), accelerator.autocast():
        dtypes.add(str((x @ x.T).dtype))
        loss = torch.nn.functional.mse_loss(model(x).float(), y)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(accelerator.reduce(loss.detach(), "mean").item())
facts = {
    "losses": losses,
    "processes": accelerator.num_processes,
    "precision": accelerator.mixed_precision,
    "dtypes": sorted(dtypes),
    "steps": accelerator.gradient_accumulation_steps,
    "compiler": accelerator.state.dynamo_plugin.backend.value,
}
if accelerator.is_main_process:
    print("FACTS", json.dumps(facts), flush=True)
import time
time.sleep(1)  # threads of gloo that release tensors while Python exits abort the process: docs/design/leaving-gloo.md
accelerator.end_training()
"""
TRAINER = """
import json, os, torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

set_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, max_position_embeddings=32,
))
generator = torch.Generator().manual_seed(1)
rows = [torch.randint(0, 64, (16,), generator=generator) for _ in range(32)]
arguments = TrainingArguments(
    "out", per_device_train_batch_size=8 // int(os.environ.get("WORLD_SIZE", "1")), max_steps=4, logging_steps=1,
    report_to=[], save_strategy="no", disable_tqdm=True, learning_rate=1e-2, max_grad_norm=0.0,
    lr_scheduler_type="constant", optim="adamw_torch",
)
trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
trainer.train()
facts = {
    "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    "processes": arguments.world_size,
    "precision": trainer.accelerator.mixed_precision,
}
if arguments.process_index == 0:
    print("FACTS", json.dumps(facts), flush=True)
import time
time.sleep(1)  # threads of gloo that release tensors while Python exits abort the process: docs/design/leaving-gloo.md
"""
SCRIPTS = {"plain": PLAIN, "Trainer": TRAINER}
PAIR = ("launch", "--no-profile", "--cpu", "--nproc-per-node", "2")
ONE = ("launch", "--no-profile", "--cpu", "--set", "launcher.kind=torchrun", "--nproc-per-node", "1")
"""A launch that forks its process, as one of several does."""


@pytest.fixture
def accel():
    """Run `accel`, forked from an interpreter that has imported Transformers: a launch by exec imports the packages itself."""
    preload("transformers.trainer", "transformers.models.llama.modeling_llama")
    return run_accel


@pytest.fixture
def train(accel, tmp_path):
    """Run a script under `accel launch`; return its facts."""

    def run(text, *options):
        (tmp_path / "train.py").write_text(text)
        result = accel(*options, "train.py", cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        return read_facts(result.stdout)

    return run


def read_facts(output):
    (line,) = [line for line in output.splitlines() if line.startswith("FACTS ")]
    return json.loads(line.removeprefix("FACTS "))


def run_torchrun(folder, text, **variables):
    """Run a script on two processes of torchrun; return its facts."""
    (folder / "train.py").write_text(text)
    command = [str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", "2", "train.py"]
    environ = {**os.environ, **variables, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=limit(240), check=False
    )
    assert result.returncode == 0, result.stderr
    return read_facts(result.stdout)


@pytest.mark.parametrize(
    ("name", "is_torchrun"),
    [
        pytest.param("plain", False, id="plain"),
        pytest.param("Trainer", False, id="Trainer"),
        pytest.param("plain", True, id="plain, torchrun", marks=pytest.mark.full),
    ],
)
def test_a_script_trains_as_under_torchrun_with_the_variables_of_accelerate(
    train, tmp_path, port, name, is_torchrun
):
    options = ("--mixed-precision", "bf16")
    facts = train(SCRIPTS[name], *PAIR, *options)
    variables = {"ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "bf16"}
    if is_torchrun:
        assert facts == run_torchrun(tmp_path, SCRIPTS[name], **variables)
    else:
        output, _ = run_ranks(2, port, tmp_path / "train.py", cwd=tmp_path, **variables)
        assert facts == read_facts(output)
    assert (facts["processes"], facts["precision"]) == (2, "bf16")
    assert facts.get("dtypes", ["torch.bfloat16"]) == ["torch.bfloat16"]


def test_two_processes_train_as_one_on_the_same_global_batches(train):
    two, one = train(PLAIN, *PAIR), train(PLAIN, *ONE)
    assert (one["processes"], two["processes"]) == (1, 2)
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-5)


def test_accumulation_and_compilation_of_the_profile_are_those_of_accelerate(train):
    options = ("--set", "gradient_accumulation_steps=2", "--set", "compile.backend=eager")
    facts = train(PLAIN, *PAIR, *options)
    assert (facts["steps"], facts["compiler"]) == (2, "EAGER")


def test_a_variable_of_the_user_overrides_the_file_and_an_option_overrides_it(accel, tmp_path):
    (tmp_path / "train.py").write_text(PLAIN)
    (tmp_path / "accel.yaml").write_text(
        "schema_version: 1\nmixed_precision: fp16\ndevice: cpu\nlauncher: {kind: torchrun, nproc_per_node: 2}\n"
    )
    environ = {**os.environ, "ACCELERATE_MIXED_PRECISION": "bf16"}
    result = accel("launch", "train.py", cwd=tmp_path, env=environ)
    assert read_facts(result.stdout)["precision"] == "bf16"
    result = accel("launch", "--mixed-precision", "no", "train.py", cwd=tmp_path, env=environ)
    assert read_facts(result.stdout)["precision"] == "no"
    assert "ACCELERATE_MIXED_PRECISION=bf16 of the environment is replaced by 'no'" in result.stderr


def test_sharding_on_the_cpu_is_refused_for_accelerate_with_a_cure(accel, tmp_path):
    (tmp_path / "train.py").write_text(PLAIN)
    result = accel(*PAIR, "--set", "parallel.dp_shard=auto", "train.py", cwd=tmp_path)
    assert result.returncode == 2
    assert (
        result.stderr.count("Cannot shard models on the CPU with Accelerate: parallel.dp_shard is auto") == 1
    )


OURS = """
import accelerate, transformers, torch
from accel_runtime import Accelerator

accelerator = Accelerator()
model = accelerator.prepare(torch.nn.Linear(4, 4))
print(f"{accelerator.process_index}: {accelerator.is_fsdp2}", flush=True)
"""


def test_a_script_of_accel_that_imports_accelerate_is_not_refused(accel, tmp_path):
    (tmp_path / "train.py").write_text(OURS)
    options = ("--set", "parallel.dp_shard=auto", "--set", "process_group_timeout=60", "--ranks", "all")
    result = accel(*PAIR, *options, "train.py", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "0: True" in result.stdout
    assert "has no effect" not in result.stderr


@pytest.mark.parametrize(
    ("command", "name"),
    [
        pytest.param((*PAIR, "--set", "launcher.start_method=forkserver"), "Trainer", id="forkserver"),
        pytest.param(
            (*PAIR, "--set", "launcher.start_method=exec"), "plain", id="exec", marks=pytest.mark.full
        ),
        pytest.param(("launch", "--no-profile", "--cpu"), "Trainer", id="single", marks=pytest.mark.full),
    ],
)
def test_what_accelerate_cannot_do_is_printed_once(accel, tmp_path, command, name):
    (tmp_path / "train.py").write_text(SCRIPTS[name])
    options = ("process_group_timeout=600", "gradient_accumulation_steps=2")
    assignments = [word for text in options for word in ("--set", text)]
    result = accel(*command, *assignments, "train.py", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stderr.splitlines() if "has no effect in a" in line]
    of_trainer = ["accel: gradient_accumulation_steps: 2"] if name == "Trainer" else []
    assert [line.split(" has no")[0] for line in lines] == [
        "accel: process_group_timeout: 600",
        *of_trainer,
    ]


SHARDED = """
from accelerate import Accelerator, FullyShardedDataParallelPlugin

accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
print(accelerator.distributed_type.value, flush=True)
"""


def test_a_script_that_shards_on_the_cpu_is_reported(accel, tmp_path):
    (tmp_path / "train.py").write_text(SHARDED)
    result = accel(*PAIR, "train.py", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "MULTI_CPU" in result.stdout
    assert (
        result.stderr.count("accel: FSDP of the script has no effect: Accelerate does not shard on the CPU")
        == 1
    )
