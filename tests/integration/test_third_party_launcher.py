"""The distribution of docs/writing-a-launcher.md runs scripts like accel, from the wizard and the schema to the exit code."""

import json
import os
import re
import signal
import time
from functools import partial

import pytest
from support.launchers import page_launcher
from support.processes.commands import run_accel

UP, ENTER = "\x1b[A", "\r"
SCRIPT = "import os, sys\nprint(os.nice(0), *sys.argv[1:], flush=True)\nsys.exit(7)\n"


@pytest.fixture
def accel(cwd, home, tmp_path):
    """Calls `accel` in an environment that has the distribution of the page."""
    site = tmp_path / "site"
    page_launcher.install(site)
    (cwd / "train.py").write_text(SCRIPT)
    environ = {**os.environ, "PYTHONPATH": str(site)}

    return partial(run_accel, env=environ)


@pytest.fixture
def profile(accel):
    """The project's profile selects the launcher."""
    result = accel("config", "set", "launcher.kind=background", "launcher.level=5", "--project")
    assert result.returncode == 0, result.stderr


def test_a_third_party_launcher_runs_the_script_and_returns_its_exit_code(accel, cwd, profile):
    assert "level: 5" in (cwd / "accel.yaml").read_text()
    result = accel("launch", "train.py", "--epochs", "3")
    assert (result.returncode, result.stdout.split()) == (7, [str(os.nice(0) + 5), "--epochs", "3"]), (
        result.stderr
    )
    assert "background, 1 process" in result.stderr


@pytest.mark.slow
def test_the_wizard_offers_a_third_party_launcher_with_its_question(
    accel, terminal, tmp_path, home, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    screen = terminal()
    screen.see("How should scripts run?")
    assert "One process in the background" in screen.text()
    screen.answer("How should scripts run?", UP + ENTER)
    screen.answer("Niceness, from 1 to 19?", ENTER)
    screen.answer("Mixed precision?", ENTER)
    screen.answer("default.yaml?", ENTER)
    assert screen.end() == 0
    text = (home / "profiles" / "default.yaml").read_text()
    assert "kind: background" in text
    assert "level: 10" in text


def test_a_value_of_a_third_party_key_out_of_range_is_an_error(accel):
    result = accel("config", "set", "launcher.kind=background", "launcher.level=20", "--project")
    assert result.returncode == 2
    assert "launcher.level" in result.stderr


@pytest.mark.slow
def test_jobs_of_a_third_party_launcher_are_listed_followed_and_stopped(accel, cwd, profile):
    (cwd / "train.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(60)\n")
    job = accel("launch", "--detach", "train.py").stdout.strip()
    log = cwd / "jobs" / job / "log"
    while "begun" not in log.read_text():
        time.sleep(0.05)
    assert re.search(rf"{job}\sRUNNING", accel("jobs", "list").stdout)
    assert accel("jobs", "logs", job).stdout == "begun\n"
    assert accel("jobs", "stop", job).returncode == 0
    followed = accel("jobs", "logs", job, "-f")
    assert followed.returncode == 128 + signal.SIGTERM
    assert "Unknown job 'other'" in accel("jobs", "status", "other").stderr


def test_the_schema_has_the_keys_of_a_third_party_launcher(accel):
    schema = json.loads(accel("config", "schema").stdout)
    assert "background" in schema["properties"]["launcher"]["discriminator"]["mapping"]
    assert schema["$defs"]["Background"]["properties"]["level"]["maximum"] == 19


def test_an_option_of_a_third_party_launcher_is_in_the_help_and_an_error_elsewhere(accel):
    assert "Only with launcher.kind: background" in accel("launch", "--help").stdout
    result = accel("launch", "--set", "launcher.kind=background", "--level", "3", "--dry-run", "train.py")
    assert "command: nice -n3" in result.stdout, result.stderr
    result = accel("launch", "--level", "3", "train.py")
    assert result.returncode == 2
    assert (
        "Cannot use --level with launcher.kind: single: it is an option of the launcher background"
        in result.stderr
    )


def test_a_third_party_distribution_that_cannot_be_loaded_is_named(accel, tmp_path):
    (tmp_path / "site/background_launcher.py").write_text("import package_that_is_missing")
    result = accel("launch", "--set", "launcher.kind=background", "train.py")
    assert result.returncode == 2
    assert "Cannot load 'background' of the package accel-background" in result.stderr
    assert accel("launch", "--dry-run", "train.py").returncode == 0


COMMAND = """\
def greet(name: str) -> None:
    print(f"Hello {name}")
"""


GROUPS = """
import typer
tools = typer.Typer()
inner = typer.Typer()
@inner.command()
def one():
    print("one")
@inner.command()
def two():
    print("two")
@tools.command()
def clean():
    print("cleaned")
tools.add_typer(inner, name="inner")
def begin(loud: bool = False):
    print("LOUD" if loud else "quiet")
checks = typer.Typer(callback=begin)
@checks.command()
def all():
    print("all")
"""


def test_groups_of_another_distribution_have_their_commands_and_callbacks(accel, tmp_path):
    site = tmp_path / "site"
    (site / "group_commands.py").write_text(GROUPS)
    with (site / "accel_background-1.0.dist-info/entry_points.txt").open("a") as file:
        file.write("[accel.commands]\ntools = group_commands:tools\nchecks = group_commands:checks\n")
    assert accel("tools", "clean").stdout == "cleaned\n"
    assert accel("tools", "inner", "two").stdout == "two\n"
    assert accel("checks", "--loud", "all").stdout == "LOUD\nall\n"


def test_a_command_of_another_distribution_runs(accel, tmp_path):
    site = tmp_path / "site"
    (site / "greet_command.py").write_text(COMMAND)
    with (site / "accel_background-1.0.dist-info/entry_points.txt").open("a") as file:
        file.write("[accel.commands]\ngreet = greet_command:greet\n")
    result = accel("greet", "World")
    assert (result.returncode, result.stdout) == (0, "Hello World\n"), result.stderr
    assert accel("greet").returncode == 2
    (site / "greet_command.py").write_text("greet = print")
    result = accel("greet", "World")
    assert result.returncode == 2
    assert "greet: its entry point is neither a function nor an object of typer.Typer" in result.stderr
    result = accel("great", "World")
    assert result.returncode == 2
    assert "No such command 'great'" in result.stderr
