"""Count the exchanges of the ranks."""

from __future__ import annotations

from collections.abc import Callable

from accel_runtime.collectives.handshake import Handshake

__all__ = ["record_exchanges"]


def record_exchanges(function: Callable[[], object]) -> list[tuple[int, bool]]:
    """Call a function; return the size of what this rank sends in each exchange, and whether all ranks receive it."""
    sizes, exchange = [], Handshake.exchange

    def record(self, call, size=0, *args, **options):
        sizes.append((size, not options.get("to_first")))
        return exchange(self, call, size, *args, **options)

    Handshake.exchange = record
    try:
        function()
    finally:
        Handshake.exchange = exchange
    return sizes
