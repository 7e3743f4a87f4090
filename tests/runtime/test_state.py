"""The state objects scripts read."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from accel_runtime import Accelerator, DistributedType, PartialState
from accel_runtime.state import AcceleratorState, GradientState

ROOT = Path(__file__).parent.parent.parent
SCRIPT = """
from accel_runtime import PartialState
state = PartialState()
facts = state.num_processes, state.distributed_type.value, state.backend, str(state.device)
open(f"{state.process_index}.txt", "w").write(repr(facts))
state.wait_for_everyone()
state.destroy_process_group()
"""


@pytest.mark.slow
def test_a_state_alone_places_itself_under_torchrun(script, cwd, monkeypatch):
    monkeypatch.setenv("ACCEL_DEVICE", "cpu")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*command, script(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = [(cwd / f"{rank}.txt").read_text() for rank in range(2)]
    assert said == [repr((2, "MULTI_CPU", "gloo", "cpu"))] * 2


def test_a_state_says_where_the_process_stands(ranks):
    def place():
        state = PartialState(cpu=True)
        state.set_device()
        facts = (
            state.num_processes,
            state.process_index,
            state.local_process_index,
            str(state.default_device),
        )
        kind = (
            state.distributed_type,
            state.distributed_type == "MULTI_CPU",
            state.use_distributed,
            state.backend,
        )
        return facts, kind, state.initialized

    several = ranks.size > 1
    kind = DistributedType.MULTI_CPU if several else DistributedType.NO
    wanted = (kind, several, several, "gloo" if several else None)
    assert ranks.run(place) == [
        ((ranks.size, rank, ranks.local_rank(rank), "cpu"), wanted, True) for rank in range(ranks.size)
    ]


def test_an_option_that_no_process_group_has_is_refused():
    with pytest.raises(TypeError, match="backened"):
        PartialState(backened="gloo")


def test_the_states_of_an_accelerator_are_its_own_and_say_what_they_are(ranks):
    def texts():
        accelerator = Accelerator(mixed_precision="bf16")
        state = accelerator.state
        assert isinstance(state, AcceleratorState)
        assert state.mixed_precision == "bf16"
        assert state.deepspeed_plugin is None
        assert state.process_index == accelerator.process_index
        assert accelerator.native_amp
        assert not Accelerator().native_amp
        assert not accelerator.multi_device
        return repr(state), repr(PartialState())

    for rank, (text, partial) in enumerate(ranks.run(texts)):
        assert f"Process: {rank} (on its machine: {ranks.local_rank(rank)})\nDevice: cpu" in text
        assert text == f"{partial}\nMixed precision: bf16"


def test_a_copy_of_an_accelerator_is_the_accelerator():
    accelerator = Accelerator()
    assert copy.deepcopy({"a": accelerator})["a"] is accelerator


@pytest.mark.parametrize(("length", "remainders"), [(13, {1: 0, 2: 5, 3: 1}), (12, {1: 0, 2: 4, 3: 0})])
def test_the_gradient_state_follows_the_loop(ranks, length, remainders):
    def walked(length):
        accelerator = Accelerator(gradient_accumulation_steps=2)
        loader = accelerator.prepare(DataLoader(torch.arange(length), batch_size=4))
        state = accelerator.gradient_state
        assert isinstance(state, GradientState)
        seen = [(state.in_dataloader, state.end_of_dataloader, state.remainder, state.num_steps)]
        for _ in loader:
            with accelerator.accumulate():
                assert state.sync_gradients == accelerator.sync_gradients
                seen.append((state.in_dataloader, state.end_of_dataloader, state.remainder, state.num_steps))
        assert "sync_gradients: True" in repr(state)
        return [*seen, (state.in_dataloader, state.end_of_dataloader, state.remainder, state.num_steps)]

    steps = -(-length // (4 * ranks.size))
    outside = (False, False, -1, 2)
    inside = [(True, False, -1, 2)] * (steps - 1) + [(True, True, remainders[ranks.size], 2)]
    assert ranks.run(walked, length) == [[outside, *inside, outside]] * ranks.size
