"""DeepSpeed's operators are compiled once on a node, whatever ends a process meanwhile, and errors have their cure."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.processes.waits import wait_until

from accel_cli.errors import AccelError
from accel_cli.extensions.deepspeed.build_operators import compile_operators
from accel_cli.launchers.single import Single
from accel_cli.planning.plan import Plan
from accel_runtime.extensions.deepspeed import compiled_operators
from accel_runtime.extensions.deepspeed.compiled_operators import (
    OperatorError,
    build_operators,
    check_installation,
    list_operators,
    prepare_environment,
)
from accel_runtime.extensions.deepspeed.settings import DeepSpeedConfig

pytestmark = pytest.mark.usefixtures("on_the_cpu")

PROCESS = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from accel_runtime.extensions.deepspeed import compiled_operators

folder, go, outcome = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]

def load(verbose):
    lock = folder / "cpu_adam" / "lock"
    lock.parent.mkdir(exist_ok=True)
    lock.open("x").close()  # as torch does
    with (folder / "loads").open("a") as file:
        file.write("x")
    while not go.exists():
        time.sleep(0.01)
    lock.unlink()
    if outcome == "fail":
        raise RuntimeError("Error building extension 'cpu_adam'\\nx.cpp:3:1: error: broken\\nninja: build stopped")

compiled_operators._NOTE_S = 0.1
compiled_operators._require_tools = lambda: None
compiled_operators._create_builder = lambda name: SimpleNamespace(name="cpu_adam", load=load, error_log="")
try:
    compiled_operators.build_operators(["CPUAdamBuilder"], folder)
except compiled_operators.OperatorError as error:
    sys.exit(str(error))
"""


def start(folder, go, outcome="succeed"):
    command = [sys.executable, "-c", PROCESS, str(folder), str(go), outcome]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def count_loads(folder):
    file = folder / "loads"
    return len(file.read_text()) if file.exists() else 0


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, ()),
        ({"optimizer": {"type": "AdamW"}}, ()),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, ()),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, ("AsyncIOBuilder",)),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, ("AsyncIOBuilder",)),
    ],
)
def test_only_offloading_to_a_disk_needs_an_operator(values, expected):
    assert list_operators(DeepSpeedConfig(values), "cpu") == expected
    assert list_operators(DeepSpeedConfig(values), "mps") == ()


def test_the_folder_is_of_the_versions_and_processors_unless_the_user_has_set_one(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    environ = {"PATH": "/nowhere"}
    folder = prepare_environment("cpu", environ, ["torch-2.13", "deepspeed-0.19.8"])
    assert folder.parent == tmp_path / "accel" / "deepspeed"
    assert folder.name.startswith("torch-2.13-deepspeed-0.19.8-python-3.")
    assert environ["DS_ACCELERATOR"] == "cpu"
    assert environ["TORCH_EXTENSIONS_DIR"] == str(folder)
    other = prepare_environment("cpu", {}, ["torch-2.14", "deepspeed-0.19.8"])
    assert other != folder
    own = {"DS_ACCELERATOR": "xpu", "TORCH_EXTENSIONS_DIR": "/own"}
    assert prepare_environment("cpu", own) == Path("/own")
    assert own["DS_ACCELERATOR"] == "xpu"


def test_two_processes_compile_once_and_the_second_says_what_it_waits_for(tmp_path):
    go = tmp_path / "go"
    first = start(tmp_path, go)
    wait_until(lambda: count_loads(tmp_path) == 1)
    second = start(tmp_path, go)
    assert "waiting for another process that compiles" in second.stderr.readline()
    go.touch()
    assert "compiling DeepSpeed's operators (once, about half a minute)" in first.communicate()[1]
    second.communicate()
    assert (first.returncode, second.returncode, count_loads(tmp_path)) == (0, 0, 1)


def test_who_waited_gets_the_error_of_who_compiled_and_a_later_start_tries_again(tmp_path):
    go = tmp_path / "go"
    first = start(tmp_path, go, "fail")
    wait_until(lambda: count_loads(tmp_path) == 1)
    second = start(tmp_path, go, "fail")
    second.stderr.readline()
    go.touch()
    errors = {process.communicate()[1].partition("Cannot")[2] for process in (first, second)}
    (error,) = errors
    assert error.startswith(
        " compile DeepSpeed's operator CPUAdam: the compiler failed. Correct what it reports"
    )
    assert error.endswith("which needs none:\n  x.cpp:3:1: error: broken\n")
    assert count_loads(tmp_path) == 1
    third = start(tmp_path, go)
    third.communicate()
    assert (third.returncode, count_loads(tmp_path)) == (0, 2)


def test_a_killed_compilation_does_not_block_the_next_start(tmp_path):
    go = tmp_path / "go"
    first = start(tmp_path, go)
    wait_until(lambda: count_loads(tmp_path) == 1)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert (tmp_path / "cpu_adam" / "lock").exists()
    go.touch()
    second = start(tmp_path, go)
    assert "lock, which a process that was killed has left" in second.communicate()[1]
    assert (second.returncode, count_loads(tmp_path)) == (0, 2)


def test_an_old_lock_beside_a_compiled_operator_is_removed_and_a_new_one_is_not(tmp_path):
    (tmp_path / "CPUAdamBuilder.built").touch()
    lock, notes = tmp_path / "cpu_adam" / "lock", []
    lock.parent.mkdir()
    lock.touch()
    build_operators(["CPUAdamBuilder"], tmp_path, notes.append)
    assert lock.exists()
    os.utime(lock, (time.time() - 90,) * 2)
    build_operators(["CPUAdamBuilder"], tmp_path, notes.append)
    assert not lock.exists()
    assert notes == [f"removed {lock}, which a process that was killed has left"]


def test_a_missing_compiler_and_a_missing_ninja_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(OperatorError, match=r"the C\+\+ compiler 'c\+\+' was not found. Install g\+\+"):
        build_operators(["CPUAdamBuilder"], tmp_path)
    compiler = tmp_path / "c++"
    compiler.touch(mode=0o755)
    with pytest.raises(OperatorError, match=r"ninja was not found. Install it: .*ninja"):
        build_operators(["CPUAdamBuilder"], tmp_path)


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        ("none", "deepspeed is not installed in the environment of .*. Install it: .*deepspeed"),
        ("0.14.5", "deepspeed 0.14.5 is installed, and accel needs 0.19.8 or newer. Upgrade it: .*--upgrade"),
    ],
)
def test_a_missing_and_an_old_deepspeed_are_named(monkeypatch, installed, message):
    monkeypatch.setattr(compiled_operators, "_get_version", lambda _: installed)
    with pytest.raises(OperatorError, match=message):
        check_installation()


MissingCUDA = type("MissingCUDAException", (Exception,), {})


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MissingCUDA("no CUDA_HOME"), "the CUDA toolkit was not found. Install the toolkit of CUDA"),
        (
            RuntimeError(
                "Unable to JIT load the async_io op due to it not being compatible due to hardware/software issue."
            ),
            "AsyncIO: libaio is missing. Use an optimizer of torch",
        ),
    ],
)
def test_errors_of_deepspeed_get_their_cure(error, message):
    builder = SimpleNamespace(error_log="libaio is missing")
    assert message in str(compiled_operators._explain("AsyncIOBuilder", builder, error))


@pytest.fixture
def launched(tmp_path):
    """Return a plan of one process that uses DeepSpeed, which this environment does not have."""
    if compiled_operators._get_version("deepspeed") != "none":
        pytest.skip("deepspeed is installed")
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    variables = {"ACCEL_DEEPSPEED_STAGE": "auto", "ACCEL_DEEPSPEED_CONFIG_FILE": str(config)}
    script = "raise SystemExit('the script has started')"
    return Plan(
        launcher="single", argv=(sys.executable, "-c", script), env=variables, device="cpu", target="-c"
    )


def test_a_launch_without_deepspeed_ends_with_one_message_before_the_script(launched, monkeypatch):
    monkeypatch.setattr(os, "execvpe", None)  # would replace this process
    for start_ranks in (
        Single().run,
        lambda plan: compile_operators(plan.argv, {**os.environ, **plan.env}),
    ):
        with pytest.raises(
            AccelError, match=r"^deepspeed is not installed in the environment of .*"
        ) as raised:
            start_ranks(launched)
        assert str(raised.value).count("Install it") == 1


def test_a_launch_without_the_options_starts_no_process(launched, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    compile_operators(launched.argv, {**os.environ, "ACCEL_DEEPSPEED_STAGE": "no"})
    compile_operators(("/bin/program",), {**os.environ, **launched.env})


def test_an_end_of_the_launcher_ends_the_compilation(launched, monkeypatch, tmp_path):
    """The signal comes while the launcher waits."""
    monkeypatch.setattr(
        "accel_cli.extensions.deepspeed.build_operators.COMMAND",
        (
            "-c",
            f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)",
        ),
    )

    def interrupt(*_):
        raise KeyboardInterrupt

    def has_started():
        # Not only the file: a process that is killed before it writes leaves an empty one.
        return (tmp_path / "pid").exists() and (tmp_path / "pid").read_text()

    monkeypatch.setattr(subprocess.Popen, "communicate", lambda *_: (wait_until(has_started), interrupt()))
    with pytest.raises(KeyboardInterrupt):
        compile_operators(launched.argv, {**os.environ, **launched.env})
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
