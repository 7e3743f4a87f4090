"""Checkpoints of XLA replicas: resuming equals an uninterrupted run, and other devices can load them."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product

import cloudpickle
import pytest
import torch
from safetensors.torch import load_file
from support.processes.waits import limit
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("torch_xla", reason="torch_xla is in an environment of its own: make test-xla")

from accel_runtime import Accelerator, ProjectConfiguration, set_seed

EPOCHS = 2
COUNT = 22


@pytest.fixture(params=[1, 2], ids=["1 replica", "2 replicas"])
def ranks(request, replicas):
    """One and two replicas, in turn."""
    return replicas[request.param]


class Network(nn.Module):
    """A model with tied weights, a running buffer, and dropout on the device."""

    def __init__(self, dropout):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.norm, self.dropout = nn.BatchNorm1d(3), nn.Dropout(dropout)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=generator))

    def forward(self, x):
        return self.dropout(self.norm(self.second(torch.tanh(self.first(x))))).sum(1)


def data():
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.arange(COUNT), torch.rand(COUNT, 3, generator=generator))


def start_training(seed, *, workers=0, rule="AdamW", dropout=0.3, size=4, **options):
    import warnings

    warnings.filterwarnings("ignore", "This DataLoader will create")
    accelerator = Accelerator(**options)
    accelerator.wait_for_everyone()
    set_seed(seed)
    accelerator.wait_for_everyone()
    model = Network(dropout)
    optimizer = getattr(torch.optim, rule)(model.parameters(), lr=0.05)
    loader = DataLoader(data(), size // accelerator.num_processes, shuffle=True, num_workers=workers)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    return accelerator, *accelerator.prepare(model, optimizer, loader, schedule)


def train_to_end(run, saved=None):
    """Train to the end of the last epoch; `saved` is called with the number of each step."""
    accelerator, model, optimizer, loader, schedule = run
    rows, number = [], 0
    for _ in range(loader.epoch, EPOCHS):
        for index, x in loader:
            with accelerator.accumulate(model):
                loss = model(x).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            samples = accelerator.gather_for_metrics(index).tolist()
            rows.append((loader.epoch, samples, loss.item(), optimizer.param_groups[0]["lr"]))
            number += 1
            if saved:
                saved(number)
    return rows, {name: value.cpu().tolist() for name, value in model.state_dict().items()}


def train_and_save(folder, points, options, *, background=False):
    run = start_training(5, **options)

    def save(number):
        if number in points:
            run[0].save_state(f"{folder}/{number}", async_save=background)

    result = train_to_end(run, save)
    run[0].wait_for_checkpoint()
    return result


def resumed(folder, number, options):
    run = start_training(77, **options)
    before = [id(parameter) for parameter in run[1].parameters()]
    run[0].resume(f"{folder}/{number}")
    assert [id(parameter) for parameter in run[1].parameters()] == before
    assert run[1].first.weight is run[1].second.weight
    return train_to_end(run)


WAYS = {
    "shuffled": {},
    "workers": {"workers": 2},
    "accumulating": {"gradient_accumulation_steps": 3},
    "momentum": {"rule": "SGD"},
}


RESUMED = {
    (2, "shuffled", False),
    (1, "workers", False),
    (2, "accumulating", True),
    (1, "momentum", False),
}
"""Each way once, on one replica or on two."""


@pytest.mark.parametrize(
    ("size", "kind", "background"),
    [
        pytest.param(
            *case,
            id=f"{case[0]} replica{'s' * (case[0] > 1)}-{case[1]}-{case[2]}",
            marks=[pytest.mark.full] * (case not in RESUMED),
        )
        for case in product((1, 2), WAYS, (False, True))
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(replicas, size, kind, background, tmp_path):
    """Compare batches, losses, dropout and weights bit for bit, at several points of an epoch."""
    ranks = replicas[size]
    points = (1, 4, 6) if kind == "shuffled" else (4,)
    uninterrupted = ranks.run(
        lambda *a: train_and_save(*a, background=background), str(tmp_path), points, WAYS[kind]
    )
    never = ranks.run(train_and_save, str(tmp_path), (), WAYS[kind])
    assert uninterrupted == never
    for number in points:
        for (rows, end), (all_rows, expected) in zip(
            ranks.run(resumed, str(tmp_path), number, WAYS[kind]), uninterrupted, strict=True
        ):
            assert rows == all_rows[number:]
            assert end == expected


def test_one_replica_resumes_two_with_the_same_global_batches(replicas, tmp_path):
    uninterrupted = replicas[2].run(train_and_save, str(tmp_path), (3,), {})
    resumed_results = replicas[1].run(resumed, str(tmp_path), 3, {})
    remaining = [row[1] for row in uninterrupted[0][0][3:] if row[0] == 0]
    assert [row[1] for row in resumed_results[0][0] if row[0] == 0] == remaining


def state_of(folder, options):
    """Return the state of a run after loading, and the state that it saves again."""
    accelerator, model, optimizer, loader, _ = start_training(77, **options)
    accelerator.resume(folder)
    accelerator.save_state(f"{folder}-again")
    return (
        {name: value.cpu().tolist() for name, value in model.state_dict().items()},
        [
            {key: (str(value.dtype), value.cpu().tolist()) for key, value in parameter_state.items()}
            for parameter_state in optimizer.state.values()
        ],
        [
            str(value.device.type)
            for parameter_state in optimizer.state.values()
            for value in parameter_state.values()
        ],
        loader.capture_state().running[0].source.offset,
        [p.grad.cpu().tolist() for p in model.parameters() if p.grad is not None],
    )


def on_the_cpu(function, *args, folder):
    """Call a function in a process that computes on the CPU, without torch_xla."""
    call = folder / "call"
    call.write_bytes(cloudpickle.dumps((function, args)))
    text = (
        "import cloudpickle, pickle, sys; f, a = pickle.load(open(sys.argv[1], 'rb')); "
        "open(sys.argv[1], 'wb').write(cloudpickle.dumps(f(*a))); assert 'torch_xla' not in sys.modules"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ACCEL_")} | {
        "ACCEL_DEVICE": "cpu"
    }
    process = subprocess.run(
        [sys.executable, "-c", text, str(call)],
        capture_output=True,
        text=True,
        timeout=limit(300),
        check=False,
        env=environment,
    )
    assert process.returncode == 0, process.stderr
    return cloudpickle.loads(call.read_bytes())


OPTIONS = {"gradient_accumulation_steps": 3}


def tensors_in(folder):
    """Return all tensors of a checkpoint except for random states."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        if not path.name.startswith("random"):
            tensors |= {f"{path.name}/{name}": value.tolist() for name, value in load_file(path).items()}
    return tensors


def test_checkpoints_can_be_exchanged_between_xla_and_the_cpu(ranks, tmp_path):
    saved = tmp_path / "4"
    ranks.run(train_and_save, str(tmp_path), (4,), OPTIONS)
    assert (
        "xla:" not in (saved / "checkpoint.json").read_text()
        if (saved / "checkpoint.json").exists()
        else True
    )
    here = ranks.run(state_of, str(saved), OPTIONS)[0]
    assert set(here[2]) <= {"xla", "cpu"}
    if ranks.size == 1:
        assert tensors_in(tmp_path / "4-again") == tensors_in(saved)
    there = on_the_cpu(state_of, str(saved), OPTIONS, folder=tmp_path)
    assert there[:2] == here[:2]
    if ranks.size == 1:
        assert there[3:] == here[3:]
        # And back: what the CPU wrote of it.
        assert tensors_in(tmp_path / "4-again") == tensors_in(saved)
        (tmp_path / "4-again").rename(tmp_path / "cpu")
        back = ranks.run(state_of, str(tmp_path / "cpu"), OPTIONS)[0]
        assert back == here


def test_a_cpu_run_can_be_resumed_on_replicas(ranks, tmp_path):
    options = {"dropout": 0.0}
    rows, _ = on_the_cpu(train_and_save, str(tmp_path), (3,), options, folder=tmp_path)
    for actual, _ in ranks.run(resumed, str(tmp_path), 3, options):
        assert [row[1] for row in actual if row[0] == 0] == [row[1] for row in rows[3:] if row[0] == 0]
        if ranks.size == 1:
            assert [row[2] for row in actual if row[0] == 0][:-1] == pytest.approx(
                [row[2] for row in rows[3:] if row[0] == 0][:-1], rel=1e-3
            )  # the last batch is completed there


def accel(*args):
    return subprocess.run(
        [sys.executable, "-m", "accel_cli", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=limit(300),
        check=False,
        stdin=subprocess.DEVNULL,
    )


def test_the_command_line_verifies_shows_and_exports_a_checkpoint(ranks, tmp_path):
    ranks.run(train_and_save, str(tmp_path), (4,), {})
    saved = tmp_path / "4"
    for command in (
        ("verify", saved),
        ("show", saved),
        ("export", saved, "-o", tmp_path / "exported.safetensors"),
    ):
        process = accel("checkpoint", *command)
        assert process.returncode == 0, process.stdout + process.stderr
    assert "first.weight" in load_file(tmp_path / "exported.safetensors")


def test_saved_weights_and_files_contain_cpu_tensors(ranks, tmp_path):
    def save_all(folder):
        accelerator, model, optimizer, loader, _ = start_training(5)
        for _, x in loader:
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_model(model, folder)
        state = accelerator.get_state_dict(model)
        accelerator.save({"state": state, "more": [state["norm.weight"], 3]}, f"{folder}/state.pt")
        accelerator.save(state, f"{folder}/state.safetensors", safe_serialization=True)
        accelerator.wait_for_everyone()
        values = {name: value.cpu().tolist() for name, value in state.items()}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        parameter_ids = [id(parameter) for parameter in model.parameters()]
        accelerator.load_model(model, folder)
        assert [id(parameter) for parameter in model.parameters()] == parameter_ids
        loaded_values = {name: value.cpu().tolist() for name, value in model.state_dict().items()}
        accelerator.load(f"{folder}/state.pt")
        return values, loaded_values, {value.device.type for value in state.values()}

    everyone = ranks.run(save_all, str(tmp_path))
    values = everyone[0][0]
    for _, loaded_values, devices in everyone:
        assert loaded_values == values
        assert devices == {"xla"}
    plain = torch.load(tmp_path / "state.pt", weights_only=True)
    assert {value.device.type for value in plain["state"].values()} == {"cpu"}
    assert plain["more"][0].device.type == "cpu"
    assert {name: value.tolist() for name, value in plain["state"].items()} == values
    exported = load_file(tmp_path / "model.safetensors")
    assert "first.weight" in exported
    assert "second.weight" not in exported
    assert {name: exported[name].tolist() for name in exported} == {name: values[name] for name in exported}
    loaded = load_file(tmp_path / "state.safetensors")
    assert {name: value.tolist() for name, value in loaded.items()} == values


def test_equal_tensors_of_one_shape_are_saved_separately(ranks, tmp_path):
    """Tensors on such a device have no address to compare."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Linear(2, 2), nn.Linear(2, 2)
            self.register_buffer("square", torch.eye(2))
            self.tied = self.one.weight

    def loaded(folder):
        accelerator = Accelerator()
        model = accelerator.prepare(Two())
        expected = {name: value.cpu().tolist() for name, value in model.state_dict().items()}
        accelerator.save_state(folder)
        with torch.no_grad():
            for value in model.state_dict().values():
                value.zero_()
        accelerator.load_state(folder)
        return expected, {name: value.cpu().tolist() for name, value in model.state_dict().items()}

    for expected, actual in ranks.run(loaded, str(tmp_path / "saved")):
        assert actual == expected
        assert expected["one.weight"] != expected["other.weight"]


def test_the_newest_checkpoint_is_found_by_its_number(ranks, tmp_path):
    def first(folder):
        project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True)
        run = start_training(5, project_config=project)
        train_to_end(run, lambda number: run[0].save_state() if number in {2, 3} else None)

    def second(folder):
        project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True)
        run = start_training(9, project_config=project)
        return run[0].load_state().number

    ranks.run(first, str(tmp_path))
    assert ranks.run(second, str(tmp_path)) == [1] * ranks.size


def test_device_random_numbers_depend_only_on_the_seed(ranks):
    def draw():
        accelerator = Accelerator()
        numbers_found = []
        for often in (0, 3):
            accelerator.wait_for_everyone()
            set_seed(11)
            own_numbers = []
            for _ in range(3):
                own_numbers.append(torch.rand(4, device=accelerator.device).cpu().tolist())
                for _ in range(often):
                    accelerator.gather(torch.ones(2, device=accelerator.device))
            numbers_found.append(own_numbers)
        return numbers_found

    for first, second in ranks.run(draw):
        assert first == second
        assert first[0] != first[1]
