import os
from dataclasses import replace

import pytest
from support.launchers import plans

from accel_cli.errors import ProfileError, UsageError
from accel_cli.extensions.xla.tpu import Packages, Tpu, XlaDevices
from accel_cli.planning.launch_options import Request
from accel_cli.planning.machine import Machine
from accel_cli.profile import planner
from accel_cli.profile.store import write

CPU = Machine(8)
GPUS = Machine(8, "cuda", ("H100",) * 4)
CHIPS, PAIR = Tpu(("TPU v4",) * 4, "PCI"), Packages("2.9.0", "2.9.0", "0.0.21")
HOST = replace(CHIPS, hosts=("t0", "t1"), worker="1", hosts_source="TPU_WORKER_*")
TPU = Machine(8, others=(XlaDevices(CHIPS, PAIR),))
POD = Machine(8, others=(XlaDevices(HOST, PAIR),))


def resolved(machine=CPU, **request):
    return planner.resolve(Request("x.py", options=request), os.environ, machine)


def test_the_machine_selects_the_launcher_without_a_profile(cwd):
    assert resolved().profile.launcher.kind == "single"
    assert resolved(GPUS).profile.launcher.kind == "torchrun"
    assert resolved(GPUS).get_source("launcher.kind") == "detected"


def test_the_launcher_of_the_profile_overrides_the_machine(cwd, home):
    write(home / "profiles" / "default.yaml", "schema_version: 1\nlauncher:\n  kind: single\n")
    assert resolved(GPUS).profile.launcher.kind == "single"


def test_several_processes_select_torchrun(cwd):
    launcher = resolved(nproc_per_node="2").profile.launcher
    assert (launcher.kind, launcher.nproc_per_node) == ("torchrun", 2)


def test_one_process_keeps_single(cwd):
    assert resolved(nproc_per_node="1", nnodes="1").profile.launcher.kind == "single"


def test_options_are_the_source_of_their_values(cwd):
    resolved_profile = resolved(nproc_per_node="2", mixed_precision="bf16", cpu=True)
    keys = ("launcher.nproc_per_node", "mixed_precision", "device")
    assert [resolved_profile.get_source(key) for key in keys] == [
        "--nproc-per-node",
        "--mixed-precision",
        "--cpu",
    ]


@pytest.mark.parametrize("count", ["0", "-1", "two", "1.5", ""])
def test_an_invalid_number_of_processes_is_an_error(cwd, count):
    with pytest.raises(
        ProfileError,
        match=r"--nproc-per-node: launcher\.nproc_per_node: expected (a whole number|at least 1) or auto",
    ):
        resolved(nproc_per_node=count)


def test_two_nodes_need_a_rendezvous_endpoint(cwd):
    with pytest.raises(ProfileError, match="rdzv_endpoint"):
        resolved(nnodes="2")


def test_one_process_is_kept_with_torchrun_from_an_assignment(cwd):
    launcher = resolved(CPU, set=("launcher.kind=torchrun",), nproc_per_node="1").profile.launcher
    assert (launcher.kind, launcher.nproc_per_node) == ("torchrun", 1)


def test_several_processes_of_single_from_an_assignment_are_an_error(cwd):
    with pytest.raises(
        ProfileError, match=r"launcher\.nproc_per_node: this key belongs to launcher\.kind: torchrun"
    ):
        resolved(set=("launcher.kind=single",), nproc_per_node="2")


def test_an_assignment_and_an_option_of_one_section_are_both_used(cwd):
    launcher = resolved(set=("launcher.max_restarts=3",), nproc_per_node="2").profile.launcher
    assert (launcher.max_restarts, launcher.nproc_per_node) == (3, 2)


def test_options_that_need_an_agent_select_torchrun_without_a_given_launcher():
    launcher = resolved(CPU, stall_timeout=1).profile.launcher
    assert (launcher.kind, launcher.nproc_per_node, launcher.stall_timeout) == ("torchrun", 1, 1)
    launcher = resolved(CPU, nproc_per_node="3", shutdown_timeout=5).profile.launcher
    assert (launcher.kind, launcher.nproc_per_node, launcher.shutdown_timeout) == ("torchrun", 3, 5)
    with pytest.raises(
        ProfileError, match=r"launcher\.stall_timeout: this key belongs to launcher\.kind: torchrun"
    ):
        resolved(CPU, set=("launcher.kind=single",), stall_timeout=1)


STEP = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_NODEID": "0",
}  # fmt: skip


def test_values_of_a_scheduler_override_files_and_not_options(cwd, home, monkeypatch):
    write(home / "profiles" / "default.yaml", "schema_version: 1\nlauncher:\n  kind: torchrun\n  nnodes: 1\n")
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    resolved_profile = resolved(rdzv_endpoint="other:1")
    launcher = resolved_profile.profile.launcher
    assert (launcher.nnodes, launcher.rdzv_endpoint, launcher.rdzv_id) == (2, "other:1", "7.0")
    assert resolved_profile.get_source("launcher.nnodes") == "SLURM_* (step 7.0)"
    assert resolved_profile.get_source("launcher.rdzv_endpoint") == "--rdzv-endpoint"


def test_ranks_that_are_already_started_run_one_process(cwd, home, monkeypatch):
    write(
        home / "profiles" / "default.yaml",
        "schema_version: 1\nlauncher:\n  kind: torchrun\n  nproc_per_node: 4\n",
    )
    placed = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}  # fmt: skip
    for name, value in placed.items():
        monkeypatch.setenv(name, value)
    assert resolved(mixed_precision="bf16").profile.launcher.kind == "single"
    assert resolved(mixed_precision="bf16").profile.mixed_precision == "bf16"


def test_one_restart_selects_torchrun(cwd):
    assert resolved(max_restarts=1).profile.launcher.max_restarts == 1


@pytest.mark.parametrize(
    ("request_", "environ", "message"),
    [
        ({"resume": True}, {}, "--resume"),
        ({"set": ("resume=true",)}, {}, "--set"),
        ({}, {"ACCEL_RESUME": "1"}, "environment: ACCEL_RESUME"),
    ],
    ids=["option", "assignment", "variable"],
)
def test_resume_is_an_option_a_key_and_a_variable(cwd, request_, environ, message):
    request = Request("x.py", options={**request_, "cpu": True})
    resolved_profile, plan = plans.prepare(request, environ, CPU)
    assert plan.env["ACCEL_RESUME"] == "1"
    assert resolved_profile.get_source("resume") == message


def test_resume_is_off_by_default(cwd):
    assert planned(CPU).env["ACCEL_RESUME"] == "0"


# A TPU.


def planned(machine, environ=None, **request):
    environ = {"ACCEL_HOME": os.environ["ACCEL_HOME"], **(environ or {})}
    return plans.prepare(Request("x.py", options=request), environ, machine)[1]


def test_a_tpu_selects_xla_unless_another_device_is_set(cwd):
    assert resolved(TPU).profile.launcher.kind == "xla"
    assert resolved(TPU).get_source("launcher.kind") == "detected"
    assert resolved(TPU, set=("device=cpu",)).profile.launcher.kind == "single"


def test_a_tpu_without_its_packages_is_an_error_with_the_install_command(cwd):
    with pytest.raises(
        UsageError, match=r"torch_xla is not installed\. .* install 'torch-xla\[tpu\]==2.9.0' torch==2.9.0"
    ):
        planned(Machine(8, others=(XlaDevices(CHIPS, Packages(None, "2.13.0")),)))


def test_the_first_host_of_a_pod_is_the_rendezvous_and_hosts_keep_their_ranks(cwd):
    plan = planned(POD)
    assert (plan.nnodes, plan.agent.rdzv_endpoint, plan.agent.node_rank) == (2, "t0:29400", 1)
    assert plan.node_summary == "TPU_WORKER_*: nnodes 2, rdzv_endpoint t0:29400, node_rank 1"
    assert not plan.agent.is_single_node


def test_a_tpu_of_one_host_is_a_single_node(cwd):
    single_host = Machine(
        8,
        others=(
            XlaDevices(replace(CHIPS, hosts=("localhost",), worker="0", hosts_source="TPU_WORKER_*"), PAIR),
        ),
    )
    assert (planned(single_host).nnodes, planned(single_host).node_summary) == (1, "")


def test_options_set_the_endpoint_of_a_pod_and_must_not_contradict_it(cwd):
    assert planned(POD, rdzv_endpoint="t0:5000").agent.rdzv_endpoint == "t0:5000"
    with pytest.raises(UsageError, match="--nnodes 3 contradicts TPU_WORKER"):
        planned(POD, nnodes="3")
    with pytest.raises(UsageError, match="--node-rank 0 contradicts TPU_WORKER"):
        planned(POD, node_rank=0)


@pytest.mark.parametrize("worker", ["", "2", "x"])
def test_a_host_of_a_pod_without_a_rank_is_an_error(cwd, worker):
    with pytest.raises(UsageError, match="TPU_WORKER_ID"):
        planned(Machine(8, others=(XlaDevices(replace(HOST, worker=worker), PAIR),)))


def test_several_tpu_slices_are_an_error(cwd):
    with pytest.raises(UsageError, match="Cannot use several TPU slices in one run: MEGASCALE_NUM_SLICES=2"):
        planned(TPU, {"MEGASCALE_NUM_SLICES": "2"})


def test_other_launchers_ignore_the_hosts_of_a_tpu(cwd):
    plan = planned(POD, set=("launcher.kind=single", "device=cpu"))
    assert (plan.launcher, plan.nnodes) == ("single", 1)


def test_xla_ignores_the_variables_of_schedulers(cwd):
    step = {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_NODEID": "0",
    }
    assert planned(TPU, step).nnodes == 1


def test_ranks_is_valid_if_another_option_selects_torchrun(cwd):
    assert resolved(ranks="all", shutdown_timeout=5).profile.launcher.ranks == "all"
    with pytest.raises(UsageError, match=r"--ranks needs launcher\.kind: torchrun"):
        resolved(ranks="all")


def test_the_library_of_sagemaker_is_valid_in_a_container_that_has_it(cwd, tmp_path, monkeypatch):
    (tmp_path / "image" / "smdistributed").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path / "image"))
    plan = planned(GPUS, set=("launcher.kind=torchrun", "process_group_backend=smddp"))
    assert plan.env["ACCEL_PROCESS_GROUP_BACKEND"] == "smddp"


def test_sagemaker_accepts_its_library_with_an_image_that_has_it(cwd):
    (cwd / "x.py").touch()
    message = ("launcher.kind=sagemaker", "process_group_backend=smddp", "launcher.image_uri=mine")
    settings = planned(CPU, set=message).job.run["settings"]
    assert settings["ACCEL_PROCESS_GROUP_BACKEND"] == "smddp"
