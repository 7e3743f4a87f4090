"""An imitation of the command `sky`: it runs a task on this machine, and answers as SkyPilot 0.14 does.

Each cluster, and each managed job, is a folder below `SKY_FOLDER`, with a record as `sky status --output json` prints it. The task runs in a
process for each node with the variables of SkyPilot; `PRICE` is the cost of a node per hour. `preempt` is what a cloud does to a managed job.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(os.environ.get("SKY_FOLDER", "/nonexistent"))
PRICE = 32.77
CODES = {"SUCCEEDED": 0, "FAILED": 100, "CANCELLED": 103}


def launch(*words):
    import yaml  # the other verbs do not need it, and start often

    options, file = words[:-1], Path(words[-1])
    task = yaml.safe_load(file.read_text())
    is_managed = "--name" in options
    cluster = FOLDER / options[options.index("--name" if is_managed else "--cluster") + 1]
    if unknown := task.keys() - {
        "name",
        "num_nodes",
        "resources",
        "envs",
        "workdir",
        "setup",
        "run",
        "file_mounts",
    }:
        sys.exit(f"Invalid task YAML: {unknown}")
    cluster.mkdir()
    secrets = {
        options[index + 1]: os.environ[options[index + 1]]
        for index, word in enumerate(options)
        if word == "--secret"
    }
    record = {
        "name": cluster.name, "launched_at": int(time.time()) + len([*FOLDER.iterdir()]), "status": "UP", "nodes": task["num_nodes"], "cloud": "AWS",
        "is_managed": is_managed, "recovery_count": 0, "region": "us-east-1", "resources_str": f"{task['num_nodes']}x(cpus=8)", "labels": task["resources"].get("labels"),
        "init_status_reason": None, "accelerators": None,
    }  # fmt: skip
    (cluster / "status.json").write_text(json.dumps(record))
    (cluster / "options.json").write_text(json.dumps(options))
    environ = {**os.environ, **secrets, **task["envs"], "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
               "SKYPILOT_NODE_IPS": "\n".join(["127.0.0.1"] * task["num_nodes"]), "SKYPILOT_NODE_RANK": "0",
               "SKYPILOT_TASK_ID": f"sky-{cluster.name}"}  # fmt: skip
    source = cluster / "source"
    shutil.copytree(task["workdir"], source) if "workdir" in task else source.mkdir()
    (cluster / "start.json").write_text(json.dumps({"run": task["run"], "environ": environ}))
    start(cluster)
    print("Managed Job ID: 1" if is_managed else "Job submitted, ID: 1")


def start(cluster):
    """Start the task in a new working directory, as on new nodes."""
    wanted = json.loads((cluster / "start.json").read_text())
    workdir = cluster / f"workdir{len([*cluster.glob('workdir*')])}"
    shutil.copytree(cluster / "source", workdir)
    code = [sys.executable, __file__, "run", str(cluster), wanted["run"]]
    with (cluster / "log").open("ab") as log:
        subprocess.Popen(
            code, cwd=workdir, env=wanted["environ"], stdout=log, stderr=log, start_new_session=True
        )
    while not (cluster / "pid").exists():
        time.sleep(0.01)


def preempt(cluster):
    """End the nodes of a managed job without notice, and start it again on others, as SkyPilot does."""
    pid = int((cluster / "pid").read_text())
    (cluster / "pid").unlink()
    os.killpg(os.getpgid(pid), signal.SIGKILL)
    record = json.loads((cluster / "status.json").read_text())
    (cluster / "status.json").write_text(
        json.dumps({**record, "recovery_count": record["recovery_count"] + 1})
    )
    subprocess.run([sys.executable, __file__, "start", cluster], check=True)


def run(cluster, script):
    process = subprocess.Popen(["bash", "-c", script])
    Path(cluster, "pid.new").write_text(str(process.pid))
    Path(cluster, "pid.new").rename(Path(cluster, "pid"))
    code = process.wait()
    if code:
        print(f"ERROR: \x1b[31mJob 1 failed with return code list:\x1b[0m [{code}, 137] ", flush=True)
    Path(cluster, "code.new").write_text(str(code))
    Path(cluster, "code.new").rename(Path(cluster, "code"))


def status(*names):
    for name in names:
        if not (FOLDER / name).exists():
            print(f"Cluster(s) not found: \x1b[1m{name}\x1b[0m.")
    clusters = [path for path in sorted(FOLDER.iterdir()) if not names or path.name in names]
    records = [json.loads((path / "status.json").read_text()) for path in clusters]
    print(json.dumps([record for record in records if not record["is_managed"]], indent=2))


def find_state(name):
    code = FOLDER / name / "code"
    return "RUNNING" if not code.exists() else "FAILED" if int(code.read_text()) else "SUCCEEDED"


def queue(name):
    print(f"Fetching job queue for: {name}")
    record = {
        "job_id": 1,
        "status": find_state(name),
        "start_at": time.time() - 5,
        "end_at": None,
        "metadata": {},
    }
    print(json.dumps({name: [record]}, indent=2))


def list_managed():
    records = [json.loads((path / "status.json").read_text()) for path in sorted(FOLDER.iterdir())]
    print("Fetching managed job statuses...")
    print(
        json.dumps(
            [
                {
                    "job_id": 1, "job_name": each["name"], "status": find_state(each["name"]), "recovery_count": each["recovery_count"],
                    "submitted_at": each["launched_at"], "start_at": each["launched_at"], "job_duration": 5.0, "cloud": "AWS",
                    "region": "us-east-1", "cluster_resources": each["resources_str"], "failure_reason": None,
                }
                for each in records
                if each["is_managed"]
            ],
            indent=2,
        )
    )  # fmt: skip


def report():
    records = [json.loads((path / "status.json").read_text()) for path in FOLDER.iterdir()]
    costs = [
        {"name": each["name"], "status": "UP", "duration": 60, "total_cost": PRICE * each["nodes"] / 60}
        for each in records
    ]
    print(json.dumps(costs, indent=2))


def logs(name):
    log, position = FOLDER / name / "log", 0
    while True:
        state = find_state(name)
        with log.open("rb") as file:
            file.seek(position)
            data = file.read()
        position += len(data)
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        if state in CODES:
            sys.exit(CODES[state])
        time.sleep(0.05)


def down(name):
    if not (FOLDER / name).exists():
        print(f"Cluster(s) not found: {name}.")
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(os.getpgid(int((FOLDER / name / "pid").read_text())), signal.SIGKILL)
    shutil.rmtree(FOLDER / name)


def install(folder, monkeypatch):
    """Put the command into the PATH, with its clusters in a folder."""
    (folder / "clusters").mkdir()
    command = folder / "sky"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} "$@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("SKY_FOLDER", str(folder / "clusters"))
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder / "clusters"


if __name__ == "__main__":
    verb, *rest = sys.argv[1:]
    if verb == "jobs":
        verb, *rest = rest
        verb = {"launch": "launch", "queue": "jobs queue", "logs": "logs", "cancel": "down"}[verb]
    names = [
        word
        for word in rest
        if word not in {"--output", "json", "--yes", "--tail", "0", "50", "--name", "--all"}
    ]
    verbs = {"launch": lambda: launch(*rest), "start": lambda: start(Path(*rest)), "run": lambda: run(*rest), "status": lambda: status(*names),
             "queue": lambda: queue(*names), "jobs queue": list_managed, "cost-report": report, "logs": lambda: logs(*names), "down": lambda: down(*names)}  # fmt: skip
    verbs[verb]()
