"""Replicas of torch_xla: TPU cores, or its CPU device."""

__all__ = ["ROUNDING"]

ROUNDING = ("XLA_USE_BF16", "XLA_DOWNCAST_BF16", "XLA_USE_F16", "XLA_DOWNCAST_FP16")
"""Variables that make torch_xla compute in another dtype than the script's; launcher and runtime reject them."""
