"""What ranks that cannot reach each other any more still tell each other: where each one waits."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable
from typing import Any

from accel_runtime.backends.detached import build_refusal
from accel_runtime.exchange.agreement import SilenceError

__all__ = ["News"]

_PATIENCE_S = 2.0


class News:
    """The news of one wire, in the store through which its ranks met.

    Args:
        store: A `torch.distributed.Store` of this wire alone.
        rank: Of this process.
        size: How many there are.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._lost: RuntimeError | None = None
        _refuse_in_children(self)

    def check(self) -> None:
        """Raise what was raised before: a wire that has broken stays broken. In a forked process, raise always."""
        if self._lost:
            raise self._lost

    def lost(self, where: str, let_go: Callable[[], object], *, timed_out: bool) -> SilenceError:
        """Tell the others where this rank is, let go of them so that they see it, and hear where they are."""
        mine = ("T" if timed_out else "L") + where
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{self._rank}", mine)
        with contextlib.suppress(RuntimeError, OSError):
            let_go()
        news = {self._rank: mine} | self._others()
        timed_out = any(text[0] == "T" for text in news.values())
        error = SilenceError({rank: text[1:] for rank, text in news.items()}, timed_out=timed_out)
        self._lost = error
        return error

    def _others(self) -> dict[int, str]:
        """What the ranks have left in the store; those who can do so do it soon."""
        news: dict[int, str] = {}
        deadline = time.monotonic() + _PATIENCE_S
        with contextlib.suppress(RuntimeError):
            while len(news) < self._size and time.monotonic() < deadline:
                for rank in range(self._size):
                    if rank not in news and self._store.check([f"{rank}"]):
                        news[rank] = self._store.get(f"{rank}").decode()
                time.sleep(0.05)
        return news


def _refuse_in_children(news: News) -> None:
    """Make forked processes refuse the wire: its connections, and that of the store, are those of the rank."""
    reference = weakref.ref(news)

    def refuse() -> None:
        if (inherited := reference()) is not None:
            inherited._lost = build_refusal(f"this process was forked from rank {inherited._rank}")  # noqa: SLF001 - its own

    os.register_at_fork(after_in_child=refuse)
