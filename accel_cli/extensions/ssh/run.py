"""Run a plan on several hosts over ssh: connect to all, start `accel launch` on each, print its output, end all together."""

from __future__ import annotations

import json
import os
import queue
import re
import selectors
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from accel_cli import console
from accel_cli.errors import AccelError, UsageError
from accel_cli.extensions.ssh.hosts import Host
from accel_cli.extensions.ssh.plan import SshPlan
from accel_cli.extensions.ssh.supervisor import CONTROL, HEADER, MARK
from accel_cli.launchers.node_launch import NodeEnd, get_failure_order
from accel_cli.launchers.source_files import Selection, check_engine_files, check_selected, select_files
from accel_cli.planning import network
from accel_cli.planning.plan import Plan
from accel_cli.runner.guard import FORWARDED_SIGNALS, HANDLED_SIGNALS
from accel_cli.runner.output import LinePrefixer, get_file_identity, write_all
from accel_runtime.environment import settings as env

__all__ = ["Connection", "Screen", "run"]

_POLL_S = 0.2
_IDLE_S = 0.02
_ANSWER_FACTOR = 3
"""A host must have started Python within so many times `connect_timeout`."""
_MARGIN_S = 10
"""Seconds beyond `shutdown_timeout` that a host has to end its processes and to report."""
_EXIT_S = 2
"""Seconds that ssh may take to exit after the end of its output."""
_CHUNK = 1 << 16
_KEPT_LINES = 20
_MAX_WAITING = 64
"""Pieces of output that wait for a screen before the connections are no longer read."""
_NOT_EXECUTABLE, _NOT_FOUND, _SSH_FAILED = 126, 127, 255
"""Exit codes of a shell, of which rsync has the second too, and of ssh itself."""
_SSH_CURES = (
    (
        re.compile(r"host key verification failed|host identification has changed|host key is known", re.IGNORECASE),
        "Connect once by hand and compare the key: ssh {0}. A key that was replaced is removed by ssh-keygen -R {1}",
    ),
    (
        re.compile(r"permission denied|too many authentication failures", re.IGNORECASE),
        "Load your key into the agent (ssh-add), or copy it to the host (ssh-copy-id {0})",
    ),
    (re.compile(r"could not resolve", re.IGNORECASE), "Check the name, or add it to ~/.ssh/config"),
)  # fmt: skip
"""Cures by ssh's message, with the destination and the name of the host."""


def run(plan: Plan) -> int:
    """Run a plan on its hosts; return 0, the exit code of the first host that failed, or 128 + n after signal n.

    Raises:
        AccelError: A host cannot be reached, or cannot run the script; nothing was started.
        UsageError: ssh or rsync is missing here, or the working folder cannot be copied.
    """
    job = plan.job
    assert isinstance(job, SshPlan)
    for program in ("ssh", "rsync") if job.sync else ("ssh",):
        if not shutil.which(program):
            raise UsageError(f"{program} not found: this launch needs it. Install the {program} client.")
    selection = _select_files(job, plan.env) if job.sync else None
    with _Run(plan, job) as current:
        try:
            return current.run(selection)
        except _InterruptedError as error:
            return 128 + error.number


def _select_files(job: SshPlan, variables: Mapping[str, str]) -> Selection:
    selection = select_files(Path.cwd(), job.include, job.exclude, keep_links=True)
    for note in selection.notes:
        console.note(note)
    if job.script and not Path(job.script).is_absolute():
        check_selected(selection, job.script)
    check_engine_files(selection, ".", variables)
    return selection


class _InterruptedError(Exception):
    """A signal arrived before `accel launch` was started."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _Run:
    """One launch on all hosts."""

    def __init__(self, plan: Plan, job: SshPlan) -> None:
        self._plan, self._job = plan, job
        self._connections: list[Connection] = []
        self._screens = {fd: Screen(fd) for fd in (1, 2)}
        self._open_screens = dict(self._screens)
        """The screens without a reported error."""
        self._selector = selectors.DefaultSelector()
        self._signals: deque[int] = deque()
        self._before: dict[int, Any] = {}
        self._received: int | None = None
        """The first signal that ends the run."""
        self._is_failure_first = False
        """True if a host failed before any signal arrived."""
        self._alive_at = 0.0

    def __enter__(self) -> Self:
        for number in HANDLED_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as `nohup` and `&` ignore signals
                self._before[number] = signal.signal(number, lambda each, _: self._signals.append(each))
        return self

    def __exit__(self, *exc_info: object) -> None:
        for connection in self._connections:
            connection.close()
        self._selector.close()
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def run(self, selection: Selection | None) -> int:
        """Connect, check, copy, start, and wait until all hosts have ended."""
        self._connect()
        if selection:
            self._check(create=self._job.folder)
            self._copy(selection)
        self._check(check={"folder": self._job.folder, "script": self._job.script})
        self._start()
        self._follow()
        self._finish_output()
        return self._report()

    # Before the start

    def _connect(self) -> None:
        """Connect to all hosts, and raise AccelError with every host that fails."""
        job = self._job
        for number, host in enumerate(job.hosts):
            command = job.build_ssh_command(host)
            connection = Connection(host, command, number, self._screens, prefixed=len(job.hosts) > 1)
            self._connections.append(connection)
            self._register(connection)
        self._wait(lambda connection: connection.facts is not None, _ANSWER_FACTOR * job.connect_timeout)
        problems = {}
        for connection in self._connections:
            if connection.facts is None or connection.ended_at:
                problems[connection] = self._describe_failure(connection)
            elif (version := connection.facts["version"]) != env.__version__:
                problems[connection] = (
                    f"it has accel {version}, and this machine has accel {env.__version__}. Install the same version"
                )
        self._raise_for(problems)

    def _describe_failure(self, connection: Connection) -> str:
        if connection.ended_at:
            return connection.describe_end(connection.host.python or self._job.python)
        seconds = _ANSWER_FACTOR * self._job.connect_timeout
        return f"no answer within {seconds} s. Check the host, or raise launcher.connect_timeout"

    def _check(self, **request: Any) -> None:
        """Send a check to all hosts, and raise AccelError with every host that does not pass it."""
        for connection in self._connections:
            connection.problem = None
            connection.send(**request)
        self._wait(
            lambda connection: connection.problem is not None, _ANSWER_FACTOR * self._job.connect_timeout
        )
        cure = "Use a shared file system, copy the folder with --sync, or set launcher.folder"
        if self._job.sync:
            cure = "Set launcher.folder to a path that can be created there, and name the script by its path in the folder"
        problems = {}
        for connection in self._connections:
            if connection.problem:
                problems[connection] = f"{connection.problem}. {cure}"
            elif connection.problem is None:
                problems[connection] = self._describe_failure(connection)
        self._raise_for(problems)

    def _raise_for(self, problems: Mapping[Connection, str]) -> None:
        if not problems:
            return
        lines = [f"host {connection.host.destination}: {text}." for connection, text in problems.items()]
        rest = (
            f" {len(problems)} of {len(self._connections)} hosts cannot run it" if len(problems) > 1 else ""
        )
        head = f"Cannot start the run, and nothing was started:{rest}"
        raise AccelError(f"{head} {lines[0]}" if len(lines) == 1 else "\n  ".join([head, *lines]))

    def _copy(self, selection: Selection) -> None:
        """Copy files to all hosts at once with rsync."""
        job = self._job
        with tempfile.TemporaryDirectory() as scratch:
            names = Path(scratch, "names")
            names.write_bytes(b"\0".join(os.fsencode(file.name) for file in selection.files))
            copies = {}
            for connection in self._connections:
                user, at, name = connection.host.destination.rpartition("@")
                target = f"{user}{at}{f'[{name}]' if ':' in name else name}:{job.folder}/"
                command = [
                    "rsync", "-lptK", "--update", "-s", "--from0", f"--files-from={names}", "-e", shlex.join(("ssh", *job.ssh_options)),
                    "--", f"{selection.source}/", target,
                ]  # fmt: skip
                errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the copy
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, start_new_session=True
                )
                copies[connection] = errors, process
            try:
                self._poll_until(lambda: all(process.poll() is not None for _, process in copies.values()))
            finally:
                problems = {each: text for each, copy in copies.items() if (text := _finish_copy(*copy))}
        self._raise_for(problems)
        size = console.format_size(selection.size)
        console.note(f"copied {len(selection.files)} files, {size}, to {job.folder} on {len(copies)} host(s)")

    def _start(self) -> None:
        job = self._job
        endpoint, run_id = job.rdzv_endpoint or self._find_endpoint(), f"ssh-{uuid.uuid4().hex[:12]}"
        is_port_chosen = len(self._connections) > 1 and not job.rdzv_endpoint
        for connection in self._connections:
            connection.postpone()
            connection.send(
                start={
                    "argv": job.build_launch_command(connection.number, endpoint, run_id),
                    "folder": job.folder,
                    "serves_rendezvous": is_port_chosen and connection.number == 0,
                    # Over the connection, since command lines are visible to all users of a host.
                    "env": {
                        **self._plan.env,
                        env.NODE_NAME: connection.host.name,
                        env.NUM_PROCESSES: str(job.num_processes),
                    },
                    "merge": get_file_identity(1) == get_file_identity(2),
                    "lost_after": job.lost_after,
                    "shutdown_timeout": job.shutdown_timeout,
                }
            )

    def _find_endpoint(self) -> str:
        """Return the rendezvous: the address of the first host to which ssh connected, and a free port there."""
        if len(self._connections) == 1:
            return ""
        first = self._connections[0]
        assert first.facts
        for address in (first.facts["address"], first.facts["own_address"]):
            endpoint = network.Endpoint(address or "localhost", first.facts["port"])
            # The scope of a link-local address is valid on one host only.
            if not endpoint.is_loopback and "%" not in endpoint.host:
                return str(endpoint)
        raise AccelError(
            f"Cannot start the run: no address of {first.host.destination} is known that the other hosts reach. Set "
            "--rdzv-endpoint HOST:PORT."
        )

    # The run

    def _follow(self) -> None:
        """Wait until all hosts have ended; end the others after a failure or a signal."""
        limit, stage = float("inf"), 0
        while running := [each for each in self._connections if each.ended_at is None]:
            self._poll()
            self._end_silent(running)
            while self._signals:
                self._forward(self._signals.popleft(), running)
            if stage == 0 and (self._received or any(each.failed for each in self._connections)):
                stage, lost = 1, [each for each in self._connections if each.is_lost]
                self._is_failure_first = not self._received
                for connection in lost:
                    console.note(
                        f"lost the connection to {connection.host.destination}: the processes on all hosts have "
                        f"{self._job.shutdown_timeout} s to exit"
                    )
                # The other hosts notice a failed rank themselves, and report before they end.
                limit = 0 if lost else time.monotonic() + self._job.shutdown_timeout + _MARGIN_S
                if self._received:
                    stage = 2
            if time.monotonic() < limit:
                continue
            if stage == 1:
                stage, limit = 2, time.monotonic() + self._job.shutdown_timeout + _MARGIN_S
                self._send_signal(signal.SIGTERM, running)
            else:
                for connection in running:
                    self._end(connection)

    def _end_silent(self, running: Iterable[Connection]) -> None:
        """End connections without an answer: ssh does not check a shared connection itself."""
        for connection in running:
            if connection.ended_at is None and time.monotonic() - connection.heard_at > self._job.lost_after:
                connection.is_silent = True
                self._end(connection)

    def _forward(self, number: int, running: Iterable[Connection]) -> None:
        if number not in FORWARDED_SIGNALS and self._received is None:
            self._received = number
            name = "Ctrl-C (SIGINT)" if number == signal.SIGINT else signal.Signals(number).name
            console.note(
                f"received {name}: the processes on all hosts have {self._job.shutdown_timeout} s to exit; a second signal "
                "kills them"
            )
        self._send_signal(number, running)

    def _send_signal(self, number: int, running: Iterable[Connection]) -> None:
        for connection in running:
            connection.send(signal=int(number))

    def _finish_output(self) -> None:
        """Wait until the screens have taken all output, or until a signal."""
        while not all(screen.is_idle for screen in self._screens.values()):
            time.sleep(_IDLE_S)
            while self._signals:
                if (number := self._signals.popleft()) not in FORWARDED_SIGNALS:
                    self._received = self._received or number
                    return

    def _report(self) -> int:
        """Print the first failure last, and return the exit code."""
        failed = [connection for connection in self._connections if connection.failed]
        if self._received and not self._is_failure_first:
            return 128 + self._received
        if not failed:
            return 0
        first = min(failed, key=lambda each: get_failure_order(each.exit, each.ended_at or 0.0))
        end = first.exit or NodeEnd(1, first.describe_end(first.host.python or self._job.python))
        console.error(f"host {first.host.destination}: {end.describe()}")
        return end.code

    # Events

    def _register(self, connection: Connection) -> None:
        process = connection.process
        assert process.stdout
        assert process.stderr
        self._selector.register(process.stdout, selectors.EVENT_READ, (connection, connection.receive))
        self._selector.register(
            process.stderr, selectors.EVENT_READ, (connection, connection.receive_messages)
        )

    def _wait(self, is_done: Callable[[Connection], bool], seconds: float) -> None:
        """Wait until all connections are done or have ended, or until the time is over."""
        end = time.monotonic() + seconds
        self._poll_until(
            lambda: (
                time.monotonic() > end or all(is_done(each) or each.ended_at for each in self._connections)
            )
        )

    def _poll_until(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            self._poll()
            while self._signals:
                if (number := self._signals.popleft()) not in FORWARDED_SIGNALS:
                    raise _InterruptedError(number)

    def _poll(self) -> None:
        """Wait for events for a short time, and show all hosts that the launcher is alive."""
        if any(screen.is_full for screen in self._screens.values()):
            time.sleep(_IDLE_S)  # the hosts wait, as processes do whose terminal is stopped
            for connection in self._connections:
                connection.postpone()
        else:
            self._receive()
            for connection in self._connections:
                connection.flush()
        self._check_screens()
        now = time.monotonic()
        if now - self._alive_at > min(5.0, self._job.lost_after / 3):
            self._alive_at = now
            for connection in self._connections:
                connection.send()

    def _receive(self) -> None:
        for key, _ in self._selector.select(_POLL_S):
            connection, receive = key.data
            is_open = receive()
            if key.fileobj is connection.process.stdout and connection.exit is not None:
                is_open = False  # processes that a login shell has started may keep the connection open
            if is_open:
                continue
            if key.fileobj is connection.process.stdout:
                self._end(connection)
            else:
                self._selector.unregister(key.fileobj)

    def _check_screens(self) -> None:
        """Give the scripts a closed output if a screen is closed, as in `accel launch | head`."""
        for fd, screen in [*self._open_screens.items()]:
            if screen.error is None:
                continue
            del self._open_screens[fd]
            if isinstance(screen.error, BrokenPipeError):
                for connection in self._connections:
                    connection.send(close=fd)
            else:
                console.note(
                    f"output is no longer shown: {screen.error.strerror}. The logs on the hosts have all of it."
                )

    def _end(self, connection: Connection) -> None:
        """Record the end of a connection; a shared connection of ssh may keep its standard error open."""
        if (stdout := connection.process.stdout) and stdout in self._selector.get_map():
            self._selector.unregister(stdout)
        connection.ended_at = time.monotonic()
        connection.flush(end=True)
        with suppress(OSError):
            connection.process.stdin.close()  # type: ignore[union-attr]
        if connection.exit is None and connection.facts is not None:
            connection.process.kill()


def _finish_copy(errors: Any, process: subprocess.Popen[bytes]) -> str:
    """End rsync if it still runs, and return why it failed; empty if it did not."""
    if process.poll() is None:
        process.kill()
        process.wait()
    with errors:
        errors.seek(0)
        lines = errors.read().decode(errors="replace").splitlines()
    if process.returncode == 0:
        return ""
    missing = next((line for line in lines if line.endswith("not found")), "")
    if missing or process.returncode == _NOT_FOUND:
        return f"cannot run rsync: {missing or 'not found'}. Install rsync there"
    # Messages of ssh and of a login shell may precede that of rsync.
    line = next((line for line in lines if line.startswith("rsync")), "")
    line = line or (lines[0] if lines else f"exit code {process.returncode}")
    # rsync 3.5 follows no link that leaves the folder.
    cure = "Add the file to launcher.exclude" if "symbolic links" in line else "Check the folder there"
    return f"cannot copy the folder: {line.rstrip('.')}. {cure}"


class Screen:
    """Standard output or error, written by a thread: a stopped terminal must not stop the requests to the hosts."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.error: OSError | None = None
        """The reason why the stream takes no more output."""
        self._queue: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=self._write_all, daemon=True).start()

    @property
    def is_full(self) -> bool:
        """True if much output waits."""
        return self._queue.qsize() > _MAX_WAITING

    @property
    def is_idle(self) -> bool:
        """True if all output has been written."""
        return self._queue.unfinished_tasks == 0

    def write(self, data: bytes) -> None:
        """Write data after the output that waits; drop it after an error."""
        if data and self.error is None:
            self._queue.put(data)

    def _write_all(self) -> None:
        while True:
            data = self._queue.get()
            try:
                if self.error is None:
                    write_all(self.fd, data)
            except OSError as error:
                self.error = error
            self._queue.task_done()


class Connection:
    """The ssh process of one host, and the state that its supervisor has reported."""

    def __init__(
        self,
        host: Host,
        command: Sequence[str],
        number: int,
        screens: Mapping[int, Screen],
        *,
        prefixed: bool,
    ) -> None:
        self.host, self.number, self._screens = host, number, screens
        self.facts: Mapping[str, Any] | None = None
        """The description of the host by its supervisor; None until that has started."""
        self.problem: str | None = None
        """The reply to the last check; empty if the host passed it."""
        self.exit: NodeEnd | None = None
        """The end of `accel launch`; None until it has ended."""
        self.ended_at: float | None = None
        self.heard_at = time.monotonic()
        """The time of the last output or reply."""
        self.is_silent = False
        """True if the host did not answer for `lost_after` seconds."""
        self.messages: deque[str] = deque(maxlen=_KEPT_LINES)
        """The last lines of ssh and of the login shell."""
        self._data = b""
        self._has_mark = False
        self._prefixers = {
            screen: LinePrefixer(
                number,
                coloured=console.use_color() and os.isatty(screen),
                progress_bars=number == 0,
                label=host.name,
            )
            for screen in (1, 2)
            if prefixed
        }
        # In its own session, so that Ctrl-C of the terminal does not end the connection.
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    @property
    def is_lost(self) -> bool:
        """True if the connection ended before `accel launch`."""
        return self.ended_at is not None and self.exit is None

    @property
    def failed(self) -> bool:
        """True if `accel launch` failed, or the connection is lost."""
        return self.is_lost or bool(self.exit and self.exit.code)

    def send(self, **request: Any) -> None:
        """Send a request to the supervisor; without one, show that the launcher is alive."""
        assert self.process.stdin
        if self.ended_at is not None:
            return
        with suppress(OSError):  # the connection is lost, which is noticed when its output ends
            self.process.stdin.write(json.dumps(request).encode("ascii") + b"\n")
            self.process.stdin.flush()

    def receive(self) -> bool:
        """Read frames, print output, and return False at the end of the connection."""
        assert self.process.stdout
        data = os.read(self.process.stdout.fileno(), _CHUNK)
        self.heard_at = time.monotonic()
        self._data += data
        if not self._has_mark:
            _, mark, rest = self._data.partition(MARK)
            if mark:
                self._has_mark, self._data = True, rest
        while self._has_mark and len(self._data) >= HEADER.size:
            channel, length = HEADER.unpack_from(self._data)
            end = HEADER.size + length
            if len(self._data) < end:
                break
            content, self._data = self._data[HEADER.size : end], self._data[end:]
            self._take(channel, content)
        return bool(data)

    def receive_messages(self) -> bool:
        """Read lines of ssh, and return False at their end."""
        assert self.process.stderr
        data = os.read(self.process.stderr.fileno(), _CHUNK)
        self.messages += [line for line in data.decode(errors="replace").splitlines() if line.strip()]
        return bool(data)

    def _take(self, channel: int, content: bytes) -> None:
        if channel != CONTROL:
            self._print(channel, content)
            return
        for kind, value in json.loads(content).items():
            if kind == "host":
                self.facts = value
            elif kind == "problem":
                self.problem = value
            elif kind == "exit":
                self.exit = NodeEnd(*value)

    def _print(self, screen: int, data: bytes) -> None:
        prefixer = self._prefixers.get(screen)
        self._screens[screen].write(prefixer.feed(data) if prefixer else data)

    def flush(self, *, end: bool = False) -> None:
        """Print a line that has waited long enough for its end."""
        for screen, prefixer in self._prefixers.items():
            self._screens[screen].write(prefixer.flush_partial(end=end))

    def postpone(self) -> None:
        """Allow for the time in which the connection is not read."""
        self.heard_at = time.monotonic()
        for prefixer in self._prefixers.values():
            prefixer.postpone()

    def close(self) -> None:
        """End the connection: the supervisor then ends the processes of its host."""
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            with suppress(OSError):
                if stream:
                    stream.close()
        self.process.kill()
        self.process.wait()

    def _wait(self) -> int:
        """Wait until ssh has exited, read its last messages, and return its exit code."""
        try:
            code = self.process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        assert self.process.stderr
        os.set_blocking(self.process.stderr.fileno(), False)
        with suppress(BlockingIOError):  # a shared connection keeps it open
            while self.receive_messages():
                pass
        return code

    def describe_end(self, python: str) -> str:
        """Return why the connection ended, with the cure."""
        code, destination = self._wait(), self.host.destination
        line = self.messages[-1] if self.messages else f"ssh ended with exit code {code}"
        if self.is_silent:
            line = "no answer within launcher.lost_after"
        if self.facts:
            return f"the connection was lost: {line}. Check the host and the network"
        if code == _SSH_FAILED:
            text = "\n".join(self.messages)
            cure = next((cure for pattern, cure in _SSH_CURES if pattern.search(text)), None)
            cure = cure or "Check that the host is up and that ssh reaches it: ssh {0}"
            return f"{line.rstrip('.')}. {cure.format(destination, self.host.name)}"
        if code in {_NOT_EXECUTABLE, _NOT_FOUND}:
            return f"cannot run {python}: {line}. Install Python with accel there, or set launcher.python"
        return (
            f"accel cannot start with {python}: {line}. Install the same accel there, or set launcher.python"
        )
