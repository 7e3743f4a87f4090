"""The channel from a rank to the screen and its log."""

import contextlib
import os
from pathlib import Path

import pytest

from accel_cli import console
from accel_cli.runner.output import OutputChannel, get_file_identity


@pytest.fixture
def screen():
    """The two ends of a pipe in place of the launcher's own output."""
    ends = os.pipe()
    yield ends
    for end in ends:
        with contextlib.suppress(OSError):
            os.close(end)


def test_a_full_disk_ends_the_log_but_not_the_output(tmp_path, screen, capfd):
    read_screen, shown = screen
    channel = OutputChannel(tmp_path / "stdout", Path("/dev/full"), shown, None, console.note)
    for word in (b"one", b"two"):
        (tmp_path / "stdout").write_bytes(word)
        assert channel.copy()
        assert os.read(read_screen, 100) == word
    channel.close()
    assert capfd.readouterr().err.count("could not write: No space left on device") == 1


def test_output_is_copied_to_screen_and_log_until_the_screen_is_closed(tmp_path, screen):
    read_screen, shown = screen
    channel = OutputChannel(tmp_path / "stdout", tmp_path / "log", shown, None, console.note)
    rank = os.open(tmp_path / "stdout", os.O_WRONLY)
    os.write(rank, b"\xff\r")
    assert channel.copy()
    assert (os.read(read_screen, 100), channel.is_line_partial) == (b"\xff\r", True)
    os.close(read_screen)
    os.write(rank, b"more")
    assert not channel.copy()
    assert (tmp_path / "log").read_bytes() == b"\xff\rmore"
    channel.close()
    os.close(rank)
    assert not (tmp_path / "stdout").exists()


def test_two_descriptors_of_one_file_have_one_identity(tmp_path, screen):
    duplicate = os.dup(screen[1])
    assert get_file_identity(duplicate) == get_file_identity(screen[1]) != get_file_identity(screen[0] + 1000)
    os.close(duplicate)
