"""SPMD: one process computes on four devices, with sharded batches and models."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import load_file
from support.processes.waits import limit
from support.training.models import TokenNet
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

pytest.importorskip("torch_xla", reason="torch_xla is in an environment of its own: make test-xla")

DEVICES = 4
BATCH = 8


def build_tied_model():
    """Return a model with tied weights whose parameters are equal in all processes."""
    model = TokenNet(16, 8, tied=True)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return model


@pytest.fixture
def mesh(clusters):
    """A process on four devices; `run(function, *args)` calls a function of a test there."""
    return clusters["spmd 4"]


def samples(count):
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(16, (2, 3), generator=generator)) for _ in range(count)]


def optimizer_of(kind, model):
    if kind == "AdamW":
        return torch.optim.AdamW(model.parameters(), lr=0.01)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_of(model, tokens, targets):
    return functional.cross_entropy(model(tokens).transpose(1, 2), targets)


def weights(model):
    return {name: value.detach().float().cpu() for name, value in model.state_dict().items()}


def trained_plainly(kind, accumulation, clip):
    """Train ten steps on the CPU with torch alone; return the losses and the weights."""
    model = build_tied_model()
    optimizer = optimizer_of(kind, model)
    losses = []
    for index, (tokens, targets) in enumerate(DataLoader(samples(10 * BATCH * accumulation), BATCH)):
        loss = loss_of(model, tokens, targets)
        (loss / accumulation).backward()
        losses.append(loss.item())
        if (index + 1) % accumulation == 0:
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return losses, weights(model)


def trained(kind, accumulation, clip, options):
    """Do the same with an accelerator; the optimizer is created before the model is prepared."""
    from accel_runtime import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=accumulation, **options)
    model = build_tied_model()
    optimizer = optimizer_of(kind, model)
    loader = DataLoader(samples(10 * BATCH * accumulation), BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for tokens, targets in loader:
        with accelerator.accumulate(model):
            loss = loss_of(model, tokens, targets)
            accelerator.backward(loss)
            if clip and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return [loss.item() for loss in losses], weights(accelerator.unwrap_model(model))


@pytest.mark.parametrize(
    ("kind", "accumulation", "clip"),
    [("AdamW", 1, None), ("SGD", 1, 0.1), ("AdamW", 2, 0.1), ("SGD", 2, None)],
)
def test_ten_steps_have_the_losses_and_weights_of_the_cpu(mesh, kind, accumulation, clip):
    losses, final = mesh.run(trained, kind, accumulation, clip, {})[0]
    wanted, expected = trained_plainly(kind, accumulation, clip)
    assert losses == pytest.approx(wanted, abs=1e-4)
    torch.testing.assert_close(final, expected, atol=1e-4, rtol=0)


def test_ten_steps_in_bf16_have_nearly_the_losses_of_the_cpu(mesh):
    losses, final = mesh.run(trained, "SGD", 1, None, {"mixed_precision": "bf16"})[0]
    wanted, expected = trained_plainly("SGD", 1, None)
    assert losses != pytest.approx(wanted, abs=1e-6)
    assert losses == pytest.approx(wanted, abs=3e-2)
    torch.testing.assert_close(final, expected, atol=3e-2, rtol=0)


def test_the_model_and_its_adamw_state_are_sharded_over_all_devices(mesh):
    def parts():
        import torch_xla
        import torch_xla.distributed.spmd as xs

        from accel_runtime import Accelerator

        accelerator = Accelerator()
        model = build_tied_model()
        before = [id(parameter) for parameter in model.parameters()]
        optimizer = torch.optim.AdamW(model.parameters())
        prepared, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(samples(16), BATCH))
        for tokens, targets in loader:
            accelerator.backward(loss_of(prepared, tokens, targets))
            optimizer.step()
        assert accelerator.unwrap_model(prepared) is model
        assert before == [id(parameter) for parameter in model.parameters()]
        assert model.head.weight is model.embed.weight

        torch_xla.sync(wait=True)

        def local_shape(tensor):
            return [tuple(part.data.shape) for part in xs.XLAShardedTensor(tensor.detach()).local_shards]

        shapes = [
            (local_shape(p), local_shape(p.grad), local_shape(optimizer.state[p]["exp_avg"]))
            for p in model.parameters()
        ]
        return list(model.state_dict()), shapes

    names, local_shape = mesh.run(parts)[0]
    assert names == ["embed.weight", "inner.weight", "inner.bias", "head.weight"]
    full_shapes = [(16, 8), (8, 8), (8,)]
    assert local_shape == [([(shape[0] // DEVICES, *shape[1:])] * DEVICES,) * 3 for shape in full_shapes]


def test_a_loaded_optimizer_state_is_sharded_like_its_parameters(mesh):
    def layouts():
        import torch_xla

        from accel_runtime import Accelerator

        accelerator = Accelerator()
        model, twin = build_tied_model(), build_tied_model()
        optimizer, other = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(twin.parameters())
        loss_of(twin, *torch.randint(16, (2, 8, 3))).backward()
        other.step()
        model, optimizer = accelerator.prepare(model, optimizer)
        optimizer.load_state_dict(other.state_dict())
        loaded = [optimizer.state[parameter]["exp_avg"] for parameter in model.parameters()]
        loaded_states = [other.state[parameter]["exp_avg"] for parameter in twin.parameters()]
        layout = torch_xla._XLAC._get_xla_sharding_spec
        assert all(
            torch.equal(loaded_state.cpu(), expected_state)
            for loaded_state, expected_state in zip(loaded, loaded_states, strict=True)
        )
        return [layout(tensor) for tensor in loaded], [layout(tensor) for tensor in model.parameters()]

    states, parameters = mesh.run(layouts)[0]
    assert (
        states == parameters == ["{devices=[4,1]0,1,2,3}", "{devices=[4,1]0,1,2,3}", "{devices=[4]0,1,2,3}"]
    )


def test_sharded_tensors_are_gathered_on_the_host(mesh):
    def hosted():
        import torch_xla.debug.metrics as met

        from accel_runtime import Accelerator

        accelerator = Accelerator()
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3, dtype=torch.bfloat16), nn.BatchNorm1d(3))
        before = {name: value.clone() for name, value in model.state_dict().items()}
        prepared = accelerator.prepare(model)
        state = model.state_dict()
        state["again"] = state["0.weight"]
        accelerator._run.strategy.synchronize()
        made_whole = met.counter_value("ReplicateShardedData")
        here = accelerator._backend.runtime.state_to_host(state)
        assert met.counter_value("ReplicateShardedData") == made_whole
        assert here["again"] is here["0.weight"]
        assert all(torch.equal(here[name], value) for name, value in before.items())
        return {name: value.device.type for name, value in here.items()}, type(prepared).__name__

    devices, kind = mesh.run(hosted)[0]
    assert set(devices.values()) == {"cpu"}
    assert kind == "SpmdFullyShardedDataParallel"


def test_batch_norm_uses_the_statistics_of_the_global_batch(mesh):
    def normalised():
        from accel_runtime import Accelerator

        accelerator = Accelerator()
        model, loader = accelerator.prepare(
            nn.BatchNorm1d(3), DataLoader(torch.arange(24.0).view(8, 3), BATCH)
        )
        (rows,) = loader
        return model(rows).detach().cpu(), accelerator.get_state_dict(model)["running_mean"].cpu()

    model, rows = nn.BatchNorm1d(3), torch.arange(24.0).view(8, 3)
    expected = model(rows).detach()
    output, mean = mesh.run(normalised)[0]
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(mean, model.running_mean, atol=1e-5, rtol=0)


def test_a_prepared_model_can_be_copied(mesh):
    def copied():
        import copy

        from accel_runtime import Accelerator

        model = Accelerator().prepare(build_tied_model())
        twin = copy.deepcopy(model)
        tokens = torch.arange(8).view(4, 2).to("xla")
        return (model(tokens) - twin(tokens)).abs().max().item(), twin.head.weight is twin.embed.weight

    assert mesh.run(copied)[0] == (0.0, True)


def test_tensors_of_a_batch_are_sharded_by_rows_if_divisible(mesh):
    def shardings(workers):
        import torch_xla

        from accel_runtime import Accelerator

        def collate(items):
            rows = torch.tensor([float(item) for item in items])
            return {
                "flat": rows,
                "deep": [rows.view(-1, 1, 1), rows.bool()],
                "one": torch.tensor(3),
                "odd": rows[:6],
            }

        accelerator = Accelerator()
        loader = accelerator.prepare(DataLoader(range(16), BATCH, collate_fn=collate, num_workers=workers))
        row_shardings = []
        for batch in loader:
            leaves = [batch["flat"], *batch["deep"], batch["one"], batch["odd"]]
            row_shardings.append(
                ([torch_xla._XLAC._get_xla_sharding_spec(leaf) for leaf in leaves], batch["flat"].tolist())
            )
        return row_shardings

    cut = ["{devices=[4]0,1,2,3}", "{devices=[4,1,1]0,1,2,3}", "{devices=[4]0,1,2,3}"]
    for workers in (0, 2):
        (first, rows), (second, more) = mesh.run(shardings, workers)[0]
        assert first == second == [*cut, "{replicated}", "{replicated}"]
        assert rows + more == list(range(16))


@dataclass
class Answer:
    """An output that is a dataclass."""

    logits: torch.Tensor
    loss: torch.Tensor
    extra: object = None


class Talkative(nn.Linear):
    """A layer that returns its output in a given container."""

    def forward(self, rows, form):
        """Return tensors in a container of the given form."""
        out = super().forward(rows)
        forms = {
            "tensor": lambda: out,
            "tuple": lambda: (out.sum(), (out,)),
            "dict": lambda: {"logits": out, "weight": self.weight, "text": "x", "none": None},
            "dataclass": lambda: Answer(out, out.mean(), [out * 2]),
            "text": lambda: "nothing",
        }
        return forms[form]()


def test_outputs_in_any_container_are_sharded_with_the_batch(mesh):
    def outputs():
        import torch_xla

        from accel_runtime import Accelerator

        accelerator = Accelerator()
        model, loader = accelerator.prepare(Talkative(4, 8), DataLoader(torch.ones(8, 4), BATCH))
        (rows,) = loader
        outputs_by_form = {
            form: model(rows, form) for form in ("tensor", "tuple", "dict", "dataclass", "text")
        }
        sharding = torch_xla._XLAC._get_xla_sharding_spec
        tensor, nested, answer = (
            outputs_by_form["tensor"],
            outputs_by_form["tuple"][1][0],
            outputs_by_form["dataclass"],
        )
        cut = [
            sharding(t)
            for t in (tensor, nested, outputs_by_form["dict"]["logits"], answer.logits, *answer.extra)
        ]
        tensor += 1  # a view of a hook's could not be changed in place
        tensor.sum().backward()
        return (
            cut,
            sharding(outputs_by_form["dict"]["weight"]),
            sharding(outputs_by_form["tuple"][0]),
            outputs_by_form["text"],
        )

    cut, weight, total, text = mesh.run(outputs)[0]
    assert cut == ["{devices=[4,1]0,1,2,3}"] * 5
    assert weight == "{devices=[4,1]0,1,2,3}"
    assert total == ""
    assert text == "nothing"


def test_a_batch_size_that_is_not_divisible_is_rejected_with_valid_sizes(mesh):
    def refused(size, **options):
        from accel_runtime import Accelerator

        with pytest.raises(ValueError, match="the batch size is") as error:
            Accelerator(**options).prepare(DataLoader(range(16), size))
        Accelerator(device_placement=False).prepare(DataLoader(range(16), size))
        return str(error.value)

    assert "for 4 devices" in mesh.run(refused, 6)[0]
    assert "the batch size is 6" in mesh.run(refused, 6)[0]
    assert "such as 4 or 8" in mesh.run(refused, 6)[0]
    assert mesh.run(refused, 1)[0].endswith("such as 4.")


def test_collectives_return_full_values_and_barriers_work(mesh):
    def call_collectives():
        from accel_runtime import Accelerator

        accelerator = Accelerator()
        (rows,) = accelerator.prepare(DataLoader(torch.arange(8.0), BATCH))
        accelerator.wait_for_everyone()
        return (
            accelerator.gather(rows).tolist(),
            accelerator.gather_for_metrics({"a": rows})["a"].tolist(),
            accelerator.reduce(rows, "mean").tolist(),
            accelerator.reduce(rows, "sum", scale=2.0).tolist(),
            accelerator.pad_across_processes(rows).tolist(),
            accelerator.num_processes,
            accelerator.process_index,
            accelerator.is_main_process,
            accelerator.distributed_type.value,
        )

    rows = list(map(float, range(8)))
    double = [2 * row for row in rows]
    assert mesh.run(call_collectives)[0] == (rows, rows, rows, double, rows, 1, 0, True, "XLA")


def test_a_dataset_with_a_short_last_batch_is_evaluated_exactly(mesh):
    def evaluated(count):
        from accel_runtime import Accelerator

        accelerator = Accelerator()
        model = accelerator.prepare(nn.Linear(1, 1, bias=False))
        loader = accelerator.prepare(DataLoader(torch.arange(float(count)).unsqueeze(1), BATCH))
        nn.init.constant_(accelerator.unwrap_model(model).weight, 2.0)
        model.eval()
        samples = []
        with torch.no_grad():
            samples.extend(accelerator.gather_for_metrics(model(rows)).cpu() for rows in loader)
        return torch.cat(samples).flatten().tolist()

    for count in (1, 5, 8, 21):
        assert mesh.run(evaluated, count)[0] == [2.0 * number for number in range(count)]


def test_compilations_do_not_grow_with_steps(mesh):
    def compilations():
        import torch_xla.debug.metrics as met

        from accel_runtime import Accelerator

        accelerator = Accelerator()
        model = build_tied_model()
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer, loader = accelerator.prepare(
            model, optimizer, DataLoader(samples(20 * BATCH), BATCH)
        )
        counts = []
        for tokens, targets in loader:
            accelerator.backward(loss_of(model, tokens, targets))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            counts.append(met.metric_data("CompileTime")[0])
        return counts

    counts = mesh.run(compilations)[0]
    assert counts[4] == counts[-1]


def test_frozen_and_evaluation_models_are_replicated(mesh):
    def prepared():
        from accel_runtime import Accelerator

        accelerator = Accelerator()
        frozen, judge = nn.Linear(4, 4).requires_grad_(requires_grad=False), nn.Linear(4, 4)
        assert accelerator.prepare(frozen) is frozen
        assert accelerator.prepare_model(judge, evaluation_mode=True) is judge
        return frozen.weight.device.type, judge.weight.device.type

    assert mesh.run(prepared)[0] == ("xla", "xla")


def test_a_communication_hook_is_rejected_and_other_ddp_options_are_ignored(mesh):
    def refused():
        from accel_runtime import Accelerator, DistributedDataParallelKwargs

        with pytest.raises(ValueError, match="comm_hook='bf16' is not supported on XLA devices") as error:
            Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(comm_hook="bf16")]).prepare(
                nn.Linear(4, 4)
            )
        options = DistributedDataParallelKwargs(find_unused_parameters=True, bucket_cap_mb=1)
        Accelerator(kwargs_handlers=[options]).prepare(nn.Linear(4, 4))
        return str(error.value)

    assert "Remove comm_hook" in mesh.run(refused)[0]


def test_the_description_contains_the_number_of_devices(mesh):
    def described():
        from accel_runtime import Accelerator

        accelerator = Accelerator()
        accelerator.prepare(build_tied_model(), DataLoader(samples(16), BATCH))
        return str(accelerator.describe())

    text = mesh.run(described)[0]
    assert "4 devices compute as one (SPMD)" in text
    assert "wrapping SpmdFullyShardedDataParallel" in text


def half(folder, options):
    """Run the first five steps and save, or resume and run the rest."""
    from accel_runtime import Accelerator

    accelerator = Accelerator(**options)
    model = build_tied_model()
    optimizer = optimizer_of("AdamW", model)
    loader = DataLoader(samples(10 * BATCH), BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    is_resumed = folder.exists()
    if is_resumed:
        accelerator.resume(folder)
    losses = []
    for index, (tokens, targets) in enumerate(loader):
        loss = loss_of(model, tokens, targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if not is_resumed and index == 4:
            accelerator.save_state(folder)
            break
    accelerator.save_model(model, folder.with_name(f"model of {folder.name}"))
    state = accelerator.get_state_dict(model)
    return [loss.item() for loss in losses], {name: value.cpu() for name, value in state.items()}


@pytest.mark.parametrize("first", ["mesh", "cpu"])
def test_a_checkpoint_continues_between_spmd_and_one_device_with_its_optimizer(mesh, tmp_path, first):
    there = lambda: mesh.run(half, tmp_path / "state", {})[0]  # noqa: E731
    here = lambda: half(tmp_path / "state", {"cpu": True})  # noqa: E731
    runs = (there, here) if first == "mesh" else (here, there)
    (losses, _), (more, final) = (run() for run in runs)
    wanted, expected = trained_plainly("AdamW", 1, 0.5)
    assert losses + more == pytest.approx(wanted, abs=1e-4)
    torch.testing.assert_close(final, expected, atol=1e-4, rtol=0)
    exported = load_file(tmp_path / "model of state" / "model.safetensors")
    for name, value in exported.items():
        torch.testing.assert_close(value, expected[name], atol=1e-4, rtol=0)
    assert {"embed.weight", "inner.weight", "inner.bias"} <= {*exported, "embed.weight"}


SEEDED = """
import torch
from accel_runtime import Accelerator, set_seed
set_seed(7)
accelerator = Accelerator()
print(accelerator.describe(), torch.randn(2, device=accelerator.device).tolist())
"""
SWITCHED_ON_LATE = """
import torch, torch_xla
torch.ones(1).to("xla")
from accel_runtime import Accelerator
Accelerator()
"""
LAUNCHED = """
import torch_xla
def main(index):
    from accel_runtime import Accelerator
    Accelerator()
if __name__ == "__main__":
    torch_xla.launch(main)
"""
PLAIN = """
from accel_runtime import Accelerator
Accelerator()
"""


def started(path, changed):
    """Run a process on two devices."""
    variables = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2", "ACCEL_DEVICE": "xla", "ACCEL_SPMD": "1"}
    return subprocess.run(
        [sys.executable, path],
        env=dict(os.environ) | variables | changed,
        capture_output=True,
        text=True,
        timeout=limit(300),
        check=False,
    )


@pytest.mark.full
def test_a_seed_before_the_accelerator_does_not_initialize_the_devices(script):
    first, second = (started(script(SEEDED), {}) for _ in range(2))
    assert "2 devices compute as one (SPMD)" in first.stdout, first.stderr
    assert first.stdout.splitlines()[-1] == second.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("text", "changed", "message"),
    [
        pytest.param(SWITCHED_ON_LATE, {}, "cannot be enabled", id="a device in use"),
        pytest.param(
            LAUNCHED, {}, "not with torch_xla.launch", id="torch_xla.launch", marks=pytest.mark.full
        ),
        pytest.param(
            PLAIN, {"PJRT_DEVICE": "TPU"}, "SPMD found no TPU device", id="no TPU", marks=pytest.mark.full
        ),
        pytest.param(
            PLAIN,
            {"ACCEL_SPMD": "0", "XLA_USE_SPMD": "1"},
            "but not in accel",
            id="only in torch_xla",
            marks=pytest.mark.full,
        ),
    ],
)
def test_unsupported_spmd_setups_are_rejected_before_training(script, text, changed, message):
    run = started(script(text), changed)
    assert run.returncode != 0
    assert message in run.stderr


def test_a_cpu_accelerator_in_an_spmd_process_is_rejected(mesh):
    def refused():
        from accel_runtime import Accelerator

        Accelerator()
        with pytest.raises(RuntimeError, match="needs the device xla, but the device is cpu"):
            Accelerator(cpu=True)

    mesh.run(refused)
