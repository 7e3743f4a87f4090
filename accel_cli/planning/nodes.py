"""The nodes of a run and the rank of this one, from options or from the variables of a scheduler."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any

from accel_cli.errors import UsageError
from accel_runtime.environment.settings import find_rank_process
from accel_runtime.environment.text import encode_text

__all__ = [
    "PORT",
    "VARIABLES",
    "NodeLayout",
    "NodeOptions",
    "find_nodes",
    "get_slurm_rendezvous",
    "list_nodes",
]

PORT = 29400
"""The default port of the rendezvous, as in torch's c10d backend."""
_FIRST_JOB_PORT, _NUM_JOB_PORTS = 20000, 10000
"""The range of ports derived from a job id, below the kernel's ephemeral ports."""
_MAX_DIGITS = 18
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_VOLCANO_HOSTS = re.compile(r"VC_\w+_HOSTS")

VARIABLES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "torchrun": ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        "PET_*": (
            "PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE", "PET_RDZV_ENDPOINT", "PET_MASTER_ADDR",
            "PET_MASTER_PORT", "PET_RDZV_ID", "PET_RDZV_BACKEND", "PET_MAX_RESTARTS",
        ),
        "SLURM_*": (
            "SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_STEP_ID", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS",
            "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID",
        ),
        "OMPI_*": (
            "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE",
        ),
        "PMI_*": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_JOBID"),
        "JSM_*": (
            "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE",
            "PMIX_NAMESPACE", "LSB_JOBID",
        ),
        "SKYPILOT_*": (
            "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS", "SKYPILOT_TASK_ID",
        ),
        "TPU_WORKER_*": ("TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID", "MEGASCALE_NUM_SLICES"),
        "DSTACK_*": ("DSTACK_NODES_NUM", "DSTACK_NODE_RANK", "DSTACK_MASTER_NODE_IP", "DSTACK_RUN_ID"),
        "SM_*": ("SM_HOSTS", "SM_CURRENT_HOST", "SM_MASTER_PORT", "TRAINING_JOB_NAME"),
        # RunPod, and scripts that call torchrun on each node.
        "NUM_NODES and NODE_RANK": ("NUM_NODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"),
        "NNODES and NODE_RANK": ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"),
        # Without LOCAL_RANK, or with an equal NODE_RANK (Azure ML): Vertex AI, PyTorchJobs of Kubeflow, Volcano's plugin for PyTorch.
        "WORLD_SIZE and RANK": ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"),
        # Volcano; the hosts are in a variable named for the task, such as VC_WORKER_HOSTS.
        "VC_*": ("VC_TASK_INDEX", "VK_TASK_INDEX"),
    }
)  # fmt: skip
"""The variables that are read, by the name of their source."""


@dataclass(frozen=True)
class NodeOptions:
    """The options of the command line about nodes and processes; None if not given."""

    nnodes: int | str | None = None
    nproc_per_node: int | str | None = None
    node_rank: int | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    max_restarts: int | None = None


@dataclass(frozen=True)
class NodeLayout:
    """The nodes of a run, as far as they are known before the rendezvous."""

    source: str = ""
    """The source, for messages; empty without a source, for a run on this node alone."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """The keys of the launcher's section that follow from the source."""
    node_rank: int | None = None
    """The rank of this node."""
    static: bool = False
    """True if the rank was given as an option, and must be used exactly."""
    ranks: Mapping[str, str] = field(default_factory=dict)
    """The variables of this process if another launcher started one process for each rank."""
    inherited: bool = False
    """True if those variables are in the environment already."""
    unused: tuple[str, ...] = ()
    """Variables of the source that are not used."""

    @property
    def summary(self) -> str:
        """The source and all values derived from it, in one line."""
        if not self.source:
            return ""
        values = {**self.values, **self.ranks}
        if self.node_rank is not None:
            values["node_rank"] = self.node_rank
        unused = f" (not used: {', '.join(self.unused)})" if self.unused else ""
        return f"{self.source}: {', '.join(f'{key} {value}' for key, value in values.items())}{unused}"


def find_nodes(options: NodeOptions, environ: Mapping[str, str], *, parent: int = 0) -> NodeLayout:
    """Return the nodes of the innermost launcher or scheduler whose variables are set, or this node alone.

    Options replace values of the variables, or must agree with them. `parent` is the PID of the parent process, which
    identifies the job of an mpirun that sets no job id.
    """
    if (pid := find_rank_process(environ)) is not None:
        raise UsageError(
            f"Cannot launch with RANK={environ.get('RANK')} and WORLD_SIZE={environ.get('WORLD_SIZE')}: process {pid} is that rank, still runs, "
            "and has started this one. Unset RANK, WORLD_SIZE and LOCAL_RANK to start a separate run."
        )
    layout = (
        _find_torchrun_ranks(environ)
        or _find_pet_nodes(environ)
        or _find_slurm_nodes(environ, options)
        or _find_mpi_ranks(environ, options, parent)
        or _find_cluster_nodes(environ, "SKYPILOT_*")
        or _find_cluster_nodes(environ, "DSTACK_*")
        or _find_sagemaker_nodes(environ)
        or _find_master_nodes(environ, options)
        or _find_volcano_nodes(environ, options)
    )
    return _apply_options(layout, options)


def list_nodes(options: NodeOptions, source: str, hosts: Sequence[str], rank: tuple[str, str]) -> NodeLayout:
    """Return the nodes of a run on known hosts, on each of which the same command runs.

    Args:
        options: Options replace values of the source, or must agree with them.
        source: The source of the hosts, for messages.
        hosts: The hosts in the order of their ranks; with less than two, the run is on this node alone.
        rank: The variable with the rank of this node, and its value, which is not validated yet.
    """
    layout = None
    if len(hosts) > 1:
        name, text = rank
        number = _parse_rank({name: text}, name, len(hosts), "the number of hosts")
        values = {"nnodes": len(hosts), "rdzv_endpoint": _join_endpoint(hosts[0], str(PORT))}
        layout = NodeLayout(source, values, number)
    return _apply_options(layout, options)


def _find_torchrun_ranks(environ: Mapping[str, str]) -> NodeLayout | None:
    names = VARIABLES["torchrun"]
    if not all(environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")):
        return None
    world_size = _parse_number(environ, "WORLD_SIZE")
    rank = _parse_rank(environ, "RANK", world_size, "WORLD_SIZE")
    missing = [name for name in names if not environ.get(name)]
    # Azure ML with one process on each node: that process is the launcher of its node.
    is_node = world_size > 1 and environ.get("NODE_RANK") == str(rank) and environ["LOCAL_RANK"] == "0"
    if missing == ["LOCAL_WORLD_SIZE"] and is_node:
        return None
    if missing:
        raise UsageError(
            f"Incomplete variables of a process group: RANK={rank} and WORLD_SIZE={world_size} are set, but not "
            f"{', '.join(missing)}. Start this process with torchrun, or unset RANK, LOCAL_RANK and WORLD_SIZE."
        )
    return NodeLayout("RANK and WORLD_SIZE", ranks={name: environ[name] for name in names}, inherited=True)


def _find_pet_nodes(environ: Mapping[str, str]) -> NodeLayout | None:
    pet = {name: value for name, value in environ.items() if name.startswith("PET_") and value}
    if "PET_NNODES" not in pet and "PET_NPROC_PER_NODE" not in pet:
        return None
    if (backend := pet.get("PET_RDZV_BACKEND", "c10d")) not in {"c10d", "static"}:
        raise UsageError(f"Invalid PET_RDZV_BACKEND={backend}: expected c10d. Set it to c10d, or unset it.")
    nnodes = pet.get("PET_NNODES", "1")
    values: dict[str, Any] = {"nnodes": int(nnodes) if _is_number(nnodes) else nnodes}
    if count := pet.get("PET_NPROC_PER_NODE"):
        values["nproc_per_node"] = int(count) if _is_number(count) else "auto"
    if endpoint := pet.get("PET_RDZV_ENDPOINT") or pet.get("PET_MASTER_ADDR"):
        port = pet.get("PET_MASTER_PORT", str(PORT))
        values["rdzv_endpoint"] = endpoint if _has_port(endpoint) else _join_endpoint(endpoint, port)
    if "PET_RDZV_ID" in pet:
        values["rdzv_id"] = pet["PET_RDZV_ID"]
    if "PET_MAX_RESTARTS" in pet:
        values["max_restarts"] = _parse_number(pet, "PET_MAX_RESTARTS")
    rank = None
    # Trainers of Kubernetes set `auto` or nothing if the rendezvous assigns the ranks.
    if _is_number(pet.get("PET_NODE_RANK", "")):
        rank = _parse_rank(pet, "PET_NODE_RANK", _get_max_nodes(nnodes), "PET_NNODES")
    return NodeLayout("PET_*", values, rank, unused=tuple(sorted(set(pet) - set(VARIABLES["PET_*"]))))


def _find_slurm_nodes(environ: Mapping[str, str], options: NodeOptions) -> NodeLayout | None:
    # mpirun starts itself by a step with one task per node, whatever the number of its ranks.
    if "SLURM_JOB_ID" not in environ or environ.keys() & {"OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID"}:
        return None
    if "SLURM_STEP_NUM_TASKS" not in environ:
        nodes = _parse_number(environ, "SLURM_JOB_NUM_NODES", default="1")
        if nodes > 1 and options.nnodes is None:
            raise UsageError(
                f"Cannot start on one node of a Slurm job that has {nodes}. Start it on all of them with srun "
                "--ntasks-per-node=1 accel launch ..., or use this node alone with --nnodes 1."
            )
        return None
    nodes = _parse_number(environ, "SLURM_STEP_NUM_NODES")
    tasks = _parse_number(environ, "SLURM_STEP_NUM_TASKS")
    if tasks == 1:
        return None
    host, port, name = get_slurm_rendezvous(environ)
    source = f"SLURM_* (step {name})"
    node = _parse_rank(environ, "SLURM_NODEID", nodes, "SLURM_STEP_NUM_NODES")
    if tasks == nodes:
        values = {"nnodes": nodes, "rdzv_endpoint": _join_endpoint(host, port), "rdzv_id": name}
        return NodeLayout(source, values, node)
    text = environ.get("SLURM_STEP_TASKS_PER_NODE", "")  # as in 2(x3),1
    groups = re.findall(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", text)
    tasks_per_node = [int(count) for count, times in groups for _ in range(int(times or 1))]
    if len(tasks_per_node) != nodes or sum(tasks_per_node) != tasks:
        raise UsageError(
            f"SLURM_STEP_TASKS_PER_NODE={text} contradicts SLURM_STEP_NUM_TASKS={tasks} and SLURM_STEP_NUM_NODES={nodes}. "
            "Start the step again with srun."
        )
    rank, local_size = _parse_number(environ, "SLURM_PROCID"), tasks_per_node[node]
    local_rank = _parse_rank(environ, "SLURM_LOCALID", local_size, "the tasks of this node")
    if options.rdzv_endpoint:
        host, port = _split_endpoint(options.rdzv_endpoint)
    elif nodes == 1:
        host = "127.0.0.1"
    return NodeLayout(source, ranks=_build_ranks(rank, local_rank, tasks, local_size, host, port))


def get_slurm_rendezvous(environ: Mapping[str, str]) -> tuple[str, str, str]:
    """Return the host and port of the rendezvous in a Slurm step, and `job.step`."""
    job, step = _parse_number(environ, "SLURM_JOB_ID"), _parse_number(environ, "SLURM_STEP_ID", default="0")
    # Steps of one job may run at the same time.
    port = _derive_port(job + 97 * step)
    return _parse_first_host(environ.get("SLURM_STEP_NODELIST", "")), port, f"{job}.{step}"


def _find_mpi_ranks(environ: Mapping[str, str], options: NodeOptions, parent: int) -> NodeLayout | None:
    prefixes = (
        name for name in ("OMPI_*", "PMI_*", "JSM_*") if all(key in environ for key in VARIABLES[name][:2])
    )
    if (prefix := next(prefixes, None)) is None:
        return None
    names, job_names = VARIABLES[prefix][:4], VARIABLES[prefix][4:]
    program = "jsrun" if prefix == "JSM_*" else "mpirun"
    if environ[names[1]] == "1":
        return None
    if missing := [name for name in names if name not in environ]:
        raise UsageError(
            f"Incomplete variables of {program}: {names[0]} is set, but not {', '.join(missing)}. Use the mpirun of Open MPI, "
            "MPICH or Intel MPI, or jsrun, which set them, or torchrun."
        )
    size, local_size = _parse_number(environ, names[1]), _parse_number(environ, names[3])
    rank = _parse_rank(environ, names[0], size, names[1])
    local_rank = _parse_rank(environ, names[2], local_size, names[3])
    # All processes of the job derive the same port.
    job = next((environ[name] for name in job_names if environ.get(name)), str(parent))
    port = _derive_port(job)
    if options.rdzv_endpoint:
        host, port = _split_endpoint(options.rdzv_endpoint)
    elif local_size == size:
        host = "127.0.0.1"
    elif environ.get("MASTER_ADDR"):
        host, port = environ["MASTER_ADDR"], environ.get("MASTER_PORT", port)
    else:
        raise UsageError(
            f"Unknown address of rank 0: {program} started {size} ranks on several nodes ({names[1]}), and sets no address. Give "
            "--rdzv-endpoint HOST:PORT, or set MASTER_ADDR, with the host of rank 0."
        )
    source = f"{prefix} ({program})"
    if local_size == 1 and options.nproc_per_node is not None:
        return NodeLayout(source, {"nnodes": size, "rdzv_endpoint": _join_endpoint(host, port)}, rank)
    return NodeLayout(source, ranks=_build_ranks(rank, local_rank, size, local_size, host.strip("[]"), port))


def _find_cluster_nodes(environ: Mapping[str, str], source: str) -> NodeLayout | None:
    """Return the nodes of a tool that sets the number of nodes, the rank of this one, the addresses and a job id."""
    count_name, rank_name, hosts_name, job_name = VARIABLES[source]
    if not environ.get(count_name) or (nodes := _parse_number(environ, count_name)) == 1:
        return None
    rank = _parse_rank(environ, rank_name, nodes, count_name)
    hosts = environ.get(hosts_name, "").split()
    if not hosts:
        raise UsageError(
            f"Unknown address of the first node: {count_name}={nodes}, but {hosts_name} is not set. Set it to that address."
        )
    endpoint = _join_endpoint(hosts[0], _derive_port(environ.get(job_name, "")))
    return NodeLayout(source, {"nnodes": nodes, "rdzv_endpoint": endpoint}, rank)


def _find_sagemaker_nodes(environ: Mapping[str, str]) -> NodeLayout | None:
    text, host = environ.get("SM_HOSTS") or "[]", environ.get("SM_CURRENT_HOST")
    try:
        hosts = json.loads(text)
        if len(hosts) <= 1:
            return None
        rank, first = hosts.index(host), str(hosts[0])
    except (TypeError, AttributeError, ValueError):
        raise UsageError(
            f"Invalid SM_HOSTS={text}: expected a JSON list that contains SM_CURRENT_HOST ({host}). Correct or unset it."
        ) from None
    endpoint = _join_endpoint(first, environ.get("SM_MASTER_PORT") or str(PORT))
    values = {"nnodes": len(hosts), "rdzv_endpoint": endpoint}
    if job := environ.get("TRAINING_JOB_NAME"):
        values["rdzv_id"] = job
    return NodeLayout("SM_*", values, rank)


def _find_master_nodes(environ: Mapping[str, str], options: NodeOptions) -> NodeLayout | None:
    """Return the nodes from variables that many services set, but also shells: a count, a rank and an address.

    A number of nodes of 1, as an option, trains on this node alone, whatever the variables are.
    """
    # A process of torchrun has RANK and WORLD_SIZE of a process, not of a node.
    if options.nnodes == 1 or "TORCHELASTIC_RUN_ID" in environ:
        return None
    for source in ("NUM_NODES and NODE_RANK", "NNODES and NODE_RANK", "WORLD_SIZE and RANK"):
        count_name, rank_name, host_name, port_name = VARIABLES[source]
        # A range such as 1:4 in NNODES is for a script, which passes it as an option.
        if not environ.get(rank_name) or not _is_number(environ.get(count_name, "")):
            continue
        nodes = _count_nodes(environ, count_name, options)
        if nodes <= 1:
            continue
        rank = _parse_rank(environ, rank_name, nodes, count_name)
        host = environ.get(host_name, "")
        if not host and not options.rdzv_endpoint:
            raise UsageError(
                f"Unknown address of the first node: {count_name}={environ[count_name]} and {rank_name}={rank} are set, but not "
                f"{host_name}. Set it to that address, or unset {count_name} and {rank_name} to train on this node alone."
            )
        if rank == 0 and host in _LOOPBACK_NAMES:  # PyTorchJobs name the first pod so in itself
            host = environ.get("HOSTNAME") or host
        endpoint = _join_endpoint(host, environ.get(port_name) or str(PORT))
        return NodeLayout(source, {"nnodes": nodes, "rdzv_endpoint": endpoint}, rank)
    return None


def _count_nodes(environ: Mapping[str, str], name: str, options: NodeOptions) -> int:
    """Return the number of nodes from a variable; WORLD_SIZE counts processes if another number contradicts nodes."""
    count = _parse_number(environ, name)
    if name != "WORLD_SIZE":
        return count
    given = _get_max_nodes(options.nnodes or 0)
    local_size = environ.get("LOCAL_WORLD_SIZE", "")
    if _is_number(local_size) and int(local_size) and count % int(local_size) == 0:
        count //= int(local_size)
    return given if given and count % given == 0 else count


def _find_volcano_nodes(environ: Mapping[str, str], options: NodeOptions) -> NodeLayout | None:
    """Return the pods of a Volcano job with the plugins env and svc, if all of them are of one task.

    Of several tasks, options give the nodes.
    """
    index = next((name for name in VARIABLES["VC_*"] if environ.get(name)), None)
    hosts = {
        name: text.split(",") for name, text in environ.items() if _VOLCANO_HOSTS.fullmatch(name) and text
    }
    if index is None or sum(map(len, hosts.values())) <= 1 or options.nnodes == 1:
        return None
    if len(hosts) > 1 and options.nnodes is not None:
        return None
    if len(hosts) > 1:
        raise UsageError(
            f"Unknown rank of this node: {index} counts the pods of one task, and the Volcano job has several ({', '.join(sorted(hosts))}). "
            "Add Volcano's plugin pytorch to the job, or give --nnodes, --node-rank and --rdzv-endpoint."
        )
    ((name, names),) = hosts.items()
    rank = _parse_rank(environ, index, len(names), f"the hosts of {name}")
    endpoint = _join_endpoint(names[0].strip(), str(PORT))
    return NodeLayout("VC_*", {"nnodes": len(names), "rdzv_endpoint": endpoint}, rank)


def _apply_options(layout: NodeLayout | None, options: NodeOptions) -> NodeLayout:
    """Return the layout with options instead of derived values."""
    given = {name: value for name, value in asdict(options).items() if value is not None}
    static = "node_rank" in given
    if layout is None:
        return NodeLayout(node_rank=options.node_rank, static=static)
    if layout.ranks:
        used = set() if layout.inherited else {"rdzv_endpoint"}
        refused = [f"--{name.replace('_', '-')} {given[name]}" for name in given if name not in used]
        if refused:
            raise UsageError(
                f"Cannot use {' '.join(refused)}: this process is already rank {layout.ranks['RANK']} of "
                f"{layout.ranks['WORLD_SIZE']} ({layout.source}). Leave it out, or run accel launch once per node (srun "
                "--ntasks-per-node=1) and without RANK, LOCAL_RANK and WORLD_SIZE."
            )
        return layout
    nodes, rank = layout.values["nnodes"], given.pop("node_rank", layout.node_rank)
    if options.nnodes is not None and _get_max_nodes(nodes) not in {1, _get_max_nodes(options.nnodes)}:
        raise UsageError(
            f"--nnodes {options.nnodes} contradicts {layout.source}, which sets {nodes} nodes. Leave out the option."
        )
    if layout.node_rank not in {None, rank}:
        raise UsageError(
            f"--node-rank {rank} contradicts {layout.source}, in which this node has rank {layout.node_rank}. Leave out the "
            "option."
        )
    return replace(layout, values={**layout.values, **given}, node_rank=rank, static=static)


def _build_ranks(*values: object) -> dict[str, str]:
    """Return the variables of torchrun with these values, in their order."""
    return dict(zip(VARIABLES["torchrun"], map(str, values), strict=True))


def _derive_port(job: int | str) -> str:
    """Return the port of a job's rendezvous, from the number or the name of the job."""
    number = job if isinstance(job, int) else zlib.crc32(encode_text(job))
    return str(_FIRST_JOB_PORT + number % _NUM_JOB_PORTS)


def _parse_number(environ: Mapping[str, str], name: str, default: str = "") -> int:
    text = environ.get(name, default)
    if not _is_number(text):
        raise UsageError(f"Invalid {name}={text!r}: expected a whole number. Correct or unset it.")
    return int(text)


def _parse_rank(environ: Mapping[str, str], name: str, size: int, size_name: str) -> int:
    rank = _parse_number(environ, name)
    if rank >= size:
        raise UsageError(
            f"Invalid {name}={rank}: expected less than {size_name} ({size}). Correct or unset it."
        )
    return rank


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS


def _get_max_nodes(nodes: int | str) -> int:
    """Return the number of nodes, or the end of a range; 0 for an invalid text."""
    last = str(nodes).rpartition(":")[2]
    return int(last) if _is_number(last) else 0


def _has_port(endpoint: str) -> bool:
    return re.fullmatch(r"(\[[^]]+\]|[^:]+):\d+", endpoint) is not None


def _split_endpoint(endpoint: str) -> tuple[str, str]:
    if not _has_port(endpoint):
        raise UsageError(f"Invalid --rdzv-endpoint {endpoint!r}: expected host:port.")
    host, _, port = endpoint.rpartition(":")
    return host.strip("[]"), port


def _join_endpoint(host: str, port: str) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _parse_first_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list such as `gpu[03-07,9],big1`."""
    host = re.match(r"(?:[^,[]|\[[^]]*\])+", nodelist)
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", host[0]) if host else ""
