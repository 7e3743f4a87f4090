"""Whenever a process is killed in a save: the newest whole checkpoint loads in a fresh process, and the next save works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "dying.py"
ROOT = Path(__file__).parents[3]
CASES = {
    "the first ever": {"before": 0, "limit": None, "same": False, "exchanges": True},
    "one is kept": {"before": 1, "limit": 1, "same": False, "exchanges": True},
    "two are kept": {"before": 2, "limit": 2, "same": False, "exchanges": True},
    "the same directory": {"before": 1, "limit": None, "same": True, "exchanges": True},
    "the same directory, by two renames": {"before": 1, "limit": None, "same": True, "exchanges": False},
}


def dying(folder, timeout, **asked):
    """Let the script do something; what it says in the end."""
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "ACCEL_DEVICE": "cpu"}
    ran = subprocess.run(
        [sys.executable, SCRIPT, json.dumps({"folder": str(folder)} | asked)],
        env=environ, capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads(ran.stdout)


def test_a_process_that_dies_now_and_then_in_a_save_loses_nothing(memory):
    found = dying(
        memory, 120, what="every call", case=CASES["the same directory, by two renames"], world=1,
        which=None, stride=7,
    )  # fmt: skip
    assert len(found) > 5
    assert set(found.values()) == {1, 7}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_process_that_dies_between_any_two_system_calls_loses_nothing(memory, name):
    found = dying(memory, 600, what="every call", case=CASES[name], world=1, which=None, stride=1)
    assert len(found) > 50
    assert set(found.values()) == {CASES[name]["before"], 7}


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1, None], ids=["rank 0", "rank 1", "all ranks"])
def test_when_any_or_all_of_two_ranks_die_nothing_is_lost(memory, which):
    case = CASES["the same directory"]
    found = dying(memory, 600, what="every call", case=case, world=2, which=which, stride=3)
    assert set(found.values()) <= {1, 7}
    assert len(found) > 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "world", "in_background", "kills"),
    [
        ("one is kept", 1, False, 50),
        ("the same directory", 1, True, 50),
        ("the same directory, by two renames", 1, False, 40),
        ("two are kept", 1, True, 30),
        ("one is kept", 2, False, 20),
        ("the same directory", 2, True, 20),
    ],
)
def test_two_hundred_runs_killed_at_random_moments_go_on_from_what_they_saved(
    memory, name, world, in_background, kills
):
    case = CASES[name] | {"before": 0}
    found = dying(
        memory,
        600,
        what="at random",
        case=case,
        world=world,
        in_background=in_background,
        kills=kills,
        seed=5,
    )
    assert found["kills"] == kills
    assert found["saves"] >= 10
    assert found["loaded"][-1] >= 10
