"""Reading of the files of a run, which another user or a damaged disk may have written: regular files only, up to a size."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

from accel_runtime.environment.text import decode_text, parse_json

__all__ = [
    "MAX_LINES_SIZE",
    "LineReader",
    "open_file",
    "read_bytes",
    "read_json",
    "read_last_objects",
    "read_pid",
    "read_size",
    "read_text",
]

_MAX_FILE_SIZE = 16 << 20
"""The most bytes that are read of a file that is read at once."""
MAX_LINES_SIZE = 256 << 20
"""The most bytes that are read of a file that is read line by line."""
_MAX_LINE_SIZE = 1 << 20
"""The most bytes of a line."""
_TAIL = 1 << 16
"""The bytes at the end of a file in which the last objects are searched."""
MAX_PID = 2**31 - 1


def read_size(file: Path) -> int:
    """Return the size of a file in bytes; 0 if it does not exist."""
    try:
        return file.stat().st_size
    except OSError:
        return 0


@contextmanager
def open_file(file: Path) -> Iterator[FileIO]:
    """Open a regular file, or a link to one, for unbuffered reading.

    Raises:
        OSError: The file is missing or cannot be read, or is a pipe, a device or a folder.
    """
    try:
        # Without O_NONBLOCK, opening a named pipe would block.
        fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except ValueError:  # a null byte, or a character that no name of a file has
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(file)) from None
    with FileIO(fd, "rb") as opened:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(0, "not a regular file", str(file))
        yield opened


def read_bytes(file: Path, *, max_size: int = _MAX_FILE_SIZE, at_end: bool = False) -> bytes:
    """Read up to `max_size` bytes at the begin or the end of a file.

    Raises:
        OSError: As for `open_file`.
    """
    with open_file(file) as opened:
        if at_end:
            opened.seek(max(0, opened.seek(0, os.SEEK_END) - max_size))
        chunks, missing = [], max_size
        while missing and (chunk := opened.read(missing)):
            chunks.append(chunk)
            missing -= len(chunk)
        return b"".join(chunks)


def read_text(file: Path) -> str:
    """Read a text file; return an empty text if that fails."""
    try:
        return decode_text(read_bytes(file))
    except OSError:
        return ""


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        OSError: As for `open_file`.
        ValueError: The file has no JSON object.
    """
    value = parse_json(read_bytes(file))
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {type(value).__name__}")  # noqa: TRY004 - of the file's content
    return value


def read_pid(file: Path) -> int | None:
    """Read the id of a process; None without a file that contains one."""
    text = read_text(file)
    # Other digits, such as those of Arabic, are decimal too.
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(MAX_PID))
    return int(text) if is_number and int(text) <= MAX_PID else None


def read_last_objects(file: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the JSON objects in the lines at the end of a file; incomplete lines are left out."""
    try:
        data = read_bytes(file, max_size=_TAIL, at_end=True)
    except OSError:
        return
    lines = data.split(b"\n")
    for line in lines[1:] if len(data) == _TAIL else lines:
        try:
            value = parse_json(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value


class LineReader:
    """The JSON objects in the lines of a file, in order; `num_invalid` and `is_truncated` are known at the end.

    Args:
        file: A regular file.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self.num_invalid = 0
        """The lines that are no JSON objects; the last line counts only if it is complete."""
        self.is_truncated = False
        """True if the file is longer than what is read of it."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the objects.

        Raises:
            OSError: As for `open_file`.
        """
        for line in self._read_lines():
            try:
                value = parse_json(line)
            except ValueError:
                # The last line is incomplete while a process writes it, and after the process was killed.
                self.num_invalid += line.endswith(b"\n") and not line.isspace()
                continue
            if isinstance(value, dict):
                yield value
            else:
                self.num_invalid += 1

    def _read_lines(self) -> Iterator[bytes]:
        with open_file(self._file) as opened, open(opened.fileno(), "rb", closefd=False) as lines:
            size = 0
            while line := lines.readline(_MAX_LINE_SIZE):
                size += len(line)
                if size > MAX_LINES_SIZE:
                    self.is_truncated = True
                    return
                yield line
