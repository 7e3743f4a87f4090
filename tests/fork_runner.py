"""Run scripts in processes forked from one interpreter that has imported torch, with its normal teardown.

This file is both sides. Tests use `ForkServer`; run as a script, it is the interpreter. A fork takes milliseconds, a new
interpreter that imports torch seconds.
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
        """Run a script in one process for each environment, all at the same time.

        Args:
            script: The path of the script. Output files are written to its folder.
            environs: Variables of each process in addition to those of this process.
            timeout: The time limit of all processes in seconds.

        Returns:
            The output, errors and exit code of each process; a negative code is a signal.
        """
        if self._process is None:
            self._start()
        names = [(f"{script}.{number}.out", f"{script}.{number}.err") for number in range(len(environs))]
        merged_environs = [
            os.environ | {name: str(value) for name, value in environ.items()} for environ in environs
        ]
        request = {"script": str(script), "processes": [*zip(merged_environs, names, strict=True)]}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], timeout)[0]:
            self.close()
            raise TimeoutError(f"{script} did not end within {timeout} seconds")
        codes = json.loads(self._process.stdout.readline())
        return [(read(out), read(errors), code) for (out, errors), code in zip(names, codes, strict=True)]

    def close(self):
        """Kill the interpreter and all forked processes."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
            self._process = None

    def _start(self):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        environ = os.environ | {"OMP_NUM_THREADS": "1"}  # torch reads the variable when it is imported
        self._process = subprocess.Popen(
            [sys.executable, __file__], env=environ, start_new_session=True, **pipes
        )


def read(path):
    return Path(path).read_text(encoding="utf-8")


def serve():
    """Fork a process for each environment of a request; return the script to run in each of them."""
    for name in MODULES:
        __import__(name)
    gc.freeze()  # the garbage collection of a forked process must not copy these pages
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
    """Set the environment and streams of a forked process."""
    os.environ.clear()
    os.environ.update(environ)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, path in enumerate(files, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), descriptor)


if __name__ == "__main__" and (_script := serve()) is not None:
    sys.argv, sys.path[0] = [_script], str(Path(_script).parent)
    # In `__main__`, which the interpreter tears down last, as for a script.
    exec(compile(read(_script), _script, "exec", dont_inherit=True), globals())  # noqa: S102
