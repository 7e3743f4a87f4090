"""What accel costs beside bare torch, torchrun and Hugging Face Accelerate: `python -m benchmarks`."""
