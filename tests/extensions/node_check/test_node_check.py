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

from accel_runtime.extensions.node_check.facts import (
    CheckFacts,
    CheckLimits,
    DeviceFacts,
    FactsBoard,
    FolderFacts,
    LinkFacts,
    NodeFacts,
    PeerFacts,
)
from accel_runtime.extensions.node_check.verdict import find_broken_pairs, is_connected, judge

pytestmark = pytest.mark.usefixtures("on_the_cpu")

VERSIONS = {"python": "3.11.7", "torch": "2.13.0", "accel": "0.1.0"}
FOLDER = FolderFacts("/logs", 10**12, 10**7)


def build_facts(count, *, broken=(), is_gpu=True, **changes):
    """Return the facts of healthy nodes with two ranks each, and broken pairs."""

    def build_peer(node, other):
        return PeerFacts(other, "no route" if {node, other} in [*map(set, broken)] else "", "", 0.001, 0.001)

    nodes = {
        node: NodeFacts(
            node,
            **VERSIONS,
            log_folder=FOLDER,
            work_folder=FOLDER,
            shm_bytes=10**10,
            memory_bytes=10**11,
            open_files=65536,
            peers=tuple(build_peer(node, other) for other in range(count) if other != node),
        )
        for node in range(count)
    }
    devices = tuple(DeviceFacts(rank, rank // 2, "GPU", is_gpu, 100.0) for rank in range(2 * count))
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count) if {a, b} not in [*map(set, broken)]]
    links = tuple(LinkFacts(pair, is_gpu, 1e-4, 1e9) for pair in pairs or [(0,)])
    names = tuple(f"h{node}" for node in range(count))
    return replace(CheckFacts(names, nodes, devices, links), **changes)


def change_node(facts, node, **changes):
    return replace(facts, nodes={**facts.nodes, node: replace(facts.nodes[node], **changes)})


def list_bad(facts):
    return sorted({finding.node for finding in judge(facts) if finding.is_bad})


@given(count=st.integers(1, 9), is_gpu=st.booleans())
def test_healthy_nodes_have_no_findings(count, is_gpu):
    facts = build_facts(count, is_gpu=is_gpu)
    assert judge(facts) == []
    assert is_connected(facts)


@given(count=st.integers(3, 9), data=st.data())
def test_a_node_that_reaches_no_other_is_the_only_bad_one(count, data):
    bad = data.draw(st.integers(0, count - 1))
    facts = build_facts(count, broken=[(bad, other) for other in range(count) if other != bad])
    assert list_bad(facts) == [bad]
    assert not is_connected(facts)


@given(count=st.integers(2, 8), data=st.data())
def test_nodes_that_remain_without_the_bad_ones_all_reach_each_other(count, data):
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
    facts = build_facts(count, broken=data.draw(st.lists(st.sampled_from(pairs), unique=True)))
    bad = list_bad(facts)
    assert not [pair for pair in find_broken_pairs(facts) if not {*pair} & {*bad}]


def test_a_single_broken_pair_names_both_nodes():
    (finding,) = judge(build_facts(4, broken=[(1, 2)]))
    assert (finding.node, finding.is_bad) == (2, True)
    assert finding.text == "is not connected with h1, and either may be the cause: no route"


@given(count=st.integers(3, 9), part=st.floats(0.01, 1.5), data=st.data())
def test_a_gpu_below_half_of_the_median_is_bad_and_one_below_four_fifths_is_noted(count, part, data):
    rank = data.draw(st.integers(0, 2 * count - 1))
    facts = build_facts(count)
    devices = tuple(replace(d, tflops=100 * part) if d.rank == rank else d for d in facts.devices)
    findings = judge(replace(facts, devices=devices))
    expected = [] if part >= 0.8 else [(rank // 2, "bad" if part < 0.5 else "note")]
    assert [(finding.node, finding.severity) for finding in findings] == expected


@given(count=st.integers(3, 9), data=st.data())
def test_a_slow_node_is_found_though_its_partners_measured_slow_links_too(count, data):
    bad = data.draw(st.integers(0, count - 1))
    facts = build_facts(count)
    links = tuple(replace(k, bytes_per_s=1e7) if bad in k.nodes else k for k in facts.links)
    assert list_bad(replace(facts, links=links)) == [bad]


def test_a_slow_cpu_is_noted_only_since_other_processes_use_it():
    facts = build_facts(3, is_gpu=False)
    devices = (replace(facts.devices[0], tflops=1.0), *facts.devices[1:])
    assert [(f.node, f.severity) for f in judge(replace(facts, devices=devices))] == [(0, "note")]


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
        ("xid_errors", (79,), "note", "Xid 79, an error of the hardware"),
        ("peers", (PeerFacts(0, "", "unknown name", 7.5, 0.1), PeerFacts(2)), "note", "7.5 s ahead of that of h0"),
    ],
)  # fmt: skip
def test_a_difference_of_one_node_is_a_finding_about_that_node(field, value, severity, word):
    findings = judge(change_node(build_facts(3), 1, **{field: value}))
    assert {(finding.node, finding.severity) for finding in findings} == {(1, severity)}
    assert word in " ".join(finding.text for finding in findings)


def test_a_patch_version_of_python_is_no_difference():
    assert judge(change_node(build_facts(3), 1, python="3.11.9")) == []


def test_of_two_nodes_with_different_versions_the_second_is_bad():
    (finding,) = judge(change_node(build_facts(2), 0, torch="2.12.0"))
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
    facts = build_facts(2)
    (finding,) = judge(replace(facts, devices=(*facts.devices[:3], replace(facts.devices[3], **changes))))
    assert (finding.node, finding.is_bad) == (1, True)
    assert word in finding.text


def test_nodes_without_an_answer_are_bad_and_their_partners_are_not():
    facts = build_facts(3)
    links = (LinkFacts((0, 1), error="timed out"), LinkFacts((1, 2), error="timed out"), facts.links[1])
    facts = replace(facts, links=links, silent={1: "a collective"}, waited_s=20.2)
    (finding,) = judge(facts)
    assert (finding.node, finding.is_bad) == (1, True)
    assert finding.text == "did not answer within 20 s: a collective did not end"


def test_facts_are_the_same_after_json():
    facts = change_node(build_facts(3, broken=[(0, 1)]), 1, xid_errors=(31,), log_folder=None)
    facts = replace(facts, silent={2: "a collective"}, failures={0: "exited"})
    assert CheckFacts.from_dict(json.loads(json.dumps(facts.to_dict()))) == facts


@given(count=st.integers(1, 40), rounds=st.integers(1, 4))
def test_pairs_of_a_round_are_disjoint_and_no_pair_occurs_twice(count, rounds):
    from accel_runtime.extensions.node_check.measurements import build_rounds

    nodes = [*range(100, 100 + count)]
    built = build_rounds(nodes, rounds)
    pairs = [tuple(sorted(pair)) for pairs in built for pair in pairs]
    assert len(pairs) == len(set(pairs))
    for each in built:
        partners = [node for pair in each for node in pair]
        assert len(partners) == len(set(partners))
    if count > 2 and rounds > 1:
        assert all(sum(node in pair for pair in pairs) >= 2 for node in nodes)


def test_addresses_and_names_are_tried_and_clocks_compared():
    from accel_runtime.extensions.node_check.reachability import Listener, PeerAddress, reach_peers

    with closing(Listener(1, "127.0.0.1")) as one, socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
        closed.close()
        peers = [
            PeerAddress(0, "localhost", "127.0.0.1", 1),
            PeerAddress(1, "no-such-name.invalid", "127.0.0.1", one.port),
            PeerAddress(2, "localhost", "127.0.0.1", port),
            PeerAddress(3, "localhost", "127.0.0.1", one.port),
        ]
        reached, refused, other = reach_peers(0, peers)
    assert (reached.node, reached.error) == (1, "")
    assert "no-such-name.invalid does not lead to it" in reached.name_error
    assert abs(reached.clock_offset_s) <= reached.clock_error_s + 0.5
    assert "Connection refused" in refused.error
    assert "node 1 answers there, not node 3" in other.error


def test_a_wrong_product_is_found(monkeypatch):
    import torch

    from accel_runtime.extensions.node_check.measurements import measure_device

    limits = replace(CheckLimits.of(quick=True), matmul_s=0.01)
    cpu = torch.device("cpu")
    assert measure_device(0, 0, cpu, limits).tflops > 0
    multiply = torch.Tensor.__matmul__

    def multiply_wrongly(left, right):
        product = multiply(left, right)
        if product.dtype == torch.float32:
            product[0, 0] += 1
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", multiply_wrongly)
    facts = measure_device(0, 0, cpu, limits)
    assert facts.error == "a matrix multiplication gave 1 wrong elements of 65536"


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    from accel_runtime.extensions.node_check.machine import measure_folder

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


def test_the_step_that_a_silent_node_did_not_complete_is_named():
    board, limits = FactsBoard(MemoryStore(), "check"), replace(CheckLimits.of(quick=True), straggler_s=0.1)
    healthy = build_facts(3)
    for node in range(3):
        board.publish_name(node, f"h{node}", 1)
    for node in (0, 1):
        board.count(f"started/{node}", 1)
    board.count("computed/0", 1)
    board.publish_end(0)
    board.publish_node(healthy.nodes[0])
    board.publish_failure(2, "rank 2 exited with code 1: no memory")
    facts = board.collect(3, 3, limits, lambda: None, leads=True)
    assert facts.silent == {1: "a matrix multiplication"}
    assert facts.failures == {2: "rank 2 exited with code 1: no memory"}
    assert list_bad(facts) == [1, 2]


@pytest.mark.parametrize("width", [80, 140])
def test_the_table_fits_the_terminal_and_marks_what_differs(width):
    from accel_runtime.extensions.node_check.table import format_check

    facts = change_node(build_facts(4), 2, torch="2.12.0", shm_bytes=10**6)
    text = format_check(facts, judge(facts), width)
    lines = text.splitlines()
    findings = [line for line in lines if line.startswith(("BAD", "note"))]
    assert max(len(line) for line in lines if line not in findings) <= width
    assert findings == [
        "BAD    h2: has torch 2.12.0, and most nodes have 2.13.0",
        "note   h2: its /dev/shm has only 1.0 MB, which data loader workers and NCCL use",
    ]
    assert "all nodes: Python 3.11.7" in text
    assert "2.12.0 !" in text
    assert "1.0 MB *" in text
    assert "! bad, * noted below, - not checked" in text


def test_the_table_of_many_nodes_has_those_with_findings():
    from accel_runtime.extensions.node_check.table import format_check

    facts = change_node(build_facts(200), 150, torch="2.12.0")
    text = format_check(facts, judge(facts), 120)
    assert len(text.splitlines()) < 60
    assert "h150" in text
    assert "160 more nodes without findings" in text


def check_with_ranks(failing=None):
    """Check the nodes of these ranks in short; `failing` is the rank whose process cannot start."""
    from accel_runtime.extensions.node_check import check

    environ = dict(os.environ)
    if failing is not None and environ["RANK"] == failing:
        environ["PYTHONHOME"] = "/nowhere"
    result = check.check_nodes(environ, quick=True)
    return result.facts.names, [finding.text for finding in result.findings if finding.is_bad], result.facts


@pytest.mark.slow
def test_ranks_check_their_node(ranks):
    for names, bad, facts in ranks.run(check_with_ranks):
        assert bad == []
        assert len(names) == len(facts.nodes)
        assert len(facts.devices) == ranks.size
        assert all(device.tflops for device in facts.devices)
        assert bool(facts.links) == (ranks.size > 1)
        assert not [link.error for link in facts.links if link.error]


def test_a_rank_whose_check_cannot_start_fails_its_node(pair):
    results = pair.run(check_with_ranks, "1")
    for _, bad, facts in results:
        assert len(bad) == 1
        assert "rank 1 exited with code 1" in bad[0]
        assert not is_connected(facts)
