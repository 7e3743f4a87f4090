"""The device of each process, and how batches are copied to it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_runtime import Accelerator, DataLoaderConfiguration
from accel_runtime.backends.rng import set_seed
from accel_runtime.environment.topology import Topology
from accel_runtime.utils import send_to_device

pytestmark = pytest.mark.gpu

PLACES = "Device placement"
COPIES = "Batches from pinned memory"


def numbers(count=64, width=4096):
    """Return samples of different values."""
    return torch.randn(count, width, generator=torch.Generator().manual_seed(7))


@pytest.mark.feature(PLACES)
def test_models_batches_gradients_and_optimizer_states_are_on_the_device(device):
    accelerator = Accelerator()
    assert accelerator.device == device
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters()), DataLoader(numbers(10, 4), batch_size=4)
    )
    for batch in loader:
        assert batch.device == device
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
    parts = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
    parts += [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    assert {part.device for part in parts} == {device}


@pytest.mark.feature(PLACES)
def test_a_rank_uses_the_gpu_of_its_local_rank_and_additional_ranks_share(cuda):
    from accel_runtime.backends import _select_device

    count = cuda.device_count()
    for local in range(count + 1):
        topology = Topology(local, count + 1, local, count + 1, launched=True)
        assert _select_device("auto", topology, "gloo") == torch.device("cuda", local % count)
        assert cuda.current_device() == local % count
    cuda.set_device(0)
    assert _select_device("auto", Topology(), "auto") == torch.device("cuda", 0)


@pytest.mark.gpu(2)
@pytest.mark.feature(PLACES)
def test_a_script_without_a_launcher_keeps_its_current_gpu(cuda):
    cuda.set_device(1)
    try:
        accelerator = Accelerator()
        model = accelerator.prepare(nn.Linear(2, 2))
        assert accelerator.device == model.weight.device == torch.device("cuda", 1)
    finally:
        cuda.set_device(0)


def refused():
    """Return the error of an Accelerator on a rank that shares its GPU."""
    try:
        Accelerator()
    except RuntimeError as error:
        return str(error)
    return "connected"


@pytest.mark.feature(PLACES)
def test_ranks_that_share_a_gpu_over_nccl_are_named_in_the_error(sharing):
    answers = sharing.run(refused)
    assert all("over nccl: some use the same GPU (ranks 0, 1 on" in answer for answer in answers), answers


@pytest.mark.feature(PLACES)
def test_nested_batches_are_moved_and_other_values_are_kept(device):
    sent = send_to_device(
        {"x": torch.arange(3), "text": ["a"], "pair": (torch.ones(2), 1)}, device, non_blocking=True
    )
    assert sent["x"].device == sent["pair"][0].device == device
    assert sent["x"].tolist() == [0, 1, 2]
    assert (sent["text"], sent["pair"][1]) == (["a"], 1)


@pytest.mark.feature("Random numbers of the GPU")
def test_a_seed_determines_the_random_numbers_of_the_device(device):
    draws = []
    for _ in range(2):
        set_seed(3)
        draws.append(torch.rand(1000, device=device))
    assert torch.equal(*draws)
    assert not torch.equal(draws[0], torch.rand(1000, device=device))


@pytest.mark.feature("Random numbers of the GPU")
def test_ranks_load_the_gpu_generator_state_of_the_first_rank(cuda):
    accelerator = Accelerator(rng_types=["torch", "cuda"])
    loader = accelerator.prepare(DataLoader(numbers(8, 4), batch_size=4))
    before = cuda.get_rng_state()
    assert len(list(loader)) == 2
    assert torch.equal(cuda.get_rng_state(), before), "one process takes over its own state"


@pytest.mark.feature(COPIES)
@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_correct_while_copies_wait_behind_a_busy_stream(device, busy, pinned, workers):
    """The memory of a freed batch must not be reused before it was copied."""
    data = numbers()
    loader = DataLoader(TensorDataset(data), batch_size=2, pin_memory=pinned, num_workers=workers)
    prepared = Accelerator().prepare(loader)
    batches = []
    for epoch in range(2):
        for number, (batch,) in enumerate(prepared):
            if number == 0:
                busy(0.5)
            batches.append(batch * 1)
        actual = torch.cat(batches[-32:]).cpu()
        wrong_rows = (actual != data).any(1).nonzero().flatten().tolist()
        assert not wrong_rows, f"epoch {epoch}: samples {wrong_rows} of 64 are not those of the dataset"


@pytest.mark.feature(COPIES)
@pytest.mark.parametrize(
    "options", [{"pin_memory": True}, {"pin_memory": True, "num_workers": 2}], ids=["here", "workers"]
)
def test_the_script_does_not_wait_for_the_copy_of_a_pinned_batch(device, busy, cuda, options):
    prepared = Accelerator().prepare(DataLoader(TensorDataset(numbers(12)), batch_size=2, **options))
    waits = []
    for number, (batch,) in enumerate(prepared):
        if number > 1:  # the first starts the workers
            waits.append(cuda.current_stream().query())
        busy(0.4)
        batch.mul_(2)
    assert waits == [False] * 4, f"the stream was idle when a batch was handed out: {waits}"


@pytest.mark.feature(COPIES)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_pinned_batch_is_copied_while_the_previous_computation_runs(busy, cuda, workers):
    loader = DataLoader(TensorDataset(numbers(12)), batch_size=2, pin_memory=True, num_workers=workers)
    prepared = Accelerator().prepare(loader)
    overlaps = []
    for number, (batch,) in enumerate(prepared):
        if number > 1:  # the first starts the workers
            prepared._backend.runtime.copy_stream.synchronize()
            overlaps.append(not cuda.current_stream().query())
        busy(0.4)
        batch.mul_(2)
    assert overlaps == [True] * 4, f"the stream was busy when the copy was done: {overlaps}"


@pytest.mark.feature(COPIES)
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_correct_on_a_stream_of_the_script(busy, cuda, workers):
    data = numbers()
    loader = DataLoader(TensorDataset(data), batch_size=2, pin_memory=True, num_workers=workers)
    prepared, batches = Accelerator().prepare(loader), []
    stream = cuda.Stream()
    with cuda.stream(stream):
        for number, (batch,) in enumerate(prepared):
            if number % 8 == 0:
                busy(0.1)
            batches.append(batch * 1)
    stream.synchronize()
    assert torch.equal(torch.cat(batches).cpu(), data)


@pytest.mark.feature(COPIES)
def test_memory_of_batches_is_reused_in_each_epoch(cuda):
    loader = DataLoader(TensorDataset(numbers(64, 65536)), batch_size=4, pin_memory=True)
    prepared, reserved = Accelerator().prepare(loader), []
    for _ in range(6):
        total = torch.zeros((), device="cuda")
        for (batch,) in prepared:
            total += batch.sum()
        cuda.synchronize()
        reserved.append(cuda.memory_reserved() >> 20)
    assert max(reserved[1:]) <= reserved[0] + 64, f"MiB after each epoch: {reserved}"


@pytest.mark.feature(COPIES)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_saved_during_prefetching_resumes_at_the_next_batch_of_the_script(device, busy, workers):
    data = TensorDataset(numbers(24, 512))

    def shuffled():
        loader = DataLoader(data, batch_size=4, shuffle=True, pin_memory=True, num_workers=workers)
        return Accelerator().prepare(loader)

    loader, handed, states = shuffled(), [], []
    for (batch,) in loader:
        busy(0.02)
        handed.append(batch * 1)
        states.append(loader.state_dict())
    for number in (0, 3):
        later = shuffled()
        later.load_state_dict(states[number])
        remaining = [batch * 1 for (batch,) in later]
        assert torch.equal(torch.cat(remaining), torch.cat(handed[number + 1 :]))


@pytest.mark.feature(COPIES)
def test_non_blocking_without_pinned_memory_returns_correct_batches(device, busy):
    data = numbers()
    config = DataLoaderConfiguration(non_blocking=True)
    prepared = Accelerator(dataloader_config=config).prepare(DataLoader(TensorDataset(data), batch_size=4))
    batches = []
    for (batch,) in prepared:
        busy(0.05)
        batches.append(batch.clone())
    assert torch.equal(torch.cat(batches).cpu(), data)


@pytest.mark.feature(COPIES)
def test_workers_forked_after_cuda_started_do_not_use_it(device):
    torch.ones(1, device=device)
    data = numbers(24, 8)
    prepared = Accelerator().prepare(
        DataLoader(TensorDataset(data), batch_size=4, num_workers=2, shuffle=True, persistent_workers=True)
    )
    for _ in range(2):
        samples = torch.cat([batch for (batch,) in prepared]).cpu()
        assert torch.equal(samples[samples[:, 0].argsort()], data[data[:, 0].argsort()])
