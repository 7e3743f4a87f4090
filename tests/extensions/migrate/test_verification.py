"""`accel migrate --verify`: the runs of a script before and after its conversion, and the comparison of their steps."""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.processes.commands import call_accel, run_accel
from support.processes.waits import limit, wait_until

from accel_cli.errors import UsageError
from accel_cli.extensions.migrate import scratch_copy
from accel_cli.extensions.migrate.counter_runs import DATA_DRAWS, DRAWS, NORMS, PADDING, SUM
from accel_cli.extensions.migrate.probe import Probe
from accel_cli.extensions.migrate.scratch_copy import copy_folder, find_root, link_siblings
from accel_cli.extensions.migrate.step_records import (
    Column,
    Difference,
    RunConfig,
    RunEnd,
    Step,
    compare_steps,
    read_end,
    read_steps,
    write_end,
)
from accel_cli.extensions.migrate.verification import (
    ConvertedScript,
    Pair,
    _resolve_argument,
    compare_on_two,
    compare_ranks,
    compare_samples,
    find_difference_on_two,
    find_first_difference,
    read_versions,
)
from accel_cli.extensions.migrate.verification import verify as run_comparison
from accel_cli.extensions.migrate.verification_runs import RankResult, RunResult, VerifyOptions, VerifyRun
from accel_runtime.observe.step_records.digests import digest_tensor, summarize
from accel_runtime.observe.step_records.record import (
    FILE,
    VERSION,
    Batch,
    ForwardPass,
    RankRecord,
    RunHead,
    StepRecord,
    encode,
)

TRAIN = """\
import torch
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
loader = DataLoader(torch.randn(32, 8), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in loader:
    loss = model(x).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.save(model.state_dict(), "model.pt")
"""
DDP = """\
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(3)
model = DDP(nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
dataset = TensorDataset(torch.arange(16.0).view(-1, 1))
sampler = DistributedSampler(dataset, shuffle=True, seed=3)
loader = DataLoader(dataset, batch_size=4, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (x,) in loader:
        loss = model(x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
"""
STYLES = Path(__file__).parent / "styles"


def verify(folder, *args):
    """Run `accel migrate --verify train.py` in a folder; return the exit code, the rows of the table, and the messages."""
    done = run_accel("migrate", "--verify", "train.py", *args, cwd=folder)
    return done.returncode, [line.split("\t") for line in done.stdout.splitlines()[1:]], done.stderr


def has_ended(pid):
    """Return whether a process has ended; its parent may not have read its exit code yet."""
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


# The command


@pytest.mark.slow
def test_a_script_computes_the_same_after_its_conversion_and_its_folder_stays_as_it_is(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "model.pt").write_bytes(b"a model of the user")
    code, rows, messages = verify(tmp_path, "--steps", "3")
    assert code == 0, messages
    assert [row[0] for row in rows] == ["1", "2", "3"]
    assert all(row[1] == row[2] and row[4] == "0" for row in rows)
    assert all(float(row[3]) == pytest.approx(float(row[1]), rel=1e-3) for row in rows)
    assert "equal on one process: 3 steps, largest difference 0." in messages
    assert "equal on two processes up to rounding" in messages
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.pt", "train.py"]
    assert (tmp_path / "model.pt").read_bytes() == b"a model of the user"


@pytest.mark.slow
def test_a_loader_that_is_not_prepared_is_found_although_all_losses_and_weights_are_equal(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    assert run_accel("migrate", "--write", "train.py", cwd=tmp_path).returncode == 0
    converted = (tmp_path / "train.py").read_text()
    names = "model, optimizer, loader"
    assert f"{names} = accelerator.prepare({names})" in converted
    converted = converted.replace(names, "model, optimizer")
    (tmp_path / "train.py").write_text(converted)
    code, rows, messages = verify(tmp_path, "--steps", "2")
    assert code == 1
    assert all(row[1] == row[3] and row[5] == "0" for row in rows)
    assert "not divided over two processes" in messages
    assert "both processes consumed the same samples in step 1 (the loader at train.py:" in messages


@pytest.mark.full
def test_the_order_of_a_distributed_sampler_is_that_of_the_conversion_for_the_comparison(tmp_path):
    (tmp_path / "train.py").write_text(DDP)
    code, _, messages = verify(tmp_path, "--steps", "3")
    assert code == 0, messages
    assert "1 process, with the order of a DataLoader that shuffles" in messages
    assert (
        "equal on one process: 3 steps, largest difference 0. DistributedSampler shuffles by its own seed"
        in messages
    )
    assert "equal on two processes up to rounding" in messages


@pytest.mark.full
def test_a_sum_over_samples_is_named_after_a_run_with_losses_of_twice_the_size(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN.replace("mean()", "sum()"))
    code, _, messages = verify(tmp_path, "--steps", "2")
    assert code == 1
    assert (
        "With losses multiplied by 2, they are equal. The loss is half as large on two processes" in messages
    )


@pytest.mark.full
def test_random_numbers_of_a_data_set_are_named_after_a_run_that_seeds_them_by_sample(tmp_path):
    script = TRAIN.replace(
        "loader = DataLoader(torch.randn(32, 8)",
        "class Noisy:\n    def __len__(self):\n        return 32\n\n    def __getitem__(self, index):\n"
        "        return torch.randn(8) + index\n\n\nloader = DataLoader(Noisy()",
    )
    (tmp_path / "train.py").write_text(script)
    code, _, messages = verify(tmp_path, "--steps", "2")
    assert code == 1
    assert "The data set draws random numbers" in messages


@pytest.mark.slow
def test_a_conversion_that_is_broken_is_found_at_the_first_step_that_differs(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    assert run_accel("migrate", "--write", "train.py", cwd=tmp_path).returncode == 0
    converted = (tmp_path / "train.py").read_text()
    (tmp_path / "train.py").write_text(converted.replace("    optimizer.zero_grad()\n", ""))
    code, rows, messages = verify(tmp_path)
    assert code == 1
    assert "not equal on one process from step 2" in messages
    assert "the losses are equal, and the gradients or the step of the optimizer differ" in messages
    assert [row[4] == "0" for row in rows] == [True, False, False, False]


@pytest.mark.slow
def test_a_script_that_needs_arguments_is_named_with_its_error_and_where_to_pass_them(tmp_path):
    script = (
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--data', required=True)\n"
    )
    script += "path = parser.parse_args().data\nopen(path).read()\n"
    (tmp_path / "train.py").write_text(script + TRAIN)
    code, _, messages = verify(tmp_path)
    assert code == 2
    assert (
        "the script ended after 0 steps: train.py: error: the following arguments are required: --data."
        in messages
    )
    assert "Pass its arguments after --, as in accel migrate --verify train.py -- --data DIR" in messages
    code, _, messages = verify(tmp_path, "--", "--data", "missing.txt")
    assert code == 2
    assert "FileNotFoundError" in messages
    assert "'missing.txt' (train.py:5)" in messages


@pytest.mark.full
def test_batch_norm_is_named_where_two_processes_differ_from_one(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN.replace("nn.Tanh()", "nn.BatchNorm1d(8)"))
    code, _, messages = verify(tmp_path)
    assert code == 1
    assert "equal on one process: 4 steps, all of the script, largest difference 0." in messages
    assert "not equal on two processes from step 1" in messages
    assert (
        "With BatchNorm that uses running statistics, they are equal. BatchNorm1d layers normalize the half"
        in messages
    )


@pytest.mark.full
def test_dropout_is_named_where_two_processes_differ_from_one(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN.replace("nn.Tanh()", "nn.Dropout()"))
    code, _, messages = verify(tmp_path)
    assert code == 1
    assert "equal on one process" in messages
    assert "Without random numbers in the step, they are equal." in messages
    assert "Random numbers are drawn in the step (Dropout)" in messages


@pytest.mark.full
def test_batches_that_cannot_be_divided_are_compared_between_the_processes(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN.replace("batch_size=8", "batch_size=5"))
    code, _, messages = verify(tmp_path, "--steps", "2")
    assert code == 0, messages
    assert "equal weights on both of two processes" in messages
    assert "Together they consumed the samples of 2 steps of one process, each sample once" in messages
    assert "not compared: losses, gradients and weights of two processes with those of one" in messages


@pytest.mark.full
@pytest.mark.parametrize(
    "stem", ["torchrun_trainer", "spawned_workers", "image_classifier", "sine_lbfgs", "translation"]
)
def test_scripts_of_public_styles_compute_the_same(tmp_path, stem):
    (tmp_path / "train.py").write_text((STYLES / f"{stem}.py").read_text())
    code, _, messages = verify(tmp_path, "--steps", "3")
    assert (
        "equal on one process: 3 steps" in messages
        or "equal on one process: 2 steps, all of the script" in messages
    )
    # Its batches are padded each to its own length, so that the loss is not the mean of those of halves; batches by hand are repeated.
    reasons = {"translation": "The cause was not found.", "sine_lbfgs": "not divided over two processes"}
    reason = reasons.get(stem, "equal on two processes up to rounding")
    assert (code, reason in messages) == (int(stem in reasons), True), messages


@pytest.mark.full
def test_a_script_that_takes_too_long_is_ended_with_the_processes_that_it_started(tmp_path):
    folder = tmp_path / "project"
    folder.mkdir()
    wait = (
        "import os, subprocess, sys, time\nfrom pathlib import Path\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"Path({str(tmp_path / 'pids')!r}).write_text(f'{{os.getpid()}} {{child.pid}}')\ntime.sleep(600)\n"
    )
    (folder / "train.py").write_text(wait + TRAIN)
    code, _, messages = verify(folder, "--timeout", "20")
    assert code == 2
    assert "no step in 20 s. Pass a longer time, as --timeout 40" in messages
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 2
    wait_until(lambda: all(has_ended(pid) for pid in pids))


@pytest.mark.full
def test_with_one_gpu_two_processes_are_compared_with_one_on_the_cpu(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path("train.py")
    path.write_text(TRAIN)
    versions, left = read_versions([path])
    before, after = ({path: text} for text in versions[path])
    converted = ConvertedScript(path, before, after, VerifyOptions((), os.environ, 2, limit(300)), devices=1)
    lines = []
    verdict = run_comparison(converted, lines.append)
    assert (verdict.is_equal, left) == (True, "")
    assert lines == [
        "run before the conversion, 1 process, gpu",
        "run after the conversion, 1 process, gpu",
        "run after the conversion, 1 process, cpu, since two processes need two GPUs",
        "run after the conversion, 2 processes, cpu, batches of half the size",
    ]


def test_options_that_have_no_effect_together_are_rejected(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "nothing.py").write_text("print('no training')\n")
    cases = {
        ("--verify", "--write", "train.py"): "Cannot combine --verify with --write",
        ("--steps", "3", "train.py"): "Add --verify",
        ("--verify", "nothing.py"): "nothing is converted",
        ("--verify", "."): "expected the path of a Python script",
        ("--verify", "--steps", "0", "train.py"): "expected at least 1",
    }
    for args, text in cases.items():
        done = call_accel(capfd, "migrate", *args)
        assert (done.returncode, text in done.stderr) == (2, True), done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["nothing.py", "train.py"]


def test_arguments_that_name_files_outside_of_the_copy_become_absolute(tmp_path, monkeypatch):
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    for path in ("data.txt", "project/inside.txt"):
        (tmp_path / path).touch()
    root = Path.cwd().resolve()
    absolute = f"{tmp_path}/project/../data.txt"
    cases = {
        "../data.txt": absolute,
        "--data=../data.txt": f"--data={absolute}",
        "inside.txt": "inside.txt",
        "--lr=0.1": "--lr=0.1",
    }
    assert {one: _resolve_argument(one, root) for one in cases} == cases
    monkeypatch.chdir(tmp_path)
    assert _resolve_argument("data.txt", root) == f"{tmp_path}/data.txt"


# The copy of the folder


def test_the_copy_has_small_files_and_links_to_large_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(scratch_copy, "_MAX_FILE_BYTES", 10)
    source = tmp_path / "source"
    (source / "data").mkdir(parents=True)
    (source / ".git").mkdir()
    (source / "small.txt").write_text("small")
    (source / "data" / "large.bin").write_bytes(b"x" * 11)
    (source / "link").symlink_to("data")
    copy_folder(source, tmp_path / "copy")
    copy = tmp_path / "copy"
    assert sorted(path.name for path in copy.iterdir()) == ["data", "link", "small.txt"]
    assert not (copy / "small.txt").is_symlink()
    assert (copy / "data" / "large.bin").readlink() == source / "data" / "large.bin"
    assert (copy / "link").readlink() == source / "data"


def test_too_many_files_are_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr(scratch_copy, "_MAX_ENTRIES", 1)
    for name in "ab":
        (tmp_path / name).touch()
    with pytest.raises(UsageError, match="more than 1 files"):
        copy_folder(tmp_path, tmp_path.with_name("copy"))


def test_the_current_folder_is_copied_if_the_script_is_in_it_unless_it_is_the_home_folder(
    tmp_path, monkeypatch
):
    (tmp_path / "src").mkdir()
    script = tmp_path / "src" / "train.py"
    script.touch()
    assert find_root(script, tmp_path) == tmp_path.resolve()
    assert find_root(script, tmp_path / "other") == script.parent.resolve()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_root(script, tmp_path) == script.parent.resolve()


@pytest.fixture
def probe(tmp_path):
    """Return the probe of a script in a copy with links: to a large file of the user's folder, and to a folder beside it."""
    (tmp_path / "original").mkdir()
    (tmp_path / "original" / "large.bin").write_bytes(b"of the user")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "old.txt").write_text("of the user")
    copy = tmp_path / "run" / "tree" / "original"
    copy.mkdir(parents=True)
    (copy / "large.bin").symlink_to(tmp_path / "original" / "large.bin")
    link_siblings(tmp_path / "original", copy)
    config = RunConfig(
        rank=0,
        world_size=1,
        max_steps=1,
        results=str(tmp_path / "run" / "results"),
        tree=str(copy.parent),
        copy=str(copy),
        original=str(tmp_path / "original"),
        is_split=False,
    )
    return Probe(config), copy


def test_a_script_writes_to_copies_of_linked_files_and_not_into_the_folder_of_the_user(probe, tmp_path):
    probe, copy = probe
    probe.protect_files("open", (str(copy / "large.bin"), "rb", 0))
    assert (copy / "large.bin").is_symlink()
    probe.protect_files("open", (str(copy / "large.bin"), "r+b", 0))
    assert not (copy / "large.bin").is_symlink()
    assert (copy / "large.bin").read_bytes() == b"of the user"
    with pytest.raises(PermissionError, match="runs the script in a copy"):
        probe.protect_files("open", (str(tmp_path / "original" / "new.bin"), None, os.O_WRONLY | os.O_CREAT))
    with pytest.raises(PermissionError):
        probe.protect_files("os.remove", (str(tmp_path / "original" / "large.bin"), -1))
    probe.protect_files("open", (str(copy / "new.bin"), "wb", 0))


def test_a_script_changes_links_to_folders_instead_of_the_folders(probe, tmp_path):
    probe, copy = probe
    data = copy.parent / "data"
    assert (data / "old.txt").read_text() == "of the user"
    for event, path in (("os.remove", data / "old.txt"), ("os.mkdir", data / "new")):
        probe.protect_files(event, (str(path), -1))
    (data / "old.txt").unlink()
    (data / "new").mkdir()
    assert not data.is_symlink()
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["old.txt"]


# The comparison


def read(first, last, name="index"):
    """Return the samples of a batch of a loader, from their numbers."""
    return Column("loader", "train.py:9", name, tuple(map(str, range(first, last))))


def record(step, *samples, **fields):
    """Return a step whose loss is its number."""
    base = Step(
        loss=float(step),
        weights=(f"weights {step}",),
        gradients_norm=1.0,
        random={"torch": "a state"},
        rates=(0.1,),
        samples=samples,
        is_drawn=False,
        difference=Difference(0.0, 0.0, 0.0),
    )
    return replace(base, **fields)


def run(*steps, error="", ranks=1, **end):
    """Return the result of a run whose ranks have recorded the same steps."""
    return RunResult((RankResult(steps, RunEnd(len(steps), error, **end), ""),) * ranks, error)


def run_ranks(*ranks):
    """Return the result of a run with the steps of each rank."""
    return RunResult(tuple(RankResult(tuple(steps), RunEnd(len(steps)), "") for steps in ranks))


FAR = Difference(0.1, 0.5, 0.5)


def test_equal_runs_have_no_step_that_differs():
    one, two = run(record(1), record(2)), run(record(1), record(2), ranks=2)
    assert not find_first_difference(one, one).step
    assert not compare_ranks(two).step
    assert not find_difference_on_two(one, two).step


def test_steps_are_equal_only_with_equal_losses_and_weights():
    before = run(record(1), record(2))
    for changed in ({"loss": 2.0000001}, {"weights": ("other",)}, {"loss": None}):
        part = find_first_difference(before, run(record(1), record(2, **changed)))
        assert part.step == 2, changed
    nan = run(record(1, loss=float("nan")))
    assert not find_first_difference(nan, nan).step
    assert find_first_difference(before, run(record(1))).step == 2


def compare(one, two, equal_with=None, failure=""):
    """Return the comparison of two processes with one; runs with the changes `equal_with` are equal, others are not."""
    folders = set()

    def run_again(again):
        assert again.name not in folders
        folders.add(again.name)
        is_equal = equal_with is not None and equal_with <= {*again.changes}
        return run(record(1, difference=Difference(0, 0, 0) if is_equal else FAR), ranks=again.world_size)

    lines = []
    pair = Pair(
        VerifyRun("after", {}), VerifyRun("two", {}, world_size=2), one, two, run_again, lines.append, failure
    )
    return compare_on_two(pair), lines


def test_two_processes_are_equal_if_their_samples_are_those_of_one():
    one = run(record(1, read(0, 4)), record(2, read(4, 8)))
    two = run_ranks(
        [record(1, read(0, 2)), record(2, read(4, 6))], [record(1, read(2, 4)), record(2, read(6, 8))]
    )
    result, _ = compare(one, two)
    assert result.is_equal
    assert (
        "Together they consumed the samples of each step of one process, each sample once (the loader at train.py:9)."
        in (result.sentences[0])
    )


def test_two_processes_that_consume_the_same_samples_are_not_equal_although_all_numbers_are():
    one = run(record(1, read(0, 4)))
    for ranks in ((read(0, 4), read(0, 4)), (read(0, 2), read(0, 2))):
        result, _ = compare(one, run_ranks(*([record(1, samples)] for samples in ranks)))
        assert not result.is_equal
        assert (
            "both processes consumed the same samples in step 1 (the loader at train.py:9)"
            in result.sentences[0]
        )


def test_one_of_two_loaders_that_is_not_divided_is_found():
    extra = replace(read(0, 4), source="train.py:12")
    one = run(record(1, read(0, 4), extra))
    two = run_ranks([record(1, read(0, 2), extra)], [record(1, read(2, 4), extra)])
    result, _ = compare(one, two)
    assert (result.is_equal, "(the loader at train.py:12)" in result.sentences[0]) == (False, True)


def test_equal_indices_of_datasets_of_each_process_are_other_samples():
    values = [read(0, 4, ".0"), read(4, 8, ".0")]
    one = run(record(1, read(0, 4), values[0]), record(2, read(4, 8), values[1]))
    ranks = [[record(1, read(0, 4), value)] for value in values]
    assert not compare_samples(one, run_ranks(*ranks)).is_repeated
    assert compare_samples(one, run_ranks(*ranks), batches_per_step=2).is_divided


def test_a_process_that_takes_its_part_of_a_batch_by_itself_divides_it():
    inputs = [Column("model", "", ".0", rows) for rows in (("a", "b"), ("a",), ("b",))]
    one = run(record(1, read(0, 2), inputs[0]))
    two = run_ranks([record(1, read(0, 2), inputs[1])], [record(1, read(0, 2), inputs[2])])
    assert compare_samples(one, two).is_divided


def test_inputs_that_are_computed_alike_are_the_same_samples_only_with_equal_losses():
    mask = Column("model", "", ".mask", ("a",))
    one = run(record(1, mask))
    assert compare_samples(one, run(record(1, mask), ranks=2)).is_repeated
    other = run_ranks([record(1, mask)], [record(1, mask, loss=2.0)])
    assert not compare_samples(one, other).is_repeated


def test_processes_without_known_samples_compute_the_same_if_all_their_losses_are_equal():
    one = run(record(1), record(2))
    result, _ = compare(one, run(record(1), record(2), ranks=2))
    assert (result.is_equal, "both compute the same loss in each step" in result.sentences[0]) == (
        False,
        True,
    )
    steps = [record(1), record(2)]
    two = run_ranks(steps, [replace(step, loss=step.loss * 1.0005) for step in steps])
    result, _ = compare(one, two)
    assert (result.is_equal, result.sentences[1]) == (True, "not compared: the samples of each process")


def test_samples_that_one_process_does_not_have_or_has_once_are_not_equal_although_all_numbers_are():
    one = run(record(1, read(0, 4)))
    for last, reason in ((read(3, 5), "are not those of one"), (read(1, 4), "samples are repeated")):
        result, _ = compare(one, run_ranks([record(1, read(0, 2))], [record(1, last)]))
        assert (result.is_equal, reason in result.sentences[0]) == (False, True), result.sentences


def test_batches_that_cannot_be_halved_are_those_of_two_steps():
    one = run(record(1, read(0, 3)), record(2, read(3, 6)))
    two = run_ranks([record(1, read(0, 3))], [record(1, read(3, 6))])
    result, _ = compare(one, two, failure="ValueError: 3")
    assert result.is_equal
    assert "the samples of 2 steps of one process" in result.sentences[0]
    assert (
        "not compared: losses, gradients and weights of two processes with those of one"
        in result.sentences[1]
    )


CAUSES = {
    "BatchNorm": ({NORMS}, {}, {"layers": ("BatchNorm2d",)}, "BatchNorm2d layers normalize the half"),
    "dropout": ({DRAWS}, {"is_drawn": True}, {"layers": ("Dropout",)}, r"drawn in the step \(Dropout\)"),
    "data": ({DATA_DRAWS}, {}, {"is_drawn_by_data": True}, "The data set draws random numbers"),
    "workers": ({DATA_DRAWS}, {}, {"workers": 2}, "The data set draws random numbers"),
    "sum": ({SUM}, {"gradients_norm": 2.0}, {}, "The loss is half as large on two processes"),
    "both": (
        {NORMS, SUM},
        {"gradients_norm": 2.0},
        {"layers": ("BatchNorm2d",)},
        "The loss is half as large on two processes",
    ),
    "padding": ({PADDING}, {"samples": (read(0, 3),)}, {}, "even_batches=False"),
}


@pytest.mark.parametrize("name", CAUSES)
def test_a_cause_is_named_if_the_difference_is_gone_without_it_and_only_then(name):
    changes, step, end, text = CAUSES[name]
    samples = step.get("samples", (read(0, 4),))
    one = run(record(1, **{**step, "samples": samples}), **end)
    two = run_ranks(
        [record(1, read(0, 2), difference=FAR, weights=("two",))], [record(1, read(2, 4), weights=("two",))]
    )
    if name == "padding":
        two = run_ranks(
            [record(1, read(0, 2), difference=FAR)], [record(1, read(2, 3), read(0, 1), difference=FAR)]
        )
    result, lines = compare(one, two, changes)
    assert re.search(text, result.sentences[0]), result.sentences
    assert "they are equal" in result.sentences[0]
    assert lines
    result, _ = compare(one, two)
    assert not result.is_equal
    assert "The cause was not found." in result.sentences[0]
    assert name == "padding" or not re.search(text, result.sentences[0])


def test_the_schedule_explains_different_learning_rates():
    part = find_difference_on_two(run(record(1)), run(record(1, rates=(0.05,)), ranks=2))
    assert (part.step, "the learning rate is 0.1 on one process, and 0.05 on two" in part.reason) == (1, True)


def test_what_may_be_a_cause_is_not_named_if_the_difference_is_gone_with_it_too():
    one = run(record(1, read(0, 4), is_drawn=True), layers=("BatchNorm2d",), workers=2)
    two = run_ranks(*([record(1, samples, difference=FAR)] for samples in (read(0, 2), read(2, 4))))
    result, _ = compare(one, two, {DRAWS})
    assert (
        "Without random numbers in the step, they are equal. Random numbers are drawn" in result.sentences[0]
    )
    assert not re.search("data set|BatchNorm", result.sentences[0])


def test_a_difference_without_a_known_cause_is_named_as_such():
    two = run_ranks(*([record(1, samples, difference=FAR)] for samples in (read(0, 2), read(2, 4))))
    result, lines = compare(run(record(1, read(0, 4))), two)
    assert (result.sentences[0].endswith("The cause was not found."), lines) == (True, [])


def test_ranks_whose_weights_differ_are_not_equal():
    first, second = (
        RankResult((record(1),), RunEnd(1), ""),
        RankResult((record(1, weights=("other",)),), RunEnd(1), ""),
    )
    part = find_difference_on_two(run(record(1)), RunResult((first, second)))
    assert (part.step, "the weights of the two processes differ" in part.reason) == (1, True)


def test_half_precision_has_a_larger_tolerance():
    one, two = run(record(1)), run(record(1, difference=Difference(1e-3, 1e-2, 1e-2)), ranks=2)
    assert find_difference_on_two(one, two).step == 1
    assert not find_difference_on_two(one, two, is_half=True).step


# The records


def encode_step(step, weights, gradients, loss=0.5, start=None):
    """Return the record of a step of an optimizer, from its tensors."""
    tensors = {"weights": weights, "gradients": gradients, "start": weights if start is None else start}
    digests = {name: digest_tensor(one) for name, one in tensors.items()}
    values = {digests[name]: summarize(one) for name, one in tensors.items()}
    batch = Batch("train.py:9", "index", ("0", "1"))
    inputs = (Batch("model", ".0", ("a", "b")), Batch("model", ".scale()", ("c",)))
    return StepRecord(
        step=step,
        optimizer=0,
        before=(("w", digests["start"]),),
        passes=(
            ForwardPass(batches=(batch,), inputs=inputs, losses=(("a digest", loss),), drawn=("torch",)),
        ),
        before_clipping=None,
        clipped_after=0,
        clipping="",
        read=(("w", digests["gradients"]),),
        norm=float(gradients.norm()),
        options={},
        rates=(0.1,),
        state=(),
        parameters=(("w", digests["weights"]),),
        random={"torch": "a state"},
        values=values,
    )


def write_record(folder, *steps):
    """Write the record of rank 0; return the folder of the results."""
    (folder / "0").mkdir(parents=True)
    head = encode("run", RunHead(VERSION, 0, 1, "host", {"every": 1}, {}))
    (folder / "0" / FILE).write_text(head + "".join(encode("step", one) for one in steps))
    return folder


def test_the_steps_of_a_run_are_those_of_its_record_and_differ_from_another_one_by_the_norms(tmp_path):
    start, weights, gradients = torch.zeros(2000), torch.randn(2000), torch.randn(2000)
    first = write_record(tmp_path / "first", encode_step(1, weights, gradients, start=start))
    other = encode_step(1, weights * 1.01, gradients + 1e-4 * torch.randn(2000), start=start)
    (step,), reason = read_steps(write_record(tmp_path / "second", other), 0, first)
    assert (step.loss, step.rates, step.is_drawn, reason) == (0.5, (0.1,), True, "")
    assert [(one.kind, one.source, one.name) for one in step.samples] == [
        ("loader", "train.py:9", "index"),
        ("model", "", ".0"),
    ]
    # Sketches estimate a norm.
    assert 0.005 < step.difference.weights < 0.02
    assert 0.005 < step.difference.update < 0.02
    assert 3e-5 < step.difference.gradients < 3e-4
    (same,), _ = read_steps(first, 0, first)
    assert same.difference == Difference(0.0, 0.0, 0.0)


def test_steps_of_other_parameters_have_no_difference_and_lost_numbers_an_infinite_one(tmp_path):
    one = encode_step(1, torch.ones(4), torch.ones(4))
    for other, expected in (
        (encode_step(1, torch.ones(5), torch.ones(4)), None),
        (encode_step(1, torch.tensor([1.0, 1, 1, float("nan")]), torch.ones(4)), math.inf),
    ):
        reference = RankRecord(RunHead(VERSION, 0, 1, "host", {}, {}), (), (), {1: other})
        found = compare_steps(one, 1, reference)
        assert (found and found.weights) == expected
        assert compare_steps(one, 2, reference) is None


def test_records_of_a_process_that_was_ended_within_a_line_are_read(tmp_path):
    results = write_record(tmp_path, encode_step(1, torch.ones(4), torch.ones(4)))
    with (results / "0" / FILE).open("a") as file:
        file.write('{"kind": "ste')
    assert (len(read_steps(results, 0, None)[0]), read_end(results, 0)) == (1, None)
    assert read_steps(results, 1, None) == ((), "")
    end = RunEnd(1, layers=("Dropout",), workers=2)
    write_end(results / "0", end)
    assert read_end(results, 0) == end
