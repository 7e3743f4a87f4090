"""`accel skill`: each option and command of the help is in it, and what it shows is what happens."""

import re
import subprocess

import pytest
import yaml
from support.processes.commands import call_accel
from support.sources.docs_reader import Reader, blocks, check_command, check_python, commands

from accel_cli.main import COMMANDS
from accel_cli.profile.options import OPTIONS
from accel_runtime.environment.settings import __version__


@pytest.fixture
def text(capfd):
    return call_accel(capfd, "skill").stdout


class Agent(Reader):
    """A reader without a terminal."""

    def _type(self, command):
        done = subprocess.run(
            ["bash", "-c", command], cwd=self.folder, env=self._environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout


@pytest.fixture
def page_blocks(text, tmp_path, monkeypatch):
    """The blocks of the skill, as those of a page."""
    monkeypatch.setattr("support.sources.docs_reader.name", lambda page: page.name)
    page = tmp_path / "SKILL.md"
    page.write_text(text, encoding="utf-8")
    return blocks(page)


def test_the_head_names_the_skill_and_the_version(text):
    _, head, body = text.split("---\n", 2)
    facts = yaml.safe_load(head)
    assert facts["name"] == "accel"
    assert len(facts["description"]) < 1024
    assert f"accel {__version__}" in facts["description"]
    assert body.startswith(f"\n# accel {__version__}\n")


def test_each_option_of_a_launch_and_each_command_is_in_it(text):
    for option in OPTIONS.values():
        assert re.search(rf"^\| `{re.escape(option.flag)}[` ]", text, re.MULTILINE), option.flag
    for name in COMMANDS.names:
        assert f"| `accel {name}` |" in text


def test_what_it_names_exists(page_blocks):
    for block in page_blocks:
        if block.language == "console":
            for command in commands(block):
                check_command(command)
        elif block.language == "python":
            check_python(block)


@pytest.mark.slow
def test_what_it_shows_is_what_happens(page_blocks, tmp_path, monkeypatch):
    reader = Agent(tmp_path)
    monkeypatch.chdir(reader.folder)
    assert len(page_blocks) > 4
    for block in page_blocks:
        follow = reader.file if block.title else getattr(reader, block.language)
        follow(block)
