"""Run a plan on several hosts over ssh: connect to all, start `accel launch` on each, print its output, end all together."""

from __future__ import annotations

import json
import os
import re
import select
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
from typing import IO, Any, Self

from accel_cli import console, control
from accel_cli.errors import AccelError, UsageError
from accel_cli.extensions.ssh.hosts import Host
from accel_cli.extensions.ssh.plan import SshPlan
from accel_cli.launchers.node_launch import NodeEnd, get_failure_order
from accel_cli.launchers.source_files import Selection, check_engine_files, check_selected, select_files
from accel_cli.planning import network
from accel_cli.planning.plan import Plan
from accel_cli.runner.guard import FORWARDED_SIGNALS, HANDLED_SIGNALS
from accel_cli.runner.output import LinePrefixer, get_file_identity, write_all
from accel_runtime.environment import settings as env

__all__ = ["run"]

_POLL_S = 0.05
_ANSWER_FACTOR = 3
"""A host must have started Python within so many times `connect_timeout`."""
_MARGIN_S = 10
"""Seconds beyond `shutdown_timeout` that a host has to end its processes and to report."""
_EXIT_S = 2
"""Seconds without output that end a connection after the end of `accel launch`, and that ssh may take to exit."""
_READ_MS = 200
"""Milliseconds after which a partial line may be shown."""
_CHUNK = 1 << 16
_KEPT_LINES = 20
_STOPPED_S = 1
"""Seconds after which a write to a screen counts as stopped, as by a terminal or a pager."""
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
_SSH_LINE = re.compile(
    r"(ssh|client_loop|mux_client_\w+|packet_write_\w+|Read from remote host [^ ]+|ssh_\w+): "
    r"|Timeout, server .* not responding|(Shared c|C)onnection (to|closed|reset)\b"
)
"""What ssh prints if it loses a connection; the other lines of its standard error are those of the host."""
_STARTUP_S = 600
"""Seconds until the first sign of life of `accel launch`, which imports torch before."""


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
    console.print_notes(selection.notes)
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
        self._connections: list[_Connection] = []
        self._screens = _Screens()
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
            connection = _Connection(host, command, number, self._screens, prefixed=len(job.hosts) > 1)
            self._connections.append(connection)
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

    def _describe_failure(self, connection: _Connection) -> str:
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

    def _raise_for(self, problems: Mapping[_Connection, str]) -> None:
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
            connection.is_started, connection.heard_at = True, time.monotonic()
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
            self._forward_signals(running)
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
                    # The end of a long output may still arrive from a host that has ended.
                    if self._received or not connection.is_closing:
                        connection.record_end()

    def _end_silent(self, running: Iterable[_Connection]) -> None:
        """End connections without a sign of life: ssh does not check a shared connection itself."""
        for connection in running:
            limit = self._job.lost_after if connection.is_up else max(_STARTUP_S, self._job.lost_after)
            if connection.ended_at is None and time.monotonic() - connection.heard_at > limit:
                connection.is_silent = True
                connection.record_end()

    def _forward_signals(self, running: Iterable[_Connection]) -> None:
        """Send the signals that have arrived to the hosts, and SIGTERM if the output is closed."""
        if self._screens.is_closed and self._received is None:
            self._receive(signal.SIGPIPE, "the output is closed")
            self._send_signal(signal.SIGTERM, running)
        while self._signals:
            number = self._signals.popleft()
            if number not in FORWARDED_SIGNALS and self._received is None:
                name = "Ctrl-C (SIGINT)" if number == signal.SIGINT else signal.Signals(number).name
                self._receive(number, f"received {name}")
            self._send_signal(number, running)

    def _receive(self, number: int, event: str) -> None:
        """Record the signal that ends the run."""
        self._received = number
        console.note(
            f"{event}: the processes on all hosts have {self._job.shutdown_timeout} s to exit; a second signal kills them"
        )

    def _send_signal(self, number: int, running: Iterable[_Connection]) -> None:
        for connection in running:
            connection.send(signal=int(number))

    def _finish_output(self) -> None:
        """Wait until the screens have taken all output, or until a signal."""
        while any(connection.is_read for connection in self._connections):
            time.sleep(_POLL_S)
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

    def _wait(self, is_done: Callable[[_Connection], bool], seconds: float) -> None:
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
        """Wait for a short time, and show all hosts that the launcher is alive."""
        time.sleep(_POLL_S)
        now = time.monotonic()
        # After Ctrl-C, a screen that is stopped does not keep the launcher.
        may_write = not (self._received and self._screens.is_stopped)
        for connection in self._connections:
            if connection.is_writing and may_write:
                connection.heard_at = now
            if connection.ended_at is None and connection.is_over:
                connection.record_end()
        if now - self._alive_at > min(5.0, self._job.lost_after / 3):
            self._alive_at = now
            for connection in self._connections:
                connection.send()


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


class _Screens:
    """Standard output and error, to which a thread for each stream of a host writes, since a terminal may be stopped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failed: set[int] = set()
        """The screens with an error."""
        self.is_closed = False
        """True if the reader of standard output has ended, as in `accel launch | head`."""
        self._began_at = float("inf")

    @property
    def is_stopped(self) -> bool:
        """True if a write has not ended for some time."""
        return time.monotonic() - self._began_at > _STOPPED_S

    def write(self, fd: int, data: bytes) -> None:
        """Write data, or drop it after an error."""
        with self._lock:
            self._began_at = time.monotonic()
            try:
                if fd not in self._failed:
                    write_all(fd, data)
            except BrokenPipeError:
                self._failed.add(fd)
                self.is_closed = self.is_closed or fd == 1
            except OSError as error:
                self._failed.add(fd)
                console.note(
                    f"output is no longer shown: {error.strerror}. The logs on the hosts have all of it."
                )
            finally:
                self._began_at = float("inf")


class _Connection:
    """The ssh process of one host, and the state that the host has reported."""

    def __init__(
        self,
        host: Host,
        command: Sequence[str],
        number: int,
        screens: _Screens,
        *,
        prefixed: bool,
    ) -> None:
        self.host, self.number, self._screens = host, number, screens
        self.facts: Mapping[str, Any] | None = None
        """The description of the host; None until Python has started there."""
        self.problem: str | None = None
        """The reply to the last check; empty if the host passed it."""
        self.is_started = False
        """True once the host was to start `accel launch`."""
        self.is_up = False
        """True once `accel launch` has given a sign of life: it imports torch before."""
        self.exit: NodeEnd | None = None
        """The end of `accel launch`; None until it has ended."""
        self.ended_at: float | None = None
        self.heard_at = time.monotonic()
        """The time of the last output or sign of life, received or shown."""
        self.is_silent = False
        """True if the host gave no sign of life for `lost_after` seconds."""
        self.messages: list[str] = []
        """The last lines of ssh, of the login shell, and of the standard error of `accel launch`."""
        self._code: int | None = None
        self._reason = ""
        self.is_closing = False
        """True if `accel launch` has ended, or its output."""
        self._writing = [False, False]
        self._replies = control.ReplyReader()
        # In its own session, so that Ctrl-C of the terminal does not end the connection.
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._readers = []
        for screen, stream in ((1, self.process.stdout), (2, self.process.stderr)):
            prefixer = LinePrefixer(
                number,
                coloured=console.use_color() and os.isatty(screen),
                progress_bars=number == 0,
                label=host.name,
            )
            arguments = screen, stream, prefixer if prefixed else None
            self._readers.append(threading.Thread(target=self._read, args=arguments, daemon=True))
            self._readers[-1].start()

    @property
    def is_lost(self) -> bool:
        """True if the connection ended before `accel launch`."""
        return self.ended_at is not None and self.exit is None

    @property
    def failed(self) -> bool:
        """True if `accel launch` failed, or the connection is lost."""
        return self.is_lost or bool(self.exit and self.exit.code)

    @property
    def is_read(self) -> bool:
        """True if a stream is open, or its output waits for a screen."""
        return any(reader.is_alive() for reader in self._readers)

    @property
    def is_over(self) -> bool:
        """True if nothing more is read: processes that a login shell has started may keep the connection open."""
        return not self.is_read or (self.is_closing and time.monotonic() > self.heard_at + _EXIT_S)

    @property
    def is_writing(self) -> bool:
        """True if output waits for a screen."""
        return any(self._writing)

    def send(self, **request: Any) -> None:
        """Send a request to the host; without one, show that the launcher is alive."""
        assert self.process.stdin
        if self.ended_at is not None:
            return
        with suppress(OSError):  # the connection is lost, which is noticed when its output ends
            self.process.stdin.write(json.dumps(request).encode("ascii") + b"\n")
            self.process.stdin.flush()

    def _read(self, screen: int, stream: IO[bytes], prefixer: LinePrefixer | None) -> None:
        """Copy a stream of ssh to a screen until it ends, or until the connection is closed."""
        receive = self._receive_output if screen == 1 else self._receive_messages
        poll = select.poll()  # unlike `select`, without a limit on descriptors
        poll.register(stream, select.POLLIN)
        with stream:
            while self.ended_at is None:
                output, is_ready = b"", bool(poll.poll(_READ_MS))
                if is_ready and not (data := os.read(stream.fileno(), _CHUNK)):
                    break
                if is_ready:
                    self.heard_at = time.monotonic()
                    output = prefixer.feed(receive(data)) if prefixer else receive(data)
                if prefixer:
                    output += prefixer.flush_partial()
                if output:
                    self._write(screen, output)
                    if prefixer:
                        prefixer.postpone()  # the write may have waited
            if prefixer:
                self._write(screen, prefixer.flush_partial(end=True))
        if screen == 1:
            self.heard_at, self.is_closing = time.monotonic(), True

    def _write(self, screen: int, data: bytes) -> None:
        """Write to a screen, which may block."""
        self._writing[screen - 1] = True
        self._screens.write(screen, data)
        # First the time: without it, the connection could end before the next output is read.
        self.heard_at = time.monotonic()
        self._writing[screen - 1] = False

    def _receive_output(self, data: bytes) -> bytes:
        """Take the replies out of standard output; a login shell prints before the start."""
        output, replies = self._replies.feed(data)
        for reply in replies:
            self.facts = reply.get("host", self.facts)
            self.problem = reply.get("problem", self.problem)
            self._reason = self._reason or reply.get("reason", "")
            self.is_up = self.is_up or not reply
            if "exit" in reply:
                self._code, self.is_closing = reply["exit"], True
        return output if self.is_started else b""

    def _receive_messages(self, data: bytes) -> bytes:
        lines = [line for line in data.decode(errors="replace").splitlines() if line.strip()]
        self.messages = [*self.messages, *lines][-_KEPT_LINES:]
        return data if self.is_started else b""

    def record_end(self) -> None:
        """Record the end of `accel launch`, or that it is not known since the connection was lost."""
        code = self._code
        if code is None and self.is_over and self.is_started:
            code = self._wait()
            # As for a host that ends before it can report.
            if not 0 <= code < _SSH_FAILED:
                code = 1 if self._reason else None
        if code is not None:
            self.exit = NodeEnd(code, self._reason)
        self.ended_at = time.monotonic()
        with suppress(OSError):
            self.process.stdin.close()  # type: ignore[union-attr]
        if code is None and self.facts:
            self.process.kill()

    def close(self) -> None:
        """End the connection: the host then ends its processes."""
        with suppress(OSError):
            self.process.stdin.close()  # type: ignore[union-attr]
        self.process.kill()
        self.process.wait()

    def _wait(self) -> int:
        """Wait until ssh has exited, and return its exit code."""
        try:
            return self.process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def describe_end(self, python: str) -> str:
        """Return why the connection ended, with the cure."""
        code, destination = self._wait(), self.host.destination
        line = self.messages[-1] if self.messages else ""
        if self.is_started and not _SSH_LINE.match(line):
            line = ""  # of the script
        if self.is_silent:
            line = f"no sign of life within {'launcher.lost_after' if self.is_up else f'{_STARTUP_S} s of the start'}"
        if self.is_started and not line and code == _SSH_FAILED:
            # sshd does not report a signal that has ended the command.
            return "accel launch was killed there, or the connection was lost. Check the memory of the host, and the network"
        line = line or f"ssh ended with exit code {code}"
        if self.facts:
            return f"the connection was lost: {line.rstrip('.')}. Check the host and the network"
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
