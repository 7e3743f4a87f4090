"""SageMaker's data-parallel library, a backend of torch's process group."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["Smddp"]

_MODULE = "smdistributed.dataparallel.torch.torch_smddp"


class Smddp:
    """The library in the table of process group libraries."""

    package = "smdistributed"

    @staticmethod
    def register(device: torch.device) -> None:
        """Import the library, which registers itself with torch."""
        if device.type != "cuda":
            raise RuntimeError(
                f"process_group_backend smddp needs NVIDIA GPUs, but the device is {device.type}. Set process_group_backend to auto."
            )
        try:
            importlib.import_module(_MODULE)
        except ImportError as error:
            raise RuntimeError(
                f"process_group_backend smddp needs {_MODULE}, which cannot be imported here ({error}). Images of "
                "SageMaker bring it for some releases of PyTorch, and it runs on ml.p4d.24xlarge and ml.p4de.24xlarge: choose "
                "such an image (launcher.image_uri), or set process_group_backend to auto, which is nccl."
            ) from error
