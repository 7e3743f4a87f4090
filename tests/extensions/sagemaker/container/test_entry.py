"""`entry.py` as the process of a container, with a folder that replaces `/opt/ml`, and real training."""

import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest
from support.processes.waits import WAIT_FOR_SIGNAL, limit

TRAIN = """
import json, os, sys
from pathlib import Path
import torch, accel_cli
from torch import nn
from accel_runtime import Accelerator

accelerator = Accelerator()
model = accelerator.prepare(nn.Linear(2, 1))
loss = model(torch.ones(1, 2)).sum()
accelerator.backward(loss)
total = accelerator.reduce(torch.tensor(1.0))
raw = [os.fsencode(word).hex() for word in sys.argv[1:]]
told = {name: value for name, value in os.environ.items() if name.startswith("SM_")}
said = {"args": raw, "total": total.item(), "world": accelerator.num_processes, "accel": accel_cli.__file__, "cwd": os.getcwd(), "env": told | {"NOTE": os.environ.get("NOTE"), **{name: os.environ[name] for name in ("NCCL_HOSTID", "GLOO_SOCKET_IFNAME")}}}
Path(os.environ["SM_OUTPUT_DATA_DIR"], f"rank{accelerator.process_index}.json").write_text(json.dumps(said))
if accelerator.is_main_process:
    Path("out/model.txt").write_text("trained")
print("trained", accelerator.process_index)
"""
ARGS = ['it\'s a "test" $HOME; rm -rf x', "", "two\nlines", "--lr=1e-4", "--", "-1", "\udcff\udcfe", "*", "ü"]


@pytest.mark.full
def test_two_hosts_with_two_processes_train_with_the_exact_arguments(containers, port):
    first, second = hosts = containers.hosts(
        "127.1",
        "127.2",
        source={"jobs/train.py": TRAIN, "jobs/out/shipped.txt": "with the source"},
        args=ARGS,
        section={"nproc_per_node": 2, "model_dir": "out"},
        cwd="jobs",
        env={"NOTE": "of the profile", "SM_MODEL_DIR": "/mine"},
    )
    for host in hosts:
        host.start(SM_MASTER_PORT=str(port))
    ended = [host.end() for host in hosts]
    assert [code for code, _ in ended] == [0, 0], ended
    for host, (_, output) in zip(hosts, ended, strict=True):
        assert f"SM_*: nnodes 2, rdzv_endpoint 127.1:{port}, rdzv_id job-" in output.splitlines()[0]
        assert output.splitlines()[-1] == f"accel: {host.name} ended with exit code 0"
        assert host.failure is None
    results = [
        json.loads((host.root / "output" / "data" / f"rank{rank}.json").read_text())
        for host, rank in ((first, 0), (first, 1), (second, 2), (second, 3))
    ]
    assert [result["args"] for result in results] == [[os.fsencode(word).hex() for word in ARGS]] * 4
    assert {(result["total"], result["world"]) for result in results} == {(4.0, 4)}
    last = results[3]
    assert last["accel"].startswith(str(second.root / "accel"))
    assert last["cwd"] == str(second.root / "code" / "jobs")
    assert last["env"]["NOTE"] == "of the profile"
    assert last["env"]["SM_MODEL_DIR"] == "/mine"
    assert (last["env"]["NCCL_HOSTID"], last["env"]["GLOO_SOCKET_IFNAME"]) == ("127.2", "lo")
    assert (last["env"]["SM_CURRENT_HOST_RANK"], last["env"]["SM_HOST_COUNT"]) == ("1", "2")
    assert {file.name for file in (first.root / "model").iterdir()} == {"model.txt", "shipped.txt"}


@pytest.mark.full
def test_missing_packages_are_installed_from_the_bundle_and_torch_is_kept(containers):
    """Use an image with torch and pip, without the other packages of `accel launch` and without a network."""
    python, site = containers.make_image("torch", "numpy", "pip")
    text = (
        "import sys, accel_runtime, pydantic, torch\nprint('imported', pydantic.__file__, torch.__file__)\n"
    )
    source = {"train.py": text, "requirements.txt": "accel-runtime\n"}
    host = containers.hosts("algo-1", source=source, requirements="requirements.txt")
    containers.write_wheels(host)
    code, output = host.start(python, PIP_INDEX_URL="http://127.0.0.1:9/").end()
    assert code == 0, output
    assert f"imported {site}/pydantic/__init__.py {site}/torch/__init__.py" in output
    assert (site / "torch").is_symlink()
    assert not list((host.root / "accel").rglob("pydantic*"))


@pytest.mark.parametrize(
    ("torch", "reason"),
    [
        (None, "this image has no torch for "),
        ("2.4.1+cu121", "this image has torch 2.4.1+cu121, and accel needs 2.9"),
    ],
)
def test_an_image_without_a_supported_torch_is_rejected(containers, torch, reason):
    python, site = containers.make_image()
    if torch:
        info = site / f"torch-{torch}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {torch}\n")
    host = containers.hosts("algo-1", source={"train.py": ""}).start(python)
    assert host.end()[0] == 1
    assert host.failure.startswith(f"algo-1: the job cannot start: {reason}")
    assert "Choose another image (launcher.image_uri)" in host.failure


@pytest.mark.full
def test_only_the_host_of_the_failed_process_writes_a_reason(containers, port):
    script = (
        "import accel_runtime, torch\naccelerator = accel_runtime.Accelerator()\n"
        "def main():\n    if accelerator.process_index == 1:\n        raise ValueError('boom on rank 1')\n"
        "    accelerator.gather(torch.ones(1))\nmain()\n"
    )
    first, second = hosts = containers.hosts("127.1", "127.2", source={"train.py": script})
    for host in hosts:
        host.start(SM_MASTER_PORT=str(port))
    codes = [host.end()[0] for host in hosts]
    assert codes == [1, 1]
    assert first.failure is None
    head, *frames = second.failure.splitlines()
    assert head == "exit code 1 on 127.2, rank 1: ValueError: boom on rank 1"
    assert f'  File "{second.root}/code/train.py", line 5, in main' in frames


SAVES = (
    """
import os, signal, sys, time
def save(*_):
    open("runs/saved", "w").write(os.environ.get("TOKEN", "none"))
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
"""
    + WAIT_FOR_SIGNAL
)


@pytest.mark.slow
def test_a_signal_of_the_platform_reaches_the_script_which_saves(containers, manager):
    section = {"checkpoint_dir": "runs", "secrets": {"TOKEN": "wandb"}}
    host = containers.hosts("algo-1", source={"train.py": SAVES}, section=section).start()
    before = host.until("ready")
    start = time.monotonic()
    host.process.send_signal(signal.SIGTERM)
    code, output = host.end(90)
    assert time.monotonic() - start < limit(60)  # the script would sleep for longer
    assert (code, host.failure) == (128 + signal.SIGTERM, None)
    assert "accel: algo-1 ended with exit code 143" in output
    # A secret is in the environment of the processes, and nowhere else.
    assert (host.root / "checkpoints" / "saved").read_text() == manager["wandb"]
    assert manager["wandb"] not in before + output
    remaining_files = [file for file in host.root.rglob("*") if file.is_file() and file.name != "saved"]
    assert not [file for file in remaining_files if manager["wandb"].encode() in file.read_bytes()]


@pytest.mark.full
def test_the_reason_of_a_failed_program_is_the_end_of_its_output(containers):
    host = containers.hosts(
        "algo-1",
        source={"run.sh": "#!/bin/sh\necho 'no such sample: 12' >&2\nexit 3\n"},
        kind="program",
        target="sh",
        args=["run.sh"],
    ).start(PYTHONSAFEPATH="1")
    code, output = host.end()
    assert code == 3, output
    assert host.failure == "exit code 3 on algo-1, rank 0: exited with code 3\nno such sample: 12"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("no-such-package-of-accel==9", "No matching distribution found for no-such-package-of-accel==9"),
        # Neither a requirement nor one of its own may replace the torch of the image.
        (
            "torch==2.9.0",
            "Cannot install torch==2.9.0 because these package versions have conflicting dependencies",
        ),
    ],
)
def test_the_error_of_pip_is_the_reason_if_a_requirement_cannot_be_installed(containers, line, reason):
    source = {"train.py": "", "requirements.txt": f"{line}\n"}
    host = containers.hosts("algo-1", source=source, requirements="requirements.txt").start()
    code, output = host.end()
    assert code == 1
    prefix = "algo-1: the job cannot start: the packages of requirements.txt could not be installed: ERROR: "
    assert host.failure.startswith(prefix)
    assert reason in host.failure
    assert output.splitlines()[-1] == "accel: algo-1 ended with exit code 1"


def test_a_host_stopped_while_pip_waits_leaves_no_reason_and_no_process(containers):
    source = {"train.py": "", "needs-of-nobody.txt": "no-such-package-of-accel\n"}
    host = containers.hosts("algo-1", source=source, requirements="needs-of-nobody.txt")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        host.start(
            PIP_INDEX_URL=f"http://127.0.0.1:{silent.getsockname()[1]}/",
            PIP_NO_INDEX="0",
            PIP_CONFIG_FILE="/dev/null",
        )
        with silent.accept()[0]:
            host.process.send_signal(signal.SIGTERM)
            code, output = host.end(90)
    assert (code, host.failure) == (143, None), output
    command_line = b"-m\0pip\0install\0-r\0needs-of-nobody.txt"
    assert not [file for file in Path("/proc").glob("[0-9]*/cmdline") if command_line in read(file)]


def read(file):
    try:
        return file.read_bytes()
    except OSError:
        return b""


@pytest.mark.full
def test_a_killed_launcher_is_reported_by_the_first_process(containers):
    host = containers.hosts("algo-1", source={"train.py": SAVES}).start()
    host.until("ready")
    children = Path(f"/proc/{host.process.pid}/task/{host.process.pid}/children").read_text()
    os.kill(int(children.split()[0]), signal.SIGKILL)
    assert host.end()[0] == 128 + signal.SIGKILL
    assert host.failure.startswith("algo-1: accel launch was ended by SIGKILL")


def test_a_broken_upload_is_the_reason(containers):
    host = containers.hosts("algo-1", source={"train.py": ""})
    (host.root / "input" / "data" / "accel" / "accel.tar.gz").write_bytes(b"\x1f\x8bbroken")
    code, output = host.start().end()
    assert code == 1
    assert host.failure.startswith("algo-1: the job cannot start: accel.tar.gz is damaged: ")
    assert "Traceback" not in output


@pytest.mark.full
@pytest.mark.parametrize(
    ("spec", "code", "reason"),
    [
        ({"cwd": "elsewhere"}, 1, "algo-1: the job cannot start: FileNotFoundError: "),
        ({"settings": {"ACCEL_DEVICE": "tpu"}}, 2, "Invalid ACCEL_DEVICE 'tpu': expected one of"),
    ],
)
def test_an_error_of_the_job_is_one_message(containers, spec, code, reason):
    host = containers.hosts("algo-1", source={"train.py": ""})
    file = host.root / "input" / "data" / "accel" / "job.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | spec))
    ended, output = host.start().end()
    assert ended == code
    assert host.failure.startswith(reason)
    assert "Traceback" not in output


@pytest.mark.full
def test_a_host_stopped_after_the_failure_of_another_writes_no_reason(containers, port):
    script = (
        "import time, accel_runtime\naccelerator = accel_runtime.Accelerator()\naccelerator.wait_for_everyone()\n"
        "if accelerator.process_index == 1:\n    raise ValueError('boom')\ntime.sleep(100)\n"
    )
    first, second = containers.hosts("127.1", "127.2", source={"train.py": script})
    for host in (first, second):
        host.start(SM_MASTER_PORT=str(port))
    while second.failure is None and second.process.poll() is None:
        time.sleep(0.05)
    first.process.send_signal(signal.SIGTERM)
    assert (first.end()[0] in {1, 143}, second.end()[0]) == (True, 1)
    assert first.failure is None
    assert second.failure.startswith("exit code 1 on 127.2, rank 1: ValueError: boom")
