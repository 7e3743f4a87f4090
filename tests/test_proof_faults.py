"""The part of the proof that injects faults: its table, its judge, and two of its cases on real launches."""

from __future__ import annotations

from dataclasses import replace

import pytest
from proof import faults
from proof.fault_reports import read_attribution
from proof.fault_table import FAULTS

RAISES = "exception in the main thread: in a function of another module"
SKIPS = "ranks in different calls of torch: one rank skips a barrier"


def test_the_line_of_a_case_is_that_of_its_mark():
    lines = FAULTS[RAISES].files["helper.py"].splitlines()
    name, number = FAULTS[RAISES].line
    assert (name, lines[number - 1].strip()) == ("helper.py", "return sample['label']  #: fault")


def test_the_names_of_cases_are_unique():
    names = [case.name for case in faults.CASES]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("key", [RAISES, SKIPS])
def test_a_case_is_right_and_wrong_if_another_rank_line_or_cause_is_expected(tmp_path, key):
    case = faults.Case(key, "torchrun", 2, 1)
    outcome = faults.run_case(case, tmp_path)
    fault = FAULTS[key]
    verdict = faults.judge(case, fault, outcome)
    assert verdict.is_right, (verdict, outcome)
    moved = {name: f"\n{text}" for name, text in fault.files.items()}
    assert faults.judge(case, replace(fault, files=moved), outcome).line is False
    assert not faults.judge(case, replace(fault, cause="OSError"), outcome).cause
    if fault.blame == "faulty":
        other = faults.judge(replace(case, faulty=0), fault, outcome)
        assert (other.rank, other.blames_wrongly) == (False, True)


TIMED_OUT = """\
accel: rank 0 has timed out:
  rank 0 is in all_reduce of [3], collective 9 of the default group
  rank 1 has not entered it: its last one is number 8, all_reduce of [3]; it is at train.py:7 (load)
accel: error: rank 0 of 2 on HOST (pid 7): RuntimeError: [gloo] Timed out waiting 3000ms
"""
LEFT = """\
Traceback (most recent call last):
  File "/case/train.py", line 16, in <module>
accel: error: rank 0 of 2 on HOST (pid 7): rank 1 on HOST had exited before with code 0 at train.py:15 (main) after 3 steps: RuntimeError: x
"""
STALLED = """\
accel: no process on this machine has made progress for 3 s
  rank  steps  batches  last progress  location
  0     3      0        5 s ago        waiting
  1     3      0        5 s ago        after a backward pass
  rank 0, innermost call first:
    File "/case/train.py", line 29 in <module>
  rank 1, innermost call first:
    File "/x/lib/python3.11/queue.py", line 171 in get
    File "/case/train.py", line 6 in load
"""


@pytest.mark.parametrize(
    ("output", "accused"),
    [
        (TIMED_OUT, {1: [("train.py", 7)]}),
        (LEFT, {1: [("train.py", 15)]}),
        (STALLED, {1: [("train.py", 6)]}),
        ("accel: error: Script not found: trian.py. Did you mean train.py?\n", {}),
        ("", {}),
    ],
    ids=["timed out", "left early", "stalled", "refused", "nothing"],
)
def test_the_rank_that_a_report_holds_responsible_is_read(output, accused):
    assert read_attribution(output, "/case").accused == accused
