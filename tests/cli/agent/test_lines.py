"""Whole lines of one rank."""

from accel_cli.agent import lines
from accel_cli.agent.lines import Lines


def test_only_whole_lines_are_given_however_the_bytes_come():
    rank = Lines(3, coloured=False)
    given = [rank.feed(bytes([byte])) for byte in b"a b\n\nc\n"]
    assert b"".join(given) == b"[3] a b\n[3] \n[3] c\n"
    assert not rank.waiting


def test_the_beginning_of_a_line_waits_for_its_rest_but_not_for_ever(monkeypatch):
    rank = Lines(0, coloured=False)
    assert rank.feed(b"go on?") == b""
    assert rank.rest() == b""
    monkeypatch.setattr(lines, "_PATIENCE_S", 0.0)
    assert rank.rest() == b"[0] go on?\n"
    assert rank.rest(end=True) == b""


def test_of_a_progress_bar_only_some_states_are_shown_and_the_last_one():
    rank = Lines(0, coloured=False)
    shown = b"".join(rank.feed(b"\r%d/999" % n) for n in range(1000)) + rank.feed(b"\n")
    assert shown.endswith(b"[0] 999/999\n")
    assert 2 <= shown.count(b"\n") <= 4


def test_windows_line_ends_are_line_ends():
    assert Lines(0, coloured=False).feed(b"a\r\nb\r\n") == b"[0] a\n[0] b\n"


def test_a_line_without_end_is_given_in_parts():
    rank = Lines(0, coloured=False)
    assert len(rank.feed(b"x" * 100_000)) == 100_005
