"""Child process of the launcher that prints the accelerators that torch finds as one line of JSON."""

from __future__ import annotations

import json
import sys

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    # Remove the working folder, which `python -m` puts first: torch must not import modules from it.
    del sys.path[0]

import torch

__all__ = ["probe"]


def probe() -> dict[str, object]:
    """Return the accelerators that torch finds: kind, names, ROCm, bfloat16 support, and torch's version."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return {"accelerator": None, "devices": [], "bf16": False, "torch": torch.__version__}
    module = torch.get_device_module(accelerator.type)
    count = torch.accelerator.device_count()
    name = getattr(module, "get_device_name", lambda _: accelerator.type)
    bf16 = getattr(module, "is_bf16_supported", lambda: False)
    return {
        "accelerator": accelerator.type,
        "devices": [name(index) for index in range(count)],
        "rocm": torch.version.hip is not None,
        "bf16": bool(bf16()),
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    print(json.dumps(probe()))
