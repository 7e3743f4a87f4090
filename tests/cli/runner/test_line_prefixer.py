"""Lines with the prefix of their rank, and progress bars."""

from accel_cli.runner import output
from accel_cli.runner.output import LinePrefixer


def test_only_complete_lines_are_returned_for_any_chunks():
    rank = LinePrefixer(3, coloured=False)
    lines = [rank.feed(bytes([byte])) for byte in b"a b\n\nc\n"]
    assert b"".join(lines) == b"[3] a b\n[3] \n[3] c\n"
    assert not rank.has_partial


def test_a_partial_line_is_shown_after_a_time(monkeypatch):
    rank = LinePrefixer(0, coloured=False)
    assert rank.feed(b"go on?") == b""
    assert rank.flush_partial() == b""
    monkeypatch.setattr(output, "_PARTIAL_LINE_S", 0.0)
    assert rank.flush_partial() == b"[0] go on?\n"
    assert rank.flush_partial(end=True) == b""


def test_some_states_of_a_progress_bar_are_shown_and_the_last_one():
    rank = LinePrefixer(0, coloured=False)
    shown = b"".join(rank.feed(b"\r%d/999" % n) for n in range(1000)) + rank.feed(b"\n")
    assert shown.endswith(b"[0] 999/999\n")
    assert 2 <= shown.count(b"\n") <= 4


def test_the_pause_between_states_of_a_progress_bar_grows(monkeypatch):
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


def test_the_rest_of_a_progress_bar_is_not_flushed_as_a_partial_line(monkeypatch):
    rank = LinePrefixer(0, coloured=False)
    assert rank.feed(b"\r1/9\r2/9") == b"[0] 1/9\n"
    monkeypatch.setattr(output, "_PARTIAL_LINE_S", 0.0)
    assert rank.flush_partial() == b""
    assert rank.flush_partial(end=True) == b"[0] 2/9\n"


def test_the_progress_bar_of_another_rank_is_shown_at_its_end():
    rank = LinePrefixer(1, coloured=False, progress_bars=False)
    assert not b"".join(rank.feed(b"\r%d/999" % n) for n in range(1000))
    assert rank.feed(b"\n") == b"[1] 999/999\n"


def test_a_carriage_return_before_a_newline_is_part_of_the_line_end():
    assert LinePrefixer(0, coloured=False).feed(b"a\r\nb\r\n") == b"[0] a\n[0] b\n"


def test_a_very_long_line_is_returned_in_parts():
    rank = LinePrefixer(0, coloured=False)
    assert len(rank.feed(b"x" * 100_000)) == 100_005
