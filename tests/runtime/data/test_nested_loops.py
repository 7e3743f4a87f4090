"""The current step of several loops: gather_for_metrics is exact within nested loops and outside of them."""

from __future__ import annotations

import copy
import io
import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_runtime import Accelerator


class Doubling(nn.Module):
    """A model that doubles its inputs."""

    def forward(self, x):
        return x * 2


def prepared(accelerator, count, size=4):
    return accelerator.prepare(DataLoader(range(count), batch_size=size))


def test_two_zipped_loaders_of_different_lengths_lose_no_sample(ranks):
    """Row A26: `zip`. Tensors of the loaders and outputs of a prepared model are recognized."""

    def gather_samples():
        accelerator = Accelerator()
        model = accelerator.prepare(Doubling())
        first, second = prepared(accelerator, 16), prepared(accelerator, 10)
        gathered_values = [[], [], [], []]
        for first_batch, second_batch in zip(first, second, strict=False):
            gathered_values[0] += accelerator.gather_for_metrics(first_batch).tolist()
            gathered_values[1] += accelerator.gather_for_metrics(second_batch).tolist()
            gathered_values[2] += accelerator.gather_for_metrics(model(first_batch) + 1).tolist()
            gathered_values[3] += accelerator.gather_for_metrics(model(second_batch) + 1).tolist()
        return gathered_values

    steps = -(-10 // (4 * ranks.size))
    longer, shorter = list(range(min(16, steps * 4 * ranks.size))), list(range(10))
    expected = [longer, shorter, [2 * n + 1 for n in longer], [2 * n + 1 for n in shorter]]
    assert ranks.run(gather_samples) == [expected] * ranks.size


def test_a_loader_of_one_accelerator_is_exact_with_the_methods_of_another(ranks):
    """As in functions of a script that each create an `Accelerator`."""

    def use_both():
        loader = prepared(Accelerator(), 27)
        accelerator = Accelerator(gradient_accumulation_steps=2)
        model = accelerator.prepare(nn.Linear(1, 1, bias=False))
        gathered, batches, ends, gradient = [], [], [], 0.0
        for batch in loader:
            gathered += accelerator.gather_for_metrics(batch).tolist()
            batches.append(batch)
            with accelerator.accumulate(model):
                accelerator.backward(model(batch[:, None].float()).mean())
            ends.append((accelerator.sync_gradients, accelerator.gradient_state.end_of_dataloader))
            if accelerator.sync_gradients:
                gradient += float(model.weight.grad)
                model.zero_grad()
        return gathered, len(accelerator.gather_for_metrics(torch.cat(batches))), ends[-1], gradient

    def use_one():
        accelerator = Accelerator(gradient_accumulation_steps=2)
        loader, model = prepared(accelerator, 27), accelerator.prepare(nn.Linear(1, 1, bias=False))
        gradient = 0.0
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch[:, None].float()).mean())
            if accelerator.sync_gradients:
                gradient += float(model.weight.grad)
                model.zero_grad()
        return gradient

    gradients = ranks.run(use_one)
    assert ranks.run(use_both) == [(list(range(27)), 27, (True, True), each) for each in gradients]


def test_zipped_loaders_of_two_accelerators_lose_no_sample(ranks):
    def gather_samples():
        first_accelerator, second_accelerator = Accelerator(), Accelerator()
        first, second = prepared(first_accelerator, 16), prepared(second_accelerator, 10)
        gathered = [[], []]
        for first_batch, second_batch in zip(first, second, strict=False):
            gathered[0] += second_accelerator.gather_for_metrics(first_batch).tolist()
            gathered[1] += first_accelerator.gather_for_metrics(second_batch).tolist()
        return gathered

    steps = -(-10 // (4 * ranks.size))
    expected = [list(range(min(16, steps * 4 * ranks.size))), list(range(10))]
    assert ranks.run(gather_samples) == [expected] * ranks.size


def test_the_end_of_a_loop_is_gathered_by_its_accelerator_after_a_loop_of_another(ranks):
    def gather_samples():
        accelerator, other = Accelerator(), Accelerator()
        batches = list(prepared(accelerator, 27))
        assert [*prepared(other, 5)]
        return len(accelerator.gather_for_metrics(torch.cat(batches)))

    assert ranks.run(gather_samples) == [27] * ranks.size


def test_an_unknown_tensor_in_zipped_loops_is_rejected_without_its_batch(several):
    def gather_samples():
        accelerator = Accelerator()
        first, second = (
            prepared(accelerator, 20, 2),
            prepared(accelerator, 4 * accelerator.num_processes - 1, 2),
        )
        expected, refused = [], 0
        for first_batch, _ in zip(first, second, strict=False):
            expected += accelerator.gather_for_metrics(first_batch + 1, batch=first_batch).tolist()
            try:
                accelerator.gather_for_metrics(first_batch + 1)
            except ValueError as error:
                refused += "Pass the batch" in str(error)
        return expected, refused

    expected = list(range(1, 4 * several.size + 1))
    assert several.run(gather_samples) == [(expected, 1)] * several.size


def test_an_unknown_batch_argument_is_rejected(several):
    def gather_and_catch():
        with pytest.raises(ValueError, match="the batch is unknown"):
            Accelerator().gather_for_metrics(torch.ones(2), batch=torch.ones(2))

    several.run(gather_and_catch)


def test_the_batch_argument_works_on_any_world_size(ranks):
    def gather_samples():
        accelerator = Accelerator()
        pairs = zip(prepared(accelerator, 16, 4), prepared(accelerator, 10, 4), strict=False)
        return [n for _, b in pairs for n in accelerator.gather_for_metrics(b + 1, batch=b).tolist()]

    assert ranks.run(gather_samples) == [list(range(1, 11))] * ranks.size


def test_gathering_is_exact_if_a_script_prefetches_one_batch(ranks):
    """Row A27: the current batch is not the one fetched last."""

    def gather_samples():
        accelerator = Accelerator()
        model = accelerator.prepare(Doubling())
        gathered_values = [[], []]
        iterator = iter(prepared(accelerator, 9, 2))
        ahead = next(iterator)
        while ahead is not None:
            batch, ahead = ahead, next(iterator, None)
            gathered_values[0] += accelerator.gather_for_metrics(batch).tolist()
            gathered_values[1] += accelerator.gather_for_metrics(model(batch) + 1).tolist()
        return gathered_values

    assert ranks.run(gather_samples) == [[list(range(9)), [2 * n + 1 for n in range(9)]]] * ranks.size


@pytest.mark.parametrize("count", [13, 16, 24, 25])
def test_results_collected_in_a_loop_are_gathered_once_after_it(ranks, count):
    """Row A28: in the dataset's order, each sample once; objects too; also in the middle of another loop."""

    def collected(accelerator, count):
        values, texts = [], []
        for batch in prepared(accelerator, count):
            values.append(batch * 2)
            texts += [str(n) for n in batch.tolist()]
        return accelerator.gather_for_metrics(torch.cat(values)).tolist(), accelerator.gather_for_metrics(
            texts
        )

    def gather_samples(count):
        accelerator = Accelerator()
        gathered_values = [collected(accelerator, count)]
        for batch in prepared(accelerator, 7, 1):
            gathered_values.append(collected(accelerator, count))
            assert len(accelerator.gather_for_metrics(batch + 1)) in {1, accelerator.num_processes}
        return all(result == gathered_values[0] for result in gathered_values) and gathered_values[0]

    expected = [2 * n for n in range(count)], [str(n) for n in range(count)]
    assert ranks.run(gather_samples, count) == [expected] * ranks.size


def test_gathering_after_a_loop_of_one_padded_batch_needs_the_batch_argument(several):
    """Other data can have as many rows as one batch."""

    def refused():
        accelerator = Accelerator()
        for batch in prepared(accelerator, 3):
            assert accelerator.gather_for_metrics(batch * 2).tolist() == [0, 2, 4]
        with pytest.raises(ValueError, match="as its only batch, which was padded"):
            accelerator.gather_for_metrics(torch.ones(4))
        return accelerator.gather_for_metrics(batch * 2, batch=batch).tolist()

    assert several.run(refused) == [[0, 2, 4]] * several.size


def test_gathering_outside_of_loops_keeps_all_rows(ranks):
    """Rows A29 and A31: finished and abandoned loops do not affect other data."""

    def gather_samples():
        accelerator = Accelerator(gradient_accumulation_steps=4)
        for _ in prepared(accelerator, 9, 4):
            pass
        after = accelerator.gather_for_metrics(torch.arange(5)).tolist()
        for _ in prepared(accelerator, 3, 4):
            break
        outside = accelerator.gather_for_metrics(torch.arange(5)).tolist()
        try:
            for _ in prepared(accelerator, 3, 4):
                next(iter(()))
        except StopIteration:
            failed = accelerator.gather_for_metrics(torch.arange(5)).tolist()
        synced = []
        for _ in prepared(accelerator, 40, 1):
            with accelerator.accumulate():
                synced.append(accelerator.sync_gradients)
            if len(synced) == 5:
                break
        return after, outside, failed, synced

    everything = [0, 1, 2, 3, 4] * ranks.size
    assert (
        ranks.run(gather_samples)
        == [(everything, everything, everything, [False, False, False, True, False])] * ranks.size
    )


def test_loops_that_end_early_are_removed(ranks):
    """Row A30."""

    def count_loops():
        accelerator = Accelerator()
        for _ in range(5):
            for _ in prepared(accelerator, 40):
                break
        return len(accelerator._run.loops.open_records), len(accelerator._run.loops._finished)

    assert ranks.run(count_loops) == [(0, 0)] * ranks.size


def test_scalars_objects_and_repeated_rows_are_exact_at_the_last_step(ranks):
    """Rows A22 to A25."""

    def gather_samples():
        accelerator = Accelerator()
        gathered_values = {"id": [], "txt": [], "rows": [], "scalar": None, "one": None}
        for batch in prepared(accelerator, 10, 2):
            gathered = accelerator.gather_for_metrics(
                {"id": batch, "txt": [f"no {n}" for n in batch.tolist()]}
            )
            gathered_values["id"] += gathered["id"].tolist()
            gathered_values["txt"] += gathered["txt"]
            gathered_values["rows"] += accelerator.gather_for_metrics(batch.repeat_interleave(3)).tolist()
            rank = torch.tensor(accelerator.process_index)
            gathered_values["scalar"] = torch.atleast_1d(accelerator.gather_for_metrics(rank)).tolist()
        return gathered_values

    expected = {
        "id": list(range(10)),
        "txt": [f"no {n}" for n in range(10)],
        "rows": [n for n in range(10) for _ in range(3)],
        "scalar": list(range(ranks.size)),
        "one": None,
    }
    assert ranks.run(gather_samples) == [expected] * ranks.size


@pytest.mark.parametrize(("count", "size"), [(10, 4), (5, 4), (9, 4), (1, 3), (0, 2), (21, 4)])
def test_uneven_batches_are_gathered_exactly_and_all_ranks_take_the_same_steps(ranks, count, size):
    """Row A2 (there: a hang, or an abort)."""

    def gather_samples(count, size):
        accelerator = Accelerator()
        accelerator.even_batches = False
        loader, num_local, gathered = prepared(accelerator, count, size), 0, []
        for batch in loader:
            num_local += 1
            gathered += accelerator.gather_for_metrics(batch).tolist()
        return num_local == len(loader), gathered

    assert ranks.run(gather_samples, count, size) == [(True, list(range(count)))] * ranks.size


def test_a_prepared_model_can_be_copied_and_saved(several):
    def copy_and_save():
        accelerator = Accelerator()
        model = accelerator.prepare(nn.Flatten(0))
        torch.save(model, io.BytesIO())
        return copy.deepcopy(model)(torch.ones(1, 1)).tolist()

    assert several.run(copy_and_save) == [[1.0]] * several.size


def test_a_loop_over_data_without_tensors_is_exact(ranks):
    def gather_samples():
        accelerator = Accelerator()
        loader = accelerator.prepare(DataLoader([str(n) for n in range(9)], batch_size=2))
        return list(itertools.chain.from_iterable(map(accelerator.gather_for_metrics, loader)))

    assert ranks.run(gather_samples) == [[str(n) for n in range(9)]] * ranks.size
