"""Time limits of the tests, and functions that wait: for a condition, or for the output of a process.

A limit guards against hanging. It is reached only by a failure, so that it can be generous: `TEST_TIME_SCALE` is the number
of times that a machine may be slower than the one on which the seconds in the tests were chosen.
"""

from __future__ import annotations

import os
import re
import threading
import time
from pathlib import Path

SCALE = float(os.environ.get("TEST_TIME_SCALE", "4"))
LONGEST_S = 840
"""The longest limit: below the 15 minutes after which pytest ends a worker, so that the error names what did not happen."""
INTERVAL_S = 0.01
WAIT_FOR_SIGNAL = "while True:\n    time.sleep(0.1)\n"
"""The end of a script that handles signals in Python, as it does SIGINT.

Not one long sleep: the handler of a signal that arrives as a sleep begins runs after it.
"""


def limit(seconds):
    """Return a time limit for this machine, in seconds."""
    return min(seconds * SCALE, LONGEST_S)


def wait_until(condition, seconds=30, description=None, *, process=None):
    """Wait until a condition holds, and return its value.

    Args:
        condition: A function that returns a true value once the condition holds.
        seconds: The limit before it is scaled.
        description: The condition in words, or a function that returns them, for the error.
        process: A process that has to run meanwhile; its end is an error at once.

    Raises:
        AssertionError: The limit is reached, or the process has ended.
    """
    deadline = time.monotonic() + limit(seconds)
    while not (value := condition()):
        assert time.monotonic() < deadline, (
            f"not within {limit(seconds):g} s: {_describe(condition, description)}"
        )
        assert process is None or process.poll() is None, (
            f"the process ended with code {process.returncode} before: {_describe(condition, description)}"
        )
        time.sleep(INTERVAL_S)
    return value


def wait_for_texts(folder, pattern, count, seconds=30, description=None):
    """Wait until a number of files hold text, and return their texts in the order of their names.

    A file exists before its text does: a test that reads a file that a script writes waits for the text.
    """

    def read_texts():
        texts = [path.read_text() for path in sorted(Path(folder).glob(pattern))]
        return texts if len(texts) == count and all(texts) else None

    return wait_until(read_texts, seconds, description)


def read_until(process, pattern, text="", *, stream=None, seconds=120):
    """Read lines of a process until a regular expression matches the text, and return the text.

    Args:
        process: The process; it is killed when the limit is reached.
        pattern: The regular expression, which may match several lines.
        text: The text read before, which is searched and returned too.
        stream: The stream to read, by default stdout.
        seconds: The limit before it is scaled.

    Raises:
        AssertionError: The stream ends before; the message is the text.
    """
    timer = threading.Timer(limit(seconds), process.kill)
    timer.start()
    try:
        while not re.search(pattern, text):
            line = (stream or process.stdout).readline()
            assert line, f"no {pattern!r} in the output: {text}"
            text += line
    finally:
        timer.cancel()
    return text


def _describe(condition, description):
    if description is None:
        code = getattr(condition, "__code__", None)
        place = f" at {Path(code.co_filename).name}:{code.co_firstlineno}" if code else ""
        return f"{getattr(condition, '__qualname__', repr(condition))}{place}"
    return description() if callable(description) else description
