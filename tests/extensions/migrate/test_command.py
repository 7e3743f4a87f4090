"""`accel migrate` as a user calls it: diffs, written files and their copies, exit codes, and wrong input."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import libcst
import pytest
from support.processes.commands import call_accel

from accel_cli.errors import UsageError
from accel_cli.extensions.migrate import command, conversion, files
from accel_cli.extensions.migrate.files import migrate_file

RAW = (
    "import torch\nfrom torch.utils.data import DataLoader\n\ntorch.manual_seed(0)\nmodel = torch.nn.Linear(8, 1)\n"
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nloader = DataLoader(torch.randn(32, 8), batch_size=8)\n"
    "for x in loader:\n    loss = model(x).mean()\n    loss.backward()\n    optimizer.step()\n"
)


def raise_error(error):
    raise error


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(RAW)
    return path


def test_the_diff_is_printed_and_nothing_is_written(capfd, script):
    done = call_accel(capfd, "migrate", "train.py")
    assert done.returncode == 0
    assert "+    accelerator.backward(loss)\n" in done.stdout
    assert "1 file would change" in done.stderr
    assert script.read_text() == RAW


def test_the_diff_can_be_applied(capfd, script, tmp_path):
    done = call_accel(capfd, "migrate", "train.py")
    subprocess.run(["git", "apply", "-p0"], input=done.stdout, text=True, check=True, cwd=tmp_path)
    changed = script.read_text()
    script.write_text(RAW)
    call_accel(capfd, "migrate", "--write", "train.py")
    assert script.read_text() == changed


def test_write_keeps_a_copy_and_the_permissions(capfd, script):
    script.chmod(0o750)
    done = call_accel(capfd, "migrate", "--write", "train.py")
    assert done.returncode == 0
    assert "accelerator.backward(loss)" in script.read_text()
    assert script.stat().st_mode & 0o777 == 0o750
    assert script.with_name("train.py.orig").read_text() == RAW
    assert sorted(path.name for path in script.parent.iterdir()) == ["train.py", "train.py.orig"]


def test_write_ends_with_the_size_of_the_batch_and_the_learning_rate_of_a_script_of_one_process(
    capfd, script
):
    text = "on N processes, the global batch is N times as large as before, and the learning rate is not"
    assert text not in call_accel(capfd, "migrate", "train.py").stderr
    assert (
        call_accel(capfd, "migrate", "--write", "train.py")
        .stderr.splitlines()[-1]
        .startswith(f"accel: train.py: {text}")
    )
    parallel = RAW.replace("torch.manual_seed(0)", "torch.distributed.init_process_group()").replace(
        "torch.nn.Linear(8, 1)", "torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))"
    )
    by_hand = RAW.replace("for x in loader:", "for x in torch.randn(4, 8, 8):").replace(
        "loader = Data", "# Data"
    )
    for other in (parallel, by_hand):
        script.write_text(other)
        done = call_accel(capfd, "migrate", "--write", "train.py")
        assert ("wrote train.py" in done.stderr, text in done.stderr) == (True, False), done.stderr


def test_the_file_that_takes_long_is_named_also_without_a_terminal(capfd, script, monkeypatch):
    script.with_name("a.py").write_text("x = 1\n")
    assert " of " not in call_accel(capfd, "migrate", ".").stderr
    reported = threading.Event()

    def note(text):
        if "converting train.py" in text:
            print(text, file=sys.stderr)
            reported.set()

    def convert_slowly(path, folder):
        assert path.name == "a.py" or reported.wait(60)
        return migrate_file(path, folder)

    monkeypatch.setattr(command, "_PROGRESS_S", 0.01)
    monkeypatch.setattr(command.console, "note", note)
    monkeypatch.setattr(files, "migrate_file", convert_slowly)
    assert "read 1 of 2 files; converting train.py" in call_accel(capfd, "migrate", ".").stderr


def test_a_copy_is_not_replaced(capfd, script):
    script.with_name("train.py.orig").write_text("older")
    call_accel(capfd, "migrate", "--write", "train.py")
    assert script.with_name("train.py.orig").read_text() == "older"
    assert script.with_name("train.py.orig.1").read_text() == RAW


def test_a_second_time_nothing_is_left(capfd, script):
    call_accel(capfd, "migrate", "--write", "train.py")
    written = script.read_text()
    done = call_accel(capfd, "migrate", "--write", "--check", "train.py")
    assert (done.returncode, done.stdout, script.read_text()) == (0, "", written)
    assert "nothing to convert" in done.stderr


def test_check_fails_while_something_is_left(capfd, script):
    assert call_accel(capfd, "migrate", "--check", "train.py").returncode == 1
    assert call_accel(capfd, "migrate", "--check", "--write", "train.py").returncode == 0
    script.write_text(RAW.replace("loader = ", "loaders = [").replace("batch_size=8)", "batch_size=8)]"))
    done = call_accel(capfd, "migrate", "--check", "train.py")
    assert done.returncode == 1
    assert "train.py:7: The loader is not assigned to a variable of its own." in done.stderr


TRAINER = """
from trl import SFTConfig, SFTTrainer
trainer = SFTTrainer("model", args=SFTConfig("out"), train_dataset=None)
trainer.train()
"""
OWN_TRAINER = """
from transformers import Trainer
class Own(Trainer):
    def training_step(self, model, inputs):
        loss = model(**inputs).loss
        self.accelerator.backward(loss)
        return loss
"""
LIGHTNING = """
import pytorch_lightning as pl
class Net(pl.LightningModule):
    def training_step(self, batch, index):
        loss = self(batch).mean()
        loss.backward()
"""
LIBRARY_SCRIPTS = {
    "a LightningModule": (LIGHTNING, "LightningModule of pytorch_lightning"),
    "a Trainer": (TRAINER, "SFTTrainer of trl"),
    "through the package": (
        "import transformers\ntransformers.Trainer().train()\n",
        "Trainer of transformers",
    ),
    "beside Accelerate": (TRAINER + "from accelerate import PartialState\n", "SFTTrainer of trl"),
    "with an optimizer": (TRAINER + "optimizer = torch.optim.SGD([], 0.1)\n", "SFTTrainer of trl"),
    "a Trainer of its own": (OWN_TRAINER, "Trainer of transformers"),
}


@pytest.mark.parametrize("name", LIBRARY_SCRIPTS)
def test_a_script_of_a_library_stays_as_it_is_and_the_library_is_named(capfd, script, name):
    text, library = LIBRARY_SCRIPTS[name]
    script.write_text(text)
    done = call_accel(capfd, "migrate", "--write", "--check", "train.py")
    assert (done.returncode, script.read_text()) == (0, text)
    assert f"train.py: nothing has to change, since accel launch runs {library} as it is" in done.stderr


def test_a_loop_beside_a_trainer_is_converted(capfd, script):
    script.write_text(RAW + "from transformers import Trainer\nTrainer(model).train()\n")
    done = call_accel(capfd, "migrate", "train.py")
    assert "accelerator.backward(loss)" in done.stdout
    assert "nothing has to change" not in done.stderr


def test_a_script_of_accelerate_that_is_not_converted_also_runs_as_it_is(capfd, script):
    script.write_text("from accelerate import Accelerator\nAccelerator(megatron_lm_plugin=None)\n")
    done = call_accel(capfd, "migrate", "train.py")
    assert "train.py: accel launch also runs it as it is, with Accelerate" in done.stderr


def test_many_scripts_of_libraries_are_counted(capfd, script):
    for number in range(7):
        script.with_name(f"train{number}.py").write_text(TRAINER)
    done = call_accel(capfd, "migrate", ".")
    assert done.stderr.count("nothing has to change") == 5
    assert "2 files more: the same" in done.stderr


def test_a_folder_is_searched_for_scripts(capfd, script):
    package = script.parent / "package"
    (package / ".venv").mkdir(parents=True)
    (package / ".venv" / "other.py").write_text(RAW)
    (package / "model.py").write_text("x = 1\n")
    (package / "broken.py").write_text("def\n")
    (package / "run.sh").write_text("torchrun --nproc_per_node 2 train.py\n")
    done = call_accel(capfd, "migrate", "--write", ".")
    assert done.returncode == 0
    assert (package / "run.sh").read_text() == "accel launch --nproc_per_node 2 train.py\n"
    assert "accel_runtime" in script.read_text()
    assert (package / ".venv" / "other.py").read_text() == RAW
    assert "broken.py:1: Cannot migrate the script: Python" in done.stderr


def test_a_folder_is_searched_without_what_git_ignores_and_without_pipes(capfd, script):
    names = ("build/lib/train.py", "local.py", "package/train.py", ".hidden/train.py")
    for name in names:
        (script.parent / name).parent.mkdir(parents=True, exist_ok=True)
        (script.parent / name).write_text(RAW)
    os.mkfifo("pipe.py")
    (script.parent / ".gitignore").write_text("build/\n/local.py\n")
    subprocess.run(["git", "init", "-q"], check=True)

    def list_written():
        return [name for name in names if "accel_runtime" in (script.parent / name).read_text()]

    assert call_accel(capfd, "migrate", "--write", ".").returncode == 0
    assert list_written() == ["package/train.py"]
    assert call_accel(capfd, "migrate", "--write", "build", "local.py").returncode == 0
    assert list_written() == ["build/lib/train.py", "local.py", "package/train.py"]


def test_write_continues_after_a_file_that_cannot_be_written(capfd, script):
    long = script.with_name(f"{'a' * 250}.py")  # the name of its copy would be too long
    long.write_text(RAW)
    done = call_accel(capfd, "migrate", "--write", ".")
    assert done.returncode == 2
    assert f"Cannot write {long.name}: File name too long. It is unchanged." in done.stderr
    assert "accelerator.backward(loss)" in script.read_text()
    assert long.read_text() == RAW
    assert {path.name for path in script.parent.iterdir()} == {"train.py", "train.py.orig", long.name}


def test_a_file_whose_write_fails_stays_without_a_copy(capfd, script):
    with mock.patch.object(os, "fsync", side_effect=OSError(28, "No space left on device")):
        done = call_accel(capfd, "migrate", "--write", "train.py")
    assert done.returncode == 2
    assert "Cannot write train.py: No space left on device. It is unchanged." in done.stderr
    assert [path.name for path in script.parent.iterdir()] == ["train.py"]
    assert script.read_text() == RAW


def test_a_file_of_a_folder_that_cannot_be_read_is_reported(capfd, script):
    with mock.patch.object(Path, "read_bytes", side_effect=PermissionError(13, "Permission denied")):
        done = call_accel(capfd, "migrate", ".")
    assert "Cannot read train.py: Permission denied. Check its permissions." in done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize("error", [TypeError("x"), RecursionError(), MemoryError()])
def test_a_file_on_which_accel_fails_does_not_end_the_conversion_of_a_folder(
    capfd, script, monkeypatch, error
):
    script.with_name("bad.py").write_text("loss.backward(bad)\n")
    convert = conversion.migrate_script
    monkeypatch.setattr(
        conversion, "migrate_script", lambda text, *_: raise_error(error) if "bad" in text else convert(text)
    )
    done = call_accel(capfd, "migrate", ".")
    assert "Cannot migrate bad.py: " in done.stderr
    assert "+    accelerator.backward(loss)" in done.stdout


def test_a_line_that_libcst_cannot_read_does_not_end_the_conversion_of_a_folder(capfd, script, monkeypatch):
    script.with_name("bad.py").write_text("loss.backward(bad)\n")
    convert = conversion.migrate_script
    refused = libcst.ParserSyntaxError("x", lines=("",), raw_line=1, raw_column=1)
    monkeypatch.setattr(
        conversion,
        "migrate_script",
        lambda text, *_: raise_error(refused) if "bad" in text else convert(text),
    )
    done = call_accel(capfd, "migrate", ".")
    assert "libcst cannot read this line" in done.stderr
    assert "+    accelerator.backward(loss)" in done.stdout


def test_a_pipe_is_refused(capfd, script):
    os.mkfifo("pipe.py")
    done = call_accel(capfd, "migrate", "pipe.py")
    assert done.returncode == 2
    assert "Cannot migrate pipe.py: expected a Python script (.py)" in done.stderr


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("", None, "Cannot migrate '': the name is empty."),
        ("absent.py", None, "the file does not exist"),
        ("notebook.ipynb", b"{}", "jupyter nbconvert --to script"),
        ("config.yaml", b"{}", "accel config import config.yaml"),
        ("train.txt", b"", "expected a Python script"),
        ("latin.py", "# é\n".encode("latin-1"), "not encoded in UTF-8"),
        ("broken.py", b"x = (\n", "does not accept it"),
    ],
)
def test_wrong_input_is_refused(capfd, script, name, content, message):
    if content is not None:
        (script.parent / name).write_bytes(content)
    done = call_accel(capfd, "migrate", name)
    assert done.returncode == 2
    assert message in done.stderr


def test_an_argument_of_the_script_may_be_empty(capfd, script):
    done = call_accel(capfd, "migrate", "--verify", "absent.py", "--", "--tag", "")
    assert done.returncode == 2
    assert "Cannot verify absent.py" in done.stderr


def test_line_ends_and_the_byte_order_mark_stay(capfd, script):
    script.write_bytes(b"\xef\xbb\xbf" + RAW.replace("\n", "\r\n").encode())
    call_accel(capfd, "migrate", "--write", "train.py")
    written = script.read_bytes()
    assert written.startswith(b"\xef\xbb\xbfimport torch\r\n")
    assert b"accelerator.backward(loss)\r\n" in written
    assert written.count(b"\n") == written.count(b"\r\n")


def test_a_link_stays_a_link(capfd, script):
    script.rename(script.with_name("real.py"))
    script.symlink_to("real.py")
    call_accel(capfd, "migrate", "--write", "train.py")
    assert script.is_symlink()
    assert "accelerator.backward" in script.with_name("real.py").read_text()


@pytest.fixture
def outside(tmp_path):
    """A script that is not in the folder `project`."""
    (tmp_path / "project").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "victim.py").write_text(RAW)
    return tmp_path / "outside" / "victim.py"


@pytest.mark.parametrize("options", [["--write"], []])
@pytest.mark.parametrize("kind", ["file", "link to a link", "folder", "hard link", "copy"])
def test_nothing_outside_of_the_folder_is_written(capfd, script, outside, kind, options):
    project = script.parent / "project"
    if kind == "file":
        (project / "train.py").symlink_to("../outside/victim.py")
    elif kind == "link to a link":
        (project / "train.py").symlink_to("other.txt")
        (project / "other.txt").symlink_to(outside)
    elif kind == "folder":
        (project / "package").symlink_to("../outside")
    elif kind == "hard link":
        (project / "train.py").hardlink_to(outside)
    else:
        (project / "train.py").write_text(RAW)
        (project / "train.py.orig").symlink_to(outside)
        (project / "train.py.orig.1").symlink_to("../outside/new.py")
    done = call_accel(capfd, "migrate", *options, "project")
    assert outside.read_text() == RAW
    assert [path.name for path in outside.parent.iterdir()] == ["victim.py"]
    refused = kind in {"file", "link to a link"}
    assert (f"project/train.py: it is a link out of project, to {outside}" in done.stderr) == refused
    written = bool(options) and kind in {"hard link", "copy"}
    assert ("wrote project/train.py" in done.stderr) == written


def test_a_link_out_of_its_folder_is_refused_by_its_name(capfd, script, outside):
    """A pattern of a shell gives the names of links, too."""
    link = script.parent / "project" / "train.py"
    link.symlink_to(outside)
    done = call_accel(capfd, "migrate", "--write", "project/train.py")
    assert done.returncode == 2
    assert f"Cannot migrate project/train.py: it is a link out of project, to {outside}" in done.stderr
    assert outside.read_text() == RAW


def test_a_folder_may_be_named_by_a_link(capfd, script, outside):
    (script.parent / "link").symlink_to("outside")
    call_accel(capfd, "migrate", "--write", "link")
    assert "accelerator.backward" in outside.read_text()


@pytest.mark.parametrize("what", ["file", "folder"])
def test_nothing_outside_is_written_if_a_link_appears_after_the_check(
    capfd, script, outside, monkeypatch, what
):
    project = script.parent / "project"
    (project / "package").mkdir()
    inside = project / "package" / "victim.py"
    inside.write_text(RAW)

    def replace(path, folder):
        target = resolve(path, folder)
        if what == "file":
            inside.unlink()
            inside.symlink_to(outside)
        else:
            (project / "package").rename(project / "before")
            (project / "package").symlink_to(outside.parent)
        return target

    file = files.migrate_file(inside, project)
    resolve = files.resolve_in_folder
    monkeypatch.setattr(files, "resolve_in_folder", replace)
    with pytest.raises(UsageError, match=r"Cannot write .*victim.py: .*It is unchanged"):
        file.write()
    assert outside.read_text() == RAW
    assert [path.name for path in outside.parent.iterdir()] == ["victim.py"]


def test_a_file_that_was_changed_meanwhile_is_kept(script):
    file = files.migrate_file(script, script.parent)
    script.write_text("import torch\n")
    with pytest.raises(UsageError, match="it was changed meanwhile"):
        file.write()
    assert [(path.name, path.read_text()) for path in script.parent.iterdir()] == [
        ("train.py", "import torch\n")
    ]


def test_without_libcst_the_message_has_the_command_that_installs_it(capfd, script):
    with mock.patch.dict(sys.modules, {"libcst": None}):
        done = call_accel(capfd, "migrate", "train.py")
    assert done.returncode == 2
    assert "install 'libcst>=1.8'" in done.stderr


def test_the_script_is_not_run(capfd, script):
    script.write_text(f"open('executed', 'w').close()\n{RAW}")
    call_accel(capfd, "migrate", "--write", "train.py")
    assert not script.with_name("executed").exists()


def test_a_script_is_read_from_the_standard_input(capfd, monkeypatch, script):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(RAW.encode())))
    done = call_accel(capfd, "migrate", "-", "--write")
    assert done.returncode == 0
    assert "    accelerator.backward(loss)\n" in done.stdout
    assert "@@" not in done.stdout
    monkeypatch.setattr(
        sys, "stdin", io.TextIOWrapper(io.BytesIO(b"#!/bin/sh\ntorchrun --nproc_per_node 2 t.py\n"))
    )
    assert "+accel launch --nproc_per_node 2 t.py\n" in call_accel(capfd, "migrate", "-").stdout


@pytest.mark.parametrize(
    "rest", ["loss.backward()", "dist.init_process_group()", "model = DDP(model)", "Fabric()"]
)
def test_what_is_left_in_a_script_that_imports_accel_is_reported(capfd, script, rest):
    head = "import torch.distributed as dist\nfrom lightning.fabric import Fabric\nfrom torch.nn.parallel import DistributedDataParallel as DDP\n"
    script.write_text(f"from accel_runtime import Accelerator\n{head}accelerator = Accelerator()\n{rest}\n")
    done = call_accel(capfd, "migrate", "--check", "train.py")
    assert done.returncode == 1
    assert "train.py:6: This is not converted, since the script uses accel already." in done.stderr


def test_check_fails_until_the_comments_of_the_places_left_are_removed(capfd, script):
    script.write_text(
        RAW.replace("for x in loader:\n", "for _ in range(3):\n    x = torch.randn(\n        4, 8\n    )\n")
    )
    done = call_accel(capfd, "migrate", "--check", "--write", "train.py")
    assert done.returncode == 1
    assert "train.py:9: These samples are drawn by the script" in done.stderr
    written = script.read_text()
    comment = next(line for line in written.splitlines() if "# accel migrate:" in line)
    assert f"{comment}\n    x = torch.randn(\n" in written
    again = call_accel(capfd, "migrate", "--check", "--write", "train.py")
    assert (again.returncode, script.read_text()) == (1, written)
    assert "These samples are drawn by the script" in again.stderr
    script.write_text(written.replace(f"{comment}\n", ""))
    assert call_accel(capfd, "migrate", "--check", "train.py").returncode == 0


def test_many_files_are_converted_as_one_by_one_and_in_their_order(capfd, script, monkeypatch):
    folder = script.parent
    for number in range(20):
        (folder / f"many{number:02}.py").write_text(RAW if number % 3 else f"x = {number}\n")
    (folder / "wrong.py").write_text("x = (\n")
    monkeypatch.setattr(command, "_PROGRESS_S", 600)
    together = call_accel(capfd, "migrate", ".")
    monkeypatch.setattr(command, "_MANY_FILES", 100)
    assert vars(call_accel(capfd, "migrate", ".")) == vars(together)
    assert together.stdout.count("+accelerator = Accelerator()") == 14
    assert "wrong.py:1: Cannot migrate the script" in together.stderr


IMPORTED = """\
import torch
from torch.utils.data import DataLoader


def move(x, device):
    return x.to(device)


class Trainer:
    def __init__(self, model, data):
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = model.to(self.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loader = DataLoader(data, batch_size=2)

    def run(self):
        for x in self.loader:
            loss = self.model(move(x, self.device)).sum()
            loss.backward()
            self.optimizer.step()
"""
"""A module whose device and function another file may use."""


@pytest.mark.parametrize("is_read", [True, False])
def test_what_another_file_reads_of_a_script_stays(capfd, script, is_read):
    script.write_text(IMPORTED)
    use = "from train import Trainer, move\nmove(1, Trainer(None, None).device)\n"
    script.with_name("main.py").write_text(use if is_read else "from trainer import Trainer\n")
    call_accel(capfd, "migrate", "--write", "train.py")
    changed = script.read_text()
    assert ("self.device = self.accelerator.device" in changed) == is_read
    assert ("def move(x, device):" in changed) == is_read
