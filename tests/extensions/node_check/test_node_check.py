"""The node check: the judgement of its facts, its measurements, its table, and a whole check by real ranks."""

from __future__ import annotations

import json
import os
import socket
import threading
from contextlib import closing
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_runtime.extensions.node_check.records import (
    Board,
    Folder,
    Limits,
    Link,
    Peer,
    Record,
    Records,
    Step,
)
from accel_runtime.extensions.node_check.verdict import find_broken_pairs, is_connected, judge

pytestmark = pytest.mark.usefixtures("on_the_cpu")

VERSIONS = {"python": "3.11.7", "torch": "2.13.0", "accel": "0.1.0"}
FOLDER = Folder("/logs", 10**12, 10**7)
RANKS = 2


def build_records(count, *, broken=(), is_gpu=True):
    """Return the records of healthy nodes with two ranks each, and broken pairs."""
    broken = [*map(set, broken)]
    others = {node: [other for other in range(count) if other != node] for node in range(count)}

    def build_record(node, local_rank):
        device = {"device": "GPU", "is_gpu": is_gpu, "tflops": 100.0}
        record = Record(node * RANKS + local_rank, node, f"h{node}", RANKS, Step.NONE, **device)
        if local_rank:
            return record
        pairs = [(node, other) for other in others[node] if other > node and {node, other} not in broken]
        return replace(
            record,
            **VERSIONS,
            log_folder=FOLDER,
            work_folder=FOLDER,
            shm_bytes=10**10,
            memory_bytes=10**11,
            open_files=65536,
            peers=tuple(Peer(other, "no route" if {node, other} in broken else "") for other in others[node]),
            links=tuple(Link(pair, 1e-4, 1e9) for pair in pairs or [(0,)] * (count == 1)),
        )

    ranks = tuple(build_record(node, local) for node in range(count) for local in range(RANKS))
    return Records(ranks, count)


def change_rank(records, rank, **changes):
    return replace(
        records,
        ranks=tuple(replace(each, **changes) if each.rank == rank else each for each in records.ranks),
    )


def change_node(records, node, **changes):
    return change_rank(records, node * RANKS, **changes)


def change_links(records, change):
    ranks = tuple(replace(each, links=tuple(map(change, each.links))) for each in records.ranks)
    return replace(records, ranks=ranks)


def list_bad(records):
    return sorted({finding.node for finding in judge(records) if finding.is_bad})


@given(count=st.integers(1, 9), is_gpu=st.booleans())
def test_healthy_nodes_have_no_findings(count, is_gpu):
    records = build_records(count, is_gpu=is_gpu)
    assert judge(records) == []
    assert is_connected(records)


@given(count=st.integers(3, 9), data=st.data())
@pytest.mark.smoke
def test_a_node_that_reaches_no_other_is_the_only_bad_one(count, data):
    bad = data.draw(st.integers(0, count - 1))
    records = build_records(count, broken=[(bad, other) for other in range(count) if other != bad])
    assert list_bad(records) == [bad]
    assert not is_connected(records)


@given(count=st.integers(2, 8), data=st.data())
def test_nodes_that_remain_without_the_bad_ones_all_reach_each_other(count, data):
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
    records = build_records(count, broken=data.draw(st.lists(st.sampled_from(pairs), unique=True)))
    bad = list_bad(records)
    assert not [pair for pair in find_broken_pairs(records, ()) if not {*pair} & {*bad}]


def test_a_single_broken_pair_names_both_nodes():
    (finding,) = judge(build_records(4, broken=[(1, 2)]))
    assert (finding.node, finding.is_bad) == (2, True)
    assert finding.text == "is not connected with h1, and either may be the cause: no route"


@given(count=st.integers(3, 9), part=st.floats(0.01, 1.5), data=st.data())
def test_a_gpu_below_half_of_the_median_is_bad_and_one_below_four_fifths_is_noted(count, part, data):
    rank = data.draw(st.integers(0, 2 * count - 1))
    records = build_records(count)
    findings = judge(change_rank(records, rank, tflops=100 * part))
    expected = [] if part >= 0.8 else [(rank // RANKS, "bad" if part < 0.5 else "note")]
    assert [(finding.node, finding.severity) for finding in findings] == expected


@given(count=st.integers(3, 9), data=st.data())
@pytest.mark.smoke
def test_a_slow_node_is_found_though_its_partners_measured_slow_links_too(count, data):
    bad = data.draw(st.integers(0, count - 1))

    def slow(link):
        return replace(link, bytes_per_s=1e7) if bad in link.nodes else link

    assert list_bad(change_links(build_records(count), slow)) == [bad]


def test_a_slow_cpu_is_noted_only_since_other_processes_use_it():
    records = change_rank(build_records(3, is_gpu=False), 0, tflops=1.0)
    assert [(f.node, f.severity) for f in judge(records)] == [(0, "note")]


@pytest.mark.parametrize(
    ("field", "value", "severity", "word"),
    [
        ("torch", "2.12.0", "bad", "has torch 2.12.0, and most nodes have 2.13.0"),
        ("python", "3.12.1", "bad", "has Python 3.12, and most nodes have 3.11"),
        ("nccl", "2.27.3", "bad", "has NCCL 2.27.3"),
        ("driver", "580.1", "note", "has driver 580.1"),
        ("log_folder", replace(FOLDER, error="Read-only file system"), "bad", "cannot be written: Read-only"),
        ("work_folder", replace(FOLDER, error="Permission denied"), "note", "the working folder"),
        ("work_folder", replace(FOLDER, error="No space left", is_full=True), "bad", "No space left"),
        ("log_folder", replace(FOLDER, free_bytes=10**6), "note", "has only 1.0 MB left"),
        ("log_folder", replace(FOLDER, free_inodes=5), "note", "has only 5 inodes left"),
        ("shm_bytes", 10**6, "note", "shm has only 1.0 MB"),
        ("memory_bytes", 10**9, "note", "only 1.00 GB of memory"),
        ("open_files", 1024, "note", "the limit on open files is 1024"),
        ("peers", (Peer(0, name_error="unknown"), Peer(2)), "note", "reach h0 by name, only by address: unknown"),
    ],
)  # fmt: skip
def test_a_difference_of_one_node_is_a_finding_about_that_node(field, value, severity, word):
    findings = judge(change_node(build_records(3), 1, **{field: value}))
    assert {(finding.node, finding.severity) for finding in findings} == {(1, severity)}
    assert word in " ".join(finding.text for finding in findings)


def test_a_patch_version_of_python_is_no_difference():
    assert judge(change_node(build_records(3), 1, python="3.11.9")) == []


def test_of_two_nodes_with_different_versions_the_second_is_bad():
    (finding,) = judge(change_node(build_records(2), 0, torch="2.12.0"))
    assert (finding.node, finding.text) == (1, "has torch 2.13.0, and h0 has 2.12.0")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"error": "a matrix multiplication gave 4 wrong elements of 16"}, "4 wrong elements"),
        ({"uncorrected_errors": 3}, "3 uncorrected memory errors"),
        ({"row_problem": "remapping a row of its memory has failed; replace it"}, "has failed"),
    ],
)
def test_a_device_with_errors_makes_its_node_bad(changes, word):
    (finding,) = judge(change_rank(build_records(2), 3, **changes))
    assert (finding.node, finding.is_bad) == (1, True)
    assert word in finding.text


def test_nodes_without_an_answer_are_bad_and_their_partners_are_not():

    def lose(link):
        return Link(link.nodes, error="timed out") if 1 in link.nodes else link

    records = change_rank(change_links(build_records(3), lose), 3, missing_step=Step.COLLECTIVE)
    records = replace(records, waited_s=20.2)
    (finding,) = judge(records)
    assert (finding.node, finding.is_bad) == (1, True)
    assert finding.text == "did not answer within 20 s: a collective did not end"


def test_a_failed_collective_of_all_ranks_is_noted_once():
    records = build_records(3)
    for node in range(3):
        links = (*records.nodes[node].links, Link((0, 1, 2), error="timed out"))
        records = change_node(records, node, links=links)
    (finding,) = judge(records)
    assert (finding.node, finding.severity) == (0, "note")
    assert finding.text == "a collective of all ranks failed: timed out"


def test_a_link_with_a_higher_latency_is_noted():
    records = change_links(
        build_records(4), lambda link: replace(link, latency_s=5e-3) if 3 in link.nodes else link
    )
    (finding,) = judge(records)
    assert (finding.node, finding.severity) == (3, "note")
    assert finding.text == "the latency of its best link is 5.0 ms, and the median 0.1 ms"


def test_records_are_the_same_after_json():
    records = change_node(build_records(3, broken=[(0, 1)]), 1, failure="exited", log_folder=None)
    assert Records.from_dict(json.loads(json.dumps(records.to_dict()))) == records


@given(count=st.integers(1, 40), rounds=st.integers(1, 4))
def test_pairs_of_a_round_are_disjoint_and_no_pair_occurs_twice(count, rounds):
    from accel_runtime.extensions.node_check.measure import build_rounds

    nodes = [*range(100, 100 + count)]
    built = build_rounds(nodes, rounds)
    pairs = [tuple(sorted(pair)) for pairs in built for pair in pairs]
    assert len(pairs) == len(set(pairs))
    for each in built:
        partners = [node for pair in each for node in pair]
        assert len(partners) == len(set(partners))
    if count > 2 and rounds > 1:
        assert all(sum(node in pair for pair in pairs) >= 2 for node in nodes)


def test_addresses_and_names_are_tried():
    from accel_runtime.extensions.node_check.measure import Listener, Member, reach_peers

    with closing(Listener(1, "127.0.0.1")) as one, socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
        closed.close()
        members = [
            Member(0, [0], "localhost", "127.0.0.1", 1),
            Member(1, [1], "no-such-name.invalid", "127.0.0.1", one.port),
            Member(2, [2], "localhost", "127.0.0.1", port),
            Member(3, [3], "localhost", "127.0.0.1", one.port),
            Member(1, [1], "localhost", "127.0.0.1", one.port),
        ]
        unnamed, refused, other, named = reach_peers(0, members)
    assert (unnamed.node, unnamed.error) == (1, "")
    assert "no-such-name.invalid does not lead to it" in unnamed.name_error
    assert "Connection refused" in refused.error
    assert "node 1 answers there, not node 3" in other.error
    assert (named.error, named.name_error) == ("", "")


@pytest.mark.smoke
def test_a_wrong_product_is_found(monkeypatch):
    import torch

    from accel_runtime.extensions.node_check.measure import measure_device

    limits = replace(Limits.of(quick=True), matmul_s=0.01)
    cpu, record = torch.device("cpu"), Record(0, 0, "h0", 1)
    assert measure_device(record, cpu, limits).tflops > 0
    multiply = torch.Tensor.__matmul__

    def multiply_wrongly(left, right):
        product = multiply(left, right)
        if product.dtype == torch.float32:
            product[0, 0] += 1
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", multiply_wrongly)
    assert (
        measure_device(record, cpu, limits).error == "a matrix multiplication gave 1 wrong elements of 65536"
    )


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    from accel_runtime.extensions.node_check.measure import measure_folder

    assert measure_folder(str(tmp_path)).error == ""
    assert measure_folder(str(tmp_path)).free_bytes > 0
    assert measure_folder(str(tmp_path / "absent")).error == "No such file or directory"
    assert [*tmp_path.iterdir()] == []


class MemoryStore:
    """A store of this process."""

    def __init__(self):
        self._values, self._lock = {}, threading.Lock()

    def set(self, key, value):
        self._values[key] = value.encode()

    def get(self, key):
        return self._values[key]

    def check(self, keys):
        return all(key in self._values for key in keys)

    def compare_set(self, key, _expected, value):
        with self._lock:
            return self._values.setdefault(key, value.encode())

    def add(self, key, amount):
        with self._lock:
            self._values[key] = b"%d" % (int(self._values.get(key, b"0")) + amount)
            return int(self._values[key])


def publish(board, records):
    for record in records.ranks:
        board.publish(record)


def test_the_step_that_a_silent_node_did_not_complete_is_named():
    board, limits = Board(MemoryStore(), "check"), replace(Limits.of(quick=True), straggler_s=0.1)
    records = change_rank(build_records(4), 2, missing_step=Step.COMPUTE)
    records = change_rank(change_rank(records, 3, missing_step=Step.COLLECTIVE), 7, missing_step=Step.START)
    publish(board, replace(records, ranks=records.ranks[:7]))
    board.publish_failure(5, "rank 5 exited with code 1: no memory")
    board.count("ended", 4)
    collected = board.collect(4, 8, limits, lambda: None, leads=True)
    assert collected.silent == {1: "a matrix multiplication", 3: "the start of the check"}
    assert collected.failures == {2: "rank 5 exited with code 1: no memory"}
    assert list_bad(collected) == [1, 2, 3]


def test_other_ranks_of_a_node_that_has_failed_are_not_waited_for():
    board = Board(MemoryStore(), "check")
    publish(board, change_rank(build_records(2), 2, missing_step=Step.COLLECTIVE))
    board.publish_failure(3, "rank 3 exited with code 1")
    board.count("ended", 2)
    collected = board.collect(2, 4, Limits.of(quick=True), pytest.fail, leads=True)
    assert (collected.silent, list_bad(collected)) == ({}, [1])


def test_pairs_that_are_not_connected_are_not_measured():
    """All nodes are still at the step, as no rank has ended."""
    from accel_runtime.extensions.node_check.measure import Member, RankCheck

    board = Board(MemoryStore(), "check")
    for record in build_records(4, broken=[(1, 2)]).ranks:
        board.publish(replace(record, missing_step=Step.COLLECTIVE, links=()))
    board.publish_failure(7, "exited")
    members = [Member(node, [2 * node, 2 * node + 1], "", "", 0) for node in range(4)]
    check = RankCheck(board, None, None, None, 8, 4, True, None, "gloo", "", {})
    assert check._list_links(members) == ([0, 1, 2], [(1, 2)])


@pytest.mark.parametrize("width", [80, 140])
def test_the_table_fits_the_terminal_and_marks_what_differs(width):
    from accel_runtime.extensions.node_check.check import CheckResult, format_table

    records = change_node(build_records(4), 2, torch="2.12.0", shm_bytes=10**6)
    findings = judge(records)
    text = format_table(records, findings, width)
    assert max(map(len, text.splitlines())) <= width
    assert "all nodes: Python 3.11.7" in text
    assert "2.12.0 !" in text
    assert "1.0 MB *" in text
    assert "! bad, * noted below, - not checked" in text
    lines = CheckResult(records, tuple(findings), 1.0, None).format().splitlines()
    assert lines[-3:] == [
        "BAD    h2: has torch 2.12.0, and most nodes have 2.13.0",
        "note   h2: its /dev/shm has only 1.0 MB, which data loader workers and NCCL use",
        "FAILED nodes: h2",
    ]


def test_the_table_of_many_nodes_has_those_with_findings():
    from accel_runtime.extensions.node_check.check import format_table

    records = change_node(build_records(60), 50, torch="2.12.0")
    text = format_table(records, judge(records), 120)
    assert len(text.splitlines()) < 60
    assert "h50" in text
    assert "20 more nodes without findings" in text


def check_with_ranks(failing=None):
    """Check the nodes of these ranks in short; `failing` is the rank whose process cannot start."""
    from accel_runtime.extensions.node_check import check

    environ = dict(os.environ)
    if failing is not None and environ["RANK"] == failing:
        environ["PYTHONHOME"] = "/nowhere"
    result = check.check_nodes(environ, quick=True)
    return [finding.text for finding in result.findings if finding.is_bad], result.records


@pytest.mark.slow
def test_ranks_check_their_node(ranks):
    for bad, records in ranks.run(check_with_ranks):
        assert bad == []
        assert len(records.nodes) == records.num_nodes
        assert len(records.ranks) == ranks.size
        assert all(record.tflops for record in records.ranks)
        assert bool(records.links) == (ranks.size > 1)
        assert not [link.error for link in records.links if link.error]


def test_a_rank_whose_check_cannot_start_fails_its_node(pair):
    for bad, records in pair.run(check_with_ranks, "1"):
        assert len(bad) == 1
        assert "rank 1 exited with code 1" in bad[0]
        assert not is_connected(records)
