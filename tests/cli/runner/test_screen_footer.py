"""The footer below the output of a run, on a real pseudo-terminal that is read as a screen."""

import os
import subprocess
import sys
import termios

import pyte
import pytest
from support.processes import AS_SESSION, Process

SETUP = """
import fcntl, os, sys, termios
from accel_cli.runner.output import ScreenFooter
count = 2
def build(columns, lines):
    return [f"<{number}>" + "-" * (columns - 3) for number in range(count)][:lines]
def refresh():
    footer._next_refresh = 0
    footer.refresh()
footer = ScreenFooter(build)
with footer:
    refresh()
"""
COLUMNS, LINES = 20, 6


def show(code, *, stdout=None):
    """Run code in the context of a footer, and return the lines on the screen and those above it, and the raw output."""
    local_end, remote_end = os.openpty()
    termios.tcsetwinsize(remote_end, (LINES, COLUMNS))
    program = (
        SETUP + "".join(f"    {line}\n" for line in code.splitlines()) + "print('end', file=sys.stderr)\n"
    )
    with Process(
        [sys.executable, "-c", program], stdin=remote_end, stdout=stdout or remote_end, stderr=remote_end
    ) as process:
        os.close(remote_end)
        data = b""
        try:
            while part := os.read(local_end, 65536):
                data += part
        except OSError:
            pass
    os.close(local_end)
    assert process.returncode == 0, data.decode()
    screen = pyte.HistoryScreen(COLUMNS, LINES, history=1000)
    pyte.ByteStream(screen).feed(data)
    above = ["".join(row[column].data for column in range(COLUMNS)).rstrip() for row in screen.history.top]
    return above, [line.rstrip() for line in screen.display], data


def test_output_scrolls_above_the_footer_and_nothing_is_lost():
    above, shown, _ = show(
        "for n in range(9): footer.write(1, b'line %d\\n' % n); n % 3 or refresh()\nprint('note', file=sys.stderr)"
    )
    lines = [line for line in above + shown if line]
    assert lines == [*(f"line {n}" for n in range(9)), "note", "end"]


def test_the_footer_is_on_the_screen_below_the_output():
    _, shown, _ = show("footer.write(1, b'one\\n')\nos.write(1, b'')\nrefresh()\nos._exit(0)")
    assert shown[:3] == ["one", "<0>" + "-" * 17, "<1>" + "-" * 17]


def test_a_footer_that_becomes_smaller_or_larger_leaves_no_lines():
    _, shown, _ = show("for count in (4, 1, 3): refresh()\nos._exit(0)")
    assert [line[:3] for line in shown] == ["<0>", "<1>", "<2>", "", "", ""]


@pytest.mark.parametrize("size", [(6, 10), (4, 20), (12, 40), (3, 7)])
def test_after_a_change_of_the_size_the_output_is_complete(size):
    lines, columns = size
    code = (
        f"termios.tcsetwinsize(2, ({lines}, {columns}))\n"
        "footer.write(1, b'first\\n')\nfooter.write(1, b'second\\n')\nrefresh()\nfooter.write(1, b'third\\n')"
    )
    above, shown, _ = show(code)
    assert [line for line in above + shown if line] == ["first", "second", "third", "end"]


def test_partial_lines_are_shown_once_they_are_complete():
    above, shown, _ = show(
        "footer.write(1, b'a')\nfooter.write(1, b'b\\nc')\nrefresh()\nfooter.write(2, b'd\\n')\nfooter.write(1, b'e')"
    )
    assert [line for line in above + shown if line] == ["ab", "cd", "eend"]


def test_escape_sequences_that_would_move_the_footer_are_removed_but_colours_are_kept():
    _, _, data = show(r"footer.write(1, b'\x1b[31mred\x1b[0m\x1b[2J\x1b[3A\x1b]0;title\x07\x1bM!\n')")
    assert b"\x1b[31mred\x1b[0m!\r\n" in data


def test_output_to_another_file_is_written_there(tmp_path):
    with (tmp_path / "out").open("wb") as file:
        show(r"footer.write(1, b'\x1b[2Jpartial')", stdout=file)
    assert (tmp_path / "out").read_bytes() == b"\x1b[2Jpartial"


def test_a_hidden_footer_returns_with_the_next_refresh():
    _, shown, _ = show(
        "footer.hide()\nfooter.write(1, b'one\\ntwo')\nfooter.write(1, b'!\\n')\nrefresh()\nos._exit(0)"
    )
    assert [line[:4] for line in shown[:3]] == ["one", "two!", "<0>-"]


def test_a_terminal_that_takes_no_output_does_not_block_a_refresh():
    """Ctrl-S stops the terminal; the launcher must still watch its processes."""
    show("termios.tcflow(2, termios.TCOOFF)\nrefresh()\ntermios.tcflow(2, termios.TCOON)")


def test_a_table_that_fails_is_removed_and_the_run_continues():
    above, shown, _ = show(
        "footer._build = lambda *_: 1 / 0\nrefresh()\nfooter._next_refresh = 0\nfooter.write(1, b'output\\n')"
    )
    text = "".join(above + shown).replace(" ", "")
    assert text.startswith("accel:thetableisnolongershown:ZeroDivisionError:divisionbyzero.")
    assert text.endswith("outputend")


def test_the_terminal_echoes_again_after_the_footer():
    local_end, remote_end = os.openpty()
    code = SETUP.replace("    refresh()", "    print(termios.tcgetattr(0)[3] & termios.ECHO)")
    process = subprocess.run(
        # A terminal belongs to a session; the footer leaves one alone that is not its own.
        [*AS_SESSION, sys.executable, "-c", code + "print(termios.tcgetattr(0)[3] & termios.ECHO)"],
        stdin=remote_end, stdout=subprocess.PIPE, stderr=remote_end, check=True,
    )  # fmt: skip
    os.close(local_end)
    os.close(remote_end)
    assert process.stdout.split() == [b"0", str(termios.ECHO).encode()]


def test_a_launcher_in_the_background_is_not_stopped_at_its_end():
    """Ctrl-Z and bg leave it there; a change of the terminal would stop it for good."""
    program = """
import os, sys, time
from accel_cli.runner.output import ScreenFooter
while os.tcgetpgrp(0) != os.getpgrp(): time.sleep(0.01)
with ScreenFooter(lambda *_: []):
    print("entered", flush=True)
    while os.tcgetpgrp(0) == os.getpgrp(): time.sleep(0.01)
"""
    shell = """
import os, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, process_group=0)
os.tcsetpgrp(0, child.pid)
child.stdout.readline()
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
os.tcsetpgrp(0, os.getpgrp())
_, status = os.waitpid(child.pid, os.WUNTRACED)
child.kill()
print(status)
"""
    local_end, remote_end = os.openpty()
    process = subprocess.run(
        [*AS_SESSION, sys.executable, "-c", shell, program],
        stdin=remote_end, stdout=subprocess.PIPE, stderr=remote_end, check=True,
    )  # fmt: skip
    os.close(local_end)
    os.close(remote_end)
    assert process.stdout.split() == [b"0"]


def test_a_terminal_that_does_not_know_its_size_has_80_columns_and_24_lines():
    _, _, data = show("termios.tcsetwinsize(2, (0, 0))\nrefresh()")
    assert b"<0>" + b"-" * 77 + b"\r\r\n" in data
