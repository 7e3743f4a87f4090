"""Ranks of tests that keep checkpoints in S3: their store, with short limits, and training runs that record their results."""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager

import torch
from support.object_stores.server import client_variables
from support.runs.recorded_runs import Samples, Script, start_training, train_batch
from support.runs.sharded_runs import set_settings, to_full
from torch import nn
from torch.utils.data import DataLoader

from accel_runtime import DataLoaderConfiguration
from accel_runtime.extensions.object_stores.client_process import ProcessClient
from accel_runtime.extensions.object_stores.store import LEFTOVER_AGE_S, ObjectStore
from accel_runtime.storage.any_store import AnyStore
from accel_runtime.storage.file_store import FileStore

RETRY_S = 60
"""Seconds of retries in tests of faults that pass."""
EPOCHS = 2


@contextmanager
def set_client(address):
    """Let clients that start within this context use an address."""
    before = dict(os.environ)
    os.environ.update(client_variables(address))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def open_objects(address, *, retry_s=RETRY_S, leftover_age_s=LEFTOVER_AGE_S, run=None):
    """Return the store of objects of a server or proxy, whose client process ends with this context."""
    client = ProcessClient(retry_s)
    with set_client(address):
        client._get_child()
    try:
        yield ObjectStore(client, run, leftover_age_s=leftover_age_s)
    finally:
        client.close()


@contextmanager
def connect(accelerator, addresses, **limits):
    """Let an Accelerator keep checkpoints behind the address of its rank."""
    with open_objects(addresses[accelerator.process_index % len(addresses)], **limits) as objects:
        for before in accelerator._checkpoints._store._remote.values():  # `prepare` has checked the access
            before.client.close()
        accelerator._checkpoints._store = AnyStore(FileStore(), lambda _: objects)
        yield objects


def build_script():
    """Return a script with global batches of 12 on 1 to 4 ranks."""
    return Script(
        options=lambda: {
            "dataloader_config": DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True)
        },
        model=lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)),
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.01),
        loader=lambda data: DataLoader(data, batch_size=12, shuffle=True),
        dataset=lambda: Samples(48),
    )


@contextmanager
def start_run(addresses, seed, *, sharded, script=None, **limits):
    """Return a prepared run, replicated or sharded over all ranks, with checkpoints behind the addresses."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    with ExitStack() as stack:
        stack.enter_context(set_settings({"parallel_dp_shard": size} if sharded and size > 1 else {}))
        run = start_training(script or build_script(), seed)
        if addresses:
            stack.enter_context(connect(run.accelerator, addresses, **limits))
        yield run


def train_rest(run, batches=None):
    """Train to the end and return the results; `batches` is the rest of the current epoch."""
    rows, first = [], run.loader.epoch
    for epoch in range(first, EPOCHS):
        for batch in batches if batches is not None and epoch == first else run.loader:
            loss = train_batch(run, batch)
            samples = run.accelerator.gather_for_metrics(batch[0]).tolist()
            rows.append((samples, loss, run.scheduler.get_last_lr()[0], run.optimizer.steps))
    model = run.accelerator.unwrap_model(run.model)
    moments = [value for state in run.optimizer.state.values() for value in state.values()]
    tensors = [*model.state_dict().values(), *moments]
    return rows, [to_full(each).tolist() for each in tensors], torch.rand(2).tolist()


def train_and_save(location, addresses, sharded=False, steps=2, in_background=False):
    """Save within the first epoch, also twice to the same name, train on, and return the results of the rest."""
    with start_run(addresses, 5, sharded=sharded) as run:
        batches = iter(run.loader)
        run.accelerator.save_state(location)
        for _ in range(steps):
            train_batch(run, next(batches))
        run.accelerator.save_state(location, async_save=in_background)
        results = train_rest(run, batches)
        run.accelerator.wait_for_checkpoint()
        return results


def resume_and_train(location, addresses, sharded=False, seed=77):
    """Resume in a run with other weights, and return the results of the rest."""
    with start_run(addresses, seed, sharded=sharded) as run:
        run.accelerator.resume(location)
        return train_rest(run)
