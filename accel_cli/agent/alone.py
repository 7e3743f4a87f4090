"""The meeting of a machine with itself: one machine needs a store for its processes, and nobody to wait for."""

from __future__ import annotations

import socket

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from typing_extensions import override

__all__ = ["Alone"]


class Alone(RendezvousHandler):
    """Rank 0 of 1, at once; every attempt has a store of its own, so none meets the keys of the one before.

    torch's c10d rendezvous would first wait up to 0.3 s for the others, by design, and its store listens
    on every address of the machine.
    """

    def __init__(self, run_id: str, address: str) -> None:
        self._run_id = run_id
        self._address = address

    @property
    @override
    def use_agent_store(self) -> bool:
        return True

    @override
    def get_backend(self) -> str:
        return "alone"

    @override
    def get_run_id(self) -> str:
        return self._run_id

    @override
    def next_rendezvous(self) -> RendezvousInfo:
        listener = socket.create_server((self._address, 0), backlog=socket.SOMAXCONN)
        port = listener.getsockname()[1]
        store = TCPStore(
            self._address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(self._address, port))

    @override
    def is_closed(self) -> bool:
        return False

    @override
    def set_closed(self) -> None:
        """Nobody else would be told."""

    @override
    def num_nodes_waiting(self) -> int:
        return 0

    @override
    def shutdown(self) -> bool:
        return True
