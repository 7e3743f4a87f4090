"""Launchers as the target of `accel launch` are refused with the command that works."""

import shutil
import sys
import sysconfig
from pathlib import Path

import pytest
from support.processes.commands import call_accel

from accel_cli.planning.nested_launchers import find_nested_launcher

BIN = Path(sysconfig.get_path("scripts"))


@pytest.mark.parametrize(
    ("target", "kind", "args", "words"),
    [
        ("trl", "script", "sft --model m", "-m trl.scripts.sft --model m"),
        ("trl", "program", "vllm-serve --model m", "-m trl.scripts.vllm_serve --model m"),
        ("trl", "script", "dpo --num_processes 4 --beta 1", "--num_processes 4 -m trl.scripts.dpo --beta 1"),
        ("trl", "script", "dpo --accelerate_config c.yaml", "--config_file c.yaml -m trl.scripts.dpo"),
        ("trl", "script", "--help", None),
        ("accelerate", "script", "launch --num_processes 2 x.py 1", "--num_processes 2 x.py 1"),
        ("accelerate", "program", "config", None),
        ("accelerate-launch", "script", "x.py", "x.py"),
        ("accelerate.commands.launch", "module", "-m x", "-m x"),
        ("torchrun", "script", "--nproc_per_node=2 x.py 1", "--nproc_per_node=2 x.py 1"),
        ("torchrun", "program", "x.py", "x.py"),
        ("torch.distributed.run", "module", "x.py", "x.py"),
        ("torch.distributed.launch", "module", "x.py", "x.py"),
        ("deepspeed", "script", "--num_gpus 2 x.py --deepspeed d.json", "x.py --deepspeed d.json"),
        ("deepspeed", "script", "--num_gpus=2 --module x --lr 1", "-m x --lr 1"),
        ("deepspeed", "program", "--bind_cores_to_rank", None),
        ("accel", "script", "launch --cpu x.py", "--cpu x.py"),
        ("accel_cli", "module", "launch x.py", "x.py"),
        ("python", "script", "x.py 1", "x.py 1"),
        ("python3.11", "script", "-u -W ignore x.py", "x.py"),
        (sys.executable, "script", "-m x 1", "-m x 1"),
        ("python", "script", "-c pass", None),
        ("python", "program", "-m torch.distributed.run x.py", "x.py"),
        ("python", "program", "-u -m accelerate.commands.launch x.py", "x.py"),
    ],
)
def test_a_launcher_is_found_with_the_words_of_the_same_launch(target, kind, args, words, cwd):
    nested = find_nested_launcher(target, kind, args.split())
    assert nested is not None
    assert nested.words == (words and tuple(words.split()))


@pytest.mark.parametrize(
    ("target", "kind", "args"),
    [
        ("x.py", "script", "torchrun x.py"),
        ("python", "program", "x.py"),
        (sys.executable, "program", "-m x"),
        ("bash", "program", "-c torchrun"),
        ("accelerate.test_utils.scripts.test_script", "module", ""),
        ("trl.scripts.sft", "module", ""),
        ("torchrun.py", "script", ""),
    ],
)
def test_a_script_of_the_user_is_no_launcher(target, kind, args, cwd):
    assert find_nested_launcher(target, kind, args.split()) is None


@pytest.mark.parametrize(
    "text", ["#!/usr/bin/env python\nimport torch\n", "#!/usr/bin/python3\nimport torch\n"]
)
def test_a_script_with_the_name_of_a_launcher_is_that_of_the_user(text, cwd):
    for name in ("trl", "accelerate", "deepspeed", "python"):
        Path(name).write_text(text)
        assert find_nested_launcher(f"./{name}", "script", ("launch", "x.py")) is None
    Path("accel").mkdir()
    assert find_nested_launcher("accel", "script", ()) is None


@pytest.mark.parametrize("name", ["accel", "accelerate", "accelerate-launch", "torchrun", "trl"])
@pytest.mark.parametrize("kind", ["script", "program"])
def test_every_launcher_of_this_environment_is_found(name, kind):
    path = BIN / name
    if not path.exists():
        pytest.skip(f"{name} is not installed")
    assert find_nested_launcher(str(path), kind, ()).name == name


def test_a_console_script_is_found_by_what_it_imports(cwd):
    for line in ("#!/venv/bin/python", "#!/bin/sh", "#!/usr/bin/env bash"):
        Path("torchrun").write_text(f"{line}\nfrom torch.distributed.run import main\n")
        assert find_nested_launcher("./torchrun", "program", ("x.py",)).name == "torchrun"
    text = "#!/venv/bin/python\n\nfrom deepspeed.launcher.runner import main\n\nif __name__ == '__main__':\n    main()\n"
    Path("deepspeed").write_text(text)
    assert find_nested_launcher("./deepspeed", "script", ("x.py",)).words == ("x.py",)


@pytest.mark.parametrize("flags", [(), ("--no-python",), ("-m",)])
def test_the_refusal_has_the_command_with_the_options_of_the_launch(flags, capfd, cwd):
    target = "torch.distributed.run" if flags == ("-m",) else shutil.which("torchrun", path=str(BIN))
    words = ("--cpu", "--nproc-per-node", "2", *flags, "--", target, "--nnodes", "1", "x.py", "a b")
    result = call_accel(capfd, "launch", *words)
    assert (result.returncode, result.stdout) == (2, "")
    assert "Cannot launch torchrun: it starts processes itself" in result.stderr
    assert result.stderr.rstrip().endswith("accel launch --cpu --nproc-per-node 2 --nnodes 1 x.py 'a b'")


def test_python_before_a_script_is_refused_with_the_script(capfd, cwd):
    Path("x.py").write_text("")
    result = call_accel(capfd, "launch", "--cpu", "python", "x.py", "--lr", "1")
    assert result.returncode == 2
    assert (
        "Cannot launch python: accel launch starts Python itself. Launch the script itself: accel launch --cpu x.py --lr 1"
        in (result.stderr)
    )
