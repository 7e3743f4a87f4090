"""Keys of the live view."""

import pytest

from accel_cli.runs.screen import Controls, parse_keys


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        (b"q", ["q"]),
        (b"Q?", ["q", "?"]),
        (b"\x1b[A\x1b[B\x1bOA", ["up", "down", "up"]),
        (b"\x1b[5~\x1b[6~jkG", ["page up", "page down", "down", "up", "end"]),
        (b"\x1b[15~xyz\x1b", []),
    ],
)
def test_keys_and_escape_sequences_are_named(data, keys):
    assert parse_keys(data) == keys


def test_keys_scroll_within_bounds_and_switch_views():
    controls = Controls()
    for key in ("down", "down", "page down", "up"):
        controls = controls.press(key, page=10)
    assert controls.first == 11
    assert controls.press("page up", page=50).first == 0
    assert controls.press("a", page=10) == Controls(shows_all=True)
    assert controls.press("?", page=10) == Controls(shows_help=True)
    assert controls.press("?", page=10).press("?", page=10) == Controls()
