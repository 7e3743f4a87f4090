"""What is seen while machines come."""

import sys
import threading

from accel_cli.runner.bootstrap import RendezvousProgress
from accel_cli.runner.rendezvous import format_arrivals


def test_the_line_says_who_is_here_how_many_are_missing_and_how_long_it_waits():
    assert format_arrivals(["h0"], 3, 3, 41.6) == "waiting: 1 of 3 machines joined (h0), 2 missing; 42 s left"
    assert format_arrivals(["h0"], 2, 2, 9, ["node_rank 1"]) == (
        "waiting: 1 of 2 machines joined (h0), 1 missing: node_rank 1; 9 s left"
    )
    assert format_arrivals(["a", "b"], 1, 4, 9) == (
        "2 of 1 to 4 machines joined (a, b); starting soon, unless more join"
    )


def test_a_pipe_gets_a_line_at_once_and_when_something_changes(capsys):
    said = iter(["one; 9 s", "one; 8 s", "two; 7 s"])
    over = threading.Event()

    def tell():
        text = next(said, None)
        if text is None:
            over.set()
        return text or "two; 6 s"

    with RendezvousProgress(tell, quiet=0.01):
        assert over.wait(120)
    assert capsys.readouterr().err == "accel: one; 9 s\naccel: two; 7 s\n"


def test_a_terminal_gets_one_line_in_place_that_goes_away(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    seen = threading.Event()

    def tell():
        seen.set()
        return "waiting; 9 s left"

    with RendezvousProgress(tell, quiet=0.01):
        assert seen.wait(120)
    written = capsys.readouterr().err
    assert written.startswith("\r\x1b[Kaccel: waiting; 9 s left")
    assert written.endswith("\r\x1b[K")
    assert "\n" not in written


def test_machines_that_are_there_at_once_are_not_spoken_of(capsys):
    with RendezvousProgress(lambda: "waiting"):
        pass
    assert capsys.readouterr().err == ""
