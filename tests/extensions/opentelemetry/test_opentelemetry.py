"""Spans and metrics of a run for OpenTelemetry: which variables switch them on, what is sent, and collectors that fail."""

import os
import socket
import sys

import pytest
from support.processes.commands import run_accel
from support.processes.otlp_receiver import read_attributes, receive_otlp
from support.runs.run_folders import START, RunWriter, write_beat

from accel_cli.extensions.opentelemetry.sink import OpenTelemetry
from accel_cli.extensions.opentelemetry.spans import SPANS
from accel_cli.runs.heartbeats import Totals
from accel_cli.runs.progress import RunProgress
from accel_cli.runs.run_dir import RunFolder
from accel_runtime.environment import settings as env

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.fixture
def receiver(monkeypatch):
    with receive_otlp() as receiver:
        monkeypatch.setenv(ENDPOINT, receiver.url)
        yield receiver


@pytest.mark.parametrize(
    ("variables", "signals"),
    [
        ({}, None),
        ({ENDPOINT: ""}, None),
        ({ENDPOINT: "http://x"}, ("traces", "metrics")),
        ({ENDPOINT: "http://x", "OTEL_SDK_DISABLED": "True"}, None),
        ({ENDPOINT: "http://x", "OTEL_METRICS_EXPORTER": "none"}, ("traces",)),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://x"}, ("metrics",)),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x", "OTEL_TRACES_EXPORTER": "console"}, None),
    ],
)
def test_the_variables_of_the_specification_switch_the_signals_on(variables, signals):
    sink = OpenTelemetry.create(None, variables)
    assert (sink and sink._signals) == signals


def send(folder, *outcomes):
    """Let a sink write some progress of a run, and close it with the last."""
    sink = OpenTelemetry.create(None, os.environ)
    sink.open(RunFolder(folder))
    for progress in outcomes[:-1]:
        sink.write(progress)
    sink.close(outcomes[-1])


def test_spans_have_the_times_of_what_was_recorded(receiver, tmp_path):
    writer = RunWriter(tmp_path, exit_code=1)
    writer.events(
        (2.0, "start", {"attempt": 0, "world_size": 2}),
        (7.0, "stall", {"seconds": 1.5}),
        (8.0, "progress", {"seconds": 2.5}),
        (9.0, "failure", {"rank": 1, "host": "node-1", "cause": "ValueError: x"}),
        (9.5, "restart", {"attempt": 1, "reason": "rank 1 failed"}),
        (10.0, "start", {"attempt": 1, "world_size": 2}),
    )
    rank = writer.path / "attempt_1" / "rank_0"
    steps = [Totals(step, 12.0 + step, 0.9 * step, 0.1 * step, 0.2 * step, 0.4 * step, 0.1 * step, 0.1 * step, 0, 0) for step in (1, 2, 3)]  # fmt: skip
    write_beat(rank / env.BEAT, steps, first_batch_ns=round(5011.5e9))
    writer.lines(
        f"attempt_1/rank_0/{env.CHECKPOINTS}",
        [
            {"time": 11.0, "seconds": 0.5, "kind": "load", "path": "a/0"},
            {"time": 14.5, "seconds": 0.25, "kind": "save", "path": "a/1"},
        ],
    )
    running = RunProgress(START + 15, "run", "running", world_size=2, nodes=1)
    send(writer.path, running, RunProgress(START + 20, "run", "failed", exit_code=1, steps=3))
    times = {
        name: [
            (
                round(span.start_time_unix_nano / 1e9 - START, 3),
                round(span.end_time_unix_nano / 1e9 - START, 3),
            )
            for span in spans
        ]
        for name, spans in receiver.spans.items()
    }
    assert times == {
        "launch": [(0.0, 20.0)],
        "rendezvous": [(0.0, 2.0), (9.5, 10.0)],
        "attempt": [(2.0, 9.5), (10.0, 20.0)],
        "stall": [(5.5, 8.0)],
        "restart": [(9.5, 13.0)],
        "load": [(10.5, 11.0)],
        "save": [(14.25, 14.5)],
        "first batch": [(10.0, 11.5)],
        "first step": [(10.0, 13.0)],
        "steps": [(13.0, 15.0)],
    }
    assert times.keys() == SPANS.keys()
    ids = {span.span_id: name for name, spans in receiver.spans.items() for span in spans}
    parents = {name: {ids.get(span.parent_span_id, "") for span in spans} for name, spans in receiver.spans.items()}  # fmt: skip
    assert parents == {
        "launch": {""},
        "rendezvous": {"launch", "restart"},
        "restart": {"launch"},
        "attempt": {"launch"},
        **{name: {"attempt"} for name in ("stall", "load", "save", "first batch", "first step", "steps")},
    }
    (launch,), (failed, last), (steps,) = (receiver.spans[name] for name in ("launch", "attempt", "steps"))
    assert (launch.status.code, launch.status.message) == (2, "failed, exit code 1")
    assert (failed.status.code, last.status.code) == (2, 0)
    assert read_attributes(failed.events[0].attributes)["accel.cause"] == "ValueError: x"
    mean = read_attributes(steps.attributes)
    assert (mean["accel.first_step"], mean["accel.last_step"]) == (2, 3)
    assert mean["accel.backward_s"] == pytest.approx(0.4)
    assert receiver.resource["accel.run"] == writer.path.name


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({}, "accel"),
        ({"OTEL_SERVICE_NAME": "train"}, "train"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "team=a,service.name=b"}, "b"),
    ],
)
def test_the_name_of_the_service_is_that_of_the_variables(receiver, tmp_path, monkeypatch, variables, name):
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    send(RunWriter(tmp_path).path, RunProgress(START + 1, "run", "succeeded", exit_code=0))
    assert receiver.resource["service.name"] == name


def test_the_launch_is_a_part_of_the_trace_of_the_program_that_starts_it(receiver, tmp_path, monkeypatch):
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    monkeypatch.setenv("TRACEPARENT", f"00-{trace}-{parent}-01")
    send(RunWriter(tmp_path).path, RunProgress(START + 1, "run", "succeeded", exit_code=0))
    (launch,) = receiver.spans["launch"]
    assert (launch.trace_id.hex(), launch.parent_span_id.hex()) == (trace, parent)


SCRIPT = """
import os
import torch
from accel_runtime import Accelerator, ProjectConfiguration
config = ProjectConfiguration("p", automatic_checkpoint_naming=True)
accelerator = Accelerator(cpu=True, log_with="jsonl", project_config=config)
accelerator.init_trackers("t")
model = torch.nn.Linear(1, 1)
loader = torch.utils.data.DataLoader(torch.ones(12, 1), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
accelerator.resume()
for batch in loader:
    accelerator.backward(model(batch).sum())
    optimizer.step()
accelerator.save_state()
accelerator.log({"loss": 0.25})
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise SystemExit(3)
"""
LAUNCH = ("launch", "--no-profile", "--cpu", "--nproc-per-node", 2)


@pytest.mark.smoke
def test_a_launch_that_restarts_sends_its_spans_and_metrics(receiver, script, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=planted-secret")
    script(SCRIPT)
    done = run_accel(*LAUNCH, "--max-restarts", 1, "train.py")
    assert done.returncode == 0, done.stderr
    assert "sink" not in done.stderr
    counts = {name: len(spans) for name, spans in receiver.spans.items()}
    assert counts.items() >= {"launch": 1, "attempt": 2, "restart": 1, "rendezvous": 2, "save": 2, "load": 1, "first batch": 2, "first step": 2}.items()  # fmt: skip
    (launch,) = receiver.spans["launch"]
    assert (
        read_attributes(launch.attributes).items()
        >= {"accel.exit_code": 0, "accel.state": "succeeded"}.items()
    )
    assert receiver.metrics["accel.logged", "loss"] == 0.25
    assert receiver.metrics["accel.restarts",] == 1
    assert {key[1] for key in receiver.metrics if key[0] == "accel.lost_time"} >= {"start", "restarts"}
    assert {headers["api-key"] for headers in receiver.headers} == {"planted-secret"}
    assert "planted-secret" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "its close() failed: OSError: "),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "OTEL_EXPORTER_OTLP_PROTOCOL=http/json is not known. Set it to http/protobuf or grpc."),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "Install it: "),
    ],
)  # fmt: skip
def test_a_collector_that_cannot_be_used_is_one_warning(script, monkeypatch, variables, message):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for name, value in {ENDPOINT: f"http://127.0.0.1:{port}", **variables}.items():
        monkeypatch.setenv(name, value)
    script("import sys; sys.exit(3)")
    done = run_accel(*LAUNCH, "train.py")
    assert done.returncode == 3
    assert done.stderr.count("the progress sink 'opentelemetry'") == 1
    assert message in done.stderr
    assert "accel_cli" not in done.stderr  # a traceback of accel


def test_without_the_package_the_launch_goes_on(monkeypatch, tmp_path):
    for name in [*sys.modules]:
        if name.startswith("opentelemetry.sdk"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk", None)
    sink = OpenTelemetry.create(None, {ENDPOINT: "http://127.0.0.1:1"})
    with pytest.raises(
        RuntimeError, match=r"Install it: .*accel-runtime\[otel\]|Install it: .*opentelemetry"
    ):
        sink.open(RunFolder(tmp_path))
