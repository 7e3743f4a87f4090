"""Records of collectives in words: the one that hangs, the ranks in it, and those that have not entered it."""

from __future__ import annotations

import json

import pytest

from accel_cli.runner.hang_report import HangRecord, explain_hang, parse_trace

ALL_REDUCE, BROADCAST = ("gloo:all_reduce", [[3, 4]]), ("nccl:broadcast", [[5]])


DEFAULT = ("0", "[0, 1, 2]", "")
"""The name of a group, its ranks, and its key among the groups, which is empty for the default group of gloo."""


def write_record(calls, *, done, group=DEFAULT, state="scheduled"):
    """Return the record of a rank that has made some calls, of which the first `done` have completed."""
    name_of_group, ranks, key = group
    entries = [
        {
            "collective_seq_id": number,
            "process_group": [name_of_group, name_of_group],
            "profiling_name": name,
            "input_sizes": sizes,
            "is_p2p": False,
            "retired": number <= done and state == "scheduled",
            "state": "completed" if number <= done and state != "scheduled" else "scheduled",
        }
        for number, (name, sizes) in enumerate(calls, 1)
    ]
    return json.dumps({"version": "2.10", "entries": entries, "pg_config": {key: {"ranks": ranks}}})


def explain(*records, locations=None, problems=None):
    traces = {rank: parse_trace(record) for rank, record in enumerate(records)}
    record = HangRecord(traces, locations or {}, problems=problems or {})
    return [line.strip() for line in explain_hang(record)]


def test_the_collective_and_the_ranks_in_and_before_it_are_named():
    calls = [BROADCAST, ALL_REDUCE]
    lines = explain(
        write_record(calls, done=1),
        write_record(calls[:1], done=1),
        write_record(calls, done=1),
        locations={1: "train.py:12 (augment)"},
    )
    assert lines == [
        "ranks 0 and 2 are in all_reduce of [3, 4], collective 2 of the default group",
        "rank 1 has not entered it: its last one is number 1, broadcast of [5]; it is at train.py:12 (augment)",
    ]


def test_ranks_in_different_collectives_of_one_number_are_a_mismatch():
    lines = explain(
        write_record([ALL_REDUCE], done=0),
        write_record([BROADCAST], done=0),
        write_record([], done=0),
        locations={0: "train.py:12 (main)", 1: "train.py:14 (main) on h1"},
    )
    assert lines == [
        "collective 1 of the default group differs: rank 0: all_reduce of [3, 4]; rank 1: broadcast of [5]",
        "rank 0 is at train.py:12 (main)",
        "rank 1 is at train.py:14 (main) on h1",
        "rank 2 has not entered it: it has made none",
    ]


def test_a_rank_that_has_completed_the_collective_is_neither_in_it_nor_before_it():
    """The source of a broadcast need not wait for the others."""
    calls = [BROADCAST]
    lines = explain(write_record(calls, done=1), write_record(calls, done=0), write_record(calls, done=0))
    assert lines == ["ranks 1 and 2 are in broadcast of [5], collective 1 of the default group"]


def test_ranks_of_other_machines_are_named():
    calls = [ALL_REDUCE]
    lines = explain(write_record(calls, done=0, group=("0", "[0, 1, 2, 3]", "")), write_record(calls, done=0))
    assert lines == [
        "ranks 0 and 1 are in all_reduce of [3, 4], collective 1 of the default group",
        "ranks 2 and 3 are without a record",
    ]


def test_a_rank_of_another_machine_that_does_not_answer_is_named_with_the_reason():
    record = write_record([ALL_REDUCE], done=0)
    assert explain(record, record, problems={2: "no answer: it is stopped on h1"}) == [
        "ranks 0 and 1 are in all_reduce of [3, 4], collective 1 of the default group",
        "rank 2: no answer: it is stopped on h1",
    ]


def test_a_rank_whose_thread_has_failed_is_named_with_the_exception():
    text = "a thread has failed before: ValueError: no data at train.py:7 (read)"
    lines = [line.strip() for line in explain_hang(HangRecord(thread_failures={1: text}))]
    assert lines == [f"rank 1: {text}"]


def test_each_group_is_explained_with_its_own_ranks():
    default = json.loads(write_record([ALL_REDUCE], done=1))
    other = ("tp", "[0, 2]", "tp")
    first, last = (json.loads(write_record([BROADCAST] * n, done=0, group=other)) for n in (1, 0))
    merged = [
        json.dumps(
            {
                "entries": default["entries"] + record["entries"],
                "pg_config": default["pg_config"] | record["pg_config"],
            }
        )
        for record in (first, {"entries": [], "pg_config": {}}, last)
    ]
    assert explain(*merged) == [
        "rank 0 is in broadcast of [5], collective 1 of the group tp",
        "rank 2 has not entered it: it has made none",
    ]


@pytest.mark.parametrize("state", ["scheduled", "completed"])
def test_nothing_is_said_if_all_collectives_have_completed(state):
    """gloo sets `retired` only, NCCL the state too."""
    assert explain(*[write_record([ALL_REDUCE] * 3, done=3, state=state)] * 3) == []


NO_RECORDS = {
    "": "",
    "a list": "[]",
    "an empty entry": '{"entries": [{}]}',
    "a number": '{"entries": 3}',
    "code": "__import__('os')",
    "deep": "[" * 200_000,
    "as deep as Python parses": '{"entries": ' + "[" * 900 + "]" * 900 + "}",
    "an infinite number": write_record([ALL_REDUCE], done=0).replace(
        '"collective_seq_id": 1', '"collective_seq_id": Infinity'
    ),
    "deep ranks": json.dumps(
        json.loads(write_record([ALL_REDUCE], done=0)) | {"pg_config": {"0": {"ranks": "[" * 200_000}}}
    ),
}


@pytest.mark.parametrize("text", NO_RECORDS.values(), ids=NO_RECORDS)
def test_a_text_that_is_no_record_is_a_value_error(text):
    with pytest.raises(ValueError, match=r".*"):
        parse_trace(text)


def test_an_empty_record_has_no_groups():
    assert parse_trace("{}") == {}


def test_the_last_collective_of_a_failed_rank_has_not_completed():
    """gloo records a collective that has timed out as completed."""
    calls = [BROADCAST, ALL_REDUCE]
    traces = {
        0: parse_trace(write_record(calls, done=2), has_failed=True),
        1: parse_trace(write_record(calls[:1], done=1)),
        2: parse_trace(write_record(calls, done=1)),
    }
    assert [line.strip() for line in explain_hang(HangRecord(traces))] == [
        "ranks 0 and 2 are in all_reduce of [3, 4], collective 2 of the default group",
        "rank 1 has not entered it: its last one is number 1, broadcast of [5]",
    ]


PAIR = ("0", "[0, 1]", "")


def test_ranks_in_calls_that_torch_does_not_record_are_named_with_those_that_are_elsewhere():
    locations = {0: "train.py:9 (main)", 1: "train.py:4 (load)", 2: "train.py:9 (main)"}
    record = HangRecord({}, locations, {0: "recv()", 2: "recv()"})
    assert explain_hang(record) == [
        "  ranks 0 and 2 are in recv() at train.py:9 (main)",
        "  rank 1 is at train.py:4 (load)",
    ]
    assert explain_hang(HangRecord({}, locations)) == []


def test_a_rank_that_waits_elsewhere_is_told_apart_from_one_that_does_not():
    traces = {rank: parse_trace(write_record([ALL_REDUCE][rank:], done=0, group=PAIR)) for rank in (0, 1)}
    lines = explain_hang(HangRecord(traces, {1: "train.py:9 (main)"}, {1: "recv()"}))
    assert lines[-1] == "  rank 1 has not entered it: it has made none; it is in recv() at train.py:9 (main)"


def test_a_call_that_gloo_has_completed_differs_from_one_that_waits():
    other = ("gloo:all_reduce", [[4, 4]])
    lines = explain(write_record([other], done=0, group=PAIR), write_record([ALL_REDUCE], done=1, group=PAIR))
    assert lines == [
        "collective 1 of the default group differs: rank 0: all_reduce of [4, 4]; rank 1: all_reduce of [3, 4]"
    ]


def test_the_shapes_of_a_scatter_may_differ():
    calls = [("gloo:scatter", [[4, 5]]), ("gloo:scatter", [])]
    lines = explain(*(write_record([call], done=0, group=PAIR) for call in calls))
    assert lines == ["ranks 0 and 1 are in scatter of [4, 5], collective 1 of the default group"]
