"""`prepare_data_loader` of the module `data_loader`, which some scripts call instead of the method of an Accelerator."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader

from accel_runtime import Accelerator
from accel_runtime.accelerate.data_loader import DataLoaderShard, prepare_data_loader
from accel_runtime.backends import set_current_backend


def test_samples_are_sharded_and_gathered_once(ranks):
    def run(options):
        accelerator = Accelerator()
        loader = DataLoader(range(11), batch_size=2)
        rank_loader = prepare_data_loader(
            loader,
            accelerator.device,
            num_processes=accelerator.num_processes,
            process_index=accelerator.process_index,
            put_on_device=True,
            **options,
        )
        assert isinstance(rank_loader, DataLoaderShard)
        assert prepare_data_loader(rank_loader) is rank_loader
        gathered = [n for batch in rank_loader for n in accelerator.gather_for_metrics(batch).tolist()]
        ends = [accelerator.gradient_state.end_of_dataloader for _ in rank_loader]
        return gathered, ends[-1], len(rank_loader) == len(accelerator.prepare_data_loader(loader))

    assert ranks.run(run, {}) == [(list(range(11)), True, True)] * ranks.size
    options = {"dispatch_batches": True, "rng_types": ["generator"]}
    assert ranks.run(run, options) == [(list(range(11)), True, True)] * ranks.size


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_processes": 7}, "num_processes=7 is not 1"),
        ({"process_index": 3}, "process_index=3 is not 0"),
        ({"device": "meta"}, "device='meta' is not 'cpu'"),
        ({"slice_fn_for_dispatch": len}, "slice_fn_for_dispatch"),
        ({"torch_device_mesh": object()}, "ParallelismConfig"),
        ({"rng_types": ["npu"]}, "rng_types"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_that_do_not_match_this_process_are_rejected(options, message):
    accelerator = Accelerator()  # an Accelerator that nothing holds is gone
    with pytest.raises(ValueError, match=message):
        prepare_data_loader(DataLoader(range(3)), **options)
    assert accelerator.num_processes == 1


def test_a_call_without_an_accelerator_is_rejected():
    set_current_backend(None)
    with pytest.raises(RuntimeError, match="Make the Accelerator first"):
        prepare_data_loader(DataLoader(range(3)))


def test_an_invalid_value_of_data_is_rejected():
    with pytest.raises(ValueError, match="Invalid data='shard': expected global or sharded"):
        Accelerator().prepare_data_loader(DataLoader(range(3)), data="shard")
