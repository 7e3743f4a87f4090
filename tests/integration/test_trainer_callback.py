"""A Trainer with `AccelCallback`: what its run shows, and how it goes on after a failure, a preemption and damage."""

from __future__ import annotations

import json
import shutil

import pytest
from support.processes.commands import preload, run_accel

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

SCRIPT = """
import json, os, signal, torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

set_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=4, max_position_embeddings=32, attention_dropout=0.1,
))
generator = torch.Generator().manual_seed(1)
rows = [torch.randint(0, 64, (16,), generator=generator) for _ in range(48)]
data = [{"input_ids": row, "labels": row} for row in rows]
arguments = TrainingArguments(
    "out", per_device_train_batch_size=4, num_train_epochs=2, logging_steps=1, report_to=[], save_steps=4, disable_tqdm=True,
    learning_rate=1e-2, eval_strategy="epoch", optim="adamw_torch", dataloader_pin_memory=False, gradient_accumulation_steps=2,
    ddp_find_unused_parameters=False,
)
trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:16])
from accel_runtime.transformers import AccelCallback  # after Accelerate's state has been made
callback = AccelCallback(trainer)
trainer.add_callback(callback)

class Interrupt(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if args.process_index == 1 and is_first and str(state.global_step) == os.environ.get("FAIL_AT"):
            raise ValueError("a node was lost")
        if args.process_index == 1 and str(state.global_step) == os.environ.get("PREEMPT_AT"):
            os.kill(os.getpid(), signal.SIGTERM)

trainer.add_callback(Interrupt())
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
facts = {"losses": losses, "preempted": callback.preempted, "rank": arguments.process_index}
print("FACTS", json.dumps(facts), flush=True)
"""
LAUNCH = ("launch", "--no-profile", "-q", "--cpu", "--nproc-per-node", "2", "--ranks", "all")


@pytest.fixture
def train(script, cwd, monkeypatch):
    """Return a function that launches the script, and returns the facts of its ranks and what was printed."""
    preload("transformers.trainer", "transformers.models.llama.modeling_llama")
    script(SCRIPT)

    def run(*options, **variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        done = run_accel(*LAUNCH, *options, "train.py")
        for name in variables:
            monkeypatch.delenv(name)
        assert done.returncode == 0, done.stderr
        lines = [line.partition("FACTS ")[2] for line in done.stdout.splitlines() if "FACTS " in line]
        return sorted(map(json.loads, lines), key=lambda facts: facts["rank"]), done.stderr

    return run


def test_a_trainer_goes_on_after_a_failure_a_preemption_and_a_damaged_checkpoint_as_if_nothing_had_happened(
    train, cwd, home
):
    expected, _ = train()
    assert len(expected[0]["losses"]) == 6
    shown = json.loads(run_accel("top", max((home / "runs").iterdir()).name, "--json").stdout)
    for rank in shown["ranks"]:
        assert (rank["steps"], rank["batches"], rank["epoch"]) == (6, 12, 1)
        assert (rank["epoch_batches"], rank["epoch_length"]) == (6, 6)
    assert shown["metrics"]["loss"]["step"] == 6
    assert {"eval_loss", "train_runtime", "grad_norm"} <= shown["metrics"].keys()

    shutil.rmtree(cwd / "out")
    restarted, notes = train("--max-restarts", "1", FAIL_AT="5")
    assert restarted == expected
    assert "resuming from out/checkpoint-4" in notes

    shutil.rmtree(cwd / "out")
    preempted, _ = train(PREEMPT_AT="2")
    assert all(facts["preempted"] for facts in preempted)
    assert preempted[0]["losses"] == expected[0]["losses"][:5]
    assert (cwd / "out" / "checkpoint-5" / "accel.json").exists()
    file = cwd / "out" / "checkpoint-5" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    resumed, notes = train("--resume")
    assert resumed == expected
    assert "out/checkpoint-5 is not complete: model.safetensors is missing or has another size" in notes
    assert "resuming from out/checkpoint-4" in notes
    assert "resume: true has no effect" not in notes
