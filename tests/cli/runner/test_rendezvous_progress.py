"""Progress of a node that waits for others."""

import sys
import threading

from accel_cli.runner.bootstrap import RendezvousProgress
from accel_cli.runner.rendezvous import format_arrivals


def test_the_line_names_joined_nodes_missing_nodes_and_the_remaining_time():
    assert format_arrivals(["h0"], 3, 3, 41.6) == "waiting: 1 of 3 machines joined (h0), 2 missing; 42 s left"
    assert format_arrivals(["h0"], 2, 2, 9, ["node_rank 1"]) == (
        "waiting: 1 of 2 machines joined (h0), 1 missing: node_rank 1; 9 s left"
    )
    assert format_arrivals(["a", "b"], 1, 4, 9) == (
        "2 of 1 to 4 machines joined (a, b); starting soon, unless more join"
    )


def test_progress_is_printed_to_a_pipe_when_it_changes(capsys):
    lines = iter(["one; 9 s", "one; 8 s", "two; 7 s"])
    over = threading.Event()

    def tell():
        text = next(lines, None)
        if text is None:
            over.set()
        return text or "two; 6 s"

    with RendezvousProgress(tell, quiet=0.01):
        assert over.wait(120)
    assert capsys.readouterr().err == "accel: one; 9 s\naccel: two; 7 s\n"


def test_progress_on_a_terminal_is_one_line_that_is_cleared(capsys, monkeypatch):
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


def test_no_progress_is_printed_if_all_nodes_join_at_once(capsys):
    with RendezvousProgress(lambda: "waiting"):
        pass
    assert capsys.readouterr().err == ""
