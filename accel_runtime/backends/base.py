"""The verbs through which one process speaks to the others."""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import nn

from accel_runtime.data.source import Loop
from accel_runtime.env import MixedPrecision, Settings
from accel_runtime.exchange.agreement import Agreement, Wire, here
from accel_runtime.exchange.callsite import call_site
from accel_runtime.exchange.objects import share_objects
from accel_runtime.kinds import DistributedType
from accel_runtime.topology import DataPlace, Topology

if TYPE_CHECKING:
    from accel_runtime.backends.attendance import Absence
    from accel_runtime.data.loops import Loops
    from accel_runtime.description import GroupFacts
    from accel_runtime.parallel.mesh import Mesh

__all__ = ["Backend", "Reduction"]

Reduction = Literal["sum", "mean", "max", "min"]

_LOG = logging.getLogger("accel_runtime.backends")


class Backend(ABC):
    """How processes talk. One process is a backend too, so nobody else needs to ask how many there are."""

    def __init__(self, topology: Topology, device: torch.device, wire: Wire) -> None:
        self.topology = topology
        """Where this process stands."""
        self.device = device
        """The hardware this process computes on."""
        self.data = DataPlace(topology.rank, topology.world_size)
        """Which part of every global batch this process has."""
        self.agreement = Agreement(wire, topology.rank, topology.world_size)
        """How the ranks see to it that they do the same."""
        self._warned_of_joining = False

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "Cannot pickle or copy an object that is connected to the other processes, such as a prepared DataLoader. Pickle its "
            "dataset, or the Accelerator."
        )

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Every rank's tensor, stacked: `[...]` becomes `[world_size, ...]`; shapes must be equal."""

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction) -> torch.Tensor:
        """A new tensor, combined over the ranks element by element."""

    @abstractmethod
    def begin_sum(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to add `tensor` up over the ranks, in place; what is returned waits for the sum and gives it."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """The tensor of rank `source`, written into `tensor` on every rank."""

    def all_gather_objects(self, item: Any, subject: str) -> list[Any]:
        """Every rank's picklable object, in rank order, from any line of the script.

        Args:
            item: This rank's object.
            subject: A name for the exchange, equal on all ranks; it takes the place of the line.

        Raises:
            MismatchError: The ranks called different collectives, or an object cannot be pickled.
        """
        return share_objects(f"all_gather_objects of {subject}", item, self.agreement)

    def broadcast_object(self, item: Any, subject: str, source: int = 0) -> Any:
        """The picklable object of rank `source`, from any line of the script.

        Args:
            item: The object; used on rank `source` only.
            subject: As for `all_gather_objects`.
            source: The rank whose object it is.

        Raises:
            MismatchError: As for `all_gather_objects`.
        """
        mine = item if self.topology.rank == source else None
        operation = f"broadcast_object of {subject} from rank {source}"
        return share_objects(operation, mine, self.agreement)[source]

    @abstractmethod
    def apart(self) -> Callable[[Any], list[Any]]:
        """A way to exchange objects that another thread may use while this one goes on: all ranks ask for it together.

        Every call of what is returned gives every rank's picklable object, in rank order.
        """

    def barrier(self) -> None:
        """Wait until every rank is here, whatever line it comes from.

        Raises:
            MismatchError: A rank is in another collective.
            StallError: A rank does not come.
        """
        self.agreement.exchange(here("wait_for_everyone", anywhere=True))

    def wait_for_ranks(self, operation: str) -> Absence | None:  # noqa: ARG002 - one process is all there is
        """Wait until all ranks make a call, or one is known never to make it; see `Attendance.wait`.

        Returns:
            None if all make it, and where it cannot be told.
        """
        return None

    def finish_without(self, absence: Absence, outcome: str) -> None:  # noqa: B027 - there is no absence
        """Tell other ranks that make a call what has come of it, where some do not make it."""

    def outcome_without(self, absence: Absence) -> str:
        """Return what the rank that leads such a call has told."""
        raise NotImplementedError

    def explain(self, error: RuntimeError, operation: str) -> RuntimeError:  # noqa: ARG002 - nothing is known
        """Return an error that tells where the other ranks are, if this one comes from a collective; else the same.

        Args:
            error: Raised by torch.
            operation: The call that raised it.
        """
        return error

    def set_sharding(self, settings: Settings) -> None:  # noqa: B027 - models are replicated
        """Shard models that are prepared from now on as these settings describe."""

    @property
    @abstractmethod
    def kind(self) -> DistributedType:
        """How the processes work together, as scripts ask for it."""

    @property
    @abstractmethod
    def name(self) -> str | None:
        """What carries the collectives of this device: `gloo`, `nccl`, ...; None where there is nobody else."""

    @abstractmethod
    def post(self, key: str, text: str) -> None:
        """Leave a word for the other ranks, under a key in the store they share. It waits for nobody."""

    @abstractmethod
    def posted(self, key: str) -> str | None:
        """The word some rank left under this key, or None while there is none."""

    @abstractmethod
    def turn(self, key: str) -> int:
        """How many times this rank has asked for this key, from 1: the same number on ranks in step."""

    @property
    def parts(self) -> int:
        """How many devices a batch of this process is cut over: its size has to be a multiple."""
        return 1

    def check(self, replication: dict[str, Any], mixed_precision: MixedPrecision) -> None:  # noqa: B027
        """Refuse what cannot be done here, before anything is.

        Args:
            replication: Fields of `DistributedDataParallelKwargs`.
            mixed_precision: The number format of the forward pass.

        Raises:
            ValueError: There is such a thing.
        """

    def after_step(self) -> Callable[[], None] | None:
        """What an optimizer calls when it has stepped; made for each. None where there is nothing to do."""
        return None

    static_shapes = False
    """Whether every new shape costs so much that the end of an epoch is completed, on one process too."""

    one_program = False
    """Whether all ranks have to record the same program, so that a number that differs between them has to be data."""

    loops: Loops | None = None
    """The loops over loaders of the Accelerator that uses this backend, for loaders that are prepared without it."""

    mesh: Mesh | None = None
    """The processes as a mesh, where models are divided among them."""

    divides = False
    """Whether models are divided among ranks, those that are never trained too, and other parameters take their places."""

    threads = False
    """Whether ranks are threads of one process, and have its random numbers in common: the first draws for all."""

    @property
    def repeats(self) -> bool:
        """Whether batches may hold samples twice, so that it is remembered which."""
        return self.static_shapes or self.data.world_size > 1

    @property
    def random(self) -> Any:
        """What has the device's own random numbers: `get_rng_state(device)`, `set_rng_state(state, device)`, `manual_seed`.

        States are tensors on the CPU.
        """
        return torch.get_device_module(self.device)

    def settle(self) -> None:  # noqa: B027 - devices that compute as they are told
        """Have everything computed that the script has asked for until now; all ranks together."""

    def hosted(self, state: Any) -> Any:
        """State as files take it: tensors of a device that shows nobody their memory are on the CPU.

        Those that are one tensor stay one. What is nested in dicts, lists and tuples is found.
        """
        return state

    def place(self, model: nn.Module) -> nn.Module:
        """The model, with its parameters and buffers on the device."""
        return model.to(self.device)

    def walked(
        self,
        walk: Callable[[Loop], Iterator[Any]],
        loop: Loop,
        *,
        place: bool,  # noqa: ARG002 - devices that compute as they are told
        loaded_beside: bool,  # noqa: ARG002
    ) -> Iterator[Any]:
        """The batches of a walk over a loader, as its loop is to see them.

        Args:
            walk: Walks, and says in the loop it is given where it stands.
            loop: Says where the batch handed out last stands.
            place: Whether batches may be brought to the device here; those that are not are brought there later.
            loaded_beside: Whether others load the batches, so that the next can be fetched before it is asked for.
        """
        return walk(loop)

    @abstractmethod
    def replicate(self, model: nn.Module, options: dict[str, Any]) -> nn.Module:
        """The model, made to average its gradients over the ranks."""

    @abstractmethod
    def original(self, model: nn.Module) -> nn.Module:
        """The module that `replicate` was given."""

    def wrapping(self, model: nn.Module) -> str:
        """What replicates a model, in a word; `none` where nothing does."""
        return "none" if self.original(model) is model else type(model).__name__

    def groups(
        self,
        model: nn.Module,  # noqa: ARG002 - whole here
        computes_in: torch.dtype | None,  # noqa: ARG002
    ) -> tuple[GroupFacts, ...]:
        """The parameters of a model by what is gathered together; empty where every rank has all of it.

        Args:
            model: As it came out of `replicate`.
            computes_in: What autocast computes in, if it does.
        """
        return ()

    @property
    def facts(self) -> dict[str, str]:
        """What the device's runtime has to say of itself, by title."""
        return {}

    @abstractmethod
    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Inside, backward passes of a replicated model keep their gradients to themselves."""

    def before_first_step(self, models: Sequence[nn.Module]) -> None:  # noqa: B027 - where models are whole, DDP sees to it
        """Refuse gradients that are not what they are to be, when an optimizer is to step for the first time.

        Raises:
            ValueError: They are not.
        """

    def watch_over(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: B027 - most have nothing to add
        """From now on, see to it that a state which is loaded lies as the parameters do."""

    def joined(self, models: list[Any]) -> AbstractContextManager[Any]:  # noqa: ARG002
        """Inside, the averaging of gradients does not wait for ranks that have no batches any more.

        A backend whose ranks all take part in each other's passes cannot do this, and warns once.
        """
        if not self._warned_of_joining:
            self._warned_of_joining = True
            _LOG.warning(
                "join_uneven_inputs() has no effect, at %s: every rank takes part in the forward and backward passes of the "
                "others here, so a rank without a batch would stop them. Give every rank as many batches, as prepared "
                "DataLoaders do.",
                call_site(contextlib.__file__),
            )
        return nullcontext()

    def replica(self, model: nn.Module) -> dict[str, Any]:  # noqa: ARG002 - what several have
        """What a replicated model remembers from step to step beside its state; all ranks ask together."""
        return {}

    def restore_replica(self, model: nn.Module, state: dict[str, Any]) -> None:  # noqa: B027
        """Go on from what `replica` gave, as far as it holds here."""

    @abstractmethod
    def leave(self) -> None:
        """Say that this backend is not used any more; its process group ends with its last user."""

    @abstractmethod
    def sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Inside, the next backward pass averages gradients, though its forward pass ran in `no_sync`."""
