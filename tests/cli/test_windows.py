"""On Windows, the first command and the first import are refused in one line, before a module of POSIX is imported."""

import subprocess
import sys

import pytest

AS_ON_WINDOWS = """\
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in {"fcntl", "grp", "pwd", "pty", "resource", "termios", "tty"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

for name in ("fcntl", "grp", "pwd", "pty", "resource", "termios", "tty"):
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Missing())
sys.platform = "win32"
"""
LINE = "Cannot run on Windows: accel needs the processes, signals and file locks of POSIX. Install Python and accel in WSL"


def run(code):
    return subprocess.run(
        [sys.executable, "-c", AS_ON_WINDOWS + code], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("arguments", [[], ["--version"], ["launch", "train.py"]])
def test_a_command_ends_with_one_line_and_exit_code_2(arguments):
    process = run(f"sys.argv = ['accel', *{arguments!r}]\nfrom accel_cli.__main__ import main\nmain()")
    assert process.returncode == 2
    assert process.stderr.startswith(f"accel: error: {LINE}")
    assert process.stderr.count("\n") == 1
    assert process.stdout == ""


@pytest.mark.parametrize("code", ["import accel_runtime", "import accel_cli\naccel_cli.launch"])
def test_an_import_raises_that_line(code):
    process = run(code)
    assert process.returncode == 1
    assert process.stderr.splitlines()[-1].startswith(f"ImportError: {LINE}")
