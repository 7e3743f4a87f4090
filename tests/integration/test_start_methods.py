"""A script behaves the same under both start methods, executed and forked."""

import json
import py_compile
import re
import subprocess
import sys
import zipfile
from contextlib import suppress
from pathlib import Path
from textwrap import dedent

import pytest
from support.processes.children import Process
from support.processes.commands import run_accel
from support.processes.waits import limit, wait_until

from accel_cli import worker

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the fork server needs Linux")

DRIVER = """
import os, sys
if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]
from pathlib import Path
from accel_cli import worker
from accel_cli.runner.forkserver import ForkServer, start_fork_server

started = start_fork_server()
if isinstance(started, ForkServer):
    (pid,) = started.fork((sys.executable, worker.__file__, "script", *sys.argv[2:]), [dict(os.environ)])
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    started.close()
    Path(sys.argv[1]).write_text(str(code))
    os._exit(0)
started.enter()
worker.main(list(started.argv[2:]))
"""
OURS = re.compile(r'  File "[^"]*(?:worker|driver)\.py", line .*\n(?:    .*\n)*')
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
HINT = re.compile(r"^accel: hint: .*\n", re.MULTILINE)
"""The line that accel adds below the traceback of an error with a known cure."""


@pytest.fixture
def ends(tmp_path, cwd, monkeypatch):
    """Return the exit status and output of a script under a start method; without torch, for speed."""
    # accel writes whole lines in any case.
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)

    def run(method, source, *args, target="end.py", **options):
        if source is not None:
            (cwd / target).write_text(dedent(source))
        (tmp_path / "driver.py").write_text(DRIVER)
        report = tmp_path / "code"
        begin = [sys.executable]
        if method == "python":
            command = [*begin, target, *args]
        elif method == "exec":
            command = [*begin, worker.__file__, "script", target, *args]
        else:
            command = [*begin, str(tmp_path / "driver.py"), str(report), target, *args]
        options = {"stdin": subprocess.DEVNULL, "cwd": cwd, "timeout": 60, "text": True} | options
        # A session of its own is what the elastic agent gives each process.
        result = subprocess.run(command, capture_output=True, check=False, start_new_session=True, **options)
        code = int(report.read_text()) if method == "forkserver" else result.returncode
        return code, result.stdout, HINT.sub("", ADDRESS.sub("", OURS.sub("", result.stderr)))

    return run


ENDINGS = {
    "falls off its end": "print('whole')",
    "an unfinished line": "import sys; sys.stdout.write('no newline')",
    "exit without a word": "import sys; print('out'); sys.exit()",
    "exit with a number": "import sys; sys.exit(3)",
    "exit with a large number": "import sys; sys.exit(1000)",
    "exit with a text": "import sys; sys.exit('no data')",
    "exit with an object": "import sys; sys.exit([1, 2])",
    "an exception": "def f(): raise ValueError('no data')\nf()",
    "a group of exceptions": "try:\n  1/0\nexcept ZeroDivisionError as e:\n  raise KeyError('x') from e",
    "a hook of its own": "import sys\nsys.excepthook = lambda *a: print('hook', a[0])\n1/0",
    "no such module": "import no_such_module",
    "not Python": "def f(:\n  pass",
    "left at once": "import os; print('lost', end=''); os._exit(5)",
    "interrupted": "raise KeyboardInterrupt",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "terminated": "import os; os.kill(os.getpid(), 15)",
    "a broken pointer": "import ctypes; ctypes.string_at(0)",
    "aborted": "import os; os.abort()",
    "too deep": "import sys\nsys.tracebacklimit = 1\ndef f(): f()\nf()",
    "atexit, in order": """
        import atexit, logging, weakref
        class Model: pass
        model = Model()
        weakref.finalize(model, print, 'finalised')
        atexit.register(print, 'first registered')
        atexit.register(lambda: 1 / 0)
        atexit.register(print, 'last registered')
    """,
    "a thread that goes on": """
        import threading, time
        def go_on():
            time.sleep(1)
            print('thread done', threading.main_thread().name, threading.active_count())
        threading.Thread(target=go_on).start()
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        print('main done', flush=True)
    """,
    "a thread that fails": """
        import threading
        thread = threading.Thread(target=lambda: 1 / 0, name='mine')
        thread.start(); thread.join()
    """,
    "a file left open": "f = open('left', 'w'); f.write('text')\nimport sys; sys.exit(4)",
    "an object that speaks last": """
        class Last:
            def __del__(self): print('deleted')
        last = Last()
    """,
    "children of its own": """
        import multiprocessing, os, time
        print(multiprocessing.current_process(), multiprocessing.parent_process(), flush=True)
        if os.fork() == 0:
            os._exit(7)
        print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
        context = multiprocessing.get_context('fork')
        context.Process(target=time.sleep, args=(60,), daemon=True).start()
        process = context.Process(target=print, args=('child',))
        process.start(); process.join()
        print(process.exitcode, process.name)
    """,
    "signals as Python sets them": """
        import signal, time
        print({s.name: str(signal.getsignal(s)) for s in signal.Signals}, signal.pthread_sigmask(0, []))
        signal.signal(signal.SIGUSR1, lambda *a: print('handled', a[0]))
        signal.raise_signal(signal.SIGUSR1)
        rung = []
        signal.signal(signal.SIGALRM, lambda *a: rung.append(print('alarm')))
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        while not rung: time.sleep(0.01)
    """,
    "a broken pipe": "import os\nr, w = os.pipe(); os.close(r)\nos.write(w, b'x')",
    "a script that starts itself again": """
        import os, subprocess, sys
        if 'again' not in sys.argv:
            sys.exit(subprocess.call([*sys.orig_argv, 'again']))
        print(sys.argv)
        sys.exit(9)
    """,
}


@pytest.mark.parametrize("name", ENDINGS)
def test_a_script_ends_as_under_python(ends, name):
    expected = ends("python", ENDINGS[name])
    assert ends("exec", ENDINGS[name]) == expected
    assert ends("forkserver", ENDINGS[name]) == expected


OBSERVED = """
import dataclasses, faulthandler, gc, importlib.util, inspect, json, linecache, locale, logging, multiprocessing.spawn
import os, pickle, signal, sys, threading, typing, warnings
from pathlib import Path

@dataclasses.dataclass
class Options:
    rate: float = 1.0

class Model: pass

def convert(x: int) -> str: return ""

count: int = 3

def observe(expression):
    try:
        return repr(eval(expression))
    except Exception as error:
        return f"{type(error).__name__}: {error}"

print(json.dumps({expression: observe(expression) for expression in sys.argv[1].splitlines()}))
"""
EXPRESSIONS = """
__name__, __file__, __doc__, __package__, __spec__, globals().get("__cached__", "absent")
sorted(set(globals()))
type(__builtins__), sys.modules["__main__"].__dict__ is globals(), sys.modules["__main__"].__name__
type(__loader__), __loader__.name, __loader__.path, __loader__.get_source("__main__") == Path(__file__).read_text()
__annotations__, Options.__annotations__, convert.__annotations__, typing.get_type_hints(convert)
dataclasses.fields(Options)[0].type("2")
compile("def f(a: int): ...", "x", "exec").co_flags, convert.__code__.co_flags
sys.argv, sys.orig_argv, sys.path, sys.executable, sys.flags, sys.warnoptions, sys._xoptions
sys.dont_write_bytecode, sys.pycache_prefix, sys.getrecursionlimit(), sys.getswitchinterval()
[getattr(sys, n) is getattr(sys, f"__{n}__") for n in ("excepthook", "unraisablehook", "displayhook", "breakpointhook")]
threading.excepthook is threading.__excepthook__, sys.gettrace(), sys.getprofile()
[(type(f), f.encoding, f.errors, f.newlines, f.mode, f.name) for f in (sys.stdout, sys.stderr)]
[(f.fileno(), f.isatty(), f.seekable()) for f in (sys.stdout, sys.stderr)]
[(type(f.buffer), f.buffer.name, f.buffer.mode, f.buffer.closed) for f in (sys.stdout, sys.stderr)]
sys.stdin.encoding, sys.stdin.errors, sys.stdin.mode, sys.stdin.name, sys.stdin.read()
[getattr(sys, name) is getattr(sys, f"__{name}__") for name in ("stdin", "stdout", "stderr")]
importlib.util.find_spec("json").origin == json.__file__, importlib.util.find_spec("__main__")
inspect.getsource(convert), inspect.getsource(Options), inspect.getfile(Options), inspect.getmodule(Options).__name__
linecache.getline(__file__, 2), Model.__module__, Model.__qualname__
pickle.dumps([convert, Model]), pickle.loads(pickle.dumps(Model)) is Model
{key: value for key, value in multiprocessing.spawn.get_preparation_data("x").items() if key != "authkey"}
multiprocessing.current_process().name, multiprocessing.parent_process(), multiprocessing.get_start_method(True)
[thread.name for thread in threading.enumerate()], gc.isenabled(), gc.get_threshold()
logging.root.handlers, logging.root.level, warnings.filters, locale.getlocale()
{s.name: str(signal.getsignal(s)) for s in signal.Signals}, signal.pthread_sigmask(0, [])
os.getcwd(), os.umask(0o22), os.getpgid(0) == os.getpid(), os.getsid(0) == os.getpid(), faulthandler.is_enabled()
sorted(int(entry.name) for entry in Path("/proc/self/fd").iterdir()), os.get_blocking(1), os.get_blocking(2)
Path("/proc/self/comm").read_text(), Path("/proc/self/exe").resolve()
{name: value for name, value in os.environ.items() if name != "_"}
"""


def observe(ends, method):
    """Return what a script observes of how it was started, by expression."""
    code, output, errors = ends(method, OBSERVED, EXPRESSIONS.strip())
    assert (code, errors) == (0, "")
    return json.loads(output)


def test_a_script_observes_what_it_observes_under_python(ends):
    expected = observe(ends, "python")
    assert observe(ends, "exec") == expected
    assert observe(ends, "forkserver") == expected


SOURCES = {
    "a byte order mark": b"\xef\xbb\xbfprint('text')\n",
    "another encoding": b"# coding: latin-1\nprint(ascii('\xe9'), __file__)\n",
    "a null byte": b"print('a')\n\x00\n",
    "carriage returns": b"print('a')\r\nprint(ascii('''b\r\nc'''))\rprint('d')",
    "nothing": b"",
    "a future import": b"from __future__ import annotations\ndef f(x: no_such): ...\nprint(f.__annotations__)",
    "annotations": b"def f(x: int): ...\nprint(f.__annotations__)\nx: no_such = 1\n",
    "an import of itself": b"import end; print(end.__name__, end is __import__('__main__'))",
    "an import of __main__": b"import __main__; print(__main__.__file__ == __file__, vars(__main__) is globals())",
    "a warning": b"import warnings\ndef f(): warnings.warn('old', DeprecationWarning)\nf()",
    "an error in the handling of another": b"try:\n  1/0\nexcept Exception:\n  raise KeyError('x')",
    "an error with notes": b"error = KeyError('x')\nerror.__notes__ = ['a note']\nraise error",
}


@pytest.mark.parametrize("name", SOURCES)
def test_an_odd_source_runs_as_under_python(ends, cwd, name):
    (cwd / "end.py").write_bytes(SOURCES[name])
    expected = ends("python", None)
    assert ends("exec", None) == expected
    assert ends("forkserver", None) == expected


@pytest.mark.parametrize("source", [b"# coding: no-such\nprint()\n", b"print('\xe9')\n"])
def test_a_source_in_an_invalid_encoding_is_a_syntax_error(ends, cwd, source):
    (cwd / "end.py").write_bytes(source)
    for method in ("python", "exec", "forkserver"):
        code, output, errors = ends(method, None)
        assert (code, output) == (1, "")
        # Python reads the file line by line, so that its text differs.
        assert errors.splitlines()[-1].startswith("SyntaxError: "), method


MAIN = """
import json, signal, sys
names = {name: type(value).__name__ for name, value in sorted(globals().items()) if name.startswith("__")}
print(names, __file__, __name__, __package__, __builtins__.__name__, __annotations__ if "__annotations__" in names else "")
print(sys.argv, sys.path[0], __spec__ and (__spec__.name, __spec__.origin), hasattr(json, "mine"), hasattr(signal, "mine"))
"""


@pytest.mark.parametrize("target", ["end.py", "end.pyc", "end.zip", "shadowing/end.py"])
def test_a_forked_script_imports_as_under_python(ends, cwd, target):
    (cwd / "end.py").write_text(MAIN)
    py_compile.compile("end.py", "end.pyc")
    with zipfile.ZipFile("end.zip", "w") as archive:
        archive.writestr("__main__.py", MAIN)
    (cwd / "shadowing").mkdir()
    for name in ("json", "signal"):
        (cwd / "shadowing" / f"{name}.py").write_text("mine = True")
    (cwd / "shadowing/end.py").write_text(MAIN)
    alone = subprocess.run([sys.executable, target, "-x"], capture_output=True, text=True, check=True)
    for method in ("exec", "forkserver"):
        assert ends(method, None, "-x", target=target) == (0, alone.stdout, alone.stderr)


def test_stdin_reaches_the_script(ends):
    source = "import sys\nprint(input(), sys.stdin.read().upper())\n"
    assert ends("forkserver", source, stdin=None, input="one\ntwo\n") == (0, "one TWO\n\n", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    "variables",
    [
        {"PYTHONUNBUFFERED": "1"},
        {"PYTHONIOENCODING": "latin-1"},
        {"PYTHONSAFEPATH": "1"},
        {"PYTHONWARNINGS": "error"},
    ],
    ids=lambda variables: next(iter(variables)),
)
def test_variables_that_python_reads_at_its_start_are_effective(ends, variables, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    expected = observe(ends, "python")
    assert observe(ends, "exec") == expected
    assert observe(ends, "forkserver") == expected


def test_inherited_descriptors_are_closed(ends, tmp_path):
    with (tmp_path / "open").open("w") as file:
        source = f"import os\ntry:\n  print(os.fstat({file.fileno()}).st_ino)\nexcept OSError as e:\n  print(e.strerror)"
        assert ends("forkserver", source, pass_fds=[file.fileno()])[1] == "Bad file descriptor\n"


ASK = """
import json, os, sys
out = {"torch before": "torch" in sys.modules, "late": os.environ.get("LATE")}
import inspect, multiprocessing, random, signal, socket
from pathlib import Path
import numpy, torch, torch.nn
from torch.utils.data import DataLoader, Dataset
import torch.distributed as dist

HERE = __file__ if "__file__" in globals() else None

class Rows(Dataset):
    def __len__(self): return 6
    def __getitem__(self, i): return torch.tensor([float(i)]), multiprocessing.current_process().name != "MainProcess"

def collate(rows): return torch.stack([row for row, _ in rows]), all(away for _, away in rows)

def seen(_, name): Path(os.environ["OUT"], name).write_text(str(dist.is_available()))

def double(x): return 2 * x

def listens():
    lines = [l.split() for f in ("tcp", "tcp6") for l in Path("/proc/net", f).read_text().splitlines()[1:]]
    inodes = {os.readlink(f"/proc/{p}/fd/{f}") for p in (os.getpid(), os.getppid()) for f in os.listdir(f"/proc/{p}/fd")
              if os.path.islink(f"/proc/{p}/fd/{f}")}
    return sorted({l[1].split(":")[0] for l in lines if l[3] == "0A" and f"socket:[{l[9]}]" in inodes})

def main():
    rank = os.environ["RANK"]
    out["name"], out["file"], out["argv"], out["path0"] = __name__, HERE, sys.argv, sys.path[0]
    out["torch"] = [torch.__spec__.name, torch.__spec__.origin, torch.get_num_threads()]
    out["process"] = [str(multiprocessing.current_process()), str(multiprocessing.parent_process())]
    out["handlers"] = [str(signal.getsignal(s)) for s in signal.Signals]
    out["group"] = [os.getpid() == os.getpgid(0), os.getpid() == os.getsid(0)]
    out["own"] = [random.random(), float(numpy.random.rand()), multiprocessing.current_process().authkey.hex(), torch.rand(4).tolist()]
    out["ours"] = [m for m in sys.modules if m.split(".")[0] in {"pydantic", "rich", "typer", "yaml", "platformdirs"}]
    # Each of these imports torch again: one process asks for all.
    for method in ("fork", *sys.argv[1:]) if rank == "0" else ():
        loader = DataLoader(Rows(), batch_size=3, num_workers=1, multiprocessing_context=method, collate_fn=collate)
        out[method] = [(batch.sum().item(), away) for batch, away in loader]
    if rank == "0":
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            out["pool"] = pool.map(double, [1, 2])
        torch.multiprocessing.spawn(seen, args=("seen",))
        out["seen"] = Path(os.environ["OUT"], "seen").read_text()
    out["source"] = inspect.getsource(double)
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    out["total"], out["listens"] = total.item(), listens()
    dist.destroy_process_group()
    out["environ"] = dict(os.environ)
    out["ppid"] = os.getppid()
    Path(os.environ["OUT"], rank + ".json").write_text(json.dumps(out))

if __name__ == "__main__":
    main()
"""
ITS_OWN = {"MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "ACCEL_LAUNCH", "ACCEL_RANK_FOLDER", "OUT"}


@pytest.fixture
def run_and_read(accel, tmp_path, monkeypatch):
    """Return the answers of both ranks of a script."""

    def answers(method, *args):
        out = tmp_path / f"out-{method}"
        out.mkdir()
        monkeypatch.setenv("OUT", str(out))
        options = ("--cpu", "--nproc-per-node", "2", "--set", f"launcher.start_method={method}")
        result = accel("launch", *options, "--set", "env.LATE=1", *args)
        assert result.returncode == 0, result.stderr
        assert "by exec" not in result.stderr
        return [json.loads((out / f"{rank}.json").read_text()) for rank in (0, 1)]

    return answers


@pytest.mark.full
@pytest.mark.parametrize(
    "module", [False, pytest.param(True, marks=pytest.mark.full)], ids=["script", "module"]
)
def test_a_forked_script_observes_the_same_process_state(accel, script, run_and_read, module):
    if module:
        script("", "package/__init__.py")
        script("from .ask import main, Rows\n" + "if __name__ == '__main__': main()\n", "package/run.py")
        script(ASK, "package/ask.py")
        args = ("-m", "package.run", "spawn")
    else:
        script(ASK)
        args = ("train.py", "spawn", "forkserver")
    executed = run_and_read("exec", *args)
    forked = run_and_read("forkserver", *args)
    for each in (executed, forked):
        own_values = [record.pop("own") for record in each]
        assert all(first != second for first, second in zip(*own_values, strict=True))
        assert len({record.pop("ppid") for record in each}) == 1
        for record in each:
            record["environ"] = {k: v for k, v in record["environ"].items() if k not in ITS_OWN}
    assert forked == executed
    record = forked[0]
    assert not record["torch before"]
    assert record["ours"] == []
    assert record["listens"] == ["0100007F"]
    assert record["fork"] == record["spawn"] == [[3.0, True], [12.0, True]]


def launched(accel, *args, nproc=2):
    """Launch with `accel`, which starts an interpreter, or `run`, which forks one that has imported torch."""
    return accel("launch", "--cpu", "--nproc-per-node", nproc, "--ranks", "all", *args)


def lines(result):
    """Return the lines of all ranks without their prefixes."""
    return [re.sub(r"^\[\d+\] ", "", line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize("name", ["calendar", "torch"])
def test_a_module_of_the_script_with_the_name_of_an_imported_one_is_used(accel, script, name):
    script("mine = True", f"{name}.py")
    script(f"import {name}; print('mine', {name}.mine)")
    # A new interpreter must not find the script's `torch` itself.
    result = launched(accel if name == "torch" else run_accel, "train.py")
    assert lines(result) == ["mine True"] * 2
    assert "processes are started by exec:" in result.stderr
    assert name in result.stderr


@pytest.mark.slow
def test_a_variable_that_the_script_sets_before_torch_is_effective_with_exec(cwd, script):
    script("import os; os.environ['OMP_NUM_THREADS'] = '2'; import torch; print(torch.get_num_threads())")
    options = ("--set", "launcher.kind=torchrun", "--set", "launcher.start_method=exec")
    assert lines(launched(run_accel, *options, "train.py", nproc=1)) == ["2"]


@pytest.mark.slow
def test_a_variable_that_the_script_sets_too_late_is_a_warning(accel, script):
    script("import os; os.environ['OMP_NUM_THREADS'] = '3'", "settings.py")
    script(
        "import settings, sys, torch, os; os.environ['TORCH_COMPILE_DISABLE'] = '1'; print('torch._dynamo' in sys.modules); "
        "torch.optim.SGD([torch.ones(1, requires_grad=True)])"
    )
    result = launched(accel, "train.py")
    assert result.returncode == 0
    assert lines(result) == ["False"] * 2
    assert "OMP_NUM_THREADS changed after torch was loaded for this process" in result.stderr
    assert "TORCH_COMPILE_DISABLE changed after torch._dynamo was loaded for this process" in result.stderr


def test_variables_of_the_profile_are_set_before_torch_is_loaded(accel, script):
    script("import torch; print(torch.get_num_threads())")
    result = launched(accel, "--set", "env.OMP_NUM_THREADS=2", "train.py")
    assert lines(result) == ["2"] * 2
    assert "by exec" not in result.stderr


@pytest.mark.slow
def test_a_restart_forks_from_the_same_server(cwd, script):
    script(
        dedent("""
        import os, sys, time
        from pathlib import Path
        again = Path("again").exists()
        print(os.environ["RANK"], again, os.environ["TORCHELASTIC_RESTART_COUNT"])
        import torch.distributed as dist
        if not again and os.environ["RANK"] == "1":
            Path("again").touch()
            os.kill(os.getpid(), 9)
        dist.init_process_group("gloo")
        dist.barrier()
        print("met")
        """)
    )
    result = launched(run_accel, "--set", "launcher.max_restarts=1", "train.py")
    assert result.returncode == 0, result.stderr
    assert sorted(lines(result))[-2:] == ["met", "met"]


def test_a_restart_after_a_failure_that_names_the_fork_is_by_exec(cwd, script):
    script(
        dedent("""
        import os
        first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        print(first, "numpy" in __import__("sys").modules)
        if first:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, ...")
        """)
    )
    options = ("--set", "launcher.max_restarts=1", "--set", "launcher.kind=torchrun")
    result = launched(run_accel, *options, "train.py", nproc=1)
    assert (result.returncode, lines(result)) == (0, ["True True", "False False"]), result.stderr
    assert "processes are started by exec: rank 0 cannot use its device in a fork" in result.stderr
    result = launched(run_accel, "--set", "launcher.kind=torchrun", "train.py", nproc=1)
    assert result.returncode == 1  # the script had begun: it is not run again unless restarts are allowed
    assert "hint: the process is a fork of one that had used the device" in result.stderr
    assert "launcher.start_method=exec" in result.stderr


@pytest.mark.slow
def test_a_restart_without_the_server_is_by_exec(cwd, script):
    script(
        dedent("""
        import os, signal
        from pathlib import Path
        if not Path("again").exists():
            Path("again").touch()
            launcher = os.getppid()
            children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
            commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_text() for pid in children}
            (server,) = [pid for pid, said in commands.items() if pid != os.getpid() and "guard" not in said]
            os.kill(server, signal.SIGKILL)
            raise SystemExit(1)
        print("again")
        """)
    )
    result = launched(
        run_accel, "--set", "launcher.max_restarts=1", "--set", "launcher.kind=torchrun", "train.py", nproc=1
    )
    assert (result.returncode, result.stdout) == (0, "again\n"), result.stderr
    assert "the fork server has ended" in result.stderr


def test_no_process_is_left_after_the_launcher(cwd, script):
    script("import os; print(os.getppid(), os.getpid(), flush=True)")
    result = launched(run_accel, "train.py")
    pids = {int(pid) for line in lines(result) for pid in line.split()}
    assert len(pids) == 3
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_the_fork_server_ends_with_its_launcher():
    source = "from accel_cli.runner.forkserver import start_fork_server; print(start_fork_server()._pid, flush=True); input()"
    with Process(
        [sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as launcher:
        server = Path(f"/proc/{launcher.stdout.readline().strip()}/stat")
        assert server.exists()
        launcher.kill()
    # Where nobody collects orphans, one that has ended stays as a zombie.
    with suppress(OSError):  # where somebody does, it is gone, perhaps between opening and reading
        wait_until(lambda: server.read_text().split()[2] == "Z")


def test_a_forked_process_ends_if_its_server_is_killed_before_the_start():
    """Its launcher has started another by exec."""
    source = """
import os
from accel_cli.runner import forkserver as server
(go, begin), (born, announce) = os.pipe(), os.pipe()
if pid := os.fork():
    os.close(begin)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
else:
    os.close(begin)
    server._wait_for_start(0, announce, go, set())
    print("the script runs")
"""
    result = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=limit(60)
    )
    assert result.stdout == "1\n"


def test_forking_a_program_is_an_error_and_explain_prints_the_start_method(cwd, script):
    script("")
    refused = launched(run_accel, "--set", "launcher.start_method=forkserver", "--no-python", "true")
    assert refused.returncode == 2
    assert "Cannot use start_method: forkserver: a program may not be Python" in refused.stderr
    output = launched(run_accel, "--explain", "--no-python", "true").stdout
    assert "start method: exec (a program may not be Python)" in output
    assert (
        "start method: forkserver (torch is imported once"
        in launched(run_accel, "--explain", "train.py").stdout
    )


@pytest.mark.slow
def test_ranks_of_a_training_share_what_an_optimizer_imports(accel, script):
    script(
        "import sys, torch\nbefore = set(sys.modules)\ntorch.optim.SGD([torch.ones(1, requires_grad=True)])\n"
        "print(len([name for name in set(sys.modules) - before if not name.startswith('torch.')]) < 10)"
    )
    result = accel("launch", "-q", "--ranks", "all", "--nproc-per-node", 2, "train.py")
    assert sorted(line.split()[-1] for line in result.stdout.splitlines()) == ["True", "True"], result.stderr
