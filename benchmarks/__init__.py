"""Measure accel compared with bare torch, torchrun and Hugging Face Accelerate: `python -m benchmarks`."""
