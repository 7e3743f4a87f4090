"""Questions of `accel config` with choices and suggestions, compared with golden files."""

import pytest
from support.cases import golden

from accel_cli.extensions.xla.tpu import Packages, Tpu, XlaDevices
from accel_cli.launchers import LAUNCHERS
from accel_cli.planning import network
from accel_cli.planning.machine import Machine
from accel_cli.wizard.questions import next_step

MACHINES = {
    "cpu": Machine(8),
    "gpus": Machine(8, "cuda", ("H100",) * 4, bf16=True, torch="2.13.0"),
    "tpu": Machine(
        8, others=(XlaDevices(Tpu(("TPU v4",) * 4, "PCI"), Packages("2.9.0", "2.9.0", "0.0.21")),)
    ),
}
CONVERSATIONS = {
    "single": {},
    "torchrun": {},
    "torchrun-sharded": {"launcher.nnodes": 2, "parallel.dp_shard": "auto"},
    "torchrun-deepspeed": {
        "launcher.nproc_per_node": 2,
        "parallel.dp_shard": "auto",
        "deepspeed.stage": 3,
        "deepspeed.offload_optimizer": "nvme",
    },
    "slurm": {"more": True, "parallel.dp_shard": "auto"},
    "kubernetes": {},
    "ray": {},
    "skypilot": {},
    "ssh": {"launcher.hosts": ["node1", "node2"]},
    "xla": {},
    "sagemaker": {"more": True, "launcher.role": "arn:aws:iam::1:role/x", "launcher.bucket": "b"},
}
"""Answers other than Enter, by dotted key."""


def transcribe(machine, answers):
    """Return a block of text for each question: its key, text, choices and suggestion."""
    answers_given, blocks = {}, []
    while step := next_step(answers_given):
        suggestion = step.suggest(machine, answers_given, {})
        lines = [f"{step.key}: {step.question.text}"]
        lines += [f"  hint: {step.question.hint}"] if step.question.hint else []
        lines += [f"  [{choice.value!r}] {choice.title}" for choice in step.choices(machine, answers_given)]
        answers_given[step.key] = answers.get(step.key, suggestion)
        blocks.append("\n".join([*lines, f"  Enter: {suggestion!r}; answered: {answers_given[step.key]!r}"]))
    return "\n\n".join(blocks) + "\n"


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_questions_equal_their_golden_file(name, machine, monkeypatch, home):
    monkeypatch.setattr(network, "find_own_address", lambda: "10.0.0.7")
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    # Ray is in an environment of its own.
    monkeypatch.setattr(LAUNCHERS["ray"], "get_missing_requirement", lambda: "")
    kind = name.partition("-")[0]
    text = transcribe(MACHINES[machine], {"launcher.kind": kind, **CONVERSATIONS[name]})
    golden.check(f"wizard/{name}-{machine}.txt", text)


def test_every_launcher_has_golden_questions():
    assert {name.partition("-")[0] for name in CONVERSATIONS} == set(LAUNCHERS)
    assert golden.names("wizard") == {f"{name}-{machine}" for name in CONVERSATIONS for machine in MACHINES}
