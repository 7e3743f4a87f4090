"""The nodes of a run, as a function of options and environment variables."""

from contextlib import suppress

import pytest

from accel_cli.errors import UsageError
from accel_cli.planning.nodes import NodeLayout, NodeOptions, find_nodes

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
SAGEMAKER = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2", "TRAINING_JOB_NAME": "job"}
PET = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "4", "PET_MASTER_ADDR": "n0", "PET_MASTER_PORT": "9"}  # fmt: skip
JSM = {
    "JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "4", "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "4", "LSB_JOBID": "7",
}  # fmt: skip
VERTEX = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "cmle-training-workerpool0-0", "MASTER_PORT": "2222"}
AZURE = {
    "RANK": "1", "LOCAL_RANK": "0", "NODE_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.4",
    "MASTER_PORT": "6105",
}  # fmt: skip
RUNPOD = {
    "NUM_NODES": "2", "NODE_RANK": "1", "NUM_TRAINERS": "8", "WORLD_SIZE": "16", "MASTER_ADDR": "10.65.0.2",
    "MASTER_PORT": "29500", "PRIMARY_ADDR": "10.65.0.2", "NODE_ADDR": "10.65.0.3",
}  # fmt: skip
VOLCANO = {
    "VC_TASK_INDEX": "1", "VK_TASK_INDEX": "1", "VC_WORKER_NUM": "2",
    "VC_WORKER_HOSTS": "job-worker-0.job,job-worker-1.job",
}  # fmt: skip
RANK = {
    "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a",
    "MASTER_PORT": "1",
}  # fmt: skip


def ranks_of(*values):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return dict(zip(names, map(str, values), strict=True))


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, NodeLayout()),
        ({"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "1"}, NodeLayout()),
        ({**SLURM, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}, NodeLayout()),
        (SLURM, NodeLayout("SLURM_* (step 812.3)", {"nnodes": 2, "rdzv_endpoint": "gpu03:21103", "rdzv_id": "812.3"}, 1)),
        (TASKS, NodeLayout("SLURM_* (step 812.3)", ranks=ranks_of(4, 1, 5, 2, "gpu03", 21103))),
        (OMPI, NodeLayout("OMPI_* (mpirun)", ranks=ranks_of(3, 3, 4, 4, "127.0.0.1", 22759))),
        (
            {**OMPI, "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": "n0", "MASTER_PORT": "7"},
            NodeLayout("OMPI_* (mpirun)", ranks=ranks_of(3, 1, 4, 2, "n0", 7)),
        ),
        (PMI, NodeLayout("PMI_* (mpirun)", ranks=ranks_of(1, 1, 2, 2, "127.0.0.1", 22759))),
        (JSM, NodeLayout("JSM_* (jsrun)", ranks=ranks_of(1, 1, 4, 4, "127.0.0.1", 21346))),
        ({**JSM, "JSM_NAMESPACE_SIZE": "1"}, NodeLayout()),
        (VERTEX, NodeLayout("WORLD_SIZE and RANK", {"nnodes": 2, "rdzv_endpoint": "cmle-training-workerpool0-0:2222"}, 1)),
        ({**VERTEX, "MASTER_PORT": ""}, NodeLayout("WORLD_SIZE and RANK", {"nnodes": 2, "rdzv_endpoint": "cmle-training-workerpool0-0:29400"}, 1)),
        (
            {**VERTEX, "RANK": "0", "MASTER_ADDR": "localhost", "HOSTNAME": "job-master-0"},
            NodeLayout("WORLD_SIZE and RANK", {"nnodes": 2, "rdzv_endpoint": "job-master-0:2222"}, 0),
        ),
        (
            {**VERTEX, "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"},
            NodeLayout("WORLD_SIZE and RANK", {"nnodes": 2, "rdzv_endpoint": "cmle-training-workerpool0-0:2222"}, 1),
        ),
        (AZURE, NodeLayout("WORLD_SIZE and RANK", {"nnodes": 2, "rdzv_endpoint": "10.0.0.4:6105"}, 1)),
        (RUNPOD, NodeLayout("NUM_NODES and NODE_RANK", {"nnodes": 2, "rdzv_endpoint": "10.65.0.2:29500"}, 1)),
        (
            {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "n0"},
            NodeLayout("NNODES and NODE_RANK", {"nnodes": 2, "rdzv_endpoint": "n0:29400"}, 0),
        ),
        (VOLCANO, NodeLayout("VC_*", {"nnodes": 2, "rdzv_endpoint": "job-worker-0.job:29400"}, 1)),
        ({**VOLCANO, **VERTEX}, NodeLayout("WORLD_SIZE and RANK", {"nnodes": 2, "rdzv_endpoint": "cmle-training-workerpool0-0:2222"}, 1)),
        ({**VOLCANO, "VC_TASK_INDEX": "", "VC_WORKER_HOSTS": "job-worker-0.job"}, NodeLayout()),
        # What several of them set, or a shell has.
        ({**RANK, **RUNPOD, "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, NodeLayout("RANK and WORLD_SIZE", ranks=RANK, inherited=True)),
        ({**SLURM, **VERTEX}, NodeLayout("SLURM_* (step 812.3)", {"nnodes": 2, "rdzv_endpoint": "gpu03:21103", "rdzv_id": "812.3"}, 1)),
        ({**PET, **VERTEX}, NodeLayout("PET_*", {"nnodes": 2, "nproc_per_node": 4, "rdzv_endpoint": "n0:9"}, 1)),
        ({"NODE_RANK": "1"}, NodeLayout()),
        ({"NODE_RANK": "1", "MASTER_ADDR": "n0", "MASTER_PORT": "1"}, NodeLayout()),
        ({"NNODES": "2", "MASTER_ADDR": "n0"}, NodeLayout()),
        ({"NNODES": "1:4", "NODE_RANK": "1", "MASTER_ADDR": "n0"}, NodeLayout()),
        ({"RANK": "0"}, NodeLayout()),
        ({"WORLD_SIZE": "8"}, NodeLayout()),
        ({**VERTEX, "RANK": "0", "WORLD_SIZE": "1"}, NodeLayout()),
        ({**VERTEX, "TORCHELASTIC_RUN_ID": "none"}, NodeLayout()),
        ({"VC_TASK_INDEX": "1"}, NodeLayout()),
        ({"VC_WORKER_HOSTS": "a,b"}, NodeLayout()),
        (SKY, NodeLayout("SKYPILOT_*", {"nnodes": 2, "rdzv_endpoint": "10.0.0.1:20000"}, 1)),
        (DSTACK, NodeLayout("DSTACK_*", {"nnodes": 2, "rdzv_endpoint": "10.0.0.1:20000"}, 0)),
        ({**DSTACK, "DSTACK_NODES_NUM": "1"}, NodeLayout()),
        (SAGEMAKER, NodeLayout("SM_*", {"nnodes": 2, "rdzv_endpoint": "algo-1:29400", "rdzv_id": "job"}, 1)),
        (
            {**SAGEMAKER, "SM_MASTER_PORT": "7777", "TRAINING_JOB_NAME": ""},
            NodeLayout("SM_*", {"nnodes": 2, "rdzv_endpoint": "algo-1:7777"}, 1),
        ),
        ({"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"}, NodeLayout()),
        (PET, NodeLayout("PET_*", {"nnodes": 2, "nproc_per_node": 4, "rdzv_endpoint": "n0:9"}, 1)),
        (
            {"PET_NNODES": "1:4", "PET_RDZV_ENDPOINT": "n0:5", "PET_RDZV_ID": "x", "PET_MAX_RESTARTS": "3", "PET_TEE": "3"},
            NodeLayout("PET_*", {"nnodes": "1:4", "rdzv_endpoint": "n0:5", "rdzv_id": "x", "max_restarts": 3}, unused=("PET_TEE",)),
        ),
        (RANK, NodeLayout("RANK and WORLD_SIZE", ranks=RANK, inherited=True)),
        # The innermost launcher is used: a worker of torchrun in a Slurm step, mpirun in a Slurm job.
        ({**SLURM, **RANK}, NodeLayout("RANK and WORLD_SIZE", ranks=RANK, inherited=True)),
        ({**SLURM, **OMPI}, NodeLayout("OMPI_* (mpirun)", ranks=ranks_of(3, 3, 4, 4, "127.0.0.1", 22759))),
        ({**SLURM, **PET}, NodeLayout("PET_*", {"nnodes": 2, "nproc_per_node": 4, "rdzv_endpoint": "n0:9"}, 1)),
        # A rank alone is ignored: shells have such variables.
        ({"RANK": "1"}, NodeLayout()),
    ],
)  # fmt: skip
def test_nodes_come_from_the_innermost_launcher_or_scheduler(environ, expected):
    assert find_nodes(NodeOptions(), environ, parent=4711) == expected


def test_options_override_derived_values():
    layout = find_nodes(NodeOptions(nproc_per_node=3, rdzv_endpoint="other:1", max_restarts=2), SLURM)
    assert layout.values == {
        "nnodes": 2, "rdzv_endpoint": "other:1", "rdzv_id": "812.3", "nproc_per_node": 3, "max_restarts": 2,
    }  # fmt: skip
    assert (layout.node_rank, layout.static) == (1, False)


@pytest.mark.parametrize("environ", [TASKS, OMPI])
def test_the_endpoint_option_sets_the_address_of_ranks_that_are_already_started(environ):
    ranks = find_nodes(NodeOptions(rdzv_endpoint="[fd00::1]:5"), environ).ranks
    assert (ranks["MASTER_ADDR"], ranks["MASTER_PORT"]) == ("fd00::1", "5")


def test_a_range_of_nodes_that_ends_at_the_size_of_the_step_is_used():
    assert find_nodes(NodeOptions(nnodes="1:2"), SLURM).values["nnodes"] == "1:2"


@pytest.mark.parametrize(
    ("options", "environ", "nodes"),
    [
        # As scripts of these services pass them to torchrun.
        (NodeOptions(nnodes=2, node_rank=1, rdzv_endpoint="n0:1"), VERTEX, 2),
        (NodeOptions(nnodes=2, nproc_per_node=8, node_rank=1), {**VERTEX, "WORLD_SIZE": "16"}, 2),
        (NodeOptions(nnodes=2, nproc_per_node=8, node_rank=1, rdzv_endpoint="n0:1"), RUNPOD, 2),
        (NodeOptions(nnodes="1:2"), RUNPOD, "1:2"),
        (NodeOptions(nnodes=2, rdzv_endpoint="n0:1"), {"RANK": "0", "WORLD_SIZE": "2"}, 2),
        (NodeOptions(nnodes=3, node_rank=2, rdzv_endpoint="n0:1"), {**VOLCANO, "VC_MASTER_HOSTS": "m"}, None),
        (NodeOptions(nnodes=2), VOLCANO, 2),
        (NodeOptions(nnodes=1), VERTEX, None),
        (NodeOptions(nnodes=1), RUNPOD, None),
        (NodeOptions(nnodes=1), VOLCANO, None),
    ],
)
def test_options_agree_with_general_variables_or_replace_them(options, environ, nodes):
    assert find_nodes(options, environ).values.get("nnodes") == nodes


def test_a_node_rank_given_as_an_option_is_static():
    assert find_nodes(NodeOptions(nnodes=2, node_rank=1), {}) == NodeLayout(node_rank=1, static=True)


def test_one_mpirun_task_per_node_is_an_agent_if_nproc_per_node_is_given():
    environ = {**OMPI, "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    layout = find_nodes(NodeOptions(nproc_per_node=2, rdzv_endpoint="n0:5"), environ)
    assert layout.values == {"nnodes": 4, "rdzv_endpoint": "n0:5", "nproc_per_node": 2}
    assert layout.node_rank == 3


def test_the_summary_names_the_source_and_all_derived_values():
    assert find_nodes(NodeOptions(), SLURM).summary == (
        "SLURM_* (step 812.3): nnodes 2, rdzv_endpoint gpu03:21103, rdzv_id 812.3, node_rank 1"
    )
    assert "not used: PET_TEE" in find_nodes(NodeOptions(), {**PET, "PET_TEE": "3"}).summary
    assert NodeLayout().summary == ""


@pytest.mark.parametrize(
    ("options", "environ", "expected"),
    [
        (NodeOptions(nnodes=3), SLURM, "--nnodes 3 contradicts SLURM_* (step 812.3), which sets 2 nodes"),
        (NodeOptions(node_rank=0), SLURM, "--node-rank 0 contradicts SLURM_* (step 812.3), in which this node has rank 1"),
        (NodeOptions(nproc_per_node=2), TASKS, "Cannot use --nproc-per-node 2: this process is already rank 4 of 5 (SLURM_* (step 812.3))"),
        (NodeOptions(rdzv_endpoint="n0:5"), RANK, "Cannot use --rdzv-endpoint n0:5"),
        (NodeOptions(rdzv_id="x"), TASKS, "Cannot use --rdzv-id x"),
        (NodeOptions(rdzv_endpoint="n0"), TASKS, "Invalid --rdzv-endpoint 'n0': expected host:port"),
        (NodeOptions(max_restarts=1), RANK, "Cannot use --max-restarts 1"),
        (NodeOptions(), {**SLURM, "SLURM_NODEID": "2"}, "SLURM_NODEID=2: expected less than SLURM_STEP_NUM_NODES (2)"),
        (NodeOptions(), {**TASKS, "SLURM_STEP_TASKS_PER_NODE": "3,3"}, "contradicts SLURM_STEP_NUM_TASKS=5"),
        (NodeOptions(), {**SLURM, "SLURM_STEP_NUM_TASKS": "two"}, "Invalid SLURM_STEP_NUM_TASKS='two': expected a whole number"),
        (NodeOptions(), {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2"}, "srun --ntasks-per-node=1 accel launch"),
        (NodeOptions(), {**PET, "PET_NODE_RANK": "2"}, "PET_NODE_RANK=2: expected less than PET_NNODES (2)"),
        (NodeOptions(), {**PET, "PET_RDZV_BACKEND": "etcd"}, "PET_RDZV_BACKEND=etcd"),
        (NodeOptions(), {**OMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, "Give --rdzv-endpoint HOST:PORT"),
        (NodeOptions(), {**OMPI, "OMPI_COMM_WORLD_RANK": "4"}, "OMPI_COMM_WORLD_RANK=4: expected less than OMPI_COMM_WORLD_SIZE (4)"),
        (NodeOptions(), {"PMI_RANK": "0", "PMI_SIZE": "2"}, "but not MPI_LOCALRANKID, MPI_LOCALNRANKS"),
        (NodeOptions(), {**SKY, "SKYPILOT_NODE_IPS": ""}, "SKYPILOT_NODE_IPS is not set"),
        (NodeOptions(), {**SAGEMAKER, "SM_CURRENT_HOST": "algo-3"}, "JSON list that contains SM_CURRENT_HOST (algo-3)"),
        (NodeOptions(), {**SAGEMAKER, "SM_HOSTS": "algo-1,algo-2"}, "Invalid SM_HOSTS=algo-1,algo-2: expected a JSON list"),
        (NodeOptions(), {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, "but not LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        (NodeOptions(nnodes=3), VERTEX, "--nnodes 3 contradicts WORLD_SIZE and RANK, which sets 2 nodes"),
        (NodeOptions(node_rank=0), RUNPOD, "--node-rank 0 contradicts NUM_NODES and NODE_RANK"),
        # The fourth process of the second node.
        (NodeOptions(), {**AZURE, "RANK": "7", "LOCAL_RANK": "3", "WORLD_SIZE": "8"}, "but not LOCAL_WORLD_SIZE"),
        (NodeOptions(), {**AZURE, "RANK": "4", "WORLD_SIZE": "8"}, "but not LOCAL_WORLD_SIZE"),
        (NodeOptions(), {**VERTEX, "RANK": "2"}, "Invalid RANK=2: expected less than WORLD_SIZE (2)"),
        (NodeOptions(), {**VERTEX, "MASTER_ADDR": ""}, "WORLD_SIZE=2 and RANK=1 are set, but not MASTER_ADDR. Set it to that address, or unset WORLD_SIZE and RANK"),
        (NodeOptions(), {"NNODES": "2", "NODE_RANK": "x", "MASTER_ADDR": "a"}, "Invalid NODE_RANK='x'"),
        (NodeOptions(), {**VOLCANO, "VC_MASTER_HOSTS": "job-master-0.job"}, "has several (VC_MASTER_HOSTS, VC_WORKER_HOSTS). Add Volcano's plugin pytorch"),
        (NodeOptions(), {**VOLCANO, "VC_TASK_INDEX": "2"}, "VC_TASK_INDEX=2: expected less than the hosts of VC_WORKER_HOSTS (2)"),
        (NodeOptions(), {"JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_SIZE": "2"}, "Incomplete variables of jsrun"),
        (NodeOptions(), {**JSM, "JSM_NAMESPACE_LOCAL_SIZE": "2"}, "jsrun started 4 ranks on several nodes"),
        (NodeOptions(), {**RANK, "RANK": "2"}, "Invalid RANK=2: expected less than WORLD_SIZE (2)"),
    ],
)  # fmt: skip
def test_invalid_or_contradictory_variables_are_an_error_of_one_line(options, environ, expected):
    with pytest.raises(UsageError) as error:
        find_nodes(options, environ)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("nodelist", "head"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("gpu[03-07,9],big1", "gpu03"),
        ("r[1-2]n[4-5]", "r1n4"),
        ("n[1]-ib,n2", "n1-ib"),
        ("n7,m[1-2]", "n7"),
        ("gpu-a-1.example,gpu-b-2", "gpu-a-1.example"),
    ],
)
def test_the_first_host_of_a_slurm_node_list_is_the_rendezvous_host(nodelist, head):
    layout = find_nodes(NodeOptions(), {**SLURM, "SLURM_STEP_NODELIST": nodelist})
    assert layout.values["rdzv_endpoint"] == f"{head}:21103"


CLUSTERS = (
    SLURM,
    TASKS,
    OMPI,
    PMI,
    SKY,
    DSTACK,
    SAGEMAKER,
    PET,
    RANK,
    JSM,
    VERTEX,
    AZURE,
    RUNPOD,
    VOLCANO,
    {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "1"},
)


@pytest.mark.parametrize("value", ["x", "", "-1", "²", "٣", "1.5", "9" * 5000])
def test_invalid_variables_of_schedulers_raise_usage_errors_only(value):
    for environ in CLUSTERS:
        for name in environ:
            with suppress(UsageError):
                find_nodes(NodeOptions(), {**environ, name: value}, parent=1)


def test_an_error_names_the_variable_that_is_not_a_number():
    with pytest.raises(UsageError, match="Invalid DSTACK_NODES_NUM='x': expected a whole number"):
        find_nodes(NodeOptions(), {"DSTACK_NODES_NUM": "x"})
