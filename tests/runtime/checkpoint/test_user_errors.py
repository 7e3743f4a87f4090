"""Errors of users in scripts with checkpoints raise a message that names the error, and change no state."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from support.runs.recorded_runs import to_numbers
from torch import nn
from torch.utils.data import DataLoader

from accel_runtime import Accelerator, ProjectConfiguration
from accel_runtime.storage.errors import CheckpointError


class RegisteredValue:
    """A registered object of the script."""

    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def build_run(  # noqa: PLR0913 - one count for each kind of object
    accelerator=None,
    model=None,
    *,
    optimizers=1,
    schedulers=1,
    loaders=1,
    models=1,
    registered=1,
    groups=1,
    seed=0,
):
    """Return an accelerator with that many objects of each kind, a function that returns their state, and the objects."""
    torch.manual_seed(seed)
    accelerator = accelerator or Accelerator()
    first = model or nn.Linear(2, 3)
    prepared = [accelerator.prepare(item) for item in [first, *(nn.Linear(1, 1) for _ in range(models - 1))]]
    parameters = list(prepared[0].parameters())
    groups_of_parameters = [{"params": parameters}] if groups == 1 else [{"params": [p]} for p in parameters]
    built_optimizers = [
        torch.optim.AdamW(groups_of_parameters if not n else [nn.Parameter(torch.ones(1))], lr=0.1)
        for n in range(optimizers)
    ]
    prepared += [accelerator.prepare(item) for item in built_optimizers]
    prepared += [
        accelerator.prepare(torch.optim.lr_scheduler.StepLR(built_optimizers[0], 2))
        for _ in range(schedulers)
    ]
    prepared += [accelerator.prepare(DataLoader(range(4))) for _ in range(loaders)]
    objects = [RegisteredValue(seed) for _ in range(registered)]
    accelerator.register_for_checkpointing(*objects)
    train_step(prepared[0], built_optimizers[0])

    def state():
        return repr(
            [to_numbers(item.state_dict()) for item in [*prepared, *objects]]
            + [torch.get_rng_state().tolist()]
        )

    return accelerator, state, prepared


def train_step(model, optimizer):
    inputs = torch.ones(1, next(p for p in model.parameters() if p.dim() == 2).shape[1])
    model(inputs).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def list_names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def assert_load_fails(folder, *messages, **options):
    """Assert that loading raises an error with these messages and changes no state."""
    accelerator, state, _ = build_run(seed=9, **options)
    before = state()
    with pytest.raises(CheckpointError) as raised:
        accelerator.load_state(folder)
    for text in messages:
        assert text in str(raised.value)
    assert state() == before
    assert not any(word in str(raised.value) for word in ("Traceback", "NoneType", "KeyError"))
    return str(raised.value)


@pytest.fixture
def saved(tmp_path):
    accelerator, _, prepared = build_run()
    accelerator.save_state(tmp_path / "saved")
    assert prepared  # keeps the loaders alive: a collected one would not be saved
    return tmp_path / "saved"


def test_loading_into_another_architecture_names_missing_and_different_parameters(saved):
    assert_load_fails(
        saved,
        "model: missing in the checkpoint: 0.weight, 0.bias, 1.weight and 1 more",
        "not in the model here:",
        model=nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)),
    )
    assert_load_fails(
        saved, "model/weight is [3, 2] in the checkpoint and [4, 2] here", model=nn.Linear(2, 4)
    )
    assert_load_fails(
        saved,
        "model: not in the model here: bias",
        "optimizer: the optimizer here does not have model.bias",
        model=nn.Linear(2, 3, bias=False),
    )


def test_loading_into_another_dtype_names_the_tensor(saved):
    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(2, 3).bfloat16())
    with pytest.raises(CheckpointError, match="model/weight is float32 in the checkpoint and bfloat16 here"):
        accelerator.load_state(saved)
    assert model.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"models": 2}, "model_1 (Linear): it is prepared here and not in the checkpoint"),
        ({"optimizers": 2}, "optimizer_1 (AdamW): it is prepared here and not in the checkpoint"),
        ({"schedulers": 2}, "scheduler_1 (StepLR): it is prepared here and not in the checkpoint"),
        ({"loaders": 2}, "loader_1"),
        ({"registered": 2}, "registered_1 (RegisteredValue): it is prepared here and not in the checkpoint"),
        ({"schedulers": 0}, "scheduler (StepLR): it is in the checkpoint and not prepared here"),
        ({"registered": 0}, "registered (RegisteredValue): it is in the checkpoint and not prepared here"),
        ({"loaders": 0}, "loader"),
        ({"groups": 2}, "optimizer: the checkpoint has 1 groups of parameters, the optimizer here 2"),
    ],
)
def test_loading_into_another_number_of_objects_names_the_object(saved, options, message):
    assert_load_fails(saved, message, "nothing was loaded", **options)


def test_loading_into_other_parameter_groups_names_the_groups(tmp_path):
    def build_two_groups(first):
        accelerator = Accelerator()
        model = accelerator.prepare(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))
        parameters = list(model.parameters())
        optimizer = torch.optim.SGD(
            [{"params": parameters[:first]}, {"params": parameters[first:], "lr": 0.5}], lr=0.1
        )
        accelerator.prepare(optimizer)
        return accelerator

    build_two_groups(1).save_state(tmp_path / "saved")
    with pytest.raises(CheckpointError, match="group 0, 1 has other parameters in the checkpoint than here"):
        build_two_groups(2).load_state(tmp_path / "saved")


def test_optimizer_state_is_loaded_by_parameter_in_any_order(tmp_path):
    def build(order):
        torch.manual_seed(1)
        accelerator = Accelerator()
        model = accelerator.prepare(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        optimizer = accelerator.prepare(torch.optim.Adam(order(list(model.parameters())), lr=0.1))
        return accelerator, model, optimizer

    accelerator, model, optimizer = build(list)
    train_step(model, optimizer)
    accelerator.save_state(tmp_path / "saved")
    resumed, resumed_model, resumed_optimizer = build(lambda parameters: parameters[::-1])
    resumed.load_state(tmp_path / "saved")
    for parameter, loaded in zip(model.parameters(), resumed_model.parameters(), strict=True):
        assert torch.equal(optimizer.state[parameter]["exp_avg"], resumed_optimizer.state[loaded]["exp_avg"])


def test_a_load_with_strict_false_loads_matching_state_and_logs_the_rest(saved, caplog):
    accelerator, _, prepared = build_run(
        seed=3, optimizers=2, groups=2, model=nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    )
    accelerator.load_state(saved, strict=False)
    for text in ("model: missing in the checkpoint: 0.weight", "optimizer_1", "not in the model here:"):
        assert text in caplog.text
    train_step(prepared[0], prepared[1])


def test_a_load_with_strict_false_converts_dtypes(saved, caplog):
    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(2, 3).bfloat16())
    accelerator.load_state(saved, strict=False)
    torch.manual_seed(0)
    assert torch.allclose(model.weight.float(), nn.Linear(2, 3).weight, atol=0.11)
    assert "float32 in the checkpoint and bfloat16 here" in caplog.text


def test_loading_a_path_without_a_checkpoint_reports_the_reason(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    assert_load_fails(tmp_path / "nowhere", f"{tmp_path}/nowhere is not a checkpoint: it does not exist")
    assert_load_fails(tmp_path / "empty", "is not a checkpoint: it has no checkpoint.json")
    assert_load_fails(tmp_path / "file", "is not a checkpoint: it is a file")
    assert_load_fails(None, "load_state() cannot search for a checkpoint")


def test_a_value_that_cannot_be_saved_is_named_and_leaves_no_files(tmp_path):
    accelerator = Accelerator()
    accelerator.register_for_checkpointing(RegisteredValue({"a": [1, {"b": print}]}))
    with pytest.raises(CheckpointError, match=r"registered/value\.a\.1\.b cannot be saved: it is a builtins"):
        accelerator.save_state(tmp_path / "saved")
    assert not list(tmp_path.iterdir())


def test_registering_an_object_without_state_dict_raises():
    accelerator = Accelerator()
    with pytest.raises(ValueError, match=r"cannot save int: it lacks state_dict\(\) or load_state_dict\(\)"):
        accelerator.register_for_checkpointing(RegisteredValue(), 3)
    assert not accelerator._checkpoints._registered


def test_the_repr_of_a_checkpoint_has_its_path_and_step(saved):
    accelerator, *_ = build_run()
    checkpoint = accelerator.load_state(saved)
    assert repr(checkpoint) == f"Checkpoint({str(saved)!r}, step=0)"


# Several processes ---------------------------------------------------------------------------


def save_and_load_different_directories(folder):
    accelerator, state, _ = build_run()
    rank_folder = Path(folder) / str(accelerator.process_index)
    errors = []
    with pytest.raises(CheckpointError) as raised:
        accelerator.save_state(rank_folder)
    errors.append(str(raised.value))
    accelerator.wait_for_everyone()
    leftovers = list_names(folder)
    accelerator.wait_for_everyone()
    accelerator.save_state(Path(folder) / "0")
    before = state()
    with pytest.raises(CheckpointError) as raised:
        accelerator.load_state(rank_folder)
    assert state() == before
    return [*errors, str(raised.value)], leftovers


def test_different_directories_on_two_ranks_raise(pair, tmp_path):
    for (saving, loading), leftovers in pair.run(save_and_load_different_directories, str(tmp_path)):
        assert saving.startswith(
            f"save_state() received different directories (rank 0: {tmp_path}/0, rank 1: "
        )
        assert loading.startswith("load_state() received different directories")
        assert leftovers == []


def save_and_load_with_failing_hook(folder):
    accelerator, state, _ = build_run()
    accelerator.save_state(f"{folder}/good")

    def fail(*_):
        if accelerator.process_index == 1:
            raise KeyError("lost")

    handle = accelerator.register_save_state_pre_hook(fail)
    with pytest.raises(CheckpointError, match="rank 1: KeyError: 'lost'"):
        accelerator.save_state(f"{folder}/saved")
    handle.remove()
    accelerator.register_load_state_pre_hook(fail)
    before = state()
    with pytest.raises(CheckpointError, match="rank 1: KeyError: 'lost'"):
        accelerator.load_state(f"{folder}/good")
    assert state() == before
    accelerator.wait_for_everyone()
    return list_names(folder)


def test_a_failing_hook_on_one_rank_raises_on_all_ranks(pair, tmp_path):
    assert pair.run(save_and_load_with_failing_hook, str(tmp_path)) == [["good"], ["good"]]


def save_unsupported_object(folder):
    accelerator, *_ = build_run(registered=0)
    accelerator.register_for_checkpointing(RegisteredValue(print if accelerator.process_index else 1))
    with pytest.raises(CheckpointError, match="rank 1: registered/value cannot be saved"):
        accelerator.save_state(f"{folder}/saved")
    accelerator.wait_for_everyone()
    return list_names(folder)


def test_a_value_that_cannot_be_saved_on_one_rank_raises_on_all_ranks(pair, tmp_path):
    assert pair.run(save_unsupported_object, str(tmp_path)) == [[], []]


# Hooks that save models themselves -------------------------------------------------------------


def save_hook(models, weights, output_dir):
    """Save a model as scripts with `save_pretrained` do."""
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


def save_and_load_with_model_hooks(folder):
    def build(seed):
        torch.manual_seed(seed)
        accelerator = Accelerator()
        accelerator.register_save_state_pre_hook(save_hook)
        accelerator.register_load_state_pre_hook(load_hook)
        models = nn.Linear(2, 2), nn.Sequential(nn.Linear(3, 1))
        optimizer = torch.optim.AdamW([p for model in models for p in model.parameters()])
        return accelerator, accelerator.prepare(*models, optimizer)

    accelerator, (first, second, optimizer) = build(1)
    (first(torch.ones(1, 2)).sum() + second(torch.ones(1, 3)).sum()).backward()
    optimizer.step()
    accelerator.save_state(folder)
    resumed, resumed_objects = build(2)
    checkpoint = resumed.load_state(folder)
    results = [
        repr(to_numbers(accelerator.unwrap_model(saved).state_dict()))
        == repr(to_numbers(resumed.unwrap_model(loaded).state_dict()))
        for saved, loaded in ((first, resumed_objects[0]), (second, resumed_objects[1]))
    ]
    assert results == [True, True]
    return checkpoint.manifest.items, sorted(checkpoint.manifest.files)


@pytest.mark.parametrize("size", [1, 2])
def test_hooks_of_the_script_save_and_load_a_model(clusters, size, tmp_path):
    for items, files in clusters[size].run(save_and_load_with_model_hooks, str(tmp_path / "saved")):
        assert "model_1" in items
        assert "model" not in items
        assert "unet/weights.pt" in files


# Names and numbers of checkpoints ---------------------------------------------------------------


def build_project(folder, **options):
    configuration = ProjectConfiguration(folder, automatic_checkpoint_naming=True, **options)
    return build_run(Accelerator(project_config=configuration))[0]


def list_checkpoints(folder):
    return list_names(folder / "checkpoints")


def test_a_new_run_continues_the_numbering(tmp_path):
    accelerator = build_project(tmp_path)
    assert [Path(accelerator.save_state()).name for _ in range(3)] == [
        "checkpoint_0",
        "checkpoint_1",
        "checkpoint_2",
    ]
    assert accelerator.save_iteration == 3
    resumed = build_project(tmp_path)
    assert resumed.load_state().number == 2
    assert resumed.save_iteration == 3
    assert resumed.save_state().endswith("checkpoint_3")


def test_numbers_of_existing_directories_are_skipped(tmp_path):
    (tmp_path / "checkpoints" / "checkpoint_4").mkdir(parents=True)
    assert build_project(tmp_path).save_state().endswith("checkpoint_5")
    assert build_project(tmp_path, iteration=8).save_state().endswith("checkpoint_8")


def test_a_save_after_loading_an_older_checkpoint_uses_the_next_free_number(tmp_path):
    accelerator = build_project(tmp_path)
    for _ in range(4):
        accelerator.save_state()
    resumed = build_project(tmp_path)
    resumed.load_state(tmp_path / "checkpoints" / "checkpoint_1")
    assert resumed.save_state().endswith("checkpoint_4")


def test_total_limit_keeps_the_newest_checkpoints(tmp_path):
    accelerator = build_project(tmp_path, total_limit=2)
    for _ in range(4):
        accelerator.save_state()
    assert list_checkpoints(tmp_path) == ["checkpoint_2", "checkpoint_3"]
    assert [checkpoint.number for checkpoint in accelerator.checkpoints.list()] == [2, 3]


EARLIER = r"checkpoints has checkpoint_2 \(step 0\) of an earlier run; this run starts from the beginning and keeps it\. Launch with `accel launch --resume`"


@pytest.mark.parametrize("calls_resume", [True, False])
def test_a_run_from_the_beginning_reports_and_keeps_the_checkpoints_of_an_earlier_one(
    tmp_path, capsys, calls_resume
):
    earlier = build_project(tmp_path, total_limit=2)
    for _ in range(3):
        earlier.save_state()
    assert "earlier run" not in capsys.readouterr().err
    fresh = build_project(tmp_path, total_limit=2)
    if calls_resume:
        assert fresh.resume() is None
    for _ in range(3):
        fresh.save_state()
    assert len(re.findall(EARLIER, capsys.readouterr().err)) == 1
    assert [each.number for each in fresh.checkpoints.list()] == [1, 2, 4, 5]


def test_a_run_that_continues_counts_the_checkpoints_of_its_lineage(tmp_path, capsys):
    for _ in range(3):
        build_project(tmp_path, total_limit=2).save_state()
    resumed = build_project(tmp_path, total_limit=2)
    resumed.load_state()
    for _ in range(2):
        resumed.save_state()
    resumed = build_project(tmp_path, total_limit=2)
    resumed.load_state()
    capsys.readouterr()
    resumed.save_state()
    assert "earlier run" not in capsys.readouterr().err
    assert [each.number for each in resumed.checkpoints.list()] == [0, 1, 4, 5]


def test_save_on_each_node_is_rejected(tmp_path):
    accelerator = build_project(tmp_path, save_on_each_node=True)
    with pytest.raises(ValueError, match="save_on_each_node"):
        accelerator.save_state()
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(
    ("saved", "loaded", "line"),
    [
        ("fp16", "no", "scaler: this run scales no loss"),
        ("no", "fp16", "scaler: the checkpoint has no loss scale, and one starts from the beginning"),
    ],
)
def test_a_checkpoint_of_another_number_format_loads_with_a_line_about_the_loss_scale(
    tmp_path, caplog, saved, loaded, line
):
    def build(mixed_precision):
        accelerator = Accelerator(mixed_precision=mixed_precision)
        return accelerator, accelerator.prepare(nn.Linear(2, 1))

    accelerator, model = build(saved)
    accelerator.save_state(tmp_path / "saved")
    expected = model.weight.clone()
    accelerator, model = build(loaded)
    accelerator.load_state(tmp_path / "saved")
    assert model.weight.equal(expected)
    assert line in caplog.text


def test_a_resume_within_a_loop_is_an_error_and_works_after_it(tmp_path):
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(range(8), batch_size=1))
    seen = []
    for batch in loader:
        seen.append(batch.item())
        if len(seen) == 3:
            accelerator.save_state(str(tmp_path / "saved"))
        if len(seen) == 5:
            with pytest.raises(RuntimeError, match="Call resume\\(\\) before the loop"):
                accelerator.resume(tmp_path / "saved")
            break
    accelerator.resume(tmp_path / "saved")
    assert [batch.item() for batch in loader] == [3, 4, 5, 6, 7]


def build_training(build_optimizer, build_scheduler=None):
    accelerator = Accelerator()
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = build_optimizer(model.parameters())
    scheduler = build_scheduler(optimizer) if build_scheduler else None
    prepared = accelerator.prepare(*filter(None, (model, optimizer, scheduler)))
    return accelerator, prepared[0], prepared[1]


def train_prepared(accelerator, model, optimizer):
    accelerator.backward(model(torch.ones(3, 2)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


class OwnAdamW(torch.optim.AdamW):
    """An optimizer of the script."""


class OwnOptimizer(torch.optim.Optimizer):
    """An optimizer of the script with options of its own."""

    def __init__(self, parameters):
        super().__init__(parameters, {"rate": 0.1})

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.data.sub_(parameter.grad, alpha=self.param_groups[0]["rate"])


@pytest.mark.parametrize(
    ("saved", "live"),
    [
        (torch.optim.AdamW, torch.optim.RMSprop),
        (torch.optim.AdamW, torch.optim.SGD),
        (torch.optim.AdamW, torch.optim.Adagrad),
        (torch.optim.Adam, torch.optim.AdamW),
        (torch.optim.SGD, torch.optim.AdamW),
        (OwnAdamW, torch.optim.RMSprop),
        (torch.optim.AdamW, OwnOptimizer),
    ],
)
def test_the_state_of_an_optimizer_of_another_class_is_refused_or_left_out(tmp_path, saved, live):
    training = build_training(saved)
    train_prepared(*training)
    training[0].save_state(str(tmp_path / "saved"))
    training = accelerator, _, optimizer = build_training(live)
    before = to_numbers(optimizer.state_dict())
    with pytest.raises(CheckpointError, match=r"optimizer.*here"):
        accelerator.load_state(tmp_path / "saved")
    accelerator.load_state(tmp_path / "saved", strict=False)
    assert to_numbers(optimizer.state_dict()) == before
    train_prepared(*training)


def test_the_state_of_a_scheduler_of_another_class_is_refused(tmp_path):
    schedulers = torch.optim.lr_scheduler
    saved, *_ = build_training(torch.optim.AdamW, lambda optimizer: schedulers.StepLR(optimizer, 2))
    saved.save_state(str(tmp_path / "saved"))
    live, *_ = build_training(torch.optim.AdamW, lambda optimizer: schedulers.CosineAnnealingLR(optimizer, 9))
    with pytest.raises(
        CheckpointError, match="scheduler is StepLR in the checkpoint and CosineAnnealingLR here"
    ):
        live.load_state(tmp_path / "saved")
    live.load_state(tmp_path / "saved", strict=False)


def test_an_optimizer_that_the_script_derives_from_the_saved_one_loads(tmp_path):
    training = build_training(torch.optim.AdamW)
    train_prepared(*training)
    training[0].save_state(str(tmp_path / "saved"))
    accelerator, _, optimizer = build_training(OwnAdamW)
    accelerator.load_state(tmp_path / "saved")
    assert to_numbers(optimizer.state_dict()) == to_numbers(training[2].state_dict())
