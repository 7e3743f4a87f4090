"""Replicas as threads of one process: `__main__`, output and signal handlers of each."""

import subprocess
import sys

from support.processes.waits import limit

HEAD = """
import os, pickle, signal, sys, threading
from pathlib import Path
from types import ModuleType
from accel_cli.extensions.xla.replicas import ReplicaSignalHandlers, ReplicaThreads

def stop(number, error):
    print("stopped by", number, repr(error), flush=True)
    os._exit(3)

threads = ReplicaThreads()
ReplicaSignalHandlers(threads, stop).install()
both = threading.Barrier(2)

def replica(number, body):
    threads.enter(number, several=True)
    both.wait(60)
    body(number)

def run(body):
    each = [threading.Thread(target=replica, args=(number, body)) for number in range(2)]
    [thread.start() for thread in each]
    # A busy system may deliver a signal to a thread; Python handles it when the main thread wakes up.
    while any(thread.is_alive() for thread in each):
        each[0].join(0.1), each[1].join(0.1)
"""


def run(body, folder):
    command = [sys.executable, "-c", HEAD + body]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=limit(120), check=False, cwd=folder
    )


def test_each_replica_has_its_own_main_module(tmp_path):
    result = run(
        "def body(number):\n    module = ModuleType('__main__')\n    threads.set_main(module)\n    both.wait(60)\n"
        "    exec('class Own:\\n    pass', vars(module))\n    import __main__\n"
        "    assert __main__.Own is module.Own and vars(__main__) is vars(module)\n"
        "    assert type(pickle.loads(pickle.dumps(module.Own()))) is module.Own\n"
        "    __main__.number = number\n    assert module.number == number\n"
        "    print('held')\n"
        "run(body)\n",
        tmp_path,
    )  # fmt: skip
    assert (result.stdout.count("held"), result.stderr) == (2, "")


def test_output_of_a_replica_and_its_threads_goes_to_its_files(tmp_path):
    for name in ("stdout", "stderr"):
        (tmp_path / name).touch()
    result = run(
        "def body(number):\n    if number:\n        threads.redirect_output('.')\n    both.wait(60)\n"
        "    print('from', number)\n"
        "    thread = threading.Thread(target=lambda: print('also', number, file=sys.stderr))\n"
        "    thread.start()\n    thread.join()\n"
        "run(body)\nthreads.flush()\n",
        tmp_path,
    )
    assert (result.stdout, result.stderr) == ("from 0\n", "also 0\n")
    assert (tmp_path / "stdout").read_text() == "from 1\n"
    assert (tmp_path / "stderr").read_text() == "also 1\n"


HANDLERS = """
def body(number):
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.signal(signal.SIGTERM, handle) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is handle
    both.wait(60)
    if number:
        os.kill(os.getpid(), signal.SIGTERM)
    came.wait(60)
"""


def test_the_signal_handler_of_each_replica_is_called_as_that_replica(tmp_path):
    result = run(
        "came, heard = threading.Event(), []\n"
        "def handle(number, frame):\n    heard.append(threads.get_current())\n    len(heard) == 2 and came.set()\n"
        f"{HANDLERS}run(body)\nprint(sorted(heard))\n",
        tmp_path,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "[0, 1]\n", "")


def test_an_exception_of_a_handler_ends_the_process_after_all_handlers(tmp_path):
    result = run(
        "came = threading.Event()\n"
        "def handle(number, frame):\n    Path(f'ran{threads.get_current()}').touch()\n"
        "    sys.exit(0) if threads.get_current() == 0 else int('x')\n"
        f"{HANDLERS}run(body)\n",
        tmp_path,
    )
    assert result.returncode == 3
    assert result.stdout.startswith("stopped by 1 ValueError(")
    assert len(list(tmp_path.glob("ran*"))) == 2


def test_signals_without_a_handler_end_the_process_and_other_signals_are_rejected(tmp_path):
    result = run(
        "def body(number):\n    try:\n        signal.signal(signal.SIGALRM, print)\n"
        "    except ValueError as error:\n        print(error)\n"
        "    both.wait(60)\n    sys.stdout.flush()\n    both.wait(60)\n"
        "    number or os.kill(os.getpid(), signal.SIGINT)\n    threading.Event().wait(60)\n"
        "run(body)\n",
        tmp_path,
    )
    assert result.returncode == -2
    assert result.stdout.count("SIGALRM: on a replica of torch_xla") == 2
