"""Two ranks: on one GPU over gloo, and on two GPUs over NCCL if there are two."""

from __future__ import annotations

import os

import pytest
import torch
from runtime.backends.test_contract import *  # noqa: F403 - the contract of every backend, kept over CUDA
from support.cases.gpu_rehearsal import REHEARSAL

pytestmark = [pytest.mark.gpu, pytest.mark.feature("Contract of a backend")]

TWO = pytest.mark.feature("Two processes")


def trained(steps, precision, sharded):
    """Train on batches of unequal size; return losses, parameters and the evaluated samples."""
    import warnings

    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from accel_runtime import Accelerator, FullyShardedDataParallelPlugin

    warnings.simplefilter("default")
    torch.manual_seed(21)
    plugin = FullyShardedDataParallelPlugin() if sharded else None
    accelerator = Accelerator(mixed_precision=precision, fsdp_plugin=plugin)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2))
    x = torch.randn(4 * steps, 8, generator=torch.Generator().manual_seed(22))
    size = 4 // accelerator.num_processes
    model, optimizer, loader, evaluation = accelerator.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        DataLoader(TensorDataset(x), batch_size=size, shuffle=True),
        DataLoader(TensorDataset(torch.arange(11)), batch_size=3),
    )
    losses = []
    for (batch,) in loader:
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    gathered = torch.cat([accelerator.gather_for_metrics(batch) for (batch,) in evaluation]).tolist()
    state = {name: value.cpu() for name, value in accelerator.get_state_dict(model).items()}
    return losses, state, gathered, str(accelerator.device)


@TWO
@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_two_processes_train_as_one_and_evaluate_every_sample_once(ranks, device, precision, sharded):
    if sharded and ranks.carrier == "gloo" and not REHEARSAL:
        pytest.skip("torch cannot gather sharded tensors over gloo on a GPU")
    losses, state, samples, _ = trained(6, precision, sharded=False)
    assert samples == list(range(11))
    bound = 1e-5 if precision == "no" else 3e-2
    for rank, (rank_losses, other, gathered, rank_device) in enumerate(
        ranks.run(trained, 6, precision, sharded)
    ):
        assert rank_device == ranks.device(rank)
        assert gathered == samples, f"rank {rank} evaluated {gathered}"
        worst = max(abs(a - b) / a for a, b in zip(losses, rank_losses, strict=True))
        assert worst < bound, f"rank {rank}: a loss is {worst:.1e} off; the bound is {bound:.0e}"
        names = list(state) if not sharded or rank == 0 else []
        error = max(((state[n] - other[n]).abs().max().item() for n in names), default=0.0)
        assert error < (1e-4 if precision == "no" else 2e-2), f"rank {rank}: a parameter is {error:.1e} off"


def sharding_refused():
    """Return the error of an Accelerator that shards models."""
    from accel_runtime import Accelerator, FullyShardedDataParallelPlugin

    try:
        Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())
    except RuntimeError as error:
        return str(error)
    return "connected"


@TWO
def test_sharding_over_gloo_on_a_gpu_is_refused(cuda, ranks):
    expected = "Cannot shard models over gloo on cuda" if ranks.carrier == "gloo" else "connected"
    assert all(answer.startswith(expected) for answer in ranks.run(sharding_refused))


def saved_and_loaded(folder):
    """Return how the state of each rank differs after an asynchronous save and a load."""
    import warnings

    import torch
    from torch import nn

    from accel_runtime import Accelerator

    warnings.simplefilter("default")
    accelerator = Accelerator()
    model = nn.Linear(64, 64)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))

    def step():
        accelerator.backward(model(torch.ones(2, 64, device=accelerator.device)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    step()
    torch.manual_seed(30 + accelerator.process_index)  # the ranks draw different numbers
    torch.rand(3, device=accelerator.device)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    accelerator.save_state(folder, async_save=True)
    random_numbers = torch.rand(8, device=accelerator.device)
    step()
    accelerator.wait_for_checkpoint()
    accelerator.load_state(folder)
    differences = [
        name for name, value in model.state_dict().items() if not torch.equal(value, expected[name])
    ]
    return (
        differences,
        torch.equal(torch.rand(8, device=accelerator.device), random_numbers),
        random_numbers.tolist(),
    )


@TWO
def test_each_rank_loads_its_own_random_state_and_the_saved_state(ranks, tmp_path):
    (differences, equal, first), (other, same, second) = ranks.run(saved_and_loaded, str(tmp_path / "saved"))
    assert (differences, other) == ([], [])
    assert (equal, same) == (True, True)
    assert first != second


def overflowed():
    """Return on which ranks an overflow of the second skipped the step, and whether parameters changed."""
    import warnings

    import torch
    from torch import nn

    from accel_runtime import Accelerator

    warnings.simplefilter("default")
    accelerator = Accelerator(mixed_precision="fp16")
    model = nn.Linear(4, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = [p.detach().clone() for p in model.parameters()]
    factor = float("inf") if accelerator.process_index else 1.0
    accelerator.backward(model(torch.ones(2, 4, device=accelerator.device)).square().mean() * factor)
    optimizer.step()
    changed = not all(torch.equal(a, p) for a, p in zip(before, model.parameters(), strict=True))
    return accelerator.optimizer_step_was_skipped, changed


@TWO
def test_an_overflow_on_one_rank_skips_the_step_on_both(ranks):
    assert ranks.run(overflowed) == [(True, False)] * 2


def out_of_memory(limit):
    """Return the batch sizes that a rank tries if the first one runs out of memory above a limit."""
    from accel_runtime import Accelerator, find_executable_batch_size

    accelerator = Accelerator()
    tried = []

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size):
        tried.append(batch_size)
        if accelerator.process_index == 0 and batch_size > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return batch_size

    return train(), tried


@TWO
def test_both_ranks_use_the_batch_size_that_fits_on_both(ranks):
    assert ranks.run(out_of_memory, 6) == [(6, [8, 7, 6])] * 2


def test_cuda_works_in_ranks_that_were_forked_before_it_started(ranks):
    """The interpreter that forks ranks has imported torch and accel."""

    def used():
        import torch

        from accel_runtime import Accelerator

        device = Accelerator().device
        return (
            torch.ones(3, device=device).sum().item(),
            os.environ["LOCAL_RANK"],
            torch.cuda._is_in_bad_fork(),
        )

    assert ranks.run(used) == [(3.0, "0", False), (3.0, "1", False)]
