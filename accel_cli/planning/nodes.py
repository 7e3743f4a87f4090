"""Which machines a job has, and which of them this is: from what was typed, or from what a scheduler left."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from accel_cli.errors import UsageError
from accel_cli.planning.machine import Tpu

__all__ = ["PORT", "READ", "Facts", "Typed", "facts", "first_host", "pod"]

PORT = 29400
"""Where machines meet if nobody says a port; torch's own default for c10d."""
_LAST_PORT = 65535
_LONGEST_NUMBER = 18
_FIRST_PORT, _PORTS = 20000, 10000
"""Ports that a scheduler's job number chooses among: below those the kernel hands out."""

READ: Mapping[str, tuple[str, ...]] = MappingProxyType(
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
        "SKYPILOT_*": (
            "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS", "SKYPILOT_TASK_ID",
        ),
        "TPU_WORKER_*": ("TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID", "MEGASCALE_NUM_SLICES"),
        "DSTACK_*": ("DSTACK_NODES_NUM", "DSTACK_NODE_RANK", "DSTACK_MASTER_NODE_IP", "DSTACK_RUN_ID"),
    }
)  # fmt: skip
"""Every variable that is read, by the word that stands for its source."""


@dataclass(frozen=True)
class Typed:
    """The options that speak of machines and processes, as they were typed; None was not."""

    nnodes: int | str | None = None
    nproc_per_node: int | str | None = None
    node_rank: int | None = None
    rdzv_endpoint: str | None = None
    max_restarts: int | None = None


@dataclass(frozen=True)
class Facts:
    """What is known of the machines before any of them spoke."""

    source: str = ""
    """Who said so, for a person; empty where nobody did and this is the one machine."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the launcher's section that follow."""
    node_rank: int | None = None
    """The number of this machine."""
    static: bool = False
    """Whether that number was typed, and so has to hold exactly."""
    ranks: Mapping[str, str] = field(default_factory=dict)
    """The variables of this one process, where something else started a process for every rank."""
    inherited: bool = False
    """Whether those variables are in the environment already."""
    unused: tuple[str, ...] = ()
    """Variables of the source that say nothing here."""

    @property
    def line(self) -> str:
        """The source and everything derived from it."""
        if not self.source:
            return ""
        said = {**self.values, **self.ranks}
        if self.node_rank is not None:
            said["node_rank"] = self.node_rank
        unused = f" (not used: {', '.join(self.unused)})" if self.unused else ""
        return f"{self.source}: {', '.join(f'{key} {value}' for key, value in said.items())}{unused}"


def facts(typed: Typed, environ: Mapping[str, str], *, parent: int = 0) -> Facts:
    """The first of these that speaks: torchrun, `PET_*`, a Slurm step, mpirun, SkyPilot, dstack; else one machine.

    Args:
        typed: The options; where one contradicts a variable, the run is refused.
        environ: The environment.
        parent: The process that started this one; under an mpirun without a job number it stands for the job.

    Raises:
        UsageError: Variables are incomplete, or contradict each other or an option.
    """
    for source in _SOURCES:
        found = source(environ, typed, parent)
        if found:
            return _checked(found, typed)
    return Facts(node_rank=typed.node_rank, static=typed.node_rank is not None)


def pod(typed: Typed, environ: Mapping[str, str], tpu: Tpu) -> Facts:
    """The hosts of a TPU slice, of which each runs the same command.

    Args:
        typed: The options.
        environ: The environment.
        tpu: What the machine says of its TPU.

    Raises:
        UsageError: What is said is incomplete, or contradicts an option.
    """
    if environ.get("MEGASCALE_NUM_SLICES", "1") not in {"", "1"}:
        raise UsageError(
            f"MEGASCALE_NUM_SLICES={environ['MEGASCALE_NUM_SLICES']}: several TPU slices in one run are not in this "
            "version; train on one slice"
        )
    nodes = len(tpu.hosts)
    if nodes < 2:  # noqa: PLR2004 - one host has nobody to meet
        return Facts(node_rank=typed.node_rank, static=typed.node_rank is not None)
    rank = _number({"TPU_WORKER_ID": tpu.worker}, "TPU_WORKER_ID")
    _within(rank, nodes, "TPU_WORKER_ID", "the number of hosts in TPU_WORKER_HOSTNAMES")
    values = {"nnodes": nodes, "rdzv_endpoint": _endpoint(tpu.hosts[0], str(PORT))}
    return _checked(Facts(tpu.hosts_by, values, rank), typed)


def _torchrun(environ: Mapping[str, str], _: Typed, __: int) -> Facts | None:
    names = READ["torchrun"]
    if not all(environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")):
        return None
    rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    _within(rank, size, "RANK", "WORLD_SIZE")
    missing = [name for name in names if not environ.get(name)]
    if missing:
        raise UsageError(
            f"RANK={rank} and WORLD_SIZE={size} say that this process is one of several, but {', '.join(missing)} "
            "is not set. Start it with torchrun, or take RANK, LOCAL_RANK and WORLD_SIZE out of the environment."
        )
    return Facts("RANK and WORLD_SIZE", ranks={name: environ[name] for name in names}, inherited=True)


def _pet(environ: Mapping[str, str], _: Typed, __: int) -> Facts | None:
    said = {name: value for name, value in environ.items() if name.startswith("PET_") and value}
    if "PET_NNODES" not in said and "PET_NPROC_PER_NODE" not in said:
        return None
    backend = said.get("PET_RDZV_BACKEND", "c10d")
    if backend not in {"c10d", "static"}:
        raise UsageError(
            f"PET_RDZV_BACKEND={backend}: machines meet by c10d; take the variable out or set c10d"
        )
    values: dict[str, Any] = {"nnodes": _nodes(said.get("PET_NNODES", "1"))}
    if count := said.get("PET_NPROC_PER_NODE"):
        values["nproc_per_node"] = int(count) if _is_number(count) else "auto"
    if endpoint := said.get("PET_RDZV_ENDPOINT") or said.get("PET_MASTER_ADDR"):
        port = said.get("PET_MASTER_PORT", str(PORT))
        values["rdzv_endpoint"] = endpoint if _has_port(endpoint) else _endpoint(endpoint, port)
    if "PET_RDZV_ID" in said:
        values["rdzv_id"] = said["PET_RDZV_ID"]
    if "PET_MAX_RESTARTS" in said:
        values["max_restarts"] = _number(said, "PET_MAX_RESTARTS")
    # Trainers of Kubernetes write `auto` or nothing for the rank where machines number themselves.
    rank = _number(said, "PET_NODE_RANK") if _is_number(said.get("PET_NODE_RANK", "")) else None
    if rank is not None:
        _within(rank, _most(values["nnodes"]), "PET_NODE_RANK", "PET_NNODES")
    return Facts("PET_*", values, rank, unused=tuple(sorted(set(said) - set(READ["PET_*"]))))


def _slurm(environ: Mapping[str, str], typed: Typed, _: int) -> Facts | None:
    if "SLURM_JOB_ID" not in environ or not environ.keys().isdisjoint(
        {"OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID"}
    ):
        # mpirun starts itself on each machine by a step of its own, which says nothing of our processes.
        return None
    if "SLURM_STEP_NUM_TASKS" not in environ:
        _check_outside_a_step(environ, typed)
        return None
    nodes, tasks = _number(environ, "SLURM_STEP_NUM_NODES"), _number(environ, "SLURM_STEP_NUM_TASKS")
    if tasks == 1:
        return None
    job, step = environ["SLURM_JOB_ID"], environ.get("SLURM_STEP_ID", "0")
    source = f"SLURM_* (step {job}.{step})"
    head = first_host(environ.get("SLURM_STEP_NODELIST", ""))
    numbers = (
        _number({"SLURM_JOB_ID": job}, "SLURM_JOB_ID"),
        _number({"SLURM_STEP_ID": step}, "SLURM_STEP_ID"),
    )
    port = str(_FIRST_PORT + (numbers[0] + 97 * numbers[1]) % _PORTS)
    node = _number(environ, "SLURM_NODEID")
    _within(node, nodes, "SLURM_NODEID", "SLURM_STEP_NUM_NODES")
    if tasks == nodes:
        values = {"nnodes": nodes, "rdzv_endpoint": _endpoint(head, port), "rdzv_id": f"{job}.{step}"}
        return Facts(source, values, node)
    layout = _layout(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if len(layout) != nodes or sum(layout) != tasks:
        raise UsageError(
            f"SLURM_STEP_TASKS_PER_NODE={environ.get('SLURM_STEP_TASKS_PER_NODE', '')} does not fit "
            f"SLURM_STEP_NUM_TASKS={tasks} on SLURM_STEP_NUM_NODES={nodes}"
        )
    rank, local = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_LOCALID")
    place = {**_place(rank, tasks, local, layout[node]), "MASTER_ADDR": "127.0.0.1" if nodes == 1 else head}
    return Facts(source, ranks={**place, "MASTER_PORT": port})


def _check_outside_a_step(environ: Mapping[str, str], typed: Typed) -> None:
    nodes = _number({"SLURM_JOB_NUM_NODES": "1", **environ}, "SLURM_JOB_NUM_NODES")
    if nodes > 1 and typed.nnodes is None:
        raise UsageError(
            f"this Slurm job has {nodes} machines, and `accel launch` was started on one of them only. Start it on each: "
            f"srun --ntasks-per-node=1 accel launch ...; or give --nnodes 1 to use this machine alone."
        )


def _mpi(environ: Mapping[str, str], typed: Typed, parent: int) -> Facts | None:
    by = next((by for by in ("OMPI_*", "PMI_*") if all(name in environ for name in READ[by][:2])), None)
    if by is None or environ[READ[by][1]] == "1":
        return None
    names = READ[by]
    missing = [name for name in names[:4] if name not in environ]
    if missing:
        raise UsageError(
            f"{names[0]} is set and {', '.join(missing)} is not: this mpirun does not say where ranks are"
        )
    rank, size, local, here = (_number(environ, name) for name in names[:4])
    _within(rank, size, names[0], names[1])
    job = next((environ[name] for name in names[4:] if environ.get(name)), str(parent))
    endpoint = (
        f"127.0.0.1:{_port(job)}" if here == size else _first_of_mpi(names[1], environ, typed, _port(job))
    )
    if here == 1 and typed.nproc_per_node is not None:
        return Facts(f"{by} (mpirun)", {"nnodes": size, "rdzv_endpoint": endpoint}, rank)
    host, _, port = endpoint.rpartition(":")
    place = _place(rank, size, local, here)
    return Facts(f"{by} (mpirun)", ranks={**place, "MASTER_ADDR": host.strip("[]"), "MASTER_PORT": port})


def _first_of_mpi(size: str, environ: Mapping[str, str], typed: Typed, port: str) -> str:
    """Where the ranks of several machines meet: mpirun tells nobody its first machine's address."""
    if typed.rdzv_endpoint:
        return typed.rdzv_endpoint
    if not environ.get("MASTER_ADDR"):
        raise UsageError(
            f"{size}={environ[size]} on several machines, and mpirun does not say the address of the first one: give "
            "--rdzv-endpoint HOST:PORT, or MASTER_ADDR, with the host of rank 0"
        )
    return _endpoint(environ["MASTER_ADDR"], environ.get("MASTER_PORT", port))


def _skypilot(environ: Mapping[str, str], _: Typed, __: int) -> Facts | None:
    addresses = environ.get("SKYPILOT_NODE_IPS", "").split()
    port = _port(environ.get("SKYPILOT_TASK_ID", ""))
    return _cluster("SKYPILOT_*", environ, addresses[0] if addresses else "", port)


def _dstack(environ: Mapping[str, str], _: Typed, __: int) -> Facts | None:
    port = _port(environ.get("DSTACK_RUN_ID", ""))
    return _cluster("DSTACK_*", environ, environ.get("DSTACK_MASTER_NODE_IP", ""), port)


def _cluster(source: str, environ: Mapping[str, str], head: str, port: str) -> Facts | None:
    """The facts of a tool that numbers its machines and says the first one's address."""
    count, number = READ[source][:2]
    if not environ.get(count) or (nodes := _number(environ, count)) == 1:
        return None
    rank = _number(environ, number)
    _within(rank, nodes, number, count)
    if not head:
        raise UsageError(
            f"{count}={nodes}, and {READ[source][2]} does not say the address of the first machine"
        )
    return Facts(source, {"nnodes": nodes, "rdzv_endpoint": _endpoint(head, port)}, rank)


_SOURCES: tuple[Callable[[Mapping[str, str], Typed, int], Facts | None], ...] = (
    _torchrun, _pet, _slurm, _mpi, _skypilot, _dstack,
)  # fmt: skip


def _checked(found: Facts, typed: Typed) -> Facts:
    """The facts with what was typed in place of what was derived, once the two agree."""
    if found.ranks:
        _refuse_counts(found, typed)
        return found
    nodes = found.values["nnodes"]
    if typed.nnodes is not None and nodes != 1 and _most(typed.nnodes) != _most(nodes):
        raise UsageError(
            f"--nnodes {typed.nnodes} contradicts {found.source}, which says {nodes}; leave out one of them"
        )
    if typed.node_rank is not None and found.node_rank not in {None, typed.node_rank}:
        raise UsageError(
            f"--node-rank {typed.node_rank} contradicts {found.source}, where this machine is {found.node_rank}; "
            "leave out the option"
        )
    said = {
        name: getattr(typed, name) for name in ("nnodes", "nproc_per_node", "rdzv_endpoint", "max_restarts")
    }
    values = {**found.values, **{name: value for name, value in said.items() if value is not None}}
    rank = found.node_rank if typed.node_rank is None else typed.node_rank
    return Facts(found.source, values, rank, static=typed.node_rank is not None, unused=found.unused)


def _refuse_counts(found: Facts, typed: Typed) -> None:
    asked = {
        "--nproc-per-node": typed.nproc_per_node, "--nnodes": typed.nnodes, "--node-rank": typed.node_rank,
        "--max-restarts": typed.max_restarts,
    }  # fmt: skip
    refused = [f"{option} {value}" for option, value in asked.items() if value is not None]
    if refused:
        raise UsageError(
            f"{' '.join(refused)} cannot be honoured: {found.source} says that this process is already rank "
            f"{found.ranks['RANK']} of {found.ranks['WORLD_SIZE']}. Leave the option out; for a launcher of its own on each "
            "machine start one task a machine (srun --ntasks-per-node=1), or unset RANK, LOCAL_RANK and WORLD_SIZE."
        )


def _place(rank: int, size: int, local: int, here: int) -> dict[str, str]:
    _within(local, here, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return dict(zip(READ["torchrun"], map(str, (rank, local, size, here)), strict=False))


def _port(job: str) -> str:
    """A port that all processes of a job come to by themselves."""
    return str(_FIRST_PORT + zlib.crc32(job.encode()) % _PORTS)


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not _is_number(text):
        raise UsageError(f"{name} must be a whole number; it is {text!r}")
    return int(text)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _LONGEST_NUMBER


def _within(rank: int, size: int, one: str, other: str) -> None:
    if rank >= size:
        raise UsageError(f"{one}={rank} contradicts {other}={size}: numbers count from 0")


def _nodes(text: str) -> int | str:
    """`2`, or a range `1:4` as it stands."""
    low, _, high = text.partition(":")
    if low == high or not high:
        return int(low) if _is_number(low) else text
    return text


def _most(nodes: int | str) -> int:
    last = str(nodes).rpartition(":")[2]
    return int(last) if _is_number(last) else 0


def _has_port(endpoint: str) -> bool:
    return re.fullmatch(r"(\[[^]]+\]|[^:]+):\d+", endpoint) is not None


def _endpoint(host: str, port: str) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def first_host(nodelist: str) -> str:
    """The first host of Slurm's `gpu[03-07,9],big1`."""
    host = re.match(r"(?:[^,[]|\[[^]]*\])+", nodelist)
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", host[0]) if host else ""


def _layout(text: str) -> list[int]:
    """Tasks of each machine out of Slurm's `2(x3),1`."""
    parts = re.findall(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", text)
    return [int(count) for count, times in parts for _ in range(int(times or 1))]
