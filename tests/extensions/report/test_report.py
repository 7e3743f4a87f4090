"""`accel report` shows what the files of a run hold, whatever they hold, and runs no text of theirs."""

from __future__ import annotations

import html.parser
import json
import math
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plotly.offline import get_plotlyjs
from support.processes.commands import call_accel
from support.runs.run_folders import START, RunWriter

from accel_cli.extensions.report.data import Curve, read_run
from accel_cli.extensions.report.figures import thin_curve
from accel_cli.extensions.report.page import pack, unpack
from accel_cli.runs.run_dir import RunFolder

HOSTILE = "<script>alert(1)</script>\"'&%{y}</title></style><img src=x onerror=alert(2)><!--"


class Page(html.parser.HTMLParser):
    """A report as a browser parses it: elements, text, and the plots by their titles."""

    def __init__(self, text):
        super().__init__()
        self.source = text
        self.elements = []
        self.titles = []
        self.blocks = []
        self.lines = []
        self._inside = ""
        self.feed(text)
        (figures,) = (text for name, text in self.blocks if name == "figures")
        self.plots = dict(zip(self.titles, json.loads(unpack(figures)), strict=True))
        self.text = " ".join(" ".join(self.lines).split())

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.elements.append((tag, attributes))
        self._inside = tag
        if tag == "script":
            self.blocks.append([attributes.get("id", ""), ""])
        if attributes.get("class") == "plot":
            self.titles.append(attributes["aria-label"])

    def handle_endtag(self, _tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside == "script":
            self.blocks[-1][1] += data
        elif self._inside != "style":
            self.lines.append(data)

    def traces(self, title, axis="y"):
        """Return the lines of a plot, or its marks on the axis y2."""
        return [trace for trace in self.plots[title]["data"] if trace.get("yaxis", "y") == axis]


@pytest.fixture(autouse=True)
def _small_plotly(monkeypatch):
    """A page without the 5 MB that draw the plots in a browser, which take most of the time of a test."""
    monkeypatch.setattr("accel_cli.extensions.report.page.get_plotlyjs", lambda: "/* plotly */")


@pytest.fixture
def report(capfd, cwd, home):
    """Writes a report with the command, and parses it."""

    def write(*args):
        result = call_accel(capfd, "report", *args)
        assert result.returncode == 0, result.stderr
        return Page((cwd / result.stdout.strip()).read_text(encoding="utf-8"))

    return write


@pytest.fixture
def runs(home):
    """The folder of all runs."""
    return home / "runs"


def write_complete(base, name="20270115-080000-train-1", slow=1, **record):
    """Write a run of two ranks of which one has a longer own time, with a stall, a restart and checkpoints."""
    folder = RunWriter(base, name, **record)
    folder.events(
        (0, "start", {"attempt": 0, "world_size": 2, "ranks": [0, 1]}),
        (30, "stall", {"seconds": 10.0, "text": "rank 0 waits in backward"}),
        (34, "progress", {"seconds": 14.0}),
        (
            50,
            "failure",
            {
                "rank": 1,
                "host": "node-1",
                "cause": "ValueError: bad label",
                "frames": ['File "train.py", line 7'],
            },
        ),
        (51, "restart", {"attempt": 1, "reason": "rank 1 failed"}),
        (52, "start", {"attempt": 1, "world_size": 2, "ranks": [0, 1]}),
        (99, "end", {"exit_code": 0}),
    )
    folder.metrics([(step, step, {"loss": 1 / (1 + step), "lr": 0.1}) for step in range(50)], attempt=0)
    folder.metrics([(52 + step, 20 + step, {"loss": 5.0, "lr": 0.1}) for step in range(40)], attempt=1)
    for attempt, begin in ((0, 0), (1, 52)):
        for rank in (0, 1):
            busy = 0.3 if rank == slow else 0.1
            # All own time is that before backward passes.
            totals = [(begin + number, busy * number, 0, busy * number) for number in range(1, 40)]
            folder.beat(rank, totals, attempt)
    folder.lines(
        "memory.jsonl",
        ({"time": at, "attempt": int(at > 50), "rss": {"0": 2**30, "1": 2**31}} for at in range(0, 100, 5)),
    )
    folder.lines(
        "attempt_0/rank_0/checkpoints.jsonl",
        [{"time": 20, "path": "/work/checkpoint-20", "seconds": 0.25, "kind": "save"}],
    )
    folder.lines(
        "attempt_1/rank_0/checkpoints.jsonl",
        [{"time": 53, "path": "/work/checkpoint-20", "seconds": 0.5, "kind": "load"}],
    )
    folder.write("attempt_1/rank_0/description.json", json.dumps({"text": "2 processes, DDP", "data": {}}))
    return folder


@pytest.mark.smoke
def test_a_report_shows_what_ran_and_what_happened(report, runs):
    write_complete(runs)
    page = report()
    for text in (
        "train.py", "--epochs 3", "node-1", "torchrun", "exit code 0", "1 min 40 s", "2.9.0", "mixed_precision",
        "2 processes, DDP", "ValueError: bad label", 'File "train.py", line 7', "no progress for 10 s",
        "rank 0 waits in backward", "rank 1 failed", "/work/checkpoint-20",
    ):  # fmt: skip
        assert text in page.text, text
    assert set(page.plots) == {
        "loss",
        "lr",
        "Step time by rank",
        "Own time by rank",
        "Resident memory by rank",
    }


def test_the_rank_with_the_longest_own_time_is_named_and_its_line_is_above(report, runs):
    write_complete(runs, slow=1)
    page = report()
    assert (
        "Rank 1 has the longest own time, 0.3 s a step on average: 3.0 times the median of 0.1 s; mostly before backward passes: "
        "300 ms instead of 100 ms. It delays the other ranks." in page.text
    )
    lines = {trace["name"]: trace["y"] for trace in page.traces("Own time by rank")}
    assert {name: max(y for y in values if y is not None) for name, values in lines.items()} == {
        "rank 0": 0.1,
        "rank 1": 0.3,
    }
    steps = page.traces("Step time by rank")
    assert all(set(trace["y"]) == {1, None} for trace in steps), "a gap is between the attempts"


@pytest.mark.parametrize(
    ("own_times", "steps", "sentence"),
    [
        (
            (0.5, 0.57),
            40,
            "1.1 times the median of 0.5 s; no single part of its steps explains it. It delays the other ranks.",
        ),
        ((0.1, 0.105), 40, "the ranks are balanced (median 0.1 s)."),
        ((0.001, 0.005), 40, "the ranks are balanced (median 0.001 s)."),
        ((0.1, 0.3), 12, None),
        ((0.3,), 40, None),
    ],
    ids=["slower", "5 % of own time", "0.4 % of a step", "few steps", "one rank"],
)
def test_a_rank_is_named_as_the_slowest_by_the_thresholds_of_accel_top(
    report, runs, own_times, steps, sentence
):
    folder = RunWriter(runs)
    for rank, own_time in enumerate(own_times):
        folder.beat(rank, [(number, own_time * number) for number in range(1, steps)])
    text = report().text
    assert ("has the longest own time" in text) is bool(sentence)
    assert sentence is None or sentence in text


def test_a_restarted_run_has_one_curve_a_metric_with_the_values_of_the_later_attempt(report, runs):
    write_complete(runs)
    (loss,) = report().traces("loss")
    assert loss["x"] == list(range(60))
    assert loss["y"][19] == pytest.approx(1 / 20)
    assert set(loss["y"][20:]) == {5}


def test_time_axes_have_marks_of_restarts_stalls_and_checkpoints(report, runs):
    write_complete(runs)
    page = report()
    for title in ("Step time by rank", "Own time by rank", "Resident memory by rank"):
        stall, restart, save, load = sorted(
            page.traces(title, "y2"),
            key=lambda trace: ("fill" not in trace, trace["x"][0] != 51, trace["x"][0]),
        )
        assert (min(filter(None, stall["x"])), max(filter(None, stall["x"]))) == (20, 34)
        assert restart["x"][0] == 51
        assert (save["x"], load["x"]) == ([20], [53])
    assert "Dashed lines are restarts, shaded areas are stalls" in page.text


def test_runs_are_drawn_over_each_other_in_one_colour_each(report, runs):
    write_complete(runs, "20270115-080000-train-1")
    write_complete(
        runs, "20270115-090000-train-2", arguments=["--epochs", "9"], profile={"mixed_precision": "bf16"}
    )
    page = report("20270115-080000-train-1", "20270115-090000-train-2")
    first, second = page.traces("loss")
    colors = (first["line"]["color"], second["line"]["color"])
    assert len(set(colors)) == 2
    for title in ("Step time by rank", "Resident memory by rank"):
        assert [trace["line"]["color"] for trace in page.traces(title)] == [colors[0]] * 2 + [colors[1]] * 2
    boxes = [attributes for tag, attributes in page.elements if tag == "input" and "data-run" in attributes]
    assert [box["data-run"] for box in boxes] == ["0", "1"]
    assert page.text.count("20270115-090000-train-2") > 2
    differing = page.source.count('<tr class="differs">')
    assert differing == 3, "arguments, launcher.kind and mixed_precision differ"


def test_of_several_profiles_only_the_values_that_differ_are_unfolded(report, runs):
    write_complete(runs, "20270115-080000-train-1", profile={"seed": 1, "device": "cpu"})
    write_complete(runs, "20270115-090000-train-2", profile={"seed": 2, "device": "cpu"})
    page = report("20270115-080000-train-1", "20270115-090000-train-2")
    unfolded, _, folded = page.source.partition("<summary>Profile and configuration: 1 equal value</summary>")
    assert ">seed</th>" in unfolded.partition("Profile and configuration: values that differ")[2]
    assert ">device</th>" in folded
    assert "<details open" not in page.source


def test_runs_are_read_from_the_log_dir_of_the_profile(report, runs, cwd):
    write_complete(runs, target="default.py")
    folder = write_complete(cwd / "logs", "20270115-090000-train-2", target="chosen.py")
    (cwd / "accel.yaml").write_text("schema_version: 1\nlauncher:\n  kind: torchrun\n  log_dir: logs\n")
    for args in ((), (folder.path.name,)):
        assert "chosen.py" in report(*args).text
    assert "default.py" in report("--log-dir", runs).text


def test_a_run_that_is_named_twice_is_shown_once(report, runs):
    folder = write_complete(runs)
    page = report(folder.path.name, folder.path)
    assert len(page.traces("loss")) == 1


def test_an_empty_run_has_a_sentence_in_each_section_and_no_plot(report, runs):
    RunWriter(runs, profile={})
    page = report()
    assert not page.plots
    for text in (
        "No profile values recorded", "No description recorded", "No metrics recorded", "No step times recorded",
        "No memory recorded", "No events recorded",
    ):  # fmt: skip
        assert text in page.text


@pytest.mark.parametrize(
    "garbage",
    [
        pytest.param(b"", id="empty", marks=pytest.mark.full),
        pytest.param(b"\0" * 5000, id="zeros", marks=pytest.mark.full),
        pytest.param(b"[1, 2", id="cut"),
        pytest.param(b'{"time": "x", "values": 3}\n[]\nnull\n', id="types"),
        pytest.param(b"[" * 100_000, id="deep", marks=pytest.mark.full),
        pytest.param(b"\xff" * 20_000, id="binary", marks=pytest.mark.full),
        pytest.param(None, id="missing"),
    ],
)
def test_a_corrupt_or_missing_file_leaves_the_rest_of_the_report(report, runs, garbage):
    write_complete(runs)
    names = sorted(path.relative_to(runs) for path in runs.rglob("*") if path.is_file())
    assert len(names) > 10
    for number, name in enumerate(names):
        folder = write_complete(runs, f"run-{number}")
        file = folder.path.joinpath(*name.parts[1:])
        if garbage is None:
            file.unlink()
        else:
            file.write_bytes(garbage)
        page = report(folder.path, "-o", f"{number}.html")
        assert len(page.plots) >= 3, name
        if garbage and b"\n" in garbage and file.name == "events.jsonl":
            assert "events.jsonl has 2 unreadable lines" in page.text


def test_fields_of_other_types_do_not_end_the_report(report, runs):
    choices = [None, -1, 1e400, "x", [], {}, [[]], {"a": {"b": None}}, True, 10**400, "\0", math.nan]
    draw = random.Random(22)
    for number in range(20):
        keys = json.loads((RunWriter(runs, f"model-{number}").path / "run.json").read_text())
        record = {key: draw.choice(choices) for key in keys}
        folder = RunWriter(runs, f"run-{number}", **record)
        for name, fields in (
            ("events.jsonl", ("event", "attempt", "ranks", "seconds", "frames", "text", "reason")),
            ("memory.jsonl", ("attempt", "rss", "gpu")),
            ("attempt_0/rank_0/metrics.jsonl", ("step", "values", "jsonl")),
            ("attempt_0/rank_0/checkpoints.jsonl", ("kind", "path", "seconds")),
        ):
            lines = [{field: draw.choice(choices) for field in fields} | {"time": at} for at in range(20)]
            lines += [{"event": kind, "time": 1} for kind in ("start", "restart", "stall", "failure", "end")]
            folder.lines(name, lines)
        folder.write("attempt_0/rank_0/description.json", json.dumps(draw.choice(choices)))
        (folder.path / "attempt_x" / "rank_y").mkdir(parents=True)
        report(folder.path, "-o", "r.html")


def test_hostile_names_are_text(report, runs):
    folder = write_complete(
        runs, target=f"{HOSTILE}.py", arguments=[HOSTILE], host=HOSTILE, profile={HOSTILE: HOSTILE},
        versions={"torch": HOSTILE},
    )  # fmt: skip
    folder.metrics([(step, step, {HOSTILE: 1.0, "text": HOSTILE}) for step in (1, 2)], attempt=2)
    folder.events(
        (1, "failure", {"rank": HOSTILE, "cause": HOSTILE, "frames": [HOSTILE]}),
        (2, HOSTILE, {"a": HOSTILE}),
        (3, "restart", {"attempt": 1, "reason": HOSTILE}),
    )
    folder.write("attempt_2/rank_0/description.json", json.dumps({"text": HOSTILE}))
    other = RunWriter(runs, "20270116-080000-other-2", target=HOSTILE)
    tracked = other.path / "<b>x.jsonl"
    tracked.write_text(json.dumps({"time": START, "step": 1, "values": {HOSTILE: 2.0}}) + "\n")
    for page in (report(folder.path), report(folder.path, tracked, "-o", "two.html")):
        tags = {tag for tag, _ in page.elements}
        assert not tags & {"img", "b"}
        assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
        scripts = [text for name, text in page.blocks if not name]
        assert len(scripts) == 1, "the script of the page; plotly is packed"
        assert HOSTILE in page.plots
        assert HOSTILE in page.text
        # plotly understands some tags, and values in its templates.
        plot_text = str([plot["data"] for plot in page.plots.values()])
        assert "<script" not in plot_text
        assert "<b>" not in plot_text
        assert "&lt;script&gt;alert(1)" in plot_text, "the text of the restart"


def test_non_finite_values_are_gaps_with_crosses(report, runs):
    folder = RunWriter(runs)
    values = [0.5, "NaN", 0.25, "Infinity", "-Infinity", 0.125]
    folder.metrics([(step, step, {"loss": value}) for step, value in enumerate(values)])
    page = report()
    (line,), (crosses,) = page.traces("loss"), page.traces("loss", "y2")
    assert line["y"] == [0.5, None, 0.25, None, None, 0.125]
    assert (crosses["x"], crosses["text"]) == ([1, 3, 4], ["nan", "inf", "-inf"])
    assert "Crosses mark values that are NaN or infinite (3)." in page.text


def test_texts_nested_values_and_calls_without_a_step_are_shown(report, runs):
    folder = RunWriter(runs)
    folder.metrics([(0, None, {"loss": 2.0, "note": "warm"}), (1, None, {"loss": 1.0, "eval": {"f1": 0.5}})])
    page = report()
    assert page.traces("loss")[0]["x"] == [0, 1]
    assert "eval/f1 0.5" in page.text
    assert "warm" in page.text


def test_calls_without_a_step_continue_the_curve_after_a_restart(report, runs):
    folder = RunWriter(runs)
    folder.metrics([(at, None, {"loss": 3.0 - at}) for at in range(3)], attempt=0)
    folder.metrics([(10 + at, None, {"loss": 9.0}) for at in range(2)], attempt=1)
    (loss,) = report().traces("loss")
    assert (loss["x"], loss["y"]) == ([0, 1, 2, 3, 4], [3, 2, 1, 9, 9])


def test_a_large_step_is_shown_with_all_digits(report, runs):
    RunWriter(runs).metrics([(0, 1_234_567, {"loss": 0.5})])
    assert "loss 1234567 0.5" in report().text


def write_tracked(file, values, times=None):
    """Write the file of a jsonl tracker, with the configuration first."""
    lines = [{"time": START, "config": {"lr": 0.1, "optimizer": {"name": "adam"}}}]
    lines += [
        {"time": START + (times[step] if times else step), "step": step, "values": {"loss": value}}
        for step, value in enumerate(values)
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as opened:
        opened.writelines(json.dumps(line) + "\n" for line in lines)


def test_the_file_of_the_jsonl_tracker_has_all_values_of_the_time_of_the_run(report, runs, cwd):
    tracked = cwd / "logs" / "digits.jsonl"
    write_tracked(tracked, [9.0, 1.0, 2.0, 3.0, 9.0], times=[-500, 1, 2, 3, 500])
    folder = RunWriter(runs)
    thinned = [{"jsonl": str(tracked)}, {"step": 1, "values": {"loss": 1.0}}]
    folder.lines("attempt_0/rank_0/metrics.jsonl", thinned)
    assert report(folder.path).traces("loss")[0]["y"] == [1, 2, 3]
    tracked.unlink()
    page = report(folder.path)
    assert "loss 1 " in page.text
    assert "does not exist: its metrics are those of the run folder" in page.text


def test_lines_of_a_tracker_belong_to_the_attempt_that_wrote_them_also_just_before_a_restart(
    report, runs, cwd
):
    """The second attempt continues after the step 1."""
    tracked = cwd / "logs" / "digits.jsonl"
    write_tracked(tracked, [0.0, 1.0, 2.0, 3.0], times=[1, 1.1, 1.2, 1.3])
    write_tracked(tracked, [9.0, 9.0, 4.0, 5.0], times=[-500, -500, 1.7, 1.8])
    folder = RunWriter(runs)
    for attempt, at in enumerate((0.9, 1.6)):
        folder.lines(f"attempt_{attempt}/rank_0/metrics.jsonl", [{"time": at, "jsonl": str(tracked)}])
    assert report(folder.path).traces("loss")[0]["y"] == [0, 1, 4, 5]


@pytest.mark.parametrize("launcher", ["single", "torchrun"])
def test_a_killed_run_has_no_metrics_of_later_runs_in_the_file_of_its_tracker(report, runs, cwd, launcher):
    tracked = cwd / "logs" / "digits.jsonl"
    write_tracked(tracked, [1.0, 2.0, 3.0, 8.0, 9.0], times=[1, 2, 3, 60, 61])
    folder = RunWriter(runs, launcher=launcher, replaces_process=launcher == "single")
    record = json.loads((folder.path / "run.json").read_text())
    del record["ended"], record["exit_code"]
    folder.write("run.json", json.dumps(record | {"pid": 2**22 + 1, "host": socket.gethostname()}))
    lines = [{"jsonl": str(tracked)}, {"time": 1, "step": 0, "values": {"loss": 1.0}}]
    folder.lines("attempt_0/rank_0/metrics.jsonl", lines)
    folder.beat(0, [(1.0, 0.0), (3.0, 0.0)])
    page = report()
    assert "killed" in page.text
    assert page.traces("loss")[0]["y"] == [1, 2, 3], "the last line is that of the last step"


def test_the_file_of_a_tracker_is_reported_alone_with_a_curve_for_each_start(report, cwd):
    write_tracked(cwd / "logs" / "digits.jsonl", [3.0, 2.0])
    page = report("logs/digits.jsonl")
    assert page.traces("loss")[0]["y"] == [3, 2]
    assert "optimizer/name adam" in page.text
    assert "No step times recorded" in page.text
    write_tracked(cwd / "logs" / "digits.jsonl", [5.0, 4.0])
    page = report("logs/digits.jsonl")
    assert [trace["y"] for trace in page.traces("loss")] == [[3, 2], [5, 4]]
    assert "digits, start 2" in page.text


def test_secrets_that_a_script_stored_in_a_tracker_are_masked(report, cwd):
    config = {
        "tokenizer": "bert-base",
        "max_tokens": 512,
        "hub": {"api_key": "abc-1"},
        "urls": ["s3://me:abc-2@host/x"],
    }
    (cwd / "digits.jsonl").write_text(json.dumps({"time": START, "config": config}) + "\n")
    page = report("digits.jsonl")
    for text in ("tokenizer bert-base", "max_tokens 512", "hub/api_key ***", "s3://***@host/x"):
        assert text in page.text
    assert "abc-" not in page.source


def test_a_million_values_are_thinned_and_keep_their_extremes():
    curve = Curve()
    for step in range(1_000_000):
        curve.add(step, math.sin(step))
    curve.y[123_456], curve.y[654_321], curve.y[777_777] = 99.0, -99.0, math.nan
    thinned = thin_curve(curve, 4000)
    assert len(thinned) < 4100
    assert {(123_456, 99.0), (654_321, -99.0), (0, 0.0), (999_999, math.sin(999_999))} <= set(
        zip(thinned.x, thinned.y, strict=True)
    )
    assert any(math.isnan(y) for y in thinned.y)
    assert list(thinned.x) == sorted(thinned.x)


def test_the_caption_of_a_thinned_plot_tells_so(report, runs):
    folder = RunWriter(runs)
    folder.metrics((step, step, {"loss": float(step % 7)}) for step in range(10_000))
    page = report()
    assert "of 10,000 values are drawn, with the extremes of each interval." in page.text
    assert "its metrics may be thinned" in page.text
    assert len(page.traces("loss")[0]["x"]) < 5000


def test_a_run_in_progress_is_reported_with_a_note(report, runs):
    import os

    folder = RunWriter(runs)
    record = json.loads((folder.path / "run.json").read_text())
    del record["ended"], record["exit_code"]
    folder.write("run.json", json.dumps(record | {"pid": os.getpid(), "host": socket.gethostname()}))
    page = report()
    assert "The run is in progress; these are its files at" in page.text
    assert "running" in page.text


def test_of_many_ranks_the_slowest_are_drawn(report, runs):
    folder = RunWriter(runs, world_size=64)
    for rank in range(64):
        folder.beat(rank, [(number, (0.2 if rank == 37 else 0.1) * number) for number in range(10)])
    page = report()
    names = [trace["name"] for trace in page.traces("Own time by rank")]
    assert len(names) == 16
    assert "rank 37" in names
    assert "Of the 64 ranks" in page.text


def test_rare_large_step_times_do_not_flatten_the_others(report, runs):
    times = [number + 60 * (number > 0) for number in range(200)]
    folder = RunWriter(runs)
    folder.beat(0, [(at, 0.0) for at in times])
    page = report()
    assert page.plots["Step time by rank"]["layout"]["yaxis"]["range"] == [0, 1.5]
    assert "Values up to 61 s (1 of 199) are above the axis" in page.text


def test_points_are_means_of_the_steps_between_two_measured_ones(report, runs):
    folder = RunWriter(runs)
    folder.beat(0, [(0.8 * number, 0.4 * number) for number in range(1, 40)], stride=8)
    page = report()
    assert "Each point is the mean of about 8 steps." in page.text
    assert {round(y, 9) for y in page.traces("Step time by rank")[0]["y"]} == {0.1}


def test_a_page_allows_its_own_scripts_only_and_no_connection(report, runs):
    write_complete(runs)
    page = report()
    policy = next(
        attributes["content"]
        for tag, attributes in page.elements
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-inline" not in policy.partition("style-src")[0]
    links = [
        value
        for _, attributes in page.elements
        for name, value in attributes.items()
        if name in {"src", "href"}
    ]
    assert not links


def test_a_file_that_accel_report_did_not_write_is_kept(capfd, runs, cwd):
    write_complete(runs)
    foreign_file = cwd / "report.html"
    foreign_file.write_text("<h1>mine</h1>")
    refused = call_accel(capfd, "report", "-o", foreign_file)
    assert refused.returncode == 2
    assert "exists and is not a report of accel. Pass --force" in refused.stderr
    assert foreign_file.read_text() == "<h1>mine</h1>"
    assert call_accel(capfd, "report", "-o", foreign_file, "--force").returncode == 0
    assert call_accel(capfd, "report", "-o", foreign_file).returncode == 0, "its own report is replaced"
    assert [path.name for path in cwd.glob("*.html*")] == ["report.html"]


def test_a_device_is_not_replaced_and_a_link_stays(capfd, runs, cwd):
    import os

    write_complete(runs)
    os.mkfifo(cwd / "pipe.html")
    refused = call_accel(capfd, "report", "-o", "pipe.html", "--force")
    assert refused.returncode == 2
    assert "it is not a regular file" in refused.stderr
    (cwd / "link.html").symlink_to("target.html")
    assert call_accel(capfd, "report", "-o", "link.html").returncode == 0
    assert (cwd / "link.html").is_symlink()
    assert "</html>" in (cwd / "target.html").read_text()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-o", "."], "it is a folder"),
        (["-o", "missing/report.html"], "no such folder 'missing'"),
        (["missing.jsonl"], "no such file"),
        (["missing/run"], "no such folder"),
        (["nothing"], "not found"),
    ],
)
def test_a_wrong_argument_is_refused_with_what_to_do(capfd, runs, cwd, args, message):
    write_complete(runs)
    result = call_accel(capfd, "report", *args)
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr
    assert not list(cwd.glob("*.html"))


def test_the_default_name_has_the_id_of_the_run(capfd, runs, cwd):
    write_complete(runs)
    assert call_accel(capfd, "report").stdout == "report-20270115-080000-train-1.html\n"


def test_without_plotly_the_packages_are_named(capfd, runs, monkeypatch):
    write_complete(runs)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    result = call_accel(capfd, "report")
    assert result.returncode == 2
    assert "'plotly>=6'" in result.stderr


def test_plotly_is_imported_to_draw_only():
    code = (
        "import sys, atexit\n"
        "atexit.register(lambda: print({'plotly', 'jinja2'} & set(sys.modules), file=sys.stderr))\n"
        "from accel_cli.main import main; main(['report', '--help'])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stderr.strip() == "set()"


def test_the_parts_of_a_step_and_the_throughput_are_shown_by_rank(report, runs):
    """A step of 1 s: 0.1 s of waiting for data, 0.2 s forward, 0.2 s backward, 0.1 s to its end, 0.3 s of waiting; the last rank loads longer."""
    folder = RunWriter(runs)
    for rank in range(3):
        late = 0.1 * (rank == 2)
        totals = [
            (
                step,
                (0.7 + late) * step,
                (0.1 + late) * step,
                0.2 * step,
                0.2 * step,
                0.1 * step,
                (0.3 - late) * step,
                64 * step,
                512 * step,
            )
            for step in range(1, 41)
        ]
        folder.beat(rank, totals)
    page = report(folder.path)
    assert "throughput 64 samples/s, 512 tokens/s" in page.text
    assert "0 1 s 100 ms 200 ms 200 ms 100 ms 100 ms 300 ms 700 ms" in page.text
    assert "2 1 s 200 ms 200 ms 200 ms 100 ms 100 ms 200 ms 800 ms" in page.text
    assert "mostly waiting for data: 200 ms instead of 100 ms. It delays the other ranks." in page.text
    assert set(page.traces("Samples per second")[0]["y"]) == {64}
    assert set(page.traces("Tokens per second")[0]["y"]) == {512}


def test_a_value_that_was_logged_once_is_a_fact_and_no_curve(report, runs):
    folder = RunWriter(runs)
    folder.metrics([(1, 1, {"loss": 0.5}), (2, 2, {"loss": 0.25, "test/accuracy": 0.93})])
    page = report()
    assert set(page.plots) >= {"loss"}
    assert "test/accuracy" not in page.plots
    assert "test/accuracy 0.93" in page.text


def test_commit_arguments_and_configuration_are_among_the_facts(report, runs):
    folder = RunWriter(runs, git_commit=f"{'a1' * 20} (main)", arguments=["--lr", "0.1"])
    folder.write("attempt_0/rank_0/configuration.json", json.dumps({"lr": 0.1, "model": {"width": 32}}))
    page = report()
    for text in ("git commit a1a1a1a1a1a1 (main)", "--lr 0.1", "config: lr 0.1", "config: model/width 32"):
        assert text in page.text


def test_the_use_of_cpus_and_gpus_is_drawn(report, runs):
    folder = RunWriter(runs)
    samples = [
        {"time": START + second, "attempt": 0, "rss": {"0": 1}, "cpu": {"0": 1.5}, "gpu_use": {"0": 97}}
        for second in (5, 10)
    ]
    folder.write("memory.jsonl", "".join(f"{json.dumps(sample)}\n" for sample in samples))
    page = report()
    assert page.traces("CPU use by rank")[0]["y"] == [1.5, 1.5]
    assert page.traces("GPU use by rank")[0]["y"] == [97, 97]


def test_a_report_of_a_long_run_with_many_metrics_is_smaller_than_2_mb(report, runs, monkeypatch):
    monkeypatch.setattr("accel_cli.extensions.report.page.get_plotlyjs", get_plotlyjs)
    folder = RunWriter(runs)
    chance = random.Random(0)
    names = [f"layer{number}/norm" for number in range(100)]
    folder.metrics([(step, step, {name: chance.random() for name in names}) for step in range(500)])
    assert len(report().source.encode()) < 2_000_000


@given(st.text(max_size=300))
def test_packed_text_has_no_markup_and_is_unpacked(text):
    assert not set("<&`") & set(pack(text))
    assert unpack(pack(text)) == text.encode("utf-8", "replace").decode()


def test_a_watched_report_is_written_until_the_run_ends(report, runs, monkeypatch):
    RunWriter(runs).metrics([(1, 1, {"loss": 0.5})])
    states, sources = iter([True, False]), []

    def read(*_):
        data = read_run(RunFolder(next(runs.iterdir())))
        data.is_running = next(states)
        return [data]

    monkeypatch.setattr("accel_cli.extensions.report.command._read_runs", read)
    monkeypatch.setattr(
        "accel_cli.extensions.report.command.time.sleep", lambda _: sources.append(Path("w.html").read_text())
    )
    page = report("--watch", "-o", "w.html")
    assert 'http-equiv="refresh" content="10"' in sources[0]
    assert 'http-equiv="refresh"' not in page.source
