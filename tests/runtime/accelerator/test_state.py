"""`PartialState`, `AcceleratorState` and `GradientState`."""

from __future__ import annotations

import copy
import dataclasses
import gc
import multiprocessing
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.processes.commands import run_ranks
from support.training.data_sets import MappedDataset
from torch.utils.data import DataLoader

from accel_runtime import (
    Accelerator,
    DistributedType,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    PartialState,
    ProjectConfiguration,
    broadcast_object_list,
)
from accel_runtime.accelerator.state import AcceleratorState, GradientState, is_initialized
from accel_runtime.parallel.plugins import build_plugin

ROOT = Path(__file__).parents[3]
SCRIPT = """
import torch
from accel_runtime import Accelerator, PartialState
from accel_runtime.state import AcceleratorState
state = PartialState()
facts = state.num_processes, state.distributed_type.value, state.backend, str(state.device)
open(f"{state.process_index}.txt", "w").write(repr(facts))
state.wait_for_everyone()
Accelerator()
state.destroy_process_group()
assert torch.distributed.is_initialized()  # the Accelerator uses it
AcceleratorState().destroy_process_group()
assert not torch.distributed.is_initialized()
assert AcceleratorState().process_index == state.process_index
"""


@pytest.mark.slow
def test_a_partial_state_connects_with_the_variables_of_torchrun(script, cwd, port):
    run_ranks(2, port, script(SCRIPT), cwd=cwd, ACCEL_DEVICE="cpu")
    texts = [(cwd / f"{rank}.txt").read_text() for rank in range(2)]
    assert texts == [repr((2, "MULTI_CPU", "gloo", "cpu"))] * 2


def test_a_partial_state_has_the_topology_of_its_process(ranks):
    def read_topology():
        state = PartialState(cpu=True)
        state.set_device()
        facts = (
            state.num_processes,
            state.process_index,
            state.local_process_index,
            str(state.default_device),
        )
        kind = (
            state.distributed_type,
            state.distributed_type == "MULTI_CPU",
            state.use_distributed,
            state.backend,
        )
        return facts, kind, state.initialized

    several = ranks.size > 1
    kind = DistributedType.MULTI_CPU if several else DistributedType.NO
    expected = (kind, several, several, "gloo" if several else None)
    assert ranks.run(read_topology) == [
        ((ranks.size, rank, ranks.local_rank(rank), "cpu"), expected, True) for rank in range(ranks.size)
    ]


def test_an_unknown_process_group_option_is_rejected():
    with pytest.raises(TypeError, match="backened"):
        PartialState(backened="gloo")


def test_the_state_of_an_accelerator_describes_it(ranks):
    def texts():
        accelerator = Accelerator(mixed_precision="bf16")
        state = accelerator.state
        assert isinstance(state, AcceleratorState)
        assert state.mixed_precision == "bf16"
        assert state.deepspeed_plugin is None
        assert state.process_index == accelerator.process_index
        assert accelerator.native_amp
        assert not Accelerator().native_amp
        assert not accelerator.multi_device
        return repr(state), repr(PartialState())

    for rank, (text, partial) in enumerate(ranks.run(texts)):
        assert f"Process: {rank} (on its machine: {ranks.local_rank(rank)})\nDevice: cpu" in text
        assert text == f"{partial}\nMixed precision: bf16"


def run_in_unconnected_thread(function):
    """Call a function in a new thread, which is not a rank and has no Accelerator."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_a_new_accelerator_state_equals_that_of_the_newest_accelerator(ranks):
    def states():
        Accelerator()
        accelerator = Accelerator(mixed_precision="bf16")
        state = AcceleratorState()
        assert is_initialized()
        assert AcceleratorState(mixed_precision="bf16", cpu=True).process_index == accelerator.process_index
        with pytest.raises(
            ValueError, match=r"mixed_precision='fp16'.*the Accelerator has mixed_precision='bf16'"
        ):
            AcceleratorState(mixed_precision="fp16")
        with pytest.raises(AttributeError):
            state.mixed_precision = "no"
        del accelerator
        gc.collect()
        facts = state.mixed_precision, state.num_processes, repr(AcceleratorState()) == repr(state)
        return *facts, state.fsdp_plugin, state.is_fsdp2

    assert ranks.run(states) == [("bf16", ranks.size, True, None, False)] * ranks.size


def test_an_accelerator_state_needs_an_accelerator():
    def look():
        records = [is_initialized()]
        with pytest.raises(ValueError, match=r"Create one first: accelerator = Accelerator\(\)"):
            AcceleratorState()
        PartialState()
        records.append(is_initialized())
        Accelerator()
        return [*records, is_initialized()]

    assert run_in_unconnected_thread(look) == [False, False, True]


def test_destroy_process_group_accepts_a_subgroup(pair):
    def end():
        accelerator, group = Accelerator(), dist.new_group()
        accelerator.wait_for_everyone()  # other ranks may still connect
        accelerator.state.destroy_process_group(group)
        with pytest.raises(ValueError, match=r"not registered|Group"):
            dist.get_rank(group)
        return dist.is_initialized()

    assert pair.run(end) == [True] * 2


def test_the_state_shows_whether_the_model_is_sharded(pair):
    def read_state(plugin, config):
        accelerator = Accelerator(fsdp_plugin=plugin, parallelism_config=config)
        state = AcceleratorState()
        sizes = accelerator.parallelism_config
        facts = accelerator.distributed_type, state.fsdp_plugin is not None, state.is_fsdp2
        return *facts, None if sizes is None else (sizes.total_size, sizes.tp_enabled, sizes.dp_shard_enabled)

    plugin = FullyShardedDataParallelPlugin()
    expected = DistributedType.FSDP, True, True
    assert pair.run(read_state, plugin, None) == [(*expected, None)] * 2
    assert (
        pair.run(read_state, None, ParallelismConfig(dp_shard_size="auto"))
        == [(*expected, (2, False, True))] * 2
    )
    layers = DistributedType.MULTI_CPU, False, False, (2, True, False)
    assert pair.run(read_state, None, ParallelismConfig(tp_size=2)) == [layers] * 2
    assert pair.run(read_state, None, ParallelismConfig()) == [(*layers[:3], (2, False, False))] * 2
    assert pair.run(read_state, None, None) == [(*layers[:3], None)] * 2


def test_a_single_process_with_a_sharding_plugin_has_type_fsdp(alone):
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())
    assert accelerator.distributed_type == DistributedType.FSDP
    assert accelerator.state.fsdp_plugin.fsdp_version == 2


@pytest.mark.parametrize(
    "plugin",
    [
        {},
        {"min_num_params": 10, "cpu_offload": True},
        {"auto_wrap_policy": "no_wrap", "reshard_after_forward": False, "ignored_modules": "head"},
        {"transformer_cls_names_to_wrap": ["Block", "Head"], "activation_checkpointing": True},
        {"mixed_precision_policy": {"param_dtype": "bf16", "reduce_dtype": "fp32", "output_dtype": "fp32"}},
        {"mixed_precision_policy": {"cast_forward_inputs": False, "reduce_dtype": "bf16"}},
    ],
    ids=lambda plugin: ", ".join(plugin) or "nothing",
)
def test_settings_of_sharding_survive_conversion_to_a_plugin(plugin):
    options = FullyShardedDataParallelPlugin(**plugin).fully_shard()
    converted = build_plugin(options).fully_shard()
    assert dataclasses.replace(converted, reduce_dtype="auto") == dataclasses.replace(
        options, reduce_dtype="auto"
    )
    assert {converted.reduce_dtype, options.reduce_dtype} <= {converted.reduce_dtype, "auto"}


def test_only_one_process_writes_a_model(pair):
    def writes(each):
        return Accelerator(project_config=ProjectConfiguration(save_on_each_node=each)).should_save_model

    assert pair.run(writes, False) == [True, False]
    assert pair.run(writes, True) == [True, False]


def test_step_counts_micro_batches_since_the_end_of_an_epoch():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    loader = accelerator.prepare(DataLoader(range(3)))
    records = []
    for _ in range(2):
        for _ in loader:
            with accelerator.accumulate():
                records.append((accelerator.step, accelerator.sync_gradients))
    assert records == [(1, False), (2, True), (0, True)] * 2
    accelerator.step = 3
    with accelerator.accumulate():
        assert (accelerator.step, accelerator.sync_gradients) == (4, True)
    with pytest.raises(ValueError, match="Invalid step -1: expected a whole number of at least 0"):
        accelerator.step = -1


# Copying and pickling --------------------------------------------------------------------


def test_copying_an_accelerator_returns_it():
    accelerator = Accelerator()
    assert copy.deepcopy({"a": accelerator})["a"] is accelerator
    assert copy.copy(accelerator) is accelerator


def test_a_pickled_accelerator_is_loaded_as_the_matching_one_on_every_rank(several):
    def send():
        first, second = Accelerator(), Accelerator(mixed_precision="bf16")
        first.prepare(torch.nn.Linear(1, 1), DataLoader(range(3)))
        loaded = [pickle.loads(pickle.dumps(accelerator)) for accelerator in (first, second)]  # noqa: S301 - our own
        sent = broadcast_object_list([first, second, first.state, PartialState()])
        indices = sent[2].process_index, sent[3].process_index
        return loaded == [first, second], sent[:2] == [first, second], indices == (first.process_index,) * 2

    assert several.run(send) == [(True, True, True)] * several.size


def test_an_accelerator_unpickled_outside_a_rank_has_properties_and_rejects_calls(pair):
    def send():
        accelerator = Accelerator(mixed_precision="bf16")
        return pickle.dumps((accelerator, accelerator.state, PartialState()))

    def receive():
        accelerator, state, partial = pickle.loads(sent)  # noqa: S301 - our own
        facts = accelerator.process_index, accelerator.num_processes, str(accelerator.device)
        assert (*facts, accelerator.mixed_precision) == (1, 2, "cpu", "bf16")
        assert state.mixed_precision == accelerator.state.mixed_precision == "bf16"
        assert partial.process_index == 1
        assert accelerator.on_main_process(lambda: 1)() is None
        assert not hasattr(accelerator, "no_such_name")
        calls = {
            "gather": lambda: accelerator.gather(torch.ones(1)),
            "prepare": lambda: accelerator.prepare(torch.nn.Linear(1, 1)),
            "backward": lambda: accelerator.backward(torch.ones(1)),
            "save_state": lambda: accelerator.save_state("state"),
            "project_dir": lambda: accelerator.project_dir,
            "barrier": state.wait_for_everyone,
        }
        for name, call in calls.items():
            with pytest.raises(RuntimeError, match="was pickled on rank 1, and this process is not a rank"):
                pytest.fail(f"{name} gave {call()}")
        pickled = pickle.dumps(accelerator)
        assert pickle.loads(pickled).process_index == 1  # noqa: S301
        here = Accelerator()
        return pickle.loads(pickled) is here  # noqa: S301

    sent = pair.run(send)[1]
    assert run_in_unconnected_thread(receive)


@pytest.mark.parametrize("size", [2, "apart"])
def test_a_forked_worker_rejects_collectives_and_its_rank_continues(clusters, size):
    def call():
        accelerator = Accelerator()
        functions = [
            lambda: accelerator.gather(torch.ones(1)),
            lambda: accelerator.reduce(torch.ones(1)),
            lambda: broadcast_object_list([1]),
            accelerator.wait_for_everyone,
            lambda: Accelerator().gather(torch.ones(1)),
        ]

        def read_error(index):
            with pytest.raises(RuntimeError) as error:
                functions[index]()
            return str(error.value)

        calls = MappedDataset(len(functions), read_error)
        texts = list(DataLoader(calls, None, num_workers=1, multiprocessing_context="fork"))
        return accelerator.reduce(torch.ones(1)).item(), texts

    ranks = clusters[size]
    for rank, (total, texts) in enumerate(ranks.run(call)):
        assert total == ranks.size
        assert len(texts) == 5
        for text in texts:
            assert f"This object cannot be used here: this process was forked from rank {rank}, and" in text
            assert "Call it on the rank itself" in text


@pytest.fixture
def rank_variables(monkeypatch):
    """The environment variables of a rank, whose address no process listens at."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name, value in zip(names, (1, 1, 2, 2, "127.0.0.1", 1), strict=True):
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize("make", [Accelerator, PartialState])
def test_an_unguarded_script_in_a_spawned_worker_is_rejected(rank_variables, monkeypatch, make):
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(
        RuntimeError, match=r"spawned by rank 1.*Guard the script with if __name__ == '__main__'"
    ):
        run_in_unconnected_thread(make)


def test_a_spawned_worker_does_not_connect_as_its_rank(rank_variables, monkeypatch):
    monkeypatch.setattr("accel_runtime.backends.distributed.get_worker_info", lambda: "a worker")
    with pytest.raises(
        RuntimeError, match="cannot be used here: this process was spawned by rank 1, and this"
    ):
        run_in_unconnected_thread(PartialState)


UNGUARDED = """
from accel_runtime import Accelerator
from torch.utils.data import DataLoader, Dataset
Accelerator()
list(DataLoader(range(2), num_workers=1, multiprocessing_context="spawn"))
"""


@pytest.mark.full
def test_an_unguarded_script_with_spawned_workers_ends_with_an_explanation(script, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = subprocess.run([*command, script(UNGUARDED)], capture_output=True, text=True, check=False)
    assert process.returncode == 1
    assert "Guard the script with if __name__ == '__main__'" in process.stderr


def test_pickling_a_prepared_loader_is_rejected_with_an_alternative(alone):
    loader = Accelerator().prepare(DataLoader(range(3)))
    with pytest.raises(TypeError, match=r"such as a prepared DataLoader\. Pickle its dataset"):
        pickle.dumps(loader)


def test_pickling_an_accelerator_is_deterministic():
    accelerator = Accelerator()
    assert b"0x" not in pickle.dumps(accelerator)
    assert pickle.dumps(accelerator) == pickle.dumps(accelerator)


@pytest.mark.parametrize(("length", "remainders"), [(13, {1: 0, 2: 5, 3: 1}), (12, {1: 0, 2: 4, 3: 0})])
def test_the_gradient_state_changes_during_an_epoch(ranks, length, remainders):
    def read_epoch(length):
        accelerator = Accelerator(gradient_accumulation_steps=2)
        loader = accelerator.prepare(DataLoader(torch.arange(length), batch_size=4))
        state = accelerator.gradient_state
        assert isinstance(state, GradientState)
        records = [(state.in_dataloader, state.end_of_dataloader, state.remainder, state.num_steps)]
        for _ in loader:
            with accelerator.accumulate():
                assert state.sync_gradients == accelerator.sync_gradients
                records.append(
                    (state.in_dataloader, state.end_of_dataloader, state.remainder, state.num_steps)
                )
        assert "sync_gradients: True" in repr(state)
        return [*records, (state.in_dataloader, state.end_of_dataloader, state.remainder, state.num_steps)]

    steps = -(-length // (4 * ranks.size))
    outside = (False, False, -1, 2)
    inside = [(True, False, -1, 2)] * (steps - 1) + [(True, True, remainders[ranks.size], 2)]
    assert ranks.run(read_epoch, length) == [[outside, *inside, outside]] * ranks.size


def test_a_new_gradient_state_equals_that_of_the_newest_accelerator(alone):
    def look():
        state = GradientState()
        facts = [(state.sync_gradients, state.num_steps, state.in_dataloader, state.remainder)]
        accelerator = Accelerator(gradient_accumulation_steps=2)
        loader = accelerator.prepare(DataLoader(range(2)))
        for _ in loader:
            with accelerator.accumulate():
                new_state = GradientState()
                assert repr(new_state) == repr(state) == repr(accelerator.gradient_state)
                facts.append(
                    (
                        new_state.sync_gradients,
                        new_state.num_steps,
                        new_state.in_dataloader,
                        new_state.end_of_dataloader,
                    )
                )
        Accelerator(gradient_accumulation_steps=3)
        return [*facts, state.num_steps]

    before, inside = (True, 1, False, -1), [(False, 2, True, False), (True, 2, True, True)]
    assert run_in_unconnected_thread(look) == [before, *inside, 2]


def test_a_gradient_state_is_unpickled_as_that_of_its_accelerator_or_as_values(alone):
    accelerator = Accelerator(gradient_accumulation_steps=3)
    Accelerator()
    for _ in accelerator.prepare(DataLoader(range(2))):
        with accelerator.accumulate():
            sent = pickle.dumps(accelerator.gradient_state)
            state = accelerator.gradient_state
            for here in (pickle.loads(sent), copy.deepcopy(state)):  # noqa: S301 - our own
                assert repr(here) == repr(state)
            break

    def receive():
        state = pickle.loads(sent)  # noqa: S301
        loaded = pickle.loads(pickle.dumps(state))  # noqa: S301
        assert repr(loaded) == repr(state)
        return state.num_steps, state.sync_gradients, state.in_dataloader, state.remainder

    assert run_in_unconnected_thread(receive) == (3, False, False, -1)
    assert repr(pickle.loads(pickle.dumps(GradientState()))) == repr(GradientState())  # noqa: S301
