"""The choice of GPUs by `gpu_ids`, through the variable of their vendor."""

from dataclasses import replace

import pytest
from support.launchers.plans import prepare

from accel_cli.errors import UsageError
from accel_cli.launchers.launcher import GPU_VARIABLES, LaunchSpec
from accel_cli.launchers.single import Single
from accel_cli.launchers.torchrun import Torchrun
from accel_cli.planning import machine
from accel_cli.planning.launch_options import Request
from accel_cli.planning.machine import Machine
from accel_cli.profile.schema import Profile
from accel_runtime.environment.settings import Settings

CUDA = "CUDA_VISIBLE_DEVICES"
GPUS = Machine(cpus=8, accelerator="cuda", devices=("A", "B", "C", "D"))
TWO = replace(GPUS, devices=("A", "B"))


def job(machine=GPUS, environ=None, env=None, **settings):
    return LaunchSpec(
        "train.py", (), "script", Settings(**settings), env or {}, environ or {}, machine, python="py"
    )


@pytest.mark.parametrize(("accelerator", "names"), GPU_VARIABLES.items())
def test_the_variable_of_each_vendor_has_the_chosen_gpus(accelerator, names):
    machine = replace(GPUS, rocm=True) if accelerator == "rocm" else replace(GPUS, accelerator=accelerator)
    plan = Torchrun(gpu_ids="0,2").plan(job(machine))
    assert (plan.nproc_per_node, plan.env[names[0]]) == (2, "0,2")
    assert plan.env["OMP_NUM_THREADS"] == "4"


def test_single_uses_the_chosen_gpu():
    assert Single(gpu_ids=3).plan(job()).env[CUDA] == "3"


@pytest.mark.parametrize("section", [Single(), Torchrun(), Single(gpu_ids="all"), Torchrun(gpu_ids="all")])
def test_no_variable_is_set_without_gpu_ids(section):
    assert CUDA not in section.plan(job()).env


def test_more_processes_than_chosen_gpus_are_an_error():
    assert Torchrun(gpu_ids="1,3", nproc_per_node=1).plan(job()).nproc_per_node == 1
    with pytest.raises(UsageError, match=r"Cannot start 3 processes: this machine has 2 cuda device"):
        Torchrun(gpu_ids="1,3", nproc_per_node=3).plan(job())


@pytest.mark.parametrize(
    ("machine", "environ", "ids", "message"),
    [
        (GPUS, {}, "0,4", "Cannot use launcher.gpu_ids: 0,4: this machine has no GPU 4. Choose among 0, 1, 2, 3."),
        (GPUS, {}, "GPU-7f", "this machine has no GPU GPU-7f"),
        (GPUS, {}, "7,8", "no GPU 7 and no GPU 8"),
        (TWO, {CUDA: "4,6"}, "0", "CUDA_VISIBLE_DEVICES=4,6 shows no GPU 0. Choose among 4, 6."),
        (Machine(cpus=8), {}, "0", "this machine has no GPUs (8 CPU cores). Leave out --gpu-ids, or the key"),
        (replace(GPUS, accelerator="mps", devices=("M",)), {}, "0", "this machine has no GPUs"),
    ],
)  # fmt: skip
def test_ids_that_are_not_visible_gpus_are_an_error(machine, environ, ids, message):
    for section in (Torchrun(gpu_ids=ids), Single(gpu_ids=ids)):
        with pytest.raises(UsageError) as caught:
            section.plan(job(machine, environ))
        assert message in str(caught.value)


def test_gpu_ids_select_among_the_gpus_of_a_variable_that_is_set():
    plan = Torchrun(gpu_ids="6,4").plan(job(replace(GPUS, devices=("A", "B", "C")), {CUDA: "4,5,6"}))
    assert (plan.nproc_per_node, plan.env[CUDA]) == (2, "6,4")
    uuids = job(TWO, {CUDA: "GPU-7f,GPU-a0"})
    assert Torchrun(gpu_ids="GPU-a0").plan(uuids).env[CUDA] == "GPU-a0"


def test_on_amd_the_variable_that_is_set_is_used():
    plan = Torchrun(gpu_ids="2").plan(job(replace(TWO, rocm=True), {CUDA: "2,3"}))
    assert plan.env[CUDA] == "2"
    assert "HIP_VISIBLE_DEVICES" not in plan.env


def test_gpus_of_a_variable_in_the_profile_are_counted():
    assert Torchrun().plan(job(env={CUDA: "0,1"})).nproc_per_node == 2
    assert Torchrun().plan(job(env={CUDA: ""})).device == "cpu"
    assert Torchrun().plan(job(TWO, {CUDA: "0,1"}, {CUDA: "0"})).nproc_per_node == 2
    with pytest.raises(UsageError, match=r"gpu_ids: 2 and env.CUDA_VISIBLE_DEVICES: 0,1 both choose GPUs"):
        Torchrun(gpu_ids="2").plan(job(env={CUDA: "0,1"}))


def test_gpu_ids_have_no_effect_on_the_cpu():
    assert CUDA not in Torchrun(gpu_ids="0,1").plan(job(device="cpu")).env


@pytest.mark.parametrize(
    "ids", ["", "0,", "0;1", "0 1,,2", "-1", "0,0", True, 1.5, [], [0, 0], [[0]], [True]]
)
def test_invalid_gpu_ids_are_an_error(ids):
    with pytest.raises(ValueError, match=r"expected (all, or ids as in 0,2|every id once)|valid"):
        Profile(launcher={"kind": "torchrun", "gpu_ids": ids})


@pytest.mark.parametrize("ids", [[0, 2], ["0", 2], "0,2"])
def test_a_list_of_gpu_ids_is_joined_with_commas(ids):
    profile = Profile(launcher={"kind": "torchrun", "gpu_ids": ids})
    assert profile.launcher.gpu_ids == "0,2"
    types = [each["type"] for each in Torchrun.model_json_schema()["properties"]["gpu_ids"]["anyOf"]]
    assert "array" in types


@pytest.fixture
def four_gpus(monkeypatch, script):
    monkeypatch.setattr(machine, "detect_quickly", lambda _: GPUS)
    script("")
    return lambda environ=None, **message: prepare(Request("train.py", options=message), environ or {})


def test_the_option_gpu_ids_starts_a_process_for_each_gpu(four_gpus, monkeypatch):
    resolved, plan = four_gpus(gpu_ids="0,2")
    assert (plan.launcher, plan.nproc_per_node, plan.env[CUDA]) == ("torchrun", 2, "0,2")
    assert resolved.get_source("launcher.gpu_ids") == "--gpu-ids"
    monkeypatch.setattr(machine, "detect_quickly", lambda _: replace(GPUS, devices=("A",)))
    _, plan = four_gpus(gpu_ids="0")
    assert (plan.launcher, plan.nproc_per_node, plan.env[CUDA]) == ("single", 1, "0")


def test_an_option_that_needs_an_agent_keeps_a_process_for_each_gpu(four_gpus):
    assert four_gpus(gpu_ids="0,2", stall_timeout=5)[1].nproc_per_node == 2


def test_several_gpu_ids_replace_the_single_launcher_of_the_profile(four_gpus, cwd):
    (cwd / "accel.yaml").write_text("schema_version: 1\nlauncher:\n  kind: single\n")
    assert four_gpus(gpu_ids="0,2")[1].nproc_per_node == 2
    assert four_gpus(gpu_ids="2")[1].launcher == "single"


def test_one_requested_process_sees_all_chosen_gpus(four_gpus):
    plan = four_gpus(gpu_ids="0,2", set=("launcher.kind=single",))[1]
    assert (plan.launcher, plan.nproc_per_node, plan.env[CUDA]) == ("single", 1, "0,2")


def test_the_options_cpu_and_gpu_ids_exclude_each_other(four_gpus):
    with pytest.raises(UsageError, match=r"Cannot use --cpu with --gpu-ids 0: they select different devices"):
        four_gpus(gpu_ids="0", cpu=True)


def test_gpu_ids_are_an_error_for_a_launcher_without_gpus(four_gpus):
    with pytest.raises(
        UsageError, match=r"--gpu-ids: launcher.gpu_ids: this key belongs to launcher.kind: single or torch"
    ):
        four_gpus(gpu_ids="0", set=("launcher.kind=slurm",))
