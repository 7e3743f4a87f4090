"""Replicas of torch_xla: TPU cores, or its CPU device."""
