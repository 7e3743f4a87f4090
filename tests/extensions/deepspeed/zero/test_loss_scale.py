"""Losses in fp16 are scaled under ZeRO: overflows skip steps and halve the scale, which checkpoints contain."""

from __future__ import annotations

import json

import pytest
import torch
from support.runs.zero_runs import connect
from support.training.models import TwoLayerNet

pytest.importorskip("deepspeed", reason="deepspeed is in an environment of its own: make test-deepspeed")

STAGES = ("stage 1", "stage 2", "stage 3")


@pytest.fixture
def configure(tmp_path):
    """Return a function that writes a JSON file with options of fp16."""

    def write(**options):
        file = tmp_path / "deepspeed.json"
        file.write_text(json.dumps({"fp16": {"enabled": True, "hysteresis": 1} | options}), encoding="utf-8")
        return file

    return write


def start(layout, file):
    """Return an Accelerator in fp16, which deepspeed and accel refuse on CPUs, with a prepared model and optimizer."""
    from unittest import mock

    from deepspeed.accelerator import get_accelerator

    from accel_runtime.extensions.deepspeed.strategy import DeepSpeedStrategy

    type(get_accelerator()).is_fp16_supported = lambda _: True
    with mock.patch.object(DeepSpeedStrategy, "check_options"):
        accelerator = connect(layout, {"deepspeed_config_file": file}, mixed_precision="fp16")
    model = TwoLayerNet()
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def split(accelerator, steps):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield torch.randn(8, 4, generator=generator).chunk(2)[accelerator.process_index]


def loss_of(model, rows):
    return (model(rows) - rows.sum(1, keepdim=True)).square().mean()


def train(accelerator, model, optimizer, rows):
    """Train a step; return the norm, if the step was skipped, and the scale after it."""
    accelerator.backward(loss_of(model, rows))
    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5).item()
    optimizer.step()
    optimizer.zero_grad()
    return norm, optimizer.step_was_skipped, accelerator._run.strategy._scale.value


@pytest.mark.parametrize("layout", STAGES)
def test_steps_are_skipped_until_the_scale_fits_and_the_others_are_those_of_one_process(
    clusters, configure, layout
):
    def run(layout, file):
        accelerator, model, optimizer = start(layout, file)
        steps = [train(accelerator, model, optimizer, rows) for rows in split(accelerator, 6)]
        return steps, accelerator.get_state_dict(model, everywhere=True)

    model = TwoLayerNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(8, 4, generator=generator) for _ in range(6)]
    results = clusters[2].run(run, layout, configure(initial_scale_power=15, loss_scale_window=100))
    skipped = [skip for _, skip, _ in results[0][0]]
    assert skipped == sorted(skipped, reverse=True)
    assert 0 < sum(skipped) < 4
    assert [scale for *_, scale in results[0][0]][-1] == 2.0 ** (15 - sum(skipped))
    norms = []
    for rows, skip in zip(batches, skipped, strict=True):
        if not skip:
            loss_of(model, rows).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
    for steps, weights in results:
        assert steps[sum(skipped) :] == results[0][0][sum(skipped) :]
        assert [norm for norm, skip, _ in steps if not skip] == pytest.approx(norms, rel=2**-7)
        expected = {name: value.detach() for name, value in model.state_dict().items()}
        torch.testing.assert_close(weights, expected, atol=2**-9, rtol=2**-9)


@pytest.mark.parametrize("layout", STAGES)
@pytest.mark.parametrize("clears", ["optimizer", "model"])
def test_an_overflow_halves_the_scale_although_the_script_leaves_out_the_step(
    clusters, configure, layout, clears
):
    def run(layout, file):
        accelerator, model, optimizer = start(layout, file)
        scale, records = accelerator._run.strategy._scale, []
        for rows in split(accelerator, 6):
            accelerator.backward(loss_of(model, rows))
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            if torch.isfinite(norm):
                optimizer.step()
            (optimizer if clears == "optimizer" else model).zero_grad()
            records.append((bool(torch.isfinite(norm)), scale.value))
        return records

    for records in clusters[2].run(run, layout, configure(initial_scale_power=16, loss_scale_window=100)):
        finite = [each for each, _ in records]
        assert finite == sorted(finite)
        assert 0 < sum(finite) < len(finite)
        assert records[-1][1] == 2.0 ** (16 - finite.count(False))


def test_the_scale_continues_from_a_checkpoint(clusters, configure, tmp_path):
    def run(file, folder, *, loads):
        accelerator, model, optimizer = start("stage 2", file)
        batches = list(split(accelerator, 10))
        if not loads:
            for rows in batches[:5]:
                train(accelerator, model, optimizer, rows)
            accelerator.save_state(folder)
        else:
            accelerator.load_state(folder)
        return [train(accelerator, model, optimizer, rows) for rows in batches[5:]]

    file = configure(initial_scale_power=18, loss_scale_window=3)
    expected = clusters[2].run(lambda *args: run(*args, loads=False), file, tmp_path / "saved")
    assert len({scale for *_, scale in expected[0]}) > 1
    assert clusters[2].run(lambda *args: run(*args, loads=True), file, tmp_path / "saved") == expected


def test_a_checkpoint_with_a_scale_loads_without_one(clusters, configure, tmp_path):
    def save(file, folder):
        accelerator, model, _ = start("stage 1", file)
        accelerator.save_state(folder)
        return accelerator.get_state_dict(model, everywhere=True)

    def load(layout, folder):
        accelerator = connect(layout)
        model = TwoLayerNet()
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        accelerator.load_state(folder)
        return accelerator.get_state_dict(model, everywhere=True)

    expected = clusters[2].run(save, configure(), tmp_path / "saved")
    for layout in ("stage 3", "replicated", "fully_shard"):
        torch.testing.assert_close(
            clusters[2].run(load, layout, tmp_path / "saved"), expected, atol=0, rtol=0
        )


def test_one_scale_of_two_optimizers_changes_once_when_both_have_stepped(clusters, configure):
    def run(file):
        accelerator, first, one = start("stage 2", file)
        second = TwoLayerNet()
        second, two = accelerator.prepare(second, torch.optim.SGD(second.parameters(), lr=0.1))
        scales, skips = [], []
        for factor in (1.0, float("inf"), 1.0):
            rows = torch.ones(2, 4)
            accelerator.backward(loss_of(first, rows) + loss_of(second, rows) * factor)
            for optimizer in (one, two):
                optimizer.step()
                skips.append(optimizer.step_was_skipped)
                optimizer.zero_grad()
            scales.append(accelerator._run.strategy._scale.value)
        return scales, skips

    for scales, skips in clusters[2].run(run, configure(initial_scale_power=4)):
        assert scales == [16, 8, 8]
        assert skips == [False, False, False, True, False, False]


def test_overflows_without_end_are_an_error_on_all_ranks(clusters, configure):
    def run(file):
        accelerator, model, optimizer = start("stage 3", file)
        for number in range(60):
            try:
                accelerator.backward(model(torch.ones(2, 4)).sum() * float("inf"))
                optimizer.step()
                optimizer.zero_grad()
            except RuntimeError as error:
                return number, str(error)
        return "no error"

    for number, message in clusters[2].run(run, configure(initial_scale_power=2)):
        # Two steps halve the scale to the smallest one, 1.
        assert number == 51
        assert "bf16" in message


def test_a_fixed_scale_stays(clusters, configure):
    def run(file):
        accelerator, model, optimizer = start("stage 1", file)
        return [train(accelerator, model, optimizer, rows)[1:] for rows in split(accelerator, 2)]

    assert clusters[2].run(run, configure(loss_scale=64)) == [[(False, 64), (False, 64)]] * 2


def test_fp16_is_refused_on_cpus(clusters):
    def run():
        try:
            connect("stage 2", mixed_precision="fp16")
        except ValueError as error:
            return str(error)
        return "no error"

    assert all("Use bf16" in message for message in clusters[2].run(run))
