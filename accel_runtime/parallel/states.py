"""The state of optimizers of sharded parameters: what is loaded whole is divided as the parameters are."""

from __future__ import annotations

import torch

from accel_runtime.parallel.boxes import part_of

__all__ = ["divide_loaded"]


def divide_loaded(optimizer: torch.optim.Optimizer) -> None:
    """From now on, divide what is loaded into an optimizer from a state whose tensors are whole, as of a plain run."""
    optimizer.register_load_state_dict_post_hook(_divided)


def _divided(optimizer: torch.optim.Optimizer) -> None:
    for parameter, state in optimizer.state.items():
        if hasattr(parameter, "device_mesh"):
            for key, value in state.items():
                whole = isinstance(value, torch.Tensor) and not hasattr(value, "device_mesh")
                if whole and value.dim() and value.shape == parameter.shape:
                    state[key] = part_of(value, parameter, key)
