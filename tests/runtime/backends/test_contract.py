"""Every backend satisfies the contract of `backends/base.py`."""

from __future__ import annotations

import os

import pytest
import torch
from support.runs.sharded_runs import sum_in_group

from accel_runtime.backends import connect
from accel_runtime.collectives.handshake import PAYLOAD, build_writer, call_at_site
from accel_runtime.environment.settings import Settings
from accel_runtime.environment.topology import ROLES, Topology


def connect_backend():
    return connect(Settings.from_env(os.environ), Topology.from_env(os.environ))


def test_connect_selects_the_backend_and_device_of_each_rank(ranks):
    def describe_backend():
        b = connect_backend()
        return type(b).__name__, b.topology.rank, b.topology.world_size, str(b.device)

    expected = [(ranks.backend, rank, ranks.size, ranks.device(rank)) for rank in range(ranks.size)]
    assert ranks.run(describe_backend) == expected


@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 3), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.float64, torch.complex64])
def test_all_gather_stacks_in_rank_order(ranks, shape, dtype):
    def gathered(shape, dtype):
        b = connect_backend()
        return b.all_gather(torch.full(shape, b.topology.rank).to(b.device, dtype)).cpu()

    expected = torch.stack([torch.full(shape, rank).to(dtype) for rank in range(ranks.size)])
    for actual in ranks.run(gathered, shape, dtype):
        assert actual.dtype == dtype
        assert torch.equal(actual, expected)


def test_all_gather_accepts_a_tensor_that_is_not_contiguous(ranks):
    def gathered():
        b = connect_backend()
        return b.all_gather(torch.arange(6, device=b.device).view(2, 3).T).cpu()

    for actual in ranks.run(gathered):
        assert all(torch.equal(tensor, torch.arange(6).view(2, 3).T) for tensor in actual)


@pytest.mark.parametrize(
    ("reduction", "of"),
    [("sum", sum), ("mean", lambda xs: sum(xs) / len(xs)), ("max", max), ("min", min)],
)
def test_all_reduce_reduces_every_element_over_the_ranks(ranks, reduction, of):
    def reduced(reduction):
        b = connect_backend()
        value = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=b.device) * (b.topology.rank + 1)
        return b.all_reduce(value, reduction).cpu()

    expected = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * of([rank + 1 for rank in range(ranks.size)])
    for total in ranks.run(reduced, reduction):
        torch.testing.assert_close(total, expected)


def test_there_is_a_group_of_ranks_for_each_role(ranks):
    def sums():
        b = connect_backend()
        assert b.grid.world_size == b.topology.world_size
        assert b.data_rank == b.grid.data_rank(b.topology.rank)
        assert b.mesh is None or b.mesh.size() == b.topology.world_size
        return {role: sum_in_group(b, role) for role in ROLES}

    everyone = list(range(ranks.size))
    for rank, groups in enumerate(ranks.run(sums)):
        assert groups.pop("data") == (everyone, sum(number + 1 for number in everyone))
        assert groups == dict.fromkeys(groups, ([rank], rank + 1.0))


def test_broadcast_overwrites_the_tensors_of_other_ranks(ranks):
    def broadcast():
        b = connect_backend()
        received = []
        for source in range(b.topology.world_size):
            value = torch.tensor([b.topology.rank * 10], device=b.device)
            assert b.broadcast(value, source) is value
            received.append(value.item())
        return received

    assert ranks.run(broadcast) == [[source * 10 for source in range(ranks.size)]] * ranks.size


def test_objects_are_gathered_and_broadcast(ranks):
    def exchanged():
        b = connect_backend()
        value = {"rank": b.topology.rank, "text": "x" * b.topology.rank}
        return b.all_gather_objects(value, "tests"), b.broadcast_object(
            value, "tests", b.topology.world_size - 1
        )

    everyone = [{"rank": rank, "text": "x" * rank} for rank in range(ranks.size)]
    assert ranks.run(exchanged) == [(everyone, everyone[-1])] * ranks.size


def test_numbers_are_gathered_by_rank(ranks):
    def gathered():
        b = connect_backend()
        return b.all_gather_numbers([b.topology.rank, -(2**63), 2**63 - 1], "tests"), b.all_gather_numbers(
            [], "tests"
        )

    everyone = [(rank, -(2**63), 2**63 - 1) for rank in range(ranks.size)]
    assert ranks.run(gathered) == [(everyone, [()] * ranks.size)] * ranks.size


def test_a_barrier_waits_for_all_ranks(ranks, tmp_path):
    def arrived(folder):
        import time

        b = connect_backend()
        time.sleep(0.2 * b.topology.rank)
        (folder / str(b.topology.rank)).touch()
        b.barrier()
        return len(list(folder.iterdir()))

    assert ranks.run(arrived, tmp_path) == [ranks.size] * ranks.size


def test_a_handshake_exchanges_payloads_of_any_size(ranks):
    def exchanged():
        b = connect_backend()
        call, met = call_at_site("test"), []
        for size in (0, 5, PAYLOAD, 3 * PAYLOAD):
            payload = torch.full((size * b.topology.rank or 1,), b.topology.rank, dtype=torch.uint8)
            result = b.handshake.exchange(call, len(payload), build_writer(bytes(payload.tolist())))
            met.append([(len(blob), blob.unique().tolist()) for blob in result.payloads])
        return met

    expected = [
        [(size * rank or 1, [rank]) for rank in range(ranks.size)] for size in (0, 5, PAYLOAD, 3 * PAYLOAD)
    ]
    assert ranks.run(exchanged) == [expected] * ranks.size


def test_scatter_bytes_sends_each_rank_its_buffer(ranks):
    def dealt():
        b = connect_backend()
        call, world = call_at_site("test"), b.topology.world_size
        room = torch.zeros(3, dtype=torch.uint8)
        buffers = [torch.full((3,), rank, dtype=torch.uint8) for rank in range(world)]
        b.handshake.scatter_bytes(buffers, room, world - 1, call)
        return room.tolist()

    others = [[rank] * 3 for rank in range(ranks.size - 1)]
    assert ranks.run(dealt) == [*others, [0] * 3]


def test_an_unavailable_device_is_rejected_by_name():
    with pytest.raises(RuntimeError, match="Device 'xpu' is not available"):
        connect(Settings(device="xpu"), Topology())


def test_store_keys_are_shared_and_counters_are_kept_for_each_rank(ranks):
    def words(name):
        b = connect_backend()
        rank_key, first = f"{name}/{b.topology.rank}", f"{name}/0"
        before = b.get_store_key(rank_key)
        b.set_store_key(rank_key, f"from {b.topology.rank}")
        b.barrier()
        second_backend = connect_backend()
        turns = [
            b.increment_store_key(name),
            b.increment_store_key(name),
            second_backend.increment_store_key(name) if b.topology.world_size > 1 else 3,
        ]
        return (
            before,
            b.get_store_key(rank_key),
            b.get_store_key(first),
            b.get_store_key(f"{name}/nobody"),
            turns,
        )

    name = f"words of {ranks.size}"
    expected = [(None, f"from {rank}", "from 0", None, [1, 2, 3]) for rank in range(ranks.size)]
    assert ranks.run(words, name) == expected


def test_a_backend_reports_its_type_and_collective_backend(ranks):
    def read_types():
        b = connect_backend()
        return b.distributed_type.value, b.collective_backend

    assert ranks.run(read_types) == [(ranks.kind, ranks.carrier)] * ranks.size
