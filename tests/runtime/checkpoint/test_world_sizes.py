"""Checkpoints of any world size are loaded on any other, replicated or sharded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.runs.file_system import Run
from support.runs.recorded_runs import Samples, Script, start_training, to_numbers, train_batch
from support.training.models import UnevenNet
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.data import DataLoader

from accel_runtime import Accelerator, DataLoaderConfiguration, GradientAccumulationPlugin
from accel_runtime.checkpoint.load import LoadOperation
from accel_runtime.checkpoint.save import SaveOperation, SaveTarget
from accel_runtime.checkpoint.state_items import ModelItem, OptimizerItem
from accel_runtime.storage.file_store import FileStore
from accel_runtime.storage.file_system import FileSystem
from accel_runtime.training.accumulation import Accumulation
from accel_runtime.training.gradients import name_parameters
from accel_runtime.training.optimizer import PreparedOptimizer

STEPS, EPOCHS = 4, 2


def build_options():
    plugin = GradientAccumulationPlugin(num_steps=3)
    config = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True)
    return {"dataloader_config": config, "gradient_accumulation_plugin": plugin}


def build_script():
    """Return a script with global batches of 12 on 1 to 4 ranks, so that the gradients are equal."""
    return Script(
        options=build_options,
        model=lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)),
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.01),
        loader=lambda data: DataLoader(data, batch_size=12, shuffle=True),
        dataset=lambda: Samples(48),
    )


def train_rest(run, batches=None):
    """Train to the end and return the gathered results; `batches` is the rest of the current epoch."""
    rows = []
    first = run.loader.epoch
    for epoch in range(first, EPOCHS):
        for batch in batches if batches is not None and epoch == first else run.loader:
            loss = train_batch(run, batch)
            samples = run.accelerator.gather_for_metrics(batch[0]).tolist()
            mean = run.accelerator.reduce(torch.tensor(loss), "mean").item()
            flags = run.accelerator.gather(torch.tensor([int(run.accelerator.sync_gradients)])).tolist()
            rows.append((samples, mean, flags, run.scheduler.get_last_lr()[0], run.optimizer.steps))
    model = run.accelerator.unwrap_model(run.model)
    return rows, [p.detach().tolist() for p in model.parameters()], torch.rand(2).tolist()


def train_and_save(folder, steps):
    run = start_training(build_script(), 5)
    batches = iter(run.loader)
    for _ in range(steps):
        train_batch(run, next(batches))
    run.accelerator.save_state(folder)
    # The uninterrupted run continues with the open iterator.
    return train_rest(run, batches)


def resume_and_train(folder):
    run = start_training(build_script(), 77)
    run.accelerator.resume(folder)
    return train_rest(run)


@pytest.mark.parametrize(
    ("before", "after", "steps"),
    [
        pytest.param(*sizes, steps, marks=[] if steps == chosen else pytest.mark.full)
        for *sizes, chosen in ((2, 1, 2), (1, 2, 3), (3, 2, 3), (2, 3, 2), (3, 1, 3), (1, 3, 2))
        for steps in (2, 3)
    ],
)
def test_another_world_size_continues_with_the_same_global_batches(clusters, before, after, steps, tmp_path):
    """Saved within an accumulation cycle (2 of 3 steps) and at its end."""
    (expected, expected_weights, _), *_ = clusters[before].run(train_and_save, str(tmp_path / "saved"), steps)
    draws = []
    for rows, weights, random_numbers in clusters[after].run(resume_and_train, str(tmp_path / "saved")):
        assert [step[0] for step in rows] == [step[0] for step in expected]
        assert [step[1] for step in rows] == pytest.approx([step[1] for step in expected], abs=1e-5)
        assert [(set(step[2]), *step[3:]) for step in rows] == [
            (set(step[2]), *step[3:]) for step in expected
        ]
        for weight, expected_weight in zip(weights, expected_weights, strict=True):
            assert torch.allclose(torch.tensor(weight), torch.tensor(expected_weight), atol=1e-5)
        draws.append(tuple(random_numbers))
    assert len(set(draws)) == after, "every rank has its own random stream"


@pytest.mark.slow
def test_a_checkpoint_of_four_ranks_resumes_on_one_to_three(clusters, four, tmp_path):
    (expected, *_), *_ = four.run(train_and_save, str(tmp_path / "saved"), 2)
    for after in (1, 2, 3):
        for rows, *_ in clusters[after].run(resume_and_train, str(tmp_path / "saved")):
            assert [step[0] for step in rows] == [step[0] for step in expected]


def save_or_load_offset(folder, load):
    script = Script(loader=lambda data: DataLoader(data, batch_size=2), dataset=lambda: Samples(48))
    run = start_training(script, 5)
    if load:
        run.accelerator.resume(folder)
        return run.accelerator.gather_for_metrics(next(iter(run.loader))[0]).tolist()[0]
    batches = iter(run.loader)
    for _ in range(3):
        train_batch(run, next(batches))
    run.accelerator.save_state(folder)
    return None


def test_the_offset_counts_samples_not_batches(clusters, tmp_path):
    clusters[2].run(save_or_load_offset, str(tmp_path / "saved"), False)
    for after in (1, 2, 3):
        assert set(clusters[after].run(save_or_load_offset, str(tmp_path / "saved"), True)) == {12}


def save_or_load_buffers(folder, load):
    """Save or load BatchNorm buffers that differ between ranks."""
    accelerator = Accelerator()
    model = accelerator.prepare(nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1)))
    norm = accelerator.unwrap_model(model)[0]
    if load:
        accelerator.load_state(folder)
    else:
        norm.running_mean.fill_(accelerator.process_index + 1)
        accelerator.save_state(folder)
    return norm.running_mean.item()


def test_different_buffers_are_restored_by_rank_or_from_the_first_rank(clusters, tmp_path):
    folder = str(tmp_path / "saved")
    assert clusters[3].run(save_or_load_buffers, folder, False) == [1, 2, 3]
    assert clusters[3].run(save_or_load_buffers, folder, True) == [1, 2, 3]
    assert clusters[2].run(save_or_load_buffers, folder, True) == [1, 1]
    assert clusters[1].run(save_or_load_buffers, folder, True) == [1]


# Sharded -----------------------------------------------------------------------------------


def build_trained_model(kind, seed):
    """Return a model and its optimizer after one step with gradients that do not depend on the world size."""
    Accelerator()  # creates the process group
    torch.manual_seed(seed)
    model = UnevenNet()
    optimizer = None
    if kind == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    elif kind == "tensor":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module, placement in ((model.first, Shard(0)), (model.second, Shard(1))):
            for name, parameter in list(module.named_parameters()):
                setattr(module, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [placement])))
    elif kind == "both":
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicas", "shards"))
        for module in (model.first, model.second):
            for name, parameter in list(module.named_parameters()):
                sharded = distribute_tensor(parameter.detach(), mesh, [Replicate(), Shard(0)])
                setattr(module, name, nn.Parameter(sharded))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.manual_seed(seed + 1)
    for parameter in model.parameters():
        full = torch.randn(parameter.shape)
        if isinstance(parameter, DTensor):
            full = distribute_tensor(full, parameter.device_mesh, parameter.placements)
        parameter.grad = full
    optimizer.step()
    return model, optimizer


def build_state_items(model, optimizer):
    prepared = PreparedOptimizer(optimizer, Accumulation(1), None)
    names = name_parameters([model], [prepared.parameter_groups])
    return [ModelItem("model", model), OptimizerItem("optimizer", prepared.optimizer, names)]


def gather_state(model, optimizer):
    """Return the full state of the model and optimizer as numbers."""

    def to_full(value):
        return value.full_tensor() if isinstance(value, DTensor) else value

    state = {name: to_full(value) for name, value in model.state_dict().items()}
    moments = {
        name: {key: to_full(value) for key, value in optimizer.state[p].items()}
        for name, p in model.named_parameters()
    }
    return to_numbers({"model": state, "optimizer": moments})


def get_transport():
    accelerator = Accelerator()
    return accelerator._run.build_all_gather("test"), accelerator.process_index, accelerator.num_processes


def save_sharded(folder, kind, disk=FileSystem, shared=True):
    model, optimizer = build_trained_model(kind, 1)
    group = Accelerator()._run.build_group("test")
    saving = SaveOperation(group, FileStore(disk()), shared=shared)
    saving.open(SaveTarget(lambda: str(folder)), lambda: build_state_items(model, optimizer), 1)
    stored_bytes = sum(file.bytes for file in saving.plan.files)
    saving.finish(group)
    return gather_state(model, optimizer), stored_bytes


class SeparateFileSystem(FileSystem):
    """A file system of a node that does not see the directories of the first node."""

    num_lookups = 0
    has_copy = False
    """Whether this node creates a directory of the same name, too."""

    def sees(self, _):
        self.num_lookups += 1
        return dist.get_rank() == 0 or (self.has_copy and self.num_lookups > 1)


def save_with_hook_on_separate_nodes(folder):
    """Save with a hook that writes on every node."""
    accelerator = Accelerator()
    accelerator.prepare(nn.Linear(1, 1))
    accelerator._run.options.settings = replace(accelerator.settings, shared_files=False)
    disk = SeparateFileSystem()
    disk.has_copy = True
    accelerator._checkpoints._store = FileStore(disk)
    accelerator.register_save_state_pre_hook(
        lambda _models, _weights, output_dir: Path(output_dir, "note").touch()
    )
    accelerator.save_state(folder)


def train_within_accumulation_cycle(folder, load):
    """Train one step before and one after a save, so that large gradients of each rank are saved or loaded."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = accelerator.prepare(nn.Linear(300, 100))
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator._run.options.settings = replace(accelerator.settings, shared_files=False)
    accelerator._checkpoints._store = FileStore(SeparateFileSystem())

    def train_step(number):
        torch.manual_seed(10 * number + accelerator.process_index)
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.randn(4, 300)).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    if load:
        accelerator.load_state(folder)
    else:
        train_step(1)
        accelerator.save_state(folder)
    train_step(2)
    return [p.detach().sum().item() for p in model.parameters()]


def load_sharded(folder, kind):
    model, optimizer = build_trained_model(kind, 2)
    loading = LoadOperation(*get_transport(), FileStore(), strict=True)
    loading.open(lambda: folder, folder)
    loading.load(build_state_items(model, optimizer))
    assert any(isinstance(p, DTensor) for p in model.parameters()) == (kind != "replicated")
    return gather_state(model, optimizer)


def assert_each_element_is_stored_once(folder):
    """Assert that each element of each tensor is in exactly one chunk."""
    manifest = json.loads((Path(folder) / "checkpoint.json").read_text())["checkpoint"]
    for name, stored in manifest["tensors"].items():
        counts = torch.zeros(stored["shape"], dtype=torch.int32)
        for chunk in stored["chunks"]:
            region = tuple(slice(o, o + s) for o, s in zip(chunk["offsets"], chunk["sizes"], strict=True))
            counts[region] += 1
        assert bool((counts == 1).all()), name
    return manifest


def import_sharding():
    """Import a module that torch imports at the first use of sharding."""
    import torch._dynamo  # noqa: F401


@pytest.fixture(scope="module")
def sharding_clusters(clusters):
    """Return clusters whose ranks have imported slow modules of torch."""
    for size in (2, 3):
        clusters[size].run(import_sharding)
    return clusters


@pytest.mark.parametrize("kind", ["fsdp", "tensor"])
def test_shards_are_loaded_as_shards_and_as_full_tensors(sharding_clusters, kind, tmp_path):
    folder = str(tmp_path / "saved")
    outcomes = sharding_clusters[3].run(save_sharded, folder, kind)
    expected = outcomes[0][0]
    assert_each_element_is_stored_once(folder)
    assert (
        max(stored_bytes for _, stored_bytes in outcomes)
        < sum(stored_bytes for _, stored_bytes in outcomes) * 0.6
    )
    assert sharding_clusters[2].run(load_sharded, folder, kind) == [expected] * 2
    assert sharding_clusters[3].run(load_sharded, folder, kind) == [expected] * 3
    assert sharding_clusters[2].run(load_sharded, folder, "replicated") == [expected] * 2
    assert load_in_one_process(folder) == expected


def load_in_one_process(folder):
    """Load in one process without a process group."""
    torch.manual_seed(2)
    model = UnevenNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loading = LoadOperation(lambda item: [item], 0, 1, FileStore(), strict=True)
    loading.open(lambda: folder, folder)
    loading.load(build_state_items(model, optimizer))
    return gather_state(model, optimizer)


def test_replicated_tensors_are_loaded_as_shards(sharding_clusters, tmp_path):
    folder = str(tmp_path / "saved")
    expected = sharding_clusters[2].run(save_sharded, folder, "replicated")[0][0]
    assert_each_element_is_stored_once(folder)
    assert sharding_clusters[3].run(load_sharded, folder, "fsdp") == [expected] * 3
    assert sharding_clusters[3].run(load_sharded, folder, "tensor") == [expected] * 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp", "both"])
def test_shards_of_four_ranks_are_loaded_on_fewer(sharding_clusters, four, kind, tmp_path):
    folder = str(tmp_path / "saved")
    four.run(import_sharding)
    expected = four.run(save_sharded, folder, kind)[0][0]
    assert_each_element_is_stored_once(folder)
    for size in (2, 3):
        assert sharding_clusters[size].run(load_sharded, folder, "fsdp") == [expected] * size
    assert four.run(load_sharded, folder, "both") == [expected] * 4
    assert load_in_one_process(folder) == expected


# Other tools -------------------------------------------------------------------------------


def read_safetensors(folder, item):
    from safetensors.torch import load_file

    tensors = {}
    for path in sorted(Path(folder).glob(f"{item}.safetensors")) + sorted(
        Path(folder).glob(f"{item}-*-of-*.safetensors")
    ):
        tensors |= load_file(path)
    return tensors


def test_safetensors_loads_a_replicated_model(clusters, tmp_path):
    folder = str(tmp_path / "saved")
    expected = clusters[2].run(save_sharded, folder, "replicated")[0][0]
    assert to_numbers(read_safetensors(folder, "model")) == expected["model"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_loads_a_sharded_model(sharding_clusters, tmp_path):
    folder = tmp_path / "saved"
    expected = sharding_clusters[3].run(save_sharded, str(folder), "fsdp")[0][0]
    folder_of_model = tmp_path / "only"
    folder_of_model.mkdir()
    for path in folder.glob("model*.safetensors"):
        (folder_of_model / path.name).symlink_to(path)
    state = UnevenNet().state_dict()
    torch.distributed.checkpoint.load(
        state, storage_reader=HuggingFaceStorageReader(str(folder_of_model)), no_dist=True
    )
    assert to_numbers(dict(state)) == expected["model"]


def test_only_the_first_rank_writes_if_nodes_share_no_files(clusters, tmp_path):
    outcomes = clusters[2].run(save_sharded, str(tmp_path / "saved"), "replicated", SeparateFileSystem, False)
    assert [stored_bytes == 0 for _, stored_bytes in outcomes] == [False, True]
    assert_each_element_is_stored_once(tmp_path / "saved")
    assert clusters[2].run(load_sharded, str(tmp_path / "saved"), "replicated") == [outcomes[0][0]] * 2


def test_gradients_of_each_rank_are_sent_to_the_writing_node(clusters, tmp_path):
    expected = clusters[2].run(train_within_accumulation_cycle, str(tmp_path / "saved"), False)
    assert clusters[2].run(train_within_accumulation_cycle, str(tmp_path / "saved"), True) == expected


def test_a_hook_that_writes_on_a_separate_node_raises_and_leaves_no_files(clusters, tmp_path):
    with pytest.raises(Exception, match=r"A save hook wrote .* on a node that does not see the checkpoint"):
        clusters[2].run(save_with_hook_on_separate_nodes, str(tmp_path / "saved"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "shared", "message"),
    [
        ("replicated", True, r"shared_files: false in the profile or ACCEL_SHARED_FILES=0"),
        ("fsdp", False, r"is sharded, and this node does not see the checkpoint's directory"),
    ],
)
def test_saving_on_nodes_without_shared_files_raises_with_advice(clusters, tmp_path, kind, shared, message):
    with pytest.raises(Exception, match=message):
        clusters[2].run(save_sharded, str(tmp_path / "saved"), kind, SeparateFileSystem, shared)
    assert list(tmp_path.iterdir()) == []


def save_step_five(folder):
    assert Run(folder).save(5) is None


def load_and_report(folder):
    run = Run(folder)
    run.set_step(9)
    before = torch.get_rng_state()
    step = run.acc.load_state().manifest.step
    values = {float(value) for tensor in run.tensors() for value in tensor.flatten()}
    random_state = torch.get_rng_state()
    return step, run.optimizer.steps, values, torch.equal(random_state, before), random_state.sum().item()


@pytest.mark.parametrize("size", [1, 3])
def test_a_checkpoint_of_two_ranks_loads_its_step_and_random_states_that_differ(clusters, size, tmp_path):
    clusters[2].run(save_step_five, tmp_path)
    results = clusters[size].run(load_and_report, tmp_path)
    assert [result[:4] for result in results] == [(5, 5, {5.0}, False)] * size
    assert len({random_state for *_, random_state in results}) == size
