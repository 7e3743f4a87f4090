"""Records of a hang that nodes exchange through the store of the run."""

import json
import threading
from types import SimpleNamespace

import pytest
from torch.distributed import DistError, HashStore

from accel_cli.runner import hang_report
from accel_cli.runner.hang_report import Collective, GroupTrace, HangExchange, HangRecord


def build_record(rank, number, *, is_completed=False):
    """Return the record of a rank whose newest collective has a number."""
    collectives = {
        each: Collective("gloo:all_reduce", ((3,), (2, 4)), is_completed or each < number)
        for each in range(1, number + 1)
    }
    return HangRecord({rank: {"0": GroupTrace((0, 1), collectives)}}, {rank: f"train.py:{number} (main)"})


class Bootstrap:
    """The store of a run, as a node sees it."""

    def __init__(self, store, name):
        self.store, self.node = store, SimpleNamespace(id=name, host=f"host-{name}")

    def get_key(self, name):
        return f"run/{name}"

    def get_value(self, name):
        key = self.get_key(name)
        return self.store.get(key).decode() if self.store.check([key]) else None

    def set_value(self, name, text):
        self.store.set(self.get_key(name), text)


def build_exchanges(*records, activity=""):
    store = HashStore()
    nodes = [Bootstrap(store, name).node for name in "ab"[: len(records)]]
    return [
        HangExchange(Bootstrap(store, node.id), 1, nodes, lambda record=record: record, lambda: activity)
        for node, record in zip(nodes, records, strict=True)
    ]


def test_a_record_arrives_with_its_newest_collectives_and_the_name_of_its_node():
    record = build_record(1, 40)
    arrived = HangRecord.from_json(json.loads(json.dumps(record.to_json())), "h1")
    trace, sent = arrived.traces[1]["0"], record.traces[1]["0"]
    assert (trace.ranks, trace.last, trace.pending) == (sent.ranks, 40, 40)
    assert trace.collectives == {number: sent.collectives[number] for number in range(9, 41)}
    assert arrived.locations == {1: "train.py:40 (main) on h1"}


def test_a_rank_that_does_not_answer_arrives_with_the_reason_and_the_name_of_its_node():
    record = HangRecord(problems={1: "no answer: it is stopped"}, thread_failures={1: "a thread has failed"})
    arrived = HangRecord.from_json(json.loads(json.dumps(record.to_json())), "h1")
    assert arrived.problems == {1: "no answer: it is stopped on h1"}
    assert arrived.thread_failures == {1: "a thread has failed on h1"}
    assert HangRecord().merge(arrived) == arrived


def test_a_node_that_finds_a_hang_gets_the_records_of_nodes_that_answer(monkeypatch):
    monkeypatch.setattr(hang_report, "_CHECK_S", 0.0)
    first, second = build_exchanges(build_record(0, 5), build_record(1, 4, is_completed=True))
    assert not second.answer(), "the first one has not asked"
    ended = threading.Event()
    thread = threading.Thread(target=lambda: [second.answer() for _ in iter(ended.is_set, True)])
    thread.start()
    try:
        records = first.collect(build_record(0, 5))
    finally:
        ended.set()
        thread.join()
    assert {rank: groups["0"].pending for rank, groups in records.traces.items()} == {0: 5, 1: None}
    assert records.locations[1] == "train.py:4 (main) on host-b"


def test_two_nodes_that_find_it_at_the_same_time_answer_each_other():
    exchanges, results = build_exchanges(build_record(0, 5), build_record(1, 4)), {}

    def collect(number):
        results[number] = exchanges[number].collect(build_record(number, 5 - number))

    threads = [threading.Thread(target=collect, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [sorted(results[number].traces) for number in range(2)] == [[0, 1], [0, 1]]


def test_a_node_that_does_not_answer_is_named_as_such(monkeypatch):
    monkeypatch.setattr(hang_report, "_EXCHANGE_S", 0.3)
    first, _ = build_exchanges(build_record(0, 5), build_record(1, 4))
    own = build_record(0, 5)
    collected = first.collect(own)
    assert collected.traces == own.traces
    assert collected.activity == {"host-b": "the launcher on host-b does not answer"}


def test_the_activity_of_another_node_arrives_with_its_name(monkeypatch):
    monkeypatch.setattr(hang_report, "_CHECK_S", 0.0)
    first, second = build_exchanges(build_record(0, 5), build_record(1, 4), activity="rank 1 saves")
    second._publish(build_record(1, 4), 1)
    assert first.collect(build_record(0, 5)).activity == {"host-b": "rank 1 saves on host-b"}


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_a_single_node_and_one_without_a_store_have_their_own_records(monkeypatch, num_nodes):
    exchange = build_exchanges(*(build_record(rank, 5) for rank in range(num_nodes)))[0]

    def lose(*_):
        raise DistError

    monkeypatch.setattr(exchange._bootstrap, "store", SimpleNamespace(add=lose))
    own = build_record(0, 5)
    assert exchange.collect(own) is own
