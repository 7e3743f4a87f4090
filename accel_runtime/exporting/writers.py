"""What one process of all, or of each machine, writes for the others: all of them go on when it is there, or none does."""

from __future__ import annotations

from collections.abc import Callable

from accel_runtime.backends.base import Backend
from accel_runtime.checkpoint.errors import CheckpointError
from accel_runtime.exchange.objects import share_objects
from accel_runtime.topology import Topology
from accel_runtime.turns import word_of

__all__ = ["writes", "written"]

_DONE = "done"


def writes(topology: Topology, *, each_machine: bool) -> bool:
    """Whether this rank writes for the others: the first of all, or of each machine."""
    return (topology.local_rank if each_machine else topology.rank) == 0


def written(what: str, write: Callable[[], None], backend: Backend, *, each_machine: bool) -> None:
    """Let the first rank, or the first of each machine, write; return on every rank when all have.

    The others wait on the store and in no collective, so writing may take longer than a collective may.

    Args:
        what: The call, for messages. All ranks have to make it.
        write: Writes.
        backend: Carries the word.
        each_machine: Whether the first rank of each machine writes, and not only the first of all.

    Raises:
        CheckpointError: It raised this on some rank, or something else on another one; every rank raises.
        MismatchError: The ranks do not all call this.
    """
    topology = backend.topology
    mine = writes(topology, each_machine=each_machine)
    writers = [rank for rank, does in enumerate(share_objects(what, mine, backend.agreement)) if does]
    key = f"accel/{what}/{backend.turn(f'accel/{what}')}"
    if mine:
        _report(write, lambda word: backend.post(f"{key}/{topology.rank}", word))
    said = {rank: word_of(backend, rank, f"{key}/{rank}", None) for rank in writers}
    _judge(what, said, topology.world_size)


def _report(write: Callable[[], None], post: Callable[[str], None]) -> None:
    try:
        write()
    except CheckpointError as error:
        post(str(error))
    except BaseException as error:
        post(f"{type(error).__name__}: {error}")
        raise
    else:
        post(_DONE)


def _judge(what: str, said: dict[int, str], ranks: int) -> None:
    failed = {rank: word for rank, word in said.items() if word != _DONE}
    if not failed:
        return
    if ranks == 1:
        raise CheckpointError(failed[0])
    if len(set(failed.values())) == 1:
        who = f"rank{'s' if len(failed) > 1 else ''} {', '.join(map(str, failed))}"
        raise CheckpointError(f"{what} failed on {who}: {next(iter(failed.values()))}")
    lines = "".join(f"\n  rank {rank}: {word}" for rank, word in failed.items())
    raise CheckpointError(f"{what} failed:{lines}")
