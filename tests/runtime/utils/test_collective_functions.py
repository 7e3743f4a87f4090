"""Collective functions of `utils` that use the current backend."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import nn

from accel_runtime import Accelerator, utils
from accel_runtime.foundation.options import RNG_TYPES


def test_tensors_and_objects_of_all_ranks_are_gathered_and_reduced(ranks):
    def gather_and_reduce():
        accelerator = Accelerator()
        rank = accelerator.process_index
        tensors = utils.gather({"x": torch.tensor([rank])})["x"].tolist()
        objects = utils.gather_object([f"rank {rank}", {rank}])
        total = utils.reduce(torch.tensor([rank]), "sum").item()
        mean = utils.reduce(torch.tensor([float(rank)])).item()
        twice = utils.reduce((torch.tensor([rank]),), "max", scale=2.0)[0].item()
        return tensors, objects, total, mean, twice

    everyone = list(range(ranks.size))
    objects = [item for rank in everyone for item in (f"rank {rank}", {rank})]
    mean = sum(everyone) / ranks.size
    assert (
        ranks.run(gather_and_reduce)
        == [(everyone, objects, sum(everyone), mean, 2 * everyone[-1])] * ranks.size
    )


def test_gather_object_rejects_a_string_on_all_ranks(ranks):
    def refused():
        with pytest.raises(TypeError, match="gather_object cannot gather a str"):
            utils.gather_object("text")
        return True

    assert all(ranks.run(refused))


def test_broadcast_writes_the_values_of_one_rank_into_the_arguments_of_all(ranks):
    def broadcast_values():
        rank = Accelerator().process_index
        last = Accelerator().num_processes - 1
        values_of_rank = {"x": [torch.tensor([rank])]}
        actual = utils.broadcast(values_of_rank, from_process=last)["x"][0]
        words = [f"rank {rank}", None]
        assert utils.broadcast_object_list(words, from_process=last) is words
        return actual.item(), words, actual is values_of_rank["x"][0]

    last = ranks.size - 1
    assert ranks.run(broadcast_values) == [(last, [f"rank {last}", None], True)] * ranks.size


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_pad_across_processes_pads_to_the_longest_tensor(ranks, dim, first):
    def padded(dim, first):
        rank = Accelerator().process_index
        shape = [2, 2]
        shape[dim] = rank + 1
        data = {"a": torch.full(shape, rank), "b": torch.tensor(5)}
        actual = utils.pad_across_processes(data, dim=dim, pad_index=-1, pad_first=first)
        return actual["a"], actual["b"].item()

    for rank, (a, b) in enumerate(ranks.run(padded, dim, first)):
        assert (a.shape[dim], b) == (ranks.size, 5)
        filled = a == -1
        assert filled.sum() == 2 * (ranks.size - rank - 1)
        expected = torch.arange(ranks.size) >= rank + 1
        assert torch.equal(filled.any(1 - dim % 2), expected.flip(0) if first else expected)


def test_synchronize_rng_states_makes_generators_equal(ranks):
    def shared():
        accelerator = Accelerator()
        torch.manual_seed(accelerator.process_index)
        generator = torch.Generator().manual_seed(accelerator.process_index)
        utils.synchronize_rng_states(["torch", "generator"], generator)
        return torch.rand(1).item(), torch.rand(1, generator=generator).item()

    assert len(set(ranks.run(shared))) == 1


def test_a_generator_needs_its_rng_type():
    with pytest.raises(ValueError, match=", ".join(RNG_TYPES)):
        utils.synchronize_rng_state("dice")
    with pytest.raises(ValueError, match="Pass both or none"):
        utils.synchronize_rng_state("generator")
    with pytest.raises(ValueError, match="Pass both or none"):
        utils.synchronize_rng_state("torch", torch.Generator())


def test_split_between_processes_and_wait_for_everyone(ranks):
    def parts():
        utils.wait_for_everyone()
        with utils.split_between_processes(list(range(5))) as rank_items:
            return rank_items

    assert [item for rank_items in ranks.run(parts) for item in rank_items] == list(range(5))


def test_extract_model_from_parallel_returns_the_original_module(ranks):
    def extracted():
        accelerator = Accelerator(mixed_precision="bf16")
        model = nn.Linear(2, 2)
        prepared = accelerator.prepare(model)
        assert utils.extract_model_from_parallel(prepared) is model
        wrapped = "forward" in vars(model)
        utils.extract_model_from_parallel(prepared, keep_fp32_wrapper=False)
        assert utils.extract_model_from_parallel(prepared, recursive=True) is model
        exact = nn.functional.linear(torch.ones(1, 2), model.weight, model.bias)
        return wrapped, torch.equal(model(torch.ones(1, 2)), exact)

    assert ranks.run(extracted) == [(True, True)] * ranks.size


def test_a_compiled_module_is_unwrapped_on_request():
    model = nn.Linear(2, 2)
    compiled = torch.compile(model, backend="eager")
    assert utils.extract_model_from_parallel(compiled) is compiled
    assert utils.extract_model_from_parallel(compiled, keep_torch_compile=False) is model


def test_a_module_is_unwrapped_from_data_parallel():
    model, accelerator = nn.Linear(2, 2), Accelerator()
    wrapped = nn.DataParallel(model)
    for module in (wrapped, nn.DataParallel(wrapped)):
        assert accelerator.unwrap_model(module) is model
        assert utils.extract_model_from_parallel(module) is model
    assert list(accelerator.get_state_dict(wrapped)) == ["weight", "bias"]


def test_the_module_in_a_compiled_wrapper_stays_compiled_unless_that_is_disabled():
    model, accelerator = nn.Linear(2, 2), Accelerator()
    calls = []

    def count(graph, _):
        calls.append(1)
        return graph.forward

    compiled = torch.compile(wrapped := nn.DataParallel(model), backend=count)
    unwrapped = accelerator.unwrap_model(compiled)
    assert utils.is_compiled_module(unwrapped)
    assert unwrapped is accelerator.unwrap_model(compiled)
    assert unwrapped._orig_mod is model
    assert compiled._orig_mod is wrapped
    assert torch.equal(unwrapped(torch.ones(1, 2)), model(torch.ones(1, 2)))
    assert calls == [1]
    assert accelerator.unwrap_model(compiled, keep_torch_compile=False) is model


@pytest.mark.slow
def test_a_prepared_model_that_the_script_compiles_stays_compiled(ranks):
    def unwrap():
        accelerator = Accelerator()
        model = nn.Linear(2, 2)
        compiled = torch.compile(accelerator.prepare(model), backend="eager")
        kept = accelerator.unwrap_model(compiled)
        bare = accelerator.unwrap_model(compiled, keep_torch_compile=False)
        return utils.is_compiled_module(kept), kept._orig_mod is model, bare is model

    assert ranks.run(unwrap) == [(True, True, True)] * ranks.size


def test_inner_modules_are_unwrapped_with_recursive():
    inner = nn.Linear(2, 2)
    model = nn.Sequential(nn.Sequential(nn.DataParallel(inner)), nn.Tanh())
    assert utils.extract_model_from_parallel(model)[0][0] is not inner
    assert utils.extract_model_from_parallel(model, recursive=True) is model
    assert model[0][0] is inner


class Rows(Mapping):
    """Tensors by name that iterates over rows, as a `TensorDict` does."""

    def __init__(self, tensors):
        self.tensors = tensors

    def __getitem__(self, key):
        return self.tensors[key]

    def __iter__(self):
        return (Rows({key: value[row] for key, value in self.items()}) for row in range(len(self)))

    def __len__(self):
        return len(next(iter(self.tensors.values())))

    def keys(self):
        return self.tensors.keys()

    def items(self):
        return self.tensors.items()

    def values(self):
        return self.tensors.values()


def test_a_mapping_that_iterates_over_rows_is_gathered_by_its_keys(ranks):
    def run():
        accelerator = Accelerator()
        x = torch.full((2, 1), float(accelerator.process_index))
        batch = Rows({"x": x, "inner": Rows({"y": x + 1})})
        everyones = [
            utils.gather(batch),
            accelerator.gather_for_metrics(batch),
            utils.concatenate([utils.reduce(batch, "max")]),
        ]
        return [
            (type(mapping), mapping["x"].tolist(), mapping["inner"]["y"].flatten().tolist())
            for mapping in everyones
        ]

    x = [[float(rank)] for rank in range(ranks.size) for _ in range(2)]
    y = [row[0] + 1 for row in x]
    last = (Rows, [[ranks.size - 1.0]] * 2, [float(ranks.size)] * 2)
    for actual in ranks.run(run):
        named = [(kind.__name__, *remaining) for kind, *remaining in actual]
        assert named == [("Rows", x, y), ("Rows", x, y), ("Rows", *last[1:])]
