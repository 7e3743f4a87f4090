"""The log of the kernel, read line by line."""

import os
from types import SimpleNamespace

import pytest

from accel_runtime.observe import kernel_log


class Log(SimpleNamespace):
    """What the module uses of `os`; each read has the next result."""

    O_RDONLY, O_NONBLOCK = os.O_RDONLY, os.O_NONBLOCK

    def open(self, path, _flags):
        if self.error:
            raise self.error
        return path

    def read(self, _log, _size):
        result = self.results.pop(0)
        if isinstance(result, OSError):
            raise result
        return result

    def close(self, log):
        self.closed = log


def test_lines_that_the_kernel_has_overwritten_are_left_out(monkeypatch):
    log = Log(results=[b"first", BrokenPipeError(), b"second", BlockingIOError()], error=None)
    monkeypatch.setattr(kernel_log, "os", log)
    assert list(kernel_log.read_kernel_log()) == [b"first", b"second"]
    assert log.closed == "/dev/kmsg"


def test_a_log_that_cannot_be_opened_is_an_error(monkeypatch):
    monkeypatch.setattr(kernel_log, "os", Log(error=PermissionError("refused")))
    with pytest.raises(PermissionError, match="refused"):
        list(kernel_log.read_kernel_log())
