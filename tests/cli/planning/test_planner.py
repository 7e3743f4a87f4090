import os
from dataclasses import replace

import pytest

from accel_cli.errors import ProfileError, UsageError
from accel_cli.planning import planner
from accel_cli.planning.machine import Machine, Packages, Tpu
from accel_cli.planning.options import Request
from accel_cli.planning.planner import check_target
from accel_cli.profile.store import write

CPU = Machine(8)
GPUS = Machine(8, "cuda", ("H100",) * 4)
TPU = Machine(8, tpu=Tpu(("TPU v4",) * 4, "PCI"), packages=Packages("2.9.0", "2.9.0", "0.0.21"))
POD = replace(TPU, tpu=replace(TPU.tpu, hosts=("t0", "t1"), worker="1", hosts_source="TPU_WORKER_*"))


def resolved(machine=CPU, **request):
    return planner.resolve(Request("x.py", options=request), os.environ, machine)


def test_without_a_profile_the_machine_decides(cwd):
    assert resolved().profile.launcher.kind == "single"
    assert resolved(GPUS).profile.launcher.kind == "torchrun"
    assert resolved(GPUS).get_source("launcher.kind") == "detected"


def test_a_profile_that_names_a_launcher_is_not_overruled_by_the_machine(cwd, home):
    write(home / "profiles" / "default.yaml", "schema_version: 1\nlauncher:\n  kind: single\n")
    assert resolved(GPUS).profile.launcher.kind == "single"


def test_asking_for_several_processes_chooses_the_launcher_that_counts(cwd):
    launcher = resolved(nproc_per_node="2").profile.launcher
    assert (launcher.kind, launcher.nproc_per_node) == ("torchrun", 2)


def test_asking_for_one_process_of_single_changes_nothing(cwd):
    assert resolved(nproc_per_node="1", nnodes="1").profile.launcher.kind == "single"


def test_options_are_named_as_the_source(cwd):
    found = resolved(nproc_per_node="2", mixed_precision="bf16", cpu=True)
    keys = ("launcher.nproc_per_node", "mixed_precision", "device")
    assert [found.get_source(key) for key in keys] == ["--nproc-per-node", "--mixed-precision", "--cpu"]


@pytest.mark.parametrize("count", ["0", "-1", "two", "1.5", ""])
def test_a_number_of_processes_that_is_none_is_refused(cwd, count):
    with pytest.raises(
        ProfileError,
        match=r"--nproc-per-node: launcher\.nproc_per_node: expected (a whole number|at least 1) or auto",
    ):
        resolved(nproc_per_node=count)


def test_two_machines_need_a_place_to_meet(cwd):
    with pytest.raises(ProfileError, match="rdzv_endpoint"):
        resolved(nnodes="2")


@pytest.mark.parametrize(
    ("target", "kind", "said"),
    [
        ("gone.py", "script", "Script not found: gone.py. Check its path."),
        ("trian.py", "script", "Did you mean train.py?"),
        (".", "script", "Cannot run .: it is a directory"),
        ("no_such_module_x", "module", "Module not found: 'no_such_module_x'"),
        ("no-such-program-x", "program", "Program not found: 'no-such-program-x'"),
        ("", "script", "is a directory"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(cwd, target, kind, said):
    (cwd / "train.py").write_text("")
    with pytest.raises(UsageError) as caught:
        check_target(target, kind)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("target", "kind"),
    [("train.py", "script"), ("json.tool", "module"), ("train", "module"), ("sh", "program")],
)
def test_what_can_run_is_let_through(cwd, target, kind):
    (cwd / "train.py").write_text("")
    check_target(target, kind)


def test_a_script_that_is_a_pipe_is_for_one_process_and_is_not_opened_here(cwd):
    os.mkfifo("pipe.py")
    check_target("pipe.py", "script")  # to open it would wait for who writes
    planner.prepare(Request("pipe.py", options={"cpu": True}), os.environ)
    with pytest.raises(
        UsageError,
        match=r"Cannot run pipe.py in several processes: it is a pipe, which only one can read\. Save it",
    ):
        planner.prepare(Request("pipe.py", options={"cpu": True, "nproc_per_node": "2"}), os.environ)


def test_one_process_of_a_launcher_chosen_on_the_command_line_is_one(cwd):
    launcher = resolved(CPU, set=("launcher.kind=torchrun",), nproc_per_node="1").profile.launcher
    assert (launcher.kind, launcher.nproc_per_node) == ("torchrun", 1)


def test_asking_for_several_of_a_launcher_that_gives_one_is_refused(cwd):
    with pytest.raises(
        ProfileError, match=r"launcher\.nproc_per_node: this key belongs to launcher\.kind: torchrun"
    ):
        resolved(set=("launcher.kind=single",), nproc_per_node="2")


def test_an_assignment_and_an_option_of_one_section_are_both_heard(cwd):
    launcher = resolved(set=("launcher.max_restarts=3",), nproc_per_node="2").profile.launcher
    assert (launcher.max_restarts, launcher.nproc_per_node) == (3, 2)


def test_what_needs_a_launcher_beside_the_process_gets_one_where_nobody_named_another():
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


def test_a_scheduler_stands_above_files_and_below_options(cwd, home, monkeypatch):
    write(home / "profiles" / "default.yaml", "schema_version: 1\nlauncher:\n  kind: torchrun\n  nnodes: 1\n")
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    found = resolved(rdzv_endpoint="other:1")
    launcher = found.profile.launcher
    assert (launcher.nnodes, launcher.rdzv_endpoint, launcher.rdzv_id) == (2, "other:1", "7.0")
    assert found.get_source("launcher.nnodes") == "SLURM_* (step 7.0)"
    assert found.get_source("launcher.rdzv_endpoint") == "--rdzv-endpoint"


def test_where_ranks_are_started_already_the_profile_starts_one_process(cwd, home, monkeypatch):
    write(
        home / "profiles" / "default.yaml",
        "schema_version: 1\nlauncher:\n  kind: torchrun\n  nproc_per_node: 4\n",
    )
    placed = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}  # fmt: skip
    for name, value in placed.items():
        monkeypatch.setenv(name, value)
    assert resolved(mixed_precision="bf16").profile.launcher.kind == "single"
    assert resolved(mixed_precision="bf16").profile.mixed_precision == "bf16"


def test_one_restart_is_not_the_same_as_none(cwd):
    assert resolved(max_restarts=1).profile.launcher.max_restarts == 1


@pytest.mark.parametrize("kind", ["single", "torchrun", "slurm"])
@pytest.mark.parametrize(
    ("request_", "environ", "said"),
    [
        ({"resume": True}, {}, "--resume"),
        ({"set": ("resume=true",)}, {}, "--set"),
        ({}, {"ACCEL_RESUME": "1"}, "environment: ACCEL_RESUME"),
    ],
    ids=["option", "assignment", "variable"],
)
def test_going_on_reaches_the_processes_of_every_launcher_and_has_a_source(
    cwd, kind, request_, environ, said
):
    assigned = (f"launcher.kind={kind}", *request_.get("set", ()))
    request = Request("x.py", options={**request_, "set": assigned, "cpu": True})
    found, plan = planner.prepare(request, environ, CPU)
    assert plan.env["ACCEL_RESUME"] == "1"
    assert found.get_source("resume") == said


def test_a_run_begins_anew_unless_it_is_told_otherwise(cwd):
    assert planned(CPU).env["ACCEL_RESUME"] == "0"


# A TPU.


def planned(machine, environ=None, **request):
    environ = {"ACCEL_HOME": os.environ["ACCEL_HOME"], **(environ or {})}
    return planner.prepare(Request("x.py", options=request), environ, machine)[1]


def test_a_tpu_decides_unless_another_device_is_asked_for(cwd):
    assert resolved(TPU).profile.launcher.kind == "xla"
    assert resolved(TPU).get_source("launcher.kind") == "detected"
    assert resolved(TPU, set=("device=cpu",)).profile.launcher.kind == "single"


def test_a_tpu_that_cannot_be_used_is_refused_with_the_command_that_installs_what_is_missing(cwd):
    with pytest.raises(
        UsageError, match=r'torch_xla is not installed. Run pip install "accel-runtime\[tpu\]"'
    ):
        planned(replace(TPU, packages=Packages(None, "2.13.0")))


@pytest.mark.parametrize("count", ["2", "8"])
def test_another_number_of_processes_than_all_or_one_is_refused_with_the_reason(cwd, count):
    with pytest.raises(ProfileError, match="expected all or 1: torch_xla starts a replica on every device"):
        resolved(TPU, nproc_per_node=count)


def test_hosts_of_a_pod_meet_at_the_first_of_them_under_their_own_numbers(cwd):
    plan = planned(POD)
    assert (plan.nnodes, plan.agent.rdzv_endpoint, plan.agent.node_rank) == (2, "t0:29400", 1)
    assert plan.node_summary == "TPU_WORKER_*: nnodes 2, rdzv_endpoint t0:29400, node_rank 1"
    assert not plan.agent.is_single_node


def test_a_tpu_of_one_host_meets_nobody(cwd):
    one = replace(TPU, tpu=replace(TPU.tpu, hosts=("localhost",), worker="0", hosts_source="TPU_WORKER_*"))
    assert (planned(one).nnodes, planned(one).node_summary) == (1, "")


def test_an_option_moves_the_meeting_place_of_a_pod_and_may_not_contradict_it(cwd):
    assert planned(POD, rdzv_endpoint="t0:5000").agent.rdzv_endpoint == "t0:5000"
    with pytest.raises(UsageError, match="--nnodes 3 contradicts TPU_WORKER"):
        planned(POD, nnodes="3")
    with pytest.raises(UsageError, match="--node-rank 0 contradicts TPU_WORKER"):
        planned(POD, node_rank=0)


@pytest.mark.parametrize("worker", ["", "2", "x"])
def test_a_host_of_a_pod_without_a_number_of_its_own_is_refused(cwd, worker):
    with pytest.raises(UsageError, match="TPU_WORKER_ID"):
        planned(replace(POD, tpu=replace(POD.tpu, worker=worker)))


def test_several_slices_are_refused(cwd):
    with pytest.raises(UsageError, match="Cannot use several TPU slices in one run: MEGASCALE_NUM_SLICES=2"):
        planned(TPU, {"MEGASCALE_NUM_SLICES": "2"})


def test_hosts_of_a_tpu_do_not_concern_launchers_of_other_devices(cwd):
    plan = planned(POD, set=("launcher.kind=single", "device=cpu"))
    assert (plan.launcher, plan.nnodes) == ("single", 1)


def test_a_scheduler_does_not_say_what_hosts_a_tpu_has(cwd):
    step = {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_NODEID": "0",
    }
    assert planned(TPU, step).nnodes == 1


@pytest.mark.parametrize("kind", ["slurm", "sagemaker"])
def test_a_number_of_this_machine_is_refused_where_the_script_runs_elsewhere(cwd, kind):
    with pytest.raises(UsageError, match=f"Cannot use --node-rank with launcher.kind: {kind}"):
        resolved(set=(f"launcher.kind={kind}",), node_rank=1)


def test_whose_output_is_shown_can_be_said_where_an_option_brings_a_launcher_that_shows_it(cwd):
    assert resolved(ranks="all", shutdown_timeout=5).profile.launcher.ranks == "all"
    with pytest.raises(UsageError, match=r"--ranks needs launcher\.kind: torchrun"):
        resolved(ranks="all")


@pytest.mark.parametrize("kind", ["single", "torchrun", "slurm", "xla"])
def test_the_library_of_sagemakers_images_is_for_sagemaker(cwd, kind):
    with pytest.raises(
        UsageError,
        match=r"'smddp': only images of SageMaker have this library\. Use auto, or launcher\.kind: sagemaker",
    ):
        planned(GPUS, set=(f"launcher.kind={kind}", "process_group_backend=smddp"))


def test_a_container_that_has_the_library_of_sagemaker_may_use_it(cwd, tmp_path, monkeypatch):
    (tmp_path / "image" / "smdistributed").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path / "image"))
    plan = planned(GPUS, set=("launcher.kind=torchrun", "process_group_backend=smddp"))
    assert plan.env["ACCEL_PROCESS_GROUP_BACKEND"] == "smddp"


def test_sagemaker_takes_the_library_with_an_image_that_has_it(cwd):
    (cwd / "x.py").touch()
    said = ("launcher.kind=sagemaker", "process_group_backend=smddp", "launcher.image_uri=mine")
    settings = planned(CPU, set=said).job.run["settings"]
    assert settings["ACCEL_PROCESS_GROUP_BACKEND"] == "smddp"
