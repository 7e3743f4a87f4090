"""Loaders on XLA replicas: every sample once, with constant shapes, resumable, also after errors."""

from __future__ import annotations

import cloudpickle
import pytest
import torch
from support.training.data_sets import MappedDataset, SampleStream
from torch.utils.data import DataLoader, TensorDataset, get_worker_info

pytest.importorskip("torch_xla", reason="torch_xla is in an environment of its own: make test-xla")

from accel_runtime import Accelerator, DataLoaderConfiguration
from accel_runtime.foundation.nested import ContainerSpec


@pytest.fixture(
    params=[
        pytest.param(1, id="1 replica"),
        pytest.param(2, id="2 replicas", marks=pytest.mark.full),
        pytest.param(4, id="4 replicas"),
    ]
)
def ranks(request, replicas):
    """Each number of replicas, in turn."""
    return replicas[request.param]


def of(**config):
    return Accelerator(dataloader_config=DataLoaderConfiguration(**config))


def test_every_sample_is_gathered_once_in_order_with_constant_shapes(ranks):
    """Use lengths around each multiple of a batch, from indices and streams; numbers, tensors and objects."""

    def read_epochs(count, size, *, stream):
        accelerator = of()
        loader = accelerator.prepare(DataLoader(SampleStream(range(count)) if stream else range(count), size))
        samples, objects, shapes = [], [], set()
        for batch in loader:
            shapes.add(tuple(batch.shape))
            samples += accelerator.gather_for_metrics(batch * 2).tolist()
            objects += accelerator.gather_for_metrics([f"no {n}" for n in batch.tolist()])
        return samples, objects, shapes, loader.repeats

    def all_of_them():
        return {
            (count, size, stream): read_epochs(count, size, stream=stream)
            for size in (1, 4)
            for count in (0, 1, 3, 4, 5, 15, 16, 17)
            for stream in (False, True)
        }

    for result in ranks.run(all_of_them):
        for (count, size, _), (samples, objects, shapes, repeats) in result.items():
            assert samples == [2 * n for n in range(count)]
            assert objects == [f"no {n}" for n in range(count)]
            assert shapes == ({(size,)} if count else set())
            assert repeats == -count % (size * ranks.size)


def test_one_replica_keeps_a_short_last_batch_without_even_batches(replicas):
    def read_epoch():
        accelerator = of(even_batches=False)
        loader = accelerator.prepare(DataLoader(range(10), 4))
        return [batch.tolist() for batch in loader], loader.repeats, loader.end

    batches, repeats, end = replicas[1].run(read_epoch)[0]
    assert batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert repeats == 0
    assert "the last batch is not padded" in end


def test_one_replica_reports_its_padding(replicas):
    def collect_messages():
        accelerator = of()
        loader = accelerator.prepare(DataLoader(range(10), 4))
        dropping = accelerator.prepare(DataLoader(range(10), 4, drop_last=True))
        batches = [batch.tolist() for batch in loader]
        return batches, loader.end, loader.repeats, len(list(dropping)), dropping.end, accelerator.describe()

    batches, end, repeats, dropping, left_out, described = replicas[1].run(collect_messages)[0]
    assert batches[-1] == [8, 9, 0, 1]
    assert repeats == 2
    assert end == "the last batch is padded from the start: 2 samples an epoch"
    assert end in str(described)
    assert (dropping, left_out) == (2, "no padding")


def test_outputs_of_a_padded_batch_are_recognized_on_one_replica(replicas):
    def gather_outputs():
        accelerator = of()
        model = accelerator.prepare(torch.nn.Identity())
        loader, other = (accelerator.prepare(DataLoader(range(count), 4)) for count in (6, 9))
        gathered_outputs = [], [], []
        for batch in loader:
            outputs = model(batch) + 100
            for inner in other:  # an evaluation inside the loop
                gathered_outputs[1].extend(accelerator.gather_for_metrics(model(inner)).tolist())
            gathered_outputs[0].extend(accelerator.gather_for_metrics(outputs, batch=batch).tolist())
            # A scalar, a row for all, and two rows a sample.
            gathered = accelerator.gather_for_metrics(
                {"loss": outputs.sum(), "rows": batch.repeat_interleave(2), "one": [batch.sum()[None]]},
                batch=batch,
            )
            gathered_outputs[2].append(
                [gathered["loss"].dim(), gathered["rows"].tolist(), len(gathered["one"][0])]
            )
        return gathered_outputs

    outer, inner, mixed = replicas[1].run(gather_outputs)[0]
    assert outer == [100, 101, 102, 103, 104, 105]
    assert inner == list(range(9)) * 2
    assert mixed == [[0, [0, 0, 1, 1, 2, 2, 3, 3], 1], [0, [4, 4, 5, 5], 1]]


def test_sharded_data_keep_constant_shapes(ranks):
    def read_epoch(*, stream, workers):
        import warnings

        warnings.filterwarnings("ignore", "This DataLoader will create")
        accelerator = of()
        rank = accelerator.process_index
        numbers = [100 * rank + n for n in range(3 + 4 * rank)]
        data = SampleStream(numbers) if stream else numbers
        loader = accelerator.prepare_data_loader(DataLoader(data, 2, num_workers=workers), data="sharded")
        shapes, samples = set(), []
        for batch in loader:
            shapes.add(tuple(batch.shape))
            samples += accelerator.gather_for_metrics(batch).tolist()
        return shapes, sorted(samples)

    def all_of_them():
        return [read_epoch(stream=stream, workers=workers) for stream, workers in ((0, 0), (1, 0), (0, 1))]

    expected = [100 * rank + n for rank in range(ranks.size) for n in range(3 + 4 * rank)]
    assert ranks.run(all_of_them) == [[({(2,)}, expected)] * 3] * ranks.size


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

    def read_epoch(kind, method):
        accelerator = exactness.create_accelerator(method)
        loader = accelerator.prepare(exactness.LOADERS[kind]())
        return [
            n
            for b in loader
            for n in accelerator.gather_for_metrics(exactness.get_sample_numbers(b)).tolist()
        ]

    kinds = [kind for kind in KINDS if ranks.size < 4 or "workers" not in kind]
    methods = ["even", "not even"] if ranks.size == 1 else ["even"]

    def read_all():
        return {
            (kind, method): read_epoch(kind, exactness.WAYS[method]) for kind in kinds for method in methods
        }

    for results in ranks.run(read_all):
        assert {key: sorted(samples) for key, samples in results.items()} == {
            (kind, method): list(exactness.COUNTS[kind]) for kind in kinds for method in methods
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


def read_sample(index, bad):
    """Return a number; those from `bad` on cannot be read."""
    if index >= bad:
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

    def read_until_error(workers):
        import threading
        import traceback
        import warnings

        warnings.filterwarnings("ignore", "This DataLoader will create|ComplexHalf")
        accelerator = of()
        bad = 3 * 2 * accelerator.num_processes
        cases = {
            "dataset": (MappedDataset(64, lambda index: read_sample(index, bad)), None),
            "collate": (MappedDataset(64, torch.tensor), Refusing(bad)),
            "transfer": (MappedDataset(64, torch.tensor), Refusing(bad, dtype=torch.complex32)),
        }
        errors_by_case = {}
        for case, (data, collate) in cases.items():
            loader = accelerator.prepare(DataLoader(data, 2, num_workers=workers, collate_fn=collate))
            errors = []
            try:
                errors.extend(batch.tolist() for batch in loader)
            except (LookupError, RuntimeError) as error:
                error_texts = type(error).__name__, str(error), traceback.format_exc()
                errors_by_case[case] = errors, error_texts, loader.capture_state().running[0].source.offset
        accelerator.wait_for_everyone()
        rank, names = accelerator.process_index, [thread.name for thread in threading.enumerate()]
        return accelerator.num_processes, rank, errors_by_case, [name for name in names if "worker" in name]

    for world, rank, errors_by_case, threads in ranks.run(read_until_error, workers):
        steps = [[at, at + 1] for at in range(2 * rank, 3 * 2 * world, 2 * world)]
        assert [errors for errors, *_ in errors_by_case.values()] == [steps] * 3
        for case, frame in (("dataset", "__getitem__"), ("collate", "__call__")):
            _, (kind, text, trace), offset = errors_by_case[case]
            assert kind == "LookupError"
            assert "no such sample" in text
            assert f"in {frame}" in trace
            assert offset == 3 * 2 * world
        kind, text, _ = errors_by_case["transfer"][1]
        assert (kind, text) == ("RuntimeError", "Type not supported: ComplexHalf")
        assert not threads


@pytest.mark.parametrize("workers", [0, 2])
def test_an_interrupted_loop_resumes_at_the_batch_of_the_script(ranks, workers):
    """The prefetched batch must not count."""

    def interrupt_and_resume(workers):
        import threading
        import warnings

        warnings.filterwarnings("ignore", "This DataLoader will create")
        accelerator = of()
        size = 8 // accelerator.num_processes

        def start_loader():
            return accelerator.prepare(
                DataLoader(range(43), size, shuffle=True, num_workers=workers, pin_memory=workers > 0)
            )

        def gathered(batches):
            return [accelerator.gather_for_metrics(batch).tolist() for batch in batches]

        torch.manual_seed(4)
        accelerator.wait_for_everyone()
        loader = start_loader()
        first, states = [], []
        for batch in loader:
            first.append(accelerator.gather_for_metrics(batch).tolist())
            states.append(loader.state_dict())
        rests = []
        for state in states:
            resumed_loader = start_loader()
            resumed_loader.load_state_dict(state, position="exact")
            rests.append(gathered(resumed_loader))
        interrupted = start_loader()
        for _ in interrupted:
            break
        accelerator.wait_for_everyone()
        return first, rests, [t.name for t in threading.enumerate() if "_worker)" in t.name]

    for first, rests, threads in ranks.run(interrupt_and_resume, workers):
        assert sorted(n for batch in first for n in batch) == list(range(43))
        assert rests == [first[at + 1 :] for at in range(len(first))]
        assert not threads


def test_two_loops_can_run_in_parallel_and_nested(ranks):
    def read_loops():
        import warnings

        warnings.filterwarnings("ignore", "This DataLoader will create")
        accelerator = of()
        iterator_a, iterator_b, inner = (
            accelerator.prepare(DataLoader(range(count), 2, num_workers=1, persistent_workers=True))
            for count in (11, 9, 5)
        )
        samples = [[], [], []]
        for _ in range(2):
            for first, second in zip(iterator_a, iterator_b, strict=False):
                samples[0] += accelerator.gather_for_metrics(first).tolist()
                samples[1] += accelerator.gather_for_metrics(second).tolist()
            for _ in iterator_a:
                inner_samples = [accelerator.gather_for_metrics(batch).tolist() for batch in inner]
                samples[2].append([n for batch in inner_samples for n in batch])
        return samples

    shorter = -(-9 // (2 * ranks.size))
    for first, second, inner in ranks.run(read_loops):
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
    def read_structures(workers):
        accelerator = of()
        data = MappedDataset(10, torch.tensor)
        loader = accelerator.prepare(DataLoader(data, 2, num_workers=workers, collate_fn=nested))
        kinds, numbers, texts = set(), [], []
        for batch in loader:
            pair = batch["pair"]
            assert type(pair) is ContainerSpec
            number, more = pair[:2]
            assert more["none"] is None
            assert more["text"] == [f"no {n}" for n in number.tolist()]
            custom = getattr(batch["own"], "tensor", batch["own"])
            assert custom.tolist() == [2 * n for n in number.tolist()]
            kinds |= {
                (str(t.dtype), t.device.type)
                for t in (number, custom, batch["half"], batch["flags"], batch["scalar"])
            }
            gathered = accelerator.gather_for_metrics({"number": number, "text": more["text"]})
            numbers += gathered["number"].tolist()
            texts += gathered["text"]
        plain = accelerator.prepare(DataLoader(data, 2, num_workers=workers, collate_fn=words))
        spoken = [word for batch in plain for word in accelerator.gather_for_metrics(batch)]
        return kinds, numbers, texts, spoken

    for kinds, numbers, texts, spoken in ranks.run(read_structures, workers):
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
    assert all("all ranks must run the same program" in message for message in replicas[2].run(refused_tail))
