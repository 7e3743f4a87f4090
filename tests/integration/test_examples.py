"""Every example runs on one process and on two, and prints its documented output."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.processes.commands import preload, run_accel

pytestmark = pytest.mark.slow  # each takes seconds, and there are many

EXAMPLES = Path(__file__).parent.parent.parent / "examples"

PRINTED = {
    "digits": (["--epochs", "1", "--output", "w.safetensors"], r"test accuracy 0\.[6-9]\d+ \(\d+ of 450\)"),
    "checkpointing": (["--epochs", "1", "--every", "20"], r"42 steps, weights [0-9a-f]{16}"),
    "elastic": (["--epochs", "1"], r"27 steps of 50 samples on [12] process\(es\)"),
    "early_stopping": ([], r"stopped in epoch \d\nsteps on each process: \{\d+\}"),
    "local_sgd": (["--epochs", "1"], r"test accuracy 0\.[6-9]\d+ \(\d+ of 450\)"),
    "automatic_batch_size": ([], r"batch size 92 fits\nloss [0-2]\.\d{4}"),
    "profiler": ([], r"traces of [12] process\(es\) in traces"),
    "token_batches": (["--epochs", "1", "--modules", "4"], r"loss \d"),
    "token_weights": (["--epochs", "1"], r"loss \d"),
    "diffusion": (["--epochs", "1"], r"epoch 1/1: loss 0\.\d{4}\n(?:.{58}\n){8}"),
    "gan": (["--epochs", "1"], r"16 steps, weights [0-9a-f]{16}"),
    "streaming": (["--epochs", "1", "--documents", "30"], r"13 steps, weights [0-9a-f]{16}"),
    "sharded": (["--epochs", "2"], r"of 450\)\nthe plain model in reader computes the same"),
    "tracking": (["--epochs", "1"], r"\d+ steps are recorded in logs"),
    "evaluation": (
        ["--epochs", "1"],
        r"450 predictions in predictions\.csv; the last is of test image 449",
    ),
    "lora": (
        ["--epochs", "1", "--samples", "64"],
        r"epoch 1: loss \d\.\d{4} over 671 tokens\nthe adapter in adapter gives the same loss",
    ),
    "text_classification": (["--epochs", "1"], r"epoch 1: \d+ of 203 are correct, learning rate 0\.00000"),
    "image_classification": (
        ["--epochs", "1"],
        r"epoch 1: 0 images were trained on twice\n(  \w+: accuracy 0\.[6-9]\d+, \d+ of 450 are correct\n){2}",
    ),
    "trainer": (["--epochs", "1"], r"\d{3} of 450 are correct; [12] process\(es\), no"),
    "cross_validation": (["--folds", "2", "--epochs", "1"], r"accuracy 0\.[5-9]\d+ \(\d+ of 1797\)"),
}
"""For each example its arguments here, and a pattern of its output."""
IMPORTED = (
    "datasets",
    "peft",
    "torchmetrics.classification",
    "transformers.models.bert.modeling_bert",
    "transformers.models.llama.modeling_llama",
)
"""The packages of the other examples, which take ten seconds to import."""
FORKED = ("--set", "launcher.kind=torchrun")
"""Options of a launch of one process, which otherwise executes a new interpreter that imports all of these again."""


@pytest.fixture
def accel(cwd, monkeypatch):
    """Run `accel` in an empty folder, forked from an interpreter with the packages of most examples."""
    preload("sklearn.datasets", "sklearn.metrics")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # a process alone would take all cores for models this small
    return run_accel


LAUNCHES_OTHERS = ["search"]
"""Examples that call `accel launch` themselves, which ./test_cookbook.py runs."""


def test_every_example_is_tested():
    assert sorted([*PRINTED, *LAUNCHES_OTHERS]) == sorted(path.stem for path in EXAMPLES.glob("*.py"))


FIRST = {
    "early_stopping",
    "evaluation",
    "gan",
    "streaming",
    "token_batches",
    "token_weights",
}
"""The examples of training and evaluating, which `make test-slow` runs; test_resuming.py runs `checkpointing`, `make demo` runs
`digits`, and `make test-full` all."""


@pytest.mark.parametrize(
    "example",
    [pytest.param(name, marks=[pytest.mark.full] * (name not in FIRST)) for name in sorted(PRINTED)],
)
@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.full), 2])
def test_an_example_prints_its_result_once(accel, monkeypatch, example, processes):
    if example not in FIRST:
        preload(*IMPORTED)
    monkeypatch.setenv("ACCEL_DEVICE", "cpu")
    arguments, printed = PRINTED[example]
    result = accel("launch", "--nproc-per-node", processes, EXAMPLES / f"{example}.py", *arguments)
    assert result.returncode == 0, result.stderr
    assert len(re.findall(printed, result.stdout)) == 1, result.stdout
    assert "Warning" not in result.stderr


def test_losses_do_not_depend_on_the_number_of_processes_although_it_changes_at_a_restart(accel, tmp_path):
    def train(name, size, *arguments):
        losses = tmp_path / f"{name}.jsonl"
        options = ("--cpu", "--nproc-per-node", size, "--resume", *FORKED)
        arguments = ("--epochs", 1, "--losses", losses, "--project-dir", tmp_path / name, *arguments)
        result = accel("launch", *options, EXAMPLES / "elastic.py", *arguments)
        assert result.returncode == 0, result.stderr
        return [json.loads(line) for line in losses.read_text().splitlines()]

    expected = train("one", 1)
    train("many", 3, "--stop-after", 10)
    actual = train("many", 2)
    assert [each["processes"] for each in actual] == [3] * 10 + [2] * 17
    for step, (one, other) in enumerate(zip(expected, actual, strict=True), 1):
        assert one["step"] == other["step"] == step
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)


@pytest.mark.full
def test_an_evaluation_is_the_same_on_one_and_on_two_processes(accel, tmp_path):
    outputs = []
    for size in (1, 2):
        output = tmp_path / f"{size}.csv"
        options = ("--cpu", "--nproc-per-node", size)
        result = accel("launch", *options, EXAMPLES / "evaluation.py", "--epochs", 1, "--output", output)
        assert result.returncode == 0, result.stderr
        outputs.append((result.stdout.splitlines()[0], output.read_text()))
    assert outputs[0] == outputs[1]


@pytest.mark.full
def test_weighted_tokens_give_the_same_losses_on_one_and_on_two_processes(accel):
    printed = []
    for size in (1, 2):
        options = ("--cpu", "--nproc-per-node", size)
        result = accel("launch", *options, EXAMPLES / "token_weights.py", "--epochs", 3)
        assert result.returncode == 0, result.stderr
        printed.append([line for line in result.stdout.splitlines() if "loss" in line])
    assert len(printed[0]) == 3
    assert printed[0] == printed[1]


@pytest.mark.full
@pytest.mark.parametrize("layout", [{"DP_SHARD": "auto"}, {"TP": 2}], ids=str)
def test_a_sharded_model_is_exported_completely(accel, monkeypatch, layout):
    for name, size in layout.items():
        monkeypatch.setenv(f"ACCEL_PARALLEL_{name}", str(size))
    result = accel("launch", "--cpu", "--nproc-per-node", 2, EXAMPLES / "sharded.py", "--epochs", 2)
    assert result.returncode == 0, result.stderr
    here, everywhere = map(
        int, re.search(r"(\d+) of (\d+) numbers are on this process", result.stdout).groups()
    )
    assert here < 0.6 * everywhere
    assert "computes the same" in result.stdout


@pytest.mark.full
@pytest.mark.parametrize("example", ["lora", "text_classification", "image_classification"])
def test_a_cookbook_script_prints_the_same_replicated_and_sharded(accel, monkeypatch, tmp_path, example):
    printed = []
    for size, sharded in ((1, ""), (2, ""), (2, "auto")):
        monkeypatch.setenv("ACCEL_PARALLEL_DP_SHARD", sharded or "1")
        folder = tmp_path / f"{size}{sharded}"
        folder.mkdir()
        options = (
            "launch",
            "--cpu",
            *FORKED,
            "--nproc-per-node",
            size,
            EXAMPLES / f"{example}.py",
            "--epochs",
            2,
        )
        result = accel(*options, cwd=folder)
        assert result.returncode == 0, result.stderr
        printed.append(result.stdout)
    assert "epoch 2" in printed[0]
    # Sums in another order round differently, which may move a sample that lies between two classes.
    numbers = [[float(number) for number in re.findall(r"\d+\.\d+|\d+", text)] for text in printed]
    assert [re.sub(r"[\d.]+", "N", text) for text in printed] == [re.sub(r"[\d.]+", "N", printed[0])] * 3
    assert numbers[1:] == [pytest.approx(numbers[0], rel=0.005)] * 2


@pytest.mark.full
def test_an_interrupted_text_classifier_resumes_on_another_number_of_processes(accel):
    def run(size, *options, more=()):
        script = (EXAMPLES / "text_classification.py", "--epochs", 2, *more)
        result = accel("launch", "--cpu", *FORKED, "--nproc-per-node", size, *options, *script)
        assert result.returncode == 0, result.stderr
        return result.stdout.splitlines()

    uninterrupted = run(2, more=("--project-dir", "whole"))
    assert run(2, more=("--stop-after", 21)) == [uninterrupted[0], "saved at step 21"]
    assert run(1, "--resume") == uninterrupted[1:]


@pytest.mark.full
def test_the_moving_average_of_a_sharded_image_classifier_is_resumed(accel, monkeypatch):
    monkeypatch.setenv("ACCEL_PARALLEL_DP_SHARD", "auto")

    def run(epochs, *options, more=()):
        script = (EXAMPLES / "image_classification.py", "--epochs", epochs, *more)
        result = accel("launch", "--cpu", "--nproc-per-node", 2, *options, *script)
        assert result.returncode == 0, result.stderr
        return result.stdout.splitlines()

    uninterrupted = run(2, more=("--project-dir", "whole"))
    assert run(1) + run(2, "--resume") == uninterrupted


def test_an_image_classifier_reports_the_images_that_pad_its_last_batch(accel):
    preload("torchmetrics.classification")
    script = (EXAMPLES / "image_classification.py", "--epochs", 1, "--pad")
    result = accel("launch", "--cpu", "--nproc-per-node", 2, *script)
    assert result.returncode == 0, result.stderr
    assert "epoch 1: 61 images were trained on twice" in result.stdout
    assert len(re.findall("of 450 are correct", result.stdout)) == 2
