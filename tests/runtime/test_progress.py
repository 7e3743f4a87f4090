"""The progress bar."""

from __future__ import annotations

import io
import sys

import pytest

from accel_runtime import tqdm


def bars(several, **kwargs):
    def run(kwargs):
        out = io.StringIO()
        assert list(tqdm(range(3), file=out, **kwargs)) == [0, 1, 2]
        return "3/3" in out.getvalue()

    return several.run(run, kwargs)


def test_one_process_of_a_machine_shows_it(several):
    assert bars(several) == [True] + [False] * (several.size - 1)


def test_every_process_shows_its_own_if_it_is_told_to(several):
    assert bars(several, main_process_only=False) == [True] * several.size


def test_a_bar_that_is_switched_off_stays_off(several):
    assert bars(several, disable=True, main_process_only=False) == [False] * several.size


def test_the_early_first_argument_is_refused():
    with pytest.raises(ValueError, match=r"Use tqdm.*main_process_only=True"):
        tqdm(True, range(3))


def test_a_missing_package_is_an_error_that_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ImportError, match="pip install tqdm"):
        tqdm(range(3))
