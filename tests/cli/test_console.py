"""Questions and tables on a terminal."""

import os
import shutil
import sys

import pytest
from support.processes.commands import call_accel

from accel_cli import console
from accel_runtime.environment.installation import format_python


class Output:
    """A standard stream that types a line on the terminal when a question is written to it."""

    def __init__(self, terminal, line):
        self._terminal, self._line = terminal, line

    def write(self, text):
        if text.strip().endswith("]"):
            os.write(self._terminal, self._line)

    def flush(self):
        pass


@pytest.fixture
def terminal(monkeypatch):
    """Makes stdin a terminal on which one line is typed before a question is shown, and one after it."""
    local_end, remote_end = os.openpty()
    stdin = os.fdopen(remote_end)

    def types(before, after):
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(sys, "stdout", Output(local_end, after))
        os.write(local_end, before)

    yield types
    stdin.close()
    os.close(local_end)


@pytest.mark.parametrize(("before", "after", "yes"), [(b"y\n", b"n\n", False), (b"n\n", b"y\n", True)])
def test_a_line_that_is_typed_before_a_question_is_shown_does_not_answer_it(terminal, before, after, yes):
    terminal(before, after)
    assert console.confirm("Delete it?") is yes


@pytest.mark.parametrize(("answer", "yes"), [(b"\n", True), (b"n\n", False)])
def test_enter_gives_the_default_answer(terminal, answer, yes):
    terminal(b"", answer)
    assert console.confirm("Edit again?", default=True) is yes


@pytest.fixture
def shown(monkeypatch):
    """A function that prints a table on a terminal, and returns what the terminal received."""

    def show(*table):
        local_end, remote_end = os.openpty()
        with os.fdopen(remote_end, "w") as stdout:
            monkeypatch.setattr(sys, "stdout", stdout)
            console.table(*table)
            stdout.flush()
            received = os.read(local_end, 1000)
        os.close(local_end)
        return received

    return show


def test_a_table_on_a_terminal_shows_control_characters_as_escapes(shown):
    text = shown(("SCRIPT",), [("train\x1b[2J.py",)])
    assert rb"train\x1b[2J.py" in text
    assert b"\x1b[2J" not in text


def test_a_table_in_a_pipe_has_a_header_unless_its_rows_are_named(capsys):
    console.table(("RUN", "EXIT"), [("a", "0")])
    console.table(("", ""), [("state", "Completed")])
    assert capsys.readouterr().out == "RUN\tEXIT\na\t0\nstate\tCompleted\n"


def test_columns_of_a_table_may_have_the_same_heading(shown):
    assert {b"state", b"Completed"} <= set(shown(("", ""), [("state", "Completed")]).split())


@pytest.mark.parametrize(("found", "hints"), [(None, 1), ("/bin/accel", 0)])
def test_an_error_that_names_a_command_says_how_to_run_it_if_accel_is_not_on_path(
    capfd, monkeypatch, found, hints
):
    monkeypatch.setattr(shutil, "which", lambda name: found if name == "accel" else None)
    done = call_accel(capfd, "logs", "unknown")
    assert "Launch a script with accel launch" in done.stderr
    assert (
        done.stderr.count(f"accel is not on PATH: run {format_python()} -m accel_cli in its place") == hints
    )
    assert "not on PATH" not in call_accel(capfd, "launch", "missing.py").stderr


def test_the_title_of_a_failure_that_is_longer_than_the_terminal_is_not_cut(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    console.print_failure("rank 13 (local rank 5) on a-node.example.com, PID 1234", ["  File"], "ValueError")
    printed = capsys.readouterr().err
    assert "…" not in printed
    assert "PID 1234 failed" in " ".join(printed.replace("│", " ").split())
