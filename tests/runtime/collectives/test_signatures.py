"""Signatures of collective calls: arguments that differ between ranks are named, and no new call can leave them out."""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from support.sources.syntax import parse

from accel_runtime import Accelerator
from accel_runtime.accelerate import operations
from accel_runtime.backends import tensors
from accel_runtime.collectives.handshake import MismatchError
from accel_runtime.collectives.signatures import add_arguments, collective, get_signature
from accel_runtime.data import metrics

RUNTIME = Path(inspect.getfile(Accelerator)).parents[1]

PAIRS = {
    "dim": (lambda a, _: a.pad_across_processes(torch.ones(2, 2), dim=1), lambda a, _: a.pad_across_processes(torch.ones(2, 2)),
            "pad_across_processes(dim=1)", "pad_across_processes"),
    "pad_index": (lambda a, _: a.pad_across_processes(torch.ones(1, 2), pad_index=1),
                  lambda a, _: a.pad_across_processes(torch.ones(2, 2), 0, 2),
                  "pad_across_processes(pad_index=1)", "pad_across_processes(pad_index=2)"),
    "pad_first": (lambda a, _: a.pad_across_processes(torch.ones(1, 2), pad_first=True),
                  lambda a, _: a.pad_across_processes(torch.ones(2, 2)),
                  "pad_across_processes(pad_first=True)", "pad_across_processes"),
    "reduction": (lambda a, _: a.reduce(torch.ones(1)), lambda a, _: a.reduce(torch.ones(1), "mean"),
                  "reduce(reduction='sum')", "reduce(reduction='mean')"),
    "scale": (lambda a, _: a.reduce(torch.ones(1)), lambda a, _: a.reduce(torch.ones(1), scale=2.0),
              "reduce(reduction='sum')", "reduce(reduction='sum', scale=2.0)"),
    "from_process": (lambda _a, _: operations.broadcast(torch.ones(1)), lambda _a, _: operations.broadcast(torch.ones(1), 1),
                     "broadcast", "broadcast(from_process=1)"),
    "from_process of objects": (lambda _a, _: operations.broadcast_object_list([1]),
                                lambda _a, _: operations.broadcast_object_list([1], 1),
                                "broadcast_object_list of 1", "broadcast_object_list(from_process=1) of 1"),
    "use_gather_object": (lambda a, _: a.gather_for_metrics({"a": 1}), lambda a, _: a.gather_for_metrics({"a": 1}, True),
                          "gather_for_metrics of objects", "gather_for_metrics(use_gather_object=True) of objects"),
    "rng_type": (lambda _a, _: operations.synchronize_rng_state("torch"),
                 lambda _a, _: operations.synchronize_rng_state("generator", torch.Generator()),
                 "broadcast_object of random states of torch from rank 0 in synchronize_rng_state(rng_type='torch')",
                 "broadcast_object of random states of generator from rank 0 in synchronize_rng_state(rng_type='generator')"),
    "trigger": (lambda a, _: a.check_trigger(), lambda a, _: a.gather(torch.ones(1)), "check_trigger", "gather"),
    "async_save": (lambda a, folder: a.save_state(folder, async_save=True), lambda a, folder: a.save_state(folder),
                   "save_state with async_save=True", "save_state with async_save=False"),
    "strict": (lambda a, folder: a.load_state(folder, strict=False), lambda a, folder: a.load_state(folder),
               "load_state(strict=False) with position=epoch_start", "load_state with position=epoch_start"),
    "resume": (lambda a, folder: a.load_state(folder), lambda a, folder: a.resume(folder),
               "load_state with position=epoch_start", "resume"),
    "max_shard_size": (lambda a, folder: a.save_model(torch.nn.Linear(1, 1), folder),
                       lambda a, folder: a.save_model(torch.nn.Linear(1, 1), folder, "1GB"),
                       "save_model", "save_model(max_shard_size='1GB')"),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_arguments_that_differ_between_ranks_are_named_on_all_of_them_with_the_lines(pair, name, tmp_path):
    def call_differently(folder):
        accelerator = Accelerator(cpu=True)
        first, second = PAIRS[name][:2]
        with pytest.raises(MismatchError) as caught:
            (second if accelerator.process_index else first)(accelerator, folder)
        return str(caught.value), accelerator.gather(torch.ones(1)).tolist()

    for message, later in pair.run(call_differently, tmp_path / "folder"):
        lines = re.sub(r"at test_signatures\.py:\d+ \(\S+\).*", "at LINE", message).splitlines()
        assert lines[1:] == [f"  rank {rank}: {text} at LINE" for rank, text in enumerate(PAIRS[name][2:])]
        assert later == [1.0, 1.0]


def test_a_parameter_is_compared_unless_it_is_listed():
    @collective("data")
    def send(data, how, *, times=1):
        return add_arguments("send of data"), add_arguments("another exchange"), data, how, times

    assert send([1], "twice", times=2)[:2] == (
        "send(how='twice', times=2) of data",
        "another exchange in send(how='twice', times=2)",
    )
    assert send([1], how=None)[0] == "send(how=None) of data"
    assert add_arguments("send") == "send"
    with pytest.raises(TypeError, match="no parameter other"):
        collective("other")(lambda data: data)


# Methods of the Accelerator that exchange nothing, or whose exchanges compare what matters: by reason.
OF_ANOTHER_FUNCTION = {"gather", "pad_across_processes", "reduce"}
BARRIERS = {"profile", "wait_for_everyone"}
TURNS_IN_THE_STORE = {"loading", "local_main_process_first", "main_process_first"}
COMPARED_OBJECTS = {"prepare_data_loader", "prepare_model", "prepare_optimizer", "prepare_scheduler"}
TRAINING_STEPS = {
    "accumulate", "backward", "clip_grad_norm_", "clip_grad_value_", "context_parallel", "forward_backward",
    "gather_sequence", "join_uneven_inputs", "maybe_context_parallel", "no_sync", "trigger_sync_in_backward", "unscale_gradients",
}  # fmt: skip
LOCAL = {
    "autocast", "check_replay", "clear", "describe", "end_training", "free_memory", "get_tracker", "init_trackers", "load", "log",
    "on_last_process", "on_local_main_process", "on_local_process", "on_main_process", "on_process", "print",
    "register_for_checkpointing", "register_load_state_pre_hook", "register_save_state_pre_hook", "save", "set_trigger",
    "skip_first_batches", "split_between_processes", "unwrap_model", "verify_device_map", "wait_for_checkpoint",
}  # fmt: skip


def test_every_public_method_is_marked_as_collective_or_listed_as_one_that_compares_nothing():
    methods = {
        name
        for name, value in inspect.getmembers(Accelerator)
        if not name.startswith("_") and inspect.isfunction(value)
    }
    listed = OF_ANOTHER_FUNCTION | BARRIERS | TURNS_IN_THE_STORE | COMPARED_OBJECTS | TRAINING_STEPS | LOCAL
    marked = {name for name in methods if get_signature(getattr(Accelerator, name))}
    assert marked == methods - listed
    assert listed <= methods
    assert all(get_signature(getattr(tensors, name)) for name in OF_ANOTHER_FUNCTION)
    assert all(
        get_signature(function)
        for function in (tensors.broadcast, metrics.gather_object, metrics.broadcast_object_list)
    )


@cache
def list_calls():
    """List the calls in the runtime, each with the functions around it, as `file:function`."""
    calls = []

    def visit(node, file, functions):
        if isinstance(node, ast.Call):
            calls.append((node.func, functions))
        if isinstance(node, ast.FunctionDef):
            functions = (*functions, f"{file}:{node.name}")
        for child in ast.iter_child_nodes(node):
            visit(child, file, functions)

    for path in RUNTIME.rglob("*.py"):
        visit(parse(path), path.relative_to(RUNTIME), ())
    return calls


def find_calls(*names):
    """List the functions of the runtime that call a method of one of these names, as `file:function`."""
    return {
        function
        for called, functions in list_calls()
        if isinstance(called, ast.Attribute) and called.attr in names
        for function in functions
    }


def test_bytes_pass_between_ranks_only_through_the_handshake():
    handshake = "collectives/handshake.py"
    assert find_calls("all_gather_slots", "all_reduce_min") == {
        f"{handshake}:exchange",
        f"{handshake}:_is_identical",
    }
    assert {name for name in find_calls("transfer") if name.startswith("collectives")} == {
        f"{handshake}:_transfer"
    }
    # A call is described by one function, which adds the arguments; the comparison itself is the exception.
    built = {
        function
        for called, functions in list_calls()
        if isinstance(called, ast.Name) and called.id == "CollectiveCall"
        for function in functions
    }
    assert built == {f"{handshake}:call_at_site", f"{handshake}:_gather_text"}


BACKENDS = (
    *(f"backends/{name}" for name in ("base.py", "single.py", "distributed.py", "rng.py")),
    "collectives/transport.py", "parallel/averaging.py", "parallel/fully_shard.py", "extensions/xla/", "extensions/deepspeed/",
)  # fmt: skip


def test_tensors_pass_between_ranks_only_after_a_handshake_or_in_a_training_step():
    calls = {
        name
        for name in find_calls("all_gather", "all_reduce", "all_reduce_async", "all_gather_into_tensor", "reduce_scatter_tensor")
        if not name.startswith(BACKENDS)
    }  # fmt: skip
    after_a_handshake = {
        f"backends/tensors.py:{name}" for name in ("_reduce", "_gather_equal", "_gather_ragged")
    }
    training_steps = {
        "parallel/grad_norm.py:_combine_over_ranks",
        "parallel/grad_norm.py:unscale_shards",
        "parallel/tensor_parallel.py:check_replicated_gradients",
        "training/gradients.py:backward",
    }
    objects = {"collectives/handshake.py:broadcast"}  # in the handshake itself
    measured = {"extensions/node_check/measure.py:_time_collectives"}  # in processes of their own
    assert calls == after_a_handshake | training_steps | objects | measured
