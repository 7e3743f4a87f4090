"""A process that is killed during a save: the newest complete checkpoint loads in a new process, and the next save works."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "killed_runs.py"
ROOT = Path(__file__).parents[3]
CASES = {
    "the first ever": {"before": 0, "limit": None, "same": False, "exchanges": True},
    "one is kept": {"before": 1, "limit": 1, "same": False, "exchanges": True},
    "two are kept": {"before": 2, "limit": 2, "same": False, "exchanges": True},
    "the same directory": {"before": 1, "limit": None, "same": True, "exchanges": True},
    "the same directory, by two renames": {"before": 1, "limit": None, "same": True, "exchanges": False},
}
REQUEST_S = 600


class KilledRuns:
    """The process of killed_runs.py, which imports torch once for all requests; after a failure, the next request starts another."""

    def __init__(self):
        self._process = None

    def request(self, folder, **request):
        """Send a request to the process, and return the result."""
        if self._process is None:
            self._start()
        self._process.stdin.write(json.dumps({"folder": str(folder)} | request) + "\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], REQUEST_S)
        answer = self._process.stdout.readline() if ready else ""
        if not answer:
            raise AssertionError(f"no answer from killed_runs.py: {self.close()[-4000:]}")
        return json.loads(answer)

    def close(self):
        """End the process and its forks; return the text that it wrote to stderr."""
        if self._process is None:
            return ""
        self._process.kill()
        self._process.communicate()
        self._process = None
        with self._errors:
            self._errors.seek(0)
            return self._errors.read()

    def _start(self):
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - `close` reads and closes it
        environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "ACCEL_DEVICE": "cpu"}
        self._process = subprocess.Popen(
            [sys.executable, SCRIPT],
            env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
        )  # fmt: skip


@pytest.fixture(scope="module")
def kill_runs():
    """Return `kill_runs(folder, ...)`, which kills runs and returns what later runs loaded."""
    script = KilledRuns()
    yield script.request
    script.close()


def test_a_process_killed_at_some_calls_of_a_save_loses_nothing(memory, kill_runs):
    result = kill_runs(
        memory, what="every call", case=CASES["the same directory, by two renames"], world=1, which=None,
        stride=7,
    )  # fmt: skip
    assert len(result) > 5
    assert set(result.values()) == {1, 7}


@pytest.mark.slow
@pytest.mark.parametrize(
    "stride",
    [pytest.param(3, id="every third call"), pytest.param(1, id="each call", marks=pytest.mark.full)],
)
@pytest.mark.parametrize("name", CASES)
def test_a_process_killed_between_any_two_system_calls_loses_nothing(memory, kill_runs, name, stride):
    result = kill_runs(memory, what="every call", case=CASES[name], world=1, which=None, stride=stride)
    assert len(result) > 50 // stride
    assert set(result.values()) == {CASES[name]["before"], 7}


@pytest.mark.slow
@pytest.mark.parametrize(
    "stride",
    [
        pytest.param(7, id="every seventh call"),
        pytest.param(3, id="every third call", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("which", [0, 1, None], ids=["rank 0", "rank 1", "all ranks"])
def test_killing_any_or_all_of_two_ranks_loses_nothing(memory, kill_runs, which, stride):
    case = CASES["the same directory"]
    result = kill_runs(memory, what="every call", case=case, world=2, which=which, stride=stride)
    assert set(result.values()) <= {1, 7}
    assert len(result) > 18 // stride


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "world", "in_background", "kills"),
    [
        ("one is kept", 1, False, 50),
        ("the same directory", 2, True, 20),
        pytest.param("the same directory", 1, True, 50, marks=pytest.mark.full),
        pytest.param("the same directory, by two renames", 1, False, 40, marks=pytest.mark.full),
        pytest.param("two are kept", 1, True, 30, marks=pytest.mark.full),
        pytest.param("one is kept", 2, False, 20, marks=pytest.mark.full),
    ],
)
def test_runs_killed_at_random_times_continue_from_their_saves(  # noqa: PLR0913, PLR0917
    memory, kill_runs, name, world, in_background, kills
):
    case = CASES[name] | {"before": 0}
    result = kill_runs(
        memory, what="at random", case=case, world=world, in_background=in_background, kills=kills, seed=5
    )
    assert result["kills"] == kills
    assert result["saves"] >= 10
    assert result["loaded"][-1] >= 10
