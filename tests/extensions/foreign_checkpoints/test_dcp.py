"""Checkpoints in torch's own format: exported ones are read by `dcp.load`, and imported ones are loaded, bitwise equal."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import warnings
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from support.runs.sharded_runs import build_accelerator, build_model, to_full
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from accel_cli.commands.checkpoint_operations import show_checkpoint
from accel_cli.errors import AccelError
from accel_cli.extensions.foreign_checkpoints.dcp import import_dcp
from accel_runtime import Accelerator
from accel_runtime.extensions.foreign_checkpoints import dcp_export, dcp_manifest
from accel_runtime.extensions.foreign_checkpoints.dcp_export import DcpRequest, write_dcp_folder
from accel_runtime.extensions.foreign_checkpoints.folders import DcpSelection
from accel_runtime.storage.errors import CheckpointError, RequestError
from accel_runtime.storage.file_store import FileStore
from accel_runtime.storage.verification import verify_files

pytestmark = pytest.mark.usefixtures("on_the_cpu", "by_value")


def build_optimizer(model, lr=0.01):
    """Return AdamW with two groups of parameters."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for name, p in trained if "norm" in name], "weight_decay": 0.0},
        {"params": [p for name, p in trained if "norm" not in name], "lr": lr / 2},
    ]
    return torch.optim.AdamW(groups, lr=lr, amsgrad=True)


class Run:
    """The prepared objects of a script, replicated or sharded."""

    def __init__(self, sizes, seed=1, dtype=torch.float32, lr=0.01):
        self.accelerator = build_accelerator(sizes)
        model = build_model(seed).to(dtype)
        self.model, self.optimizer = self.accelerator.prepare(model, build_optimizer(model, lr))

    def learn(self, steps=2):
        """Train, with different inputs on each rank; return the losses."""
        losses = []
        for step in range(steps):
            inputs = torch.arange(6) + step
            loss = self.model(inputs).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    def state(self):
        return read_state(self.accelerator.unwrap_model(self.model), self.optimizer)


def read_state(model, optimizer):
    """Return weights, buffers and moments as full tensors, and the options of the groups by parameter."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    values = {f"model.{name}": value for name, value in model.state_dict().items()}
    for parameter, state in optimizer.state.items():
        values |= {f"state.{names[parameter]}.{key}": value for key, value in state.items()}
    full = {name: to_full(value).detach().clone() for name, value in values.items()}
    options = {
        names[parameter]: {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    return full, options


def same(first, second):
    (tensors, options), (others, other_options) = first, second
    assert tensors.keys() == others.keys()
    different = [name for name in tensors if not torch.equal(tensors[name], others[name])]
    return (
        not different
        and options == other_options
        and all(tensors[name].dtype == others[name].dtype for name in tensors)
    )


def save_with_accel(folder, sizes, dtype=torch.float32):
    """Train and save; return the state."""
    run = Run(sizes, dtype=dtype)
    run.learn()
    run.accelerator.save_state(folder)
    return run.state()


class Plain:
    """Model and optimizer of a script that uses torch only, sharded if there are several ranks."""

    def __init__(self, seed, layout="nested", dtype=torch.float32, lr=0.01):
        Accelerator()  # the process group
        self.model = build_model(seed).to(dtype)
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.model)
        self.optimizer = build_optimizer(self.model, lr)
        self.layout = layout
        self.options = StateDictOptions(flatten_optimizer_state_dict=layout != "nested")

    def learn(self, steps=2):
        for step in range(steps):
            self.model(torch.arange(6) + step).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state_dict(self, **more):
        model = get_model_state_dict(self.model)
        optimizer = get_optimizer_state_dict(self.model, self.optimizer, options=self.options)
        return {"optimizer": optimizer, **more} | (model if self.layout == "torchtitan" else {"model": model})

    def save(self, folder, **more):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            dcp.save(self.state_dict(**more), checkpoint_id=folder)

    def load(self, folder):
        state = self.state_dict()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            dcp.load(state, checkpoint_id=folder)
        optimizer = state.pop("optimizer")
        set_model_state_dict(self.model, state if self.layout == "torchtitan" else state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, optimizer, options=self.options)
        return read_state(self.model, self.optimizer)


def load_with_torch(folder, layout, dtype):
    return Plain(7, layout, dtype, lr=0.5).load(folder)


def save_with_torch(folder, layout):
    """Train and save with torch only; return the state, and that of two more steps."""
    plain = Plain(1, layout)
    plain.learn()
    scheduler = torch.optim.lr_scheduler.StepLR(plain.optimizer, 5)
    plain.save(folder, lr_scheduler=scheduler.state_dict(), train_state={"step": torch.tensor(2)})
    saved = read_state(plain.model, plain.optimizer)
    plain.learn()
    return saved, read_state(plain.model, plain.optimizer)


def load_with_accel(folder, sizes, resume=False):
    """Load and train on; return the state before and after, and the step counts."""
    run = Run(sizes, seed=7, lr=0.5)
    checkpoint = (run.accelerator.resume if resume else run.accelerator.load_state)(folder)
    loaded, steps = run.state(), run.optimizer.steps
    run.learn()
    return loaded, run.state(), (steps, checkpoint.manifest.step)


def export(source, folder, layout="nested", rank=0):
    with FileStore().open(str(source)) as snapshot:
        return write_dcp_folder(snapshot, Path(folder), DcpRequest(layout, rank))


def import_(folder, target, **selection):
    return import_dcp(str(folder), str(target), DcpSelection(**selection), lambda *_: None)


@pytest.fixture(autouse=True)
def _small_files(monkeypatch):
    """Split tensors and files, as large ones are."""
    monkeypatch.setattr(dcp_export, "_PIECE_BYTES", 100)
    monkeypatch.setattr(dcp_export, "_FILE_BYTES", 1000)


def mesh(size):
    return {"dp_shard": size} if size > 1 else {}


# Export ----------------------------------------------------------------------------------

FULL = pytest.mark.full
EXPORTS = [
    pytest.param((1, 3), "nested", torch.float32, id="1 to 3"),
    pytest.param((3, 1), "nested", torch.bfloat16, id="3 to 1, bf16"),
    pytest.param((2, 3), "torchtitan", torch.float32, id="2 to 3, torchtitan", marks=FULL),
    pytest.param((2, 1), "flattened", torch.float32, id="2 to 1, flattened", marks=FULL),
    pytest.param((4, 2), "nested", torch.float32, id="4 to 2", marks=FULL),
    pytest.param((1, 2), "torchtitan", torch.bfloat16, id="1 to 2, torchtitan, bf16", marks=FULL),
]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "layout", "dtype"), EXPORTS)
def test_torch_loads_an_exported_checkpoint_bitwise_equal_on_any_ranks(
    clusters, tmp_path, ranks, layout, dtype
):
    writers, readers = ranks
    saved = clusters[writers].run(save_with_accel, tmp_path / "checkpoint", mesh(writers), dtype)
    result = export(tmp_path / "checkpoint", tmp_path / "dcp", layout)
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) > 3
    assert result.others == ["random"]
    loaded = clusters[readers].run(load_with_torch, tmp_path / "dcp", layout, dtype)
    assert all(same(saved[0], state) for state in loaded)


def test_an_export_holds_the_tensors_of_one_file_in_memory(tmp_path, monkeypatch):
    save_with_accel(tmp_path / "checkpoint", {})
    held, largest, read = [], [], dcp_export._read_pieces

    def record(*arguments):
        for piece in read(*arguments):
            held.append(weakref.ref(piece))
            alive = (reference() for reference in held)
            largest.append(sum(each.nbytes for each in alive if each is not None))
            yield piece

    monkeypatch.setattr(dcp_export, "_read_pieces", record)
    result = export(tmp_path / "checkpoint", tmp_path / "dcp")
    assert max(largest) < 1500 < result.bytes / 4


def test_replicas_are_exported_as_one(pair, alone, tmp_path):
    saved = pair.run(save_with_accel, tmp_path / "checkpoint", {})
    export(tmp_path / "checkpoint", tmp_path / "dcp")
    (loaded,) = alone.run(load_with_torch, tmp_path / "dcp", "nested", torch.float32)
    assert same(saved[0], loaded)


# Import ----------------------------------------------------------------------------------

IMPORTS = [
    pytest.param(1, 3, "nested", id="1 to 3"),
    pytest.param(3, 1, "torchtitan", id="3 to 1, torchtitan"),
    pytest.param(3, 2, "nested", id="3 to 2", marks=FULL),
    pytest.param(2, 4, "torchtitan", id="2 to 4, torchtitan", marks=FULL),
    pytest.param(2, 1, "flattened", id="2 to 1, flattened", marks=FULL),
]


@pytest.mark.smoke
@pytest.mark.parametrize(("writers", "readers", "layout"), IMPORTS)
def test_an_imported_checkpoint_is_loaded_bitwise_equal_on_any_ranks_and_training_continues(
    clusters, tmp_path, writers, readers, layout
):
    saved, continued = clusters[writers].run(save_with_torch, tmp_path / "dcp", layout)[0]
    result = import_(tmp_path / "dcp", tmp_path / "checkpoint")
    assert (result["step"], result["items"]) == (2, ["model", "optimizer"])
    assert result["others"] == ["lr_scheduler", "train_state"]
    verify_files(FileStore(), lambda: str(tmp_path / "checkpoint"))
    for loaded, trained, steps in clusters[readers].run(
        load_with_accel, tmp_path / "checkpoint", mesh(readers)
    ):
        assert same(saved, loaded)
        assert steps == (2, 2)
        pairs = [(trained[0][name], value) for name, value in continued[0].items()]
        assert all(torch.allclose(value, expected, atol=1e-5) for value, expected in pairs)


def test_a_folder_that_accel_exported_is_imported_bitwise_equal(pair, alone, tmp_path):
    (saved, _) = pair.run(save_with_accel, tmp_path / "checkpoint", mesh(2))
    export(tmp_path / "checkpoint", tmp_path / "dcp")
    import_(tmp_path / "dcp", tmp_path / "again")
    ((loaded, _, steps),) = alone.run(load_with_accel, tmp_path / "again", {}, True)
    assert same(saved, loaded)
    assert steps == (2, 2)


def save_nested(folder, keys=("model", "optimizer"), **more):
    """Save with torch on this process, with the model and the optimizer at these keys; return their state."""
    plain = Plain(1)
    plain.learn()
    state = dict(more)
    for key, value in zip(keys, (plain.state_dict()["model"], plain.state_dict()["optimizer"]), strict=True):
        *outer, last = key.split(".")
        node = state
        for each in outer:
            node = node.setdefault(each, {})
        node[last] = value
    save_state(state, folder)
    return read_state(plain.model, plain.optimizer)


def save_state(state, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.save(state, checkpoint_id=folder)


def load_alone(folder):
    run = Run({}, seed=7, lr=0.5)
    run.accelerator.load_state(folder)
    return run.state()


@pytest.mark.parametrize("keys", [("app.model", "app.optimizer"), ("net", "adam"), ("state.net", "optim")])
def test_models_and_optimizers_are_found_at_any_keys(tmp_path, keys):
    saved = save_nested(tmp_path / "dcp", keys, statistics={"mean": torch.ones(2)})
    result = import_(tmp_path / "dcp", tmp_path / "checkpoint")
    assert result["items"] == ["model", "optimizer"]
    assert result["others"] == ["statistics"]
    assert same(saved, load_alone(tmp_path / "checkpoint"))


def test_a_model_among_several_is_selected_by_its_key(tmp_path):
    shadow = {
        name: value + 1 for name, value in build_model(1).state_dict().items() if value.is_floating_point()
    }
    save_state({"first": build_model(1).state_dict(), "shadow": shadow}, tmp_path / "dcp")
    with pytest.raises(AccelError, match=r"several models: first, shadow. Select one with --model"):
        import_(tmp_path / "dcp", tmp_path / "checkpoint")
    with pytest.raises(AccelError, match="nothing at --model 'last'"):
        import_(tmp_path / "dcp", tmp_path / "checkpoint", models=("last",))
    result = import_(tmp_path / "dcp", tmp_path / "checkpoint", models=("shadow",))
    assert (result["items"], result["others"]) == (["model"], ["first"])
    assert result["tensors"] == len(shadow)


def test_an_optimizer_by_index_is_loaded_by_the_order_of_the_parameters(pair, tmp_path):
    plain = Plain(1)
    plain.learn()
    save_state(
        {"model": plain.model.state_dict(), "optimizer": plain.optimizer.state_dict()}, tmp_path / "dcp"
    )
    import_(tmp_path / "dcp", tmp_path / "checkpoint")
    saved = read_state(plain.model, plain.optimizer)
    assert all(
        same(saved, loaded) for loaded, _, _ in pair.run(load_with_accel, tmp_path / "checkpoint", mesh(2))
    )


def test_weights_in_any_order_of_dimensions_are_imported_in_row_major_order(tmp_path):
    weights = {
        "channels_last": torch.rand(3, 2, 4, 5).to(memory_format=torch.channels_last),
        "transposed": torch.rand(3, 1, 7).to(torch.bfloat16).permute(2, 1, 0),
        "rows": torch.rand(3, 4),
    }
    save_state({"model": weights}, tmp_path / "dcp")
    import_(tmp_path / "dcp", tmp_path / "checkpoint")
    loaded = load_file(tmp_path / "checkpoint" / "model.safetensors")
    assert all(torch.equal(loaded[name], value) for name, value in weights.items())


def test_weights_without_an_optimizer_are_loaded_with_strict_false(tmp_path):
    save_state(build_model(1).state_dict(), tmp_path / "dcp")
    assert import_(tmp_path / "dcp", tmp_path / "checkpoint")["items"] == ["model"]
    run = Run({}, seed=7)
    with pytest.raises(
        CheckpointError, match="optimizer \\(AdamW\\): it is prepared here and not in the checkpoint"
    ):
        run.accelerator.load_state(tmp_path / "checkpoint")
    run.accelerator.load_state(tmp_path / "checkpoint", strict=False)
    weights = build_model(1).state_dict()
    assert all(
        torch.equal(value, weights[name]) for name, value in run.accelerator.get_state_dict(run.model).items()
    )


def test_what_the_format_does_not_have_starts_from_the_beginning_and_is_logged_in_one_line(tmp_path, caplog):
    save_nested(tmp_path / "dcp")
    import_(tmp_path / "dcp", tmp_path / "checkpoint")
    run = Run({}, seed=7)
    loader = torch.utils.data.DataLoader(torch.arange(6), batch_size=2)
    run.accelerator.prepare(torch.optim.lr_scheduler.StepLR(run.optimizer, 1), loader)
    caplog.set_level(logging.INFO, "accel_runtime")
    run.accelerator.resume(tmp_path / "checkpoint")
    (line,) = [record.message for record in caplog.records if record.name.startswith("accel_runtime")]
    assert "does not have scheduler, loader, random: these start from the beginning" in line


def test_gradients_of_an_unfinished_cycle_are_dropped_when_an_imported_checkpoint_is_loaded(tmp_path):
    save_nested(tmp_path / "dcp")
    import_(tmp_path / "dcp", tmp_path / "checkpoint")
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = build_model(7)
    model, _ = accelerator.prepare(model, build_optimizer(model))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.arange(6)).square().mean())
    accelerator.load_state(tmp_path / "checkpoint")
    assert all(parameter.grad is None for parameter in model.parameters())


def test_flattened_options_fit_any_groups_with_equal_options(tmp_path):
    plain = Plain(1, "flattened")
    plain.learn()
    plain.save(tmp_path / "dcp")
    import_(tmp_path / "dcp", tmp_path / "checkpoint")
    accelerator, model = Accelerator(), build_model(7)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW([{"params": [p]} for p in trained], amsgrad=True)
    _, optimizer = accelerator.prepare(model, optimizer)
    accelerator.load_state(tmp_path / "checkpoint")
    assert same(read_state(plain.model, plain.optimizer), read_state(model, optimizer))
    accelerator, model = Accelerator(), build_model(7)
    accelerator.prepare(model, torch.optim.AdamW(p for p in model.parameters() if p.requires_grad))
    with pytest.raises(CheckpointError, match="2 groups of parameters, the optimizer here 1"):
        accelerator.load_state(tmp_path / "checkpoint")


def test_flattened_options_that_are_tensors_are_compared_by_value(tmp_path):
    plain = Plain(1, "flattened")
    for group in plain.optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"])
    plain.learn()
    plain.save(tmp_path / "dcp")
    import_(tmp_path / "dcp", tmp_path / "checkpoint")
    run = Run({}, seed=7, lr=0.5)
    run.accelerator.load_state(tmp_path / "checkpoint")
    assert [float(group["lr"]) for group in run.optimizer.param_groups] == pytest.approx([0.01, 0.005])


def test_other_groups_of_parameters_are_refused(tmp_path):
    save_nested(tmp_path / "dcp")
    import_(tmp_path / "dcp", tmp_path / "checkpoint")
    accelerator, model = Accelerator(), build_model(7)
    accelerator.prepare(model, torch.optim.AdamW(p for p in model.parameters() if p.requires_grad))
    with pytest.raises(CheckpointError, match="2 groups of parameters, the optimizer here 1"):
        accelerator.load_state(tmp_path / "checkpoint")


def test_a_folder_that_is_used_without_an_import_names_the_command(tmp_path):
    save_nested(tmp_path / "dcp")
    with pytest.raises(CheckpointError, match="Import it with `accel checkpoint import"):
        load_alone(tmp_path / "dcp")
    with pytest.raises(AccelError, match="Import it with `accel checkpoint import"):
        show_checkpoint(str(tmp_path / "dcp"), tensors=False)


# Accelerate ------------------------------------------------------------------------------

WRITTEN = Path(__file__).parents[2] / "data" / "accelerate-1.15.0" / "checkpoints" / "checkpoint_0"


def save_as_accelerate(folder):
    """Save with the calls of torch that Accelerate makes for FSDP2; return the state."""
    plain = Plain(1)
    plain.learn()
    state = plain.state_dict()
    for kind, name in (("model", "pytorch_model_fsdp_0"), ("optimizer", "optimizer_0")):
        writer = dcp.FileSystemWriter(Path(folder) / name)
        dcp.save({kind: state[kind]}, storage_writer=writer, planner=dcp.DefaultSavePlanner())
    return read_state(plain.model, plain.optimizer)


def save_with_accelerate(folder):
    """Save with the functions of Accelerate for FSDP2, as `save_state` calls them; return the state."""
    from types import SimpleNamespace

    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils import save_fsdp_model, save_fsdp_optimizer

    plain = Plain(1)
    plain.learn()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    process = SimpleNamespace(process_index=torch.distributed.get_rank(), num_processes=2)
    save_fsdp_model(plugin, process, plain.model, folder, 0)
    save_fsdp_optimizer(plugin, process, plain.optimizer, plain.model, folder, 0)
    return read_state(plain.model, plain.optimizer)


@pytest.fixture(params=[save_as_accelerate, pytest.param(save_with_accelerate, marks=FULL)])
def of_accelerate(request, pair, tmp_path):
    """Return a checkpoint of Accelerate with sharded states, and its state."""
    folder = tmp_path / "accelerate"
    saved = pair.run(request.param, folder)[0]
    for file in WRITTEN.glob("random_states_*.pkl"):
        shutil.copy(file, folder)
    return folder, saved


@pytest.mark.slow
def test_load_state_reads_the_sharded_states_of_accelerate_on_any_ranks(clusters, of_accelerate):
    folder, saved = of_accelerate
    for readers in (1, 3):
        for loaded, _, steps in clusters[readers].run(load_with_accel, folder, mesh(readers)):
            assert same(saved, loaded)
            assert steps == (2, 2)


def test_the_sharded_states_of_accelerate_are_imported(alone, of_accelerate, tmp_path):
    folder, saved = of_accelerate
    assert import_(folder, tmp_path / "checkpoint")["items"] == ["model", "optimizer"]
    assert same(saved, alone.run(load_with_accel, tmp_path / "checkpoint", {})[0][0])


# Errors ----------------------------------------------------------------------------------


class Malicious:
    """An object whose pickle creates a directory when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.smoke
def test_a_malicious_metadata_is_refused_and_runs_nothing(tmp_path):
    save_nested(tmp_path / "dcp")
    metadata = pickle.loads((tmp_path / "dcp" / ".metadata").read_bytes())  # noqa: S301 - written here
    metadata.planner_data["x"] = (Malicious(tmp_path / "made"),)
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(AccelError, match="not part of the format and may run code") as error:
        import_(tmp_path / "dcp", tmp_path / "checkpoint")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "made").exists()
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.smoke
def test_a_malicious_value_is_refused_and_runs_nothing(tmp_path):
    plain = Plain(1)
    state = plain.state_dict()
    state["optimizer"]["param_groups"][0]["hook"] = Malicious(tmp_path / "made")
    save_state(state, tmp_path / "dcp")
    with pytest.raises(AccelError, match=r"\.distcp was not read: it contains \w+\.mkdir, which only code"):
        import_(tmp_path / "dcp", tmp_path / "checkpoint")
    assert not (tmp_path / "made").exists()


def test_a_damaged_index_in_a_pickle_allocates_no_memory(tmp_path):
    far = b"\x80\x02}r\xff\xff\xff\x7f."  # protocol 2, an empty dict, its index, the end
    save_nested(tmp_path / "dcp")
    (tmp_path / "dcp" / ".metadata").write_bytes(far)
    with pytest.raises(AccelError, match=r"is damaged .*index 2147483647 of 2"):
        import_(tmp_path / "dcp", tmp_path / "checkpoint")


def remove_data(folder):
    next(folder.glob("*.distcp")).unlink()


def shorten_data(folder):
    file = next(folder.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-100])


def damage_data(folder):
    file = next(folder.glob("*.distcp"))
    file.write_bytes(bytes(file.stat().st_size))


def shorten_metadata(folder):
    file = folder / ".metadata"
    file.write_bytes(file.read_bytes()[:-100])


def write_other_pickle(folder):
    (folder / ".metadata").write_bytes(pickle.dumps({"model": 1}))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (remove_data, "is not complete: __0_0.distcp is missing. Copy all files"),
        (shorten_data, "is not complete: __0_0.distcp has"),
        (damage_data, "cannot be read: it was not written by torch.save, or is damaged"),
        (lambda folder: (folder / ".metadata").unlink(), "has no .metadata, which is written last"),
        (shorten_metadata, "is damaged"),
        (write_other_pickle, "is not the metadata of torch.distributed.checkpoint"),
        (shutil.rmtree, "Directory not found"),
    ],
)
def test_a_damaged_folder_is_named_with_the_reason(tmp_path, change, problem):
    save_nested(tmp_path / "dcp")
    change(tmp_path / "dcp")
    with pytest.raises(AccelError) as error:
        import_(tmp_path / "dcp", tmp_path / "checkpoint")
    assert problem in str(error.value)
    assert not list(tmp_path.glob("*checkpoint*"))


def test_an_error_of_torch_is_an_error_of_the_folder(tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("an error of torch")

    save_nested(tmp_path / "dcp")
    monkeypatch.setattr(dcp_manifest, "_find_contents", fail)
    with pytest.raises(
        CheckpointError, match=r"as a checkpoint of torch\.distributed\.checkpoint: RuntimeError"
    ):
        dcp_manifest.open_dcp_checkpoint(tmp_path / "dcp")


def test_an_existing_target_is_refused_and_kept(tmp_path):
    save_nested(tmp_path / "dcp")
    import_(tmp_path / "dcp", tmp_path / "checkpoint")
    with pytest.raises(AccelError, match=r"exists. Remove it, or choose another name"):
        import_(tmp_path / "dcp", tmp_path / "checkpoint")
    with pytest.raises(RequestError, match=r"exists. Remove it, or choose another name"):
        export(tmp_path / "checkpoint", tmp_path / "dcp")


def test_a_damaged_checkpoint_is_not_exported(tmp_path, handmade):
    save_with_accel(tmp_path / "checkpoint", {})
    handmade.flip(tmp_path / "checkpoint" / "model.safetensors", -1)
    with pytest.raises(CheckpointError, match="does not have its checksum"):
        export(tmp_path / "checkpoint", tmp_path / "dcp")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_both_directions_need_enough_space(tmp_path, monkeypatch):
    from accel_runtime.storage.file_system import FileSystem

    save_nested(tmp_path / "dcp")
    import_(tmp_path / "dcp", tmp_path / "checkpoint")
    monkeypatch.setattr(FileSystem, "free_space", lambda *_: 10)
    with pytest.raises(AccelError, match="Not enough space"):
        import_(tmp_path / "dcp", tmp_path / "second")
    with pytest.raises(CheckpointError, match="Not enough space"):
        export(tmp_path / "checkpoint", tmp_path / "second")
    assert not list(tmp_path.glob("*second*"))


# Structure -------------------------------------------------------------------------------


class Two(nn.Module):
    """A model with a module of its own state."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(2, 2)

    def get_extra_state(self):
        return {"seen": 3, "mean": torch.ones(2)}

    def set_extra_state(self, state):
        self.state = state

    def forward(self, x):
        return self.line(x)


def prepare_two():
    """Return an Accelerator with two models, an optimizer for each, and one without state."""
    torch.manual_seed(0)
    accelerator, first, second = Accelerator(), Two(), Two()
    optimizers = torch.optim.AdamW(first.parameters()), torch.optim.SGD(second.parameters(), lr=0.5)
    first, second, *optimizers = accelerator.prepare(first, second, *optimizers)
    for model, optimizer in zip((first, second), optimizers, strict=True):
        accelerator.backward(model(torch.ones(2)).sum())
        optimizer.step()
    return accelerator, (first, second), optimizers


def test_several_models_extra_states_and_optimizers_without_state_return_from_a_round_trip(tmp_path):
    accelerator, models, _ = prepare_two()
    accelerator.save_state(tmp_path / "checkpoint")
    export(tmp_path / "checkpoint", tmp_path / "dcp")
    state = {"model_1": get_model_state_dict(models[1])}
    expected = {name: value for name, value in state["model_1"].items() if isinstance(value, torch.Tensor)}
    state["model_1"] = {name: torch.zeros_like(value) for name, value in expected.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(state, checkpoint_id=tmp_path / "dcp")
    assert all(torch.equal(value, expected[name]) for name, value in state["model_1"].items())
    result = import_(tmp_path / "dcp", tmp_path / "again")
    assert result["items"] == ["model", "model_1", "optimizer", "optimizer_1"]
    again, others, optimizers = prepare_two()
    with torch.no_grad():
        for parameter in (p for model in others for p in model.parameters()):
            parameter.zero_()
    again.load_state(tmp_path / "again")
    for model, other in zip(models, others, strict=True):
        assert torch.equal(model.line.weight, other.line.weight)
        assert other.state["seen"] == 3
    assert [optimizer.steps for optimizer in optimizers] == [1, 0]
    with pytest.raises(RequestError, match="two models have a"):
        export(tmp_path / "checkpoint", tmp_path / "titan", "torchtitan")
