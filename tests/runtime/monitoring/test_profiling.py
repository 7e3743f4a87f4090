"""Profiles of a part of training."""

from __future__ import annotations

import json

import pytest
import torch
from torch.profiler import ProfilerActivity

from accel_runtime import Accelerator, ProfileKwargs
from accel_runtime.monitoring.profiling import ProfileKwargs as Home


def test_every_process_writes_a_trace_before_the_context_ends(ranks, tmp_path):
    def profile(folder):
        accelerator = Accelerator(kwargs_handlers=[ProfileKwargs(output_trace_dir=str(folder / "traces"))])
        with accelerator.profile() as profiler:
            torch.ones(8, 8) @ torch.ones(8, 8)
        names = sorted(path.name for path in (folder / "traces").iterdir())
        return names, "aten::mm" in {event.key for event in profiler.key_averages()}

    names = [f"profile_{rank}.json" for rank in range(ranks.size)]
    assert ranks.run(profile, tmp_path) == [(names, True)] * ranks.size
    for name in names:
        events = json.loads((tmp_path / "traces" / name).read_text())["traceEvents"]
        assert "aten::mm" in {event.get("name") for event in events}


def test_no_trace_is_written_without_a_folder(cwd):
    with Accelerator().profile() as profiler:
        torch.ones(2).sum()
    assert profiler.key_averages()
    assert list(cwd.iterdir()) == [cwd / ".git"]


# torch warns at the second recording that the profiler drops the first one.
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_a_schedule_writes_a_trace_for_every_recording_and_calls_on_trace_ready(tmp_path):
    records = []
    handler = ProfileKwargs(
        schedule_option={"wait": 1, "warmup": 1, "active": 2, "repeat": 2},
        on_trace_ready=lambda profiler: records.append(profiler.step_num),
        output_trace_dir=str(tmp_path),
    )
    with Accelerator().profile(handler) as profiler:
        for _ in range(10):
            torch.ones(2).sum()
            profiler.step()
    assert records == [4, 8]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["profile_0.1.json", "profile_0.json"]


def test_a_schedule_that_never_records_is_reported(tmp_path, caplog):
    handler = ProfileKwargs(
        schedule_option={"wait": 5, "warmup": 1, "active": 1}, output_trace_dir=str(tmp_path)
    )
    with Accelerator().profile(handler) as profiler:
        profiler.step()
    assert "No trace is written: the schedule" in caplog.text


@pytest.mark.slow
def test_a_failed_process_writes_its_trace_and_does_not_wait_for_others(several, tmp_path):
    def fail(folder):
        handler = ProfileKwargs(output_trace_dir=str(folder))
        accelerator = Accelerator()
        if accelerator.is_main_process:  # the others must not be waited for
            with pytest.raises(ZeroDivisionError), accelerator.profile(handler):
                raise ZeroDivisionError
            return (folder / "profile_0.json").exists()
        return not (folder / f"profile_{accelerator.process_index}.json").exists()

    assert several.run(fail, tmp_path) == [True] * several.size


def test_an_on_trace_ready_that_writes_the_trace_is_reported(tmp_path, caplog):
    handler = ProfileKwargs(
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(tmp_path / "mine.json")),
        output_trace_dir=str(tmp_path),
    )
    with Accelerator().profile(handler):
        torch.ones(2).sum()
    assert [path.name for path in tmp_path.iterdir()] == ["mine.json"]
    assert "profile_0.json is not written: on_trace_ready has written this trace" in caplog.text


def test_the_argument_of_profile_overrides_the_handler(tmp_path):
    accelerator = Accelerator(kwargs_handlers=[ProfileKwargs(output_trace_dir=str(tmp_path))])
    with accelerator.profile(ProfileKwargs(record_shapes=True)) as profiler:
        torch.ones(3, 5) + 1
    assert not list(tmp_path.iterdir())
    shapes = [event.input_shapes for event in profiler.key_averages(group_by_input_shape=True)]
    assert [3, 5] in [shape for each in shapes for shape in each]


def test_fields_are_passed_to_the_profiler():
    handler = ProfileKwargs(
        activities=["cpu"], profile_memory=True, with_stack=True, with_flops=True, with_modules=True
    )
    built = handler.build()
    assert built.activities == {ProfilerActivity.CPU}
    assert (built.profile_memory, built.with_stack, built.with_flops, built.with_modules) == (True,) * 4
    assert Home is ProfileKwargs


def test_activities_default_to_the_cpu_and_the_current_device():
    assert ProfileKwargs().build(torch.device("cpu")).activities == {ProfilerActivity.CPU}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"activities": ["gpu"]}, "Invalid activities entry 'gpu': expected one of cpu"),
        (
            {"schedule_option": {"wait": 1}},
            "Invalid schedule_option {'wait': 1}: expected the keys wait, warmup, active",
        ),
        ({"schedule_option": {}}, "Invalid schedule_option {}"),
        ({"schedule_option": {"wait": 1, "warmup": 1, "active": 1, "repeats": 2}}, "if needed repeat"),
    ],
)
def test_invalid_profile_options_are_rejected(arguments, message):
    with pytest.raises(ValueError, match=message):
        ProfileKwargs(**arguments)
