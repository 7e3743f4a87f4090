"""The output of ranks: one on the screen as without a launcher, others on request, all in their logs."""

import contextlib
import fcntl
import os
import signal
import struct
import subprocess
import termios
import time

import pytest
from support.processes.commands import Accel, run_accel
from support.processes.waits import WAIT_FOR_SIGNAL, limit, wait_until

LAUNCH = ("launch", "-q", "--nproc-per-node", "2")


@pytest.fixture
def accel(cwd):
    """Runs `accel`, forked from an interpreter that has imported torch, in an empty folder."""
    return run_accel


def log(home, rank, attempt=0):
    (path,) = home.glob(f"runs/*/attempt_{attempt}/rank_{rank}/output.log")
    return path.read_bytes()


def on_a_terminal(command, **options):
    """Return the output of a command on a terminal of 50 lines and 133 columns, byte for byte."""
    local_end, remote_end = os.openpty()
    fcntl.ioctl(remote_end, termios.TIOCSWINSZ, struct.pack("4H", 50, 133, 0, 0))
    settings = termios.tcgetattr(remote_end)
    settings[1] &= ~termios.OPOST
    termios.tcsetattr(remote_end, termios.TCSANOW, settings)
    options = {"stdout": remote_end, "stderr": remote_end, "stdin": subprocess.DEVNULL} | options
    with Accel(*command, **options) as process:
        os.close(remote_end)
        parts = []
        try:
            while part := os.read(local_end, 65536):
                parts.append(part)
        except OSError:  # Linux's way to say that nobody is there any more
            pass
    os.close(local_end)
    return b"".join(parts), process.returncode


def test_a_single_rank_on_a_terminal_has_a_terminal_of_equal_size(script, home):
    script(
        "import os, sys\n"
        "size = tuple(os.get_terminal_size(1)) if sys.stdout.isatty() else None\n"
        "print(sys.stdout.isatty(), sys.stderr.isatty(), size)\n"
        "for n in range(3):\n    print(f'\\r{n}/2', end='', file=sys.stderr, flush=True)\n"
        "os.write(1, b'\\x1b[31m\\xff\\n')\n"
    )
    screen, code = on_a_terminal((*LAUNCH, "train.py"))
    assert code == 0
    assert screen == b"True True (133, 50)\n\r0/2\r1/2\r2/2\x1b[31m\xff\n"
    assert log(home, 0) == screen
    assert log(home, 1).endswith(b"\r0/2\r1/2\r2/2\x1b[31m\xff\n")


def test_a_rank_is_informed_of_a_new_terminal_size(script):
    script(
        "import os, signal, time\n"
        # Not print: the signal may come while the other one is under way.
        "def resized(*_):\n"
        "    os.isatty(1) and os.write(1, f'{tuple(os.get_terminal_size(1))}\\n'.encode()); os._exit(0)\n"
        "signal.signal(signal.SIGWINCH, resized)\n"
        "print('ready', flush=True)\n" + WAIT_FOR_SIGNAL
    )
    local_end, remote_end = os.openpty()
    with Accel(
        *LAUNCH, "--ranks", "1", "train.py", stdout=remote_end, stderr=remote_end, stdin=subprocess.DEVNULL
    ) as process:
        os.close(remote_end)
        assert line_of(local_end) == b"ready\r\n"
        fcntl.ioctl(local_end, termios.TIOCSWINSZ, struct.pack("4H", 7, 77, 0, 0))

        def has_ended():
            # The rank that is not shown may not listen yet.
            process.send_signal(signal.SIGWINCH)
            time.sleep(0.2)
            return process.poll() is not None

        wait_until(has_ended)
        assert line_of(local_end) == b"(77, 7)\r\n"
    os.close(local_end)


def line_of(terminal):
    """Read a line, which may arrive in parts."""
    output = b""
    while not output.endswith(b"\n"):
        output += os.read(terminal, 100)
    return output


def test_a_redirected_stream_is_separate_from_the_terminal(script, cwd, home):
    script(
        "import sys\nprint('out', sys.stdout.isatty())\nprint('err', sys.stderr.isatty(), file=sys.stderr)\n"
    )
    with (cwd / "err.txt").open("wb") as err:
        screen, _ = on_a_terminal((*LAUNCH, "train.py"), stderr=err)
    assert (screen, (cwd / "err.txt").read_text()) == (b"out True\n", "err False\n")
    assert sorted(log(home, 0).splitlines()) == [b"err False", b"out True"]


ENCODED = """
import subprocess, sys
for stream in (sys.stdout, sys.stderr):
    stream.reconfigure(encoding="utf-16")
    stream.reconfigure(encoding="utf-8", errors="replace")
print("é", flush=True)
subprocess.run(["echo", "child"], check=True)
print("end", file=sys.stderr)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "method"),
    [
        pytest.param(ranks, method, marks=[pytest.mark.full] * ((ranks == "all") != (method == "exec")))
        for ranks in ("0", "all", "none")
        for method in ("exec", "forkserver")
    ],
)
def test_a_script_sets_the_encoding_of_redirected_streams(script, cwd, home, ranks, method):
    """The streams of a rank must not keep that those of the launcher, which are files, can seek."""
    script(ENCODED)
    options = ("--ranks", ranks, "--set", f"launcher.start_method={method}")
    with (cwd / "train.log").open("w") as out, (cwd / "train.err").open("w") as errors:
        done = run_accel(*LAUNCH, *options, "train.py", stdout=out, stderr=errors, capture_output=False)
    assert (done.returncode, log(home, 0)) == (0, "é\nchild\nend\n".encode())
    prefixes = {"0": ("",), "all": ("[0] ", "[1] "), "none": ()}[ranks]
    assert sorted((cwd / "train.log").read_text().splitlines()) == sorted(
        f"{prefix}{line}" for prefix in prefixes for line in ("é", "child")
    )
    assert sorted((cwd / "train.err").read_text().splitlines()) == [f"{prefix}end" for prefix in prefixes]


def test_the_log_of_a_rank_has_both_streams_in_the_order_of_the_writes(accel, script, home):
    script("import sys\nfor n in range(50):\n    print('out', n)\n    print('err', n, file=sys.stderr)\n")
    result = accel(
        "launch",
        "-q",
        "--nproc-per-node",
        2,
        "train.py",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        capture_output=False,
    )
    expected = "".join(f"out {n}\nerr {n}\n" for n in range(50))
    assert result.stdout == expected
    assert [log(home, rank).decode() for rank in range(2)] == [expected, expected]


@pytest.mark.parametrize(("ranks", "shown"), [("none", []), ("1", ["1"]), ("0,2", ["[0] 0", "[2] 2"])])
def test_the_selected_ranks_are_shown(accel, script, home, ranks, shown):
    script("import os\nprint(os.environ['RANK'])\n")
    result = accel("launch", "-q", "--nproc-per-node", 3, "--ranks", ranks, "train.py")
    assert (result.returncode, result.stderr) == (0, "")
    assert sorted(result.stdout.splitlines()) == shown
    assert [log(home, rank) for rank in range(3)] == [b"0\n", b"1\n", b"2\n"]


def test_prefixes_are_coloured_on_a_terminal_without_no_color(script):
    script("import os\nprint(os.environ['RANK'])\n")
    command = (*LAUNCH, "--ranks", "all", "train.py")
    screen, _ = on_a_terminal(command, env={**os.environ, "TERM": "xterm"})
    assert sorted(screen.splitlines()) == [b"\x1b[33m[1]\x1b[0m 1", b"\x1b[36m[0]\x1b[0m 0"]
    plain, _ = on_a_terminal(command, env={**os.environ, "TERM": "xterm", "NO_COLOR": "1"})
    assert sorted(plain.splitlines()) == [b"[0] 0", b"[1] 1"]


def test_a_question_is_shown_before_its_line_is_complete(script):
    script(
        "import os\nif os.environ['RANK'] == '0':\n    print('go on?', end=' ', flush=True)\n    print(input())\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with Accel(*LAUNCH, "--ranks", "all", "train.py", **pipes) as process:
        assert process.stdout.readline() == "[0] go on? \n"
        process.stdin.write("yes\n")
        process.stdin.close()
        assert process.stdout.read() == "[0] yes\n"


def test_a_script_ends_if_its_output_is_closed(script):
    script("import time\nwhile True:\n    print('x' * 100)\n    time.sleep(0.001)\n")
    with Accel(*LAUNCH, "train.py", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        # What Python says of an exception; or, where its last flush finds nobody either, of that.
        assert process.wait(timeout=limit(200)) in {1, 120}
        assert b"BrokenPipeError" in process.stderr.read().splitlines()[-1]


@pytest.mark.slow
def test_a_background_process_of_a_script_does_not_delay_the_end(accel, script):
    script("import subprocess\nprint(subprocess.Popen(['sleep', '600']).pid)\n")
    start = time.monotonic()
    result = accel(*LAUNCH, "--ranks", "all", "train.py")
    for line in result.stdout.splitlines():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(line.split()[1]), 9)
    assert len(result.stdout.splitlines()) == 2
    assert time.monotonic() - start < 600


REMOVES_THE_FOLDER = """
    attempt = Path(os.environ["ACCEL_RANK_FOLDER"]).parent
    while not (attempt / "rank_0" / "stacks").exists():  # the last file that the other rank creates at its start
        time.sleep(0.01)
    shutil.rmtree(attempt.parent)
"""


@pytest.mark.parametrize(
    ("breaks", "why"),
    [
        ("os.dup2(os.open('/dev/full', os.O_WRONLY), 1)", "rank_1 could not write"),
        (REMOVES_THE_FOLDER, "rank_1 could not write"),
    ],
    ids=["full disk", "no folder"],
)
def test_logs_that_cannot_be_written_are_one_warning(accel, script, breaks, why):
    script(
        f"import os, shutil, time\nfrom pathlib import Path\nif os.environ['RANK'] == '1':\n    {breaks}\n"
        "for n in range(3):\n    print('line', n, flush=True)\n"
    )
    result = accel(*LAUNCH, "train.py")
    assert (result.returncode, result.stdout) == (0, "line 0\nline 1\nline 2\n")
    assert result.stderr.startswith("accel: the logs in ")
    assert f" are not complete: {why}. The run itself continues" in result.stderr
    assert result.stderr.count("\n") == 1


def test_accel_logs_shows_the_last_run(accel, script, cwd, home):
    script("import os, sys\nprint(sys.argv[1], os.environ['RANK'])\n")
    for word in ("first", "second"):
        accel("launch", "-q", "--nproc-per-node", 2, "train.py", word)
    assert accel("logs").stdout == "second 0\n"
    assert accel("logs", "--rank", 1).stdout == "second 1\n"
    _, second, first = [line.split("\t")[0] for line in accel("runs").stdout.splitlines()]
    assert accel("logs", first, "--attempt", 0).stdout == "first 0\n"
    for options, expected_text in [
        (("--rank", 5), "has no log of rank 5. Ranks 0 and 1 ran on this machine."),
        (("--attempt", 3), f"Run {second} has no attempt 3. Its last attempt is 0."),
        (("x",), "Run 'x' not found in "),
    ]:
        result = accel("logs", *options)
        assert (result.returncode, expected_text in result.stderr) == (2, True), result.stderr


def test_accel_logs_without_a_run_is_an_error(accel):
    result = accel("logs")
    assert result.returncode == 2
    assert "accel: error: No runs found in " in result.stderr


@pytest.mark.slow
def test_accel_logs_follows_a_run_in_the_folder_of_the_profile(accel, script, cwd):
    script("import sys\nprint('begins', flush=True)\nsys.stdin.read()\nprint('ends')\n")
    accel("config", "set", "--project", "launcher.kind=torchrun", "launcher.log_dir=kept")
    with Accel(*LAUNCH, "train.py", stdin=subprocess.PIPE, stdout=subprocess.PIPE) as job:
        assert job.stdout.readline() == b"begins\n"
        assert list((cwd / "kept").iterdir())
        with Accel("logs", "-f", "--rank", "1", stdout=subprocess.PIPE) as logs:
            assert logs.stdout.readline() == b"begins\n"
            job.stdin.close()
            assert logs.stdout.read() == b"ends\n"
            assert logs.wait(timeout=limit(200)) == 0


@pytest.mark.parametrize(
    ("options", "expected_text"),
    [
        (("--log-dir", "train.py/x"), "Cannot write logs to "),
        (("--ranks", "2"), "Invalid ranks '2': the last rank is 1"),
        (("--ranks", "first"), "expected all, none, or ranks as in 0,2"),
    ],
)
def test_invalid_options_of_output_are_an_error(accel, script, cwd, options, expected_text):
    script("open('started', 'w')\n")
    result = accel("launch", "-q", "--nproc-per-node", 2, *options, "train.py")
    assert result.returncode == 2
    assert expected_text in result.stderr
    assert "Traceback" not in result.stderr
    assert not (cwd / "started").exists()


@pytest.mark.parametrize("options", [("--log-dir", "x"), ("--ranks", "all")])
def test_options_of_output_are_an_error_with_single(accel, script, options):
    script("")
    result = accel("launch", *options, "train.py")
    assert result.returncode == 2
    assert f"{options[0]} needs launcher.kind: torchrun" in result.stderr
