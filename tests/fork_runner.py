"""Run scripts in processes that are forked from one interpreter which has imported torch, and that end as it would end.

This file is both sides. Tests see `ForkServer`; run as a script, it is the interpreter. A fork takes milliseconds where
an interpreter that imports torch takes seconds.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

MODULES = ("torch", "torch._dynamo", "torch.distributed", "accel_runtime.accelerator")


class ForkServer:
    """An interpreter that has imported torch; it starts with the first script."""

    _process = None

    def run(self, script, environs, timeout=240):
        """Run a script in one process for each environment, at once.

        Args:
            script: Its path. Files named after it are written beside it.
            environs: What the environment of each process has beyond that of this process.
            timeout: How long all may take, in seconds.

        Returns:
            What each printed, its errors, and its exit code: negative, a signal.
        """
        if self._process is None:
            self._start()
        names = [(f"{script}.{number}.out", f"{script}.{number}.err") for number in range(len(environs))]
        whole = [os.environ | {name: str(value) for name, value in environ.items()} for environ in environs]
        request = {"script": str(script), "processes": [*zip(whole, names, strict=True)]}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], timeout)[0]:
            self.close()
            raise TimeoutError(f"{script} did not end within {timeout} seconds")
        codes = json.loads(self._process.stdout.readline())
        return [(read(out), read(errors), code) for (out, errors), code in zip(names, codes, strict=True)]

    def close(self):
        """Kill the interpreter and what it has forked."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
            self._process = None

    def _start(self):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        environ = os.environ | {"OMP_NUM_THREADS": "1"}  # it is read when torch is imported
        self._process = subprocess.Popen(
            [sys.executable, __file__], env=environ, start_new_session=True, **pipes
        )


def read(path):
    return Path(path).read_text(encoding="utf-8")


def serve():
    """Fork a process for each environment of a request; return, in each of them, the script to run."""
    for name in MODULES:
        __import__(name)
    gc.freeze()  # a process that ends collects its own garbage, and copies none of these pages for it
    while line := sys.stdin.readline():
        request = json.loads(line)
        pids = []
        for environ, files in request["processes"]:
            pid = os.fork()
            if not pid:
                run_forked_script(environ, files)
                return request["script"]
            pids.append(pid)
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]), flush=True)
    return None


def run_forked_script(environ, files):
    """Set up a forked process as that of a script."""
    os.environ.clear()
    os.environ.update(environ)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, path in enumerate(files, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), descriptor)


if __name__ == "__main__" and (_script := serve()) is not None:
    sys.argv, sys.path[0] = [_script], str(Path(_script).parent)
    # In the module that the interpreter takes down last, as it does a script's.
    exec(compile(read(_script), _script, "exec", dont_inherit=True), globals())  # noqa: S102
