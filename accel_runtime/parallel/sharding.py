"""torch's `fully_shard`, called as the settings say."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from accel_runtime.env import FullyShard
from accel_runtime.parallel.precision import apart, refuse_mixtures, within
from accel_runtime.parallel.wrapping import Units

__all__ = ["Sharding", "ignored", "matches"]


@dataclass(frozen=True)
class Sharding:
    """How models are sharded."""

    mesh: DeviceMesh
    """`[shards]`, or `[copies, shards]`."""
    asked: FullyShard
    policy: MixedPrecisionPolicy
    whole: frozenset[nn.Parameter] = frozenset()
    """Parameters that are left as they are."""

    def plan(self, model: nn.Module, units: Units) -> list[tuple[str, nn.Module, MixedPrecisionPolicy]]:
        """Every module that is gathered by itself with its policy, those inside others first; the last is the model.

        Args:
            model: The script's model.
            units: What was chosen, those inside others first; the rest of the model is one more.

        Raises:
            ValueError: Parameters that would be gathered together have different dtypes.
        """
        exact, own = apart(model, self.policy, units, self.whole)
        refuse_mixtures(model, [*exact, *units], self.whole)
        inside = [(name, module, own) for name, module in exact]
        inside += [(name, module, within(self.policy)) for name, module in units]
        return [*inside, ("", model, self.policy)]

    def apply(self, model: nn.Module, units: Units) -> dict[str, MixedPrecisionPolicy]:
        """Shard a model in place.

        Args:
            model: The script's model.
            units: What is gathered as a whole, those inside others first; the rest of the model is one more.

        Returns:
            The policies of the modules that are gathered by themselves, by name; '' is the model.

        Raises:
            ValueError: Parameters that would be gathered together have different dtypes; a number of ranks to shard over
                after the forward pass that does not divide them.
        """
        offload = (
            CPUOffloadPolicy(pin_memory=self.mesh.device_type != "cpu")
            if self.asked.cpu_offload
            else OffloadPolicy()
        )
        plan = self.plan(model, units)
        for _, module, policy in plan:
            # The rest of the model is needed again at once when the backward pass begins.
            keep = module is model and bool(units)
            fully_shard(
                module,
                mesh=self.mesh,
                reshard_after_forward=False if keep else self.asked.reshard_after_forward,
                mp_policy=policy,
                offload_policy=offload,
                ignored_params=set(self.whole),
            )
        return {name: policy for name, _, policy in plan}


def ignored(model: nn.Module, patterns: Sequence[str]) -> set[nn.Parameter]:
    """The parameters that stay whole.

    Raises:
        ValueError: A pattern is no parameter's or module's name.
    """
    found: set[nn.Parameter] = set()
    for pattern in patterns:
        own = {
            parameter
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if any(matches(pattern, some) for some in _and_above(name))
        }
        if not own:
            raise ValueError(
                f"fully_shard.ignore: {pattern!r} is the name of no parameter and no module of {type(model).__name__}"
            )
        found |= own
    return found


def matches(pattern: str, name: str) -> bool:
    """Whether a name is what a pattern says, in which `*` stands for any text without a dot."""
    return re.fullmatch("[^.]*".join(map(re.escape, pattern.split("*"))), name) is not None


def _and_above(name: str) -> list[str]:
    """`a.b.c` is in `a.b`, which is in `a`."""
    parts = name.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]
