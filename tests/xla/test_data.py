"""Loaders on XLA replicas: every sample once, with constant shapes, resumable, also after errors."""

from __future__ import annotations

import cloudpickle
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info

pytest.importorskip("torch_xla", reason="torch_xla is in an environment of its own: make test-xla")

from accel_runtime import Accelerator, DataLoaderConfiguration
from accel_runtime.nested import ContainerSpec

SIZES = [1, 2, 4]


@pytest.fixture(params=SIZES, ids=["1 replica", "2 replicas", "4 replicas"])
def ranks(request, replicas):
    """Each number of replicas, in turn."""
    return replicas[request.param]


class Items(IterableDataset):
    """A stream of numbers."""

    def __init__(self, numbers):
        self.numbers = numbers

    def __iter__(self):
        return iter(map(torch.tensor, self.numbers))


def of(**config):
    return Accelerator(dataloader_config=DataLoaderConfiguration(**config))


def test_every_sample_is_gathered_once_in_order_with_constant_shapes(ranks):
    """Use lengths around each multiple of a batch, from indices and streams; numbers, tensors and objects."""

    def walked(count, size, *, stream):
        accelerator = of()
        loader = accelerator.prepare(DataLoader(Items(range(count)) if stream else range(count), size))
        seen, objects, shapes = [], [], set()
        for batch in loader:
            shapes.add(tuple(batch.shape))
            seen += accelerator.gather_for_metrics(batch * 2).tolist()
            objects += accelerator.gather_for_metrics([f"no {n}" for n in batch.tolist()])
        return seen, objects, shapes, loader.repeats

    def all_of_them():
        return {
            (count, size, stream): walked(count, size, stream=stream)
            for size in (1, 4)
            for count in (0, 1, 3, 4, 5, 15, 16, 17)
            for stream in (False, True)
        }

    for found in ranks.run(all_of_them):
        for (count, size, _), (seen, objects, shapes, repeats) in found.items():
            assert seen == [2 * n for n in range(count)]
            assert objects == [f"no {n}" for n in range(count)]
            assert shapes == ({(size,)} if count else set())
            assert repeats == -count % (size * ranks.size)


def test_one_replica_keeps_a_short_last_batch_without_even_batches(replicas):
    def walked():
        accelerator = of(even_batches=False)
        loader = accelerator.prepare(DataLoader(range(10), 4))
        return [batch.tolist() for batch in loader], loader.repeats, loader.end

    batches, repeats, end = replicas[1].run(walked)[0]
    assert batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert repeats == 0
    assert "the last batch is not padded" in end


def test_one_replica_reports_its_padding(replicas):
    def told():
        accelerator = of()
        loader = accelerator.prepare(DataLoader(range(10), 4))
        dropping = accelerator.prepare(DataLoader(range(10), 4, drop_last=True))
        batches = [batch.tolist() for batch in loader]
        return batches, loader.end, loader.repeats, len(list(dropping)), dropping.end, accelerator.describe()

    batches, end, repeats, dropping, left_out, described = replicas[1].run(told)[0]
    assert batches[-1] == [8, 9, 0, 1]
    assert repeats == 2
    assert end == "the last batch is padded from the start: 2 samples an epoch"
    assert end in str(described)
    assert (dropping, left_out) == (2, "no padding")


def test_outputs_of_a_padded_batch_are_recognized_on_one_replica(replicas):
    def seen():
        accelerator = of()
        model = accelerator.prepare(torch.nn.Identity())
        loader, other = (accelerator.prepare(DataLoader(range(count), 4)) for count in (6, 9))
        found = [], [], []
        for batch in loader:
            outputs = model(batch) + 100
            for inner in other:  # an evaluation inside the loop
                found[1].extend(accelerator.gather_for_metrics(model(inner)).tolist())
            found[0].extend(accelerator.gather_for_metrics(outputs, batch=batch).tolist())
            # A scalar, a row for all, and two rows a sample.
            whole = accelerator.gather_for_metrics(
                {"loss": outputs.sum(), "rows": batch.repeat_interleave(2), "one": [batch.sum()[None]]},
                batch=batch,
            )
            found[2].append([whole["loss"].dim(), whole["rows"].tolist(), len(whole["one"][0])])
        return found

    outer, inner, mixed = replicas[1].run(seen)[0]
    assert outer == [100, 101, 102, 103, 104, 105]
    assert inner == list(range(9)) * 2
    assert mixed == [[0, [0, 0, 1, 1, 2, 2, 3, 3], 1], [0, [4, 4, 5, 5], 1]]


def test_sharded_data_keep_constant_shapes(ranks):
    def walked(*, stream, workers):
        import warnings

        warnings.filterwarnings("ignore", "This DataLoader will create")
        accelerator = of()
        rank = accelerator.process_index
        own = [100 * rank + n for n in range(3 + 4 * rank)]
        data = Items(own) if stream else own
        loader = accelerator.prepare_data_loader(DataLoader(data, 2, num_workers=workers), data="sharded")
        shapes, seen = set(), []
        for batch in loader:
            shapes.add(tuple(batch.shape))
            seen += accelerator.gather_for_metrics(batch).tolist()
        return shapes, sorted(seen)

    def all_of_them():
        return [walked(stream=stream, workers=workers) for stream, workers in ((0, 0), (1, 0), (0, 1))]

    wanted = [100 * rank + n for rank in range(ranks.size) for n in range(3 + 4 * rank)]
    assert ranks.run(all_of_them) == [[({(2,)}, wanted)] * 3] * ranks.size


KINDS = [
    "shuffled",
    "a sampler that draws by itself",
    "half of 22",
    "a BatchSampler",
    "batches of 3, 4 and 5",
    "a list of lists",
    "samples on their own",
    "nothing to drop",
    "a stream in three shards",
    "a stream of texts",
    "samples of a stream on their own",
    "workers",
    "workers that all read everything",
    "workers that divide 18",
]


def test_data_of_every_kind_are_gathered_once(ranks, exactness):
    cloudpickle.register_pickle_by_value(exactness)

    def walked(kind, way):
        accelerator = exactness.create_accelerator(way)
        loader = accelerator.prepare(exactness.LOADERS[kind]())
        return [
            n
            for b in loader
            for n in accelerator.gather_for_metrics(exactness.get_sample_numbers(b)).tolist()
        ]

    kinds = [kind for kind in KINDS if ranks.size < 4 or "workers" not in kind]
    ways = ["even", "not even"] if ranks.size == 1 else ["even"]

    def seen():
        return {(kind, way): walked(kind, exactness.WAYS[way]) for kind in kinds for way in ways}

    for found in ranks.run(seen):
        assert {key: sorted(seen) for key, seen in found.items()} == {
            (kind, way): list(exactness.COUNTS[kind]) for kind in kinds for way in ways
        }


def test_the_order_of_training_equals_that_of_gloo(replicas, gloo):
    def epochs():
        torch.manual_seed(3)
        accelerator = of(use_seedable_sampler=True, data_seed=5)
        loader = accelerator.prepare(DataLoader(range(21), 4, shuffle=True))
        return [[accelerator.gather_for_metrics(batch).tolist() for batch in loader] for _ in range(2)]

    for size in (1, 2):
        assert replicas[size].run(epochs) == gloo[size].run(epochs)


def test_epochs_after_the_first_compile_nothing(ranks):
    """Whatever padding the last batch needs."""

    def compiled():
        import torch_xla.debug.metrics as met

        accelerator = of()
        model = torch.nn.Linear(1, 1)
        rule = torch.optim.SGD(model.parameters(), lr=0.1)
        data = TensorDataset(torch.arange(11.0)[:, None])
        model, rule, loader = accelerator.prepare(model, rule, DataLoader(data, 4))
        counts = []
        for _ in range(4):
            for (batch,) in loader:
                accelerator.backward(model(batch).square().mean())
                rule.step()
                rule.zero_grad()
                accelerator.gather_for_metrics(batch).tolist()
            counts.append(met.counter_value("UncachedCompile"))
        return counts

    for first, *others in ranks.run(compiled):
        assert first
        assert others == [others[0]] * 3


# Prefetching --------------------------------------------------------------------------------


class Faulty(Dataset):
    """Numbers, of which those from `bad` on cannot be read."""

    def __init__(self, count, bad=None):
        self.count, self.bad = count, bad

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if self.bad is not None and index >= self.bad:
            raise LookupError("no such sample")
        return torch.tensor(index)


class Refusing:
    """A collate function that fails, or returns a dtype that the device does not support."""

    def __init__(self, bad, *, dtype=None):
        self.bad, self.dtype = bad, dtype

    def __call__(self, samples):
        numbers = torch.stack(samples)
        if int(numbers.max()) < self.bad:
            return numbers
        if self.dtype is None:
            raise LookupError("no such sample")
        return numbers.to(self.dtype)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_is_raised_after_the_batches_before_it(ranks, workers):
    """It keeps its type and traceback; no epoch ends early, and no thread is left."""

    def seen(workers):
        import threading
        import traceback
        import warnings

        warnings.filterwarnings("ignore", "This DataLoader will create|ComplexHalf")
        accelerator = of()
        bad = 3 * 2 * accelerator.num_processes
        cases = {
            "dataset": (Faulty(64, bad), None),
            "collate": (Faulty(64), Refusing(bad)),
            "transfer": (Faulty(64), Refusing(bad, dtype=torch.complex32)),
        }
        own = {}
        for case, (data, collate) in cases.items():
            loader = accelerator.prepare(DataLoader(data, 2, num_workers=workers, collate_fn=collate))
            found = []
            try:
                found.extend(batch.tolist() for batch in loader)
            except (LookupError, RuntimeError) as error:
                said = type(error).__name__, str(error), traceback.format_exc()
                own[case] = found, said, loader.state_dict()["position"]
        accelerator.wait_for_everyone()
        rank, names = accelerator.process_index, [thread.name for thread in threading.enumerate()]
        return accelerator.num_processes, rank, own, [name for name in names if "worker" in name]

    for world, rank, own, threads in ranks.run(seen, workers):
        steps = [[at, at + 1] for at in range(2 * rank, 3 * 2 * world, 2 * world)]
        assert [found for found, *_ in own.values()] == [steps] * 3
        for case, where in (("dataset", "__getitem__"), ("collate", "__call__")):
            _, (kind, text, trace), position = own[case]
            assert kind == "LookupError"
            assert "no such sample" in text
            assert f"in {where}" in trace
            assert position == 3 * 2 * world
        kind, text, _ = own["transfer"][1]
        assert (kind, text) == ("RuntimeError", "Type not supported: ComplexHalf")
        assert not threads


@pytest.mark.parametrize("workers", [0, 2])
def test_an_interrupted_loop_resumes_at_the_batch_of_the_script(ranks, workers):
    """The prefetched batch must not count."""

    def seen(workers):
        import threading
        import warnings

        warnings.filterwarnings("ignore", "This DataLoader will create")
        accelerator = of()
        size = 8 // accelerator.num_processes

        def begun():
            return accelerator.prepare(
                DataLoader(range(43), size, shuffle=True, num_workers=workers, pin_memory=workers > 0)
            )

        def gathered(walk):
            return [accelerator.gather_for_metrics(batch).tolist() for batch in walk]

        torch.manual_seed(4)
        accelerator.wait_for_everyone()
        loader = begun()
        first, states = [], []
        for batch in loader:
            first.append(accelerator.gather_for_metrics(batch).tolist())
            states.append(loader.state_dict())
        rests = []
        for state in states:
            again = begun()
            again.load_state_dict(state, position="exact")
            rests.append(gathered(again))
        left = begun()
        for _ in left:
            break
        accelerator.wait_for_everyone()
        return first, rests, [t.name for t in threading.enumerate() if "_worker)" in t.name]

    for first, rests, threads in ranks.run(seen, workers):
        assert sorted(n for batch in first for n in batch) == list(range(43))
        assert rests == [first[at + 1 :] for at in range(len(first))]
        assert not threads


def test_two_loops_can_run_in_parallel_and_nested(ranks):
    def seen():
        import warnings

        warnings.filterwarnings("ignore", "This DataLoader will create")
        accelerator = of()
        one, two, inner = (
            accelerator.prepare(DataLoader(range(count), 2, num_workers=1, persistent_workers=True))
            for count in (11, 9, 5)
        )
        found = [[], [], []]
        for _ in range(2):
            for first, second in zip(one, two, strict=False):
                found[0] += accelerator.gather_for_metrics(first).tolist()
                found[1] += accelerator.gather_for_metrics(second).tolist()
            for _ in one:
                own = [accelerator.gather_for_metrics(batch).tolist() for batch in inner]
                found[2].append([n for batch in own for n in batch])
        return found

    shorter = -(-9 // (2 * ranks.size))
    for first, second, inner in ranks.run(seen):
        assert first == list(range(min(11, shorter * 2 * ranks.size))) * 2
        assert second == list(range(9)) * 2
        assert inner == [list(range(5))] * len(inner)


class Moving:
    """A batch with its own `to` method."""

    def __init__(self, tensor):
        self.tensor = tensor

    def to(self, device):
        return Moving(self.tensor.to(device))


def nested(samples):
    numbers = torch.stack(samples)
    return {
        # A worker can send what can be imported.
        "pair": ContainerSpec(numbers, {"text": [f"no {n}" for n in numbers.tolist()], "none": None}),
        "own": Moving(numbers * 2) if get_worker_info() is None else numbers * 2,
        "half": numbers.to(torch.bfloat16),
        "flags": numbers > 3,
        "scalar": torch.tensor(1.5),
    }


def words(samples):
    return [f"no {int(sample)}" for sample in samples]


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_of_any_structure_keep_it(ranks, workers):
    def seen(workers):
        accelerator = of()
        data = Faulty(10)
        loader = accelerator.prepare(DataLoader(data, 2, num_workers=workers, collate_fn=nested))
        kinds, numbers, texts = set(), [], []
        for batch in loader:
            pair = batch["pair"]
            assert type(pair) is ContainerSpec
            number, more = pair
            assert more["none"] is None
            assert more["text"] == [f"no {n}" for n in number.tolist()]
            own = getattr(batch["own"], "tensor", batch["own"])
            assert own.tolist() == [2 * n for n in number.tolist()]
            kinds |= {
                (str(t.dtype), t.device.type)
                for t in (number, own, batch["half"], batch["flags"], batch["scalar"])
            }
            whole = accelerator.gather_for_metrics({"number": number, "text": more["text"]})
            numbers += whole["number"].tolist()
            texts += whole["text"]
        plain = accelerator.prepare(DataLoader(data, 2, num_workers=workers, collate_fn=words))
        spoken = [word for batch in plain for word in accelerator.gather_for_metrics(batch)]
        return kinds, numbers, texts, spoken

    for kinds, numbers, texts, spoken in ranks.run(seen, workers):
        assert {device for _, device in kinds} == {"xla"}
        assert {dtype for dtype, _ in kinds} == {
            f"torch.{t}" for t in ("int64", "bfloat16", "bool", "float32")
        }
        assert numbers == list(range(10))
        assert texts == [f"no {n}" for n in range(10)]
        assert workers or ranks.size > 1 or spoken == texts


def refused_tail():
    accelerator = of(even_batches=False)
    try:
        accelerator.prepare(DataLoader(range(10), batch_size=4))
    except ValueError as error:
        return str(error)


def test_different_batch_sizes_are_rejected_on_several_replicas(replicas):
    assert all("all ranks must run the same program" in said for said in replicas[2].run(refused_tail))
