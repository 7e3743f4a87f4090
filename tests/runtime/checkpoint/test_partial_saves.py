"""Checkpoints that only some ranks save while the others train, as in scripts for Accelerate."""

from __future__ import annotations

import os
import re
import time

import pytest
import torch
from support.cases.log_messages import collect_messages
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_runtime import Accelerator, ProjectConfiguration
from accel_runtime.storage.errors import CheckpointError
from accel_runtime.utils import ParallelismConfig, gather_object


def prepare_run(folder=None, model=None, **options):
    torch.manual_seed(0)
    config = ProjectConfiguration(folder, automatic_checkpoint_naming=True) if folder else None
    accelerator = Accelerator(project_config=config, **options)
    model = model or nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    data = TensorDataset(torch.arange(48.0).view(16, 3) / 48)
    return accelerator, *accelerator.prepare(
        model, optimizer, DataLoader(data, batch_size=16 // 4 // accelerator.num_processes, shuffle=True)
    )


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


def learn(accelerator, model, optimizer, batch):
    accelerator.backward(model(batch[0]).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def train_and_save_on_one_rank(folder, rank, metrics):
    accelerator, model, optimizer, loader = prepare_run(folder)
    saved, requests = [], 0
    service = accelerator._backend.rank_monitor.service
    send_request = service.ask

    def count(*arguments):
        nonlocal requests
        requests += 1
        return send_request(*arguments)

    service.ask = count
    with collect_messages("accel_runtime.checkpoint") as messages:
        for batch in loader:
            learn(accelerator, model, optimizer, batch)
            if accelerator.process_index == rank:
                saved.append((accelerator.save_state(), weights(model)))
                requests = 0 if len(saved) == 1 else requests
            if metrics:
                accelerator.gather(torch.ones(1))
    service.ask = send_request
    accelerator.wait_for_everyone()
    path, expected = gather_object([saved])[rank][1]
    accelerator, model, optimizer, loader = prepare_run(folder)
    checkpoint = accelerator.load_state(path)
    states = optimizer.state_dict()["state"][0]["step"].item()
    is_equal = weights(model) == expected
    learn(accelerator, model, optimizer, (torch.ones(4, 3),))
    after = accelerator.gather(torch.tensor(weights(model)).unsqueeze(0))
    return messages, requests, checkpoint.manifest.step, states, is_equal, bool((after == after[0]).all())


@pytest.mark.parametrize(("rank", "metrics"), [(0, False), (1, True)])
def test_one_rank_saves_while_the_others_train(pair, tmp_path, rank, metrics):
    results = pair.run(train_and_save_on_one_rank, str(tmp_path), rank, metrics)
    (warning,), later = results[rank][0], results[rank][1]
    state_of_rank = "waits in gather at" if metrics else "is "
    assert re.search(
        rf"save_state\(\) at test_partial_saves.py:\d+ \(train_and_save_on_one_rank\) was called by rank {rank} ",
        warning,
    )
    assert f"(rank {1 - rank} {state_of_rank}" in warning
    assert "Call save_state() on every process" in warning
    assert later == 0  # a second save at the same line does not wait
    assert results[1 - rank][0] == []
    assert [result[2:] for result in results] == [(2, 2, True, True)] * 2


def save_from_a_function(folder):
    accelerator, model, optimizer, loader = prepare_run()

    def save(name):
        accelerator.save_state(f"{folder}/{name}")

    with collect_messages("accel_runtime.checkpoint") as messages:
        for batch in loader:
            learn(accelerator, model, optimizer, batch)
            if accelerator.is_main_process:
                save("one_rank")
        before = len(messages)
        # The other rank arrives between the end of the last save of the main process and its next call.
        time.sleep(1 if accelerator.is_main_process else 0.5)
        save("all_ranks")
    accelerator.wait_for_everyone()
    return before, len(messages), accelerator.load_state(f"{folder}/all_ranks").manifest.world_size


def test_a_line_that_one_rank_saved_at_waits_when_all_ranks_reach_it(pair, tmp_path):
    assert pair.run(save_from_a_function, str(tmp_path)) == [(1, 1, 2), (0, 0, 2)]


def save_at_one_line(folder, late_rank):
    accelerator, model, optimizer, loader = prepare_run()
    paths = []
    for step, batch in enumerate(loader):
        learn(accelerator, model, optimizer, batch)
        if step == 3 and accelerator.process_index == late_rank:
            time.sleep(0.5)
        if accelerator.is_main_process or step == 3:
            paths.append(accelerator.save_state(f"{folder}/{step}"))
    accelerator.wait_for_everyone()
    return paths, accelerator.load_state(f"{folder}/3").manifest.world_size


@pytest.mark.parametrize("late_rank", [0, 1])
def test_all_ranks_get_the_checkpoint_of_the_one_that_saved_alone_at_a_line_before(pair, tmp_path, late_rank):
    paths = [f"{tmp_path}/{step}" for step in range(4)]
    assert pair.run(save_at_one_line, str(tmp_path), late_rank) == [(paths, 1), (paths[3:], 1)]


def save_on_some(folder):
    accelerator, *_ = prepare_run(folder, nn.Linear(3, 1))
    path = None
    if accelerator.process_index != 1:
        path = accelerator.save_state()
    accelerator.wait_for_everyone()
    return path


def test_the_first_of_several_saving_ranks_writes(clusters, tmp_path):
    path = f"{tmp_path}/checkpoints/checkpoint_0"
    assert clusters[3].run(save_on_some, str(tmp_path)) == [path, None, path]
    assert os.listdir(tmp_path / "checkpoints") == ["checkpoint_0"]  # noqa: PTH208


def save_own_data_and_open_cycle(folder):
    accelerator, model, _, _ = prepare_run(model=nn.Linear(1, 1), gradient_accumulation_steps=2)
    rank_loader = accelerator.prepare_data_loader(DataLoader(torch.arange(6.0).view(6, 1)), data="sharded")
    with collect_messages("accel_runtime.checkpoint") as messages:
        for step, batch in enumerate(rank_loader):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).mean())
            if step == 2 and accelerator.is_main_process:
                accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    accelerator, model, _, _ = prepare_run(model=nn.Linear(1, 1), gradient_accumulation_steps=2)
    rank_loader = accelerator.prepare_data_loader(DataLoader(torch.arange(6.0).view(6, 1)), data="sharded")
    accelerator.load_state(folder)
    return messages, len(list(rank_loader))


def test_state_of_ranks_that_did_not_save_is_named_and_starts_anew(pair, tmp_path):
    (messages, steps), (_, others) = pair.run(save_own_data_and_open_cycle, str(tmp_path / "saved"))
    assert "Offsets of loaders with rank-specific data are missing too" in messages[0]
    assert "their gradients if an accumulation cycle is open" in messages[0]
    assert steps == others == 6


def save_and_load(folder, place, is_in_background):
    """Save on the main process after step `place` of each epoch, None: after its loop; return the step that is loaded, and the epoch."""
    accelerator, model, optimizer, loader = prepare_run()
    torch.manual_seed(accelerator.process_index)
    for _ in range(2):
        for step, batch in enumerate(loader):
            learn(accelerator, model, optimizer, batch)
            if accelerator.is_main_process and step == place:
                accelerator.save_state(folder, async_save=is_in_background)
        if accelerator.is_main_process and place is None:
            accelerator.save_state(folder, async_save=is_in_background)
    accelerator.wait_for_checkpoint()
    accelerator.wait_for_everyone()
    return accelerator.load_state(folder).manifest.step, loader.epoch


@pytest.mark.parametrize(
    ("place", "is_in_background", "loaded"),
    [
        pytest.param(1, True, (6, 1), id="in the background"),
        # The order of an epoch is drawn collectively, which the saving rank has not reached.
        pytest.param(3, False, (8, 2), id="while the others begin the next epoch"),
        pytest.param(None, False, (8, 2), id="after the loop of an epoch"),
    ],
)
def test_one_rank_saves_at_any_place_of_an_epoch(pair, tmp_path, place, is_in_background, loaded):
    assert pair.run(save_and_load, str(tmp_path / "saved"), place, is_in_background) == [loaded] * 2


def train_three_epochs(folder, load):
    accelerator, model, optimizer, loader = prepare_run()
    if load:
        accelerator.load_state(folder)
    orders = []
    for epoch in range(loader.epoch, 3):
        orders.append([])
        skip = 3 if load and epoch == 0 else 0
        for step, batch in enumerate(accelerator.skip_first_batches(loader, skip)):
            orders[-1].append(accelerator.gather_for_metrics(batch[0]).tolist())
            learn(accelerator, model, optimizer, batch)
            if not load and accelerator.is_main_process and (epoch, step) == (0, 2):
                accelerator.save_state(folder)
    return orders


def test_later_epochs_keep_their_order_after_a_save_of_one_rank(pair, tmp_path):
    """The rank that saved keeps its random streams, and those of the first rank define the order."""
    uninterrupted = pair.run(train_three_epochs, str(tmp_path / "saved"), False)
    resumed = pair.run(train_three_epochs, str(tmp_path / "saved"), True)
    assert resumed == [[first[3:], *others] for first, *others in uninterrupted]


def export_alone(folder):
    accelerator, model, optimizer, loader = prepare_run()
    expected = None
    for step, batch in enumerate(loader):
        learn(accelerator, model, optimizer, batch)
        if step == 1 and accelerator.is_main_process:
            accelerator.save_model(model, folder)
            expected = weights(model)
    accelerator.wait_for_everyone()
    _, model, *_ = prepare_run()
    accelerator.load_model(model, folder)
    return weights(model), expected


def test_one_rank_exports_weights_while_the_others_train(pair, tmp_path):
    (read, expected), (others, _) = pair.run(export_alone, str(tmp_path))
    assert read == others == expected


def save_shards(folder):
    config = ParallelismConfig(dp_shard_size=2)
    accelerator, model, optimizer, loader = prepare_run(model=nn.Linear(3, 1), parallelism_config=config)
    messages = []
    for batch in loader:
        learn(accelerator, model, optimizer, batch)
        if accelerator.is_main_process and not messages:
            with pytest.raises(CheckpointError) as raised:
                accelerator.save_state(folder)
            messages.append(str(raised.value))
    return messages


def test_a_save_of_a_sharded_model_by_one_rank_fails_within_seconds(pair, tmp_path):
    (messages,), _ = pair.run(save_shards, str(tmp_path / "saved"))
    assert re.match(
        r"save_state\(\) at test_partial_saves.py:\d+ \(save_shards\) cannot save sharded models: ", messages
    )
    assert re.search(r"\(rank 1 is (in \w+\(\) )?at test_partial_saves\.py", messages)
    assert not list(tmp_path.iterdir())
