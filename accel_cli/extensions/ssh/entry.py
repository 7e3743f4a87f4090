"""The process that ssh starts on each host: it describes and checks the host, and becomes `accel launch`.

Requests are lines of JSON on standard input, replies are those of `accel_cli/control.py`. Variables of the profile come as a
request, since command lines are visible to all users of a host.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from accel_cli import control
from accel_cli.launchers.node_launch import bind_rendezvous_port, find_problem
from accel_cli.planning import network
from accel_runtime.environment import settings as env

__all__ = ["main"]

_LOST_AFTER_S = 60
"""Seconds of silence before the start that end this process."""


def main() -> None:
    """Answer requests until the one that starts `accel launch`, or until the connection is lost."""
    signal.alarm(_LOST_AFTER_S)
    listener = bind_rendezvous_port()
    control.reply(host=_describe_host(listener))
    # Without a buffer: what follows the start is for `accel launch`.
    for line in open(0, "rb", buffering=0, closefd=False):  # noqa: SIM115 - until the end
        signal.alarm(_LOST_AFTER_S)
        request = json.loads(line)
        if folder := request.get("create"):
            control.reply(problem=_create_folder(folder))
        if check := request.get("check"):
            control.reply(problem=find_problem(check["folder"], check["script"]))
        if start := request.get("start"):
            signal.alarm(0)
            try:
                _become_launch(start, listener)
            except OSError as error:
                control.reply(reason=f"cannot start accel launch: {error.strerror or error}", exit=1)
                sys.exit(1)


def _describe_host(listener: socket.socket) -> dict[str, Any]:
    """Return the facts that the launcher needs to know before the start."""
    server = os.environ.get("SSH_CONNECTION", "").split()[2:3]
    return {
        "version": env.__version__,
        "address": server[0] if server else "",
        "own_address": network.find_own_address(),
        "port": listener.getsockname()[1],
    }


def _create_folder(folder: str) -> str:
    """Create a folder, and return why that failed."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"cannot create the folder {folder}: {error.strerror}"
    return ""


def _become_launch(start: Mapping[str, Any], listener: socket.socket) -> NoReturn:
    """Replace this process by `accel launch`, which reads the requests that follow from another descriptor."""
    requests = os.dup(0)
    os.set_inheritable(requests, True)
    # Standard input belongs to the script.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if start["merge"]:
        os.dup2(1, 2)
    variables = {env.CONTROL: f"{requests},{start['lost_after']}", env.FAILURE_FILE: control.REPLY}
    if start["serves_rendezvous"]:
        os.set_inheritable(listener.fileno(), True)
        variables[env.RDZV_SOCKET] = str(listener.fileno())
    os.chdir(start["folder"])
    os.execvpe(start["argv"][0], start["argv"], {**os.environ, **start["env"], **variables})
