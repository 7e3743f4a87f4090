"""Functions of Accelerate that save, load and merge weights and optimizers of sharded models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.runs.sharded_runs import build_accelerator, build_model, gather_model_state, to_full

from accel_runtime import Accelerator, utils
from accel_runtime.storage.errors import CheckpointError


def prepare_run(sizes, seed, rate):
    run = build_accelerator(sizes)
    model = build_model(seed)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    return run, *run.prepare(model, optimizer)


def list_moments(optimizer):
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [{name: to_full(value).tolist() for name, value in optimizer.state[p].items()} for p in parameters]


def save(sizes, folder):
    run, model, optimizer = prepare_run(sizes, 1, 0.1)
    run.backward(model(torch.arange(3)).sum())
    optimizer.step()
    utils.save_fsdp_model(None, run, model, folder)
    utils.save_fsdp_optimizer(None, run, optimizer, model, folder)
    run.save_state(folder / "state")
    utils.merge_fsdp_weights(folder / "pytorch_model_fsdp_0", folder / "of the model")
    utils.merge_fsdp_weights(folder / "state" / "pytorch_model_fsdp_0", folder / "of the state")
    return gather_model_state(run.unwrap_model(model)), list_moments(optimizer)


def load(sizes, folder):
    run, model, optimizer = prepare_run(sizes, 2, 0.5)
    utils.load_fsdp_model(None, run, model, folder)
    utils.load_fsdp_optimizer(None, run, optimizer, model, folder)
    return (
        gather_model_state(run.unwrap_model(model)),
        list_moments(optimizer),
        optimizer.param_groups[0]["lr"],
    )


@pytest.mark.slow
def test_a_sharded_model_and_optimizer_are_saved_merged_and_loaded_on_another_layout(clusters, tmp_path):
    weights, state = clusters[2].run(save, {"dp_shard": 2}, tmp_path)[0]
    for folder in ("of the model", "of the state"):
        tensors = load_file(tmp_path / folder / "model.safetensors")
        assert {name: value.tolist() for name, value in tensors.items()} | {
            "head.weight": weights["head.weight"]
        } == weights
    for actual in clusters[1].run(load, {"dp_shard": 1}, tmp_path):
        assert actual == (weights, state, 0.1)
    for actual in clusters[2].run(load, {"dp_shard": 2}, tmp_path):
        assert actual == (weights, state, 0.1)


def test_a_folder_with_a_slash_at_its_end_is_merged(tmp_path):
    run = build_accelerator({})
    run.prepare(build_model())
    run.save_state(tmp_path / "state")
    utils.merge_fsdp_weights(f"{tmp_path}/state/pytorch_model_fsdp_0/", tmp_path / "merged")
    assert (tmp_path / "merged" / "model.safetensors").is_file()


def test_a_merged_checkpoint_is_removed_on_request(tmp_path):
    run = build_accelerator({})
    utils.save_fsdp_model(None, run, run.prepare(build_model()), tmp_path, model_index=1)
    utils.merge_fsdp_weights(tmp_path / "pytorch_model_fsdp_1", tmp_path / "one", remove_checkpoint_dir=True)
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


@pytest.mark.parametrize(
    ("function", "options"),
    [
        ("save_fsdp_model", {"adapter_only": True}),
        ("load_fsdp_model", {"use_dcp": False}),
        ("load_fsdp_optimizer", {"adapter_only": True}),
    ],
)
def test_unsupported_options_of_fsdp_utils_are_rejected(tmp_path, function, options):
    run = build_accelerator({})
    with pytest.raises(ValueError, match=f"{function} does not support {next(iter(options))}="):
        getattr(utils, function)(
            None,
            run,
            build_model(),
            *([build_model()] if "optimizer" in function else []),
            tmp_path,
            **options,
        )


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_folder_of_torch_is_merged_and_single_files_in_a_store_are_refused(tmp_path):
    import torch.distributed.checkpoint as dcp

    model = build_model()
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "pytorch_model_fsdp_0", no_dist=True)
    utils.merge_fsdp_weights(tmp_path / "pytorch_model_fsdp_0", tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert merged.keys() == model.state_dict().keys()
    assert all(torch.equal(merged[name], value) for name, value in model.state_dict().items())
    run = Accelerator()
    calls = [
        lambda: utils.save_fsdp_optimizer(None, run, None, None, "s3://bucket/run"),
        lambda: run.save({}, "s3://bucket/run.pt"),
        lambda: run.load("s3://bucket/run.pt"),
        lambda: utils.merge_fsdp_weights(tmp_path, "s3://bucket/merged"),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"files on disk\. Pass a path"):
            call()
    assert not [path for path in Path.cwd().iterdir() if path.name.startswith("s3:")]


def test_a_checkpoint_that_cannot_be_merged_is_named(tmp_path):
    (tmp_path / ".metadata").touch()
    with pytest.raises(CheckpointError, match="\\.metadata"):
        utils.merge_fsdp_weights(tmp_path, tmp_path / "one")
    with pytest.raises(CheckpointError, match="does not exist"):
        utils.merge_fsdp_weights(tmp_path / "none", tmp_path / "one")
    assert not (tmp_path / "one").exists()
    with pytest.raises(ValueError, match="Leave safe_serialization out"):
        utils.merge_fsdp_weights(tmp_path, tmp_path / "one", safe_serialization=False)
