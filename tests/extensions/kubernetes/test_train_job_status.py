"""The status of a TrainJob: what is sent to the controller of Kubeflow Trainer, over TLS, and a server that refuses it."""

import os
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from kubeflow_trainer_api import models
from support.processes.commands import run_accel
from support.processes.trainer_controller import check, serve_controller, write_certificate
from support.processes.waits import wait_until

from accel_cli.extensions.kubernetes.train_job_status import TrainJobStatus, build_status
from accel_cli.runs.goodput import Goodput
from accel_cli.runs.progress import Health, RunProgress

URL, CERTIFICATE, TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN"))
OTHER = "DISABLE_KUBEFLOW_INTEGRATION"


@given(
    st.builds(
        RunProgress,
        time=st.floats(1e9, 3e9),
        run=st.just("run"),
        state=st.sampled_from(["starting", "running", "stalled", "succeeded", "failed", "stopped"]),
        steps=st.integers(0, 10**12),
        fraction=st.none() | st.floats(0, 1),
        eta_s=st.none() | st.floats(0),
        steps_per_s=st.none() | st.floats(0, 1e9),
        metrics=st.dictionaries(st.text(max_size=200), st.floats(), max_size=5)
        | st.just({f"m{number}": 1.0 for number in range(300)}),
        goodput=st.none() | st.just(Goodput(10.0, 5.0)),
    )
)
def test_any_progress_is_a_status_that_the_controller_accepts(progress):
    check({"trainerStatus": build_status(progress)})


def test_the_status_has_the_percentage_the_time_and_the_metrics():
    progress = RunProgress(
        1_800_000_000.0, "run", "running", steps=450, fraction=0.459, eta_s=119.6, steps_per_s=3.25,
        metrics={"train/loss": 0.123456789}, health=Health(restarts=1),
    )  # fmt: skip
    assert build_status(progress) == {
        "lastUpdatedTime": "2027-01-15T08:00:00Z",
        "progressPercentage": 45,
        "estimatedRemainingSeconds": 120,
        "metrics": [
            {"name": "accel/steps", "value": "450"},
            {"name": "accel/steps_per_second", "value": "3.25"},
            {"name": "accel/restarts", "value": "1"},
            {"name": "train/loss", "value": "0.123457"},
        ],
    }
    done = build_status(RunProgress(1_800_000_000.0, "run", "succeeded", exit_code=0))
    assert (done["progressPercentage"], done["estimatedRemainingSeconds"]) == (100, 0)


@pytest.fixture
def controller(tmp_path, monkeypatch):
    folder = tmp_path / "controller"
    folder.mkdir()
    monkeypatch.delenv(OTHER, raising=False)
    with serve_controller(folder) as controller:
        for name, value in controller.environ.items():
            monkeypatch.setenv(name, value)
        yield controller


RUNNING = RunProgress(1_800_000_000.0, "run", "running", fraction=0.5)


def test_the_token_is_read_again_for_each_request(controller):
    sink = TrainJobStatus.create(None, os.environ)
    sink.write(RUNNING)
    controller.token = "second"
    (controller.folder / "token").write_text("second")
    sink.write(RUNNING)
    assert [status["progressPercentage"] for status in controller.statuses] == [50, 50]


def test_a_refusal_is_an_error_that_may_pass_and_has_the_message_of_the_server(controller):
    sink = TrainJobStatus.create(None, os.environ)
    controller.message = "metrics[0].value: too long"
    with pytest.raises(
        OSError, match=r"^the server of Kubeflow Trainer answered 422: metrics\[0\].value: too long$"
    ):
        sink.write(RUNNING)
    controller.token = "other"
    with pytest.raises(OSError, match="answered 403: Forbidden"):
        sink.write(RUNNING)


def test_a_server_with_another_certificate_gets_no_token(controller):
    write_certificate(controller.folder)
    sink = TrainJobStatus.create(None, os.environ)
    with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
        sink.write(RUNNING)
    assert controller.statuses == []


@pytest.mark.parametrize(
    ("changes", "is_on"),
    [
        ({}, True),
        ({URL: ""}, False),
        ({TOKEN: ""}, False),
        ({OTHER: "TRUE"}, True),
        ({OTHER: "false"}, False),
    ],
)
def test_the_variables_of_the_pod_switch_the_reports_on_unless_a_trainer_shall_report(changes, is_on):
    environ = {URL: "https://x", CERTIFICATE: "c", TOKEN: "t", **changes}
    assert (TrainJobStatus.create(None, environ) is not None) == is_on


SCRIPT = """
import os, time
import torch
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
for step in range(20):
    optimizer.param_groups[0]["params"][0].sum().backward()
    optimizer.step()
    time.sleep(0.02)
print("other reporter off:", os.environ.get("DISABLE_KUBEFLOW_INTEGRATION"), flush=True)
"""


@pytest.mark.smoke
def test_any_script_reports_its_steps_and_its_end(controller, script):
    script(SCRIPT)
    done = run_accel("launch", "--no-profile", "--cpu", "--nproc-per-node", 2, "train.py", "--max-steps", 20)
    assert (done.returncode, done.stdout) == (0, "other reporter off: TRUE\n"), done.stderr
    assert "sink" not in done.stderr
    wait_until(lambda: controller.statuses)
    last = controller.statuses[-1]
    assert (last["progressPercentage"], last["estimatedRemainingSeconds"]) == (100, 0)
    assert {"name": "accel/steps", "value": "20"} in last["metrics"]


RUNTIME = Path(__file__).parents[3] / "configs" / "kubeflow" / "cluster-training-runtime.yaml"


@pytest.mark.smoke
def test_the_runtime_of_configs_runs_the_script_that_a_train_job_names(script, monkeypatch):
    runtime = yaml.safe_load(RUNTIME.read_text())
    parsed = models.TrainerV1alpha1ClusterTrainingRuntime.from_dict(runtime)
    assert parsed.to_dict() == runtime, "the models leave out unknown names"
    (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert job["name"] == "node"
    pod = job["template"]["spec"]["template"]["spec"]
    manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod}
    kubernetes_validate.validate(manifest, "1.31", strict=True)
    (container,) = pod["containers"]
    python, *command = container["command"]
    assert (python, command[:2]) == ("python", ["-m", "accel_cli"])
    # What Trainer sets in the first pod of one.
    for name, value in {"NNODES": 1, "NPROC_PER_NODE": 2, "NODE_RANK": 0, "MASTER_ADDR": "run-node-0-0.run", "MASTER_PORT": 29400}.items():  # fmt: skip
        monkeypatch.setenv(f"PET_{name}", str(value))
    script("import os, sys; print(os.environ['WORLD_SIZE'], sys.argv[1:])")
    done = run_accel(*command[2:], "--set", "device=cpu", "train.py", "--epochs", "3")
    assert (done.returncode, done.stdout) == (0, "2 ['--epochs', '3']\n"), done.stderr
