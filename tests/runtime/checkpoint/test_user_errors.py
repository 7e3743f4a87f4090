"""What scripts get wrong about checkpoints is told in a sentence that names it, and changes nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from recorded_runs import numbers
from torch import nn
from torch.utils.data import DataLoader

from accel_runtime import Accelerator, ProjectConfiguration
from accel_runtime.checkpoint.errors import CheckpointError


class Kept:
    """An object of the script."""

    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def made(  # noqa: PLR0913 - so many of each
    accelerator=None, model=None, *, optimizers=1, schedulers=1, loaders=1, models=1, kept=1, groups=1, seed=0
):
    """A run with so many of everything, and all its state as a value."""
    torch.manual_seed(seed)
    accelerator = accelerator or Accelerator()
    first = model or nn.Linear(2, 3)
    prepared = [accelerator.prepare(one) for one in [first, *(nn.Linear(1, 1) for _ in range(models - 1))]]
    own = list(prepared[0].parameters())
    split = [{"params": own}] if groups == 1 else [{"params": [p]} for p in own]
    several = [
        torch.optim.AdamW(split if not n else [nn.Parameter(torch.ones(1))], lr=0.1)
        for n in range(optimizers)
    ]
    prepared += [accelerator.prepare(one) for one in several]
    prepared += [
        accelerator.prepare(torch.optim.lr_scheduler.StepLR(several[0], 2)) for _ in range(schedulers)
    ]
    prepared += [accelerator.prepare(DataLoader(range(4))) for _ in range(loaders)]
    objects = [Kept(seed) for _ in range(kept)]
    accelerator.register_for_checkpointing(*objects)
    stepped(prepared[0], several[0])

    def state():
        return repr(
            [numbers(one.state_dict()) for one in [*prepared, *objects]] + [torch.get_rng_state().tolist()]
        )

    return accelerator, state, prepared


def stepped(model, optimizer):
    inputs = torch.ones(1, next(p for p in model.parameters() if p.dim() == 2).shape[1])
    model(inputs).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def within(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def refused(folder, *told, **how):
    """Loading is refused with these words, and everything is as it was."""
    accelerator, state, _ = made(seed=9, **how)
    before = state()
    with pytest.raises(CheckpointError) as raised:
        accelerator.load_state(folder)
    for text in told:
        assert text in str(raised.value)
    assert state() == before
    assert not any(word in str(raised.value) for word in ("Traceback", "NoneType", "KeyError"))
    return str(raised.value)


@pytest.fixture
def saved(tmp_path):
    accelerator, _, prepared = made()
    accelerator.save_state(tmp_path / "saved")
    assert prepared  # a loader that is let go is not missed
    return tmp_path / "saved"


def test_another_architecture_is_named(saved):
    refused(
        saved,
        "model: missing in the checkpoint: 0.weight, 0.bias, 1.weight and 1 more",
        "not in the model here:",
        model=nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)),
    )
    refused(saved, "model/weight is [3, 2] in the checkpoint and [4, 2] here", model=nn.Linear(2, 4))
    refused(
        saved,
        "model: not in the model here: bias",
        "optimizer: the optimizer here does not have model.bias",
        model=nn.Linear(2, 3, bias=False),
    )


def test_another_dtype_is_named(saved):
    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(2, 3).bfloat16())
    with pytest.raises(CheckpointError, match="model/weight is float32 in the checkpoint and bfloat16 here"):
        accelerator.load_state(saved)
    assert model.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("how", "item"),
    [
        ({"models": 2}, "model_1 (Linear): it is prepared here and not in the checkpoint"),
        ({"optimizers": 2}, "optimizer_1 (AdamW): it is prepared here and not in the checkpoint"),
        ({"schedulers": 2}, "scheduler_1 (StepLR): it is prepared here and not in the checkpoint"),
        ({"loaders": 2}, "loader_1"),
        ({"kept": 2}, "registered_1 (Kept): it is prepared here and not in the checkpoint"),
        ({"schedulers": 0}, "scheduler (StepLR): it is in the checkpoint and not prepared here"),
        ({"kept": 0}, "registered (Kept): it is in the checkpoint and not prepared here"),
        ({"loaders": 0}, "loader"),
        ({"groups": 2}, "optimizer: the checkpoint has 1 groups of parameters, the optimizer here 2"),
    ],
)
def test_another_number_of_anything_is_named(saved, how, item):
    refused(saved, item, "nothing was loaded", **how)


def test_parameters_in_other_groups_are_named(tmp_path):
    def two(first):
        accelerator = Accelerator()
        model = accelerator.prepare(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))
        own = list(model.parameters())
        optimizer = torch.optim.SGD([{"params": own[:first]}, {"params": own[first:], "lr": 0.5}], lr=0.1)
        accelerator.prepare(optimizer)
        return accelerator

    two(1).save_state(tmp_path / "saved")
    with pytest.raises(CheckpointError, match="group 0, 1 has other parameters in the checkpoint than here"):
        two(2).load_state(tmp_path / "saved")


def test_a_state_goes_to_its_parameter_whatever_their_order(tmp_path):
    def ordered(turn):
        torch.manual_seed(1)
        accelerator = Accelerator()
        model = accelerator.prepare(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        optimizer = accelerator.prepare(torch.optim.Adam(turn(list(model.parameters())), lr=0.1))
        return accelerator, model, optimizer

    accelerator, model, optimizer = ordered(list)
    stepped(model, optimizer)
    accelerator.save_state(tmp_path / "saved")
    again, other, turned = ordered(lambda parameters: parameters[::-1])
    again.load_state(tmp_path / "saved")
    for own, loaded in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[own]["exp_avg"], turned.state[loaded]["exp_avg"])


def test_not_strict_loads_what_fits_and_names_the_rest(saved, caplog):
    accelerator, _, prepared = made(
        seed=3, optimizers=2, groups=2, model=nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    )
    accelerator.load_state(saved, strict=False)
    for text in ("model: missing in the checkpoint: 0.weight", "optimizer_1", "not in the model here:"):
        assert text in caplog.text
    stepped(prepared[0], prepared[1])


def test_not_strict_converts_dtypes(saved, caplog):
    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(2, 3).bfloat16())
    accelerator.load_state(saved, strict=False)
    torch.manual_seed(0)
    assert torch.allclose(model.weight.float(), nn.Linear(2, 3).weight, atol=0.11)
    assert "float32 in the checkpoint and bfloat16 here" in caplog.text


def test_a_directory_that_is_no_checkpoint_says_what_it_is(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "nowhere", f"{tmp_path}/nowhere is not a checkpoint: it does not exist")
    refused(tmp_path / "empty", "is not a checkpoint: it has no checkpoint.json")
    refused(tmp_path / "file", "is not a checkpoint: it is a file")
    refused(None, "load_state() cannot search for a checkpoint")


def test_what_cannot_be_saved_is_named_with_its_path_and_nothing_is_left(tmp_path):
    accelerator = Accelerator()
    accelerator.register_for_checkpointing(Kept({"a": [1, {"b": print}]}))
    with pytest.raises(CheckpointError, match=r"registered/value\.a\.1\.b cannot be saved: it is a builtins"):
        accelerator.save_state(tmp_path / "saved")
    assert not list(tmp_path.iterdir())


def test_only_what_has_a_state_is_registered():
    accelerator = Accelerator()
    with pytest.raises(ValueError, match=r"cannot save int: it lacks state_dict\(\) or load_state_dict\(\)"):
        accelerator.register_for_checkpointing(Kept(), 3)
    assert not accelerator._registered


def test_a_checkpoint_is_told_briefly(saved):
    accelerator, *_ = made()
    found = accelerator.load_state(saved)
    assert repr(found) == f"Checkpoint({str(saved)!r}, step=0)"


# Several processes ---------------------------------------------------------------------------


def into_different_directories(folder):
    accelerator, state, _ = made()
    own = Path(folder) / str(accelerator.process_index)
    told = []
    with pytest.raises(CheckpointError) as raised:
        accelerator.save_state(own)
    told.append(str(raised.value))
    accelerator.wait_for_everyone()
    left = within(folder)
    accelerator.wait_for_everyone()
    accelerator.save_state(Path(folder) / "0")
    before = state()
    with pytest.raises(CheckpointError) as raised:
        accelerator.load_state(own)
    assert state() == before
    return [*told, str(raised.value)], left


def test_directories_that_differ_are_told(pair, tmp_path):
    for (saving, loading), left in pair.run(into_different_directories, str(tmp_path)):
        assert saving.startswith(
            f"save_state() received different directories (rank 0: {tmp_path}/0, rank 1: "
        )
        assert loading.startswith("load_state() received different directories")
        assert left == []


def with_a_hook_that_fails(folder):
    accelerator, state, _ = made()
    accelerator.save_state(f"{folder}/good")

    def fail(*_):
        if accelerator.process_index == 1:
            raise KeyError("lost")

    one = accelerator.register_save_state_pre_hook(fail)
    with pytest.raises(CheckpointError, match="rank 1: KeyError: 'lost'"):
        accelerator.save_state(f"{folder}/saved")
    one.remove()
    accelerator.register_load_state_pre_hook(fail)
    before = state()
    with pytest.raises(CheckpointError, match="rank 1: KeyError: 'lost'"):
        accelerator.load_state(f"{folder}/good")
    assert state() == before
    accelerator.wait_for_everyone()
    return within(folder)


def test_a_hook_that_fails_on_one_rank_fails_on_all(pair, tmp_path):
    assert pair.run(with_a_hook_that_fails, str(tmp_path)) == [["good"], ["good"]]


def with_an_object_that_fails(folder):
    accelerator, *_ = made(kept=0)
    accelerator.register_for_checkpointing(Kept(print if accelerator.process_index else 1))
    with pytest.raises(CheckpointError, match="rank 1: registered/value cannot be saved"):
        accelerator.save_state(f"{folder}/saved")
    accelerator.wait_for_everyone()
    return within(folder)


def test_what_cannot_be_saved_on_one_rank_fails_on_all(pair, tmp_path):
    assert pair.run(with_an_object_that_fails, str(tmp_path)) == [[], []]


# Hooks that save models themselves -------------------------------------------------------------


def save_hook(models, weights, output_dir):
    """As scripts do that have `save_pretrained`."""
    for model in models:
        if isinstance(model, nn.Linear):
            (Path(output_dir) / "unet").mkdir(exist_ok=True)
            if int(os.environ.get("RANK", "0")) == 0:
                torch.save(model.state_dict(), Path(output_dir) / "unet" / "weights.pt")
            weights.pop(0)


def load_hook(models, input_dir):
    for _ in range(len(models)):
        model = models.pop()
        if isinstance(model, nn.Linear):
            model.load_state_dict(torch.load(Path(input_dir) / "unet" / "weights.pt", weights_only=True))
        else:
            models.insert(0, model)


def hooked(folder):
    def run(seed):
        torch.manual_seed(seed)
        accelerator = Accelerator()
        accelerator.register_save_state_pre_hook(save_hook)
        accelerator.register_load_state_pre_hook(load_hook)
        models = nn.Linear(2, 2), nn.Sequential(nn.Linear(3, 1))
        optimizer = torch.optim.AdamW([p for model in models for p in model.parameters()])
        return accelerator, accelerator.prepare(*models, optimizer)

    accelerator, (first, second, optimizer) = run(1)
    (first(torch.ones(1, 2)).sum() + second(torch.ones(1, 3)).sum()).backward()
    optimizer.step()
    accelerator.save_state(folder)
    again, others = run(2)
    found = again.load_state(folder)
    same = [
        repr(numbers(accelerator.unwrap_model(one).state_dict()))
        == repr(numbers(again.unwrap_model(other).state_dict()))
        for one, other in ((first, others[0]), (second, others[1]))
    ]
    assert same == [True, True]
    return found.manifest.items, sorted(found.manifest.files)


@pytest.mark.parametrize("size", [1, 2])
def test_hooks_save_and_load_a_model_in_their_own_way(clusters, size, tmp_path):
    for items, files in clusters[size].run(hooked, str(tmp_path / "saved")):
        assert "model_1" in items
        assert "model" not in items
        assert "unet/weights.pt" in files


# Names and numbers of checkpoints ---------------------------------------------------------------


def project(folder, **options):
    configuration = ProjectConfiguration(folder, automatic_checkpoint_naming=True, **options)
    return made(Accelerator(project_config=configuration))[0]


def names(folder):
    return within(folder / "checkpoints")


def test_numbers_go_on(tmp_path):
    accelerator = project(tmp_path)
    assert [Path(accelerator.save_state()).name for _ in range(3)] == [
        "checkpoint_0",
        "checkpoint_1",
        "checkpoint_2",
    ]
    assert accelerator.save_iteration == 3
    again = project(tmp_path)
    assert again.load_state().number == 2
    assert again.save_iteration == 3
    assert again.save_state().endswith("checkpoint_3")


def test_numbers_that_are_taken_are_passed_over(tmp_path):
    (tmp_path / "checkpoints" / "checkpoint_4").mkdir(parents=True)
    assert project(tmp_path).save_state().endswith("checkpoint_5")
    assert project(tmp_path, iteration=8).save_state().endswith("checkpoint_8")


def test_after_an_older_checkpoint_numbers_go_on_behind_all(tmp_path):
    accelerator = project(tmp_path)
    for _ in range(4):
        accelerator.save_state()
    again = project(tmp_path)
    again.load_state(tmp_path / "checkpoints" / "checkpoint_1")
    assert again.save_state().endswith("checkpoint_4")


def test_so_many_are_kept(tmp_path):
    accelerator = project(tmp_path, total_limit=2)
    for _ in range(4):
        accelerator.save_state()
    assert names(tmp_path) == ["checkpoint_2", "checkpoint_3"]
    assert [found.number for found in accelerator.checkpoints.list()] == [2, 3]


def test_a_checkpoint_on_each_node_is_refused(tmp_path):
    accelerator = project(tmp_path, save_on_each_node=True)
    with pytest.raises(ValueError, match="save_on_each_node"):
        accelerator.save_state()
    assert not (tmp_path / "checkpoints").exists()
