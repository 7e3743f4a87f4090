"""Whole lines of one rank."""

from accel_cli.runner import output
from accel_cli.runner.output import LinePrefixer


def test_only_whole_lines_are_given_however_the_bytes_come():
    rank = LinePrefixer(3, coloured=False)
    given = [rank.feed(bytes([byte])) for byte in b"a b\n\nc\n"]
    assert b"".join(given) == b"[3] a b\n[3] \n[3] c\n"
    assert not rank.has_partial


def test_the_beginning_of_a_line_waits_for_its_rest_but_not_for_ever(monkeypatch):
    rank = LinePrefixer(0, coloured=False)
    assert rank.feed(b"go on?") == b""
    assert rank.flush_partial() == b""
    monkeypatch.setattr(output, "_PARTIAL_LINE_S", 0.0)
    assert rank.flush_partial() == b"[0] go on?\n"
    assert rank.flush_partial(end=True) == b""


def test_of_a_progress_bar_only_some_states_are_shown_and_the_last_one():
    rank = LinePrefixer(0, coloured=False)
    shown = b"".join(rank.feed(b"\r%d/999" % n) for n in range(1000)) + rank.feed(b"\n")
    assert shown.endswith(b"[0] 999/999\n")
    assert 2 <= shown.count(b"\n") <= 4


def test_a_progress_bar_that_moves_for_long_is_shown_less_and_less_often(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: now[0])
    rank = LinePrefixer(0, coloured=False)
    shown = []
    for second in range(3600):
        now[0] = float(second)
        if rank.feed(b"\r%d/3600" % second):
            shown.append(second)
    assert shown[:6] == [1, 2, 4, 8, 16, 32]
    assert len(shown) < 70


def test_what_follows_a_state_of_a_bar_that_was_shown_is_no_line_of_its_own(monkeypatch):
    rank = LinePrefixer(0, coloured=False)
    assert rank.feed(b"\r1/9\r2/9") == b"[0] 1/9\n"
    monkeypatch.setattr(output, "_PARTIAL_LINE_S", 0.0)
    assert rank.flush_partial() == b""
    assert rank.flush_partial(end=True) == b"[0] 2/9\n"


def test_the_bar_of_a_rank_that_is_not_the_first_is_shown_when_it_is_done():
    rank = LinePrefixer(1, coloured=False, progress_bars=False)
    assert not b"".join(rank.feed(b"\r%d/999" % n) for n in range(1000))
    assert rank.feed(b"\n") == b"[1] 999/999\n"


def test_windows_line_ends_are_line_ends():
    assert LinePrefixer(0, coloured=False).feed(b"a\r\nb\r\n") == b"[0] a\n[0] b\n"


def test_a_line_without_end_is_given_in_parts():
    rank = LinePrefixer(0, coloured=False)
    assert len(rank.feed(b"x" * 100_000)) == 100_005
