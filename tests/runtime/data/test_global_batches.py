"""With `global_batch_size`, each optimizer step has the samples, loss and gradients of one process, at any world size."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import chain

import cloudpickle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.cases.pairs import build_pairs
from support.runs import global_batch_oracle
from support.runs.global_batch_oracle import (
    SOURCES,
    Program,
    compare,
    join,
    list_global_batches,
    train_on_one_process,
    train_on_ranks,
)
from support.runs.read_epochs import SimulatedRank, read_steps, to_plain
from torch import nn
from torch.utils.data import DataLoader

from accel_runtime import (
    Accelerator,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    LocalSGD,
    skip_first_batches,
)
from accel_runtime.data.iterable import IterableSource
from accel_runtime.data.map_style import MapStyleSource
from accel_runtime.data.sharding import BatchSharding, batch_slices, sharding_of_loader
from accel_runtime.storage.schema import read_value, write_record

cloudpickle.register_pickle_by_value(global_batch_oracle)


def split(order, steps):
    """Return the samples of each step without padding, and the cycles that they form."""
    parts, cycles, cycle = [], [], []
    for samples, info in steps:
        pairs = zip(batch_slices(info), info.num_valid, strict=True)
        valid = [sample for each, count in pairs for sample in samples[each][:count]]
        assert set(samples) <= set(order)
        parts.append(valid)
        cycle += valid
        if info.cycle.ends:
            assert info.cycle.num_samples == len(cycle) or parts[0] is valid or not cycles
            cycles.append(cycle)
            cycle = []
    assert not cycle
    return parts, cycles


shardings = st.builds(
    lambda world, size, cycle, drop: BatchSharding(
        0, world, size, drop_last=drop, pad_last=False, cycle_size=cycle + world
    ),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(0, 15),
    st.booleans(),
)


@given(sharding=shardings, count=st.integers(0, 60))
def test_cycles_are_the_batches_of_one_process_in_as_few_equal_steps_as_possible(sharding, count):
    size, order = sharding.cycle_size, range(count)
    steps = list(sharding.split_samples(order))
    _, cycles = split(order, steps)
    end = count // size * size if sharding.drop_last else count
    assert cycles == [list(order[at : min(at + size, end)]) for at in range(0, end, size)]
    assert len(steps) == sharding.num_steps(count, sharding.padded_size)
    assert [info.is_last for _, info in steps] == [False] * (len(steps) - 1) + [True] * bool(steps)
    for _, info in steps:
        assert max(info.num_valid) <= sharding.batch_size
        assert max(info.num_valid) - min(info.num_valid) <= 1
        assert info.batch_sizes == tuple(max(1, number) for number in info.num_valid)
    for begin, end in zip(
        *[iter([at for at, (_, info) in enumerate(steps) if info.cycle.ends])] * 2, strict=False
    ):
        sizes = [sum(info.num_valid) for _, info in steps[begin + 1 : end + 1]]
        assert len(sizes) == -(-sum(sizes) // sharding.padded_size)
        assert max(sizes) - min(sizes) <= 1


@given(sharding=shardings, count=st.integers(0, 60))
def test_weights_of_a_cycle_give_the_mean_over_its_samples(sharding, count):
    """The sum over micro-batches of the averages over ranks, of the means over their samples."""
    totals = []
    for samples, info in sharding.split_samples(range(count)):
        if info.cycle.begins:
            totals.append([0.0, []])
        for rank, (each, valid) in enumerate(zip(batch_slices(info), info.num_valid, strict=True)):
            weight = info.weigh_for(rank).loss_scale
            mean = sum(samples[each][:valid]) / valid if valid else float(samples[each][0])
            totals[-1][0] += weight * mean / sharding.world_size
            totals[-1][1] += samples[each][:valid]
    for total, cycle in totals:
        assert total == pytest.approx(sum(cycle) / len(cycle))


@given(sharding=shardings, count=st.integers(1, 60), data=st.data())
def test_a_run_that_continues_on_another_number_of_ranks_has_the_rest_of_the_same_cycles(
    sharding, count, data
):
    order = range(count)
    steps = list(sharding.split_samples(order))
    parts, cycles = split(order, steps)
    at = data.draw(st.integers(0, len(steps)), "steps before")
    offset = sum(map(len, parts[:at]))
    within = offset - max((end for end in [0, *_ends(cycles)] if end <= offset), default=0)
    assert sharding.find_offset(at, sum(map(len, cycles))) == offset
    world = data.draw(st.integers(1, sharding.cycle_size), "world size")
    other = BatchSharding(
        0, world, data.draw(st.integers(1, 4)), drop_last=sharding.drop_last, pad_last=False,
        cycle_size=sharding.cycle_size,
    )  # fmt: skip
    rest = list(other.split_samples(order[offset:], num_before=within))
    following, _ = split(order, rest)
    assert list(chain.from_iterable(parts[:at] + following)) == list(chain.from_iterable(cycles))
    totals = {(info.cycle.size, info.cycle.num_samples) for _, info in steps[at:]}
    assert {(info.cycle.size, info.cycle.num_samples) for _, info in rest} == totals
    if other.padded_size == sharding.padded_size and other.world_size == sharding.world_size:
        assert [info for _, info in rest] == [info for _, info in steps[at:]]


def _ends(cycles):
    end = 0
    for cycle in cycles:
        end += len(cycle)
        yield end


@given(
    lengths=st.lists(st.integers(1, 5), max_size=20),
    world=st.integers(1, 4),
    size=st.integers(4, 9),
    at=st.integers(0, 20),
)
def test_batches_of_the_script_are_not_divided(lengths, world, size, at):
    """A cycle takes whole batches until it has enough samples, on any number of ranks and after a resume."""
    numbers = iter(range(sum(lengths)))
    batches = [[next(numbers) for _ in range(length)] for length in lengths]
    expected, cycle = [], []
    for batch in batches:
        cycle = cycle + batch
        if len(cycle) >= size:
            expected.append(cycle)
            cycle = []
    expected += [cycle] if cycle else []
    sharding = BatchSharding(0, world, None, pad_last=False, cycle_size=size)
    steps = list(sharding.group_batches(batches))
    parts, cycles = split(range(sum(lengths)), steps)
    assert cycles == expected
    at = min(at, len(steps))
    before = list(chain.from_iterable(parts[:at]))
    within = len(before) - sum(len(each) for each in expected if each[-1] < len(before))
    num_batches = sum(number > 0 for _, info in steps[:at] for number in info.num_valid)
    other = BatchSharding(0, world % 4 + 1, None, pad_last=False, cycle_size=size)
    following, _ = split(range(sum(lengths)), other.group_batches(batches[num_batches:], None, within))
    assert before + list(chain.from_iterable(following)) == list(range(sum(lengths)))


KINDS = ("list", "shuffled", "batches", "stream")


@given(
    program=st.builds(
        Program,
        source=st.sampled_from(KINDS),
        samples=st.integers(0, 30),
        global_batch=st.integers(4, 9),
        drop_last=st.booleans(),
    ),
    # A world size, a batch size, and a number of steps after which the state is saved.
    parts=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 6)), max_size=4),
)
def test_any_sequence_of_world_sizes_and_batch_sizes_reads_the_batches_of_one_process(program, parts):
    """Each rank is simulated, and saves its state as a checkpoint has it."""
    if program.source == "batches":
        program = replace(program, drop_last=False)
    torch.manual_seed(5)
    expected = [each[0].tolist() for each in list_global_batches(program)]
    cycles, open_cycle, state, seed = [], [], None, 5
    for world, size, stop in [*parts, (2, 2, None)]:
        steps_by_rank = []
        for rank in range(world):
            torch.manual_seed(seed)
            source = build_source(program, rank, world, size)
            start = source.state_type() if state is None else read_value(source.state_type, state)
            source.check(start)
            steps_by_rank.append(read_steps(source, start, stop, lambda batch: batch[0].tolist()))
        seed = 99  # the order is that of the state
        for step in zip(*steps_by_rank, strict=True):
            cycle = step[0].step_info.cycle
            open_cycle += [
                sample
                for rank, each in enumerate(step)
                for sample in each.samples[: each.step_info.num_valid[rank]]
            ]
            assert len({to_text(each.offset) for each in step}) == 1
            if cycle.ends:
                assert cycle.num_samples == len(open_cycle)
                cycles, open_cycle = [*cycles, open_cycle], []
        if steps_by_rank[0]:
            state = write_record(steps_by_rank[0][-1].offset)
    assert not open_cycle
    assert cycles == expected


def build_source(program, rank, world, size):
    """Return the source of a simulated rank."""
    backend, loader = SimulatedRank(rank, world), program.build_loader(size)
    sharding = sharding_of_loader(
        loader, backend.data_rank, split=False, pad_last=False, cycle_size=program.global_batch
    )
    source = IterableSource if program.source == "stream" else MapStyleSource
    return source(loader, backend, sharding)


def to_text(state):
    return repr(to_plain(state))


def run_parts(clusters, folder, program, parts):
    """Run a training as parts of a world size, a batch size, and a number of micro-batches; the last one has no number."""
    records, resume = [], ""
    for number, (world, size, count) in enumerate(parts):
        save = "" if count is None else f"{folder}/part_{number}"
        results = clusters[world].run(train_part, program, size, resume, save, count)
        assert all(each[0].steps == results[0][0].steps for each in results)
        records.append(results[0])
        if results[0][0].ended:
            break
        resume = save
    return join(records)


def train_part(program, size, resume, save, count):
    return train_on_ranks(program, size, resume=resume, save=save, stop_after=count)


PARTS = {
    "one process": [(1, 4, None)],
    "three ranks": [(3, 1, None)],
    "uneven, saved within a global batch": [(4, 1, 3), (3, 1, 3), (4, 1, None)],
    "down to one": [(2, 2, 1), (1, 2, 4), (3, 2, None)],
}
FACTORS = {
    "source": SOURCES,
    "parts": list(PARTS),
    "samples": [23, 24, 5],
    "global_batch": [6, 7],
    "drop_last": [False, True],
    "tokens": [False, True],
    "accumulate": [True, False],
}


def name_case(case):
    return ", ".join(str(case[name]) for name in ("source", "parts", "samples"))


@pytest.mark.parametrize(
    "case",
    [
        # Workers take long to start.
        pytest.param(
            each, marks=[pytest.mark.slow] * ("worker" in each["source"] or "split" in each["source"])
        )
        for each in build_pairs(FACTORS)
    ],
    ids=name_case,
)
def test_training_equals_one_process_after_changes_of_the_world_size(clusters, tmp_path, case):
    case = dict(case)
    parts = PARTS[case.pop("parts")]
    if case["source"] == "batches":
        case["drop_last"] = False
    program = Program(**case)
    compare(run_parts(clusters, tmp_path, program, parts), train_on_one_process(program))


SHARDED = {
    "strategy": ["sharded as one", "sharded by layers"],
    "parts": ["three ranks", "uneven, saved within a global batch"],
    "source": ["shuffled", "stream"],
    "tokens": [False, True],
}


@pytest.mark.parametrize(
    "case", build_pairs(SHARDED), ids=lambda case: f"{case['strategy']}, {case['parts']}"
)
def test_sharded_training_equals_one_process_after_changes_of_the_world_size(clusters, tmp_path, case):
    case = dict(case)
    parts = PARTS[case.pop("parts")]
    program = Program(**case)
    compare(run_parts(clusters, tmp_path, program, parts), train_on_one_process(program))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["hybrid", "tensor parallel, sharded"])
def test_training_on_a_mesh_equals_one_process(clusters, tmp_path, strategy):
    program = Program(strategy=strategy, global_batch=7)
    parts = [(4, 2, None)]
    compare(run_parts(clusters, tmp_path, program, parts), train_on_one_process(program))


def prepare(batch_size=2, count=10, **options):
    """Return an Accelerator with global batches of 6 samples, a model, an optimizer and a loader."""
    accelerator = Accelerator(**{"global_batch_size": 6} | options)
    model = nn.Linear(1, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(torch.arange(float(count), dtype=torch.float64)[:, None], batch_size=batch_size)
    return (accelerator, *accelerator.prepare(model, optimizer, loader))


def step(accelerator, model, optimizer, batch):
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def train(accelerator, model, optimizer, batches):
    for batch in batches:
        with accelerator.accumulate(model):
            step(accelerator, model, optimizer, batch)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"gradient_accumulation_steps": 2},
            "gradient_accumulation_steps=2 and global_batch_size=6 contradict",
        ),
        ({"split_batches": True}, "split_batches=True and global_batch_size=6 contradict"),
        (
            {"gradient_accumulation_plugin": GradientAccumulationPlugin(1, sync_with_dataloader=False)},
            "sync_with_dataloader=False and global_batch_size=6 contradict",
        ),
        ({"global_batch_size": 0}, "Invalid global_batch_size=0: expected a number of samples"),
        ({"global_batch_size": 2.5}, "Invalid global_batch_size=2.5"),
        ({"global_batch_size": True}, "Invalid global_batch_size=True"),
    ],
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_contradicting_options_are_refused(options, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        prepare(**options)


def test_what_counts_micro_batches_is_refused():
    accelerator, model, *_ = prepare()
    with pytest.raises(
        ValueError, match="Cannot set gradient_accumulation_steps=4: with global_batch_size=6"
    ):
        accelerator.gradient_accumulation_steps = 4
    with pytest.raises(ValueError, match="LocalSGD cannot train with global_batch_size=6"):
        LocalSGD(accelerator, model, 2)
    with pytest.raises(ValueError, match='with data="sharded" and global_batch_size=6'):
        accelerator.prepare_data_loader(DataLoader(range(4)), data="sharded")
    plugin = GradientAccumulationPlugin(1)
    Accelerator(global_batch_size=6, gradient_accumulation_plugin=plugin)
    with pytest.raises(Exception, match="global_batch_size=6 determines the micro-batches"):
        plugin.num_steps = 2


def test_more_ranks_than_samples_are_refused(clusters):
    def run():
        with pytest.raises(
            ValueError, match="each of the 2 data-parallel ranks needs a sample of each global batch"
        ):
            prepare(global_batch_size=1)

    clusters[2].run(run)


def test_a_loss_outside_of_loops_over_prepared_loaders_is_refused():
    accelerator, model, _, loader = prepare()
    with pytest.raises(ValueError, match="no loop over a prepared loader is running"):
        accelerator.backward(model(torch.ones(1, 1).double()).mean())
    batches = list(loader)
    with (
        pytest.raises(ValueError, match="no loop over a prepared loader is running"),
        accelerator.accumulate(model),
    ):
        accelerator.backward(model(batches[0]).mean())


def test_a_batch_that_the_script_divides_is_refused():
    accelerator, model, optimizer, loader = prepare()

    parts = (part for batch in loader for part in batch.split(1))
    with pytest.raises(ValueError, match="the batch was used by the micro-batch before it"):
        train(accelerator, model, optimizer, parts)


def test_a_micro_batch_that_failed_before_its_backward_pass_may_be_tried_again():
    accelerator, model, optimizer, loader = prepare(count=6)
    for number, batch in enumerate(loader):
        if number == 1:
            with pytest.raises(MemoryError), accelerator.accumulate(model):
                raise MemoryError
        with accelerator.accumulate(model):
            step(accelerator, model, optimizer, batch)
    assert optimizer.steps == 1


def test_loaders_that_advance_together_have_the_same_micro_batches():
    accelerator, model, optimizer, first = prepare()
    second = accelerator.prepare(DataLoader(torch.ones(10, 1).double(), batch_size=3))
    with pytest.raises(ValueError, match="two loaders advance together"):
        train(accelerator, model, optimizer, (batch for batch, _ in zip(first, second, strict=False)))


def test_an_evaluation_in_the_body_of_the_loop_does_not_end_a_global_batch():
    accelerator, model, optimizer, loader = prepare()
    evaluation = accelerator.prepare(DataLoader(torch.ones(5, 1).double(), batch_size=5))
    for batch in loader:
        with accelerator.accumulate(model):
            step(accelerator, model, optimizer, batch)
        assert sum(len(accelerator.gather_for_metrics(model(each))) for each in evaluation) == 5
    assert optimizer.steps == 2


def read_ahead(loader):
    """Yield batches, each after the next one was read."""
    before = None
    for batch in loader:
        if before is not None:
            yield before
        before = batch
    yield before


def test_batches_that_are_read_ahead_are_exact_without_accumulate_and_refused_with_it():
    torch.manual_seed(0)
    accelerator, model, optimizer, loader = prepare()
    torch.manual_seed(0)
    other, expected, its_optimizer, its_loader = prepare()
    for batch in read_ahead(loader):
        step(accelerator, model, optimizer, batch)
    for batch in its_loader:
        step(other, expected, its_optimizer, batch)
    assert optimizer.steps == its_optimizer.steps == 2
    assert torch.equal(model.weight, expected.weight)
    with pytest.raises(ValueError, match="the loss is that of another batch than the newest one"):
        train(accelerator, model, optimizer, read_ahead(loader))


def test_a_loop_that_is_left_within_a_global_batch_is_reported(caplog):
    accelerator, model, optimizer, loader = prepare()
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                step(accelerator, model, optimizer, batch)
            break
    assert [record.getMessage().partition(":")[0][:38] for record in caplog.records] == [
        "The gradients of 1 micro-batches at " + caplog.records[0].getMessage()[36:38]
    ]


def test_another_global_batch_size_within_a_global_batch_is_refused_and_accepted_after_it(tmp_path):
    accelerator, model, optimizer, loader = prepare()
    for number, batch in enumerate(loader):
        with accelerator.accumulate(model):
            step(accelerator, model, optimizer, batch)
        accelerator.save_state(tmp_path / str(number))
    for size in (4, None):
        other, *_ = prepare(global_batch_size=size)
        with pytest.raises(Exception, match="after 2 samples of an optimizer step of 6"):
            other.resume(tmp_path / "0")
    other, model, optimizer, loader = prepare(global_batch_size=3, batch_size=3)
    other.resume(tmp_path / "2")
    assert [batch.flatten().tolist() for batch in loader] == [[6, 7, 8], [9]]


@pytest.mark.parametrize("skipped", range(6))
def test_skipped_steps_are_those_of_the_whole_epoch(skipped):
    _, _, _, loader = prepare(count=17)
    batches = [batch.tolist() for batch in loader]
    rest = skip_first_batches(loader, skipped)
    assert len(rest) == len(batches) - skipped
    assert [batch.tolist() for batch in rest] == batches[skipped:]


def test_the_description_has_the_division_and_what_it_changes(caplog):
    accelerator, *_ = prepare(batch_size=4)
    text = str(accelerator.describe())
    assert "the mean over the samples of a global batch of 6 samples" in text
    assert "6 samples an optimizer step, divided evenly over 1 rank x 2 micro-batches of at most 4" in text
    assert accelerator.gradient_accumulation_steps == 2
    accelerator.prepare(nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.5)))
    assert "BatchNorm1d has the statistics of a micro-batch and Dropout draws other numbers" in str(
        accelerator.describe()
    )
    assert "training is not independent of the number of processes" in caplog.text


def test_even_batches_may_not_be_overridden():
    accelerator, model, _, _ = prepare(dataloader_config=DataLoaderConfiguration(even_batches=True))
    with (
        pytest.raises(ValueError, match="with global_batch_size=6 no sample is repeated"),
        accelerator.join_uneven_inputs([model], even_batches=True),
    ):
        pass
