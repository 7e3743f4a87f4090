"""A program that is interrupted at any save and resumed does what the uninterrupted program does."""

from __future__ import annotations

import gc
import random
import tempfile
from dataclasses import dataclass, replace
from itertools import islice

import cloudpickle
import pytest
import torch
from hypothesis import HealthCheck, assume, given, note, settings
from hypothesis import strategies as st
from support.runs import loop_programs
from support.runs.loop_programs import (
    DRAWS_GLOBALLY,
    ORDERED,
    STREAMS,
    Advance,
    Data,
    Draw,
    Epochs,
    Loop,
    Manual,
    Program,
    Save,
    SetEpoch,
    continue_program,
    run_program,
)
from support.training.data_sets import PythonRandomSampler, PythonShuffledSampler
from torch.utils.data import DataLoader

from accel_runtime import Accelerator, DataLoaderConfiguration

cloudpickle.register_pickle_by_value(loop_programs)

METHODS = ["resume", "skip_first_batches", "continue", "stateful"]
"""How scripts continue: `resume`, or `load_state`, in two ways of skipping batches and with stateful loaders."""
IN_TURN = ("resume", "stateful")
"""Methods with which a script reads no batch of before the save again."""
COUNT, SIZE = 12, 2

WAYS_TO_LOAD = ["resume", "load_state", "stateful"]
"""Ways to load a checkpoint; the other `METHODS` differ in how a script skips batches."""

# Plain scripts ------------------------------------------------------------------------------


def start(way, seed=0, data="global", **options):
    """Return an accelerator and two loaders: one in order, one shuffled by its own generator."""
    accelerator = Accelerator(
        dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=way == "stateful", **options)
    )
    first = 100 * accelerator.process_index if data == "sharded" else 0
    samples = range(first, first + COUNT)
    generator = torch.Generator().manual_seed(first + seed)
    loaders = (
        DataLoader(samples, batch_size=SIZE),
        DataLoader(samples, batch_size=SIZE, shuffle=True, generator=generator),
    )
    return accelerator, *(accelerator.prepare_data_loader(loader, data=data) for loader in loaders)


def load(way, folder, **options):
    """Return an accelerator and its loaders after the checkpoint was loaded."""
    accelerator, *loaders = start(way, seed=1, **options)
    accelerator.resume(folder) if way == "resume" else accelerator.load_state(folder)
    return accelerator, *loaders


def read(loader, count=None):
    """Return the next batches of a loader, by default all of an iteration."""
    return [batch.tolist() for batch in (loader if count is None else islice(loader, count))]


def read_two_epochs(loaders):
    return [(read(loader), read(loader), loader.epoch) for loader in loaders]


def take_and_break(loader):
    for at, _ in enumerate(loader):
        if at == 2:
            break


def take_and_return(loader):
    def evaluate():
        for at, _ in enumerate(loader):
            if at == 2:
                return

    evaluate()


def take_and_raise(loader):
    def evaluate():
        for at, _ in enumerate(loader):
            if at == 2:
                raise ValueError

    with pytest.raises(ValueError):
        evaluate()


def take_a_slice(loader):
    list(islice(loader, 2))


def take_from_a_shorter_zip(loader):
    for _ in zip(range(2), loader, strict=False):
        pass


def take_by_hand(loader):
    iterator = iter(loader)
    next(iterator), next(iterator)
    del iterator


def take_the_first(loader):
    next(iter(loader))


def take_through_a_generator(loader):
    for at, _ in enumerate(batch for batch in loader):
        if at == 2:
            break


def take_through_a_closed_generator(loader):
    batches = (batch for batch in loader)
    next(batches)
    batches.close()


def take_and_raise_stop_iteration(loader):
    def first_batches():
        for at, batch in enumerate(loader):
            if at == 2:
                raise StopIteration  # noqa: PLR1708
            yield batch

    with pytest.raises(RuntimeError, match="StopIteration"):
        list(first_batches())


def take_in_a_cycle(loader):
    class Owner:
        pass

    owner = Owner()
    owner.itself, owner.iterator = owner, iter(loader)
    next(owner.iterator)
    del owner
    gc.collect()


def take_twice(loader):
    iterator = iter(loader)
    next(iterator)
    iterator = iter(loader)
    next(iterator)
    del iterator


def take_all_but_the_end(loader):
    list(islice(loader, COUNT // SIZE))


LEAVE = [
    take_and_break,
    take_and_return,
    take_and_raise,
    take_a_slice,
    take_from_a_shorter_zip,
    take_by_hand,
    take_the_first,
    take_through_a_generator,
    take_through_a_closed_generator,
    take_and_raise_stop_iteration,
    take_in_a_cycle,
    take_twice,
    take_all_but_the_end,
]


def leave_and_load(leave, way, folder, **options):
    """Leave loops and save; return the epochs that follow, those after the checkpoint was loaded, and the states of loaders."""
    accelerator, *loaders = start(way, **options)
    read(loaders[1])
    for loader in loaders:
        leave(loader)
    accelerator.save_state(folder)
    states = [loader.state_dict() for loader in loaders]
    expected = read_two_epochs(loaders)
    _, *loaders = load(way, folder, **options)
    return expected, read_two_epochs(loaders), states


@pytest.mark.parametrize("leave", LEAVE)
def test_a_loop_that_was_left_before_a_save_is_not_continued(leave, tmp_path):
    """The next iteration is the next epoch, as without the interruption, also if the states of loaders are loaded by hand."""
    for way in WAYS_TO_LOAD:
        expected, loaded, states = leave_and_load(leave, way, tmp_path / way)
        assert loaded == expected, way
        _, *loaders = start(way, seed=1)
        for loader, state, (next_epoch, *_) in zip(loaders, states, expected, strict=True):
            loader.load_state_dict(state)
            assert read(loader) == next_epoch, way


@pytest.mark.parametrize(
    "options",
    [{}, {"dispatch_batches": True}, {"data": "sharded"}, {"even_batches": False}],
    ids=["each rank its slice", "dispatched", "sharded", "uneven"],
)
def test_a_loop_that_was_left_on_two_ranks_is_not_continued(pair, options, tmp_path):
    def leave_and_load_in_every_way(folder):
        return [leave_and_load(take_a_slice, way, f"{folder}/{way}", **options)[:2] for way in WAYS_TO_LOAD]

    for each in pair.run(leave_and_load_in_every_way, str(tmp_path)):
        assert [loaded for _, loaded in each] == [expected for expected, _ in each]


@pytest.mark.parametrize("way", WAYS_TO_LOAD)
def test_a_batch_that_is_read_within_a_loop_over_the_same_loader_does_not_end_the_loop(way, tmp_path):
    """`next(iter(loader))` for the shape of a batch, while training goes on."""
    accelerator, _, train = start(way)
    running = iter(train)
    next(running), next(running)
    next(iter(train))
    accelerator.save_state(tmp_path / "saved")
    expected = read(running)
    _, _, train = load(way, tmp_path / "saved")
    assert read(train)[2 if way == "load_state" else 0 :] == expected


@pytest.mark.parametrize("make", [PythonRandomSampler, PythonShuffledSampler])
def test_a_resume_warns_of_a_sampler_whose_order_cannot_be_drawn_again(make, tmp_path, caplog):
    """A sampler that draws from the generator of the script, in turn with it, yields other samples after a resume."""

    def build(seed):
        random.seed(seed)
        accelerator = Accelerator()
        return accelerator, accelerator.prepare(DataLoader(range(9), sampler=make(9)))

    accelerator, loader = build(1)
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
        random.random()
    accelerator.save_state(tmp_path / "saved")
    accelerator, loader = build(2)
    accelerator.resume(tmp_path / "saved")
    list(loader)
    texts = [
        record.getMessage()
        for record in caplog.records
        if "cannot be continued exactly" in record.getMessage()
    ]
    assert len(texts) == (make is PythonRandomSampler)


# Loaders that begin again in the body of a loop ----------------------------------------------


def endless(loader):
    while True:
        yield from loader


class Stream:
    """Batches of a loader, epoch after epoch."""

    def __init__(self, loader):
        self.loader, self.iterator = loader, None

    def __iter__(self):
        return self

    def __next__(self):
        while self.iterator is None or (batch := next(self.iterator, None)) is None:
            self.iterator = iter(self.loader)
        return batch


def pair_with_zip(first, second, others, epochs):
    other = endless(second)
    for _ in epochs:
        yield from zip(first, other, strict=False)


def pair_with_next(first, second, others, epochs):
    other = endless(second)
    for _ in epochs:
        for a in first:
            yield a, next(other)


def pair_with_an_expression(first, second, others, epochs):
    other = endless(second)
    for _ in epochs:
        yield from ((a, next(other)) for a in first)


def pair_with_an_object(first, second, others, epochs):
    other = Stream(second)
    for _ in epochs:
        for a in first:
            yield a, next(other)


def pair_with_a_zipped_object(first, second, others, epochs):
    other = Stream(second)
    for _ in epochs:
        yield from zip(first, other, strict=False)


def pair_with_a_new_iterator(first, second, others, epochs):
    iterator = iter(second)
    for _ in epochs:
        for a in first:
            try:
                b = next(iterator)
            except StopIteration:
                iterator = iter(second)
                b = next(iterator)
            yield a, b


def pair_with_an_iterator_of_each_epoch(first, second, others, epochs):
    for _ in epochs:
        iterator = iter(second)
        for a in first:
            if (b := next(iterator, None)) is None:
                iterator = iter(second)
                b = next(iterator)
            yield a, b


def pair_with_two_streams(first, second, others, epochs):
    streams = endless(second), endless(others)
    for _ in epochs:
        for a in first:
            yield a, next(streams[0]), next(streams[1])


def pair_with_a_stream_of_every_second_step(first, second, others, epochs):
    other = endless(second)
    for _ in epochs:
        for a in first:
            yield a, next(other) if a.sum() % 2 else a


def pair_with_evaluations(first, second, others, epochs):
    """The stream begins again beside evaluations, which begin at their first batch."""
    other = endless(second)
    for _ in epochs:
        for a in first:
            yield a, next(other), *others


PAIRS = [
    pair_with_zip,
    pair_with_next,
    pair_with_an_expression,
    pair_with_an_object,
    pair_with_a_zipped_object,
    pair_with_a_new_iterator,
    pair_with_an_iterator_of_each_epoch,
    pair_with_two_streams,
    pair_with_a_stream_of_every_second_step,
    pair_with_evaluations,
]
NUM_EPOCHS = 2


def start_pairs(pair, seed=0):
    """Return an accelerator and an iterator over the batches of three loaders, 4, 3 and 2 of them in an epoch."""
    torch.manual_seed(seed)
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
    loaders = accelerator.prepare(
        *(
            DataLoader(range(start, start + 2 * count), batch_size=2, shuffle=True)
            for start, count in ((0, 4), (100, 3), (200, 2))
        )
    )

    def run():
        return pair(*loaders, range(loaders[0].epoch, NUM_EPOCHS))

    return accelerator, run


def gather_pairs(accelerator, batches):
    return [[accelerator.gather(each).tolist() for each in batch] for batch in batches]


def save_at_each_pair(pair, folder):
    accelerator, run = start_pairs(pair)
    seen = []
    for number, batch in enumerate(run()):
        seen += gather_pairs(accelerator, [batch])
        accelerator.save_state(f"{folder}/{number}")
    return seen


def resume_pairs(pair, folder, number):
    accelerator, run = start_pairs(pair, seed=1)
    accelerator.resume(f"{folder}/{number}")
    return gather_pairs(accelerator, run())


def check_pairs(pair, folder, run):
    """Interrupt a program that yields pairs after each of them; `run` calls a function on some ranks."""
    expected = run(save_at_each_pair, pair, folder)
    for number in range(len(expected)):
        resumed = run(resume_pairs, pair, folder, number)
        assert resumed == expected[number + 1 :], f"saved after pair {number}"


@pytest.mark.parametrize("pair_loaders", PAIRS)
def test_a_loader_that_begins_again_in_the_body_continues_after_every_save(pair_loaders, tmp_path):
    check_pairs(pair_loaders, str(tmp_path), lambda call, *args: call(*args))


@pytest.mark.parametrize("pair_loaders", [pair_with_zip, pair_with_a_new_iterator])
def test_a_loader_that_begins_again_on_two_ranks_continues_after_every_save(pair, pair_loaders, tmp_path):
    def run(call, *args):
        first, second = pair.run(call, *args)
        assert first == second
        return first

    check_pairs(pair_loaders, str(tmp_path), run)


def keep_an_iterator(loader, val, save):
    for _ in loader:
        iterator = iter(val)
        next(iterator)
        save()


def drop_an_iterator(loader, val, save):
    for _ in loader:
        iterator = iter(val)
        next(iterator)
        del iterator
        save()


def evaluate_through_an_iterator(loader, val, save):
    """The first evaluation has ended within a step, and so do the later ones."""

    def evaluate():
        iterator = iter(val)
        next(iterator)

    for number, _ in enumerate(loader):
        if number == 0:
            evaluate()
        else:
            iterator = iter(val)
            next(iterator)
            save()
            del iterator


def save_within_an_evaluation(loader, val, save):
    for _ in loader:
        for _ in enumerate(val):
            save()


def save_at_the_end_with_a_stream(loader, val, save):
    stream = endless(val)
    for _ in loader:
        next(stream)
    save()


def save_at_the_last_batch_with_a_stream(loader, val, save):
    stream = endless(val)
    for number, _ in enumerate(loader, 1):
        next(stream)
        if number == len(loader):
            save()


def save_at_the_last_batch_with_an_iterator(loader, val, save):
    iterator = iter(val)
    for _ in loader:
        next(iterator, None)
        save()


REPORTS = {
    keep_an_iterator: "in later steps",
    drop_an_iterator: None,
    evaluate_through_an_iterator: None,
    save_within_an_evaluation: None,
    save_at_the_end_with_a_stream: None,
    save_at_the_last_batch_with_a_stream: "in the next epoch",
    save_at_the_last_batch_with_an_iterator: None,
}


@pytest.mark.parametrize("loop", REPORTS)
def test_a_save_reports_an_iterator_if_it_is_unknown_if_the_script_goes_on_with_it(loop, caplog):
    accelerator = Accelerator()
    loader, val = accelerator.prepare(
        DataLoader(range(10), batch_size=SIZE), DataLoader(range(6), batch_size=SIZE)
    )
    loop(loader, val, lambda: [each.state_dict() for each in (loader, val)])
    times = [record.args[1] for record in caplog.records if "may have other batches" in record.getMessage()]
    assert times == ([] if REPORTS[loop] is None else [REPORTS[loop]])


def test_an_evaluation_whose_iterator_is_still_there_begins_at_its_first_batch_after_a_resume(tmp_path):
    """Once an evaluation has ended within a step, a later one that has not advanced since has ended too."""
    accelerator, val, train = start("resume")
    for step, _ in enumerate(train):
        if step in {0, 2}:
            iterator = iter(val)
            assert len([next(iterator) for _ in range(2)]) == 2
        if step == 3:
            accelerator.save_state(tmp_path / "saved")
            break
    _, val, train = load("resume", tmp_path / "saved")
    next(iter(train))
    assert read(val, 1) == [[0, 1]]


# Named programs -----------------------------------------------------------------------------


ORDERS = ["inner first", "outer first"]


def check_interruptions(program, folder, methods=METHODS, *, every=False, draw=None):
    """Interrupt a program, and compare its continuations with the uninterrupted run.

    It is interrupted at every save, and continued with all of its loops in both orders, and with the outer ones only: with
    one of the methods that are possible, in turn, or with `every` one. Each continuation is interrupted again, and half of
    them are saved and loaded again at once. A generated program is interrupted at up to three saves that `draw` chooses.
    """
    dry = run_program(program, folder)
    numbers, turn = range(1, 1 + dry.num_saves), 0
    if draw is not None:
        assume(dry.num_saves and len(dry.events) < 300)
        numbers = sorted({draw(st.sampled_from(numbers)) for _ in range(3)})
        turn = draw(st.integers(0, len(methods) - 1))
    runs = {}
    for is_stateful in {method == "stateful" for method in methods}:
        options = {"method": "stateful" if is_stateful else "resume", "saves": {*numbers}}
        runs[is_stateful] = run_program(program, f"{folder}/{options['method']}", **options)
        assert runs[is_stateful].events == dry.events, "saves change the run"
    for at, number in enumerate(numbers):
        position = next(iter(runs.values())).positions[at]
        cases = [(None, order) for order in ORDERS]
        cases += [(depth, ORDERS[(number + depth) % 2]) for depth in range(1, len(position.loops))]
        for depth, order in cases:
            turn += 1
            possible = [method for method in methods if position.allows(method, order, depth)]
            if not possible:
                continue
            wanted = dry.after(position)
            if depth is not None:
                wanted = run_program(program, folder, abandon=(number, depth)).after(position)
            for method in possible if every else [possible[turn % len(possible)]]:
                saved = runs[method == "stateful"].positions[at]
                options = {"method": method, "order": order, "seed": 2 + turn}
                again = turn % 2 == 0
                where = f"save {number}, {method}, {order}, depth {depth}" + ", saved again" * again
                resumed = continue_program(
                    program, saved, f"{folder}/a", depth=depth, saves={1}, again=again, **options
                )
                assert resumed.events == wanted, where
                for second in resumed.positions:
                    if second.allows(method, order, None):
                        later = continue_program(program, second, f"{folder}/b", **options)
                        assert later.events == resumed.after(second), f"{where}, and later"


IN_ORDER, GENERATOR = Data("in order", 4, 1), Data("generator", 6, 2)
BOTH = (IN_ORDER, GENERATOR)
PROGRAMS = {
    "iterators are kept": Program(
        BOTH, (Manual(0, (Manual(1, (Advance(0, 2), Advance(1), Save(), Advance(1), Advance(0))),)), Loop((0,)), Loop((1,)))
    ),
    "an iterator is dropped": Program((GENERATOR,), (Manual(0, (Advance(0), Save())), Loop((0,)))),
    "an evaluation is cut short": Program(BOTH, (Loop((1,), (Loop((0,), stop=2), Save())),)),
    "an evaluation is interrupted": Program(
        (Data("in order", 3, 2), Data("generator", 4, 2)), (Loop((1,), (Loop((0,), (Save(),)),)),)
    ),
    "a loader is new": Program(BOTH, (Loop((0,)), Save(), Loop((1,)))),
    "loaders are zipped": Program(BOTH, (Loop((1, 0), (Save(),)),)),
    # `zip` ends with the first loader: the second has an iterator, but is not advanced again.
    "zipped loaders end": Program((Data("in order", 2, 1), Data("generator", 2, 1)), (Epochs(2, (Loop((0, 1), (Save(),)),)),)),
    # The next order is drawn from the generator as it was saved, not as the new process has seeded it.
    "an epoch is set": Program((GENERATOR,), (Loop((0,)), Save(), SetEpoch(0, 3), Loop((0,)))),
    # The rest of the body of the inner loops is run before the loops around it are entered, and saved there.
    "a loop begins before those around it": Program(
        (Data(count=2, batch=1), Data(count=2, batch=1), Data(count=1, batch=1)),
        (Loop((0,), (Loop((1,), (Save(), Loop((2,), (Save(),)))), Loop((1,), (Save(),)))), Save()),
    ),
} | {
    f"{'seedable' if seedable else 'own order'}, {end}": Program((Data(kind, 4, 1),), (*body, Loop((0,))), seedable=seedable)
    for kind, seedable in (("generator", False), ("shuffled", True))
    for end, body in {
        "ended": (Loop((0,), (Save(),)),),
        "left": (Loop((0,), (Save(),), stop=2), Save()),
        "dropped": (Manual(0, (Advance(0), Save(), Advance(0), Save())),),
    }.items()
}  # fmt: skip
WITH_WORKERS = {
    # Workers that persist keep their seed, and get the number of the epoch.
    "persistent workers of a loop that skips batches": Program(
        (Data("stream", 2, 1, workers=1, persistent=True),),
        (Loop((0,), (Draw(),)), Save(), Loop((0,), (Save(), Draw()), skip=1), Loop((0,), (Save(), Draw()))),
    ),
    "persistent workers with the number of the epoch": Program(
        (Data("in order", 2, 1), Data("stream of the epoch", 2, 1, workers=1, persistent=True)),
        (Loop((0,), (Loop((1,), (Save(),)),)), Save()),
    ),
}


@pytest.mark.parametrize(
    "every", [False, pytest.param(True, marks=pytest.mark.full)], ids=["in turn", "every way"]
)
@pytest.mark.parametrize(
    "name", [*PROGRAMS, *(pytest.param(name, marks=pytest.mark.slow) for name in WITH_WORKERS)]
)
def test_a_program_continues_from_every_save(name, every, tmp_path):
    check_interruptions((PROGRAMS | WITH_WORKERS)[name], str(tmp_path), every=every)


READ_AGAIN = pytest.mark.xfail(
    strict=True, reason="the sample that was read ahead is read again with other random numbers"
)


@pytest.mark.parametrize(
    "method",
    [*IN_TURN, *(pytest.param(method, marks=READ_AGAIN) for method in METHODS if method not in IN_TURN)],
)
def test_random_numbers_of_a_stateful_stream_continue_with_every_method(method, tmp_path):
    loader = Data("stateful stream", 4, 1, augmented=True)
    program = Program((loader,), (Loop((0,), (Save(),)), Draw(), Loop((0,))))
    check_interruptions(program, str(tmp_path), [method])


ON_RANKS = Program(
    (Data("generator", 6, 2), Data("in order", 4, 2)),
    (Loop((0,), (Save(), Loop((1,), (Save(),), stop=1), Save())), Loop((1,)), Loop((0,))),
)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_program_continues_on_another_world_size(clusters, before, after, method):
    check_world_sizes(clusters[before], clusters[after], ON_RANKS, method)


def check_world_sizes(before, after, program, method, draw=None):
    """Interrupt a program on some ranks and continue it on others, at every save or at one that `draw` chooses.

    All ranks gather the batches, so that the order of the samples over all ranks is compared.
    """
    options = {"method": method, "gather": True}
    with tempfile.TemporaryDirectory() as folder:
        expected, *others = before.run(_run_program, program, f"{folder}/1", options)
        assert all(other.events == expected.events for other in others)
        positions = [each for each in expected.positions if each.allows(method, "inner first", None)]
        if draw is not None:
            assume(positions and expected.num_saves < 10 and len(expected.events) < 300)
            positions = [draw(st.sampled_from(positions))]
        for position in positions:
            for resumed in after.run(_continue_program, program, position, f"{folder}/2", options):
                assert resumed.events == expected.after(position)


def _run_program(program, folder, options):
    return run_program(program, folder, saves=None, **options)


def _continue_program(program, position, folder, options):
    return continue_program(program, position, folder, **options)


# Generated programs -------------------------------------------------------------------------


@dataclass(frozen=True)
class Features:
    """What generated programs may contain."""

    kinds: tuple[str, ...] = (*ORDERED, *STREAMS)
    workers: tuple[int, ...] = (0,)
    augmented: bool = True
    """Samples with random numbers, which are others on another number of processes."""
    augmented_streams: bool = True
    """Streams with a state whose samples have random numbers."""
    even: bool = False
    """Batches that two ranks can split."""


@st.composite
def build_data(draw, features):
    kind = draw(st.sampled_from(features.kinds))
    workers = draw(st.sampled_from(features.workers))
    return Data(
        kind,
        # The state of a stream is used after a number of samples only.
        draw(st.integers(2, 7) | st.just(40)) if "stateful" in kind else draw(st.integers(2, 7)),
        2 if features.even else draw(st.integers(1, 3)),
        draw(st.booleans()) and kind != "batch sampler",
        workers,
        draw(st.booleans()) if workers else False,
        # A stream without a state draws other numbers when it is read again, if the script draws from the same generators.
        draw(st.booleans())
        if features.augmented
        and (kind in ORDERED or workers or ("stateful" in kind and features.augmented_streams))
        else False,
    )


@st.composite
def build_block(draw, features, free, manual, depth):
    statements = []
    for _ in range(draw(st.integers(1, 3))):
        kinds = ["save", "draw"]
        if depth < 3 and free:
            kinds += ["loop", "loop", "manual"] + ["set_epoch"] * (depth == 0)
        if manual:
            kinds += ["advance"]
        match draw(st.sampled_from(kinds)):
            case "save":
                statements.append(Save())
            case "draw":
                statements.append(Draw())
            case "advance":
                statements.append(Advance(draw(st.sampled_from(manual)), draw(st.integers(1, 2))))
            case "set_epoch":
                statements.append(SetEpoch(draw(st.sampled_from(free)), draw(st.integers(0, 3))))
            case "manual":
                loader = draw(st.sampled_from(free))
                others = [other for other in free if other != loader]
                body = draw(build_block(features, others, [*manual, loader], depth))
                statements.append(Manual(loader, body, draw(st.booleans())))
            case "loop":
                statements.append(draw(build_loop(features, free, manual, depth)))
    return tuple(statements)


@st.composite
def build_loop(draw, features, free, manual, depth):
    loaders = (draw(st.sampled_from(free)),)
    others = [other for other in free if other not in loaders]
    if others and draw(st.booleans()):
        loaders += (draw(st.sampled_from(others)),)
    others = [other for other in others if other not in loaders]
    return Loop(
        loaders,
        draw(build_block(features, others, manual, depth + 1)),
        draw(st.none() | st.integers(1, 2)),
        draw(st.sampled_from(["top", "bottom", "islice", "raise"])),
        draw(st.sampled_from(["", "enumerate", "generator"])),
        draw(st.sampled_from([0, 0, 0, 1])),
        len(loaders) > 1 and draw(st.booleans()),
    )


@st.composite
def build_programs(draw, features):
    loaders = tuple(draw(st.lists(build_data(features), min_size=1, max_size=3)))
    assume(all(data.num_batches for data in loaders))
    body = draw(build_block(features, list(range(len(loaders))), [], 0))
    if draw(st.booleans()):
        body = (Epochs(2, body),)
    after = draw(build_block(features, list(range(len(loaders))), [], 0))
    return Program(loaders, (*body, *after), draw(st.booleans()), False)


ALL = Features()
ON_ANY_WORLD_SIZE = Features(
    kinds=tuple(kind for kind in (*ORDERED, *STREAMS) if kind not in DRAWS_GLOBALLY and "split" not in kind),
    even=True,
    augmented=False,
)
"""Features of programs with the same batches on one process and on two."""


def settle(max_examples):
    """Return settings of hypothesis for programs, which take long and are often rejected; more examples in `make test-full`."""
    factor = 5 if settings.get_current_profile_name() == "search" else 1
    return settings(
        max_examples=factor * max_examples,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )


def check_generated_program(data, features):
    # A script that skips batches reads those before the save again, without its own draws between them.
    in_turn = data.draw(st.booleans())
    program = data.draw(build_programs(replace(features, augmented_streams=in_turn)))
    note(f"{program}\n--")
    with tempfile.TemporaryDirectory() as folder:
        check_interruptions(program, folder, IN_TURN if in_turn else METHODS, draw=data.draw)


@settle(8)
@given(st.data())
def test_a_generated_program_continues_as_if_it_had_not_been_interrupted(data):
    check_generated_program(data, ALL)


@pytest.mark.slow
@settle(45)
@given(st.data())
def test_many_generated_programs_continue_as_if_they_had_not_been_interrupted(data):
    check_generated_program(data, ALL)


@pytest.mark.slow
@settle(10)
@given(st.data())
def test_generated_programs_with_workers_continue_as_if_they_had_not_been_interrupted(data):
    check_generated_program(data, replace(ALL, workers=(1, 2)))


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 2)])
@settle(5)
@given(st.data())
def test_a_generated_program_continues_on_another_world_size(clusters, before, after, data):
    features = ON_ANY_WORLD_SIZE
    if before == after:
        kinds = tuple(kind for kind in ALL.kinds if kind != "batch sampler" and "split" not in kind)
        features = replace(ALL, even=True, kinds=kinds)
    program = replace(data.draw(build_programs(features)), dispatch=data.draw(st.booleans()))
    method = data.draw(st.sampled_from(METHODS))
    note(f"{program}\nmethod {method}\n--")
    check_world_sizes(clusters[before], clusters[after], program, method, data.draw)
