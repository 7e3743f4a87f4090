"""The status of ranks: each rank can query all others within seconds."""

from __future__ import annotations

import re
import threading
import time

import cloudpickle
import pytest
import torch
from support.processes.children import fork, wait_for_exit
from torch import nn
from torch.distributed import TCPStore

from accel_runtime import Accelerator, RankLostError
from accel_runtime.collectives.rank_status import StatusService
from accel_runtime.observe.progress import LoaderEpoch, Progress, ProgressCounts


@pytest.fixture(autouse=True, scope="module")
def _by_value(request):
    cloudpickle.register_pickle_by_value(request.module)


def sleep_until_woken(folder):
    (folder / "sleeps").touch()
    while not (folder / "awake").exists():
        time.sleep(0.01)


def test_the_status_of_a_rank_has_its_line_and_its_counts(pair, tmp_path):
    def query_status(folder):
        accelerator = Accelerator()
        model, optimizer = accelerator.prepare(model := nn.Linear(1, 1), torch.optim.SGD(model.parameters()))
        # The first step of an optimizer may be a part of the step that another one has made.
        for _ in range(2):
            accelerator.wait_for_everyone()
            accelerator.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
        if accelerator.process_index == 1:
            sleep_until_woken(folder)
            return None
        while not (folder / "sleeps").exists():
            time.sleep(0.01)
        statuses = accelerator._backend.rank_monitor.service.ask([0, 1])
        (folder / "awake").touch()
        return {rank: (status.text, status.counts, status.ended) for rank, status in statuses.items()}

    (text, counts, ended) = pair.run(query_status, tmp_path)[0][1]
    assert text.startswith("is at test_status.py:")
    assert re.search(r" \(sleep_until_woken\) after \d+ steps? and \d+ batch(es)?$", text)
    assert (counts.backwards, counts.steps, ended) == (1, 1, False)


def test_the_status_of_a_rank_inside_a_library_has_the_calling_line_of_the_script(pair, tmp_path):
    def query_status(folder):
        accelerator = Accelerator()
        if accelerator.process_index == 1:
            (folder / "sleeps").touch()
            while not (folder / "awake").exists():
                threading.Event().wait(0.05)
            return None
        while not (folder / "sleeps").exists():
            time.sleep(0.01)
        time.sleep(0.2)  # until the other rank waits
        text = accelerator._backend.rank_monitor.service.ask([1])[1].text
        (folder / "awake").touch()
        return text

    text = pair.run(query_status, tmp_path)[0]
    assert re.match(r"is at test_status\.py:\d+ \(query_status\) after", text)


def test_an_error_of_a_collective_contains_the_status_of_all_ranks(pair, tmp_path):
    def explained(folder):
        accelerator = Accelerator()
        if accelerator.process_index == 1:
            sleep_until_woken(folder)
            return None
        lost = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")
        error = RuntimeError("mat1 and mat2 shapes cannot be multiplied")

        class Loss:
            def backward(self):
                raise self.error

        loss = Loss()
        loss.error = lost
        while not (folder / "sleeps").exists():
            time.sleep(0.01)
        with pytest.raises(RankLostError) as raised:
            accelerator.backward(loss)
        assert raised.value.__cause__ is lost
        loss.error = error
        with pytest.raises(RuntimeError) as other:
            accelerator.backward(loss)
        assert other.value is error
        (folder / "awake").touch()
        return str(raised.value)

    first, *lines = pair.run(explained, tmp_path)[0].splitlines()
    assert first.startswith("backward() at test_status.py:")
    assert " cannot complete: rank 1 is at test_status.py:" in first
    assert lines[0].startswith("  rank 0: is in backward() at test_status.py:")
    assert " (sleep_until_woken) after " in lines[1]


def test_progress_counts_are_beyond_others_if_any_counter_is_larger():
    before = ProgressCounts(collectives=3, backwards=2, steps=2, batches=3)
    assert not before.is_beyond(before)
    for name in ProgressCounts._fields:
        after = before._replace(**{name: getattr(before, name) + 1})
        assert after.is_beyond(before)
        assert not before.is_beyond(after)
    # Counts before the last common collective do not matter.
    assert not ProgressCounts(3, 9, 9, 9).is_beyond(ProgressCounts(4, 0, 0, 0))


def test_counts_restart_at_each_collective_and_after_uneven_loops():
    progress = Progress()
    progress.backwards += 1
    progress.begin_epoch(LoaderEpoch(0, 0, 4)).returned += 1
    assert progress.counts == ProgressCounts(0, 1, 0, 1)
    progress.enter("gather", None)
    progress.exit()
    progress.count_step(torch.optim.SGD([torch.zeros(1)]))
    assert progress.counts == ProgressCounts(1, 0, 1, 0)
    progress.restart_counts()
    assert progress.counts == ProgressCounts(1, 0, 0, 0)
    assert progress.steps == 1


def test_the_status_service_ends_if_the_store_of_the_first_rank_ends():
    store = TCPStore("127.0.0.1", 0, is_master=True)
    services = [StatusService(store, rank, 3, Progress()) for rank in range(3)]
    try:
        services[2].close()
        services[0].close()
        services[1]._thread.join(10)
        assert not services[1]._thread.is_alive()
        (statuses,) = services[1].ask([0, 2]).items()
        assert (statuses[0], statuses[1].ended) == (0, True)
    finally:
        for service in services:
            service.close()


def test_a_forked_child_does_not_report_that_its_rank_has_ended():
    store = TCPStore("127.0.0.1", 0, is_master=True)
    services = [StatusService(store, rank, 2, Progress()) for rank in range(2)]
    try:
        assert wait_for_exit(fork(services[1].close)) == 0
        assert not services[0].ask([1])[1].ended
    finally:
        for service in reversed(services):
            service.close()
