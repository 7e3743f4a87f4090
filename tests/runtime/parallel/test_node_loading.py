"""A model of `accelerator.loading()` is read once a node, and is the same on all ranks as if each had read it."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_model
from support.runs.sharded_runs import (
    build_accelerator,
    build_model,
    gather_model_state,
    import_sharding,
    to_full,
)
from support.training.models import UnevenTiedNet
from torch import nn

from accel_runtime import Accelerator, init_empty_weights

LAYOUTS = [{}, {"dp_shard": 2}]
FOUR = [
    {"dp_shard": 4},
    {"dp_shard": 2, "dp_replicate": 2},
    {"dp_shard": 2, "tp": 2, "tp_plan": "blocks.*.up=colwise,blocks.*.down=rowwise"},
    {},
]


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """The files of the weights of a model, with and without one of them; a pickle and safetensors."""
    folder = tmp_path_factory.mktemp("weights")
    model = build_model()
    state = model.state_dict()
    torch.save(state, folder / "full.bin")
    torch.save({name: value for name, value in state.items() if "norm" not in name}, folder / "partial.bin")
    save_model(model, str(folder / "model.safetensors"))
    return folder


def read_plain(path, **options):
    """Create a model, and load its state."""
    model = UnevenTiedNet()
    model.load_state_dict(torch.load(path), **options)
    return model


def list_values(model):
    """Return all tensors of a prepared model as numbers, those that are not saved too."""
    return gather_model_state(model) | {"scale": to_full(model.scale).tolist()}


def train(run, model, optimizer):
    """Train two steps on equal data, and return the tensors."""
    for _ in range(2):
        run.backward(model(torch.arange(6)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return list_values(model)


def trained_parameters(model):
    """Return the parameters that are trained."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def load_and_train(folder, sizes, options):
    """Load a model on one rank of a node and train it; do the same with a model that each rank has built."""
    run = build_accelerator(sizes, options)
    torch.manual_seed(run.process_index)
    with run.loading():
        model = read_plain(folder / "full.bin")
        model.gain._mark = "kept"
    empty = all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    early = torch.optim.AdamW(trained_parameters(model), lr=0.1)
    model, optimizer = run.prepare(model, early)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert model.head.weight is model.embedding.weight
    assert model.gain._mark == "kept"
    loaded = list_values(model)
    other = build_model()
    other, others = run.prepare(other, torch.optim.AdamW(trained_parameters(other), lr=0.1))
    return empty, loaded, train(run, model, optimizer), train(run, other, others)


def check_runs(results, readers):
    """Check the results of `load_and_train`."""
    expected = list_values(build_model())
    for rank, (empty, loaded, trained, other) in enumerate(results):
        assert empty is (rank not in readers)
        assert loaded == expected
        assert trained == other
        assert trained["embedding.weight"] != expected["embedding.weight"]


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_each_rank_gets_the_values_that_the_first_rank_of_the_node_has_read(pair, weights, sizes):
    check_runs(pair.run(load_and_train, weights, sizes, {}), {0})


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"ignore": "gain,blocks.*.norm"}, {"cpu_offload": True}, {"wrap": "none"}], ids=str
)
def test_values_are_sent_with_options_of_fully_shard(pair, weights, options):
    check_runs(pair.run(load_and_train, weights, {"dp_shard": 2}, options), {0})


@pytest.mark.slow
@pytest.mark.parametrize("sizes", FOUR, ids=str)
def test_the_first_rank_of_each_of_two_nodes_reads(two_nodes, weights, sizes):
    two_nodes.run(import_sharding)
    check_runs(two_nodes.run(load_and_train, weights, sizes, {}), {0, 2})


def test_on_one_process_the_block_runs_as_it_is(weights):
    run = Accelerator()
    with run.loading():
        model = read_plain(weights / "full.bin")
    assert model(torch.arange(6)).isfinite().all()
    assert list_values(run.prepare(model)) == list_values(build_model())


def load_partially(folder, sizes):
    """Load files that lack weights, with other random numbers on each rank."""
    run = build_accelerator(sizes)
    torch.manual_seed(10)
    with run.loading():
        model = read_plain(folder / "partial.bin", strict=False)
        for block in model.blocks:
            nn.init.normal_(block.norm.weight)
        drawn = model.blocks[1].norm.weight.tolist() if not model.gain.is_meta else None
    after = torch.rand(3).tolist()
    values = list_values(run.prepare(model))
    torch.manual_seed(run.process_index)
    with run.loading():
        other = UnevenTiedNet()
    return drawn, values["blocks.1.norm.weight"], after, list_values(run.prepare(other)), torch.rand(1).item()


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_weights_that_no_file_has_are_those_of_the_first_rank(pair, weights, sizes):
    (drawn, *first), (absent, *second) = pair.run(load_partially, weights, sizes)
    assert absent is None
    assert drawn == first[0] == second[0]
    assert first[1] == second[1]  # the random states of ranks that began alike stay alike
    assert first[2] == second[2]
    assert first[3] != second[3]  # and others stay different


def load_different_files(folder, sizes, records):
    """Let each node read another model; return the values, and the warnings."""
    run = build_accelerator(sizes)
    seen = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    logging.getLogger("accel_runtime.parallel").addHandler(handler)
    with run.loading():
        model = build_model(seed=1 + run.process_index // 2)
    values = list_values(run.prepare_model(model, evaluation_mode=True))
    logging.getLogger("accel_runtime.parallel").removeHandler(handler)
    return values, seen


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{}, {"dp_shard": 4}], ids=str)
def test_nodes_that_read_different_files_take_the_values_of_the_first_rank(two_nodes, sizes):
    two_nodes.run(import_sharding)
    results = two_nodes.run(load_different_files, None, sizes, None)
    expected = list_values(build_model(seed=1))
    assert [values == expected for values, _ in results] == [True] * 4
    assert "differ between the nodes: all ranks take the values of rank 0" in results[0][1][0]


def catch_failure(folder, reason):
    """Fail inside of the block; return the error, and check that the ranks still work."""
    run = Accelerator()
    try:
        with run.loading():
            if reason == "missing":
                torch.load(folder / "absent.bin") if run.is_main_process else None
            elif reason == "damaged":
                from safetensors.torch import load_file

                load_file(folder / "damaged.safetensors") if run.is_main_process else None
            elif run.process_index == 1:
                raise KeyError("wrong name")
    except RuntimeError as error:
        assert len(run.gather(torch.ones(1))) == 2
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("missing", ("rank 0 of node 0", "absent.bin")),
        ("damaged", ("rank 0 of node 0", "damaged.safetensors")),
        ("raised", ("rank 1 of node 0", "KeyError", "wrong name")),
    ],
)
def test_a_failure_inside_of_the_block_is_raised_on_all_ranks(pair, weights, reason, words):
    Path(weights / "damaged.safetensors").write_bytes((weights / "model.safetensors").read_bytes()[:-40])
    for message in pair.run(catch_failure, weights, reason):
        assert all(word in message for word in words), message


class Special(nn.Parameter):
    """A parameter of a class of its own, as those of quantized weights."""


def catch_refusals(_):
    """Return the messages of what is refused."""
    run, messages = Accelerator(), []

    def catch(function, *args, **options):
        try:
            function(*args, **options)
        except (RuntimeError, ValueError) as error:
            messages.append(str(error))

    def create(make):
        with run.loading():
            return make()

    def prepare_inside():
        with run.loading():
            run.prepare(nn.Linear(2, 2))

    def special():
        model = nn.Linear(2, 2)
        model.weight = Special(torch.ones(2, 2))
        return model

    def different():
        return nn.Linear(2, 2 + run.process_index)

    def empty_on_reader():
        with init_empty_weights():
            model = nn.Linear(2, 2)
        if run.process_index:
            model.extra = nn.Parameter(torch.ones(1))
        return model

    catch(prepare_inside)
    catch(run.prepare_model, create(special), evaluation_mode=True)
    catch(run.prepare_model, create(different), evaluation_mode=True)
    model = create(lambda: nn.Sequential(nn.Linear(2, 2)))
    if run.process_index:
        catch(model, torch.ones(1, 2))
    else:
        model(torch.ones(1, 2))
        messages.append("")
    model = run.prepare(model)
    model(torch.ones(1, 2))
    return messages


def test_models_that_cannot_be_sent_or_used_are_refused_by_name(pair):
    for rank, (inside, special, different, unprepared) in enumerate(pair.run(catch_refusals, None)):
        assert "accelerator.loading() is not left yet" in inside
        assert "weight cannot be sent: tensors of other classes, such as quantized weights" in special
        assert "weight is [3, 2] float32 on rank 1, and [2, 2] float32 on rank 0" in different
        if rank:
            assert "Cannot run Linear on rank 1: rank 0 has read its values" in unprepared
            assert "Call accelerator.prepare(model) first" in unprepared


def load_pretrained(folder, sizes, options):
    """Load a model of transformers, and return its tensors and what this rank has read of its weights."""
    import transformers

    run = build_accelerator(sizes)
    with run.loading():
        model = transformers.LlamaForCausalLM.from_pretrained(folder, **options)
    read = sum(not tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    dtypes = {str(parameter.dtype) for parameter in model.parameters()}
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    model = run.prepare(model)
    loss = model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss
    run.backward(loss)
    frequencies = to_full(run.unwrap_model(model).model.rotary_emb.inv_freq).tolist()
    return read, dtypes, tied, frequencies, loss.item(), run.get_state_dict(model, everywhere=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"dp_shard": 2}, {}),
        ({"dp_shard": 2}, {"dtype": "bfloat16"}),
        ({}, {"device_map": {"": "cpu"}}),
        ({"dp_shard": 2}, {"device_map": "auto"}),
    ],
    ids=str,
)
def test_from_pretrained_reads_several_files_on_one_rank(pair, tmp_path, sizes, options):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, **options)
    expected = model.state_dict()
    loss = model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.item()
    for rank, (read, dtypes, tied, frequencies, reached, state) in enumerate(
        pair.run(load_pretrained, tmp_path, sizes, options)
    ):
        assert bool(read) is (rank == 0)
        assert dtypes == {str(model.dtype)}
        assert tied
        assert frequencies == model.model.rotary_emb.inv_freq.tolist()
        assert reached == pytest.approx(loss, rel=1e-2 if "dtype" in options else 1e-6)
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], expected[name]) for name in expected)


class Mixed(nn.Module):
    """Parameters of several dtypes and layouts, a scalar, one without elements, and one that two modules register."""

    def __init__(self):
        super().__init__()
        self.half, self.double = nn.Linear(3, 2).bfloat16(), nn.Linear(3, 2).double()
        self.image = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.scalar, self.empty = nn.Parameter(torch.rand(())), nn.Parameter(torch.empty(0))
        shared = nn.Parameter(torch.rand(3))
        self.first, self.second = shared, shared
        self.register_buffer("bits", torch.tensor([True, False]))
        self.register_buffer("same", self.bits)

    def forward(self, x):
        return self.image(x)


def load_mixed(sizes):
    """Load the model, and return what ranks have of it."""
    run = build_accelerator(sizes, {"wrap": "Linear"} if sizes else {})
    torch.manual_seed(run.process_index)
    with run.loading():
        model = Mixed().to(run.device)
    original = run.unwrap_model(run.prepare_model(model, evaluation_mode=True))
    state = {name: to_full(value.detach()) for name, value in original.state_dict().items()}
    return state, original.first is original.second, original.bits is original.same


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_tensors_of_any_dtype_and_layout_are_sent(pair, sizes):
    torch.manual_seed(0)
    expected = Mixed().state_dict()
    for state, is_shared, is_same in pair.run(load_mixed, sizes):
        assert is_shared
        assert is_same
        assert all(torch.equal(state[name], value) for name, value in expected.items())


# Memory --------------------------------------------------------------------------------

WIDTH = 2048
TENSOR_MIB = WIDTH * WIDTH * 4 >> 20
NOISE_MIB = 48
"""What the allocator and gloo keep, on all ranks together."""


def build_layers(count, width=WIDTH):
    """Return a model of equal layers, each of one value; each is allocated before it is in the model."""
    layers = nn.Sequential()
    for index in range(count):
        layer = nn.Module()
        layer.weight = nn.Parameter(torch.full((width, width), float(index)))
        layers.append(layer)
    return layers


def start_measurement():
    """Import what a sharded model needs, and return the process id."""
    run = build_accelerator({"dp_shard": "auto"})
    with run.loading():
        model = build_layers(2, 16)
    run.prepare(model)
    return os.getpid()


def load_layers(count):
    """Load a large model, and return the smallest and largest values and the bytes of the shards."""
    run = build_accelerator({"dp_shard": "auto"})
    with run.loading():
        model = build_layers(count)
    model = run.prepare(model)
    shards = [parameter.to_local() for parameter in model.parameters()]
    return [[each.item() for each in shard.aminmax()] for shard in shards], sum(
        shard.nbytes for shard in shards
    ) >> 20


def sum_memory(processes):
    """Return the resident memory of processes, in MiB."""
    pages = sum(int(Path(f"/proc/{each}/statm").read_text().split()[1]) for each in processes)
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


def measure_peak(group, function, *args):
    """Run a function on ranks; return its results, and by how many MiB their memory together has grown at most."""
    processes = group.run(start_measurement)
    before, peaks, ended = sum_memory(processes), [0], threading.Event()

    def watch():
        while not ended.wait(0.002):
            peaks.append(sum_memory(processes))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        results = group.run(function, *args)
    finally:
        ended.set()
        watcher.join()
    return results, max(peaks) - before


def check_memory(group, count):
    """Check that ranks load a model of `count` layers within its size and one tensor a rank."""
    size = count * TENSOR_MIB
    results, peak = measure_peak(group, load_layers, count)
    assert all(values == [[index, index] for index in range(count)] for values, _ in results)
    assert [shards for _, shards in results] == [size // group.size] * group.size
    assert size - NOISE_MIB <= peak <= size + group.size * TENSOR_MIB + NOISE_MIB


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
def test_the_memory_of_a_node_is_that_of_the_model_and_a_tensor_a_rank(pair):
    check_memory(pair, 12)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
@pytest.mark.parametrize("size", [2, 4])
def test_the_memory_of_a_node_does_not_grow_with_its_ranks(clusters, size):
    check_memory(clusters[size], 40)
