"""Every progress sink satisfies the contract of `runs/progress.py`, also the one of CONTRIBUTING.md, and no sink harms a run.

A new sink needs an entry in `CASES`.
"""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
from support.processes.children import free_port
from support.processes.commands import Accel, run_accel
from support.processes.otlp_receiver import read_attributes, receive_otlp
from support.processes.trainer_controller import serve_controller
from support.processes.waits import wait_until
from support.runs.run_folders import write_beat

from accel_cli.errors import UsageError
from accel_cli.planning.plan import AgentSettings
from accel_cli.runs import sink_threads
from accel_cli.runs.heartbeats import Totals
from accel_cli.runs.progress import Health, ProgressSink, RunProgress
from accel_cli.runs.run_dir import RunFolder
from accel_cli.runs.sink_threads import ProgressSinks
from accel_cli.runs.sinks import PROGRESS_LINE, PROGRESS_SINKS
from accel_runtime.environment.registry import Registry

CONTRIBUTING = Path(__file__).parents[3] / "CONTRIBUTING.md"
PAGE = re.search(
    r"^```python\n# alive_file.py\n(.*?)^```$", CONTRIBUTING.read_text(), re.MULTILINE | re.DOTALL
)[1]
"""The sink of CONTRIBUTING.md."""
SCRIPT = """
import os, time
from pathlib import Path
import torch
from accel_runtime import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(2, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.001))
step = 0
while not accelerator.check_trigger():
    accelerator.backward(model(torch.ones(4, 2)).sum())
    optimizer.step()
    step += 1
    accelerator.log({"loss": 1 / step}, step=step)
    if Path("end").exists():
        accelerator.set_trigger()
    time.sleep(0.05)
"""
LAUNCH = ("launch", "-q", "--no-profile", "--cpu", "--nproc-per-node", 2)
FAST = ("--set", "launcher.progress_interval=0.2")


class Line:
    """A line of the log, which the launcher prints."""

    name = "line"

    def __init__(self, _folder):
        self.environ, self.refused = {}, {}
        self.settings = {"progress_line": 0.05}
        self.sinks, self.found = None, []

    def read_steps(self):
        assert self.drop_lines(self.sinks.take_lines()) == []
        return int(self.found[-1]["step"]) if self.found else 0

    def drop_lines(self, lines):
        """Return the texts that are no progress lines, and keep what the others have."""
        matches = [PROGRESS_LINE.fullmatch(f"accel: {line}") for line in lines]
        self.found += [match for match in matches if match]
        return [line for line, match in zip(lines, matches, strict=True) if not match]

    def check_end(self, state, _exit_code):
        assert not self.found or self.found[-1]["state"] == state


class Lines:
    """A file of lines."""

    name, file = "lines", "p.jsonl"

    def __init__(self, folder):
        self.environ = {}
        self.path = folder / self.file
        self.settings = {"progress_file": str(self.path), "progress_interval": 0.05}
        self.options = ("--progress-file", self.path, *FAST)
        (folder / "folder").mkdir()
        os.mkfifo(folder / "pipe")
        self.refused = {
            str(folder / "missing" / self.file): "No such file",
            str(folder / "folder"): "it is a directory",
            str(folder / "pipe"): "it is not a regular file",
            "/proc/p": "No such file",
        }
        self.refused_key, self.refused_option = "progress_file", "--progress-file"

    def read(self):
        """Return what the file has, the oldest first."""
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []

    def read_steps(self):
        """Return the steps that a reader sees now; a line from between two writes of `step` has those of one rank."""
        return [0, *(each["steps"] for each in self.read())][-1]

    def check_end(self, state, exit_code):
        """Check what a reader sees after the end."""
        *_, last = self.read()
        assert (last["state"], last["exit_code"]) == (state, exit_code)


class Status(Lines):
    """A file with the newest progress."""

    name, file = "status", "p.json"

    def __init__(self, folder):
        super().__init__(folder)
        self.refused = {
            f"{path}.json" if "missing" not in path else path: why for path, why in self.refused.items()
        }
        for name in ("folder", "pipe"):
            (folder / name).rename(folder / f"{name}.json")

    def read(self):
        return [json.loads(self.path.read_text())] if self.path.exists() else []


class Prometheus:
    """The endpoint, which is gone after the end."""

    name = "prometheus"

    def __init__(self, _folder):
        self.environ = {}
        with free_port() as port:
            self.address = f"127.0.0.1:{port}"
        self.settings = {"metrics_port": self.address}
        self.options = ("--metrics-port", self.address)
        self.other = socket.create_server(("127.0.0.1", 0))
        self.refused = {f"127.0.0.1:{self.other.getsockname()[1]}": "in use", "192.0.2.1:9400": ""}
        self.refused_key, self.refused_option = "metrics_port", "--metrics-port"

    def read_text(self):
        with urllib.request.urlopen(f"http://{self.address}/metrics", timeout=30) as answer:
            return answer.read().decode()

    def read_steps(self):
        try:
            text = self.read_text()
        except (urllib.error.URLError, ConnectionError):
            return 0
        return max(map(float, re.findall(r"^accel_steps_total\{.*\} (\S+)$", text, re.MULTILINE)), default=0)

    def check_end(self, _state, _exit_code):
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            self.read_text()


class Alive:
    """The sink of CONTRIBUTING.md, which a variable switches on."""

    name = "alive"

    def __init__(self, folder):
        self.settings, self.refused = {}, {}
        self.path = folder / "alive"
        self.environ = {"ALIVE_FILE": str(self.path)}

    def read_steps(self):
        words = self.path.read_text().split() if self.path.exists() else []
        return int(words[1]) if words else 0

    def check_end(self, state, _exit_code):
        assert self.path.read_text().split()[0] == state


class Telemetry:
    """What a collector of OpenTelemetry receives."""

    name = "opentelemetry"

    def __init__(self, _folder):
        self.settings, self.refused = {}, {}
        self.stack = ExitStack()
        self.receiver = self.stack.enter_context(receive_otlp())
        # The SDK reads the variables of this process.
        self.environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": self.receiver.url, "OTEL_METRIC_EXPORT_INTERVAL": "50"}
        self.stack.enter_context(mock.patch.dict(os.environ, self.environ))
        self.other = self.stack

    def read_steps(self):
        return self.receiver.metrics.get(("accel.steps",), 0)

    def check_end(self, state, exit_code):
        attributes = read_attributes(self.receiver.spans["launch"][-1].attributes)
        assert (attributes["accel.state"], attributes["accel.exit_code"]) == (state, exit_code)


class TrainJob:
    """The status of a TrainJob."""

    name = "train_job"

    def __init__(self, folder):
        self.settings, self.refused = {}, {}
        self.other = ExitStack()
        self.other.enter_context(mock.patch.dict(os.environ))  # without what the sink sets
        self.controller = self.other.enter_context(serve_controller(folder))
        self.environ = self.controller.environ

    def read_steps(self):
        newest = self.controller.statuses[-1]["metrics"] if self.controller.statuses else []
        return next((int(each["value"]) for each in newest if each["name"] == "accel/steps"), 0)

    def check_end(self, state, _exit_code):
        assert (self.controller.statuses[-1].get("progressPercentage") == 100) == (state == "succeeded")


CASES = {case.name: case for case in (Line, Lines, Status, Prometheus, Telemetry, TrainJob, Alive)}


@pytest.fixture(scope="module")
def page_sink():
    """The class of the sink of CONTRIBUTING.md."""
    module: dict[str, object] = {}
    exec(PAGE, module)  # noqa: S102 - the page
    return module["AliveFile"]


@pytest.fixture(params=CASES)
def case(request, tmp_path):
    """Each sink in turn."""
    folder = tmp_path / "case"
    folder.mkdir()
    case = CASES[request.param](folder)
    yield case
    if hasattr(case, "other"):
        case.other.close()


@pytest.fixture
def endpoint(tmp_path):
    """The endpoint beside another sink."""
    endpoint = Prometheus(tmp_path)
    yield endpoint
    endpoint.other.close()


@pytest.fixture
def kind(case, page_sink):
    """The class of each sink in turn."""
    return page_sink if case.name == "alive" else PROGRESS_SINKS[case.name]


@pytest.fixture
def table(monkeypatch):
    """Returns a function that replaces the table of sinks."""

    def replace_table(**kinds):
        monkeypatch.setattr(sink_threads, "PROGRESS_SINKS", kinds)

    return replace_table


@pytest.fixture
def run(tmp_path):
    """The folder of a run with two ranks, which this process launches."""
    record = {"world_size": 2, "nodes": 1, "target": "train.py", "arguments": ["--max_steps", "100"]}
    folder = RunFolder.create(tmp_path / "runs", "train.py", record)
    for rank in (0, 1):
        folder.get_rank(0, rank).path.mkdir(parents=True)
    return folder


def settings(max_nodes=1, **changes):
    return AgentSettings(
        min_nodes=1, max_nodes=max_nodes, rdzv_endpoint="", node_rank=None, run_id="accel", process_group_timeout=60,
        max_restarts=0, monitor_interval=0.1, rdzv_timeout=60, last_call_timeout=1, ranks=0, log_dir=None,
        shutdown_timeout=1, stall_timeout=None, **changes,
    )  # fmt: skip


def step(run, steps):
    """Let the ranks have made a number of steps; the second one is behind."""
    for rank in (0, 1):
        write_beat(run.get_rank(0, rank).beat, [Totals(1 + steps - rank, 1.0, *[0.1] * 8)], pid=os.getpid())


def started(run, changes, environ=None):
    """Return open sinks."""
    sinks = ProgressSinks(run, settings(**changes), environ or {})
    sinks.open()
    return sinks


# Each sink --------------------------------------------------------------------------------


def test_every_sink_has_a_case():
    assert {*CASES} == {*PROGRESS_SINKS.names, "alive"}


def test_a_sink_is_off_unless_the_settings_or_the_environment_switch_it_on(case, kind, tmp_path):
    assert kind.create(settings(), {}) is None
    before = [*tmp_path.rglob("*")]
    assert isinstance(kind.create(settings(**case.settings), case.environ), ProgressSink)
    assert [*tmp_path.rglob("*")] == before


def test_a_sink_shows_the_progress_and_the_end_of_a_run(case, kind, run, table):
    table(**{case.name: kind})
    kind_interval, kind.interval_s = kind.interval_s, kind.interval_s and 0.05
    try:
        sinks = case.sinks = started(run, case.settings, case.environ)
        drop_lines = getattr(case, "drop_lines", list)
        for steps in (5, 9):
            step(run, steps)
            # The endpoint shows each rank.
            expected = steps + (case.name == "prometheus")
            wait_until(lambda expected=expected: case.read_steps() == expected)
        assert drop_lines(sinks.close(3, is_stopped=False)) == []
        case.check_end("failed", 3)
        assert sinks.close(0, is_stopped=False) == [], "closed once"
        case.check_end("failed", 3)
    finally:
        kind.interval_s = kind_interval


def test_a_sink_can_be_closed_twice(case, kind, run):
    sink = kind.create(settings(**case.settings), case.environ)
    outcome = RunProgress(time.time(), "run", "succeeded", exit_code=0)
    sink.open(run)
    sink.close(outcome)
    sink.close(outcome)
    case.check_end("succeeded", 0)


def test_what_cannot_be_used_is_refused_with_the_reason_and_the_option(case, kind, run, table):
    table(**{case.name: kind})
    for value, why in case.refused.items():
        sinks = ProgressSinks(run, settings(**{case.refused_key: value}), {})
        with pytest.raises(
            UsageError, match=rf"Cannot .* {re.escape(value)}: .*{why}.*{case.refused_option}"
        ):
            sinks.open()
        assert sinks.close(2, is_stopped=False) == [], "the error has said it"


@pytest.mark.parametrize("case", ["lines", "status"], indirect=True)
def test_a_full_disk_is_one_warning_and_the_end_is_written_if_there_is_space_again(
    case, kind, run, table, monkeypatch
):
    table(**{case.name: kind})
    step(run, 5)
    sinks = started(run, case.settings)
    wait_until(lambda: case.read_steps() == 5)
    open_file = Path.open

    def open_full(path, *args, **kwargs):
        if path.name.startswith("p.json"):
            with open_file(path, "ab") as file:
                file.write(b'{"cut')
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return open_file(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", open_full)
    (warning,) = wait_until(sinks.take_lines)
    assert repr(case.name) in warning
    assert "No space left" in warning
    monkeypatch.setattr(Path, "open", open_file)
    assert sinks.close(0, is_stopped=False) == []
    *_, last = case.path.read_text().splitlines()
    assert json.loads(last)["state"] == "succeeded"


# Launches ---------------------------------------------------------------------------------

SIBLINGS = {("status", "signal"), ("status", "kill")}
"""Ends that `lines` has in `make test`; only the form of the file differs."""


@pytest.mark.parametrize(
    ("case", "end"),
    [
        pytest.param(case, end, marks=pytest.mark.full if (case, end) in SIBLINGS else ())
        for case in ("lines", "status")
        for end in ("finish", "signal", "kill")
    ],
    indirect=["case"],
)
def test_a_launch_shows_its_steps_and_how_it_ends(case, end, endpoint, script, home):
    """In a file, and at the endpoint."""
    script(SCRIPT)
    options = (*LAUNCH, *case.options, *endpoint.options)
    with Accel(*options, "train.py", stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as launch:
        try:
            wait_until(lambda: min(case.read_steps(), endpoint.read_steps()) > 2, 60, process=launch)
            if end == "signal":
                launch.send_signal(signal.SIGTERM)
            elif end == "kill":
                (pid,) = home.glob("runs/*/attempt_0/rank_1/pid")
                os.kill(int(pid.read_text()), signal.SIGKILL)
        finally:
            if end == "finish" or launch.poll() is not None:
                Path("end").touch()
        _, err = launch.communicate()
    state, code = {"finish": ("succeeded", 0), "signal": ("stopped", 143), "kill": ("failed", 137)}[end]
    assert launch.returncode == code, err
    assert "sink" not in err
    case.check_end(state, code)
    endpoint.check_end(state, code)
    if case.name == "lines":
        lines = case.read()
        states = [line["state"] for line in lines]
        assert list(dict.fromkeys(states)) == ["starting", "running", state]
        assert (states[0], states.count(state)) == ("starting", 1)
        assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)
        assert 0 < lines[-1]["metrics"]["loss"] < 1
        assert (lines[-1]["world_size"], lines[-1]["nodes"]) == (2, 1)


@pytest.mark.parametrize("case", ["lines", "status"], indirect=True)
def test_a_file_that_cannot_be_written_ends_the_launch_before_a_process_starts(case, script, cwd):
    script("open('started', 'w')")
    done = run_accel(*LAUNCH, "--progress-file", next(iter(case.refused)), "train.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        "No such file or directory. Set launcher.progress_file (--progress-file) to another file."
        in done.stderr
    )
    assert not (cwd / "started").exists()


def test_an_interval_without_a_file_and_an_empty_path_are_refused(script):
    script("")
    for options, reason in (
        (FAST, "progress_interval: "),
        (("--progress-file", ""), "launcher.progress_file: "),
    ):
        done = run_accel(*LAUNCH, *options, "train.py")
        assert done.returncode == 2
        assert reason in done.stderr


def test_a_sink_of_another_package_that_fails_leaves_the_exit_code_alone(script, tmp_path, monkeypatch):
    """The distribution has the sink of CONTRIBUTING.md, and one that fails."""
    info = tmp_path / "site" / "alive-1.0.dist-info"
    info.mkdir(parents=True)
    broken = (
        "\nclass Broken(AliveFile):\n    def write(self, progress):\n        raise SystemExit('no server')\n"
    )
    (info.parent / "alive_file.py").write_text(PAGE + broken)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: alive\nVersion: 1.0\n")
    points = "alive = alive_file:AliveFile\nbroken = alive_file:Broken\nmissing = nosuch:Sink\n"
    (info / "entry_points.txt").write_text(f"[accel.progress_sinks]\n{points}")
    monkeypatch.setenv("PYTHONPATH", str(info.parent))
    monkeypatch.setenv("ALIVE_FILE", str(tmp_path / "alive"))
    script("import sys\nsys.exit(7)")
    done = run_accel(*LAUNCH, "train.py")
    assert done.returncode == 7
    assert (
        done.stderr.count(
            "the progress sink 'broken' is off, since its write() failed: SystemExit: no server"
        )
        == 1
    )
    assert done.stderr.count("Cannot load 'missing' of the package alive") == 1
    assert (tmp_path / "alive").read_text().split()[0] == "failed"


# The rules of all sinks -------------------------------------------------------------------


def create_sink(calls, *, fails=("", None), waits_in="", per_node=False, interval=0.01):
    """Return a class whose calls are recorded, with the thread of each, and which fails or waits in one of them."""
    release = threading.Event()

    class Recorded(ProgressSink):
        interval_s, is_per_node = interval, per_node
        free = release

        @classmethod
        def create(cls, *_):
            note("create")
            return cls()

        def open(self, _run):
            note("open")

        def write(self, progress):
            note("write", progress)

        def close(self, outcome):
            note("close", outcome)

    def note(method, progress=None):
        calls.append((method, progress, threading.get_ident(), time.monotonic()))
        if method == waits_in:
            release.wait(60)
        if method == fails[0]:
            raise fails[1]

    return Recorded


def names(calls):
    """Return the methods that were called, each series of one once."""
    return [method for method, _ in itertools.groupby(method for method, *_ in calls)]


@pytest.mark.parametrize("error", [RuntimeError("broken"), SystemExit("broken"), OSError(28, "broken")])
@pytest.mark.parametrize("method", ["create", "open", "write", "close"])
def test_a_sink_that_fails_is_one_warning_and_no_harm_to_others(method, error, run, table):
    bad, good = [], []
    table(bad=create_sink(bad, fails=(method, error)), good=create_sink(good))
    sinks = started(run, {})
    wait_until(lambda: [each for each, *_ in good].count("write") > 2)
    warnings = sinks.take_lines() + sinks.close(0, is_stopped=False)
    assert len(warnings) == 1
    may_pass = method == "write" and isinstance(error, OSError)
    failed = "failed to write" if may_pass else f"is off, since its {method}() failed"
    assert f"the progress sink 'bad' {failed}: {type(error).__name__}: " in warnings[0]
    expected = {
        "create": ["create"], "open": ["create", "open"], "write": ["create", "open", "write", "close"],
        "close": ["create", "open", "write", "close"],
    }  # fmt: skip
    # It is tried again after what may pass.
    called = names(bad) if may_pass else [each for each, *_ in bad]
    assert [each for each in called if method != "close" or each != "write"] == [
        each for each in expected[method] if method != "close" or each != "write"
    ]
    assert names(good) == ["create", "open", "write", "close"]


def test_the_target_of_a_link_is_replaced_and_not_the_link(tmp_path, run):
    target, link = tmp_path / "state" / "now.json", tmp_path / "link.json"
    target.parent.mkdir()
    link.symlink_to(target)
    sinks = started(run, {"progress_file": str(link)})
    assert not sinks.close(0, is_stopped=False)
    assert link.is_symlink()
    assert json.loads(target.read_text())["state"] == "succeeded"


@pytest.mark.parametrize("method", ["open", "write", "close"])
def test_a_slow_sink_delays_neither_the_run_nor_others(method, run, table, monkeypatch):
    monkeypatch.setattr(sink_threads, "_WAIT_S", 0.5)
    slow, good = [], []
    kind = create_sink(slow, waits_in=method)
    table(slow=kind, good=create_sink(good))
    try:
        sinks = started(run, {})
        wait_until(lambda: [each for each, *_ in good].count("write") > 2)
        (warning,) = sinks.close(0, is_stopped=False)
    finally:
        kind.free.set()
    assert "the progress sink 'slow' has not ended within" in warning
    assert names(good) == ["create", "open", "write", "close"]


def test_a_sink_is_called_from_one_thread_at_most_every_interval_and_closed_once(run, table):
    calls = []
    table(sink=create_sink(calls, interval=0.2))
    sinks = started(run, {})
    wait_until(lambda: [each for each, *_ in calls].count("write") > 3)
    sinks.close(143, is_stopped=True)
    sinks.close(0, is_stopped=False)
    (_, outcome, *_), *more = [call for call in calls if call[0] == "close"]
    assert not more
    assert (outcome.state, outcome.exit_code, outcome.run) == ("stopped", 143, run.path.name)
    assert len({thread for _, _, thread, _ in calls} - {threading.get_ident()}) == 1
    times = [at for method, *_, at in calls if method == "write"]
    assert min(later - earlier for earlier, later in itertools.pairwise(times)) >= 0.2


def test_a_refusal_that_comes_too_late_is_a_warning(run, table, monkeypatch):
    monkeypatch.setattr(sink_threads, "_WAIT_S", 0.01)
    calls = []
    kind = create_sink(calls, waits_in="open", fails=("open", UsageError("No server. Start it.")))
    table(sink=kind)
    sinks = started(run, {})
    kind.free.set()
    (warning,) = wait_until(sinks.take_lines)
    assert "No server" in warning
    assert sinks.close(0, is_stopped=False) == []


def test_of_several_nodes_the_one_that_leads_has_the_sinks_of_the_run(run, table):
    of_run, of_node = [], []
    table(run=create_sink(of_run), node=create_sink(of_node, per_node=True))
    sinks = started(run, {"max_nodes": 2})
    assert names(of_node)[:2] == ["create", "open"]
    assert of_run == []
    sinks.lead(is_leading=True)
    wait_until(lambda: "write" in names(of_run))
    sinks.lead(is_leading=False)
    assert [outcome.exit_code for method, outcome, *_ in of_run if method == "close"] == [None]
    sinks.lead(is_leading=True)
    sinks.close(0, is_stopped=False)
    closed = [outcome.state for method, outcome, *_ in of_run if method == "close"]
    assert closed == ["starting", "succeeded"]
    assert [method for method, *_ in of_node].count("close") == 1


def test_an_entry_that_cannot_be_loaded_is_a_warning(run, monkeypatch):
    monkeypatch.setattr(sink_threads, "PROGRESS_SINKS", Registry({"lost": "nosuch_package:Sink"}))
    sinks = started(run, {})
    (warning,) = sinks.take_lines()
    assert "nosuch_package" in warning


# Progress ---------------------------------------------------------------------------------


def test_the_progress_is_that_of_the_rank_behind(run):
    for rank, steps in ((0, 21), (1, 20)):
        write_beat(
            run.get_rank(0, rank).beat,
            [Totals(n, n, *[0.1] * 8) for n in range(1, steps + 1)],
            recent=[*range(1, steps + 1)],
        )
    metrics = [{"step": 20, "values": {"loss": 0.5, "text": "x", "bad": "NaN"}}]
    run.get_rank(0, 0).metrics.write_text("".join(f"{json.dumps(line)}\n" for line in metrics))
    data = RunProgress.read(run).to_dict()
    assert (data["steps"], data["total_steps"], data["fraction"]) == (20, 100, 0.2)
    assert data["metrics"] == {"loss": 0.5, "bad": "nan"}
    assert (data["world_size"], data["nodes"], data["restarts"]) == (2, 1, 0)
    json.dumps(data, allow_nan=False)


def test_before_the_first_step_and_without_a_folder_there_is_progress_too(run, tmp_path):
    assert RunProgress.read(run).state == "starting"
    gone = RunProgress.read(RunFolder(tmp_path / "gone"))
    assert (gone.state, gone.steps, gone.world_size) == ("starting", 0, None)


@pytest.mark.parametrize(
    ("progress", "line"),
    [
        ({"state": "starting"}, "step 0, starting"),
        (
            {
                "state": "running",
                "steps": 1200,
                "total_steps": 50_000,
                "steps_per_s": 3.4,
                "eta_s": 14_353,
                "metrics": {"train/loss": 2.3149, "lr": 0.1, "eval/loss_x": 1.0},
            },
            "step 1200 of 50000, loss 2.315, 3.4 steps/s, ETA 3 h 59 min",
        ),
        (
            {
                "state": "stalled",
                "steps": 7,
                "steps_per_s": 0.01234,
                "metrics": {"loss": math.nan},
                "health": Health(restarts=2),
            },
            "step 7, loss nan, 0.0123 steps/s, restarts 2, stalled",
        ),
        ({"state": "succeeded", "steps": 7, "exit_code": 0, "steps_per_s": 3.0}, "step 7, succeeded"),
    ],
)
def test_the_progress_line_has_the_form_that_the_docs_describe(progress, line):
    kind = PROGRESS_SINKS["line"]
    assert kind(60).write(RunProgress(0.0, "run", **progress)) == line
    match = PROGRESS_LINE.fullmatch(f"accel: {line}")
    assert int(match["step"]) == progress.get("steps", 0)
    assert (match["state"] or "running") == progress["state"]


@pytest.mark.slow
def test_a_launch_prints_progress_lines_below_the_output_of_the_ranks(script, cwd):
    script(f"{SCRIPT}\nprint('no end of line', end='', flush=True)\ntime.sleep(1)")
    options = ("launch", "--no-profile", "--cpu", "--nproc-per-node", 2, "--progress-line", "0.2")
    with Accel(*options, "train.py", stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as launch:
        found = 0
        for line in launch.stderr:
            found += bool(PROGRESS_LINE.fullmatch(line.strip()))
            if found > 4:
                Path("end").touch()
        assert launch.wait() == 0
    assert found > 5
