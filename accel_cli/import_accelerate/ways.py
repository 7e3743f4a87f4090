"""How the training types of Accelerate run in accel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["NO_DEVICE", "WAYS", "Way"]


@dataclass(frozen=True)
class Way:
    """How a `distributed_type` runs in accel."""

    kind: str
    device: str = "auto"
    engine: str = ""
    """What else it asks for, that accel has not yet."""
    divides: str = ""
    """The section of the file that says how models are sharded; empty where they are not."""
    tpu: bool = False
    """Whether it is for a TPU, whose machines know each other and whose devices are not counted."""

    @property
    def several(self) -> bool:
        """Whether there may be more than one process."""
        return self.kind != "single"


WAYS: Mapping[str, Way] = {
    "NO": Way("single"),
    "MPS": Way("single", "mps"),  # of early releases
    "MULTI_CPU": Way("torchrun", "cpu"),
    "MULTI_GPU": Way("torchrun", "cuda"),
    "MULTI_XPU": Way("torchrun", "xpu"),
    "FSDP": Way("torchrun", divides="fsdp_config"),
    "DEEPSPEED": Way("torchrun", divides="deepspeed_config"),
    "MEGATRON_LM": Way("torchrun", engine="Megatron-LM"),
    "XLA": Way("xla", "xla", tpu=True),
    "TPU": Way("xla", "xla", tpu=True),  # of early releases
}
"""By `distributed_type`."""
NO_DEVICE = ("MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_HPU", "MULTI_NEURON")
"""Each asks for a device that accel does not know."""
