"""Whether the kernel killed a process for memory: what the control group counts, and the kernel's own log."""

from __future__ import annotations

import os
import re
from pathlib import Path

__all__ = ["OomKillCounter"]

_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
_CGROUPS = Path("/sys/fs/cgroup")
_PLACES = (
    ("memory", "memory/{}/memory.oom_control"),
    ("", "{}/memory.events"),
    ("", "unified/{}/memory.events"),
)


class OomKillCounter:
    """Counts from here on."""

    def __init__(self, *, own: Path = Path("/proc/self/cgroup"), groups: Path = _CGROUPS) -> None:
        self._own, self._groups = own, groups
        self._before = self._count()

    def of(self, pid: int) -> bool:
        """Whether process `pid`, which a SIGKILL ended, is known to have been killed for memory."""
        return self._count() > self._before or _in_the_kernels_log(pid)

    def _count(self) -> int:
        """The kills in this process's control group, as far as they can be read."""
        return max(
            (int(found[1]) for file in self._files() if (found := _COUNT.search(_text(file)))), default=0
        )

    def _files(self) -> list[Path]:
        files = []
        for line in _text(self._own).splitlines():
            _, controllers, group = line.split(":", 2)
            for controller, place in _PLACES:
                if controller in controllers.split(","):
                    files += [self._groups / place.format(part) for part in {group.strip("/"), "."}]
        return files


def _in_the_kernels_log(pid: int) -> bool:
    try:
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    wanted = re.compile(rf"(Out of memory|[Oo]ut of memory): Killed process {pid} ".encode())
    try:
        while True:
            if wanted.search(os.read(log, 8192)):
                return True
    except OSError:  # nothing more to read, or not for us
        return False
    finally:
        os.close(log)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""
