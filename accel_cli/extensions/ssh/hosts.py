"""Hosts of a launch over ssh: entries such as `user@host slots=4`, and hostfiles."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from accel_cli.errors import UsageError
from accel_cli.launchers.sections import ItemError

__all__ = ["Host", "check_hosts", "parse_host", "read_hostfile"]

_NAME = re.compile(r"\w[\w.%-]*")
_USER = re.compile(r"\w[\w.\\+-]*\$?")
_SLOTS = re.compile(r"slots=([1-9]\d{0,4})")
_PYTHON = re.compile(r"python=([^\s~$,]+)")
_IGNORED = re.compile(r"max[_-]slots=\d+")
"""A limit of Open MPI on processes beyond the slots, which are never started here."""


@dataclass(frozen=True)
class Host:
    """A host, as given to ssh."""

    destination: str
    """`host` or `user@host`; the host is a name, an address, or an alias of the ssh configuration."""
    slots: int | None = None
    """The number of processes that it runs; None if the entry does not limit it."""
    python: str | None = None
    """Its Python with accel; None takes that of the other hosts."""

    @property
    def name(self) -> str:
        """The destination without the user."""
        return self.destination.rpartition("@")[2]


def parse_host(text: str) -> Host:
    """Return the host of an entry `host`, with `slots=N` and `python=PATH` after it or not.

    Raises:
        ValueError: The entry has another form.
    """
    destination, *words = text.split() or [""]
    user, at, typed_name = destination.rpartition("@")
    name = _parse_name(typed_name)
    if name is None or (at and not _USER.fullmatch(user)):
        raise ItemError(
            "expected a host such as node1, user@node1 or an IP address, with slots=N after it or not (a port belongs in "
            "~/.ssh/config)",
            repr(text),
        )
    slots = python = None
    for word in words:
        if match := _SLOTS.fullmatch(word):
            if slots is not None:
                raise ItemError("expected slots=N once after the host", repr(text))
            slots = int(match[1])
        elif (match := _PYTHON.fullmatch(word)) and python is None:
            python = match[1]
        elif not _IGNORED.fullmatch(word):
            raise ItemError("expected slots=N or python=PATH after the host", f"{word!r} in {text!r}")
    return Host(f"{user}{at}{name}", slots, python)


def _parse_name(name: str) -> str | None:
    """Return a name or address in the form that ssh takes; None if it is neither."""
    if ":" in name:
        address = name.removeprefix("[").removesuffix("]")
        try:
            ipaddress.IPv6Address(address)
        except ValueError:
            return None
        return address
    return name if _NAME.fullmatch(name) else None


def check_hosts(hosts: Sequence[Host]) -> None:
    """Raise ValueError if hosts are missing, or one is listed twice."""
    if not hosts:
        raise ValueError("expected at least one host")
    names = [host.name.casefold() for host in hosts]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(
            f"{repeated} is listed twice: each host runs one launcher; use slots=N for several processes"
        )


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Return the hosts of a file with an entry `host slots=N` on each line; text after `#` is a comment.

    Raises:
        UsageError: The file cannot be read, or a line has another form.
    """
    try:
        text = path.expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise UsageError(
            f"Cannot read the hostfile {path}: {reason}. Check launcher.hostfile or --hostfile."
        ) from None
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        entry = line.partition("#")[0].strip()
        try:
            hosts += [parse_host(entry)] if entry else []
        except ValueError as error:
            raise UsageError(f"Invalid hostfile {path}, line {number}: {error}. Correct the line.") from None
    try:
        check_hosts(hosts)
    except ValueError as error:
        raise UsageError(f"Invalid hostfile {path}: {error}. Correct the file.") from None
    return tuple(hosts)
