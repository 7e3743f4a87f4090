"""The help of every command, compared with golden files."""

from __future__ import annotations

import pytest
from support.cases import golden
from support.processes.commands import call_accel

from accel_cli.main import COMMANDS, accel


def command_paths(command, path=()):
    """Return the names that lead to each command, the root first."""
    children = getattr(command, "commands", {})
    return [
        path,
        *(paths for name, child in children.items() for paths in command_paths(child, (*path, name))),
    ]


PATHS = command_paths(accel)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: "-".join(path) or "accel")
def test_a_command_prints_the_help_of_its_golden_file(path, capfd, home):
    result = call_accel(
        capfd, *path, "--help", env={"COLUMNS": "100", "TERM": "dumb", "PATH": "/usr/bin:/bin"}
    )
    assert result.returncode == 0, result.stderr
    golden.check(
        f"help/{'-'.join(path) or 'accel'}.txt",
        "\n".join(line.rstrip() for line in result.stdout.strip("\n").splitlines()) + "\n",
    )


def test_every_golden_help_belongs_to_a_command():
    assert golden.names("help") == {"-".join(path) or "accel" for path in PATHS}


def test_a_newcomer_sees_15_commands_at_most():
    visible = [name for name in COMMANDS.names if not accel.commands[name].hidden]
    assert len(visible) <= 15


@pytest.mark.parametrize("path", PATHS, ids=lambda path: "-".join(path) or "accel")
def test_a_help_fits_on_a_screen_or_has_panels(path):
    lines = (golden.FOLDER / "help" / f"{'-'.join(path) or 'accel'}.txt").read_text().splitlines()
    panels = [line for line in lines if line.startswith("╭─") and " Arguments " not in line]
    assert len(lines) <= 40 or len(panels) > 1
