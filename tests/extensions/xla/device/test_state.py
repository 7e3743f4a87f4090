"""State, logging and trackers of replicas that are threads of one process."""

from __future__ import annotations

import json
import logging
import os
from contextlib import nullcontext

import pytest
import torch
from support.processes.rank_hooks import watch

from accel_runtime import Accelerator, PartialState
from accel_runtime.backends import current_backend, set_current_backend
from accel_runtime.backends.rng import set_seed
from accel_runtime.data.metrics import gather_object
from accel_runtime.environment.topology import Topology
from accel_runtime.monitoring.logging import find_topology, get_logger

pytest.importorskip("torch_xla", reason="torch_xla is in an environment of its own: make test-xla")


class Heard(logging.Handler):
    """A handler that keeps the messages."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def test_a_replica_has_its_rank_before_it_connects(replicas):
    def ranks():
        set_current_backend(None)
        return find_topology().rank, find_topology().world_size, Topology.from_env(os.environ).world_size

    assert replicas[2].run(ranks) == [(0, 2, 1), (1, 2, 1)]


def test_a_logger_writes_on_the_first_replica_only_by_default(replicas):
    def written():
        import threading

        set_current_backend(None)
        logger, heard = get_logger(f"replica {threading.get_ident()}"), Heard()
        logger.logger.addHandler(heard)
        logger.warning("once")
        logger.warning("each", main_process_only=False)
        Accelerator()
        logger.warning("in turn", in_order=True)
        return heard.lines

    first, second = replicas[2].run(written)
    assert first == ["[RANK 0] once", "[RANK 0] each", "[RANK 0] in turn"]
    assert second == ["[RANK 1] each", "[RANK 1] in turn"]


def test_warning_once_is_logged_by_the_first_replica_after_another_suppressed_it(replicas):
    def written():
        shared = vars(logging.getLogger("shared by replicas"))
        logger = shared.setdefault("adapter", get_logger("shared by replicas"))
        heard = shared.setdefault("heard", Heard())
        state = PartialState()
        if state.is_main_process:
            logger.logger.addHandler(heard)
        for rank_in_turn in (1, 0):
            if state.process_index == rank_in_turn:
                logger.warning_once("careful")
                logger.warning_once("careful")
            state.wait_for_everyone()
        return heard.lines

    assert replicas[2].run(written) == [["[RANK 0] careful"]] * 2


def test_a_progress_bar_is_shown_by_the_first_replica(replicas):
    def shown():
        from accel_runtime.monitoring.logging import tqdm

        set_current_backend(None)
        return not tqdm(range(2)).disable, not tqdm(range(2), main_process_only=False).disable

    pytest.importorskip("tqdm")
    assert replicas[2].run(shown) == [(True, True), (False, True)]


def test_a_seed_applies_to_the_device_and_can_be_device_specific(replicas):
    def draw():
        set_current_backend(None)
        numbers = []
        for specific in (False, True, False):
            set_seed(5, device_specific=specific)
            device = Accelerator().device
            numbers.append(torch.rand(3, device=device).cpu())
        return numbers

    (first, device_specific, repeated), (other, others, _) = replicas[2].run(draw)
    assert torch.equal(first, other)
    assert torch.equal(first, repeated)
    assert not torch.equal(device_specific, others)


def test_the_state_has_main_process_functions_and_splits_items(replicas, tmp_path):
    def call_functions(folder):
        import time

        set_current_backend(None)
        state = PartialState()
        only = state.on_main_process(lambda: "did it")()
        with state.main_process_first():
            time.sleep(0.3 * (not state.process_index))
            (folder / f"{len(list(folder.iterdir()))} was {state.process_index}").touch()
        with state.split_between_processes([1, 2, 3]) as items:
            return state.process_index, state.local_process_index, bool(state.is_main_process), only, items

    assert replicas[2].run(call_functions, tmp_path) == [
        (0, 0, True, "did it", [1, 2]),
        (1, 1, False, None, [3]),
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0 was 0", "1 was 1"]


def test_a_tracker_records_on_the_first_replica(replicas, tmp_path):
    def tracked(folder):
        accelerator = Accelerator(log_with="jsonl", project_dir=folder)
        accelerator.init_trackers("run", config={"rate": 0.1})
        accelerator.log({"loss": 1.0 + accelerator.process_index}, step=3)
        accelerator.end_training()
        accelerator.wait_for_everyone()

    replicas[2].run(tracked, tmp_path)
    lines = [json.loads(line) for path in tmp_path.rglob("*.jsonl") for line in path.read_text().splitlines()]
    assert [line["values"] for line in lines if "values" in line] == [{"loss": 1.0}]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_replicas_with_different_options_do_not_interfere(replicas, size):
    def train():
        state = PartialState()
        rank = state.process_index
        accelerator = Accelerator(
            gradient_accumulation_steps=rank + 1, mixed_precision="bf16" if rank else "no"
        )
        is_current = current_backend() is accelerator._backend
        synced = []
        for _ in range(4):
            with accelerator.accumulate():
                synced.append(accelerator.sync_gradients)
            with accelerator.autocast():
                half = torch.is_autocast_enabled("xla")
        everyone = gather_object([(rank, half)], accelerator._backend)
        return is_current, synced, everyone

    halves = [(rank, rank > 0) for rank in range(size)]
    for rank, (is_current, synced, everyone) in enumerate(replicas[size].run(train)):
        assert is_current
        assert synced == [step % (rank + 1) == 0 for step in range(1, 5)]
        assert everyone == halves


def test_the_first_replica_of_a_process_writes_its_heartbeat(replicas, tmp_path):
    def beating(folder):
        from accel_runtime.observe.heartbeat import heartbeat

        state = PartialState()
        with watch(folder) if state.is_main_process else nullcontext():
            state.wait_for_everyone()
            set_current_backend(None)
            PartialState()
            has_heartbeat = heartbeat() is not None
            state.wait_for_everyone()
        return has_heartbeat

    assert replicas[4].run(beating, tmp_path) == [True, False, False, False]
    assert len(list(tmp_path.iterdir())) == 1


def test_notebook_launcher_explains_how_replicas_are_started(monkeypatch):
    from accel_runtime import notebook_launcher

    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    with pytest.raises(ValueError, match=r"device xla starts its replicas itself"):
        notebook_launcher(print, num_processes=2)
