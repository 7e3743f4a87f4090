"""The progress bar."""

from __future__ import annotations

import io
import sys

import pytest

from accel_runtime import tqdm


def find_bars(several, **kwargs):
    def run(kwargs):
        out = io.StringIO()
        assert list(tqdm(range(3), file=out, **kwargs)) == [0, 1, 2]
        return "3/3" in out.getvalue()

    return several.run(run, kwargs)


def test_only_one_process_of_a_node_shows_a_progress_bar(several):
    assert find_bars(several) == [True] + [False] * (several.size - 1)


def test_every_process_shows_a_bar_with_main_process_only_false(several):
    assert find_bars(several, main_process_only=False) == [True] * several.size


def test_a_disabled_bar_is_not_shown(several):
    assert find_bars(several, disable=True, main_process_only=False) == [False] * several.size


def test_a_positional_main_process_only_is_rejected():
    with pytest.raises(ValueError, match=r"Use tqdm.*main_process_only=True"):
        tqdm(True, range(3))


def test_a_missing_tqdm_is_an_error_with_the_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ImportError, match=r"pip install .tqdm>="):
        tqdm(range(3))
