"""The same done to many things by a few threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

__all__ = ["spread"]

_T = TypeVar("_T")
_R = TypeVar("_R")
_MOST = 4


def spread(act: Callable[[_T], _R], items: Iterable[_T]) -> list[_R]:
    """Call `act` for every item, in a few threads: files are written, read and hashed without the interpreter's lock.

    The pools of `concurrent.futures` refuse work from the moment the main thread is at its end, which is when a save
    in the background may still be under way.

    Returns:
        What the calls returned, in the order of the items.

    Raises:
        BaseException: What the first call that failed raised, once those under way have ended.
    """
    waiting = list(enumerate(items))[::-1]
    found: dict[int, _R] = {}
    errors: list[BaseException] = []

    def work() -> None:
        while waiting and not errors:
            try:
                number, item = waiting.pop()
            except IndexError:  # another thread has taken the last
                return
            try:
                found[number] = act(item)
            except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                errors.append(error)

    count = min(_MOST, os.cpu_count() or 1, len(waiting))
    threads = [threading.Thread(target=work, name="accel-checkpoint") for _ in range(count - 1)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [found[number] for number in sorted(found)]
