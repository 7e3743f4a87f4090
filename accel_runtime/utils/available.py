"""Whether a device, a number format or a package is there."""

from __future__ import annotations

import importlib.util

import torch

__all__ = [
    "is_bf16_available",
    "is_bnb_available",
    "is_cuda_available",
    "is_datasets_available",
    "is_deepspeed_available",
    "is_mps_available",
    "is_npu_available",
    "is_peft_available",
    "is_rich_available",
    "is_tensorboard_available",
    "is_torch_xla_available",
    "is_torchvision_available",
    "is_transformers_available",
    "is_wandb_available",
    "is_xpu_available",
]


def is_cuda_available() -> bool:
    """Whether torch finds a CUDA device."""
    return torch.cuda.is_available()


def is_mps_available() -> bool:
    """Whether torch finds Apple's GPU."""
    return torch.backends.mps.is_available()


def is_xpu_available() -> bool:
    """Whether torch finds an Intel GPU."""
    return torch.xpu.is_available()


def is_bf16_available() -> bool:
    """Whether the device computes in bf16; the CPU does."""
    return not torch.cuda.is_available() or torch.cuda.is_bf16_supported()


def is_datasets_available() -> bool:
    """Whether `datasets` is installed."""
    return _installed("datasets")


def is_peft_available() -> bool:
    """Whether `peft` is installed."""
    return _installed("peft")


def is_rich_available() -> bool:
    """Whether `rich` is installed."""
    return _installed("rich")


def is_tensorboard_available() -> bool:
    """Whether a package that writes for TensorBoard is installed."""
    return _installed("tensorboard") or _installed("tensorboardX")


def is_torchvision_available() -> bool:
    """Whether `torchvision` is installed."""
    return _installed("torchvision")


def is_transformers_available() -> bool:
    """Whether `transformers` is installed."""
    return _installed("transformers")


def is_wandb_available() -> bool:
    """Whether `wandb` is installed."""
    return _installed("wandb")


def is_bnb_available() -> bool:
    """Whether `bitsandbytes` is installed."""
    return _installed("bitsandbytes")


def is_deepspeed_available() -> bool:
    """Whether `deepspeed` is installed."""
    return _installed("deepspeed")


def is_npu_available() -> bool:
    """Whether `torch_npu` is installed."""
    return _installed("torch_npu")


def is_torch_xla_available() -> bool:
    """Whether `torch_xla` is installed."""
    return _installed("torch_xla")


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
