"""The public methods of `Accelerator`, on one, two and three processes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import stat
import sys
from unittest.mock import patch

import pytest
import torch
import yaml
from safetensors.torch import load_file
from support.cases.log_messages import collect_messages
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

from accel_runtime import (
    Accelerator,
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
)
from accel_runtime.data.loader import PreparedLoader
from accel_runtime.training.optimizer import PreparedOptimizer
from accel_runtime.training.scheduler import PreparedScheduler

GLOBAL_BATCH = 6  # divisible by 1, 2 and 3 processes
DATA = torch.linspace(-2, 2, 5 * GLOBAL_BATCH * 4).view(-1, 4).sin()


def build_network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def build_sgd(model, rate=0.1):
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)


def compute_loss(model, batch):
    return (model(batch) - batch.sum(1, keepdim=True)).square().mean()


def take_local_batch(accelerator, batch):
    """Return the slice of a global batch for this process."""
    return batch.chunk(accelerator.num_processes)[accelerator.process_index]


def copy_parameters(model):
    return [p.detach().clone() for p in model.parameters()]


def copy_gradients(model):
    return [p.grad.clone() for p in model.parameters()]


def is_close(actual, expected, tolerance=1e-6):
    return all(torch.allclose(g, w, rtol=0, atol=tolerance) for g, w in zip(actual, expected, strict=True))


def fp16():
    """Return an accelerator whose loss scale does not make the gradients of these tests overflow."""
    return Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=128.0)])


def prepare_network(accelerator, rate=0.1):
    model = build_network()
    return accelerator.prepare(model, build_sgd(model, rate))


# Topology --------------------------------------------------------------------------------


def test_topology_flags_are_booleans_that_serialisers_write_as_such(ranks):
    def read_topology():
        a = Accelerator()
        flags = [a.is_main_process, a.is_local_main_process, a.is_last_process]
        assert yaml.safe_load(yaml.safe_dump(flags)) == json.loads(json.dumps(flags)) == flags
        assert [type(flag) for flag in flags] == [bool] * 3
        return a.num_processes, a.process_index, a.local_process_index, str(a.device), flags

    expected = [
        (ranks.size, rank, rank, "cpu", [rank == 0, rank == 0, rank == ranks.size - 1])
        for rank in range(ranks.size)
    ]
    assert ranks.run(read_topology) == expected


def test_print_writes_on_the_first_process_only(ranks):
    def print_line():
        with contextlib.redirect_stdout(io.StringIO()) as out:
            Accelerator().print("epoch", 1, sep=" = ", end="!\n")
        return out.getvalue()

    assert ranks.run(print_line) == ["epoch = 1!\n"] + [""] * (ranks.size - 1)


# Preparing -------------------------------------------------------------------------------


def test_prepare_returns_objects_in_the_order_and_nesting_of_its_arguments(ranks):
    def prepare_nested():
        accelerator = Accelerator()
        model = build_network()
        optimizer = build_sgd(model)
        scheduler = LambdaLR(optimizer, lambda _: 1.0)
        loader = DataLoader(DATA)
        prepared = accelerator.prepare(
            scheduler, {"train": loader, "rest": (optimizer, ["text", None])}, [model]
        )
        first, named, (last,) = prepared
        assert isinstance(first, PreparedScheduler)
        assert isinstance(named["train"], PreparedLoader)
        assert isinstance(named["rest"][0], PreparedOptimizer)
        assert named["rest"][1] == ["text", None]
        assert accelerator.unwrap_model(last) is model
        optimizer.step()
        first.step()
        return type(prepared), first.last_epoch, isinstance(last, DistributedDataParallel)

    assert ranks.run(prepare_nested) == [(tuple, ranks.size, ranks.size > 1)] * ranks.size


def test_prepare_returns_a_single_object_itself_and_keeps_prepared_objects(ranks):
    def prepare_again():
        accelerator = Accelerator()
        model = build_network()
        optimizer = build_sgd(model)
        objects = [model, optimizer, LambdaLR(optimizer, lambda _: 1.0), DataLoader(DATA)]
        prepared = [accelerator.prepare(item) for item in objects]
        assert all(accelerator.prepare(item) is item for item in prepared)
        assert all(
            result is other for result, other in zip(accelerator.prepare(*prepared), prepared, strict=True)
        )
        return True

    assert all(ranks.run(prepare_again))


def test_prepare_does_not_wrap_a_ddp_model_again(several):
    def wrap_twice():
        first, second = Accelerator(), Accelerator()
        wrapped = DistributedDataParallel(build_network())
        prepared_model = first.prepare(build_network())
        return first.prepare(wrapped) is wrapped, second.prepare(prepared_model) is prepared_model

    assert several.run(wrap_twice) == [(True, True)] * several.size


def test_a_model_without_trainable_parameters_can_be_prepared(ranks):
    def compute_output():
        accelerator = Accelerator(gradient_accumulation_steps=2)
        frozen = accelerator.prepare(build_network().requires_grad_(requires_grad=False))
        with accelerator.accumulate(frozen), accelerator.no_sync(frozen):
            return frozen(DATA)

    assert all(torch.equal(actual, build_network()(DATA)) for actual in ranks.run(compute_output))


def test_unwrap_model_returns_the_script_model_with_its_parameter_names(ranks):
    def list_state_names():
        accelerator = Accelerator(mixed_precision="bf16")
        model = build_network()
        prepared = accelerator.prepare(model)
        assert accelerator.unwrap_model(prepared) is model
        assert accelerator.unwrap_model(model) is model
        exact = [torch.equal(model(DATA), build_network()(DATA))]
        accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
        exact += [torch.equal(model(DATA), build_network()(DATA))]
        return list(model.state_dict()), exact

    assert ranks.run(list_state_names) == [(list(build_network().state_dict()), [False, True])] * ranks.size


@pytest.mark.parametrize("model", [None, 3, build_network])
def test_unwrap_model_rejects_objects_that_are_not_modules(model):
    with pytest.raises(
        TypeError, match=r"unwrap_model\(\) failed: .* is not a torch.nn.Module. Pass a model"
    ):
        Accelerator().unwrap_model(model)


def test_get_state_dict_uses_the_names_of_the_script_unless_unwrap_is_false(ranks):
    def list_state_names():
        accelerator = Accelerator()
        model = accelerator.prepare(build_network())
        state = accelerator.get_state_dict(model)
        assert all(torch.equal(state[name], value) for name, value in build_network().state_dict().items())
        return list(state), list(accelerator.get_state_dict(model, unwrap=False))

    names = list(build_network().state_dict())
    wrapped = names if ranks.size == 1 else [f"module.{name}" for name in names]
    assert ranks.run(list_state_names) == [(names, wrapped)] * ranks.size


def test_two_accelerators_work_independently_in_one_process(ranks):
    def use_both():
        first, second = Accelerator(mixed_precision="fp16"), Accelerator(gradient_accumulation_steps=2)
        with second.accumulate():
            pass
        records = [a.gather(torch.tensor([a.process_index])).tolist() for a in (first, second)]
        return records, first.sync_gradients, second.sync_gradients, second.scaler

    expected = ([list(range(ranks.size))] * 2, True, False, None)
    assert ranks.run(use_both) == [expected] * ranks.size


@pytest.mark.parametrize(("second", "formats"), [(None, "'no'"), ("fp16", "'fp16'"), ("bf16", "")])
def test_a_second_accelerator_with_another_number_format_is_reported(pair, second, formats):
    def report():
        with collect_messages("accel_runtime.options") as messages:
            first = Accelerator(mixed_precision="bf16")
            after = Accelerator(mixed_precision=second)
            del first
        return after.mixed_precision, messages

    (precision, messages), other = pair.run(report)
    assert (precision, other) == (second or "no", (second or "no", []))
    expected = f"computes with mixed_precision {formats}, and the one before it with 'bf16'"
    assert [expected in message for message in messages] == [True] * bool(formats)


def test_a_model_prepared_for_evaluation_is_not_wrapped_in_ddp(several):
    def describe_type():
        accelerator = Accelerator(mixed_precision="bf16")
        model = accelerator.prepare_model(build_network(), evaluation_mode=True)
        assert accelerator.unwrap_model(model) is model
        return isinstance(model, DistributedDataParallel), model(DATA).dtype

    assert several.run(describe_type) == [(False, torch.float32)] * several.size


def count_calls(function):
    """Return the number of calls of Python functions, each resumption of a generator included."""
    events = []
    sys.setprofile(lambda *call: events.append(call[1]))
    try:
        function()
    finally:
        sys.setprofile(None)
    return events.count("call")


def test_prepare_adds_a_few_calls_for_each_layer_to_those_of_moving_the_model():
    accelerator, layers = Accelerator(cpu=True), 300
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(layers)))
    optimizer = build_sgd(model)
    moving = count_calls(lambda: model.to("cpu"))
    added = count_calls(lambda: accelerator.prepare(model, optimizer)) - moving
    assert added < 25 * layers  # 14; it was 71 with a search by name for each question


def test_device_placement_selects_the_objects_that_are_moved():
    """Use the device `meta`, so that moved objects can be recognized."""
    accelerator = Accelerator()
    accelerator._backend.runtime.device = torch.device("meta")
    models = [build_network() for _ in range(3)]
    prepared = accelerator.prepare(*models, device_placement=[True, False, None])
    assert [next(m.parameters()).device.type for m in prepared] == ["meta", "cpu", "meta"]
    loaders = accelerator.prepare(DataLoader(DATA), DataLoader(DATA), device_placement=[False, True])
    assert [next(iter(loader)).device.type for loader in loaders] == ["cpu", "meta"]
    with pytest.raises(ValueError, match="Invalid device_placement: it has 1 entries for 2 objects"):
        accelerator.prepare(*models[:2], device_placement=[True])


@pytest.mark.parametrize(("placed", "expected"), [(True, torch.float32), (False, torch.float64)])
def test_the_state_of_a_placed_optimizer_gets_the_dtype_of_its_parameters(placed, expected):
    """Compare dtypes, since there is only one device here."""
    model = build_network()
    optimizer = torch.optim.Adam(model.parameters())
    compute_loss(model, DATA).backward()
    optimizer.step()
    state = optimizer.state[next(iter(model.parameters()))]
    state["exp_avg"] = state["exp_avg"].double()
    prepared, _ = Accelerator().prepare(optimizer, model, device_placement=[placed, None])
    parameter_state = prepared.state[next(iter(model.parameters()))]
    assert parameter_state["exp_avg"].dtype == expected
    assert parameter_state["step"] == 1


@pytest.mark.parametrize("kind", ["model", "optimizer"])
def test_prepare_rejects_float16_parameters_with_fp16(kind):
    accelerator, model = fp16(), build_network().half()
    item = model if kind == "model" else build_sgd(model)
    with pytest.raises(ValueError, match="fp16 cannot train float16 parameters"):
        accelerator.prepare(item)
    assert accelerator.prepare_model(model, evaluation_mode=True) is model


def test_unscale_gradients_accepts_single_optimizers():
    accelerator = fp16()
    models = accelerator.prepare([build_network(), build_network(1), build_network(2)])
    plain = [build_sgd(model) for model in models]
    optimizers = accelerator.prepare(plain)
    before = []
    for model in models:
        accelerator.backward(compute_loss(model, DATA))
        before.append(copy_gradients(model)[0])
    accelerator.unscale_gradients(plain[0])
    accelerator.unscale_gradients([optimizers[1]])
    ratios = [float((copy_gradients(m)[0] / b).mean()) for m, b in zip(models, before, strict=True)]
    assert ratios == [pytest.approx(1 / 128), pytest.approx(1 / 128), 1]
    with pytest.raises(ValueError, match="is not prepared"):
        accelerator.unscale_gradients(build_sgd(build_network()))


# The same mathematics --------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_gradients_equal_those_of_one_process_on_the_same_global_batches(ranks, steps):
    def average_gradients(steps):
        accelerator = Accelerator(gradient_accumulation_steps=steps)
        model = accelerator.prepare(build_network())
        for batch in DATA.split(GLOBAL_BATCH)[:steps]:
            with accelerator.accumulate(model):
                accelerator.backward(compute_loss(model, take_local_batch(accelerator, batch)))
        return copy_gradients(model)

    model = build_network()
    for batch in DATA.split(GLOBAL_BATCH)[:steps]:
        (compute_loss(model, batch) / steps).backward()
    assert all(is_close(actual, copy_gradients(model)) for actual in ranks.run(average_gradients, steps))


def test_gradients_are_averaged_only_at_the_end_of_an_accumulation_cycle(several):
    def compare_gradients():
        accelerator = Accelerator(gradient_accumulation_steps=2)
        model = accelerator.prepare(build_network())
        records = []
        for batch in DATA.split(GLOBAL_BATCH)[:2]:
            with accelerator.accumulate(model):
                accelerator.backward(compute_loss(model, take_local_batch(accelerator, batch)))
            everyone = accelerator.gather(copy_gradients(model)[0].unsqueeze(0))
            records.append(bool((everyone == everyone[0]).all()))
        return records

    assert several.run(compare_gradients) == [[False, True]] * several.size


def train_epoch(accelerator):
    """Train for 5 steps as scripts do, and return the parameters and the learning rate."""
    model = build_network()
    optimizer = build_sgd(model)
    torch.manual_seed(9)
    size = GLOBAL_BATCH if accelerator.split_batches else GLOBAL_BATCH // accelerator.num_processes
    loader = DataLoader(TensorDataset(DATA), batch_size=size, shuffle=True)
    scheduler = LambdaLR(optimizer, lambda step: 0.9**step)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for (batch,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(compute_loss(model, batch))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return copy_parameters(model), optimizer.param_groups[0]["lr"]


def test_training_with_split_batches_equals_a_plain_loop_on_one_process(ranks):
    def run():
        return train_epoch(Accelerator(split_batches=True))

    model = build_network()
    optimizer = build_sgd(model)
    torch.manual_seed(9)
    for (batch,) in DataLoader(TensorDataset(DATA), batch_size=GLOBAL_BATCH, shuffle=True):
        compute_loss(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.9
        optimizer.zero_grad()
    for actual, rate in ranks.run(run):
        assert is_close(actual, copy_parameters(model))
        assert rate == pytest.approx(0.1 * 0.9**5)


def test_the_last_micro_batch_of_an_epoch_ends_the_accumulation_cycle(ranks):
    def collect_sync_flags():
        accelerator = Accelerator(gradient_accumulation_steps=2, split_batches=True)
        model = build_network()
        loader = accelerator.prepare(DataLoader(DATA, batch_size=GLOBAL_BATCH))
        accelerator.prepare(model)
        records = []
        for _ in range(2):
            for _ in loader:
                with accelerator.accumulate(model):
                    records.append(accelerator.sync_gradients)
        return records

    assert ranks.run(collect_sync_flags) == [[False, True, False, True, True] * 2] * ranks.size


# Mixed precision -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mixed_precision", "dtype"), [("no", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_a_prepared_model_computes_in_mixed_precision_and_returns_float32(ranks, mixed_precision, dtype):
    def collect_dtypes(mixed_precision):
        accelerator = Accelerator(mixed_precision=mixed_precision)
        model, optimizer = prepare_network(accelerator)
        records = []
        accelerator.unwrap_model(model)[0].register_forward_hook(lambda *call: records.append(call[-1].dtype))
        output = model(DATA)
        with accelerator.autocast():
            records.append((DATA @ DATA.T).dtype)
        before = copy_parameters(model)
        accelerator.backward(output.square().mean())
        optimizer.step()
        assert not is_close(copy_parameters(model), before)
        return accelerator.mixed_precision, records, output.dtype, {p.dtype for p in model.parameters()}

    expected = (mixed_precision, [dtype, dtype], torch.float32, {torch.float32})
    assert ranks.run(collect_dtypes, mixed_precision) == [expected] * ranks.size


def test_all_ranks_skip_the_optimizer_and_scheduler_step_on_overflow(ranks):
    def run():
        accelerator = fp16()
        model = build_network()
        optimizer = build_sgd(model)
        model, optimizer, scheduler = accelerator.prepare(
            model, optimizer, LambdaLR(optimizer, lambda step: 0.5**step)
        )
        records = []
        for overflows in (False, True, False):
            before, scale = copy_parameters(model), accelerator.scaler.get_scale()
            loss = compute_loss(model, take_local_batch(accelerator, DATA))
            first = accelerator.is_main_process
            accelerator.backward(loss * float("inf") if overflows and first else loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            backed_off = accelerator.scaler.get_scale() == scale / 2
            moved = not is_close(copy_parameters(model), before, tolerance=0)
            records.append((accelerator.optimizer_step_was_skipped, moved, backed_off, scheduler.last_epoch))
        return records

    n = ranks.size
    expected = [(False, True, False, n), (True, False, True, n), (False, True, False, 2 * n)]
    assert ranks.run(run) == [expected] * n


@pytest.mark.parametrize("mixed_precision", ["no", "fp16"])
def test_clip_grad_norm_returns_the_unscaled_norm_and_clips_to_the_maximum(ranks, mixed_precision):
    def clip_gradients(mixed_precision):
        accelerator = fp16() if mixed_precision == "fp16" else Accelerator()
        model, _ = prepare_network(accelerator)
        accelerator.backward(10 * compute_loss(model, take_local_batch(accelerator, DATA)))
        first = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        second = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        accelerator.clip_grad_value_(model.parameters(), 0.01)
        return first.item(), second.item(), max(g.abs().max().item() for g in copy_gradients(model))

    model = build_network()
    (10 * compute_loss(model, DATA)).backward()
    expected = nn.utils.get_total_norm(copy_gradients(model)).item()
    assert expected > 1
    for first, second, largest in ranks.run(clip_gradients, mixed_precision):
        assert first == pytest.approx(expected, rel=1e-5 if mixed_precision == "no" else 1e-2)
        assert second == pytest.approx(1.0, rel=1e-4)
        assert largest == pytest.approx(0.01)


# Schedulers ------------------------------------------------------------------------------


def step_scheduler(make, *metrics, split=False, with_optimizer=True, steps=2):
    """Prepare a scheduler before its optimizer, and return its `last_epoch` and the rate after some steps."""
    accelerator = Accelerator(split_batches=split, step_scheduler_with_optimizer=with_optimizer)
    model = build_network()
    optimizer = build_sgd(model, rate=1.0)
    scheduler, optimizer = accelerator.prepare(make(optimizer), optimizer)
    for _ in range(steps):
        optimizer.step()
        scheduler.step(*metrics)
    return scheduler.last_epoch, optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(
    ("options", "of"),
    [({}, lambda n: n), ({"split": True}, lambda _: 1), ({"with_optimizer": False}, lambda _: 1)],
    ids=["per process", "split", "left to the script"],
)
def test_a_scheduler_advances_once_for_each_process_unless_configured_otherwise(ranks, options, of):
    def run(options):
        return step_scheduler(lambda optimizer: LambdaLR(optimizer, lambda step: 0.5**step), **options)

    counted = 2 * of(ranks.size)
    assert ranks.run(run, options) == [(counted, 0.5**counted)] * ranks.size


def test_reduce_lr_on_plateau_advances_once_for_each_metric(ranks):
    def run():
        return step_scheduler(
            lambda optimizer: ReduceLROnPlateau(optimizer, patience=1, factor=0.5), 1.0, steps=3
        )

    assert ranks.run(run) == [(3, 0.5)] * ranks.size


def test_one_cycle_lr_does_not_advance_beyond_its_last_step(ranks):
    def run():
        return step_scheduler(lambda optimizer: OneCycleLR(optimizer, max_lr=1.0, total_steps=7), steps=7)

    assert ranks.run(run) == [(6, pytest.approx(1 / 25 / 1e4))] * ranks.size


@pytest.mark.parametrize("built_on", ["the script's optimizer", "the prepared one"])
def test_a_scheduler_is_skipped_only_with_its_own_optimizer(built_on):
    accelerator = fp16()
    models = accelerator.prepare([build_network(), build_network(1)])
    plain = [build_sgd(model) for model in models]
    optimizers = accelerator.prepare(plain)
    built = [LambdaLR(o, lambda _: 1.0) for o in (optimizers if built_on == "the prepared one" else plain)]
    schedulers = accelerator.prepare(built)
    accelerator.backward(compute_loss(models[0], DATA) * float("inf") + compute_loss(models[1], DATA))
    for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
        optimizer.step()
        scheduler.step()
    assert [scheduler.last_epoch for scheduler in schedulers] == [0, 1]
    assert accelerator.optimizer_step_was_skipped


# Saving ----------------------------------------------------------------------------------


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "torch"])
def test_save_writes_one_complete_file_that_other_libraries_can_read(ranks, tmp_path, safe):
    def save_and_load(folder, safe):
        accelerator = Accelerator()
        model = accelerator.unwrap_model(accelerator.prepare(build_network()))
        path = folder / f"{accelerator.process_index}.weights"
        accelerator.save(model.state_dict(), str(path), safe_serialization=safe)
        accelerator.save(model.state_dict(), path, safe_serialization=safe)

    ranks.run(save_and_load, tmp_path, safe)
    assert [path.name for path in tmp_path.glob("*.weights")] == ["0.weights"]
    path = tmp_path / "0.weights"
    loaded = load_file(path) if safe else torch.load(path, weights_only=True)
    expected = build_network().state_dict()
    assert is_close([loaded.pop(name) for name in expected], expected.values(), tolerance=0)
    assert not loaded


def test_tied_and_transposed_weights_are_saved_under_every_name(ranks, tmp_path):
    """Save them so that the model of the script loads them with strict=True."""

    def build_tied_model():
        model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
        model[1].weight = model[0].weight
        model.register_buffer("turned", torch.arange(6.0).view(2, 3).T)
        return model

    def save_and_load(path):
        accelerator = Accelerator()
        model = accelerator.prepare(build_tied_model())
        accelerator.save(accelerator.get_state_dict(model), path, safe_serialization=True)
        accelerator.wait_for_everyone()
        loaded_model = build_tied_model()
        loaded_model.load_state_dict(load_file(path))
        return all(map(torch.equal, loaded_model.state_dict().values(), model.state_dict().values()))

    assert all(ranks.run(save_and_load, tmp_path / "model.safetensors"))


def test_save_writes_to_an_open_file():
    file = io.BytesIO()
    Accelerator().save({"epoch": 3}, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == {"epoch": 3}


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "torch"])
def test_a_failed_save_keeps_the_old_file_and_leaves_no_other(tmp_path, safe):
    path = tmp_path / "folder" / "state.bin"
    path.parent.mkdir()
    path.write_text("the old one")
    with pytest.raises(Exception, match=r"pickle|tensor|lambda"):
        Accelerator().save({"hook": lambda: None}, path, safe_serialization=safe)
    assert [(file.name, file.read_text()) for file in path.parent.iterdir()] == [("state.bin", "the old one")]


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "torch"])
def test_a_saved_file_has_the_permissions_of_a_new_file(tmp_path, safe):
    Accelerator().save({"x": torch.ones(1)}, tmp_path / "saved", safe_serialization=safe)
    (tmp_path / "plain").touch()
    assert len({stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("saved", "plain")}) == 1


# Early scripts, and options --------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "environ", "expected"),
    [
        ({}, {}, "no"),
        ({"fp16": True}, {}, "fp16"),
        ({"fp16": False}, {"ACCEL_MIXED_PRECISION": "bf16"}, "no"),
        ({"fp16": True, "mixed_precision": "fp16"}, {}, "fp16"),
        ({}, {"USE_FP16": "1"}, "fp16"),
        ({}, {"ACCEL_MIXED_PRECISION": "bf16"}, "bf16"),
        ({"mixed_precision": "no"}, {"ACCEL_MIXED_PRECISION": "bf16"}, "no"),
    ],
)
def test_mixed_precision_comes_from_the_argument_or_else_from_the_environment(arguments, environ, expected):
    with patch.dict(os.environ, environ):
        accelerator = Accelerator(**arguments)
    assert accelerator.mixed_precision == expected
    assert (accelerator.scaler is not None) == (expected == "fp16")


@pytest.mark.parametrize(("fp16", "mixed_precision"), [(True, "bf16"), (True, "no"), (False, "fp16")])
def test_contradicting_fp16_and_mixed_precision_are_rejected(fp16, mixed_precision):
    with pytest.raises(ValueError, match=f"fp16={fp16} and mixed_precision='{mixed_precision}' contradict"):
        Accelerator(fp16=fp16, mixed_precision=mixed_precision)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mixed_precision": "fp8"}, "Invalid mixed_precision 'fp8': expected one of no, bf16, fp16"),
        ({"gradient_accumulation_steps": 0}, "Invalid gradient_accumulation_steps 0: expected at least 1"),
        (
            {"rng_types": ["tpu"]},
            "Invalid rng_types entry 'tpu': expected one of generator, torch, cuda, xpu, xla.",
        ),
        ({"kwargs_handlers": [AutocastKwargs(), AutocastKwargs()]}, "contains several AutocastKwargs"),
    ],
)
def test_invalid_arguments_are_rejected(arguments, message):
    with pytest.raises(ValueError, match=message):
        Accelerator(**arguments)


def test_an_object_that_is_no_handler_is_rejected():
    with pytest.raises(TypeError, match="Invalid kwargs_handlers entry <object"):
        Accelerator(kwargs_handlers=[object()])


def test_cpu_true_overrides_the_device_of_the_launcher():
    with patch.dict(os.environ, ACCEL_DEVICE="xpu"):
        assert Accelerator(cpu=True).device.type == "cpu"
        with pytest.raises(RuntimeError, match="Device 'xpu' is not available"):
            Accelerator()


def test_the_first_two_arguments_can_be_positional():
    accelerator = Accelerator(True, True)
    assert accelerator.split_batches


def test_kwargs_handlers_take_effect(several):
    def read_effects():
        handlers = [
            DistributedDataParallelKwargs(find_unused_parameters=True, gradient_as_bucket_view=True),
            GradScalerKwargs(init_scale=8.0),
            AutocastKwargs(enabled=False),
        ]
        accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=handlers)
        model = accelerator.prepare(build_network())
        with accelerator.autocast():
            dtype = (DATA @ DATA.T).dtype
        ddp = (model.find_unused_parameters, model.gradient_as_bucket_view)
        return ddp, accelerator.scaler.get_scale(), dtype

    assert several.run(read_effects) == [((True, True), 8.0, torch.float32)] * several.size


def test_the_private_lists_that_published_scripts_read_are_those_of_the_run():
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    assert accelerator._models == [model]
    assert accelerator._optimizers == [optimizer]
    assert accelerator._schedulers == [scheduler]
    accelerator._models.pop()  # scripts keep a model out of checkpoints
    assert accelerator._models == []
