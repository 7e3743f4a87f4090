"""`accel migrate --verify`: the runs of a script before and after its conversion, and the comparison of their steps."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from support.commands import call_accel, run_accel
from support.waits import limit, wait_until

from accel_cli.errors import UsageError
from accel_cli.migrate import scratch_copy
from accel_cli.migrate.probe import Probe
from accel_cli.migrate.scratch_copy import copy_folder, find_root, link_siblings
from accel_cli.migrate.step_records import (
    Difference,
    RunConfig,
    RunEnd,
    StepRecord,
    encode_record,
    read_records,
)
from accel_cli.migrate.verification import (
    ConvertedScript,
    _resolve_argument,
    compare_ranks,
    find_difference_on_two,
    find_first_difference,
    read_versions,
)
from accel_cli.migrate.verification import verify as run_comparison
from accel_cli.migrate.verification_runs import RankResult, RunOptions, RunResult

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
STYLES = Path(__file__).parent / "styles"


def verify(folder, *args):
    """Run `accel migrate --verify train.py` in a folder; return the exit code, the rows of the table, and the messages."""
    done = run_accel("migrate", "--verify", "train.py", *args, cwd=folder)
    return done.returncode, [line.split("\t") for line in done.stdout.splitlines()], done.stderr


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
    assert "BatchNorm1d layers normalize the half of the batch" in messages


@pytest.mark.full
def test_dropout_is_named_where_two_processes_differ_from_one(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN.replace("nn.Tanh()", "nn.Dropout()"))
    code, _, messages = verify(tmp_path)
    assert code == 1
    assert "equal on one process" in messages
    assert "Random numbers are drawn in the step (Dropout)" in messages


@pytest.mark.full
def test_batches_that_cannot_be_divided_are_compared_between_the_processes(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN.replace("batch_size=8", "batch_size=5"))
    code, _, messages = verify(tmp_path, "--steps", "2")
    assert code == 0, messages
    assert "equal weights on both of two processes" in messages
    assert "The batches of the script cannot be divided" in messages


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
    # Its batches are padded each to its own length, which a finding says.
    pads = stem == "translation"
    assert (code, "is not the mean of the losses of its halves" in messages) == (int(pads), pads), messages


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
    converted = ConvertedScript(path, before, after, RunOptions((), os.environ, 2, limit(300)), devices=1)
    lines = []
    verdict = run_comparison(converted, lines.append)
    assert (verdict.is_equal, left) == (True, "")
    assert lines == [
        "run before the conversion, 1 process, gpu",
        "run after the conversion, 1 process, gpu",
        "run after the conversion, 1 process, cpu, since two processes need two GPUs",
        "run after the conversion, 2 processes, cpu, each batch divided over them",
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
        reference="",
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


def record(step, **fields):
    """Return a step whose loss is its number."""
    base = StepRecord(
        step,
        float(step),
        f"weights {step}",
        "generators",
        (0.1,),
        8,
        False,
        False,
        0,
        Difference(0.0, 0.0, 0.0),
    )
    return replace(base, **fields)


def run(*steps, layers=(), error="", ranks=1):
    """Return the result of a run whose ranks have recorded the same steps."""
    return RunResult((RankResult(steps, RunEnd(len(steps), error, layers), ""),) * ranks, error)


FAR = Difference(0.1, 0.5, 0.5)


def test_equal_runs_have_no_step_that_differs():
    one, two = run(record(1), record(2)), run(record(1), record(2), ranks=2)
    assert not find_first_difference(one, one).step
    assert not compare_ranks(two).step
    assert not find_difference_on_two(one, two).step


def test_steps_are_equal_only_with_equal_losses_and_weights():
    before = run(record(1), record(2))
    for changed in ({"loss": 2.0000001}, {"digest": "other"}, {"loss": None}):
        part = find_first_difference(before, run(record(1), record(2, **changed)))
        assert part.step == 2, changed
    nan = run(record(1, loss=float("nan")))
    assert not find_first_difference(nan, nan).step
    assert find_first_difference(before, run(record(1))).step == 2


REASONS = {
    "BatchNorm": ({}, {"layers": ("BatchNorm2d",)}, "BatchNorm2d layers normalize the half"),
    "dropout": ({"is_drawn": True}, {"layers": ("Dropout",)}, r"drawn in the step \(Dropout\)"),
    "data": ({"is_drawn_by_data": True}, {}, "The data set draws random numbers"),
    "workers": ({"workers": 2}, {}, "Workers load the batches"),
    "odd": ({"samples": 7}, {}, "A batch of 7 samples"),
    "none": ({}, {}, "No known reason was found"),
}


@pytest.mark.parametrize("name", REASONS)
def test_a_known_reason_explains_why_two_processes_differ(name):
    step, end, reason = REASONS[name]
    one = run(record(1), record(2, **step), **end)
    two = run(
        record(1),
        record(2, difference=FAR, **{key: value for key, value in step.items() if key != "samples"}),
        ranks=2,
    )
    part = find_difference_on_two(one, two)
    assert part.step == 2
    assert re.search(reason, part.reason), part.reason


def test_the_schedule_explains_different_learning_rates():
    part = find_difference_on_two(run(record(1)), run(record(1, rates=(0.05,)), ranks=2))
    assert (part.step, "the learning rate is 0.1 on one process, and 0.05 on two" in part.reason) == (1, True)


def test_the_mean_explains_another_loss_of_the_first_step():
    part = find_difference_on_two(run(record(1)), run(record(1, loss=1.1), ranks=2))
    assert (part.step, "is not the mean of the losses of its halves" in part.reason) == (1, True)


def test_ranks_whose_weights_differ_are_not_equal():
    first, second = (
        RankResult((record(1),), RunEnd(1), ""),
        RankResult((record(1, digest="other"),), RunEnd(1), ""),
    )
    part = find_difference_on_two(run(record(1)), RunResult((first, second)))
    assert (part.step, "the weights of the two processes differ" in part.reason) == (1, True)


def test_half_precision_has_a_larger_tolerance():
    one, two = run(record(1)), run(record(1, difference=Difference(1e-3, 1e-2, 1e-2)), ranks=2)
    assert find_difference_on_two(one, two).step == 1
    assert not find_difference_on_two(one, two, is_half=True).step


def test_records_of_a_process_that_was_ended_within_a_line_are_read(tmp_path):
    path = tmp_path / "0.jsonl"
    path.write_text(encode_record(record(1)) + encode_record(record(2))[:20])
    assert read_records(path) == ((record(1),), None)
    path.write_text(encode_record(record(1, difference=None)) + encode_record(RunEnd(1, layers=("Dropout",))))
    assert read_records(path) == ((record(1, difference=None),), RunEnd(1, layers=("Dropout",)))
