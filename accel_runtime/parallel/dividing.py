"""A model divided among processes: layers first, then what computes them, then parameters; and what came out is checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from accel_runtime.env import Settings
from accel_runtime.parallel import activations
from accel_runtime.parallel.mesh import Mesh
from accel_runtime.parallel.precision import policy_of
from accel_runtime.parallel.sharding import Sharding, ignored
from accel_runtime.parallel.styles import divided_dimensions
from accel_runtime.parallel.tensor import Division, divide, plan_of
from accel_runtime.parallel.verifying import Wanted, expected, verify
from accel_runtime.parallel.wrapping import Units, units_of
from accel_runtime.precision import FORMATS

__all__ = ["Divided", "Dividing"]


@dataclass(frozen=True)
class Divided:
    """What there is to know of a model that was divided."""

    gathered: Sequence[FSDPModule]
    """The modules that `fully_shard` was applied to."""
    whole: Sequence[tuple[str, nn.Parameter]]
    """The parameters that were to stay whole, by name."""


class Dividing:
    """Divides models as the settings say.

    Args:
        mesh: The processes.
        settings: What the launcher and the script said.
        device: What this process computes on.
    """

    def __init__(self, mesh: Mesh, settings: Settings, device: torch.device) -> None:
        self._mesh, self._device = mesh, device
        self._parallel, self._asked = settings.parallel, settings.fully_shard
        self._computes_in = FORMATS[settings.mixed_precision].dtype

    def apply(self, model: nn.Module) -> Divided:
        """Divide a model in place.

        Args:
            model: The script's model, with the same values on every process, or on the meta device.

        Raises:
            ValueError: It cannot be divided as it was asked for.
            RuntimeError: What came out is not what was asked for.
        """
        asked, averages = self._asked, self._mesh.sizes.averages
        units = units_of(model, asked.wrap)
        whole = ignored(model, asked.ignore) if averages else set()
        parameters = expected(model, whole, shards=averages)
        plan = plan_of(model, self._parallel.tp_plan) if self._mesh.tp is not None else ()
        again = [name for name, _ in activations.chosen(units)] if asked.activation_checkpointing else []
        if again:
            activations.apply(model, units)
        if self._mesh.tp is not None:
            divide(model, self._mesh.tp, plan)
        policies = self._shard(model, units, whole) if averages else {}
        self._bring(model, whole, all_of_it=not averages)
        wanted = Wanted(
            parameters,
            self._mesh.shard if averages else None,
            policies,
            offload=averages and asked.cpu_offload,
            again=tuple(again),
            layers=_dimensions(model, plan),
        )
        verify(model, wanted)
        gathered = [module for module in model.modules() if isinstance(module, FSDPModule)]
        return Divided(gathered, [named for named in model.named_parameters() if named[1] in whole])

    def _shard(
        self, model: nn.Module, units: Units, whole: set[nn.Parameter]
    ) -> dict[str, MixedPrecisionPolicy]:
        """Shard the parameters; the policies of the modules that are gathered by themselves."""
        policy = policy_of(self._asked, self._computes_in, model.parameters())
        return Sharding(self._mesh.shard, self._asked, policy, frozenset(whole)).apply(model, units)

    def _bring(self, model: nn.Module, whole: set[nn.Parameter], *, all_of_it: bool) -> None:
        """Bring to the device what `fully_shard` leaves where it is."""
        # Not `model.to`: it swaps what is divided for copies, and hooks on their gradients stay with the old.
        for tensor in [*model.parameters(), *model.buffers()] if all_of_it else whole:
            if not (tensor.is_meta or hasattr(tensor, "device_mesh")):
                tensor.data = tensor.data.to(self._device)


def _dimensions(model: nn.Module, plan: tuple[Division, ...]) -> dict[str, frozenset[str]]:
    return {
        part.name: frozenset(divided_dimensions(model.get_submodule(part.name), part.style)) for part in plan
    }
