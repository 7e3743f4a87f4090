"""Start-up code of Python that must run in each process, and the start method that follows from it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import Process
from support.waits import limit

ROOT = Path(__file__).parents[3]
READS = "import os\nos.write(1, f\"rank {os.environ.get('LOCAL_RANK')}\\n\".encode())\n"


@pytest.fixture
def explain(tmp_path, monkeypatch):
    """Return the explanation of an interpreter that finds these files on its path, and its environment."""

    def run(files, pth=""):
        folder = tmp_path / "site"
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(Path.cwd())]))
        if pth:
            user = tmp_path / "user"
            version = f"python{sys.version_info.major}.{sys.version_info.minor}"
            packages = user / "lib" / version / "site-packages"
            packages.mkdir(parents=True)
            (packages / "startup.pth").write_text(pth)
            monkeypatch.setenv("PYTHONUSERBASE", str(user))
        code = (
            "import site; from accel_cli.planning import startup_code\n"
            f"site.ENABLE_USER_SITE = {bool(pth)}\n"
            "print('->', startup_code.explain_startup_code())"
        )
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        return result.stdout.rpartition("-> ")[2].strip()

    return run


@pytest.mark.parametrize(
    ("files", "pth", "reason"),
    [
        ({"sitecustomize.py": READS}, "", "sitecustomize.py reads LOCAL_RANK"),
        ({"usercustomize.py": "import os\nnumber = os.environ['RANK']"}, "", "usercustomize.py reads RANK"),
        ({"sitecustomize.py": "import os\nPID = os.getpid()"}, "", "uses its process id or starts a thread"),
        ({"sitecustomize.py": "from threading import Thread\nThread(target=print).start()"}, "", "starts a thread"),
        ({"sitecustomize.py": "import setup_ranks", "setup_ranks.py": READS}, "", "setup_ranks.py reads LOCAL_RANK"),
        ({"sitecustomize.py": "from a import b", "a/__init__.py": "import other", "other.py": READS}, "", "other.py reads"),
        ({"helper.py": READS}, "import helper\n", "helper.py reads LOCAL_RANK"),
        ({"a/b.py": READS, "a/__init__.py": ""}, "import os; import a.b\n", "b.py reads LOCAL_RANK"),
        ({}, "import os; os.environ.get('WORLD_SIZE')\n", "startup.pth reads WORLD_SIZE"),
        ({"sitecustomize.py": "import os\nos.environ.get('SHLVL')", "ranks.py": READS}, "", ""),
        ({"sitecustomize.py": "raise ImportError('RANKED')", "a.py": "import sitecustomize"}, "", ""),
        ({}, "/some/folder\n# RANK\n", ""),
        ({"sitecustomize.py": "import missing.module\n"}, "", ""),
        ({"sitecustomize.py": "import json, threading, subprocess\n"}, "", ""),
    ],
)  # fmt: skip
def test_start_up_code_that_must_run_in_each_process_is_found(explain, files, pth, reason):
    found = explain(files, pth)
    assert (reason in found) if reason else found == ""


@pytest.mark.slow
def test_a_launch_with_such_code_starts_processes_by_exec_and_explains_it(tmp_path, script, cwd, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(READS)
    script("print('ran', __import__('os').environ['LOCAL_RANK'])")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    command = [sys.executable, "-m", "accel_cli", "launch", "--nproc-per-node", "2", "--ranks", "all"]
    reason = f"the start-up code in {tmp_path}/sitecustomize.py reads LOCAL_RANK"
    explained = subprocess.run(
        [*command, "--explain", "train.py"], capture_output=True, text=True, check=True
    )
    assert f"start method: exec ({reason})\n" in explained.stdout
    with Process([*command, "train.py"], stdout=subprocess.PIPE, text=True) as process:
        out, _ = process.communicate(timeout=limit(120))
    lines = [line.rpartition(" | ")[2].strip() for line in out.splitlines()]
    assert {"rank 0", "rank 1", "ran 0", "ran 1"} <= {line.partition("] ")[2] or line for line in lines}
    forced = [*command, "--set", "launcher.start_method=forkserver", "train.py"]
    refused = subprocess.run(forced, capture_output=True, text=True, check=False)
    assert (refused.returncode, f"Cannot use start_method: forkserver: {reason}." in refused.stderr) == (
        2,
        True,
    )


@pytest.mark.slow
def test_start_up_code_on_a_path_that_the_profile_sets_is_found_by_the_fork_server(tmp_path, script):
    (tmp_path / "sitecustomize.py").write_text(READS)
    script("import torch")
    command = [sys.executable, "-m", "accel_cli", "launch", "-q", "--nproc-per-node", "2"]
    command += ["--set", f"env.PYTHONPATH={os.pathsep.join([str(tmp_path), str(ROOT)])}", "train.py"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (
        f"processes are started by exec: the start-up code in {tmp_path}/sitecustomize.py reads"
        in result.stderr
    )
