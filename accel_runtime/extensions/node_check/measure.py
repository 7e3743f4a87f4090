"""The script of the node check for one rank: `measure.py quick|full HOST PORT PREFIX LOG_FOLDER`, with the variables of the rank.

It measures the device, the machine, the connections to the other nodes and the links, and publishes its record below PREFIX in the
store at HOST:PORT after each step; it prints nothing. Run by path in a process of its own, which can be killed if a device or a
collective hangs.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__" and sys.path[0] == os.path.dirname(os.path.abspath(__file__)):  # noqa: PTH100, PTH120
    # Python sets it for a script.
    del sys.path[0]
# isort: split
import errno
import platform
import resource
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from accel_runtime.environment.cgroup import count_cpus, read_available_memory
from accel_runtime.environment.settings import Settings, __version__
from accel_runtime.environment.topology import Topology
from accel_runtime.extensions.node_check.records import Board, Folder, Limits, Link, Peer, Record, Step
from accel_runtime.extensions.node_check.verdict import find_broken_pairs
from accel_runtime.foundation.torch_internals import PrefixStore, TCPStore
from accel_runtime.observe.nvml import load_nvml

__all__ = [
    "Listener",
    "Member",
    "RankCheck",
    "build_rounds",
    "main",
    "measure_device",
    "measure_folder",
    "reach_peers",
]

_STORE_S = 60.0
_LOOPBACK = "127.0.0.1"
"""Address of a single node, which nobody else needs to reach."""


class Member(NamedTuple):
    """A node of which all ranks have started, and where it listens."""

    node: int
    ranks: list[int]
    host: str
    address: str
    port: int


@dataclass
class RankCheck:
    """The check of one rank."""

    board: Board
    store: Any
    """The store for process groups."""
    limits: Limits
    record: Record
    """The facts so far."""
    world_size: int
    num_nodes: int
    is_first: bool
    """True for the first rank of its node."""
    device: torch.device
    backend: str
    log_folder: str
    environ: Mapping[str, str]

    def run(self) -> None:
        """Take all steps, and publish the record after each."""
        node = self.record.node
        address = find_address(self.environ) if self.num_nodes > 1 else _LOOPBACK
        with closing(Listener(node, address)) as listener:
            self.record = replace(self.record, host=socket.gethostname(), address=address, port=listener.port)
            self._publish(Step.COMPUTE)
            members = self._meet()
            self.record = measure_device(self.record, self.device, self.limits)
            self._publish(Step.LOOK if self.is_first else Step.COLLECTIVE)
            if self.is_first:
                self.record = measure_node(self.record, self.log_folder, os.getcwd())  # noqa: PTH109
                self.record = replace(self.record, peers=tuple(reach_peers(node, members)))
                self._publish(Step.COLLECTIVE)
            nodes, broken = self._choose_links(members)
            if node in nodes:
                links = self._measure_links(nodes, broken, members)
                self.record = replace(self.record, links=tuple(links) if self.is_first else ())
        self._publish(Step.NONE)
        # A rank that has started too late is not waited for.
        self.board.count("ended", int(any(member.node == node for member in members)))

    def _publish(self, missing_step: str) -> None:
        """Publish the record, with the step that begins."""
        self.record = replace(self.record, missing_step=missing_step)
        self.board.publish(self.record)

    def _meet(self) -> list[Member]:
        """Wait for the other ranks, and return the nodes that have started; the same for all."""
        self.board.count("started", 1)
        self._wait("started", self.world_size, self.limits.start_s)
        members = self.board.agree("members", self._list_members, leads=self.record.rank == 0)
        return [Member(*member) for member in members]

    def _list_members(self) -> list[Member]:
        by_node = self.board.read(self.num_nodes, self.world_size).by_node
        return [
            Member(node, [each.rank for each in of], of[0].host, of[0].address, of[0].port)
            for node, of in by_node.items()
            if len(of) == of[0].num_ranks and all(each.port and not each.failure for each in of)
        ]

    def _wait(self, name: str, count: int, limit: float) -> None:
        """Wait until a counter has reached a number; once it has reached most of it, only `straggler_s` seconds more."""
        end = time.monotonic() + limit
        is_late = False
        while (reached := self.board.count(name)) < count and time.monotonic() < end:
            if not is_late and reached >= (count + 1) // 2:
                is_late, end = True, min(end, time.monotonic() + self.limits.straggler_s)
            self.board.wait(self.world_size)

    def _choose_links(self, members: Sequence[Member]) -> tuple[list[int], set[tuple[int, int]]]:
        """Wait for the facts of all nodes, and return those that can be measured, and their broken pairs; the same for all."""
        if self.is_first:
            self.board.count("checked", 1)
        self._wait("checked", len(members), self.limits.straggler_s)
        leads = self.is_first and self.record.node == min((member.node for member in members), default=0)
        nodes, broken = self.board.agree("chosen", lambda: self._list_links(members), leads=leads)
        return nodes, {(first, second) for first, second in broken}

    def _list_links(self, members: Sequence[Member]) -> tuple[list[int], list[Any]]:
        """Return the nodes that can be measured, and their broken pairs."""
        records = self.board.read(self.num_nodes, self.world_size)
        # A device that fails would fail its partners too.
        failed = {record.node for record in records.ranks if record.error} | records.failures.keys()
        nodes = [member.node for member in members if member.node in records.nodes.keys() - failed]
        return nodes, sorted(find_broken_pairs(records, failed))

    def _measure_links(
        self, nodes: list[int], broken: set[tuple[int, int]], members: Sequence[Member]
    ) -> list[Link]:
        """Measure the links of this node to its partners, and those of all nodes together."""
        groups: list[tuple[int, ...]] = [
            pair
            for pairs in build_rounds(nodes, self.limits.rounds)
            for pair in pairs
            if self.record.node in pair and tuple(sorted(pair)) not in broken
        ]
        if not broken and (len(nodes) == 1 or len(nodes) == self.num_nodes > 2):  # noqa: PLR2004 - a pair is measured
            groups.append(tuple(nodes))
        links = [self._measure_link(group, members) for group in groups]
        return [link for link in links if link]

    def _measure_link(self, nodes: tuple[int, ...], members: Sequence[Member]) -> Link | None:
        """Measure collectives over the ranks of some nodes; return None for a single rank."""
        ranks = sorted(rank for member in members if member.node in nodes for rank in member.ranks)
        if len(ranks) == 1:
            return None
        name = "-".join(map(str, nodes)) if len(nodes) < self.num_nodes else "all"
        try:
            with self._create_group(PrefixStore(f"link/{name}", self.store), ranks):
                latency, bandwidth = _time_collectives(self.device, len(ranks), self.limits)
        except (RuntimeError, ValueError) as failure:
            return Link(nodes, error=str(failure).strip().splitlines()[0])
        return Link(nodes, latency, bandwidth)

    @contextmanager
    def _create_group(self, store: Any, ranks: list[int]) -> Iterator[None]:
        """Create a default process group of some ranks, which does not depend on the others, inside a `with` block."""
        dist.init_process_group(
            self.backend,
            store=store,
            rank=ranks.index(self.record.rank),
            world_size=len(ranks),
            timeout=timedelta(seconds=self.limits.collective_s),
            device_id=self.device if self.backend == "nccl" else None,
        )
        try:
            yield
        finally:
            dist.destroy_process_group()


def build_rounds(nodes: list[int], rounds: int) -> list[list[tuple[int, int]]]:
    """Return disjoint pairs of nodes for each round, such that no pair occurs twice.

    With an odd number of nodes, one has no partner in each round: with one more round, each node has at least two partners.
    """
    if len(nodes) == 1:
        return []
    places: list[int | None] = [*nodes, None] if len(nodes) % 2 else [*nodes]
    count = min(rounds + len(nodes) % 2, len(places) - 1)
    result = []
    for _ in range(count):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        result.append([(a, b) for a, b in pairs if a is not None and b is not None])
        # The first stays and the others move on by one: after as many rounds as others, each has met each.
        places = [places[0], places[-1], *places[1:-1]]
    return result


# The device

_CPU_SIZE, _GPU_SIZE = 512, 4096
_WARM_UP = 3
_VALUES, _SUMMANDS = 4, 28
"""Sums of so many products of whole numbers below this value are exact in every format, also in bfloat16 (up to 256)."""


def measure_device(record: Record, device: torch.device, limits: Limits) -> Record:
    """Add the rate of matrix multiplications on a device, and the comparison of a product with the same on the CPU."""
    if device.type != "cuda":
        record = replace(record, device="CPU")
    else:
        properties: Any = torch.cuda.get_device_properties(device)
        record = replace(record, device=properties.name, is_gpu=True)
        record = _read_gpu_errors(record, f"GPU-{properties.uuid}" if hasattr(properties, "uuid") else "")
    try:
        if error := _compare_product(device):
            return replace(record, error=error)
        return replace(record, tflops=_measure_rate(device, limits.matmul_s))
    except RuntimeError as failure:  # out of memory, or an error of the device
        return replace(record, error=f"a matrix multiplication failed: {str(failure).splitlines()[0]}")


def _compare_product(device: torch.device) -> str:
    """Return which elements of a product are wrong; empty if it is exact."""
    generator = torch.Generator().manual_seed(0)
    size = 256 if device.type == "cpu" else 1024
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    left, right = torch.randint(0, _VALUES, (2, size, size), generator=generator).to(torch.float32)
    left[:, _SUMMANDS:] = 0
    expected = left.to(torch.float64) @ right.to(torch.float64)
    actual = (left.to(device, dtype) @ right.to(device, dtype)).cpu()
    wrong = int((actual != expected.to(dtype)).sum())
    return f"a matrix multiplication gave {wrong} wrong elements of {expected.numel()}" if wrong else ""


def _measure_rate(device: torch.device, seconds: float) -> float:
    """Return the rate of matrix multiplications in TFLOP/s: the median on a GPU, the best of one thread on a CPU.

    Other processes use the CPU too: several threads that wait for each other would measure them.
    """
    is_gpu = device.type != "cpu"
    if not is_gpu:
        torch.set_num_threads(1)
    size, dtype = (_GPU_SIZE, torch.bfloat16) if is_gpu else (_CPU_SIZE, torch.float32)
    # Not zeros or ones, with which a GPU needs less power, and no lower clock.
    left, right = torch.randn(2, size, size, device=device, dtype=dtype)
    for _ in range(_WARM_UP):
        left @ right
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        _synchronize(device)
        begin = time.perf_counter()
        left @ right
        _synchronize(device)
        times.append(time.perf_counter() - begin)
    return 2 * size**3 / (median(times) if is_gpu else min(times)) / 1e12


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _read_gpu_errors(record: Record, uuid: str) -> Record:
    """Add the errors that the driver has counted for the GPU with a UUID."""
    nvml = load_nvml()
    if nvml is None:
        return record
    try:
        gpu = nvml.nvmlDeviceGetHandleByUUID(uuid.encode("ascii"))
    except nvml.NVMLError:  # an instance of a GPU (MIG)
        return record
    count = None
    with suppress(nvml.NVMLError):  # a GPU without ECC, or with ECC off
        count = int(
            nvml.nvmlDeviceGetTotalEccErrors(
                gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            )
        )
    return replace(record, uncorrected_errors=count, row_problem=_read_row_problem(nvml, gpu))


def _read_row_problem(nvml: Any, gpu: Any) -> str | None:
    """Return that rows (since the A100) or pages (before) are to be replaced; empty if not, None if it is not known."""
    with suppress(nvml.NVMLError):
        _, _, is_pending, has_failed = nvml.nvmlDeviceGetRemappedRows(gpu)
        if has_failed:
            return "remapping a row of its memory has failed; replace it"
        return "a row of its memory will be remapped at the next reset; reset it" if is_pending else ""
    with suppress(nvml.NVMLError):
        is_pending = nvml.nvmlDeviceGetRetiredPagesPendingStatus(gpu)
        return (
            "a page of its memory will be retired at the next reboot; reboot the node" if is_pending else ""
        )
    return None


# The node

_SAMPLE_BYTES = 1 << 16
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def measure_node(record: Record, log_folder: str, work_folder: str) -> Record:
    """Add the facts about this node: versions, folders, memory and limits."""
    shm = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None  # noqa: S108 - the file system itself
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return replace(
        record,
        python=platform.python_version(),
        torch=torch.__version__,
        accel=__version__,
        nccl=_read_nccl_version(),
        driver=_read_driver_version() if record.is_gpu else None,
        log_folder=measure_folder(log_folder) if log_folder else None,
        work_folder=measure_folder(work_folder),
        shm_bytes=shm.total if shm else None,
        memory_bytes=read_available_memory(),
        open_files=None if limit == resource.RLIM_INFINITY else limit,
        cpus=count_cpus(),
    )


def measure_folder(path: str) -> Folder:
    """Return the space in a folder, and try to write a small file there."""
    try:
        status = os.statvfs(path)
    except OSError as error:
        return Folder(path, error=error.strerror or str(error))
    free = status.f_bavail * status.f_frsize
    inodes = status.f_favail if status.f_files else None
    try:
        # Without a name where the file system allows it, so that nothing stays if this process is killed.
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(bytes(_SAMPLE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        # On NFS, and where all blocks are reserved, only the write finds out.
        return Folder(path, free, inodes, error.strerror or str(error), error.errno in _FULL)
    return Folder(path, free, inodes)


def _read_nccl_version() -> str | None:
    if not torch.cuda.is_available():
        return None
    with suppress(Exception):  # a build without NCCL
        return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return None


def _read_driver_version() -> str | None:
    nvml = load_nvml()
    if nvml is None:
        return None
    with suppress(nvml.NVMLError):
        version = nvml.nvmlSystemGetDriverVersion()
        return version.decode("ascii", errors="replace") if isinstance(version, bytes) else str(version)
    return None


# The connections to the other nodes, before any process group exists

_CONNECT_S = 3.0
_THREADS = 64
_SIOCGIFADDR = 0x8915
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class Listener:
    """Sends the number of this node on each connection, in a thread, until it is closed."""

    def __init__(self, node: int, address: str) -> None:
        self._node = node
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        # The name of this node may lead to another of its addresses.
        everywhere = "::" if family is socket.AF_INET6 else "0.0.0.0"  # noqa: S104 - for the seconds of the check
        host = address if _is_loopback(address) else everywhere
        self._server = socket.create_server((host, 0), family=family, backlog=1024)
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._serve, name="node-check", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._server.close()

    def _serve(self) -> None:
        with suppress(OSError):  # it was closed
            while True:
                connection, _ = self._server.accept()
                with connection, suppress(OSError):
                    connection.sendall(b"%d\n" % self._node)


def find_address(environ: Mapping[str, str]) -> str:
    """Return the address of this machine that collectives use.

    It is that of the interface of `GLOO_SOCKET_IFNAME` or `NCCL_SOCKET_IFNAME`, else that of the host name, as gloo chooses
    it, and else that of the route to the first node.
    """
    for variable in _INTERFACES:
        if (name := environ.get(variable)) and (address := _get_interface_address(name)):
            return address
    with suppress(OSError, UnicodeError):
        address = str(socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0])
        if not _is_loopback(address):
            return address
    with suppress(OSError):
        family, _, _, _, target = socket.getaddrinfo(environ["MASTER_ADDR"], 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            return str(probe.getsockname()[0])
    return _LOOPBACK


def reach_peers(own: int, members: Sequence[Member]) -> list[Peer]:
    """Connect to all other nodes, and return the result for each."""
    others = [member for member in members if member.node != own]
    if not others:
        return []
    with ThreadPoolExecutor(min(_THREADS, len(others)), thread_name_prefix="node-check") as pool:
        return list(pool.map(_reach_peer, others))


def _reach_peer(member: Member) -> Peer:
    """Connect to a node by its address, and by its name."""
    if problem := _connect(member.address, member):
        return Peer(member.node, f"{member.address} port {member.port}: {problem}")
    problems = ["its lookup has not ended"]

    def connect() -> None:
        problems[0] = _connect(member.host, member)

    # In a thread, since a name server that does not answer is waited for much longer.
    thread = threading.Thread(target=connect, name="node-check", daemon=True)
    thread.start()
    thread.join(_CONNECT_S)
    text = f"the name {member.host} does not lead to it: {problems[0]}" if problems[0] else ""
    return Peer(member.node, name_error=text)


def _connect(host: str, member: Member) -> str:
    """Return why a node does not answer at a host; empty if it does."""
    try:
        with (
            socket.create_connection((host, member.port), timeout=_CONNECT_S) as connection,
            connection.makefile() as stream,
        ):
            answer = stream.readline(20).strip()
    except TimeoutError:
        return f"no answer within {_CONNECT_S:.0f} s"
    except (OSError, UnicodeError) as failure:
        return getattr(failure, "strerror", None) or str(failure)
    return "" if answer == str(member.node) else f"node {answer} answers there, not node {member.node}"


def _get_interface_address(name: str) -> str | None:
    """Return the IPv4 address of an interface; None if it has none, as for the patterns that NCCL accepts."""
    import fcntl  # noqa: PLC0415 - not on every platform

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        request = struct.pack("256s", os.fsencode(name)[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    return None


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


# The links

_PROBE_BYTES = 1 << 18
_LATENCY_REPEATS = 20
_MAX_REPEATS = 10
_LARGE_S = 1.0
"""Seconds for all large collectives of one link, whose size is chosen so that a slow link needs no more."""


def _time_collectives(device: torch.device, size: int, limits: Limits) -> tuple[float, float]:
    """Return the seconds of a collective of one number, and the bytes a second of one of a large tensor."""
    ones = torch.ones(1, device=device)
    dist.all_reduce(ones)
    if ones.item() != size:
        raise ValueError(f"an all_reduce of ones over {size} ranks gave {ones.item()}")
    one = torch.zeros(1, device=device)
    latency = min(_time(lambda: dist.all_reduce(one), device) for _ in range(_LATENCY_REPEATS))
    probe = torch.zeros(_PROBE_BYTES // 4, device=device)
    dist.all_reduce(probe)
    # The same on all ranks, so that they make the same collectives.
    slowest = torch.tensor(_time(lambda: dist.all_reduce(probe), device), device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    probe_s = max(slowest.item(), 1e-6)
    target = limits.message_mb * 10**6 * (limits.gpu_factor if device.type == "cuda" else 1)
    num_bytes = min(target, max(_PROBE_BYTES, int(_PROBE_BYTES * _LARGE_S / 2 / probe_s)))
    repeats = max(1, min(_MAX_REPEATS, int(_LARGE_S / (probe_s * num_bytes / _PROBE_BYTES))))
    large = torch.zeros(num_bytes // 4, device=device)
    seconds = min(_time(lambda: dist.all_reduce(large), device) for _ in range(repeats))
    # The bus bandwidth of nccl-tests: each rank sends and receives this part of the tensor.
    return latency, num_bytes * 2 * (size - 1) / size / seconds


def _time(function: Callable[[], object], device: torch.device) -> float:
    _synchronize(device)
    begin = time.perf_counter()
    function()
    _synchronize(device)
    return time.perf_counter() - begin


def main(arguments: list[str], environ: dict[str, str]) -> None:
    """Run the check of this rank."""
    extent, host, port, prefix, log_folder = arguments
    topology, settings = Topology.from_env(environ), Settings.from_env(environ)
    # A time-out raises an error, instead of ending the process.
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    has_gpu = settings.device in {"auto", "cuda"} and torch.cuda.is_available()
    # Ranks may share a GPU, as for the Accelerator.
    number = topology.local_rank % max(1, torch.cuda.device_count())
    device = torch.device("cuda", number) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    chosen = settings.process_group_backend
    backend = chosen if chosen in {"gloo", "nccl"} else "nccl" if has_gpu else "gloo"
    timeout = timedelta(seconds=_STORE_S)
    store: Any = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
    board = Board(store, prefix)
    RankCheck(
        board=board,
        store=PrefixStore(prefix, store),
        limits=Limits.of(quick=extent == "quick"),
        record=Record.from_dict(board.get(f"record/{topology.rank}")),
        world_size=topology.world_size,
        num_nodes=int(environ.get("GROUP_WORLD_SIZE", "1")),
        is_first=topology.local_rank == 0,
        device=device,
        backend=backend,
        log_folder=log_folder,
        environ=environ,
    ).run()


if __name__ == "__main__":
    main(sys.argv[1:], dict(os.environ))
    # Threads of gloo may still release tensors, which fails while the interpreter ends.
    os._exit(0)
