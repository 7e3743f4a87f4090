"""The fork server, and the choice between it and exec."""

import errno
import os
import signal
import subprocess
import sys

import pytest

from accel_cli import start_time, worker
from accel_cli.errors import AccelError
from accel_cli.failure_hints import find_hint
from accel_cli.planning.plan import Plan
from accel_cli.runner import failures, forkserver


def reason(kind, target):
    plan = Plan(launcher="torchrun", argv=("py", "worker.py", kind, target), env={}, device="cpu")
    # What pytest has loaded stands for what torch loads; `string` is surely among it.
    return forkserver.explain_fallback(plan, python_modules=set(sys.modules) - {"string", "json", "time"})


def test_a_script_that_is_a_pipe_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert reason("script", str(tmp_path / "pipe")) is None


@pytest.mark.parametrize("file", ["string.py", "string/__init__.py", "string.so"])
def test_a_module_with_the_name_of_an_imported_one_is_a_reason_for_exec(tmp_path, file):
    (tmp_path / "train.py").touch()
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    assert "has modules with the names of imported ones: string" in str(
        reason("script", str(tmp_path / "train.py"))
    )


def test_only_entries_with_the_name_of_a_loaded_module_are_examined(tmp_path, monkeypatch):
    for number in range(100):
        (tmp_path / f"image_{number}.png").touch()
    for name in ("json", "data"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    examined = []
    exists = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: examined.append(path) or exists(path))
    assert worker.find_shadowed(tmp_path, set(sys.modules) - {"json"}) == ["json"]
    assert examined == [f"{tmp_path}/json/__init__.py"]


@pytest.mark.parametrize("file", ["time.py", "no_such_module.py", "string.txt", "string/data.csv"])
def test_files_that_shadow_no_imported_module_allow_a_fork(tmp_path, file):
    (tmp_path / "train.py").touch()
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    assert reason("script", str(tmp_path / "train.py")) is None


def test_the_source_of_a_module_is_read_without_importing_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("1 / 0")
    (tmp_path / "package" / "__main__.py").write_text("--lr")
    (tmp_path / "package" / "run.py").write_text("--seed")
    assert forkserver.read_source("module", "package") == b"--lr"
    assert forkserver.read_source("module", "package.run") == b"--seed"
    assert forkserver.read_source("module", "package.no_such") == b""


def test_a_plan_that_cannot_be_passed_to_the_fork_server_is_an_error(monkeypatch):
    def refuse(*_):
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr(os, "memfd_create", refuse)
    message = r"the plan cannot be passed on: File too large. Raise the limit on file sizes \(ulimit -f\)."
    with pytest.raises(AccelError, match=message):
        forkserver.exec_fork_server(Plan(launcher="torchrun", argv=("python",), env={}, device="cpu"))


def test_the_new_interpreter_gets_the_start_of_the_command_and_the_plan(monkeypatch):
    passed, plan = [], Plan(launcher="torchrun", argv=("python",), env={}, device="cpu")
    monkeypatch.setattr(os, "execve", lambda _python, argv, _environ: passed.append(int(argv[2])))
    forkserver.exec_fork_server(plan)
    with os.fdopen(passed[0]) as file:
        assert float(file.readline()) == start_time.STARTED
        assert Plan.from_json(file.read()) == plan
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()), (
        "signals are blocked for the new interpreter only"
    )


def test_a_module_that_cannot_be_imported_is_left_to_the_ranks(monkeypatch):
    def fail(name):
        raise ImportError(name)

    monkeypatch.setattr(forkserver.importlib, "import_module", fail)
    assert forkserver.preload_modules() == []


HIDES = """
import os, sys, warnings
import json, json.tool
from accel_cli.runner.forkserver import _HiddenModules
os.environ["SYMPY_A"], os.environ["A"] = "1", "1"
sys.meta_path.insert(0, _HiddenModules(["json.tool"], ("SYMPY_",), dict(os.environ)))
print("json.tool" in sys.modules, hasattr(json, "tool"))
os.environ["A"] = "2"
if len(sys.argv) > 1: os.environ[sys.argv[1]] = "2"
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from json import tool
print(tool is json.tool is sys.modules["json.tool"], tool.__spec__.name, [str(each.message) for each in caught])
"""


@pytest.mark.parametrize("variable", [None, "SYMPY_A", "SYMPY_NEW"])
def test_hidden_modules_return_at_their_import_and_name_variables_that_changed(variable):
    command = [sys.executable, "-c", HIDES, *([variable] if variable else [])]
    hidden, restored = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert hidden == "False False"
    assert restored.startswith("True json.tool [")
    named = f"{variable} changed after json.tool was loaded for this process, and may have no effect"
    assert (named in restored) if variable else restored.endswith("[]")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with ...", True),
        ("RuntimeError: Caught RuntimeError in DataLoader worker process 0.\nCannot re-initialize CUDA in forked subprocess", False),
        ("RuntimeError: CUDA out of memory", False),
    ],
)  # fmt: skip
def test_a_failure_that_names_the_fork_is_recognised_and_has_a_hint(text, expected):
    link = failures.ExceptionInfo("builtins.RuntimeError", text, ())
    assert failures.names_fork(failures.Failure(0, "host", 1, 1, 0.0, chain=(link,))) is expected
    assert ("--set launcher.start_method=exec" in str(find_hint(text))) is expected
    assert ("multiprocessing_context='spawn'" in str(find_hint(text))) is ("DataLoader" in text)


def test_a_process_with_threads_or_an_open_gpu_is_not_forked():
    code = (
        "from accel_cli.runner import forkserver\n"
        "import os, threading\n"
        "print(repr(forkserver.explain_unsafe_fork()))\n"
        "forkserver._GPUS = ('/dev/null',)\n"
        "opened = open('/dev/null')\n"
        "print(forkserver.explain_unsafe_fork())\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "print(forkserver.explain_unsafe_fork())\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == [
        "''", "a library opened a GPU while modules were imported", "a library started threads while modules were imported",
    ]  # fmt: skip
