"""`prepare` rejects objects that differ between ranks, and names the ranks and values."""

from __future__ import annotations

import pytest
import torch
from support.training.data_sets import SizedStream
from support.training.exchanges import record_exchanges
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from accel_runtime import (
    Accelerator,
    AutocastKwargs,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
)
from accel_runtime.collectives.handshake import MismatchError

LOADERS = {
    "batch_size: 2 on rank 0; 3 on rank 1": lambda rank: DataLoader(range(12), batch_size=2 + rank),
    "dataset length: 12 on rank 0; 11 on rank 1": lambda rank: DataLoader(range(12 - rank), batch_size=2),
    "sampler: RandomSampler on rank 0; SequentialSampler on rank 1": lambda rank: DataLoader(
        range(12), batch_size=2, shuffle=not rank
    ),
    "drop_last: False on rank 0; True on rank 1": lambda rank: DataLoader(
        range(12), batch_size=2, drop_last=bool(rank)
    ),
    "number of batches: 2 on rank 0; 1 on rank 1": lambda rank: DataLoader(
        range(12), batch_sampler=[[0, 1], [2]][rank:]
    ),
    "batch sampler: BatchSampler on rank 0; list on rank 1": lambda rank: DataLoader(
        range(2), batch_sampler=[[0, 1]] if rank else BatchSampler(SequentialSampler(range(2)), 2, False)
    ),
    "replacement: False on rank 0; True on rank 1": lambda rank: DataLoader(
        range(12), sampler=RandomSampler(range(12), replacement=bool(rank))
    ),
    "dataset length: 5 on rank 0; 6 on rank 1": lambda rank: DataLoader(SizedStream(5 + rank), batch_size=2),
    "objects: DataLoader on rank 0; Other on rank 1": lambda rank: (Other if rank else DataLoader)(range(4)),
}


class Other(DataLoader):
    """A loader class of the script."""


def frozen(rank):
    model = nn.Linear(2, 1)
    model.bias.requires_grad_(not rank)
    return model


def with_buffer(rank):
    model = nn.Linear(2, 1)
    model.register_buffer("scale", torch.ones(1 + rank))
    return model


MODELS = {
    "parameter weight: float32[1, 2] on rank 0; float64[1, 2] on rank 1": lambda rank: nn.Linear(
        2, 1, dtype=torch.float64 if rank else torch.float32
    ),
    "parameter weight: float32[1, 2] on rank 0; float32[1, 3] on rank 1": lambda rank: nn.Linear(2 + rank, 1),
    "parameter bias: float32[1] on rank 0; missing on rank 1": lambda rank: nn.Linear(2, 1, bias=not rank),
    "parameter bias: float32[1] on rank 0; float32[1], frozen on rank 1": frozen,
    "buffer scale: float32[1] on rank 0; float32[2] on rank 1": with_buffer,
}


def optimizer(rank, **options):
    kind = options.pop("kind", torch.optim.SGD)
    return kind(nn.Linear(2, 1).parameters(), **({"lr": 0.1} | options))


OPTIMIZERS = {
    "lr of group 0: 0.1 on rank 0; 0.2 on rank 1": lambda rank: optimizer(rank, lr=0.1 * (1 + rank)),
    "momentum of group 0: 0 on rank 0; 1 on rank 1": lambda rank: optimizer(rank, momentum=rank),
    "objects: SGD on rank 0; AdamW on rank 1": lambda rank: optimizer(
        rank, kind=torch.optim.AdamW if rank else torch.optim.SGD
    ),
}


@pytest.mark.parametrize("difference", [*LOADERS, *MODELS, *OPTIMIZERS])
def test_objects_that_differ_between_ranks_are_rejected_on_every_rank(pair, difference):
    def refusal(make):
        accelerator = Accelerator()
        with pytest.raises(MismatchError) as error:
            accelerator.prepare(make(accelerator.process_index))
        return str(error.value)

    texts = pair.run(refusal, (LOADERS | MODELS | OPTIMIZERS)[difference])
    assert texts[0] == texts[1]
    assert texts[0].startswith("prepare() failed: the ranks prepare different objects.")
    assert difference in texts[0]


def test_the_error_groups_ranks_with_equal_values(clusters):
    def refusal():
        accelerator = Accelerator()
        with pytest.raises(MismatchError) as error:
            accelerator.prepare(DataLoader(range(12), batch_size=2 if accelerator.process_index % 2 else 4))
        return str(error.value)

    assert all(
        "DataLoader, batch_size: 4 on ranks 0, 2; 2 on rank 1\n" in text for text in clusters[3].run(refusal)
    )


def test_different_objects_and_configurations_are_rejected(pair):
    def refusals():
        texts = []
        accelerator = Accelerator()
        rank = accelerator.process_index
        with pytest.raises(MismatchError) as error:
            accelerator.prepare(nn.Linear(1, 1), *[DataLoader(range(2))] * rank)
        texts.append(str(error.value))
        accelerator = Accelerator(split_batches=bool(rank))
        with pytest.raises(MismatchError) as error:
            accelerator.prepare_data_loader(DataLoader(range(4), batch_size=2))
        texts.append(str(error.value))
        with pytest.raises(MismatchError) as error:
            accelerator.prepare_model(nn.Linear(1 + rank, 1))
        return [*texts, str(error.value)]

    for kinds, split, model in pair.run(refusals):
        assert "objects: Linear on rank 0; Linear, DataLoader on rank 1" in kinds
        assert "split_batches: False on rank 0; True on rank 1" in split
        assert "parameter weight: float32[1, 1] on rank 0; float32[1, 2] on rank 1" in model


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [("gradient_accumulation_steps", 2, 3), ("mixed_precision", "no", "bf16")],
)
def test_settings_that_change_a_step_are_compared(pair, name, first, second):
    def refusal(name, *values):
        rank = Accelerator().process_index
        accelerator = Accelerator(**{name: values[rank]})
        with pytest.raises(MismatchError) as error:
            accelerator.prepare(nn.Linear(1, 1))
        return str(error.value)

    for text in pair.run(refusal, name, first, second):
        assert f"Accelerator, {name}: {first} on rank 0; {second} on rank 1" in text


DDP_OPTIONS = {
    "broadcast_buffers": (True, False),
    "bucket_cap_mb": (None, 1),
    "find_unused_parameters": (True, False),
    "gradient_as_bucket_view": (True, False),
    "static_graph": (False, True),
}


def test_different_ddp_options_are_rejected_with_ranks_and_values(pair):
    def refusal():
        rank = Accelerator().process_index
        options = {name: values[rank] for name, values in DDP_OPTIONS.items()}
        options["comm_hook"] = ("power_sgd", "fp16")[rank]
        if rank == 0:
            options["comm_state_option"] = {"matrix_approximation_rank": 2}
        handler = DistributedDataParallelKwargs(**options)
        accelerator = Accelerator(kwargs_handlers=[handler] if rank else None)
        if rank == 0:
            accelerator.ddp_handler = handler
        with pytest.raises(MismatchError) as error:
            accelerator.prepare(nn.Linear(1, 1))
        return str(error.value)

    for text in pair.run(refusal):
        for name, (first, second) in DDP_OPTIONS.items():
            line = f"Accelerator, DistributedDataParallelKwargs.{name}: {first} on rank 0; {second} on rank 1"
            assert line in text
        assert (
            "comm_hook: DDPCommunicationHookType.POWER_SGD on rank 0; DDPCommunicationHookType.FP16" in text
        )
        assert "comm_state_option: (('matrix_approximation_rank', 2),) on rank 0; () on rank 1" in text


def test_handlers_with_equal_options_are_consistent(pair):
    def unused():
        rank = Accelerator().process_index
        options = {
            "comm_hook": "power_sgd",
            "comm_state_option": {"warm_start": True, "start_powerSGD_iter": 10},
        }
        if rank:
            options["comm_state_option"] = dict(reversed(options["comm_state_option"].items()))
        accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(**options)])
        accelerator.prepare(nn.Linear(1, 1))
        other = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs()] * rank)
        return other.prepare(nn.Linear(1, 1)).find_unused_parameters

    assert pair.run(unused) == [False, False]


def test_different_options_of_plugins_and_handlers_are_rejected(pair):
    def refusals():
        rank = Accelerator().process_index
        texts = []
        for options in (
            {"gradient_accumulation_plugin": GradientAccumulationPlugin(2, sync_each_batch=bool(rank))},
            {"kwargs_handlers": [AutocastKwargs(cache_enabled=bool(rank))]},
            {"kwargs_handlers": [GradScalerKwargs(init_scale=2.0**rank)]},
            {"rng_types": ["torch"] * rank},
            {"fsdp_plugin": FullyShardedDataParallelPlugin(reshard_after_forward=bool(rank))},
        ):
            accelerator = Accelerator(**options)
            with pytest.raises(MismatchError) as error:
                accelerator.prepare(nn.Linear(2, 2))
            texts.append(str(error.value))
        return texts

    expected = [
        "sync_each_batch: False on rank 0; True on rank 1",
        "AutocastKwargs.cache_enabled: False on rank 0; True on rank 1",
        "GradScalerKwargs.init_scale: 1.0 on rank 0; 2.0 on rank 1",
        "rng_types: () on rank 0; ('torch',) on rank 1",
        "fully_shard_reshard_after_forward: False on rank 0; True on rank 1",
    ]
    for texts in pair.run(refusals):
        for text, part in zip(texts, expected, strict=True):
            assert part in text


def test_sharded_data_can_differ_between_ranks(pair):
    def count():
        accelerator = Accelerator()
        loader = DataLoader(range(4 + accelerator.process_index), batch_size=2 + accelerator.process_index)
        prepared = accelerator.prepare_data_loader(loader, data="sharded")
        return sum(len(accelerator.gather_for_metrics(batch)) for batch in prepared)

    assert pair.run(count) == [9, 9]


def test_a_model_for_evaluation_can_be_prepared_on_one_rank_only(pair):
    def output():
        accelerator = Accelerator()
        if accelerator.is_main_process:
            teacher = accelerator.prepare_model(nn.Linear(1, 1), evaluation_mode=True)
            teacher(torch.ones(1, 1))
        return accelerator.reduce(torch.ones(1)).item()

    assert pair.run(output) == [2, 2]


def count_prepare_exchanges():
    """Return the exchanges of ranks in the preparation of a new loader, of it again, and of several objects at once."""
    accelerator = Accelerator()
    loader, model = DataLoader(range(12), batch_size=2), nn.Linear(2, 1)
    others = [DataLoader(range(12)), DataLoader(range(6)), torch.optim.SGD(model.parameters(), lr=0.1)]
    calls = (
        lambda: accelerator.prepare(loader),
        lambda: [accelerator.prepare(loader) for _ in range(10)],
        lambda: accelerator.prepare(accelerator.prepare(loader)),
        lambda: accelerator.prepare(*others),
    )
    return [len(record_exchanges(call)) for call in calls]


def test_ranks_compare_objects_once_and_all_of_a_call_in_one_exchange(pair):
    assert pair.run(count_prepare_exchanges) == [[1, 0, 0, 1]] * 2
