"""The command for a TPU pod, run through a stub of gcloud, starts a run on torch_xla's CPU device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes.waits import limit

pytest.importorskip("torch_xla", reason="torch_xla is in an environment of its own: make test-xla")

ROOT = Path(__file__).parents[4]
ARGUMENTS = ["a  b", "$HOME", "it's", "", "\u00fc\n"]
GCLOUD = """#!/bin/bash
for word; do case $word in --command=*) command=${word#--command=} ;; esac; done
HOME=$WORKER bash -c "$command"
"""


def program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def test_a_script_runs_on_a_worker_with_its_arguments_and_exit_code(tmp_path):
    program(tmp_path / "bin/gcloud", GCLOUD)
    program(tmp_path / "bin/python3", f'#!/bin/bash\nexec {sys.executable} "$@"\n')
    for folder in ("me/project", "worker/project"):
        (tmp_path / folder / ".git").mkdir(parents=True)
        script = "import json, sys; json.dump(sys.argv[1:], open('argv', 'w')); sys.exit(7)\n"
        (tmp_path / folder / "train.py").write_text(script)
    variables = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "HOME": str(tmp_path / "me"),
        "WORKER": str(tmp_path / "worker"),
        "PJRT_DEVICE": "CPU",
        "PYTHONPATH": str(ROOT),
        "ACCEL_HOME": str(tmp_path / "home"),
    }
    process = subprocess.run(
        [sys.executable, "-m", "accel_cli", "xla", "pod", "p", "--run", "--", "train.py", *ARGUMENTS],
        cwd=tmp_path / "me/project", env=os.environ | variables, capture_output=True, text=True, timeout=limit(500), check=False,
    )  # fmt: skip
    assert process.returncode == 7, process.stderr
    assert json.loads((tmp_path / "worker/project/argv").read_text()) == ARGUMENTS
    assert not (tmp_path / "me/project/argv").exists()
