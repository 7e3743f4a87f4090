"""The parts `saves` and `soak` of the proof: what they count as wrong, and their pages; a short soak through the whole code."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
from proof import Options, saves, soak
from proof.soak import Exit, Facts, Fault, Report, Row
from support.runs.file_system import flip_bit
from support.runs.killed_saves import KilledRun, run_until_killed

SEED = 36
"""Begins with the kill of a rank."""
LOSSES = {step: float(step).hex() for step in range(1, 41)}


def build_facts(**changes):
    """Return a soak of 40 steps of a second, in which a rank was killed after step 10, and a launcher after step 30."""
    made = [*range(1, 11), *range(9, 41)]  # steps 9 and 10 are repeated
    times = [*map(float, range(1, 11)), *(14.0 + number for number in range(32))]
    rows = [Row(step, time, LOSSES[step]) for step, time in zip(made, times, strict=True)]
    facts = Facts(
        faults=[Fault(10.5, "rank", 2, "h1"), Fault(35.5, "launcher", None, "h1")],
        exits=[Exit(36, "h1", -9)],
        reports=[
            *(Report(12, host, "rank 2 on h1: terminated by SIGKILL (its log: x)") for host in ("h0", "h1")),
            Report(
                40, "h0", "rank 1 on h0: RankLostError: rank 2 ended; h1 (10.77.0.11) does not respond: x"
            ),
        ],
        rows=[rows] * 4,
        reference=[LOSSES] * 4,
    )
    for name, value in changes.items():
        setattr(facts, name, value)
    return facts


def test_a_soak_without_a_mistake_has_none_and_measures_the_seconds_lost():
    results = soak.judge(build_facts())
    assert (results["steps"], results["repeated"], results["reports"]) == (40, 2, 3)
    # The last step before the fault was made at 10 s, the first new one after it at 16 s; a step takes 1 s.
    assert results["kinds"]["rank"] == {"faults": 1, "lost_s": [5.0]}
    assert results["kinds"]["launcher"] == {"faults": 1, "lost_s": [0.0]}
    assert not any(results[name] for name in ("wrong_reports", "ended", "hangs", "unequal"))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        pytest.param("ended", {"exits": [Exit(11, "h0", 1)]}, id="a launcher ends after the kill of a rank"),
        pytest.param("ended", {"exits": [Exit(36, "h0", 1)]}, id="the other launcher ends too"),
        pytest.param("ended", {"exits": [Exit(1, "h0", 1)]}, id="a launcher ends before any fault"),
        pytest.param(
            "wrong_reports", {"reports": build_facts().reports[1:]}, id="a launcher reports nothing"
        ),
        pytest.param(
            "wrong_reports",
            {"reports": [*build_facts().reports, Report(13, "h0", "rank 1 on h0: ValueError")]},
            id="another rank is named too",
        ),
        pytest.param(
            "wrong_reports",
            {"reports": [*build_facts().reports, Report(1, "h0", "h1 (10.77.0.11) does not respond")]},
            id="a restart without a fault",
        ),
        pytest.param("hangs", {"hangs": build_facts().faults[:1]}, id="a hang"),
        pytest.param("unequal", {"unequal": ["rank 0: weights differ"]}, id="other weights"),
        pytest.param("unequal", {"reference": [LOSSES | {9: "0x0p+0"}] * 4}, id="another loss"),
        pytest.param("unequal", {"reference": [LOSSES | {41: "0x0p+0"}] * 4}, id="a step that was not made"),
    ],
)
def test_each_mistake_of_a_soak_is_counted_and_stands_on_the_page(name, changes):
    results = {"seed": 1, "seconds": 40, **soak.judge(build_facts(**changes))}
    assert results[name]
    page = soak.render(results)
    assert all(f"    - {line}" in page for line in results[name])
    assert ("different from" in soak.headline(results)[1]) == (name == "unequal")


def test_the_page_of_a_soak_has_a_row_for_each_kind_of_fault():
    results = {"seed": 1, "seconds": 1805, **soak.judge(build_facts())}
    assert "| SIGKILL of a rank | 1 | 5.0, 5.0 | - |" in soak.render(results)
    assert "| SIGKILL of a launcher | 1 | 0.0, 0.0 | h1 |" in soak.render(results)
    assert soak.headline(results) == (
        "2 faults in 30 min",
        "on two hosts: weights equal to those of the uninterrupted run, median 2.5 s lost",
    )


def test_final_states_with_one_other_bit_are_different(tmp_path):
    weights = {"weights": {"layer": torch.ones(3)}, "moments": [{"step": 3}], "random": torch.zeros(2)}
    other = {
        **weights,
        "weights": {"layer": torch.tensor([1, 1, torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))])},
    }
    for name, state in (("soak", weights), ("reference", other)):
        (tmp_path / name).mkdir()
        for rank in range(soak.RANKS):
            torch.save(state if rank == 1 else weights, tmp_path / name / f"final-{rank}")
    assert soak.compare_states(tmp_path) == ["rank 1: weights differ"]


KILL = saves.Observation("disk", "named", 7, 2, True, [(3, 3), (5, 5), (5, 6)], "", 2, 0)


@pytest.mark.parametrize(
    ("counted", "changes", "line"),
    [
        ("torn", {"problem": "DamageError: model.safetensors"}, "DamageError: model.safetensors"),
        ("lost", {"steps": [(3, 2), (5, 5)]}, "step 3 was saved, and 2 found"),
        ("lost", {"steps": [(5, 0)]}, "step 5 was saved, and 0 found"),
        ("remaining", {"remaining": 1}, "1 leftovers remained"),
    ],
)
def test_each_mistake_after_a_kill_is_counted_and_stands_on_the_page(counted, changes, line):
    results = {"seed": 1, **saves.judge([KILL, KILL._replace(**changes)])}
    count = results["counts"]["disk"]["named"]
    assert (count["kills"], count["within_save"], count["leftovers"], count[counted]) == (2, 2, 4, 1)
    assert f"- disk, named, 2 ranks, kill 7: {line}" in saves.render(results)
    assert saves.headline(results)[0] == ("0 of 2" if counted == "remaining" else "1 of 2")


def test_the_page_of_kills_has_a_row_for_each_place_and_kind():
    page = saves.render(
        {"seed": 1, **saves.judge([KILL, KILL._replace(place="store", is_within_save=False)])}
    )
    assert "| disk | a fixed name, replaced | 1 | 1 | 0 | 0 | 2 | 0 |" in page
    assert "| object store | a fixed name, replaced | 1 | 0 | 0 | 0 | 2 | 0 |" in page
    assert "Nothing was torn, lost or left over." in page


@pytest.mark.usefixtures("on_the_cpu")
def test_a_kill_on_a_disk_is_within_a_save_and_the_next_save_removes_what_it_leaves(alone, tmp_path):
    place = saves.DiskPlace("named", tmp_path / "project")
    for number, delay in enumerate((0.001, 0.01)):
        kill = partial(run_until_killed, alone, place.start, tmp_path / "ranks", first=1, delays=[delay])
        seen = observe(place, alone, kill, number)
        assert (seen.is_within_save, seen.problem, seen.remaining) == (True, "", 0)
        assert all(saved <= found for saved, found in seen.steps)
        assert seen.steps[-1][1] >= 1


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("problem", ["a mixture of steps", "DamageError"])
def test_a_checkpoint_that_is_a_mixture_or_damaged_is_torn(alone, tmp_path, problem):
    place = saves.DiskPlace("named", tmp_path / "project")
    with place.start() as (run, target, _):
        run.set_step(4)
        if problem == "a mixture of steps":
            run.tensors()[0].fill_(3)
        run.acc.save_state(target)
    if problem == "DamageError":
        largest = max(target.rglob("*"), key=lambda path: path.is_file() and path.stat().st_size)
        flip_bit(largest, -1)
    seen = observe(place, alone, lambda: KilledRun(None, [4], [True]), 0)
    assert problem in seen.problem
    assert saves.judge([seen])["counts"]["disk"]["named"]["torn"] == 1


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize(("saved", "lost"), [([4], 1), ([], 0)], ids=["saved", "not saved"])
@pytest.mark.parametrize("kind", ["numbered", "named"])
def test_a_checkpoint_that_is_not_there_is_lost_if_its_save_had_returned(alone, tmp_path, kind, saved, lost):
    place = saves.DiskPlace(kind, tmp_path / "project")
    (tmp_path / "project" / ".mine.saving-1-2").mkdir(parents=True)
    seen = observe(place, alone, lambda: KilledRun(None, saved, [True]), 0)
    count = saves.judge([seen])["counts"]["disk"][kind]
    assert (count["torn"], count["lost"]) == (0, lost)


def observe(place, cluster, kill, number):
    """Observe a kill at a place, before which nothing had been saved."""
    about = ("disk", place.kind, number, 1)
    return saves.observe(about, place, (kill, [0]), (Counter(), cluster))


@pytest.mark.slow
@pytest.mark.service("root")
def test_a_short_soak_on_two_hosts_trains_what_it_trains_without_faults(tmp_path, monkeypatch):
    monkeypatch.setattr(soak, "PAUSE_S", (2, 3))
    results = soak.run(Options(20, None, tmp_path), seed=SEED)
    assert results["kinds"]["rank"]["faults"]  # the first fault; a busy machine has no time for another
    assert results["kinds"]["rank"]["lost_s"][0] > 0
    assert not any(results[name] for name in ("wrong_reports", "ended", "hangs", "unequal")), results
    assert results["steps"] > soak.LAST_STEPS
    assert "equal to those" in soak.render(results)
