"""Run by the launcher as a child process: prints what torch finds on this machine, as one line of JSON."""

from __future__ import annotations

import json

import torch

__all__ = ["probe"]


def probe() -> dict[str, object]:
    """The accelerators torch finds: kind, names, if they are AMD's, if they compute in bfloat16, torch's version."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None:
        return {"accelerator": None, "devices": [], "bf16": False, "torch": torch.__version__}
    module = torch.get_device_module(found.type)
    count = torch.accelerator.device_count()
    name = getattr(module, "get_device_name", lambda _: found.type)
    bf16 = getattr(module, "is_bf16_supported", lambda: False)
    return {
        "accelerator": found.type,
        "devices": [name(index) for index in range(count)],
        "rocm": torch.version.hip is not None,
        "bf16": bool(bf16()),
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    print(json.dumps(probe()))
