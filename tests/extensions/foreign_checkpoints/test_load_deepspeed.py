"""`load_state` and `accel checkpoint` of checkpoints that DeepSpeed wrote: every value is restored, and no code in them is run."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import pickle
import shutil
import sys
import threading
import time
import zipfile
from collections import defaultdict, deque
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from accel_cli.commands import checkpoint_operations
from accel_cli.errors import AccelError, UsageError
from accel_runtime import Accelerator
from accel_runtime.export.objects import read_pickle
from accel_runtime.extensions.foreign_checkpoints.deepspeed_manifest import open_deepspeed_checkpoint
from accel_runtime.extensions.foreign_checkpoints.folders import is_deepspeed_checkpoint
from accel_runtime.extensions.foreign_checkpoints.manifest_builder import iterate_regions
from accel_runtime.extensions.foreign_checkpoints.torch_file import EmbeddedFile, Unknown, read_torch_file
from accel_runtime.storage.errors import CheckpointError
from accel_runtime.storage.formats import find_format
from accel_runtime.storage.tensor_file import MergeRequest, merge_tensors

pytestmark = pytest.mark.usefixtures("on_the_cpu", "by_value")

DATA = Path(__file__).parents[2] / "data" / "deepspeed-0.19.8"
CASES = sorted(path.parent.name for path in DATA.glob("*/expected.json"))


def load_maker():
    """Return the module that wrote the checkpoints, with their model."""
    spec = importlib.util.spec_from_file_location("make_deepspeed_data", DATA / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Run:
    """The run that wrote the checkpoints, with other weights and before its first step."""

    def __init__(self, accelerator=None, dtype=torch.float32, change=id):
        self.accelerator = accelerator or Accelerator()
        self.bare, optimizer = load_maker().build()
        change(self.bare)
        self.bare.to(dtype)
        with torch.no_grad():
            for parameter in self.bare.parameters():
                parameter.zero_()
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=7)
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(self.bare, optimizer, schedule)

    def read(self):
        """Return tensors by kind and name, as `expected.safetensors` has them."""
        named = dict(self.accelerator.unwrap_model(self.model).named_parameters())
        tensors = {f"weight.{name}": each for name, each in named.items()}
        buffers = self.accelerator.unwrap_model(self.model).named_buffers()
        tensors |= {f"buffer.{name}": each for name, each in buffers}
        for name, parameter in named.items():
            state = self.optimizer.state.get(parameter, {})
            tensors |= {f"{key}.{name}": each for key, each in state.items() if key != "step"}
        full = {
            name: each.full_tensor() if hasattr(each, "full_tensor") else each
            for name, each in tensors.items()
        }
        return {name: each.detach().clone() for name, each in full.items()}


def load_unsafely(path):
    """Return the content of a file of DeepSpeed without DeepSpeed: its classes become objects of no class."""

    class Plain(Unknown):
        def __reduce__(self):
            return dict, ()

    class Modules(pickle.Unpickler):
        def find_class(self, module, name):
            if module.startswith("deepspeed"):
                return int if name == "ZeroStageEnum" else Plain
            return super().find_class(module, name)

    simulated = SimpleNamespace(
        Unpickler=Modules, __name__="pickle", load=pickle.load, Pickler=pickle.Pickler
    )
    return torch.load(path, pickle_module=simulated, weights_only=False)


def copy(case, tmp_path):
    return Path(shutil.copytree(DATA / case / "checkpoint", tmp_path / "checkpoint"))


def expect(case):
    tensors = load_file(DATA / case / "expected.safetensors")
    # DeepSpeed keeps frozen parameters in the format of mixed precision only.
    return {name: each.float() if each.is_floating_point() else each for name, each in tensors.items()}


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


# Loading ---------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_weights_moments_options_and_schedule_are_those_in_the_memory_of_deepspeed(case):
    run, expected = Run(), json.loads((DATA / case / "expected.json").read_text())
    checkpoint = run.accelerator.load_state(DATA / case / "checkpoint")
    assert same(run.read(), expect(case))
    groups = [{**group, "betas": list(group["betas"])} for group in run.optimizer.param_groups]
    assert [{key: group[key] for key in ("lr", "betas", "weight_decay")} for group in groups] == [
        {key: group[key] for key in ("lr", "betas", "weight_decay")} for group in expected["groups"]
    ]
    assert run.schedule.scheduler.last_epoch == expected["last_epoch"]
    assert run.schedule.get_last_lr() == expected["lr"]
    assert (run.optimizer.steps, checkpoint.manifest.world_size) == (3, 2)
    steps = [state["step"] for state in run.optimizer.state.values()]
    assert all(step == 3 for step in steps)
    assert len({id(step) for step in steps}) == len(steps)  # each parameter counts its own
    assert run.bare.head.weight is run.bare.embedding.weight


@pytest.mark.parametrize("case", ["accelerate", "stage3-sub-groups"])
@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_every_strategy_and_world_size_loads_the_same_state(pair, case, kind):
    def load(folder):
        from accel_runtime.utils import FullyShardedDataParallelPlugin

        plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if kind == "sharded" else None
        run = Run(Accelerator(fsdp_plugin=plugin) if plugin else None)
        run.accelerator.load_state(folder)
        tensors = run.read()
        run.accelerator.backward(run.model(torch.arange(5)).square().mean())
        run.optimizer.step()
        return tensors

    results = pair.run(load, DATA / case / "checkpoint")
    assert all(same(tensors, expect(case)) for tensors in results)


def test_what_is_not_in_the_files_is_logged(caplog):
    with caplog.at_level(logging.WARNING, "accel_runtime.checkpoint"):
        Run().accelerator.load_state(DATA / "stage2-fp16" / "checkpoint")
    (message,) = caplog.messages
    assert message.endswith(
        "was written by DeepSpeed, and loaded without: DeepSpeed does not save random states, nor the position of loaders; "
        "scaler: this run scales no loss"
    )


def test_a_model_in_the_format_of_mixed_precision_gets_rounded_weights_and_float32_moments():
    run, expected = Run(dtype=torch.bfloat16), expect("accelerate")
    run.accelerator.load_state(DATA / "accelerate" / "checkpoint", strict=False)
    found = run.read()
    for name, tensor in expected.items():
        if name.startswith("weight."):
            assert torch.equal(found[name], tensor.bfloat16())
        elif name.startswith("exp_avg"):
            assert torch.equal(found[name], tensor)


def test_a_model_of_another_format_is_a_mismatch():
    run = Run(dtype=torch.float16)
    with pytest.raises(
        CheckpointError, match=r"model/hidden.weight is float32 in the checkpoint and float16 here"
    ):
        run.accelerator.load_state(DATA / "stage3-sub-groups" / "checkpoint")


def test_frozen_parameters_may_be_in_a_group_of_the_optimizer():
    accelerator, (model, _) = Accelerator(), load_maker().build()
    groups = [[model.embedding.weight, model.hidden.weight, model.frozen.weight]]
    groups.append([model.hidden.bias, *model.norm.parameters(), model.scale])
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=9.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    accelerator.load_state(DATA / "stage3-sub-groups" / "checkpoint")
    assert len(optimizer.state) == 6
    assert optimizer.param_groups[0]["weight_decay"] == 0.1


def test_every_engine_of_a_checkpoint_of_accelerate_is_loaded(tmp_path):
    folder, maker = copy("accelerate", tmp_path), load_maker()
    shutil.copytree(folder / "pytorch_model", folder / "pytorch_model_1")
    accelerator = Accelerator()
    models, optimizers = zip(*[maker.build() for _ in range(2)], strict=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizers[0])
    accelerator.prepare(*models, *optimizers, schedule)
    accelerator.load_state(folder)
    for model, optimizer in zip(models, optimizers, strict=True):
        assert torch.equal(model.hidden.weight, expect("accelerate")["weight.hidden.weight"])
        found = optimizer.state[model.scale]["exp_avg"]
        assert torch.equal(found, expect("accelerate")["exp_avg.scale"])


def test_options_that_an_elastic_checkpoint_lacks_are_logged(tmp_path, caplog):
    """Its optimizer states are a list of the groups."""
    folder = copy("stage2-fp16", tmp_path)
    for path in folder.glob("global_step3/*optim_states.pt"):
        content = load_unsafely(path)
        state = content["optimizer_state_dict"]
        del state["param_slice_mappings"]
        state["base_optimizer_state"] = [state["base_optimizer_state"]["state"][index] for index in range(2)]
        torch.save(content, path)
    run = Run()
    with caplog.at_level(logging.WARNING, "accel_runtime.checkpoint"):
        run.accelerator.load_state(folder)
    assert "optimizer: with elastic_checkpoint, DeepSpeed does not save learning rates" in caplog.text
    assert same(run.read(), expect("stage2-fp16"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda model: setattr(model, "hidden", nn.Linear(3, 4)),
            r"model/hidden.weight is \[3, 3\] in the checkpoint and \[4, 3\] here",
        ),
        (lambda model: setattr(model, "more", nn.Linear(1, 1)), "model: missing in the checkpoint: more"),
    ],
)
@pytest.mark.parametrize("case", ["accelerate", "universal3"])
def test_a_mismatch_is_named_and_nothing_is_changed(case, change, message):
    run = Run(change=change)
    before = run.read()
    with pytest.raises(
        CheckpointError, match=rf"does not fit this run, and nothing was loaded(.|\n)*{message}"
    ):
        run.accelerator.load_state(DATA / case / "checkpoint")
    assert same(run.read(), before)


def test_a_missing_schedule_and_other_groups_are_named():
    accelerator, (model, _) = Accelerator(), load_maker().build()
    accelerator.prepare(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]))
    with pytest.raises(CheckpointError) as raised:
        accelerator.load_state(DATA / "stage3-sub-groups" / "checkpoint")
    assert "scheduler: it is not prepared here" in str(raised.value)
    assert "the checkpoint has 2 groups of parameters, the optimizer here 1" in str(raised.value)


# Damaged and unsupported folders ---------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        (
            "stage3-sub-groups",
            lambda tag: next(tag.glob("*rank_1_*optim_states.pt")).unlink(),
            "has optimizer states of 1 ranks, and was written in 2 parts",
        ),
        (
            "stage3-sub-groups",
            lambda tag: next(tag.glob("*rank_0_*optim_states.pt")).unlink(),
            "and no such file of rank 0: it is incomplete",
        ),
        (
            "stage2-fp16",
            lambda tag: (tag / "mp_rank_00_model_states.pt").rename(tag / "mp_rank_01_model_states.pt"),
            "was written by 2 model-parallel ranks.*ds_to_universal",
        ),
        (
            "stage2-fp16",
            lambda tag: (tag / "layer_00-model_states.pt").touch(),
            "its pipeline engine, which is not supported",
        ),
        (
            "stage2-fp16",
            lambda tag: (tag / "layer_0_expert_1_mp_rank_00_model_states.pt").touch(),
            "a mixture of experts, which is not supported",
        ),
        (
            "stage2-fp16",
            lambda tag: (tag / "mp_rank_00_model_states.pt").write_bytes(b"PK"),
            "it was not written by torch.save, or is damaged",
        ),
        (
            "stage2-fp16",
            lambda tag: shutil.copy(
                next(tag.glob("*rank_0_*optim*")), tag / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
            ),
            "has its parameters at other places than their order says",
        ),
        (
            "universal3",
            lambda tag: (tag / "zero" / "hidden.bias" / "fp32.pt").unlink(),
            "hidden.bias/fp32.pt is missing",
        ),
    ],
)
def test_a_damaged_or_unsupported_folder_is_refused_by_name(case, change, message, tmp_path):
    folder, run = copy(case, tmp_path), Run()
    change(next(path.parent for path in folder.rglob("*model_states.pt")))
    before = run.read()
    with pytest.raises(CheckpointError, match=message):
        run.accelerator.load_state(folder)
    assert same(run.read(), before)


@pytest.mark.parametrize(("size", "change"), [(4096, "truncated"), (None, "changed")])
def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path, size, change):
    folder = copy("stage3-sub-groups", tmp_path)
    file = next(folder.rglob("*rank_1_*optim_states.pt"))
    with open_deepspeed_checkpoint(folder) as snapshot:
        os.truncate(file, file.stat().st_size + 1 if size is None else size)
        with pytest.raises(CheckpointError, match=f"{file.name} was {change} while it was read"):
            merge_tensors(snapshot, tmp_path / "model.safetensors", MergeRequest())


def write_stage3(folder, module, flat, **more):
    folder.mkdir()
    torch.save(
        {"module": module, "param_shapes": [{"w": torch.Size([3, 4])}], **more},
        folder / "zero_pp_rank_0_mp_rank_00_model_states.pt",
    )
    inner = {"state": {}, "param_groups": [{"params": [0], "lr": 0.1}]}
    state = {
        "zero_stage": 3,
        "fp32_flat_groups": [flat],
        "partition_count": 1,
        "optimizer_state_dict": inner,
    }
    torch.save({"optimizer_state_dict": state}, folder / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")


def test_parts_in_another_order_of_their_elements_are_refused(tmp_path):
    transposed, empty = torch.arange(12.0).view(3, 4).t(), torch.empty(0)
    write_stage3(tmp_path / "weights", {"w": empty}, transposed)
    with pytest.raises(
        CheckpointError, match="has the weights in group 0 in another order of their elements"
    ):
        open_deepspeed_checkpoint(tmp_path / "weights")
    frozen = {
        "frozen_param_shapes": {"f": torch.Size([3, 4])},
        "frozen_param_fragments": {"f": transposed},
    }
    write_stage3(tmp_path / "frozen", {"w": empty, "f": empty}, torch.arange(12.0), **frozen)
    with pytest.raises(CheckpointError, match="has f in another order of its elements"):
        open_deepspeed_checkpoint(tmp_path / "frozen")


def test_an_error_of_torch_is_an_error_of_the_folder(tmp_path):
    more = {"shared_params": torch.ones(2)}  # neither true nor false
    write_stage3(tmp_path / "folder", {"w": torch.empty(0)}, torch.arange(12.0), **more)
    with pytest.raises(CheckpointError, match="cannot be read as a checkpoint of DeepSpeed: RuntimeError"):
        open_deepspeed_checkpoint(tmp_path / "folder")


def test_the_tag_in_latest_is_loaded_and_a_missing_one_is_named(tmp_path):
    folder = copy("stage2-fp16", tmp_path)
    (folder / "global_step3").rename(folder / "global_step4")
    assert not is_deepspeed_checkpoint(folder)
    with pytest.raises(
        CheckpointError, match=r"latest names 'global_step3', which has no file \*_model_states.pt"
    ):
        open_deepspeed_checkpoint(folder)
    assert find_format(folder / "global_step4", loads=True) == "deepspeed"
    Run().accelerator.load_state(folder / "global_step4")
    (folder / "latest").write_text("global_step4\n")
    Run().accelerator.load_state(folder)


# `accel checkpoint` ----------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_export_writes_float32_weights_once(case, tmp_path):
    target = tmp_path / "model.safetensors"
    result = checkpoint_operations.export_checkpoint(
        str(DATA / case / "checkpoint"), str(target), MergeRequest(), lambda *_: None
    )
    exported = load_file(target)
    expected = {
        name.partition(".")[2]: each
        for name, each in expect(case).items()
        if name.startswith(("weight.", "buffer."))
    }
    assert all(
        each.dtype == expected[name].dtype for name, each in exported.items() if name != "frozen.weight"
    )
    assert same({name: each.to(expected[name].dtype) for name, each in exported.items()}, expected)
    assert result["ties"] == {"head.weight": "embedding.weight"}
    assert (result["step"], result["skipped"]) == (3, [])


def test_list_and_show_name_the_writer(tmp_path):
    folder = copy("accelerate", tmp_path)
    (entry,) = checkpoint_operations.list_checkpoints(str(tmp_path))["checkpoints"]
    assert (entry["path"], entry["written_by"]) == (str(folder), "deepspeed")
    shown = checkpoint_operations.show_checkpoint(str(folder), tensors=True)
    assert shown["versions"] == {"deepspeed": "0.19.8"}
    assert [item["name"] for item in shown["items"]] == ["model", "optimizer"]
    assert shown["tensors"]["model/hidden.weight"]["dtype"] == "float32"
    with pytest.raises(UsageError, match="was written by DeepSpeed, without checksums"):
        checkpoint_operations.verify_checkpoint(str(folder), lambda *_: None)


def test_an_unknown_item_of_a_folder_is_a_usage_error(tmp_path):
    folder, target = DATA / "accelerate" / "checkpoint", str(tmp_path / "x.safetensors")
    with pytest.raises(AccelError, match="has no model_1; it has model, optimizer"):
        checkpoint_operations.export_checkpoint(str(folder), target, MergeRequest("model_1"), lambda *_: None)


# Files of torch.save ---------------------------------------------------------------------


class Hostile:
    """An object whose pickle calls a function."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


@pytest.mark.parametrize("is_trusted", [False, True])
def test_reading_runs_no_code_and_keeps_what_it_cannot_build(tmp_path, is_trusted):
    """Also with functions that the script or DeepSpeed trusts."""
    path, target = tmp_path / "file.pt", tmp_path / "copy"
    hostile = Hostile(shutil.copyfile, str(path), str(target))
    content = {"weight": torch.arange(6.0).view(2, 3), "hostile": hostile, "module": pickle.Unpickler}
    torch.save(content, path)
    chunk = tmp_path / "chunk"
    torch.save(hostile, chunk)
    with torch.serialization.safe_globals([shutil.copyfile] if is_trusted else []):
        trusted = set(torch.serialization.get_safe_globals())
        read = read_torch_file(path)
        assert set(torch.serialization.get_safe_globals()) == trusted
        with pytest.raises(CheckpointError, match=r"chunk (cannot be read|is damaged)"):
            EmbeddedFile(chunk, 0, chunk.stat().st_size).read_tensor(torch.float32, (2, 3))
    assert not target.exists()
    assert isinstance(read["hostile"], Unknown)
    assert issubclass(read["module"], Unknown)
    assert torch.equal(read["weight"], content["weight"])


@pytest.mark.parametrize("is_trusted", [False, True])
def test_a_chunk_is_read_also_if_a_script_trusts_a_name(tmp_path, is_trusted):
    path, tensor = tmp_path / "chunk", torch.arange(6.0).view(2, 3)
    torch.save(tensor, path)
    with torch.serialization.safe_globals([shutil.copyfile] if is_trusted else []):
        read = EmbeddedFile(path, 0, path.stat().st_size).read_tensor(torch.float32, (2, 3))
    assert torch.equal(read, tensor)


def test_threads_wait_for_each_other_only_if_a_script_trusts_a_name():
    text = (
        "import torch._dynamo, torch.distributed.checkpoint, torch.distributed.tensor\n"
        "from accel_runtime.export.objects import trusts_names\n"
        "assert torch.serialization.get_safe_globals() and not trusts_names()\n"
        "torch.serialization.add_safe_globals([(int, 'x.y')])\n"
        "assert trusts_names()"
    )
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", text]) == 0


def test_threads_read_files_one_after_another_and_leave_no_name_trusted(tmp_path):
    torch.save({"arguments": SimpleNamespace(lr=0.1)}, tmp_path / "file.pt")
    together, most, failures = [], [], []

    def build(name):
        together.append(name)
        most.append(len(together))
        time.sleep(0.02)
        together.pop()
        return type("Arguments", (Unknown,), {"name": name, "__slots__": ()})

    def read():
        try:
            read_pickle(tmp_path / "file.pt", replace=build)
        except CheckpointError as error:
            failures.append(error)

    trusted = set(torch.serialization.get_safe_globals())
    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert most == [1, 1, 1, 1]
    assert set(torch.serialization.get_safe_globals()) == trusted


def test_a_file_with_more_names_than_any_program_writes_is_refused(tmp_path):
    path = tmp_path / "file.pt"
    torch.save([1], path)
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    names = b"".join(b"cmodule\nname_%d\n" % index for index in range(201))
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, b"\x80\x02](" + names + b"e." if name.endswith("data.pkl") else data)
    with pytest.raises(
        CheckpointError, match=r"file.pt cannot be read: it names 201 classes and functions, more than 200"
    ):
        read_torch_file(path)


def test_a_function_of_the_operating_system_makes_a_file_unreadable(tmp_path):
    torch.save({"hostile": Hostile(os.mkdir, str(tmp_path / "made"))}, tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match=r"it contains \w+\.mkdir, which only code named in the file"):
        read_torch_file(tmp_path / "file.pt")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("is_archive", [True, False], ids=["archive", "before torch 1.6"])
def test_values_of_scripts_are_read(tmp_path, is_archive):
    content = {
        "others": [1, 2.5, "x", None, True, (1, 2), {"a": {1}}, torch.Size([2, 3]), b"\0\xff", 1 << 80],
        "weight": torch.arange(24.0).view(4, 6).t(),
    }
    of_script = {
        "deque": deque([1, 2], maxlen=3),
        "counts": defaultdict(int, a=1),
        "arguments": SimpleNamespace(lr=0.1),
        "path": Path("x"),
    }
    content |= of_script if is_archive else {}
    torch.save(content, tmp_path / "file.pt", _use_new_zipfile_serialization=is_archive)
    read = read_torch_file(tmp_path / "file.pt")
    assert read["others"] == content["others"]
    assert torch.equal(read["weight"], content["weight"])
    if is_archive:
        assert (read["deque"], read["counts"]) == ([1, 2], {"a": 1})
        assert read["arguments"].fields == {"lr": 0.1}
        assert read["path"].arguments == ("x",)


def test_a_tensor_beyond_its_file_is_damage(tmp_path):
    path = tmp_path / "file.pt"
    torch.save(torch.arange(4e4), path)
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, data[:8] if name.endswith("data/0") else data)
    with pytest.raises(CheckpointError, match=r"file.pt cannot be read"):
        read_torch_file(path)


@given(st.lists(st.integers(0, 4), max_size=4), st.data())
def test_boxes_cover_consecutive_elements_exactly_once_and_in_order(shape, data):
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    start = data.draw(st.integers(0, tensor.numel()))
    count = data.draw(st.integers(0, tensor.numel() - start))
    covered = []
    for offset, offsets, sizes in iterate_regions(shape, start, count):
        box = tensor[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]
        assert box.numel()
        assert box.flatten()[0] == offset
        covered += box.flatten().tolist()
    assert covered == list(range(start, start + count))


def test_formats_are_recognised_without_torch():
    assert "torch" in sys.modules  # of this process
    text = "import sys; from accel_runtime.extensions.foreign_checkpoints import formats; sys.exit('torch' in sys.modules)"
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", text]) == 0
