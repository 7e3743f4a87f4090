"""The store that nodes share before torch's rendezvous: how each reaches it, and the checks before it joins."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import stat
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import NoReturn, Self

import torch
from torch._C._distributed_c10d import HashStore, Store, TCPStore
from torch.distributed import DistError

from accel_cli import console, worker
from accel_cli.errors import AccelError, UsageError
from accel_cli.planning.network import Endpoint, find_loopback_address
from accel_cli.planning.plan import DEFAULT_RUN_ID, AgentSettings, Plan
from accel_runtime.environment.settings import __version__
from accel_runtime.environment.text import decode_text, encode_text

__all__ = [
    "BootstrapStore",
    "NodeInfo",
    "RendezvousProgress",
    "ScriptIdentity",
    "limit_connections",
    "open_listener",
    "serve_store",
]

_STORE_TIMEOUT_S = 60
"""Seconds to wait for a key that another node is about to set."""
_NAME_TIMEOUT_S = 10
"""Seconds to wait until a host name given by the user resolves."""
_CONNECT_TIMEOUT_S = 15
"""Seconds in which torch tries again if a connection to the store fails."""
_GREETING_S = 0.1
"""Seconds to wait for the first words of another program, such as ssh."""
_SILENT = "it accepts connections, but does not answer: its launcher is suspended or busy, or another program has the port"
_CLOSED = "it closes connections: its launcher is not ready behind a proxy, or another program has the port"
_WRONG_ANSWER = "invalid value returned from server"
"""In torch's error if the first answer is not that of a store (torch 2.13)."""
_BACKLOG = 1024
"""Connections that may wait until the store accepts them."""
_INTERNET = frozenset({socket.AF_INET, socket.AF_INET6})
_CLOCK_PERIOD_S = 1.0
_DEPARTURE_TIMEOUT_S = 1.0
"""Seconds that a node which leaves waits until the store has its reason."""


@dataclass(frozen=True)
class ScriptIdentity:
    """The script that a node starts, for the comparison with the other nodes of its run."""

    name: str
    """The name of the script's file, or the module."""
    arguments: tuple[str, ...] = ()
    modules: Mapping[str, str] = field(default_factory=dict)
    """Hashes of the modules that the script can import from its folder, by path."""

    @classmethod
    def from_plan(cls, plan: Plan) -> ScriptIdentity:
        """Read the script of a plan."""
        kind, target, *arguments = plan.argv[plan.argv.index(plan.target, 2) - 1 :]
        if kind == "program":
            return cls(Path(target).name, tuple(arguments))
        modules = dict(_hash_modules(str(worker.get_import_folder(kind, target))))
        return cls(target if kind == "module" else Path(target).name, tuple(arguments), modules)

    def hide_arguments(self, run_id: str) -> ScriptIdentity:
        """Return it with hashes of the arguments, which may be secrets, for the store that all nodes read."""
        hashes = [_hash(encode_text(f"{run_id}\0{argument}")) for argument in self.arguments]
        return replace(self, arguments=tuple(hashes))

    def to_json(self) -> str:
        """Serialize to a value of the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes | str) -> ScriptIdentity:
        """Parse a value of the store."""
        fields = json.loads(text)
        return cls(fields["name"], tuple(fields["arguments"]), fields["modules"])

    def list_changed(self, other: ScriptIdentity) -> list[str]:
        """Return the modules that both have, with different contents."""
        return [name for name, digest in self.modules.items() if other.modules.get(name, digest) != digest]


def _hash_modules(folder: str, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path and hash of each module in a folder and in its packages."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.name.endswith(".py"):
                with suppress(OSError):
                    yield f"{prefix}{entry.name}", _hash(Path(entry.path).read_bytes())
            elif Path(entry.path, "__init__.py").is_file():
                yield from _hash_modules(entry.path, f"{prefix}{entry.name}/")


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


@dataclass(frozen=True)
class NodeInfo:
    """Facts that a node publishes when it joins."""

    host: str
    address: str
    pid: int
    nproc: int
    nnodes: str
    node_rank: int | None
    torch: str
    accel: str
    id: str = ""
    """A unique id: containers may share an address and have the same process ids."""

    @property
    def name(self) -> str:
        """The host name and address, for messages."""
        return self.host if self.host == self.address else f"{self.host} ({self.address})"

    def to_json(self) -> str:
        """Serialize to a value of the store."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: bytes | str) -> NodeInfo:
        """Parse a value of the store; fields of other versions are ignored, so that versions can be compared."""
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in json.loads(text).items() if name in names})


class BootstrapStore:
    """The store that all nodes of a run share, with the facts about this node."""

    def __init__(
        self, settings: AgentSettings, nproc: int, script: ScriptIdentity, *, derived: bool = False
    ) -> None:
        self._settings = settings
        self._script = script
        self.is_single_node = settings.is_single_node
        self.endpoint = Endpoint.parse(settings.rdzv_endpoint)
        self.min_nodes, self.max_nodes = settings.min_nodes, settings.max_nodes
        self.reset_deadline()
        self.is_host = True
        """True if this node serves the store."""
        if self.is_single_node:
            self.address = find_loopback_address()
            self.store: Store = HashStore()
        else:
            self._resolve_endpoint(wait_for_name=derived)
            self.address = self.endpoint.find_local_address()
            self.store = self._serve() or self._connect()
        low, high = self.min_nodes, self.max_nodes
        self.node = NodeInfo(
            host=settings.host or socket.gethostname(),
            address=self.address,
            pid=os.getpid(),
            nproc=nproc,
            nnodes=str(high) if low == high else f"{low}:{high}",
            node_rank=settings.node_rank,
            torch=torch.__version__,
            accel=__version__,
            id=f"{self.address}/{uuid.uuid4().hex}",
        )
        if not self.is_single_node:
            try:
                self._join()
            except DistError:
                raise AccelError(
                    f"the rendezvous at {self.endpoint} does not belong to run {settings.run_id!r}: its launcher has just "
                    "ended, or another run uses the address. Start `accel launch` of this run on that machine."
                ) from None

    @property
    def remaining_s(self) -> int:
        """Whole seconds left to wait for other nodes."""
        return max(1, int(self._deadline - time.monotonic()))

    def reset_deadline(self) -> None:
        """Wait for other nodes for `rdzv_timeout` seconds from now on."""
        self._deadline = time.monotonic() + self._settings.rdzv_timeout

    def get_key(self, name: str) -> str:
        """Return the key of a value of this run, since several runs may share a store."""
        return f"accel/{self._settings.run_id}/{name}"

    def get_value(self, name: str) -> str | None:
        """Return a value of this run; None if it is not set."""
        key = self.get_key(name)
        return decode_text(self.store.get(key)) if self.store.check([key]) else None

    def set_value(self, name: str, text: str) -> None:
        """Set a value of this run."""
        self.store.set(self.get_key(name), encode_text(text))  # type: ignore[arg-type]  # bytes are accepted, too

    def get_node(self, node_id: str) -> NodeInfo | None:
        """Return the facts about a node that has joined."""
        text = self.get_value(f"node/{node_id}")
        return NodeInfo.from_json(text) if text else None

    def publish_departure(self, reason: str) -> None:
        """Publish why this node leaves the run, without waiting long for a store that does not answer."""
        _run_in_thread(lambda: self.set_value(f"departed/{self.node.id}", reason), _DEPARTURE_TIMEOUT_S)

    def get_departure(self, node: NodeInfo) -> str | None:
        """Return why a node has left the run, if it published a reason."""
        return self.get_value(f"departed/{node.id}")

    def format_lost_store(self) -> str:
        """Return the message for a store that does not answer any more."""
        return (
            f"{self.node.name} lost the connection to the rendezvous at {self.endpoint}: the launcher there exited, that machine "
            "is down, or the network failed"
        )

    def _resolve_endpoint(self, *, wait_for_name: bool) -> None:
        """Wait until the host name of the endpoint resolves: clusters may add names while nodes start."""
        limit = self._deadline if wait_for_name else time.monotonic() + _NAME_TIMEOUT_S

        def format_line() -> str:
            return f"waiting: the name {self.endpoint.host!r} does not resolve yet; {self.remaining_s} s left"

        with RendezvousProgress(format_line):
            while True:
                try:
                    self.endpoint.resolve()
                except UsageError:
                    if time.monotonic() > min(limit, self._deadline):
                        raise
                    time.sleep(0.5)
                else:
                    return

    def _serve(self) -> TCPStore | None:
        """Serve the store if the endpoint is on this node; return None if it must be connected to."""
        # A scheduler's address may be translated, so that no interface of its first node has it.
        is_first = self._settings.node_rank == 0 and not self._settings.static
        if is_first or self.endpoint.is_local():
            try:
                return serve_store(self._open_listener())
            except OSError:
                pass  # taken by another launcher of this node, or by another program: `_connect` finds out
        self.is_host = False
        return None

    def _open_listener(self) -> socket.socket:
        """Listen on the port of the endpoint: on the socket that is already bound to it, if this launch has inherited one."""
        if self._settings.rdzv_socket is not None:
            with suppress(OSError):
                bound = socket.socket(fileno=self._settings.rdzv_socket)
                if bound.family in _INTERNET and bound.getsockname()[1] == self.endpoint.port:
                    bound.listen(_BACKLOG)
                    return bound
                bound.detach()  # the variable is that of another launch, which has started this one
        return open_listener("", self.endpoint.port)

    def _connect(self) -> TCPStore:
        """Connect to the store; try until the deadline, since its launcher may start later, or be suspended or busy."""
        host, port = self.endpoint.host, self.endpoint.port
        timeout = timedelta(seconds=_CONNECT_TIMEOUT_S)
        self._problem = "not tried yet"
        stores: list[TCPStore] = []
        with RendezvousProgress(self._format_no_answer):
            while True:
                self._problem = self._find_problem()
                if self._problem == _SILENT:
                    # In a thread, since torch would wait forever for a program that does not answer.
                    error = _run_in_thread(
                        lambda: stores.append(TCPStore(host, port, is_master=False, timeout=timeout)),
                        self.remaining_s,
                    )
                    if stores:
                        break
                    if _WRONG_ANSWER in error:
                        self._refuse_other_program()
                    self._problem = _CLOSED if error else _SILENT
                if time.monotonic() > self._deadline:
                    raise AccelError(
                        f"no answer from the rendezvous at {self.endpoint} for {self._settings.rdzv_timeout} s "
                        f"({self._problem}). Start `accel launch` on that machine, and open the port between the machines."
                    )
                time.sleep(0.5)
        stores[0].set_timeout(timedelta(seconds=_STORE_TIMEOUT_S))
        limit_connections(self.endpoint, self._settings.lost_after)
        return stores[0]

    def _find_problem(self) -> str:
        """Return why no store serves the endpoint; `_SILENT` if one may, since it waits for a request.

        Raises:
            AccelError: The program there begins to speak.
        """
        try:
            connection = socket.create_connection((self.endpoint.host, self.endpoint.port), timeout=2)
        except OSError as error:
            return error.strerror or str(error) or "no answer"
        with connection:
            connection.settimeout(_GREETING_S)
            try:
                if connection.recv(1):
                    self._refuse_other_program()
            except TimeoutError:
                return _SILENT
            except OSError:
                pass
        return _CLOSED

    def _refuse_other_program(self) -> NoReturn:
        host, port = self.endpoint.host, self.endpoint.port
        raise AccelError(
            f"port {port} on {host} is used by another program. Choose another port for --rdzv-endpoint."
        )

    def _format_no_answer(self) -> str:
        is_loopback = self.endpoint.is_loopback and self._problem not in {_SILENT, _CLOSED}
        hint = "; it is a loopback address, so choose one that all machines can reach" if is_loopback else ""
        missing = self.min_nodes - 1 or self.max_nodes - 1
        return (
            f"waiting: no answer from the rendezvous at {self.endpoint} yet ({self._problem}){hint}, {missing} missing; "
            f"{self.remaining_s} s left"
        )

    def _join(self) -> None:
        """Check that this node fits the first one, and publish it."""
        if self.is_host:
            assert isinstance(self.store, TCPStore)
            self.set_value("script", self._script.hide_arguments(self._settings.run_id).to_json())
            self.set_value("reference", self.node.to_json())
            stop = threading.Event()
            weakref.finalize(self, stop.set)
            arguments = (self.store.host, self.store.port, self.get_key("clock"), stop)
            threading.Thread(target=_publish_time, args=arguments, name="clock", daemon=True).start()
        else:
            first = NodeInfo.from_json(self.store.get(self.get_key("reference")))
            for field in ("torch", "accel", "nnodes"):
                value, expected = getattr(self.node, field), getattr(first, field)
                if value != expected:
                    self._refuse(
                        f"{self.node.name} has {field} {value}, and {first.name} has {field} {expected}",
                        "the machines do not match: {}. Make them the same on all machines.",
                    )
            self._check_script(first)
            # torch's rendezvous compares times of nodes, and drops one whose clock is wrong.
            skew = time.time() - float(self.store.get(self.get_key("clock")))
            if abs(skew) > max(3.0, self._settings.lost_after / 2):
                direction = "ahead of" if skew > 0 else "behind"
                self._refuse(
                    f"the clock of {self.node.host} is {abs(skew):.0f} s {direction} that of the first machine",
                    "{}. Synchronize the clocks of all machines with NTP (timedatectl, chrony).",
                )
        self.set_value(f"node/{self.node.id}", self.node.to_json())

    def _check_script(self, first: NodeInfo) -> None:
        """Refuse another script than that of the first node: two runs would train as one, or one run with two versions."""
        script = ScriptIdentity.from_json(self.store.get(self.get_key("script")))
        if difference := self._explain_difference(script, first.name):
            self._refuse(
                difference,
                "the machines do not match: {}. Start the same command on all machines of a run, and another run with another "
                "--rdzv-id and port. If the machines of one run need different arguments, give it a name: --rdzv-id NAME.",
            )
        if changed := self._script.list_changed(script):
            more = f" and {len(changed) - 1} other files" if len(changed) > 1 else ""
            problem = f"{self.node.name} has another {changed[0]}{more} than {first.name}"
            if self.get_value("started"):
                # The files of a running script may be edited, and a restart reads the new ones on all machines.
                console.note(f"{problem} had when the run started")
                return
            self._refuse(problem, "the machines do not match: {}. Copy the same files to all machines.")

    def _explain_difference(self, first: ScriptIdentity, first_name: str) -> str | None:
        """Return the difference to the script of the first node; None without one that matters.

        Nodes of a run that the user has named may have different arguments.
        """
        own, run_id, node = self._script, self._settings.run_id, self.node.name
        if own.name != first.name:
            return f"{node} starts {own.name}, and {first_name} starts {first.name}"
        hashes, expected = own.hide_arguments(run_id).arguments, first.arguments
        if run_id != DEFAULT_RUN_ID or hashes == expected:
            return None
        if len(hashes) != len(expected):
            return f"{node} starts {own.name} with {len(hashes)} arguments, and {first_name} with {len(expected)}"
        index = next(i for i, pair in enumerate(zip(hashes, expected, strict=True)) if len(set(pair)) > 1)
        argument = console.mask_arguments(own.arguments)[index]
        return f"{node} starts {own.name} with {argument!r}, and {first_name} with another value there"

    def mark_started(self) -> None:
        """Record that the processes of the run have started."""
        self.set_value("started", "1")

    def _refuse(self, problem: str, message: str) -> NoReturn:
        """Publish why this node cannot join, and raise UsageError with the problem in a message."""
        self.set_value("refused", problem)
        raise UsageError(message.format(problem))


def open_listener(address: str, port: int = 0) -> socket.socket:
    """Open a socket that listens on an address; an empty one means all interfaces."""
    dual = not address and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual or ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, dualstack_ipv6=dual, backlog=_BACKLOG)


def serve_store(listener: socket.socket) -> TCPStore:
    """Serve a store on a socket that listens already, so that no other program can take its port."""
    address, port = listener.getsockname()[:2]
    loopback = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - it listens on all interfaces
    timeout = timedelta(seconds=_STORE_TIMEOUT_S)
    return TCPStore(
        loopback.get(address, address),
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.detach(),
    )


def _publish_time(host: str, port: int, key: str, stop: threading.Event) -> None:
    """Publish the time of this node every second, until `stop` is set or the store is gone."""
    with suppress(DistError, RuntimeError):
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=_STORE_TIMEOUT_S))
        while True:
            store.set(key, str(time.time()))
            if stop.wait(_CLOCK_PERIOD_S):
                return


def _run_in_thread(function: Callable[[], None], timeout: float) -> str:
    """Run a function that uses a store, and return after `timeout` seconds even if the store does not answer.

    Returns the text of its error; empty without one, or while it runs.
    """
    errors: list[str] = []

    def run() -> None:
        try:
            function()
        except (DistError, RuntimeError, ValueError) as error:
            errors.append(str(error) or type(error).__name__)

    thread = threading.Thread(target=run, name="store", daemon=True)
    thread.start()
    thread.join(timeout)
    return errors[0] if errors else ""


def limit_connections(endpoint: Endpoint, seconds: int) -> None:
    """Let connections to the store fail after a number of silent seconds; the kernel's own limit is 15 minutes.

    torch has no limit for most calls of its store, so that an agent would wait for the kernel if the network fails. torch
    does not expose the sockets, so they are found among the descriptors of this process.
    """
    address, interval = endpoint.resolve(), max(1, seconds // 3)
    values = {
        "TCP_USER_TIMEOUT": seconds * 1000,
        "TCP_KEEPIDLE": interval,
        "TCP_KEEPINTVL": interval,
        "TCP_KEEPCNT": 3,
    }
    options = {getattr(socket, name): value for name, value in values.items() if hasattr(socket, name)}
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():  # noqa: PTH112, PTH208
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                peer = connection.getpeername()
                if isinstance(peer, tuple) and peer[1] == endpoint.port and address in str(peer[0]):
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    for option, value in options.items():
                        connection.setsockopt(socket.IPPROTO_TCP, option, value)


_LINE_PERIOD_S = 10.0
"""Seconds between two lines if stderr is not a terminal, whatever changes: reasons may alternate."""


class RendezvousProgress:
    """Shows a line while this node waits: updated in place on a terminal, else printed at most every ten seconds.

    It is not shown in the first `quiet` seconds, in which most nodes start.
    """

    def __init__(self, format_line: Callable[[], str], *, quiet: float = 2.0) -> None:
        self._format_line = format_line
        self._quiet = quiet
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="waiting", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        if self._done.wait(self._quiet):
            return
        # A lost store ends the wait, and is reported there.
        with suppress(DistError):
            if sys.stderr.isatty():
                self._update_line()
            else:
                self._print_lines()

    def _update_line(self) -> None:
        try:
            while not self._done.wait(0.5):
                self._write(f"\r\x1b[Kaccel: {self._format_line()}")
        finally:
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()

    def _print_lines(self) -> None:
        next_line = 0.0
        while not self._done.wait(0.5):
            if time.monotonic() >= next_line:
                console.note(self._format_line())
                next_line = time.monotonic() + _LINE_PERIOD_S
