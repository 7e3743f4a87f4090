"""Node facts are a pure function of options and variables, so they are a table."""

from contextlib import suppress

import pytest

from accel_cli.errors import UsageError
from accel_cli.planning.nodes import Facts, Typed, facts

SLURM = {
    "SLURM_JOB_ID": "812", "SLURM_STEP_ID": "3", "SLURM_JOB_NUM_NODES": "2", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "gpu[03,07]", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_NODEID": "1", "SLURM_PROCID": "1", "SLURM_LOCALID": "0",
}  # fmt: skip
TASKS = {
    **SLURM, "SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_TASKS_PER_NODE": "3,2", "SLURM_PROCID": "4",
    "SLURM_LOCALID": "1",
}  # fmt: skip
OMPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}  # fmt: skip
PMI = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SKY = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
DSTACK = {"DSTACK_NODES_NUM": "2", "DSTACK_NODE_RANK": "0", "DSTACK_MASTER_NODE_IP": "10.0.0.1"}
PET = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "4", "PET_MASTER_ADDR": "n0", "PET_MASTER_PORT": "9"}  # fmt: skip
RANK = {
    "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a",
    "MASTER_PORT": "1",
}  # fmt: skip


def place(*said):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return dict(zip(names, map(str, said), strict=True))


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Facts()),
        ({"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "1"}, Facts()),
        ({**SLURM, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}, Facts()),
        (SLURM, Facts("SLURM_* (step 812.3)", {"nnodes": 2, "rdzv_endpoint": "gpu03:21103", "rdzv_id": "812.3"}, 1)),
        (TASKS, Facts("SLURM_* (step 812.3)", ranks=place(4, 1, 5, 2, "gpu03", 21103))),
        (OMPI, Facts("OMPI_* (mpirun)", ranks=place(3, 3, 4, 4, "127.0.0.1", 22759))),
        (
            {**OMPI, "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": "n0", "MASTER_PORT": "7"},
            Facts("OMPI_* (mpirun)", ranks=place(3, 1, 4, 2, "n0", 7)),
        ),
        (PMI, Facts("PMI_* (mpirun)", ranks=place(1, 1, 2, 2, "127.0.0.1", 22759))),
        (SKY, Facts("SKYPILOT_*", {"nnodes": 2, "rdzv_endpoint": "10.0.0.1:20000"}, 1)),
        (DSTACK, Facts("DSTACK_*", {"nnodes": 2, "rdzv_endpoint": "10.0.0.1:20000"}, 0)),
        ({**DSTACK, "DSTACK_NODES_NUM": "1"}, Facts()),
        (PET, Facts("PET_*", {"nnodes": 2, "nproc_per_node": 4, "rdzv_endpoint": "n0:9"}, 1)),
        (
            {"PET_NNODES": "1:4", "PET_RDZV_ENDPOINT": "n0:5", "PET_RDZV_ID": "x", "PET_MAX_RESTARTS": "3", "PET_TEE": "3"},
            Facts("PET_*", {"nnodes": "1:4", "rdzv_endpoint": "n0:5", "rdzv_id": "x", "max_restarts": 3}, unused=("PET_TEE",)),
        ),
        (RANK, Facts("RANK and WORLD_SIZE", ranks=RANK, inherited=True)),
        # The innermost launcher is the one that knows: a worker of torchrun in a Slurm step, mpirun in a Slurm job.
        ({**SLURM, **RANK}, Facts("RANK and WORLD_SIZE", ranks=RANK, inherited=True)),
        ({**SLURM, **OMPI}, Facts("OMPI_* (mpirun)", ranks=place(3, 3, 4, 4, "127.0.0.1", 22759))),
        ({**SLURM, **PET}, Facts("PET_*", {"nnodes": 2, "nproc_per_node": 4, "rdzv_endpoint": "n0:9"}, 1)),
        # A rank alone places nothing: shells have such variables.
        ({"RANK": "1"}, Facts()),
    ],
)  # fmt: skip
def test_the_first_source_that_speaks_is_used(environ, expected):
    assert facts(Typed(), environ, parent=4711) == expected


def test_what_is_typed_stands_in_place_of_what_was_derived():
    found = facts(Typed(nproc_per_node=3, rdzv_endpoint="other:1", max_restarts=2), SLURM)
    assert found.values == {
        "nnodes": 2, "rdzv_endpoint": "other:1", "rdzv_id": "812.3", "nproc_per_node": 3, "max_restarts": 2,
    }  # fmt: skip
    assert (found.node_rank, found.static) == (1, False)


def test_a_typed_range_that_ends_where_the_step_does_is_honoured():
    assert facts(Typed(nnodes="1:2"), SLURM).values["nnodes"] == "1:2"


def test_a_typed_number_of_this_machine_has_to_hold_exactly():
    assert facts(Typed(nnodes=2, node_rank=1), {}) == Facts(node_rank=1, static=True)


def test_one_task_on_each_machine_of_mpirun_is_an_agent_where_processes_are_asked_for():
    environ = {**OMPI, "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    found = facts(Typed(nproc_per_node=2, rdzv_endpoint="n0:5"), environ)
    assert found.values == {"nnodes": 4, "rdzv_endpoint": "n0:5", "nproc_per_node": 2}
    assert found.node_rank == 3


def test_the_line_says_the_source_and_everything_derived():
    assert facts(Typed(), SLURM).line == (
        "SLURM_* (step 812.3): nnodes 2, rdzv_endpoint gpu03:21103, rdzv_id 812.3, node_rank 1"
    )
    assert "not used: PET_TEE" in facts(Typed(), {**PET, "PET_TEE": "3"}).line
    assert Facts().line == ""


@pytest.mark.parametrize(
    ("typed", "environ", "said"),
    [
        (Typed(nnodes=3), SLURM, "--nnodes 3 contradicts SLURM_* (step 812.3), which says 2"),
        (Typed(node_rank=0), SLURM, "--node-rank 0 contradicts SLURM_* (step 812.3), where this machine is 1"),
        (Typed(nproc_per_node=2), TASKS, "--nproc-per-node 2 cannot be honoured: SLURM_* (step 812.3) says that this process is already rank 4 of 5"),
        (Typed(max_restarts=1), RANK, "--max-restarts 1 cannot be honoured"),
        (Typed(), {**SLURM, "SLURM_NODEID": "2"}, "SLURM_NODEID=2 contradicts SLURM_STEP_NUM_NODES=2"),
        (Typed(), {**TASKS, "SLURM_STEP_TASKS_PER_NODE": "3,3"}, "does not fit SLURM_STEP_NUM_TASKS=5"),
        (Typed(), {**SLURM, "SLURM_STEP_NUM_TASKS": "two"}, "SLURM_STEP_NUM_TASKS must be a whole number; it is 'two'"),
        (Typed(), {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2"}, "srun --ntasks-per-node=1 accel launch"),
        (Typed(), {**PET, "PET_NODE_RANK": "2"}, "PET_NODE_RANK=2 contradicts PET_NNODES=2"),
        (Typed(), {**PET, "PET_RDZV_BACKEND": "etcd"}, "PET_RDZV_BACKEND=etcd"),
        (Typed(), {**OMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, "give --rdzv-endpoint HOST:PORT"),
        (Typed(), {**OMPI, "OMPI_COMM_WORLD_RANK": "4"}, "OMPI_COMM_WORLD_RANK=4 contradicts OMPI_COMM_WORLD_SIZE=4"),
        (Typed(), {"PMI_RANK": "0", "PMI_SIZE": "2"}, "MPI_LOCALRANKID, MPI_LOCALNRANKS is not"),
        (Typed(), {**SKY, "SKYPILOT_NODE_IPS": ""}, "SKYPILOT_NODE_IPS does not say"),
        (Typed(), {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT is not set"),
        (Typed(), {**RANK, "RANK": "2"}, "RANK=2 contradicts WORLD_SIZE=2"),
    ],
)  # fmt: skip
def test_a_contradiction_is_refused_with_one_message(typed, environ, said):
    with pytest.raises(UsageError) as error:
        facts(typed, environ)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("nodelist", "head"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("gpu[03-07,9],big1", "gpu03"),
        ("r[1-2]n[4-5]", "r1n4"),
        ("n[1]-ib,n2", "n1-ib"),
    ],
)
def test_the_first_host_of_a_list_of_slurm_is_the_meeting_place(nodelist, head):
    found = facts(Typed(), {**SLURM, "SLURM_STEP_NODELIST": nodelist})
    assert found.values["rdzv_endpoint"] == f"{head}:21103"


CLUSTERS = (
    SLURM,
    TASKS,
    OMPI,
    PMI,
    SKY,
    DSTACK,
    PET,
    RANK,
    {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "1"},
)


@pytest.mark.parametrize("value", ["x", "", "-1", "²", "٣", "1.5", "9" * 5000])
def test_no_variable_of_a_scheduler_is_a_traceback(value):
    for environ in CLUSTERS:
        for name in environ:
            with suppress(UsageError):
                facts(Typed(), {**environ, name: value}, parent=1)


def test_a_variable_that_is_no_number_is_named():
    with pytest.raises(UsageError, match="DSTACK_NODES_NUM must be a whole number; it is 'x'"):
        facts(Typed(), {"DSTACK_NODES_NUM": "x"})
