"""Releasing memory, and `find_executable_batch_size`."""

from __future__ import annotations

import contextlib
import gc
import io
import re
import weakref

import pytest
import torch
from support.processes.ranks import RanksFailedError
from torch import nn
from torch.utils.data import DataLoader

from accel_runtime import Accelerator, find_executable_batch_size, release_memory
from accel_runtime.training.memory import clear_device_cache, is_out_of_memory


@pytest.fixture(autouse=True, scope="module")
def _small_heap():
    """Exclude existing objects from garbage collection in this module, for speed: there are a million."""
    gc.freeze()
    yield
    gc.unfreeze()


def build_training(limit):
    """Return a training that runs out of memory above a batch size of `limit`, and the sizes it tries."""
    tried = []

    def train(batch_size, *args, **options):
        tried.append(batch_size)
        if batch_size > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return batch_size, args, options

    return train, tried


def test_the_batch_size_shrinks_by_a_tenth_until_it_fits_with_one_message_each(capsys):
    train, tried = build_training(90)
    assert find_executable_batch_size(train)("a", b=1) == (82, ("a",), {"b": 1})
    assert tried == [128, 115, 103, 92, 82]
    messages = capsys.readouterr().err.splitlines()
    assert messages[0] == "find_executable_batch_size: out of memory with batch size 128; trying 115"
    assert len(messages) == len(tried) - 1


def test_the_decorator_accepts_both_arguments():
    sizes = iter([64, 32, 16])

    @find_executable_batch_size(starting_batch_size=100, reduce_batch_size_fn=lambda: next(sizes))
    def train(batch_size):
        """Trains."""
        return batch_size if batch_size < 40 else build_training(0)[0](batch_size)

    assert train.__doc__ == "Trains."
    assert train() == 32
    assert train() == 32, "the size that was found is where the next call begins"


def test_an_error_is_raised_if_no_batch_size_fits():
    train, tried = build_training(0)
    with pytest.raises(RuntimeError, match="No executable batch size found: out of memory with 1"):
        find_executable_batch_size(train, starting_batch_size=3)()
    assert tried == [3, 2, 1]


@pytest.mark.parametrize("following", [8, 9, 7.5, None])
def test_a_reduce_function_that_does_not_reduce_the_size_is_rejected(following):
    train, _ = build_training(1)
    with pytest.raises(ValueError, match="after 8: reduce_batch_size_fn must return a smaller whole number"):
        find_executable_batch_size(train, 8, lambda: following)()


def test_another_exception_is_raised_unchanged():
    @find_executable_batch_size
    def train(batch_size):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        train()


def test_passing_the_batch_size_in_the_call_is_rejected():
    @find_executable_batch_size
    def train(batch_size, model):
        return batch_size

    with pytest.raises(TypeError, match="passes the batch size to train as its first argument"):
        train(128, "model")
    assert train("model") == 128


def test_a_starting_batch_size_below_one_is_rejected():
    with pytest.raises(ValueError, match="expected at least 1"):
        find_executable_batch_size(print, 0)


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (MemoryError(), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."), True),
        (RuntimeError("shapes differ"), False),
        (ValueError("out of memory"), False),
    ],
    ids=str,
)
def test_is_out_of_memory_recognizes_errors_of_allocators(error, full):
    assert is_out_of_memory(error) is full


def test_all_ranks_retry_after_one_runs_out_of_memory(several):
    def find_batch_size(culprit):
        accelerator = Accelerator()
        tried = []

        @find_executable_batch_size(starting_batch_size=10)
        def train(batch_size):
            tried.append(batch_size)
            if accelerator.process_index == culprit and batch_size > 8:
                raise torch.OutOfMemoryError("CUDA out of memory.\nlong story")
            return accelerator.gather(torch.tensor([batch_size])).tolist() if batch_size <= 8 else None

        with contextlib.redirect_stderr(io.StringIO()) as stderr:
            result = train()
        return result, tried, stderr.getvalue().splitlines()

    for culprit in range(several.size):
        answers = several.run(find_batch_size, culprit)
        assert [answer[:2] for answer in answers] == [([8] * several.size, [10, 9, 8])] * several.size
        retry = f"find_executable_batch_size: out of memory on rank {culprit} with batch size 10; trying 9"
        assert [retry in lines for _, _, lines in answers] == [True] + [False] * (several.size - 1)
        assert [len(lines) for _, _, lines in answers] == [2] + [0] * (several.size - 1)


@pytest.mark.parametrize("waits", ["collective", "backward"])
def test_a_rank_that_waits_for_one_out_of_memory_is_named(several, waits):
    def find_batch_size(waits):
        from accel_runtime.backends import base

        base.CHECK_INTERVAL_S = 0.5
        accelerator = Accelerator()
        model = accelerator.prepare(torch.nn.Linear(1, 1))
        accelerator.wait_for_everyone()

        @find_executable_batch_size(starting_batch_size=10)
        def train(batch_size):
            loss = model(torch.ones(batch_size, 1)).sum()
            if accelerator.is_last_process:
                raise torch.OutOfMemoryError("full")
            if waits == "backward":
                accelerator.backward(loss)
            accelerator.wait_for_everyone()

        with contextlib.redirect_stderr(io.StringIO()):
            train()

    with pytest.raises(RanksFailedError) as caught:
        several.run_to_first_error(find_batch_size, waits)
    last = several.size - 1
    where = "is in backward()" if waits == "backward" else "waits in wait_for_everyone"
    assert re.search(
        rf"rank {last} of {several.size}: (?s:.*)RuntimeError: Out of memory with batch size 10 on rank {last} \(full\)\. No "
        rf"smaller size can be tried, since another rank waits for this one: rank 0 {re.escape(where)} at test_memory\.py:\d+ "
        r"\(train\) after .*\. Choose a starting_batch_size that fits on all ranks\.",
        str(caught.value),
    )


def test_an_exception_of_one_rank_is_raised_while_another_runs_out_of_memory(several):
    def find_batch_size():
        accelerator = Accelerator()

        @find_executable_batch_size(starting_batch_size=10)
        def train(batch_size):
            if accelerator.is_main_process:
                raise torch.OutOfMemoryError("full")
            if accelerator.is_last_process:
                raise ZeroDivisionError("mine")
            return batch_size

        with contextlib.redirect_stderr(io.StringIO()):
            try:
                return train()
            except (RuntimeError, ZeroDivisionError) as error:
                return f"{type(error).__name__}: {error}"

    first, *between, last = several.run(find_batch_size)
    assert first.startswith(
        "RuntimeError: Out of memory with batch size 10 (full). No smaller size was tried"
    )
    assert first.endswith(f"rank {several.size - 1}: ZeroDivisionError: mine")
    assert last == "ZeroDivisionError: mine"
    assert between == [10] * (several.size - 2)


def test_release_memory_returns_none_and_frees_the_objects():
    thing = nn.Linear(2, 2)
    gone = weakref.ref(thing)
    thing, other = release_memory(thing, None)
    clear_device_cache(garbage_collection=True)
    assert (thing, other, gone()) == (None, None, None)


@pytest.mark.parametrize("name", ["free_memory", "clear"])
def test_free_memory_releases_prepared_objects_and_starts_a_new_cycle(ranks, name):
    def free_objects(name):
        accelerator = Accelerator(gradient_accumulation_steps=2)
        model = nn.Linear(2, 2)
        gone = weakref.ref(model)
        model, optimizer, loader = accelerator.prepare(
            model, torch.optim.SGD(model.parameters()), DataLoader(torch.arange(4.0))
        )
        with accelerator.accumulate(model):
            pass
        model, optimizer, loader = getattr(accelerator, name)(model, optimizer, loader)
        release_memory()
        assert (model, optimizer, loader, gone()) == (None, None, None, None)
        with accelerator.accumulate():
            return accelerator.sync_gradients

    assert ranks.run(free_objects, name) == [False] * ranks.size


def test_objects_prepared_after_free_memory_load_a_checkpoint_of_those_before(tmp_path):
    accelerator = Accelerator()

    def prepare():
        model = nn.Linear(2, 2)
        return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    model, _ = prepare()
    accelerator.backward(model(torch.ones(1, 2)).sum())
    accelerator.save_state(tmp_path / "state")
    accelerator.free_memory()
    restored, _ = prepare()
    accelerator.load_state(tmp_path / "state")
    assert torch.equal(restored.weight, model.weight)
    assert torch.equal(restored.weight.grad, model.weight.grad)
