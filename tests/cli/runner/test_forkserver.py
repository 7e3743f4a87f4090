"""The fork server, and the choice between it and exec."""

import errno
import os
import signal
import subprocess
import sys
import zipfile

import pytest

import accel_cli
from accel_cli import worker
from accel_cli.errors import AccelError
from accel_cli.planning.plan import Plan
from accel_cli.runner import forkserver


def reason(kind, target):
    plan = Plan(launcher="torchrun", argv=("py", "worker.py", kind, target), env={}, device="cpu")
    # What pytest has loaded stands for what torch loads; `string` is surely among it.
    return forkserver.explain_fallback(plan, python_modules=set(sys.modules) - {"string", "json", "time"})


@pytest.mark.parametrize("name", ["train.pyc", "train.zip"])
def test_scripts_that_are_not_source_code_are_started_by_exec(tmp_path, name):
    with zipfile.ZipFile(tmp_path / name, "w") as archive:
        archive.writestr("__main__.py", "print()")
    assert "is not source code" in reason("script", str(tmp_path / name))


def test_a_script_that_is_a_pipe_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert reason("script", str(tmp_path / "pipe")) is None


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("import os\nos.environ['OMP_NUM_THREADS'] = '4'", "OMP_NUM_THREADS"),
        ("from os import environ\nenviron['MKL_NUM_THREADS'] = '4'", "MKL_NUM_THREADS"),
        ("import os\nos.environ.setdefault('TORCH_LOGS', 'dynamo')", "TORCH_LOGS"),
        ("import os\nos.environ.update(PYTORCH_ALLOC_CONF='x')", "PYTORCH_ALLOC_CONF"),
        ("import os\nos.environ.update({'KMP_AFFINITY': 'x', 'A': 'b'})", "KMP_AFFINITY"),
        ("import os\nif 1:\n  os.putenv('OMP_DYNAMIC', '1')", "OMP_DYNAMIC"),
        ("import os\ndel os.environ['OMP_NUM_THREADS']", "OMP_NUM_THREADS"),
    ],
)
def test_a_script_that_sets_a_variable_of_torch_is_started_by_exec(tmp_path, text, named):
    (tmp_path / "train.py").write_text(text)
    explanation = reason("script", str(tmp_path / "train.py"))
    assert explanation
    assert f"sets {named}, which is read while torch is loaded" in explanation


@pytest.mark.parametrize(
    "text",
    [
        "import os\nprint(os.environ['OMP_NUM_THREADS'], os.environ.get('TORCH_LOGS'))",
        "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '0'",
        "import os\nos.environ['TORCH_NCCL_BLOCKING_WAIT'] = '1'",
        "words = {}\nwords['environ'] = 'OMP_NUM_THREADS'",
        "environ = (",
        "",
    ],
)
def test_variables_that_are_only_read_or_read_later_allow_a_fork(tmp_path, text):
    (tmp_path / "train.py").write_text(text)
    assert reason("script", str(tmp_path / "train.py")) is None


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
    (tmp_path / "package" / "__main__.py").write_text("import os; os.environ['OMP_NUM_THREADS'] = '2'")
    (tmp_path / "package" / "run.py").write_text("")
    assert "package sets OMP_NUM_THREADS" in str(reason("module", "package"))
    assert reason("module", "package.run") is None


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
        assert float(file.readline()) == accel_cli.STARTED
        assert Plan.from_json(file.read()) == plan
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()), (
        "signals are blocked for the new interpreter only"
    )


@pytest.mark.parametrize(
    ("source", "is_preloaded"),
    [
        ("import torch\noptimizer = torch.optim.SGD(model.parameters())", True),
        ("from transformers import Trainer", True),
        ("loss.backward()", True),
        ("import torch\nprint(torch.ones(1))", False),
        ("import os\nos.environ['TORCHINDUCTOR_CACHE_DIR'] = 'x'\nimport torch.optim", False),
        ("import os\nos.environ.setdefault('TRITON_CACHE_DIR', 'x')\nimport torch.optim", False),
    ],
)
def test_what_a_training_imports_is_preloaded(tmp_path, monkeypatch, source, is_preloaded):
    (tmp_path / "train.py").write_text(source)
    imported = []
    monkeypatch.setattr(forkserver.importlib, "import_module", imported.append)
    argv = ("py", "worker.py", "script", str(tmp_path / "train.py"))
    forkserver.preload_modules(Plan(launcher="torchrun", argv=argv, env={}, device="cpu"))
    assert ("torch._dynamo" in imported) is is_preloaded


def test_a_module_that_cannot_be_imported_is_left_to_the_ranks(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("import torch.optim")

    def fail(name):
        raise ImportError(name)

    monkeypatch.setattr(forkserver.importlib, "import_module", fail)
    argv = ("py", "worker.py", "script", str(tmp_path / "train.py"))
    forkserver.preload_modules(Plan(launcher="torchrun", argv=argv, env={}, device="cpu"))


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
        "''", "a library opened a GPU while torch was imported", "a library started threads while torch was imported",
    ]  # fmt: skip
