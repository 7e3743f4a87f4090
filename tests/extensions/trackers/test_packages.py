"""Every tracker with its real package, offline; the tests read the files that the package wrote.

Each runs in a new process: these packages start threads and warn about their dependencies.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import textwrap

import pytest
from support.processes.waits import limit

pytestmark = pytest.mark.usefixtures("on_the_cpu")

WRITE = """
import numpy as np, torch
{before}
from accel_runtime import Accelerator

accelerator = Accelerator(log_with={name!r}, project_dir="logs")
config = {{"lr": 0.125, 7: {{8: torch.bfloat16}}, "deep": {{"a": 1}}, "api_key": "".join(["hu", "sh"])}}  # ClearML keeps the source too
accelerator.init_trackers("project", config=config, init_kwargs={{{name!r}: {options}}})
for step in range(2):
    values = {{"loss": torch.tensor(0.5 / (step + 1)), "acc": np.float32(0.25), "note": "good"}}
    accelerator.log({{**values, "none": None, "rows": torch.ones(3), "deep": {{"x": np.int64(7)}}}}, step=step)
tracker = accelerator.get_tracker({name!r})
image = np.full((8, 8, 3), 200, dtype=np.uint8)
{more}
accelerator.end_training()
"""


def log_and_read(  # noqa: PLR0913, PLR0917 - the parts of a script
    tmp_path, name, read, options="{}", before="", more="", **environ
):
    """Run a script that logs without errors; return the output of a second script that reads the files."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    environ = {**os.environ, "ACCEL_DEVICE": "cpu", **environ}
    script = WRITE.format(name=name, options=options, before=before, more=more)

    def run(text):
        # A file, since ClearML looks for the script it runs in.
        file = tmp_path / "run.py"
        file.write_text(textwrap.dedent(text), encoding="utf-8")
        command = [sys.executable, "-W", "ignore", str(file)]
        process = subprocess.run(
            command,
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            timeout=limit(120),
            check=False,
        )
        assert process.returncode == 0, process.stderr
        assert "failed in" not in process.stderr, process.stderr
        assert "failed to start" not in process.stderr, process.stderr
        return process.stdout

    run(script)
    logged = json.loads(run(read).splitlines()[-1])
    assert "hush" not in json.dumps(logged), "secrets stay out"
    return logged


@pytest.mark.smoke
def test_tensorboard_stores_scalars_text_images_and_hyperparameters(tmp_path):
    read = """
    import json
    from pathlib import Path
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    events = EventAccumulator("logs/project").Reload()
    values = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    (deep,) = Path("logs/project").glob("deep_x/*")
    (params,) = Path("logs/project").glob("*/hparams.yml")
    print(json.dumps([values, events.Tags()["tensors"], events.Tags()["images"], params.read_text()]))
    """
    images = "tracker.log_images({'face': image[None]}, step=1, dataformats='NHWC')"
    values, texts, pictures, params = log_and_read(tmp_path, "tensorboard", read, more=images)
    assert values == {"loss": [[0, 0.5], [1, 0.25]], "acc": [[0, 0.25], [1, 0.25]]}
    assert texts == ["note/text_summary"]
    assert pictures == ["face"]
    assert params == "7/8: torch.bfloat16\napi_key: '***'\ndeep/a: 1\nlr: 0.125\n"


def test_wandb_writes_an_offline_run(tmp_path):
    read = """
    import json
    from pathlib import Path
    import struct
    from wandb.proto import wandb_internal_pb2 as pb
    (path,) = Path("wandb").glob("offline-run-*/run-*.wandb")
    data, at, part, rows, config = path.read_bytes(), 7, b"", [], {}
    while at + 7 <= len(data):  # the log format of leveldb: blocks of 32 KiB that hold parts of records
        if at % 32768 > 32768 - 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record, part = pb.Record.FromString(part), b""
            if record.WhichOneof("record_type") == "history":
                rows.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item})
            for update in [*record.config.update, *record.run.config.update]:
                config["/".join(update.nested_key) or update.key] = json.loads(update.value_json)
    print(json.dumps([rows, config]))
    """
    more = (
        "tracker.log_images({'face': [image]}, step=2)\n"
        "tracker.log_table('table', columns=['a'], data=[[1]], step=2)"
    )
    rows, config = log_and_read(
        tmp_path, "wandb", read, "{'mode': 'offline'}", more=more, WANDB_SILENT="true", HOME=str(tmp_path)
    )
    assert [row.get("loss") for row in rows[:2]] == [0.5, 0.25]
    assert rows[0]["acc"] == 0.25
    assert rows[0]["note"] == "good"
    assert rows[0]["deep/x"] == 7
    assert rows[2]["face/_type"] == "images/separated"
    assert rows[2]["table/_type"] == "table-file"
    assert config["lr"] == 0.125
    assert config["7"] == {"8": "torch.bfloat16"}
    assert config["api_key"] == "***"


def test_mlflow_stores_parameters_metrics_and_artifacts(tmp_path):
    read = """
    import json, mlflow
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("project")
    (run,) = client.search_runs([experiment.experiment_id])
    losses = [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "loss")]
    files = [file.path for file in client.list_artifacts(run.info.run_id)]
    print(json.dumps([run.data.params, run.data.metrics, losses, files, run.info.status]))
    """
    more = "open('notes.txt', 'w').write('x'); tracker.log_artifact('notes.txt')"
    store = f"sqlite:///{tmp_path}/mlflow.db"
    params, metrics, losses, files, status = log_and_read(
        tmp_path, "mlflow", read, more=more, MLFLOW_TRACKING_URI=store
    )
    assert params == {"lr": "0.125", "7/8": "torch.bfloat16", "deep/a": "1", "api_key": "***"}
    assert metrics == {"loss": 0.25, "acc": 0.25, "deep/x": 7}
    assert losses == [[0, 0.5], [1, 0.25]]
    assert files == ["notes.txt"]
    assert status == "FINISHED"


def test_comet_writes_an_offline_archive(tmp_path):
    read = """
    import json, zipfile
    from pathlib import Path
    (path,) = Path("comet").glob("*.zip")
    with zipfile.ZipFile(path) as archive:
        lines = [json.loads(line) for line in archive.read("messages.json").splitlines()]
    payloads = [line["payload"] for line in lines]
    metrics = [p["metric"] for p in payloads if p.get("metric")]
    params = [p["param"] for p in payloads if p.get("param")]
    print(json.dumps([[(m["metricName"], m["metricValue"], m["step"]) for m in metrics],
                      {p["paramName"]: p["paramValue"] for p in params}]))
    """
    metrics, params = log_and_read(
        tmp_path, "comet_ml", read, "{'online': False}", COMET_OFFLINE_DIRECTORY=str(tmp_path / "comet")
    )
    assert ["loss", 0.5, 0] in metrics
    assert ["loss", 0.25, 1] in metrics
    assert int(params["deep/a"]) == 1
    assert params["api_key"] == "***"


def test_aim_tracks_in_a_repository_in_the_logging_directory(tmp_path):
    read = """
    import aim, json
    (known,) = aim.Repo("logs").list_all_runs()
    run = aim.Run(known, repo="logs", system_tracking_interval=None, capture_terminal_logs=False)
    found = {}
    for metric in run.metrics():
        found[metric.name] = [float(value) for value in metric.values.values_list()]
    print(json.dumps([run.name, run["hparams"], found]))
    run.close()
    """
    more = "import torch; tracker.log_images({'face': (torch.rand(3, 8, 8), 'smiling')}, step=1)"
    name, params, logged = log_and_read(
        tmp_path, "aim", read, "{'capture_terminal_logs': False, 'system_tracking_interval': None}", more=more
    )
    assert name == "project"
    assert params == {"lr": 0.125, "deep": {"a": 1}, "api_key": "***"}
    assert logged == {"loss": [0.5, 0.25], "acc": [0.25, 0.25], "deep/x": [7, 7]}


def test_clearml_writes_an_offline_session(tmp_path):
    read = """
    import json, zipfile
    from pathlib import Path
    (path,) = Path("cache").rglob("offline-*.zip")
    with zipfile.ZipFile(path) as archive:
        lines = [json.loads(line) for line in archive.read("metrics.jsonl").splitlines()]
        task = archive.read("task.json").decode()
    events = [event for line in lines for event in (line if isinstance(line, list) else [line])]
    print(json.dumps([[(e.get("metric"), e.get("variant"), e.get("value"), e.get("iter")) for e in events], task]))
    """
    before = "from clearml import Task; Task.set_offline(True)"
    options = "{'auto_connect_frameworks': False, 'auto_resource_monitoring': False}"
    more = "tracker.log_images({'eval_face': image}, step=1); tracker.log_table('t', columns=['a'], data=[[1]], step=1)"
    events, task = log_and_read(
        tmp_path, "clearml", read, options, before, more, CLEARML_CACHE_DIR=str(tmp_path / "cache"), HOME=str(tmp_path)
    )  # fmt: skip
    scalars = [(metric, variant, value, step) for metric, variant, value, step in events if value is not None]
    assert ("loss", "train", 0.5, 0) in scalars
    assert ("loss", "train", 0.25, 1) in scalars
    assert ["face", "eval"] in [event[:2] for event in events]
    assert "0.125" in task


def test_dvclive_writes_its_files(tmp_path):
    read = """
    import json
    from pathlib import Path
    print(json.dumps([Path("dvclive/plots/metrics/loss.tsv").read_text(), json.loads(Path("dvclive/metrics.json").read_text()),
                      Path("dvclive/params.yaml").read_text()]))
    """
    losses, metrics, params = log_and_read(
        tmp_path, "dvclive", read, "{'save_dvc_exp': False, 'dvcyaml': None}"
    )
    assert losses == "step\tloss\n0\t0.5\n1\t0.25\n"
    assert metrics == {"loss": 0.25, "acc": 0.25, "note": "good", "deep": {"x": 7}, "step": 1}
    assert params == "lr: 0.125\n'7':\n  '8': torch.bfloat16\ndeep:\n  a: 1\napi_key: '***'\n"


def test_swanlab_writes_an_offline_run(tmp_path):
    read = """
    import json
    from pathlib import Path
    (run,) = Path("swanlog").glob("run-*")
    (record,) = run.glob("*.swanlab")
    config = "".join(path.read_text() for path in (run / "files").glob("config*"))
    data = record.read_bytes()
    print(json.dumps([[name for name in ("loss", "acc", "deep/x") if name.encode() in data], config]))
    """
    more = "tracker.log_images({'face': [image]}, step=2)"
    names, config = log_and_read(
        tmp_path, "swanlab", read, "{'mode': 'offline'}", more=more, HOME=str(tmp_path)
    )
    assert names == ["loss", "acc", "deep/x"]
    assert "0.125" in config


def test_trackio_stores_values_and_configuration(tmp_path):
    read = """
    import json, sqlite3
    from pathlib import Path
    with sqlite3.connect("trackio/project.db") as base:
        metrics = [(step, json.loads(text)) for step, text in base.execute("SELECT step, metrics FROM metrics")]
        configs = [json.loads(text) for (text,) in base.execute("SELECT config FROM configs")]
    print(json.dumps([metrics, configs]))
    """
    metrics, configs = log_and_read(
        tmp_path,
        "trackio",
        read,
        "{'embed': False}",
        TRACKIO_DIR=str(tmp_path / "trackio"),
        HOME=str(tmp_path),
    )
    expected = {"acc": 0.25, "note": "good", "none": None, "deep": {"x": 7}}
    assert metrics == [[0, {"loss": 0.5, **expected}], [1, {"loss": 0.25, **expected}]]
    assert configs[0]["lr"] == 0.125
    assert configs[0]["api_key"] == "***"
